"""The simulated run: what must hold exactly, and who waits for whom."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.analysis.planner.deployment import Deployment, Lengths, PlannedJob
from gnomon.analysis.planner.layout import DecodingPace, Layout, answering, pace_of, stages
from gnomon.analysis.planner.search import best_layout, estimated, layouts
from gnomon.analysis.planner.simulate import Flow, SimulatedEngine, Timing, run_virtually, simulate

Maker = Callable[..., Deployment]


def answered(
    pace: DecodingPace, most: int, *asked: tuple[float, float, list[float]]
) -> tuple[list[float], SimulatedEngine]:
    """Return when each call (seconds at which it comes, prompt, lengths) was answered by one engine, and the engine."""

    async def run() -> tuple[list[float], SimulatedEngine]:
        engine, clock = SimulatedEngine(pace, most), asyncio.get_running_loop().time

        async def call(at: float, prompt: float, lengths: list[float]) -> float:
            await asyncio.sleep(at)
            await engine.answer(prompt, lengths)
            return clock()

        ended = await asyncio.gather(*(call(*one) for one in asked))
        engine.settle()
        return ended, engine

    return run_virtually(run())


def timing(pace: DecodingPace, engines: int = 1, **other: object) -> Timing:
    """Return a timing in which nothing but answering takes time."""
    plain = Timing(pace, engines, most=10_000, grade=0.0, learn=lambda tokens: 0.0, publish=0.0)
    return replace(plain, **other)


def by_hand(pace: DecodingPace, prompt: float, lengths: list[float]) -> float:
    """Return the seconds of one prompt's answers: between ends, k steps of as many rows with growing contexts."""
    seconds, before = pace.prompt, 0.0
    for place, length in enumerate(sorted(lengths)):
        rows, steps = len(lengths) - place, length - before
        seconds += steps * pace.fixed(rows) + pace.cached * rows * (steps * (prompt + before) + steps**2 / 2)
        before = length
    return seconds


def test_an_engine_decodes_as_fast_as_its_pace(make_place: Maker):
    """Answers of 100, 300 and 300 tokens: three rows, then two; each step with its own context."""
    pace = pace_of(make_place(), Layout(8, 1))
    [seconds], engine = answered(pace, 10, (0.0, 256.0, [100.0, 300.0, 300.0]))

    assert seconds == pytest.approx(by_hand(pace, 256, [100.0, 300.0, 300.0]))
    assert engine.drawn == pytest.approx(700)
    assert engine.busy == pytest.approx(seconds)


def test_a_call_in_between_changes_the_rate_and_no_token_is_lost(make_place: Maker):
    """A second prompt comes while the first is answered: both take longer than alone, all 600 tokens are drawn."""
    pace = pace_of(make_place(), Layout(8, 1))
    alone = by_hand(pace, 256, [400.0])
    (first, second), engine = answered(pace, 10, (0.0, 256.0, [400.0]), (alone / 2, 256.0, [200.0]))

    assert alone + pace.prompt < first < alone + pace.prompt + 200 * (pace.step(2, 600) - pace.fixed(1))
    assert second < first + alone
    assert engine.drawn == pytest.approx(600)


def test_more_answers_than_places_wait_for_one(make_place: Maker):
    """Four answers of 100 tokens in two places take as long as two after two."""
    pace = pace_of(make_place(), Layout(8, 1))
    [seconds], engine = answered(pace, 2, (0.0, 256.0, [100.0] * 4))

    assert seconds - pace.prompt == pytest.approx(2 * (by_hand(pace, 256, [100.0] * 2) - pace.prompt))
    assert engine.row_seconds == pytest.approx(2 * engine.busy)


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=12),
    most=st.integers(1, 12),
    starts=st.lists(st.floats(0, 5), min_size=1, max_size=4),
)
def test_every_token_is_drawn_once(lengths: list[int], most: int, starts: list[float]):
    """Whatever comes when, and however few places there are."""
    place = _place()
    asked = [(at, 256.0, [float(length) for length in lengths]) for at in starts]
    _, engine = answered(pace_of(place, Layout(8, 1)), most, *asked)

    assert engine.drawn == pytest.approx(len(starts) * sum(lengths))


def test_a_synchronous_step_is_its_stages_exactly(make_place: Maker):
    """With grading that takes no time: answering, updating and publishing, one after the other, to 1e-9."""
    place = make_place(prompts=4, generations=4, answers=Lengths(300, 300, sigma=0))
    pace = pace_of(place, Layout(8, 4))
    flow = simulate(place.job, timing(pace, 4, learn=lambda tokens: tokens * 1e-3, publish=2.0), steps=3)
    answers = by_hand(pace, 256, [300.0] * 4)

    assert flow.step_seconds == pytest.approx(answers + 4 * 4 * 300 * 1e-3 + 2.0, rel=1e-9)
    assert flow.answering == pytest.approx(answers / flow.step_seconds)
    assert flow.learning == pytest.approx(6.8 / flow.step_seconds)
    assert (flow.staleness_mean, flow.staleness_max) == (0, 0)
    assert flow.trained == 3 * 16 * 300
    assert flow.generated == pytest.approx(flow.trained)


def test_the_formula_of_a_synchronous_step_is_the_simulated_one(make_place: Maker):
    """`answering` integrates what the simulation counts: the same to 10% with lengths drawn, to 1% with equal ones."""
    for sigma, within in ((0.0, 0.01), (0.6, 0.1)):
        place = make_place(prompts=32, answers=Lengths(500, 2000, sigma))
        flow = simulate(place.job, timing(pace_of(place, Layout(8, 4)), 4), steps=6)
        assert flow.step_seconds == pytest.approx(answering(place, Layout(8, 4)), rel=within)


def test_graders_hold_a_step_up_as_long_as_they_take(make_place: Maker):
    """One grader, two seconds an answer, 16 answers that come at once: 32 seconds more."""
    place = make_place(prompts=4, generations=4, answers=Lengths(300, 300, sigma=0), graders=1)
    pace = pace_of(place, Layout(8, 4))
    quick, slow = (simulate(place.job, timing(pace, 4, grade=grade), steps=2) for grade in (0.0, 2.0))

    assert slow.step_seconds - quick.step_seconds == pytest.approx(32)


def test_asking_ahead_hides_the_shorter_side(make_place: Maker):
    """A step ahead takes as long as the slower side, not as both: at most 5% more, and half of synchronous."""
    pace = pace_of(make_place(), Layout(8, 4))
    flows = []
    for staleness in (0, 1):
        place = make_place(prompts=16, answers=Lengths(300, 300, sigma=0), staleness=staleness)
        answers = answering(place, Layout(8, 4))
        learn = timing(pace, 4, learn=lambda tokens, answers=answers: answers)
        flows.append(simulate(place.job, learn, steps=8, skipped=3))

    assert flows[0].step_seconds == pytest.approx(2 * answers, rel=0.01)
    assert flows[1].step_seconds == pytest.approx(answers, rel=0.05)
    assert flows[1].learning > 0.95
    assert flows[1].staleness_max == 1


def test_a_step_ahead_on_the_same_devices_hides_grading_alone(make_place: Maker):
    """Engines that sleep: answering and learning add up, and grading of half that time costs nothing a step ahead."""
    pace, seconds = pace_of(make_place(), Layout(8, 4)), []
    for staleness in (0, 1):
        place = make_place(prompts=16, answers=Lengths(300, 300, sigma=0), staleness=staleness, is_sleeping=True)
        answers = answering(place, Layout(8, 4))
        grade = answers / 2 / place.job.rows
        turns = timing(pace, 4, learn=lambda tokens, answers=answers: answers, grade=grade)
        job = replace(place.job, graders=1)
        seconds.append(simulate(job, turns, steps=8, skipped=3).step_seconds / answers)

    assert seconds == pytest.approx([2.5, 2.0], rel=0.02)


def test_what_is_trained_was_generated(make_place: Maker):
    """Over a long run no more is trained than drawn, and what differs is on its way: two steps' worth at most."""
    place = make_place(staleness=2)
    flow = simulate(place.job, timing(pace_of(place, Layout(8, 4)), 4, learn=lambda tokens: 1.0), steps=20)

    assert flow.trained <= flow.generated + 1e-6
    assert flow.generated - flow.trained < 3 * place.job.rows * 1000
    assert flow.staleness_max <= 2


def test_dropping_the_slow_favors_short_answers(make_place: Maker):
    """With "drop" no step waits; trained answers are shorter than what is asked, and steps are quicker."""
    kept, dropped = (
        _run(make_place(prompts=32, generations=1, staleness=1, is_dropping=is_dropping))
        for is_dropping in (False, True)
    )

    assert dropped.step_seconds < kept.step_seconds
    assert dropped.answer_mean < 0.95 * kept.answer_mean


def test_a_simulation_repeats_itself_and_another_seed_does_not(make_place: Maker):
    """Virtual time has no noise; lengths depend on the seed."""
    place = make_place(staleness=1)
    plain = timing(pace_of(place, Layout(8, 4)), 4)

    assert simulate(place.job, plain, 4) == simulate(place.job, plain, 4)
    assert simulate(place.job, plain, 4) != simulate(place.job, plain, 4, seed=1)


def test_the_best_split_is_better_than_others(make_place: Maker):
    """Of eight devices every split is tried, and the one that is found is the fastest by the formulas too."""
    place = make_place(devices=8, prompts=8, staleness=1)
    found = best_layout(place)
    seconds = [estimated(place, stages(place, layout)) for layout in layouts(place)]

    assert len(seconds) > 3
    assert estimated(place, found.stages) <= min(seconds) * 1.05
    assert found.flow.tokens_per_second > 0


def _run(place: Deployment) -> Flow:
    return simulate(place.job, timing(pace_of(place, Layout(8, 4)), 4), steps=10, skipped=3)


def _place() -> Deployment:
    from gnomon.analysis.planner.hardware import GPUS, PUBLISHED
    from gnomon.analysis.planner.shapes import SHAPES

    return Deployment(SHAPES["qwen3-8b"], GPUS["h100"], PlannedJob(4, 4, 256, Lengths(300, 300)), PUBLISHED, 16)
