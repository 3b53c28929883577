"""Continuous batching in one thread: which rows are in the model now, and what each of them drew."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.core.errors import EngineError
from gnomon.core.types import Completion, StopReason, TopLogprobs
from gnomon.engines.base import Sampling
from gnomon.engines.grammar import Grammar, GrammarState, draw_under
from gnomon.engines.rng import uniforms
from gnomon.engines.sampler import Draws, likeliest
from gnomon.engines.stop_strings import StopStrings
from gnomon.models.decoder import Decoder, Prompt


@dataclass(eq=False)
class Request:
    """One call of `generate`: some rows of one prompt.

    Attributes:
        is_wanted: Whether a caller still waits.
        completions: Finished completions by position among the keys.
        stops: What ends rows besides stop tokens and the budget.
        grammar: What rows obey.
        fault: Why it gets no answer: one of its rows ended in nothing under the grammar.

    Raises:
        ConfigError: Stop strings or a grammar come without a tokenizer, or the grammar cannot be used.
    """

    prompt: Prompt
    keys: tuple[int, ...]
    sampling: Sampling
    is_wanted: Callable[[], bool]
    completions: dict[int, Completion] = field(default_factory=dict)
    stops: StopStrings | None = field(init=False)
    grammar: Grammar | None = field(init=False)
    fault: str = ""

    def __post_init__(self) -> None:
        self.stops, self.grammar = StopStrings.of(self.sampling), Grammar.of(self.sampling)

    @property
    def is_pending(self) -> bool:
        """Whether its rows are to be drawn on."""
        return not self.fault and self.is_wanted()


@dataclass(eq=False)
class BatchRow:
    """One completion that is being drawn.

    Attributes:
        place: Which of the request's keys it answers.
        experts: Set when it leaves the model.
    """

    request: Request
    place: int
    uniforms: NDArray[np.float64]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    full_logprobs: list[float] = field(default_factory=list)
    oldest_version: int = 0
    experts: Tensor | None = None
    likeliest: list[TopLogprobs] = field(default_factory=list)

    @cached_property
    def grammar(self) -> GrammarState | None:
        """Where it stands in the request's grammar."""
        return None if self.request.grammar is None else self.request.grammar.begin()

    @property
    def latest(self) -> int:
        """The token that the model has not seen yet."""
        return self.tokens[-1] if self.tokens else self.request.prompt[-1]

    @property
    def room(self) -> int:
        """Tokens that it may still get."""
        return self.request.sampling.max_completion_length - len(self.tokens)

    @property
    def routing(self) -> Tensor | None:
        """The experts of prompt and response, as `Completion` has them: the last token has not been to any."""
        return None if self.experts is None else torch.nn.functional.pad(self.experts, (0, 0, 0, 0, 0, 1), value=-1)

    @property
    def top(self) -> TopLogprobs | None:
        """The likeliest tokens at each position, as `Completion` has them."""
        if not self.likeliest:
            return None
        tokens, logprobs = zip(*self.likeliest, strict=True)
        return TopLogprobs(torch.stack(tokens), torch.stack(logprobs))


class Batcher:
    """Rows wait in request order, join in batches, and leave when they finish.

    Rows join when none is active or at least an eighth of the slots is free, so that their prompts go through the
    model together; with a decoder whose rows cannot join, when none is active, those of one prompt length.
    Every choice depends on the requests and their order alone, never on time.

    Args:
        kept_bytes: Memory for keys and values of finished rows, for prompts that begin with them; see `Decoder.keep`. A
            row that former weights computed in part is not kept: what is drawn after it would be of no one's weights.
    """

    def __init__(self, decoder: Decoder, max_concurrent: int, kept_bytes: int = 0) -> None:
        self._decoder = decoder
        self._most = max_concurrent
        self._kept_bytes = kept_bytes
        self._waiting: deque[BatchRow] = deque()
        self._active: list[BatchRow] = []
        self.version = -1

    @property
    def is_idle(self) -> bool:
        """Whether there is no work."""
        return not self._active and not self._waiting

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the rows of requests."""
        for request in requests:
            budget = request.sampling.max_completion_length
            self._waiting += [BatchRow(request, i, uniforms(key, budget)) for i, key in enumerate(request.keys)]

    def set_version(self, version: int) -> None:
        """Note new weights: rows on their way go on with them, and prompts computed with the last ones are dropped."""
        self.version = version
        self._decoder.invalidate()

    @property
    def passes(self) -> int:
        """Forward passes of the model so far; see `Decoder.passes`."""
        return self._decoder.passes

    @property
    def computed(self) -> int:
        """Tokens that went through the model so far; see `Decoder.computed`."""
        return self._decoder.computed

    def release(self) -> None:
        """Free memory while there is no work."""
        self._decoder.release()

    def step(self) -> list[tuple[Request, list[Completion]]]:
        """Let rows join if it is time, draw one token for every active row, and let finished ones leave.

        Return the requests of which no row is left, with their completions in key order, and those with a fault.

        Raises:
            EngineError: The model's logits are not finite.
        """
        # A row whose caller gave up would only cost time; its slot is free for one that waits.
        self._drop_unwanted()
        self._admit()
        if not self._active:
            return []
        room = max(row.room for row in self._active)
        logits = self._decoder.step([row.latest for row in self._active], room)
        self._note_likeliest(logits)
        return self._record(self._draw(logits))

    def _admit(self) -> None:
        free = self._most - len(self._active)
        # A prefill holds up all active rows, so a few are worth less than one batch of many.
        is_time = not self._active or (self._decoder.joins and free >= math.ceil(self._most / 8))
        if not is_time or not self._waiting:
            return
        joining = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        if not self._decoder.joins:
            length = len(joining[0].request.prompt)
            others = [row for row in joining if len(row.request.prompt) != length]
            joining = [row for row in joining if len(row.request.prompt) == length]
            # extendleft reverses, and the order of requests must stay.
            self._waiting.extendleft(reversed(others))
        self._active += joining
        self._decoder.record(any(row.request.sampling.record_routing for row in self._active))
        self._decoder.admit(
            [row.request.prompt for row in joining],
            max(row.room for row in joining),
            {row.request.prompt for row in self._waiting},
        )

    def _draw(self, logits: Tensor) -> Draws:
        """Draw for all rows; those with equal settings together."""
        # Position t of an answer uses the t-th number of its key, whatever batch it is in.
        u = torch.tensor([row.uniforms[len(row.tokens)] for row in self._active], dtype=torch.float64)
        groups: dict[tuple[float, ...], list[int]] = {}
        for slot, row in enumerate(self._active):
            s = row.request.sampling  # answers of a conversation have different budgets, and are drawn alike
            groups.setdefault((s.temperature, s.top_p, s.top_k, s.min_p, s.grammar.is_set), []).append(slot)
        if len(groups) == 1:
            return self._draw_alike(logits, u, self._active)
        tokens, own, full = torch.zeros(len(u), dtype=torch.long), torch.zeros(len(u)), torch.zeros(len(u))
        for slots in groups.values():
            where = torch.tensor(slots)
            rows = [self._active[slot] for slot in slots]
            drawn = self._draw_alike(logits[where.to(logits.device)], u[where], rows)
            tokens[where], own[where] = drawn.tokens.cpu(), drawn.logprobs.cpu()
            full[where] = drawn.full_logprobs.cpu()
        return Draws(tokens, own, full)

    def _draw_alike(self, logits: Tensor, u: Tensor, rows: Sequence[BatchRow]) -> Draws:
        return draw_under(
            [row.grammar for row in rows], [row.tokens for row in rows], logits, u, rows[0].request.sampling
        )

    def _note_likeliest(self, logits: Tensor) -> None:
        """Keep the likeliest tokens for rows that ask for them; those with equal settings together."""
        asking: dict[Sampling, list[int]] = {}
        for slot, row in enumerate(self._active):
            if row.request.sampling.top_logprobs is not None:
                asking.setdefault(row.request.sampling, []).append(slot)
        for sampling, slots in asking.items():
            tokens, logprobs = likeliest(logits if len(slots) == len(self._active) else logits[slots], sampling)
            for place, slot in enumerate(slots):
                self._active[slot].likeliest.append(TopLogprobs(tokens[place], logprobs[place]))

    def _record(self, drawn: Draws) -> list[tuple[Request, list[Completion]]]:
        tokens, own, full = drawn.listed()
        if not math.isfinite(sum(full)) or not math.isfinite(sum(own)):
            raise EngineError("the model's logits are not finite (NaN or infinite): its weights are damaged")
        finished: list[tuple[int, StopReason]] = []
        for slot, (row, token, p, q) in enumerate(zip(self._active, tokens, own, full, strict=True)):
            if row.grammar is not None and row.grammar.fault:
                row.request.fault = row.grammar.fault
            if not row.tokens:
                row.oldest_version = self.version
            row.tokens.append(token)
            row.logprobs.append(p)
            row.full_logprobs.append(q)
            stops = row.request.stops
            # A stop token counts as the answer's last token, and is trained.
            if token in row.request.sampling.stop_ids or (stops is not None and stops.are_completed_by(row.tokens)):
                finished.append((slot, "stop"))
            elif row.room == 0:
                finished.append((slot, "length"))
        failed = {row.request for row in self._active if row.request.fault}
        if self._kept_bytes:
            for slot, _ in finished:
                if (row := self._active[slot]).oldest_version == self.version:
                    # The last token was drawn and never fed, so it has no keys and values.
                    self._decoder.keep(slot, (*row.request.prompt, *row.tokens[:-1]), self._kept_bytes)
        # The last row takes a leaving row's slot, so they leave from the back; they are answered from the front.
        rows = [(self._leave(slot), stop) for slot, stop in reversed(finished)]
        answers = [self._finish(row, stop) for row, stop in reversed(rows)]
        return [*((request, []) for request in failed), *(answer for answer in answers if answer is not None)]

    def _finish(self, row: BatchRow, stop: StopReason) -> tuple[Request, list[Completion]] | None:
        request = row.request
        request.completions[row.place] = Completion(
            tokens=tuple(row.tokens),
            logprobs=tuple(row.logprobs),
            full_logprobs=tuple(row.full_logprobs),
            oldest_version=row.oldest_version,
            newest_version=self.version,
            stop=stop,
            routing=row.routing,
            top=row.top,
        )
        # A caller gets all completions of a call at once, when the last row has ended.
        if request.fault or len(request.completions) < len(request.keys):
            return None
        return request, [request.completions[place] for place in range(len(request.keys))]

    def _leave(self, slot: int) -> BatchRow:
        row, last = self._active[slot], self._active.pop()
        if row.request.sampling.record_routing:
            row.experts = self._decoder.experts(slot)
        # As in the decoder: the last row takes the slot.
        if last is not row:
            self._active[slot] = last
        self._decoder.leave(slot)
        return row

    def _drop_unwanted(self) -> None:
        for slot in reversed(range(len(self._active))):
            if not self._active[slot].request.is_pending:
                self._leave(slot)
        if any(not row.request.is_pending for row in self._waiting):
            self._waiting = deque(row for row in self._waiting if row.request.is_pending)
