"""SPO against GRPO at equal samples, on five families of questions."""

import statistics
from collections.abc import Callable
from pathlib import Path

from experiments.claims.arms import Arm, Number, Runs
from experiments.claims.definition import Claim, Derived, Expectation, Gain
from experiments.claims.estimates import Estimate, MeasuredValues, NotMeasured, Points, estimate
from experiments.claims.exact_rates import pass_at
from experiments.claims.families import MATCHED, family_experiment

from gnomon.core.svg import Series, chart
from gnomon.records.reading import RunRecord

STEPS, START, KS, VOTES = 30, 0.1, (1, 2, 4, 8, 16, 32), (4, 8, 16)
EVERY, CURVE = range(1, KS[-1] + 1), "pass@k"
FRESH = tuple(range(23, 33))
FAMILIES = ("sums", "sorting", "counting", "reversing", "comparing")
EQUAL = "spo, no extra samples"
ALGORITHMS = {
    "grpo": ("algorithm=grpo", *MATCHED),
    "spo": ("algorithm=spo", *MATCHED),
    EQUAL: ("algorithm=spo", *MATCHED, "algorithm.tracker.initial=prior"),
}


def arms(folder: Path, seed: int) -> list[Arm]:
    """Return each algorithm on each family, from that family's model."""
    tables = {family: family_experiment(family, folder, START) for family in FAMILIES}
    return [
        Arm(f"{family}: {name}", table, (*said, f"steps={STEPS}"))
        for family, table in tables.items()
        for name, said in ALGORITHMS.items()
    ]


def majority(k: int) -> Number:
    """Return what reads maj@k of the last evaluation."""

    def read(record: RunRecord) -> float:
        rows = record.evaluations()
        if not rows or str(k) not in rows[-1].get("maj_at", {}):
            raise NotMeasured(f"no evaluation has maj@{k}")
        return float(rows[-1]["maj_at"][str(k)])

    return read


def passes(record: RunRecord) -> Points:
    """Return pass@k of every k, exactly."""
    return [(float(k), pass_at(k)(record)) for k in EVERY]


def curves(measured: MeasuredValues, name: str) -> dict[int, dict[float, float]]:
    """Return of each seed that was run on all families pass@k by k, mean over families."""
    found = [measured.curves.get(f"{family}: {name}", {}).get(CURVE, {}) for family in FAMILIES]
    seeds = sorted(set.intersection(*map(set, found)))
    of_families = {seed: [dict(by_seed[seed]) for by_seed in found] for seed in seeds}
    return {
        seed: {k: statistics.fmean(one[k] for one in f) for k in map(float, EVERY)} for seed, f in of_families.items()
    }


def least_sure(name: str) -> Callable[[MeasuredValues], Estimate]:
    """Return what gives the gain in pass@k of ``name`` over GRPO at the k from 2 on whose interval reaches lowest.

    That it lies above 0 says as much of every k.
    """

    def read(measured: MeasuredValues) -> Estimate:
        first, second = curves(measured, "grpo"), curves(measured, name)
        seeds = sorted(first.keys() & second.keys())
        gains = [estimate([second[seed][k] - first[seed][k] for seed in seeds]) for k in map(float, EVERY[1:])]
        return min(gains, key=lambda found: found.low)

    return read


def gain(number: str, name: str) -> Callable[[MeasuredValues], Estimate]:
    """Return what averages over families, seed by seed, the number of ``name`` less that of GRPO.

    A seed counts when it was run on all families: another mixture is another average.
    """

    def read(measured: MeasuredValues) -> Estimate:
        first = [measured.numbers.get(f"{family}: grpo", {}).get(number, {}) for family in FAMILIES]
        second = [measured.numbers.get(f"{family}: {name}", {}).get(number, {}) for family in FAMILIES]
        seeds = sorted(set.intersection(*(set(found) for found in (*first, *second))))
        return estimate([statistics.fmean(b[n] - a[n] for a, b in zip(first, second, strict=True)) for n in seeds])

    return read


def level(number: str) -> Callable[[MeasuredValues], Estimate]:
    """Return what averages GRPO's number over families, seed by seed."""

    def read(measured: MeasuredValues) -> Estimate:
        rows = [measured.values(f"{family}: grpo", number) for family in FAMILIES]
        return estimate([statistics.fmean(values) for values in zip(*rows, strict=True)])

    return read


def expected(name: str, counted: str) -> tuple[Expectation, ...]:
    """Return what is expected of SPO, with its initial values or without."""
    said = f"{name} minus GRPO"
    return (
        *(Derived(f"{counted}: maj@{k} above GRPO (source: +0.034)", gain(f"maj@{k}", name), said, 0.0) for k in VOTES),
        Derived(f"{counted}: avg@k not 0.02 below GRPO (source: +0.003)", gain("pass@1", name), said, -0.02),
        Derived(
            f"{counted}: pass@k above GRPO for every k from 2 to {EVERY[-1]}; here the k whose interval reaches lowest",
            least_sure(name),
            said,
            0.0,
        ),
        *(
            Gain(
                f"{counted}: maj@16 above GRPO on {family} (source: better on all five)",
                f"{family}: grpo",
                f"{family}: {name}",
                "maj@16",
                0.0,
            )
            for family in FAMILIES
        ),
    )


def figure(measured: MeasuredValues) -> str:
    """Draw pass@k over k, averaged over families."""
    series = []
    for name in ALGORITHMS:
        found = list(curves(measured, name).values())
        ks = [float(k) for k in EVERY] if found else []
        series.append(Series(name, ks, [statistics.fmean(one[k] for one in found) for k in ks]))
    return chart(series, "pass@k on held-out questions, mean over families", "k", "pass@k")


CLAIM = Claim(
    title="SPO against GRPO at equal samples",
    claim=(
        "With as many answers a step, SPO learns better than GRPO: the commonest of several answers is right more "
        "often on held-out questions of every kind, the mean answer about as often, and the chance that one of k is "
        "right is higher for every k."
    ),
    source=(
        "Single-stream Policy Optimization, arXiv 2509.13232, main results: Qwen3-8B, five mathematics competitions, "
        "maj@32 63.8 against 60.4 (+3.4 points, better on all five), avg@32 56.0 against 55.7, pass@k above GRPO for "
        "all k."
    ),
    protocol=(
        "Five families (sums, sorting, counting letters, reversing, the largest of some numbers), each with a two-"
        f"layer model that was taught until it is right at about {START}. GRPO (16 prompts of 8) and SPO (128 prompts) "
        f"train it for {STEPS} steps of 128 answers on 512 questions, with the same learning rate, clip (0.2, 0.28), "
        "token mean and 4 updates a step. SPO's initial values take 8 answers a prompt before training, "
        "which the paper does not count; a third arm does without them, so that its samples are equal in number. 96 "
        "held-out questions: maj@k of 16 answers; avg@k and pass@k exactly, from the chance of the right answer's "
        "tokens, for every k from 1 to 32. The gain of a seed is its mean over families. Three earlier forms left no "
        "room. From 0.4, in 40 steps, GRPO was right in 0.97 of the questions with 8 tries. From 0.25, in 30 steps, "
        "three seeds (0 to 2) left most open, and ten others (3 to 12) decided all of what was then expected for "
        "SPO (at equal samples maj@16 +0.029 [0.020, "
        "0.039], avg@k +0.033 [0.026, 0.040], pass@32 +0.007 [0.003, 0.010]), but with 32 tries GRPO was right in "
        "0.973 [0.969, 0.978] where at most 0.97 was asked, so that the gain for many tries was measured against a "
        "ceiling; pass@k was looked at for powers of two alone, and no family for itself but afterwards (by "
        "majority three "
        "of five were sure). So every k and each family became expectations. From 0.25, in 15 steps, ten seeds (13 to "
        "22): 14 of 20 held, 6 were undecided (maj@16 +0.026 [0.018, 0.034], avg@k +0.031 [0.027, 0.035], pass@k "
        "surely "
        "above to k = 7 and nowhere surely below), and GRPO at 0.977 [0.973, 0.980] with 32 "
        "tries, so the check failed: fewer steps leave no more room, since the model that is taught is there already. "
        "Therefore questions that it is seldom right about, chosen by GRPO alone, one seed (100) and no other start "
        "or length tried: "
        "from 0.1, in 30 steps, it is right with 32 tries in 0.92, 0.78, 0.34, 0.93 and 0.80 of the questions of the "
        "five families (before training in 0.89, 0.72, 0.96, 0.78 and 0.88). Nothing of SPO was looked at there. "
        f"Written down on 2026-11-25 before any of them was run: {len(FRESH)} fresh seeds, {FRESH[0]} to {FRESH[-1]}, "
        "a number that is fixed and after which nothing is added."
    ),
    measure=Runs(
        arms,
        numbers={f"maj@{k}": majority(k) for k in VOTES} | {f"pass@{k}": pass_at(k) for k in KS},
        curves={CURVE: passes},
        seeds=FRESH,
    ),
    checks=(
        Derived("GRPO leaves room: pass@32 below 0.97", level("pass@32"), "GRPO", below=0.97),
        Derived("and learns: avg@k 0.1 above where it began", level("pass@1"), "GRPO", above=START + 0.1),
    ),
    scale="two layers, 30 steps",
    expectations=(*expected(EQUAL, "equal samples"), *expected("spo", "initial values not counted, as in the source")),
    figure=figure,
    remarks=(
        "**What we make of it.** With room to gain, votes and the mean answer gain more than in the earlier settings: "
        "15 of 20 expectations hold and none fails. By majority SPO is right 0.060 [0.036, 0.083] more often (of 16 "
        "answers, equal samples; the source has 0.034), and the mean answer 0.056 [0.044, 0.068], where the source "
        "has 0.003. Of the five kinds three are surely better by majority (sorting 0.117, sums 0.077, reversing "
        "0.040) and two undecided (comparing 0.049, by a hair; counting 0.016); with initial values comparing is "
        "surely better too.\n\n"
        "**Every k.** Over all kinds pass@k is surely above GRPO to k = 11 at equal samples and to k = 5 with initial "
        "values, and beyond that not decided: the gain shrinks from 0.051 at 2 over 0.025 at 8 to 0.006 [-0.013, "
        "0.025] at 32, and nowhere is it surely below. Looked at afterwards: one kind makes the difference. Counting "
        "has -0.054 [-0.112, 0.005] at 32 (-0.095 [-0.207, 0.018] with initial values), the mean of the other four "
        "0.021 [0.008, 0.033] (0.020 [0.009, 0.030]), which is the source's claim. In the setting of 30 steps from "
        "0.25, where counting was nearly always right, the gain was sure at all powers of two to 32; in that of 15 "
        "steps it was sure to k = 7.\n\n"
        "**What both do to one kind.** On counting 32 tries found 0.96 of the answers before training (in the pilot's "
        "run), and 0.42 after it with GRPO and 0.32 to 0.36 with SPO, while the mean answer rose from 0.10 to 0.30: "
        "most runs settle on one answer to all questions (nine of ten with GRPO, whose other run keeps 0.84; eight of "
        "ten with SPO at equal samples). So a part of the room that the check asks for is what GRPO itself has lost "
        "there, and is no room of the questions. The 8 answers a prompt that initial values take do not pay for "
        "themselves here either (0.050 [0.039, 0.061] of the mean answer, 0.056 without). All seeds share one warm "
        "model a family, so the intervals speak of this model's training and not of other models."
    ),
)
