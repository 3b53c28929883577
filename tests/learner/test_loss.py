"""With scope "lagged" a step's loss trusts as far as the step before it was measured to."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from torch import Tensor

from gnomon.algorithms import P3O, LossInputs
from gnomon.algorithms.ratios import Statistics
from gnomon.core.errors import LearnerError
from gnomon.core.metrics import EffectiveSize, Metrics
from gnomon.core.types import State
from gnomon.learner.learner import TorchLearner
from gnomon.learner.loss import LaggedStatistics
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.models.logprobs import TokenScorer


@dataclass(frozen=True)
class Seen:
    """Adds nothing to the loss, and writes down the statistics that it was shown."""

    shown: list[Statistics] = field(default_factory=list)
    name: str = "seen"
    needs: frozenset[str] = frozenset()

    def weights(self, batch: Any, default: Tensor) -> Tensor:
        return default * 0

    def __call__(self, view: LossInputs) -> tuple[Tensor, Metrics]:
        self.shown.append(view.statistics)
        return view.current * 0, Metrics()


def run(work: Any) -> Any:
    return asyncio.run(work)


def build_lagged() -> tuple[Any, list[Statistics]]:
    """P3O without its own regularizer, so that rows of a degenerate group are dead; and what its loss was shown."""
    seen = Seen()
    return replace(P3O, name="p3o-lagged", scope="lagged", regularizers=(seen,)), seen.shown


def build(make_model: Callable[..., Any], budget: int = 40) -> TorchLearner:
    plan = LearnerConfig(OptimizerConfig(learning_rate=1e-2), max_tokens_per_micro_batch=budget)
    return TorchLearner(make_model(), plan, 10)


@pytest.mark.parametrize("budget", [1, 10_000])
@pytest.mark.parametrize("is_scored", [False, True])
def test_a_step_reads_what_the_step_before_it_measured(budget, is_scored, make_model, make_minibatch):
    """At first full trust; then the effective size over all trained tokens of the last step, dead rows included."""
    algorithm, shown = build_lagged()
    learner, minibatch = build(make_model, budget), make_minibatch(algorithm)
    if is_scored:
        minibatch = run(learner.score(minibatch, {"proximal"})).into(minibatch)
    current = TokenScorer(make_model())(
        minibatch.tokens, minibatch.prompt_lengths, minibatch.mask, minibatch.temperature
    ).logprobs
    wanted = algorithm.statistics(current, minibatch).behavior
    assert not algorithm.live_rows(minibatch).all()

    run(learner.update(minibatch, algorithm, 0))
    assert set(shown) == {Statistics()}
    assert shown[0].behavior.value == 1.0
    shown.clear()
    run(learner.update(make_minibatch(algorithm, 1), algorithm, 0))

    found = {statistics.behavior.value for statistics in shown}
    assert len(found) == 1
    assert found.pop() == pytest.approx(wanted.value, rel=1e-5)
    assert shown[0].behavior.count == int(minibatch.mask.sum())
    assert wanted.value < 0.95


def test_a_step_with_every_row_alive_makes_no_pass_of_its_own(make_model, make_minibatch):
    """P3O's own regularizer gives all rows a gradient: every position that predicts a token is computed, once."""
    algorithm = replace(P3O, name="p3o-lagged", scope="lagged")
    minibatch = make_minibatch(algorithm)

    metrics = run(build(make_model, 1).update(minibatch, algorithm, 0))

    assert metrics["tokens/computed"] == int((minibatch.lengths - 1).sum())


def test_a_step_that_fails_or_is_skipped_measures_nothing(make_model, make_minibatch):
    """What a failed step measured does not count with the next one's."""
    algorithm, shown = build_lagged()
    learner, minibatch = build(make_model, 1), make_minibatch(algorithm)
    spoiled = minibatch.with_fields(advantages=minibatch.advantages * 1e300)
    with pytest.raises(LearnerError, match="not finite"):
        run(learner.update(spoiled, algorithm, 0))
    run(learner.update(minibatch, algorithm, 0))
    run(learner.update(minibatch.with_fields(advantages=minibatch.advantages * 0), algorithm, 0))
    shown.clear()

    run(learner.update(minibatch, algorithm, 0))

    assert shown[0].behavior.count == int(minibatch.mask.sum())


@pytest.mark.parametrize(
    "sums",
    ["x", [], {}, None, 0.5, [0.0] * 3, [0.0] * 5, [-1.0, 0.0, 0.0, 0.0], [1.0, -1.0, 1.0, 0.0], [True, 0.0, 0.0, 0.0],
     [math.inf, 0.0, 0.0, 0.0], [math.nan, 0.0, 0.0, 0.0], [None, 0.0, 0.0, 0.0], [1.0, "x", 1.0, 0.0]],
)  # fmt: skip
def test_sums_that_no_step_measures_are_refused(sums: Any):
    """They would be read in the next update, far from the checkpoint that holds them."""
    with pytest.raises(ValueError, match=r"the sums of behavior are .*, and no step measures that"):
        LaggedStatistics().restore(State({}, {"behavior": sums}))


def test_a_lag_is_what_it_was_after_a_restart():
    """Sums of the last finished step come back; those of a step under way do not."""
    lag, other = LaggedStatistics(), LaggedStatistics()
    lag.add(Statistics(EffectiveSize.of([1.0, 2.0]), EffectiveSize.of([3.0])))
    lag.add(Statistics(EffectiveSize.of([4.0]), EffectiveSize.of([0.5])))
    lag.advance()
    lag.add(Statistics(EffectiveSize.of([9.0])))
    other.add(Statistics(EffectiveSize.of([7.0])))

    other.restore(lag.state())
    other.advance()

    assert other.statistics == Statistics(EffectiveSize.of([1.0, 2.0, 4.0]), EffectiveSize.of([3.0, 0.5]))
