"""The names that dashboards made for TRL and verl expect, for what is the same quantity here.

Left out on purpose, for they would lie: TRL's ``reward_std`` (a mean of group deviations), TRL's ``kl`` and verl's
``actor/ppo_kl`` (other policies or estimators), verl's ``perf/*`` (tokens with prompts, per device).
"""

from collections.abc import Mapping

ALIASES: Mapping[str, tuple[str, ...]] = {
    "rollout/reward_mean": ("reward", "critic/score/mean"),
    "rollout/degenerate_group_fraction": ("frac_reward_zero_std",),
    "rollout/length_tokens_mean": ("completions/mean_length", "response_length/mean"),
    "rollout/length_tokens_max": ("completions/max_length", "response_length/max"),
    # verl compares a length with the budget; here and in TRL it is what the engine said. They differ in one case: an
    # answer that ends exactly at the budget.
    "rollout/truncated_fraction": ("completions/clipped_ratio", "response_length/clip_ratio"),
    "loss/policy": ("actor/pg_loss",),
    "loss/clipped_fraction": ("clip_ratio/region_mean", "actor/pg_clipfrac"),
    "loss/entropy_nats": ("entropy", "actor/entropy"),
    "learner/gradient_norm": ("grad_norm", "actor/grad_norm"),
    "learner/learning_rate": ("learning_rate", "actor/lr"),
    "time/generate_seconds": ("timing_s/gen",),
    "time/grade_seconds": ("timing_s/reward",),
    "time/score_seconds": ("timing_s/old_log_prob",),
    "time/update_seconds": ("timing_s/update_actor",),
    "time/publish_seconds": ("timing_s/update_weights",),
    "time/step_seconds": ("step_time", "timing_s/step"),
}


def with_aliases(values: Mapping[str, float]) -> dict[str, float]:
    """Return ``values`` and, beside them, the same numbers under the names of others.

    >>> with_aliases({"learner/learning_rate": 0.1, "reward/exact_mean": 1.0})  # doctest: +NORMALIZE_WHITESPACE
    {'learner/learning_rate': 0.1, 'reward/exact_mean': 1.0, 'learning_rate': 0.1, 'actor/lr': 0.1,
     'rewards/exact/mean': 1.0}
    """
    named = dict(values)
    for name, value in values.items():
        for alias in ALIASES.get(name, ()):
            named.setdefault(alias, value)
        if name.startswith("reward/") and name.endswith("_mean"):
            named.setdefault(f"rewards/{name[len('reward/') : -len('_mean')]}/mean", value)
    return named
