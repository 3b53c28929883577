"""An engine of one's own: `generate` of transformers, which draws by the answer's key as every engine does.

gnomon train tiny engine=examples/own_engine.py:Generate steps=2
"""

import asyncio
import threading

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
)

from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.types import Completion, Snapshot
from gnomon.engines.base import ContextLimits, Sampling
from gnomon.engines.rng import uniforms
from gnomon.engines.sampler import draw
from gnomon.engines.stop_strings import StopStrings
from gnomon.models.reference import response_logprobs
from gnomon.models.transfer.fingerprint import fingerprint


class Keyed(LogitsProcessor):
    """Draws each token by its key's own number, notes its log-probabilities, and leaves `generate` no other choice."""

    def __init__(self, keys: list[int], sampling: Sampling) -> None:
        self.sampling, self.drawn = sampling, []
        self.numbers = torch.tensor(np.stack([uniforms(key, sampling.max_completion_length) for key in keys]))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return logits of which one token alone is left."""
        drawn = draw(scores, self.numbers[:, len(self.drawn)].to(scores.device), self.sampling)
        self.drawn.append(drawn)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn.tokens[:, None], 0.0)


class Generate:
    """Plain transformers, with weights of its own; has the protocol of `gnomon.engines.base.Engine`."""

    def __init__(self, model: str, dtype: torch.dtype, device: torch.device, max_concurrent: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
        self._model.generation_config = GenerationConfig()  # a folder's own would end and change answers
        config = self._model.config
        self._limits = ContextLimits(config.max_position_embeddings, config.vocab_size)
        self._max_concurrent, self._names, self._is_closed = max_concurrent, (), False
        self._lock = threading.Lock()  # weights do not change while an answer is drawn
        self.version, self.beats = -1, 0

    async def generate(self, prompt, keys, sampling) -> list[Completion]:
        """Return an answer for each key; rows of a prompt are computed together."""
        self._check_open()
        self._limits.check(prompt, sampling.max_completion_length)
        if sampling.grammar.is_set:  # gnomon.engines.grammar would say which tokens may come next
            raise ConfigError("this engine applies no grammar; leave sampling.grammar out")
        parts = [list(keys[n : n + self._max_concurrent]) for n in range(0, len(keys), self._max_concurrent)]
        return [done for part in parts for done in await asyncio.to_thread(self._answer, prompt, part, sampling)]

    async def score(self, prompt, response, temperature) -> list[float]:
        """Return the log-probability of each token of the response."""
        self._check_open()
        self._limits.check(prompt, len(response))
        self._limits.check_ids("response", response)
        return await asyncio.to_thread(self._locked, response_logprobs, self._model, prompt, response, temperature)

    async def load(self, snapshot: Snapshot) -> None:
        """Answer with these weights from now on."""
        self._check_open()
        await asyncio.to_thread(self._locked, self._take, snapshot)

    async def fingerprints(self):
        """Return what tells the weights that answer now from any other."""
        self._check_open()
        held = self._model.state_dict()
        return {name: fingerprint(held[name]) for name in self._names}

    async def close(self) -> None:
        """Refuse later calls."""
        self._is_closed = True

    def _locked(self, call, *arguments):
        with self._lock:
            return call(*arguments)

    @torch.no_grad()
    def _take(self, snapshot: Snapshot) -> None:
        held = self._model.state_dict()  # the live tensors
        self._names = [name for name, tensor in snapshot.tensors() if held[name].copy_(tensor) is not None]
        self.version = snapshot.version

    @torch.no_grad()
    def _answer(self, prompt, keys, sampling) -> list[Completion]:
        keyed, strings = Keyed(keys, sampling), StopStrings.of(sampling)

        def is_ended(input_ids, scores, **others):
            rows = input_ids[:, len(prompt) :].tolist()
            ended = [strings is not None and strings.are_completed_by(row) for row in rows]
            return torch.tensor(ended, device=ids.device)

        ids = torch.tensor([list(prompt)] * len(keys), device=self._model.device)
        asked = GenerationConfig(
            max_new_tokens=sampling.max_completion_length, eos_token_id=list(sampling.stop_ids) or None, pad_token_id=0
        )
        with self._lock:
            version = self.version
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=asked,
                logits_processor=LogitsProcessorList([keyed]),
                stopping_criteria=StoppingCriteriaList([is_ended]),
            )
        self.beats += len(keyed.drawn)
        columns = [drawn.listed() for drawn in keyed.drawn]
        return [self._completion([[part[row] for part in column] for column in columns], version, sampling)
                for row in range(len(keys))]  # fmt: skip

    def _completion(self, drawn, version, sampling) -> Completion:
        """Return the answer of one row, of which each place is a token and its two log-probabilities."""
        ends = [place for place, (token, _, _) in enumerate(drawn) if token in sampling.stop_ids][:1]
        strings = StopStrings.of(sampling)
        if strings is not None and (place := strings.first([token for token, _, _ in drawn])) is not None:
            ends.append(place)
        end = min(ends) + 1 if ends else None
        tokens, logprobs, full = (tuple(column) for column in zip(*drawn[:end], strict=True))
        return Completion(tokens, logprobs, full, version, version, "stop" if ends else "length")

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed")
