"""An engine whose answers come from a function: how users test their tasks and rewards without a model."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.types import Completion, Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.grammar import Grammar
from gnomon.engines.stop_strings import StopStrings
from gnomon.models.transfer.fingerprint import Fingerprint


def utf8(text: str) -> Sequence[int]:
    """Return the bytes of ``text``: the encoding of the byte tokenizer."""
    return list(text.encode())


@dataclass
class ScriptedEngine:
    """Answers each key with what ``answer`` says; implements `Engine`.

    An answer without a stop token or stop string ends with the first of ``sampling.stop_ids`` if there is one. It is
    cut at the first stop token, at the token that completes a stop string, and at ``max_completion_length``, where its
    stop reason becomes "length". Under a grammar, an answer that breaks it is another one that obeys it.

    Attributes:
        answer: (prompt ids, key) to a text or to token ids.
        encode: Text to ids; bytes unless given.
        logprob: Log-probability of every token, with and without truncation.
        latency_seconds: Until an answer is there, so that order can be tested; the same for all, or a function of
            prompt ids and key. A call returns with its slowest answer.
        context_length: Prompt and budget beyond it raise, as with a model; None is no limit.

    >>> import asyncio
    >>> engine = ScriptedEngine(lambda prompt, key: "4")
    >>> [answer] = asyncio.run(engine.generate([50, 43, 50], [0], Sampling(stop_ids=(257,))))
    >>> answer.tokens, answer.stop
    ((52, 257), 'stop')
    """

    answer: Callable[[tuple[int, ...], int], str | Sequence[int]]
    encode: Callable[[str], Sequence[int]] = utf8
    logprob: float = -0.1
    latency_seconds: float | Callable[[tuple[int, ...], int], float] = 0.0
    context_length: int | None = None
    version: int = field(default=-1, init=False)
    beats: int = field(default=0, init=False)
    _is_closed: bool = field(default=False, init=False, repr=False)

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Return one completion per key, in the order of ``keys``.

        Raises:
            ConfigError: Prompt and budget exceed the context, or a grammar cannot be used.
        """
        self._check_open()
        whole = len(prompt) + sampling.max_completion_length
        if self.context_length is not None and whole > self.context_length:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens and max_completion_length = {sampling.max_completion_length} "
                f"exceed the context of {self.context_length}"
            )
        # Weights may be loaded while the answer is waited for: the completion says both versions.
        oldest = self.version
        slowest = max((self._latency(tuple(prompt), key) for key in keys), default=0.0)
        if slowest > 0:
            await asyncio.sleep(slowest)
            self._check_open()
        return [self._complete(key, self.answer(tuple(prompt), key), sampling, oldest) for key in keys]

    async def score(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
        """Return ``logprob`` for each token of ``response``, at any temperature, as `generate` does."""
        self._check_open()
        return [self.logprob] * len(response)

    async def fingerprints(self) -> Mapping[str, Fingerprint] | None:
        """Return None: there are no weights."""
        self._check_open()
        return None

    async def load(self, snapshot: Snapshot) -> None:
        """Take on the snapshot's version; its weights change nothing here."""
        self._check_open()
        self.version = snapshot.version

    async def close(self) -> None:
        """Refuse later calls."""
        self._is_closed = True

    def _complete(self, key: int, answer: str | Sequence[int], sampling: Sampling, oldest: int) -> Completion:
        ids = list(self.encode(answer) if isinstance(answer, str) else answer)
        places = [place for place, token in enumerate(ids) if token in sampling.stop_ids][:1]
        strings = StopStrings.of(sampling)
        if strings is not None and (completed := strings.first(ids)) is not None:
            places.append(completed)
        # The stop token, or the token that completes the stop string, is a part of the answer.
        whole = ids[: min(places) + 1] if places else ids + list(sampling.stop_ids[:1])
        grammar = Grammar.of(sampling)
        if grammar is not None and grammar.obeyed(whole) < len(whole):
            whole = grammar.written(4 * key)  # of the seeds those that close soon
        tokens = tuple(whole[: sampling.max_completion_length])
        logprobs = (self.logprob,) * len(tokens)
        return Completion(
            tokens=tokens,
            logprobs=logprobs,
            full_logprobs=logprobs,
            oldest_version=oldest,
            newest_version=self.version,
            stop="stop" if len(tokens) == len(whole) else "length",
        )

    def _latency(self, prompt: tuple[int, ...], key: int) -> float:
        return self.latency_seconds if isinstance(self.latency_seconds, float) else self.latency_seconds(prompt, key)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed")
