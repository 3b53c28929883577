"""Reference numbers in the package: losses and gradients computed by a third program."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

import numpy as np

from gnomon.analysis.dissect.reference import ORACLES, Oracle, Step
from gnomon.analysis.dissect.reference.advantages import gae, length_adaptive
from gnomon.analysis.dissect.reference.losses import clip, constant_length, geometric_clip, leash

ATOL = 1e-7
"""The file's gradients are finite differences with an error of about 1e-9."""


@dataclass(frozen=True)
class Golden:
    """One reference case of the file, with the preset and the formulas that should give its numbers.

    Attributes:
        preset: Name of the preset.
        section: Keys that lead to the case.
        loss: Key of the loss.
        gradient: Key of the gradient; empty if the case has none.
        changes: Settings that differ from the preset.
        oracle: The same change of the preset's oracle.
        current: Section with the current log-probabilities.
        proximal: Array of the fixture with the proximal log-probabilities.
    """

    preset: str
    section: tuple[str, ...]
    loss: str = "loss"
    gradient: str = "dloss_dlp"
    changes: Mapping[str, Any] = field(default_factory=dict)
    oracle: Callable[[Oracle], Oracle] = lambda oracle: oracle
    current: str = "fixture"
    proximal: str = "old"

    @property
    def spec(self) -> dict[str, Any]:
        """The algorithm as `gnomon.algorithms.resolve` takes it."""
        return {"preset": self.preset, **self.changes}

    @property
    def formulas(self) -> Oracle:
        """The oracle of the changed preset."""
        return self.oracle(ORACLES[self.preset])

    def expected(self) -> tuple[float, Any]:
        """Return loss and gradient [B, T]; None without a gradient."""
        numbers = vectors()
        for name in self.section:
            numbers = numbers[name]
        return float(numbers[self.loss]), np.array(numbers[self.gradient]) if self.gradient else None

    def step(self) -> Step:
        """Return the file's four sequences."""
        fixture = vectors()["fixture"]
        mask = np.array(fixture["mask"]) > 0
        return Step(
            rewards=np.array(fixture["rewards"]),
            mask=mask,
            group=np.array(fixture["gid"]),
            graded=np.ones(len(mask), dtype=bool),
            truncated=np.zeros(len(mask), dtype=bool),
            current=np.array(vectors()[self.current]["lp"]),
            behavior=np.array(fixture["old"]),
            proximal=np.array(fixture[self.proximal]),
            reference=np.array(fixture["ref"]),
            values=np.array(fixture["values"]),
        )


def vectors() -> dict[str, Any]:
    """Read the whole file."""
    content: dict[str, Any] = json.loads(
        (files("gnomon.analysis.dissect") / "golden_vectors.json").read_text(encoding="utf-8")
    )
    return content


GOLDENS: tuple[Golden, ...] = (
    Golden("grpo", ("clip_family", "grpo_eps0.2_seqmean")),
    Golden("dapo", ("clip_family", "dapo_0.2_0.28_tokenmean")),
    Golden(
        "dr-grpo",
        ("clip_family", "dr_grpo_horizon6"),
        changes={"aggregate.length": 6},
        oracle=lambda o: replace(o, mean=constant_length(6)),
    ),
    Golden("gspo", ("gspo",), current="gspo"),
    Golden("gspo-token", ("gspo",), current="gspo"),
    Golden(
        "gmpo",
        ("gmpo",),
        loss="loss_eps_log_0p2",
        gradient="dloss_dlp_0p2",
        changes={"surrogate.epsilon": 0.2},
        oracle=lambda o: replace(o, push=geometric_clip(0.2)),
    ),
    Golden("sapo", ("sapo",)),
    Golden("cispo", ("cispo", "absolute_cap_5")),
    Golden("p3o", ("p3o", "rho_kl_variant")),
    Golden(
        "p3o",
        ("p3o",),
        changes={"regularizers.0.estimator": "k3"},
        oracle=lambda o: replace(o, terms=(leash(is_k3=True),)),
    ),
    Golden(
        "p3o-two-anchor",
        ("p4o_mixture_anchor",),
        gradient="",
        changes={"regularizers.0.estimator": "k3"},
        oracle=lambda o: replace(o, terms=(leash(is_mixture=True, is_k3=True),)),
        proximal="prox",
    ),
    Golden(
        "decoupled-ppo",
        ("decoupled_ppo",),
        changes={"surrogate.trust": {"low": 0.1, "high": 0.1}},
        oracle=lambda o: replace(o, push=clip(0.1, 0.1, cap=5.0)),
        proximal="prox",
    ),
    Golden(
        "vapo",
        ("vapo",),
        changes={"advantage.policy_lambda.alpha": 1.0},
        oracle=lambda o: replace(o, credit=gae(length_adaptive(1.0))),
    ),
)
