"""Answers of a policy in few bits: does GRPO collapse, does P3O not, and what do two checkpoints say held out?"""

from pathlib import Path

from experiments.claims.arms import Arm, Curve, Number, Runs, smooth, whole
from experiments.claims.definition import Claim, Gain, Level
from experiments.claims.lengths import held_out_at, lowest_after_best, stretch_experiment
from experiments.claims.seeds_needed import fresh_alone

from gnomon.records.reading import RunRecord

STEPS = 120
SEEN, FRESH = tuple(range(4)), tuple(range(4, 14))
HALF = STEPS // 2
FOUR = "algorithm.updates.minibatches=4"
TOKENS = "algorithm.aggregate=TokenMean"
WIDTH = ("algorithm.surrogate.trust.low=0.4", "algorithm.surrogate.trust.high=0.4")
GRPO = ("algorithm=grpo", FOUR, TOKENS, *WIDTH, "algorithm.ratio.anchor=behavior")
P3O = ("algorithm=p3o", FOUR)
LONG = (
    f"steps={STEPS}",
    "learner.optimizer.learning_rate=3e-4",
    f"checkpoints.keep_every={HALF}",
    f"checkpoints.every={HALF}",
)


def arms(folder: Path, seed: int) -> list[Arm]:
    """Both with answers in fp8, and in int4, which is much coarser."""
    base = stretch_experiment(folder, seed)
    return [
        Arm(f"{name}, {kind}", base, (*algorithm, *LONG, f"engine.rounding={kind}"))
        for kind in ("fp8", "int4")
        for name, algorithm in (("grpo", GRPO), ("p3o", P3O))
    ]


def change(first: int, second: int) -> Number:
    """Return what reads how much higher the held-out rate is after ``second`` steps than after ``first``."""

    def read(record: RunRecord) -> float:
        return held_out_at(second)(record) - held_out_at(first)(record)

    return read


CLAIM = Claim(
    title="Low-precision answers make GRPO collapse and P3O not, in training and held out",
    claim=(
        "Trained in bf16 on answers that were sampled in fp8, GRPO first improves and then collapses, while P3O goes "
        "on under the same settings. Held out the same is seen between two checkpoints: GRPO falls from 0.499 to 0.029 "
        "on AMC (0.154 to 0.002 on AIME 24), P3O rises from 0.478 to 0.529 (0.158 to 0.173)."
    ),
    source="P3O, arXiv 2605.12380, its article's sections on FP8 rollouts and held-out benchmarks (iterations 15, 30).",
    protocol=(
        f"Stretches of the alphabet, a model that is right 40% of the time (held out 27%), {STEPS} steps of 64 "
        "answers, four "
        "minibatches a step, learning rate 3e-4, each seed with a model of its own. Weights are rounded before "
        "they are sent to the engine, to fp8 (e4m3, a scale a channel) and to int4, whose error is some ten times as "
        "large, since a model of two layers has no depth in which fp8's could add up. GRPO has a width of 0.4 and "
        "its ratio against what sampled, as in the source; P3O has its own; both take the mean over tokens. *Kept "
        "of the best* is the lowest mean reward of ten steps after the best ten, divided by that: a collapse is "
        f"below one half. Held-out rates are those of the learner's own weights, exact, after {HALF} and {STEPS} "
        "steps, as the source looks at two checkpoints. This is the length that was planned at first; an earlier form "
        "was cut to 32 steps at 6e-4 with three seeds, too short for a collapse that comes late, and nothing collapsed "
        "in it (GRPO kept 0.98 of its best in fp8 and all of it in int4, P3O 0.98 and 0.88). No pilot was run. "
        + fresh_alone(
            SEEN,
            FRESH,
            "2026-11-25",
            "whether int4 is felt (0.068 [0.048, 0.088] nats where 0.05 is asked), what P3O keeps of its best (0.941 "
            "[0.876, 1.006] in fp8, 0.872 [0.734, 1.010] in int4, where 0.9 is) and by how much it ends above GRPO "
            "(0.030 [-0.064, 0.124] and 0.082 [0.001, 0.162], where 0.1 is)",
        )
    ),
    measure=Runs(
        arms,
        numbers={
            "kept of the best": lowest_after_best("rollout/reward_mean", 10),
            "held out, half": held_out_at(HALF),
            "held out, end": held_out_at(STEPS),
            "first half": change(0, HALF),
            "second half": change(HALF, STEPS),
            "mismatch, nats": whole("mismatch/total_abs_nats"),
            "effective size": whole("loss/ess_fraction"),
            "reward, all steps": whole("rollout/reward_mean"),
        },
        curves={"reward": smooth("rollout/reward_mean", 6)},
        seeds=FRESH,
        is_partial=True,
    ),
    checks=(
        Level("GRPO improves first: by 0.05 held out in the first half, in fp8", "grpo, fp8", "first half", above=0.05),
        Level("int4 is felt: 0.05 nats a token or more", "grpo, int4", "mismatch, nats", above=0.05),
    ),
    scale="two layers, 120 steps",
    headline=(0, 2),
    expectations=(
        Level(
            "GRPO collapses in fp8: it loses more than half of its best reward",
            "grpo, fp8",
            "kept of the best",
            below=0.5,
        ),
        Level("it does in int4", "grpo, int4", "kept of the best", below=0.5),
        Level("P3O keeps nine tenths of its best in fp8", "p3o, fp8", "kept of the best", above=0.9),
        Level("and in int4", "p3o, int4", "kept of the best", above=0.9),
        Gain(
            "at the end P3O is above GRPO held out by 0.1, in fp8", "grpo, fp8", "p3o, fp8", "held out, end", above=0.1
        ),
        Gain("and in int4", "grpo, int4", "p3o, int4", "held out, end", above=0.1),
        Level("between the two checkpoints GRPO falls in fp8, by 0.1 or more", "grpo, fp8", "second half", below=-0.1),
        Level("and P3O does not: no more than 0.02", "p3o, fp8", "second half", above=-0.02),
    ),
    figure=Curve("reward", "Reward with answers in fp8 and in int4", "reward"),
    remarks=(
        "**What we make of it.** Nothing collapses, in fp8 or in int4, in 120 steps as in 32, and ten seeds say it "
        "surely: GRPO keeps 0.955 [0.941, 0.968] of its best in fp8 and 0.906 [0.869, 0.943] in int4 where a collapse "
        "is below one half. So who prevents it cannot be said. What P3O promises it keeps (0.945 in both, where 0.9 "
        "is asked); GRPO would pass the same test in fp8 and leave it undecided in int4, and that P3O keeps more "
        "there is undecided (0.039 [-0.001, 0.078]). Between the two checkpoints both rise in fp8, GRPO by 0.077 "
        "[0.050, 0.104], where the source's falls from 0.499 to 0.029; and they end level held out (0.004 [-0.039, "
        "0.046]). fp8 moves a token by 0.008 nats here and leaves an effective size of 0.997: the cause of a "
        "collapse, ratios that drift far from 1, is not there, and we do not expect it of a model of two layers with "
        "answers of 20 letters. The source trains in bf16; here the learner computes in fp32, so that rounding is the "
        "engine's alone, and what bf16 adds is not tested.\n\n"
        "In int4, where the gap is surely felt (0.068 nats a token with GRPO, effective size 0.96), the two differ in "
        "the claim's direction: P3O earns 0.690 over all steps where GRPO earns 0.588, and ends 0.085 [0.045, 0.126] "
        "higher held out, which is above 0 and not decided against the 0.1 that was asked. Its own gap is smaller, "
        "surely (by 0.023 [0.016, 0.030] nats), though the rounding is the same; why, this does not say."
    ),
)
