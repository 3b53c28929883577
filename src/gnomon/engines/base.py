"""The engine's protocol, and the settings of sampling."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gnomon.core.errors import ConfigError
from gnomon.core.sections import SamplingConfig
from gnomon.core.types import Completion, Snapshot
from gnomon.models.transfer.fingerprint import Fingerprint


@dataclass(frozen=True)
class Sampling(SamplingConfig):
    """How tokens are drawn: a plan that was checked, with all token ids that end a completion as ``stop_ids``.

    Truncations apply in the order top-k, top-p, min-p, on the tempered distribution, as in vLLM and transformers. Every
    policy is scored at the temperature. A stop token counts towards the length, and is trained when sampled.

    Attributes:
        record_routing: Return which experts a mixture model chose, as ``Completion.routing``; nothing for a dense one.
        top_logprobs: Return that many of the likeliest tokens at each position, as ``Completion.top``; 0 returns all of
            the vocabulary, None nothing.
        tokenizer: Folder or name of the model whose tokens spell ``stop`` and ``grammar``; needed for these alone.
        trust_remote_code: Whether the code in that model's folder may run.
    """

    record_routing: bool = False
    top_logprobs: int | None = None
    tokenizer: str = ""
    trust_remote_code: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken each time, whatever top-p, top-k and min-p say."""
        return self.temperature == 0

    @property
    def is_truncated(self) -> bool:
        """Whether top-p, top-k or min-p cut the distribution, so that it differs from the policy's own."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True)
class ContextLimits:
    """How long prompts and completions may be, and which token ids exist.

    Attributes:
        context_length: Tokens of prompt and completion together; None without a limit.
        vocabulary_size: Width of the logits.
    """

    context_length: int | None
    vocabulary_size: int

    def check(self, prompt: Sequence[int], budget: int) -> None:
        """Refuse a prompt that no model can answer, or not within ``budget`` more tokens.

        Raises:
            ConfigError: The prompt is empty, has an unknown id, or exceeds the context with ``budget``.
        """
        if not prompt:
            raise ConfigError("cannot generate from an empty prompt: give at least a beginning-of-text token")
        self.check_ids("prompt", prompt)
        whole = len(prompt) + budget
        # The whole budget has to fit, so that no row can outgrow the context.
        if self.context_length is not None and whole > self.context_length:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens and max_completion_length = {budget} make {whole}, beyond the "
                f"model's context of {self.context_length}; shorten one of them"
            )

    def check_ids(self, what: str, ids: Sequence[int]) -> None:
        """Refuse ids outside the vocabulary.

        Raises:
            ConfigError: An id is outside the vocabulary.
        """
        if ids and (min(ids) < 0 or max(ids) >= self.vocabulary_size):
            raise ConfigError(
                f"the {what} has token ids from {min(ids)} to {max(ids)}, outside the model's vocabulary of "
                f"{self.vocabulary_size}: was it made with another model's tokenizer?"
            )


class Engine(Protocol):
    """Turns prompts into completions.

    Draws are counter-based: the token at position t of the answer with key k depends on (weights, prompt, sampling,
    k, t) and on nothing else up to floating-point rounding; batching and order do not change what is asked for.
    """

    @property
    def version(self) -> int:
        """Version of the weights that answer now; -1 before the first `load`."""

    @property
    def beats(self) -> int:
        """Signs of work so far: grows while tokens are drawn, so that a long answer is told from a hang.

        Constant where an engine cannot know; it then has to finish something in time.
        """

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Return one completion per key (128-bit integers from `sample_key`), in the order of ``keys``.

        Raises:
            EngineError: It cannot.
            ConfigError: Prompt and budget exceed the context.
        """

    async def score(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
        """Return the log-probability of each token of ``response`` after ``prompt``, by the weights that answer now.

        Tempered, without truncation: what `Completion.full_logprobs` would be, computed in this engine's arithmetic.
        It proves that new weights arrived, and tells the engine's rounding from everything else.
        """

    async def load(self, snapshot: Snapshot) -> None:
        """Answer with these weights from now on."""

    async def fingerprints(self) -> Mapping[str, Fingerprint] | None:
        """Return the snapshot's names with `fingerprint` of the weights that answer now, read where they are used.

        An engine that fuses, repacks or quantizes them cannot read them back: it returns those of the tensors that it
        took in with the last `load`, computed as late on their way as it can, and leaves out what it refused or
        skipped. An engine that casts returns the fingerprint after the cast. None: there is nothing to compare, since
        it answers with the learner's own module, or without weights.
        """

    async def close(self) -> None:
        """Free what it holds; later calls raise EngineError."""


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine with weights of its own that can release them while a learner works on the same devices."""

    async def sleep(self) -> None:
        """Release weights, keys and values as soon as no answer is on its way; `Engine.load` with all weights wakes it.

        Until then `generate`, `score` and `fingerprints` raise EngineError.
        """
