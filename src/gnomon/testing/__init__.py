"""What tests are made of, for this project's and for a user's own: batches, trials of pieces, an engine's promises.

A test of an engine of one's own, with the model that `trial_model` writes:

    @pytest.mark.parametrize("promise", ENGINE_PROMISES, ids=lambda promise: promise.__name__)
    def test_my_engine(promise):
        check_engine(lambda: Mine(trial_model(), torch.float32, torch.device("cpu"), max_concurrent=3), promise)
"""

import asyncio
import functools
import json
import math
import re
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gnomon.algorithms.piece_trial import loss_and_gradient, make_batch, try_pieces
from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.sections import GrammarConfig
from gnomon.core.types import Snapshot
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.own import fault_of_draws
from gnomon.engines.stop_strings import StopStrings
from gnomon.models.lora import merged_tensors
from gnomon.models.tiny import TinyConfig, save_tiny, tiny_model
from gnomon.models.transfer.fingerprint import fingerprints

__all__ = [
    "ENGINE_PROMISES",
    "OWN_WEIGHTS_PROMISES",
    "check_engine",
    "loss_and_gradient",
    "make_batch",
    "trial_model",
    "trial_snapshot",
    "try_pieces",
]

Promise = Callable[[Engine], Awaitable[None]]

TRIAL_CONTEXT = 96
# Heads of 32: vLLM's kernels for CPUs know none smaller.
TRIAL_CONFIG = TinyConfig(width=128, context_length=TRIAL_CONTEXT)
_PROMPT = [256, 50, 43, 50, 61]
_SAMPLING = Sampling(max_completion_length=12, stop_ids=(257,))


@functools.cache
def trial_model() -> str:
    """Return the folder of a tiny model with a context of 96 tokens, other weights than those of `trial_snapshot`.

    Its generation_config.json ends answers at most tokens and repeats none: only `Sampling` says how answers are drawn.
    """
    folder = save_tiny(Path(tempfile.mkdtemp(prefix="gnomon-trial-")), 1, TRIAL_CONFIG)
    own = {"eos_token_id": [*range(1, TRIAL_CONFIG.vocab_size, 2)], "repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps(own))
    return str(folder)


def trial_snapshot(version: int, seed: int = 0) -> Snapshot:
    """Return weights for the model of `trial_model`; made once, so several engines may read them at the same time."""
    tensors = list(merged_tensors(tiny_model(seed, TRIAL_CONFIG)))
    return Snapshot(version, lambda: iter(tensors))


def check_engine(make: Callable[[], Engine], *promises: Promise) -> None:
    """Hold a new engine to each of these promises; to all of `ENGINE_PROMISES` where none is named.

    Args:
        make: Returns an engine of the model of `trial_model`. It is given `trial_snapshot` before it is asked.

    Raises:
        AssertionError: The message has the promise, and what was found.
    """

    async def held(promise: Promise) -> None:
        engine = make()
        _hold("version is -1 before the first load", engine.version, -1)
        await engine.load(trial_snapshot(0))
        await promise(engine)
        await engine.close()
        await engine.close()

    for promise in promises or ENGINE_PROMISES:
        asyncio.run(held(promise))


async def one_completion_per_key_in_order(engine: Engine) -> None:
    """Answers come in key order; asked one by one they are the same."""
    keys = [11, 3, 8, 5, 19]
    together = await engine.generate(_PROMPT, keys, _SAMPLING)
    alone = [(await engine.generate(_PROMPT, [key], _SAMPLING))[0] for key in keys]
    _hold("answers asked one by one are those asked together", [c.tokens for c in alone], [c.tokens for c in together])
    _hold("no key has no answer", await engine.generate(_PROMPT, [], _SAMPLING), [])


async def tokens_and_logprobs_belong_together(engine: Engine) -> None:
    """Each token has two log-probabilities, at most 0 and finite, equal without truncation."""
    for done in await engine.generate(_PROMPT, range(8), _SAMPLING):
        counts = {len(done.tokens), len(done.logprobs), len(done.full_logprobs)}
        _hold("an answer has tokens, and both log-probabilities of each", (len(counts), 0 in counts), (1, False))
        _hold("log-probabilities are finite and at most 0", [p for p in done.logprobs if not -math.inf < p <= 0], [])
        _hold("without truncation full_logprobs are logprobs", done.full_logprobs, done.logprobs)


async def ends_at_its_first_stop_token_or_at_the_budget(engine: Engine) -> None:
    """ "stop" ends in the one stop token that it holds; "length" has exactly the budget and none."""
    reasons = set()
    for stop_ids in ((257,), (257, 50, 51, *range(100, 140))):
        for done in await engine.generate(_PROMPT, range(24), Sampling(max_completion_length=9, stop_ids=stop_ids)):
            ends = [place for place, token in enumerate(done.tokens) if token in stop_ids]
            expected = [len(done.tokens) - 1] if done.stop == "stop" else []
            _hold(f"an answer that ends by '{done.stop}' has stop tokens at its end alone", ends, expected)
            _hold("an answer that ends by 'length' has the budget", done.stop == "stop" or len(done.tokens) == 9, True)
            _hold("no answer is longer than the budget", len(done.tokens) <= 9, True)
            reasons.add(done.stop)
    _hold("answers end by both", reasons, {"stop", "length"})


async def ends_at_the_token_that_completes_a_stop_string(engine: Engine) -> None:
    """Answers are those without stop strings, up to the first token that completes one, over any number of tokens.

    A string that stands in the prompt alone ends nothing.
    """
    whole = await engine.generate(_PROMPT, range(24), _SAMPLING)
    texts = ["".join(chr(token) if token < 128 else "\n" * 9 for token in done.tokens) for done in whole]
    strings = ["2+2=", *(_within(texts, length) for length in (3, 2))]
    sampling = replace(_SAMPLING, stop=tuple(strings), tokenizer=trial_model())
    stops = StopStrings.of(sampling)
    assert stops is not None
    ends = [stops.first(done.tokens) for done in whole]
    found = await engine.generate(_PROMPT, range(24), sampling)
    for end, done, free in zip(ends, found, whole, strict=True):
        tokens, reason = (free.tokens, free.stop) if end is None else (free.tokens[: end + 1], "stop")
        _hold(f"an answer ends where {strings} ends first", (done.tokens, done.stop), (tokens, reason))
        _hold("its log-probabilities are as without", _gap(done.logprobs, free.logprobs[: len(tokens)]) <= 1e-5, True)
    _hold("some answers end by a stop string", {end is None for end in ends}, {True, False})


async def applies_a_grammar_or_refuses(engine: Engine) -> None:
    """Answers obey `Sampling.grammar`, with both log-probabilities; an engine that cannot raises ConfigError."""
    grammar = GrammarConfig(regex="(ab|[0-9]{2,6})")
    sampling = replace(_SAMPLING, grammar=grammar, tokenizer=trial_model(), temperature=0.9)
    try:
        found = await engine.generate(_PROMPT, range(16), sampling)
    except ConfigError as error:
        _hold("the message has 'grammar'", "grammar" in str(error), True)
        return
    for done in found:
        said = bytes(token for token in done.tokens if token < 256).decode()
        _hold("an answer obeys the grammar", (done.stop, bool(re.fullmatch(str(grammar.regex), said))), ("stop", True))
        scores = await engine.score(_PROMPT, done.tokens, 0.9)
        _hold("full_logprobs are those without the grammar", _gap(scores, done.full_logprobs) <= 1e-5, True)
        lower = [p for p, q in zip(done.logprobs, done.full_logprobs, strict=True) if p < q - 1e-5]
        _hold("logprobs are those under the grammar, which are no lower", lower, [])
    _hold("answers differ", len({done.tokens for done in found}) > 1, True)


def _within(texts: Sequence[str], length: int) -> str:
    """Return the first text of that length in the middle of an answer, over as many tokens."""
    spans = (text[start : start + length] for text in texts for start in range(2, len(text) - length))
    return next(span for span in spans if "\n" not in span)


async def versions_are_those_of_the_loaded_weights(engine: Engine) -> None:
    """A completion carries the version that sampled it."""
    _hold("version is the snapshot's", engine.version, 0)
    await engine.load(trial_snapshot(4))
    [done] = await engine.generate(_PROMPT, [1], _SAMPLING)
    _hold("versions are the snapshot's", (engine.version, done.oldest_version, done.newest_version), (4, 4, 4))


async def prompt_and_budget_must_fit_the_context(engine: Engine) -> None:
    """92 + 4 fit into 96, one more does not, and the message has the numbers (`ContextLimits.check`)."""
    sampling = Sampling(max_completion_length=4)
    _hold("92 + 4 fit", len(await engine.generate([65] * (TRIAL_CONTEXT - 4), [0], sampling)), 1)
    refused = engine.generate([65] * (TRIAL_CONTEXT - 3), [0], sampling)
    await _refuses(ConfigError, ("prompt of 93 tokens", "max_completion_length = 4", "96"), refused)


async def a_closed_engine_refuses(engine: Engine) -> None:
    """After close, generate, load and score raise; closing twice does not."""
    await engine.close()
    await _refuses(EngineError, ("engine is closed",), engine.generate(_PROMPT, [0], _SAMPLING))
    await _refuses(EngineError, ("engine is closed",), engine.load(trial_snapshot(1)))
    await _refuses(EngineError, ("engine is closed",), engine.score(_PROMPT, [65], 1.0))


async def a_score_is_what_was_said_of_its_own_tokens(engine: Engine) -> None:
    """Equal to `full_logprobs` to 1e-5, also where sampling was truncated; an empty response has no score."""
    for temperature in (1.0, 0.7):
        sampling = Sampling(temperature=temperature, top_p=0.8, max_completion_length=12, stop_ids=(257,))
        for done in await engine.generate(_PROMPT, range(4), sampling):
            scores = await engine.score(_PROMPT, done.tokens, temperature)
            _hold("score is full_logprobs to 1e-5", _gap(scores, done.full_logprobs) <= 1e-5, True)
        _hold("an empty response has no score", await engine.score(_PROMPT, [], temperature), [])


async def a_score_disturbs_no_answer(engine: Engine) -> None:
    """It is the same while answers are on their way; what the model does not know is refused."""
    alone = await engine.generate(_PROMPT, range(3), _SAMPLING)
    asked = engine.score(_PROMPT, [65, 66], 1.0), engine.generate(_PROMPT, range(3), _SAMPLING)
    first, answers = await asyncio.gather(*asked)
    _hold("a score disturbs no answer", [a.tokens for a in answers], [a.tokens for a in alone])
    _hold("a score is the same", _gap(first, await engine.score(_PROMPT, [65, 66], 1.0)) <= 1e-6, True)
    said = ("response has token ids from 65 to 999", "vocabulary of 259")
    await _refuses(ConfigError, said, engine.score(_PROMPT, [65, 999], 1.0))
    await _refuses(ConfigError, ("empty prompt",), engine.score([], [65], 1.0))


async def a_score_follows_a_load(engine: Engine) -> None:
    """Other weights score otherwise, and the first ones as before."""
    first = await engine.score(_PROMPT, [65, 66], 1.0)
    await engine.load(trial_snapshot(1, seed=2))
    second = await engine.score(_PROMPT, [65, 66], 1.0)
    await engine.load(trial_snapshot(2))
    _hold("scores are of the loaded weights", _gap(first, second) > 0.1, True)
    _hold("scores come back with the weights", _gap(first, await engine.score(_PROMPT, [65, 66], 1.0)) <= 1e-6, True)


async def says_which_weights_it_holds(engine: Engine) -> None:
    """Those of the snapshot that it was given, under its names."""
    _hold("fingerprints are the snapshot's", await engine.fingerprints(), fingerprints(trial_snapshot(0).tensors()))


async def greedy_answers_are_the_likeliest(engine: Engine) -> None:
    """At temperature 0 all keys have one answer, of tokens that no other one beats, scored as at temperature 1."""
    greedy = Sampling(temperature=0, max_completion_length=6)
    found, _ = await asyncio.gather(
        engine.generate(_PROMPT, range(3), greedy), engine.generate(_PROMPT, [5], _SAMPLING)
    )
    tokens, scores = found[0].tokens, await engine.score(_PROMPT, found[0].tokens, 1.0)
    _hold("greedy answers are one answer", {done.tokens for done in found}, {tokens})
    _hold("greedy log-probabilities are those of temperature 1", _gap(scores, found[0].logprobs) <= 1e-5, True)
    for place, score in enumerate(scores):
        others = [await engine.score((*_PROMPT, *tokens[:place]), [other], 1.0) for other in range(0, 256, 37)]
        _hold("a greedy token is the likeliest", [other for [other] in others if other > score + 1e-6], [])


async def draws_are_of_the_distribution_that_it_scores_by(engine: Engine) -> None:
    """Each key draws its own answer, at the temperature that is asked for, and says `score`'s log-probabilities."""
    for temperature in (1.0, 0.6):
        _hold("what contradicts its scores", await fault_of_draws(engine, _PROMPT, temperature), None)


OWN_WEIGHTS_PROMISES: tuple[Promise, ...] = (
    draws_are_of_the_distribution_that_it_scores_by,
    greedy_answers_are_the_likeliest,
    a_score_disturbs_no_answer,
    a_score_follows_a_load,
    says_which_weights_it_holds,
)
"""What an engine with weights of its own promises beside: one that shares a module or answers from a script cannot."""
ENGINE_PROMISES: tuple[Promise, ...] = (
    one_completion_per_key_in_order,
    tokens_and_logprobs_belong_together,
    ends_at_its_first_stop_token_or_at_the_budget,
    ends_at_the_token_that_completes_a_stop_string,
    applies_a_grammar_or_refuses,
    versions_are_those_of_the_loaded_weights,
    prompt_and_budget_must_fit_the_context,
    a_closed_engine_refuses,
    a_score_is_what_was_said_of_its_own_tokens,
    *OWN_WEIGHTS_PROMISES,
)
"""What every engine promises that takes new weights."""


def _hold(promise: str, found: object, expected: object) -> None:
    if found != expected:
        raise AssertionError(f"{promise}: expected {expected!r}, got {found!r}")


def _gap(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the largest difference in nats."""
    return max((abs(a - b) for a, b in zip(first, second, strict=True)), default=0.0)


async def _refuses(error: type[Exception], words: Sequence[str], call: Awaitable[object]) -> None:
    try:
        await call
    except error as raised:
        _hold(f"the message of {error.__name__} has {words}", [word for word in words if word not in str(raised)], [])
    else:
        raise AssertionError(f"expected {error.__name__} with {words}, got an answer")
