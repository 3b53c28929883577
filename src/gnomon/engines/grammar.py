"""Answers that obey a JSON schema or a regular expression: which tokens may come next.

llguidance works the tokens out, by an Earley parser over a prefix tree of the vocabulary's bytes.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.core.errors import ConfigError, shortened
from gnomon.core.optional import import_optional
from gnomon.core.sections import GrammarConfig
from gnomon.engines.base import Sampling
from gnomon.engines.sampler import Draws, draw, draw_allowed
from gnomon.models.load import load_tokenizer
from gnomon.models.tokenizer import TokenBytes, Tokenizer

_WHITE_SPACE = r"[ ]?|\n[ \t]{0,32}"
"""White space that JSON may have between its parts. Without a bound a model can fill its answer with it."""
# Answers that are tried when a grammar is compiled, their tokens, and the tokens of an answer that is written whole.
_TRIALS, _TRIAL_TOKENS, _LONGEST = 4, 64, 256


@dataclass(eq=False)
class GrammarState:
    """The position of one answer in its grammar.

    Attributes:
        fault: Why the answer cannot go on: no token may follow, or the grammar is too complex here; "" where it can.
    """

    matcher: Any
    fault: str = ""
    _seen: int = 0

    def fill(self, tokens: Sequence[int], words: NDArray[np.int32]) -> None:
        """Set the bit of each token that may follow ``tokens``, which an answer has so far; all of them at a fault.

        Args:
            words: Int32[ceil(V / 32)]; bit i of word w is token 32 w + i.
        """
        if self._seen > len(tokens):  # vLLM computes a position again
            self.matcher.rollback(self._seen - len(tokens))
        else:
            self.matcher.consume_tokens(list(tokens[self._seen :]))
        self._seen = len(tokens)
        # Written in place: the mask of a vocabulary of 150,000 is 19 kB a row and step.
        self.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self.matcher.is_error() or not words.any():
            why = (
                shortened(self.matcher.get_error().partition("\n")[0])
                or "no token of the model spells what would have to follow"
            )
            self.fault = f"sampling.grammar ends in nothing after {len(tokens)} tokens of an answer: {why}"
            words[:] = -1

    def allowed(self, tokens: Sequence[int], words: int) -> NDArray[np.intp]:
        """Return the tokens that may follow ``tokens``, in order; ``words`` as of `Grammar`.

        Raises:
            ConfigError: With the `fault`.
        """
        row = np.zeros(words, dtype=np.int32)
        self.fill(tokens, row)
        if self.fault:
            raise ConfigError(self.fault)
        return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


@dataclass(frozen=True, eq=False)
class Grammar:
    """A grammar as the tokens of one model spell it.

    An answer ends where the grammar is satisfied, by one of ``stop_ids``, which are allowed there and nowhere else, or
    at its budget or a stop string, wherever it is then. Control tokens are never allowed.

    Attributes:
        start: The matcher at the beginning of an answer.
        words: Words of a mask.
        spelled: Bytes of each token; none of control and stop tokens.
        stop_ids: Those that end an answer.
    """

    start: Any = field(repr=False)
    words: int
    spelled: Sequence[bytes] = field(repr=False)
    stop_ids: Sequence[int]

    @classmethod
    def of(cls, sampling: Sampling) -> Self | None:
        """Return that of ``sampling``, None where it has none; compiled once a process.

        Raises:
            ConfigError: llguidance or the tokenizer's name is missing, the grammar is invalid, or nothing satisfies it.
            ModelError: There is no such tokenizer.
        """
        if not sampling.grammar.is_set:
            return None
        if not sampling.tokenizer:
            raise ConfigError(
                "sampling.grammar needs the model whose tokens spell it; set Sampling(tokenizer=FOLDER) to the model's "
                "folder or name"
            )
        named = sampling.tokenizer, sampling.trust_remote_code
        return cls(*_compiled(sampling.grammar, *named, tuple(sampling.stop_ids)))

    def begin(self) -> GrammarState:
        """Return the state of an answer without a token."""
        return GrammarState(self.start.deep_copy())

    def cut(self, most: int) -> str:
        """Return in words that no answer was found that is over within ``most`` tokens; "" where one was.

        A few answers are written: brackets and quotes closed as soon as they may be, the longest tokens, and random
        ones. The shortest of them is no proof of what is shortest.
        """
        found = list[int]()
        for seed in range(_TRIALS + 2):
            if found and min(found) <= most:
                return ""
            answer = self.written(seed)
            # Only answers that are over count; one that was cut at `_LONGEST` says nothing of the shortest.
            found += [len(answer)] * (answer[-1] in self.stop_ids)
        if min(found, default=_LONGEST) <= most:
            return ""
        least = f"the shortest one found has {min(found):,}" if found else f"none was found of at most {_LONGEST:,}"
        spent = f"an answer may have {most:,} tokens, its stop token included"
        return f"{spent}, and of those tried that obey the grammar {least}"

    def written(self, seed: int = 0) -> list[int]:
        """Return an answer that obeys, its stop token included; without one where it is not over in `_LONGEST` tokens.

        Args:
            seed: Which; 0 closes brackets and quotes as soon as they may be.

        Raises:
            ConfigError: It ends in nothing.
        """
        random, state, answer = np.random.default_rng(seed), self.begin(), list[int]()
        closing, length = self._marks
        while len(answer) < _LONGEST:
            allowed = state.allowed(answer, self.words)
            if np.isin(self.stop_ids, allowed).any():
                return [*answer, self.stop_ids[0]]
            # Seed 2 writes the shortest tokens; of these, one that lets the answer end is taken at once.
            if seed == 2:
                for token in allowed[length[allowed] == 1]:
                    if self._ends(state, token):
                        return [*answer, int(token), self.stop_ids[0]]
            # What must follow in any case, such as a key of a schema, is written without a choice.
            forced = state.matcher.compute_ff_tokens()
            if not forced:
                liked = (1e3 * closing + length, length, -length, 0 * length)[seed % 4][allowed]
                forced = [int(allowed[np.argmax(liked + random.random(len(allowed)) / 2)])]
            answer += forced
        return answer

    @staticmethod
    def _ends(state: GrammarState, token: int) -> bool:
        after = state.matcher.deep_copy()
        return bool(after.consume_token(int(token)) and after.is_accepting())

    @functools.cached_property
    def _marks(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Float[V] twice: brackets and quotes that a token closes, and the bytes that it has without white space."""
        text = [*(spelled.strip() for spelled in self.spelled), *[b""] * (self.words * 32 - len(self.spelled))]
        closes = [sum(map(one.count, (b'"', b"}", b"]"))) - sum(map(one.count, (b"{", b"["))) for one in text]
        return np.array(closes, dtype=float), np.array([len(one) for one in text], dtype=float)

    def obeyed(self, tokens: Sequence[int]) -> int:
        """Return how many of an answer's tokens the grammar allows, from the first one on."""
        return int(self.start.deep_copy().validate_tokens(list(tokens)))


def barred(held: Sequence[Sequence[str]], sampling: Sampling, tokenizer: Tokenizer, opened: str = "") -> str:
    """Return why no answer can hold one text of each list, in words; "" where one may.

    Of a schema a few answers are written and each text is tried at every place in them, which is no proof.

    Args:
        opened: What a prompt writes of the answer itself.
    """
    held = [texts for texts in held if not any(text in opened for text in texts)]
    grammar, plan, most = Grammar.of(sampling), sampling.grammar, sampling.max_completion_length
    if grammar is not None and held:
        holds = (
            _meets(held, sampling)
            if plan.regex is not None
            else all(_stands(grammar, each, tokenizer) for each in held)
        )
        if not holds:
            return f"no {plan.words} (sampling.grammar) holds it"
    # A blank before a text is a token in some vocabularies, and an answer has none at its beginning.
    sizes = [
        [sum(bool(tokenizer.spelled([t]).strip()) for t in tokenizer.encode_plain(s)) for s in each] for each in held
    ]
    least = sum(map(min, sizes))
    return f"it takes {least} tokens, and sampling.max_completion_length = {most}" if least > most else ""


def _meets(held: Sequence[Sequence[str]], sampling: Sampling) -> bool:
    """Return whether a text of the regular expression holds one of each list; the intersection is exact."""
    library = import_optional("llguidance", "grammar", "sampling.grammar")
    tokens, _ = _vocabulary(sampling.tokenizer, sampling.trust_remote_code, tuple(sampling.stop_ids))
    wanted = [f"(?s:.*)({'|'.join(map(re.escape, each))})(?s:.*)" for each in held]
    terms = [
        re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", s, flags=re.DOTALL) for s in (str(sampling.grammar.regex), *wanted)
    ]
    rules = [f"ALL: {' & '.join(f'T{i}' for i in range(len(terms)))}", *(f"T{i}: /{s}/" for i, s in enumerate(terms))]
    found = library.LLMatcher(
        tokens, library.LLMatcher.grammar_from_lark("\n".join(["start: ALL", *rules])), log_level=0
    )
    found.compute_bitmask()
    # Another error is that the two together are too complex.
    return not found.get_error().startswith("NoExtensionBias")


def _stands(grammar: Grammar, texts: Sequence[str], tokenizer: Tokenizer) -> bool:
    """Return whether one of the texts may stand somewhere in the answers that are tried."""
    tried = [tokenizer.encode_plain(text) for text in texts]
    for answer in map(grammar.written, range(_TRIALS + 2)):
        for place in range(len(answer)):
            state = grammar.start.deep_copy()
            state.consume_tokens(answer[:place])
            if any(state.validate_tokens(tokens) == len(tokens) for tokens in tried):
                return True
    return False


def draw_under(
    states: Sequence[GrammarState | None],
    answers: Sequence[Sequence[int]],
    logits: Tensor,
    uniforms: Tensor,
    sampling: Sampling,
) -> Draws:
    """Return the next token of each answer: `draw`, or `draw_allowed` where the answers have a grammar.

    Args:
        states: One for each answer, or None for all.
        answers: The tokens of each so far.
        logits: Float[R V], as in `draw`.
        uniforms: Float64[R], as in `draw`.
        sampling: That of all of them.
    """
    known = [state for state in states if state is not None]
    if not known:
        return draw(logits, uniforms, sampling)
    return draw_allowed(logits, uniforms, sampling, allowed_tokens(known, answers, logits.shape[1]))


def allowed_tokens(states: Sequence[GrammarState], answers: Sequence[Sequence[int]], width: int) -> Tensor:
    """Return Bool[R V]: whether each token may come next in each of R answers.

    Args:
        states: One for each answer; they are brought to its end.
        answers: The tokens of each so far.
        width: V, that of the logits.
    """
    words = np.zeros((len(states), -(-width // 32)), dtype=np.int32)
    for state, tokens, row in zip(states, answers, words, strict=True):
        state.fill(tokens, row)
    # Bit i of word w is token 32 w + i, on little-endian machines also in the order of bytes.
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=width, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


@functools.lru_cache(maxsize=64)
def _compiled(
    grammar: GrammarConfig, model: str, trust_remote_code: bool, stop_ids: tuple[int, ...]
) -> tuple[Any, int, Sequence[bytes], tuple[int, ...]]:
    """Return the attributes of the `Grammar`, tried."""
    library = import_optional("llguidance", "grammar", "sampling.grammar")
    tokens, spelled = _vocabulary(model, trust_remote_code, stop_ids)
    key, text = ("schema", grammar.schema) if grammar.schema else ("regex", grammar.regex)
    said = f"sampling.grammar.{key} = {shortened(repr(text))}"
    try:
        if grammar.schema:
            source = library.LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _WHITE_SPACE})
        else:
            source = library.LLMatcher.grammar_from_regex(text)
    except ValueError as error:
        raise ConfigError(f"{said}: {error}") from error
    start = library.LLMatcher(tokens, source, log_level=0, limits=library.LLParserLimits(verbose_errors=False))
    if start.is_error():
        lines = [line.strip() for line in start.get_error().splitlines() if line.strip()]
        why = next((line for line in lines if line.startswith("error:")), lines[0])
        raise ConfigError(f"{said} cannot be used: {shortened(why.removeprefix('error: '), 160)}")
    first = start.deep_copy()
    first.compute_bitmask()
    if first.is_stopped():
        raise ConfigError(f"{said}: no answer satisfies it but an empty one; leave it out, or correct it")
    # One bit a token, in words of 32.
    words = -(-len(spelled) // 32)
    _try(start, words, stop_ids, said)
    return start, words, spelled, stop_ids


def _try(start: Any, words: int, stop_ids: Sequence[int], said: str) -> None:
    """Draw a few answers, all allowed tokens alike.

    Raises:
        ConfigError: One ends in nothing.
    """
    # A grammar that characters can satisfy may be one that this model's tokens cannot.
    for seed in range(_TRIALS):
        random, state, answer = np.random.default_rng(seed), GrammarState(start.deep_copy()), list[int]()
        while len(answer) < _TRIAL_TOKENS and not (answer and answer[-1] in stop_ids):
            try:
                answer.append(int(random.choice(state.allowed(answer, words))))
            except ConfigError as error:
                raise ConfigError(f"{said}: with this model's tokens {error}") from error


@dataclass(frozen=True)
class GrammarTokens:
    """The tokenizer as llguidance needs it: the bytes of each token, and the tokens of a text that has to follow.

    Attributes:
        tokens: None of an id that is never a part of an answer's text.
    """

    tokenizer: Tokenizer
    eos_token_id: int
    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    bos_token_id: None = None

    @functools.cached_property
    def ids(self) -> dict[bytes, int]:
        """The first token of each spelling."""
        return {spelled: token for token, spelled in reversed([*enumerate(self.tokens)]) if spelled}

    def __call__(self, text: bytes) -> list[int]:
        """Return the model's own tokens of a text; the longest ones that fit where these would spell another."""
        own = self.tokenizer.encode_plain(text.decode())
        if b"".join(self.tokens[token] for token in own) == text:
            return own
        found, most = list[int](), max(map(len, self.ids))
        while text:
            ends = (end for end in range(min(most, len(text)), 0, -1) if text[:end] in self.ids)
            if (end := next(ends, 0)) == 0:
                break  # its masks are empty then, which `GrammarState.fill` says
            found.append(self.ids[text[:end]])
            text = text[end:]
        return found


@functools.lru_cache(maxsize=8)
def _vocabulary(model: str, trust_remote_code: bool, stop_ids: tuple[int, ...]) -> tuple[Any, Sequence[bytes]]:
    """Return the model's tokens as llguidance holds them, and the bytes of each."""
    library = import_optional("llguidance", "grammar", "sampling.grammar")
    tokenizer = load_tokenizer(model, trust_remote_code)
    if not stop_ids:
        raise ConfigError(
            f"sampling.grammar: '{model}' has no token that ends an answer, so nothing could follow once the grammar "
            "is satisfied; name one in sampling.stop_ids"
        )
    width, known, special = tokenizer.vocab_size, TokenBytes(tokenizer), {*tokenizer.control.values(), *stop_ids}
    unnamed = "\N{REPLACEMENT CHARACTER}".encode()  # what an id without a token is spelled as
    # A token without bytes is never allowed by a grammar.
    spelled = [b"" if i in special or known[i] == unnamed else known[i] for i in range(width)]
    made = library.TokenizerWrapper(GrammarTokens(tokenizer, stop_ids[0], spelled, sorted(special)))
    return library.LLTokenizer(made, n_vocab=width, eos_token=list(stop_ids)), spelled
