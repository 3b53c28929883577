"""Crashes over seeds: VAPO has none, PPO many."""

from gnomon.records.reading import RunRecord
from gnomon.studies.arms import Curve, Runs, smooth
from gnomon.studies.claims import Claim, Gain, Level
from gnomon.studies.stretches import held_out_at, lowest_after_best
from gnomon.studies.valued import FULL, bias, critic_arms

RATE, BEGAN = 1e-3, 0.4
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
        f"As `vapo_ablation` (critics begin as reward models), at a learning rate of {RATE:g}; VAPO, PPO, and "
        "GRPO, which "
        "has no critic and shows that the rate itself can be learned with; eight seeds of three warm models. A run has "
        "crashed when the mean reward of five steps falls below half of the best five before, when its held-out rate "
        f"ends below half of the {BEGAN} that it was taught, or when it ends before its last step. The rate was chosen "
        "by PPO alone, one seed that is not among these: at 3e-4 it rises slowly, at 1e-3 its held-out rate ends at "
        "0.07 after 30 steps, at 2e-3 its reward is 0 from the third step on. The other arms were not looked at."
    ),
    measure=Runs(
        critic_arms((FULL, "ppo", "grpo"), RATE),
        numbers={
            "crashed": crashed,
            "kept of the best": kept,
            "held out": held_out_at(),
            "bias at the start": bias(1, 3),
        },
        curves={"reward": smooth("rollout/reward_mean", 4)},
        seeds=tuple(range(8)),
        is_partial=True,
    ),
    checks=(
        Level("PPO's critic is biased at the start, by 0.1 or more", "ppo", "bias at the start", above=0.1),
        Level("GRPO learns at this rate: from 0.4 to above 0.45", "grpo", "held out", above=0.45),
    ),
    expectations=(
        Level("fewer than one in three of VAPO's runs crash", FULL, "crashed", below=1 / 3, is_rate=True),
        Level("more than one in three of PPO's do", "ppo", "crashed", above=1 / 3, is_rate=True),
        Gain("VAPO ends above PPO held out, by 0.1", "ppo", FULL, "held out", above=0.1),
    ),
    figure=Curve("reward", "Reward of eight seeds, in a band from the lowest to the highest", "reward"),
)
