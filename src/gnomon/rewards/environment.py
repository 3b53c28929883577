"""What an environment said that a rollout was worth."""

from dataclasses import dataclass, field
from typing import Literal

from gnomon.rewards.base import Sample, Verifier, VerifierError, real


@dataclass(frozen=True)
class EnvironmentReward(Verifier):
    """The sum of the rewards of the environment's replies; 0 when it gave none.

    Attributes:
        kind: "environment".

    Raises:
        VerifierError: A sample was no conversation.

    >>> EnvironmentReward()(Sample("", "", columns={"environment_reward": 0.5}))
    0.5
    """

    kind: Literal["environment"] = field(default="environment", kw_only=True)

    def __call__(self, sample: Sample) -> float:
        """Look it up."""
        if "environment_reward" not in sample.columns:
            raise VerifierError("there was no environment; give the experiment an [environment]")
        return real(sample.columns["environment_reward"])
