"""Crashes over seeds: VAPO has none, PPO many."""

from gnomon.records.reading import RunRecord
from gnomon.studies.arms import Curve, Runs, smooth
from gnomon.studies.claims import Claim, Gain, Level
from gnomon.studies.stretches import held_out_at, lowest_after_best
from gnomon.studies.valued import FULL, critic_arms, explained

BEGAN = 0.4
SEEDS = tuple(range(12, 36))
kept = lowest_after_best("rollout/reward_mean", 5)


def crashed(record: RunRecord) -> float:
    """Return 1.0 for a run that lost more than half of its best reward or of what it began with, or did not end."""
    return float(record.state() != "finished" or kept(record) < 0.5 or held_out_at()(record) < BEGAN / 2)


CLAIM = Claim(
    title="VAPO does not crash, PPO does",
    claim=(
        "Over several runs with different seeds VAPO's training never crashes or diverges, while plain PPO on long "
        "answers often does, for its critic begins without knowing anything."
    ),
    source="VAPO, arXiv 2504.05118, its introduction and section 5 (three runs); its review, main results.",
    protocol=(
        "The setting in which `vapo_ablation` was measured first (learning rate 0.001, 24 steps of 64 answers in four "
        "minibatches; its page says the rest), whose rate PPO alone has chosen. VAPO, PPO, and GRPO, which has no "
        "critic and shows what the rate does by itself; three warm models. A run has crashed when the mean reward of "
        "five steps falls below half of the best five before, when its held-out rate ends below half of the "
        f"{BEGAN} that it was taught, or when it ends before its last step. In an earlier setting, at 3e-4 with "
        "critics that began at zero, none of twelve runs of PPO or VAPO crashed: all kept nine tenths of their best. "
        "In this one seeds 0 to 11 were measured first, and each rate missed its bound by a hair: 1 of 12 runs of VAPO "
        "crashed (0.083 [0.015, 0.354]), 7 of 12 of PPO (0.583 [0.320, 0.807]), 1 of 12 of GRPO; VAPO ended 0.231 "
        "[0.099, 0.363] above PPO held out. That left the claim open. This is the replication: twice as many seeds, 12 "
        "to 35, named before any of them was run, none of the first among them. The three expectations are the first "
        "run's; a fourth compares the two rates directly, as the first run's remarks did without having planned it. "
    ),
    measure=Runs(
        critic_arms((FULL, "ppo", "grpo")),
        numbers={
            "crashed": crashed,
            "kept of the best": kept,
            "held out": held_out_at(),
            "known at the start, last quarter": explained(3, 1, 3),
        },
        curves={"reward": smooth("rollout/reward_mean", 4)},
        seeds=SEEDS,
        is_partial=True,
    ),
    checks=(
        Level(
            "PPO's critic knows nothing of the last quarter of answers at the start",
            "ppo",
            "known at the start, last quarter",
            below=0.1,
        ),
        Level("VAPO's explains 0.3 of it, or more", FULL, "known at the start, last quarter", above=0.3),
        Level("GRPO learns at this rate: from 0.4 to above 0.45", "grpo", "held out", above=0.45),
    ),
    expectations=(
        Level("fewer than one in three of VAPO's runs crash", FULL, "crashed", below=1 / 3, is_rate=True),
        Level("more than one in three of PPO's do", "ppo", "crashed", above=1 / 3, is_rate=True),
        Gain("VAPO ends above PPO held out, by 0.1", "ppo", FULL, "held out", above=0.1),
        Gain("a run of PPO crashes more often than one of VAPO", FULL, "ppo", "crashed", above=0.0),
    ),
    figure=Curve("reward", "Reward of 24 seeds, in a band from the lowest to the highest", "reward"),
    remarks=(
        "**What we make of it.** The replication bears out what the first run could not decide: 1 of 24 runs of VAPO "
        "crashes, fewer than one in three and fewer than of PPO (by 0.375 [0.132, 0.618]; Fisher's exact test, "
        "one-sided, p = 0.002), and VAPO ends 0.19 [0.12, 0.26] above PPO held out. How many of PPO's do is the first "
        "run's number a little lower: 10 of 24, which more than one in three may or may not be. Nothing here says that "
        "a critic helps: GRPO, which has none, crashes in 5 of 24 and ends where VAPO does (-0.02 [-0.08, 0.05]); that "
        "VAPO crashes less often than GRPO is not decided (-0.17 [-0.37, 0.04]). **And yet it is open**, for GRPO "
        "does not learn here: it ends at 0.386 [0.327, 0.444], a little below the 0.4 that it was taught. (For the "
        "replication that check had been lowered to 0.35 before it was run, with the first run's 0.43 known; a bound "
        "that follows a result is none, so the first run's 0.45 stands again.) What is shown: at a rate too high for "
        "anybody to learn with, PPO "
        "loses half and VAPO nothing. Why the critic's ignorance at the start would be the reason is not answered "
        "here; in `vapo_ablation` VAPO without value pre-training, as ignorant, does not fall."
    ),
)
