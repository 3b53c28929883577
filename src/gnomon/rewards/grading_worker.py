"""The program that grades: ``python -m gnomon.rewards.grading_worker FD``. It loads no torch."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from gnomon.core.processes.client import WorkerProgram
from gnomon.core.processes.seeding import seed_all
from gnomon.core.processes.server import run_program
from gnomon.rewards.base import Sample, Verdict
from gnomon.rewards.grading import Grading, from_json


def grading_program(grading: Grading) -> WorkerProgram:
    """Return the program whose workers grade with these rewards."""
    # What the message of a failed import lists: a user's function is known by its path, another reward by its part.
    names = (str(getattr(reward.verifier, "function", reward.part)) for reward in grading.rewards)
    return WorkerProgram(__name__, grading, "the rewards", ", ".join(names))


@dataclass(frozen=True)
class GradingHandler:
    """Samples to verdicts."""

    grading: Grading
    what: str = "the rewards"

    def prepare(self) -> None:
        """Import the rewards."""
        self.grading.prepare()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the verdict on a sample, or those on all answers to a question; none where no reward sees them all."""
        # A trial before the run asks for one reward alone, so that one worker can try all of them in turn.
        grading = self.grading.only(**request["trial"]) if "trial" in request else self.grading
        # One sample is graded without asking whether a reward is joint, which would import the user's module.
        if "samples" not in request:
            return from_verdict(_judge(grading, request))
        samples = [to_sample(fields) for fields in request["samples"]]
        try:
            verdicts = grading.together(samples) if grading.is_joint else []
        except BaseException as error:  # as in `_judge`
            verdicts = [Verdict(None, error=f"grading raised {type(error).__name__}")] * len(samples)
        return {"verdicts": [from_verdict(verdict) for verdict in verdicts]}


def read_handler(settings: Any) -> GradingHandler:
    """Return the handler of a grading that travelled as a table."""
    return GradingHandler(from_json(json.dumps(settings)))


def from_sample(sample: Sample) -> dict[str, Any]:
    """Return the sample's fields."""
    return {**vars(sample), "columns": dict(sample.columns)}


def to_sample(fields: dict[str, Any]) -> Sample:
    """Return the sample with these fields."""
    return Sample(**fields)


def from_verdict(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict's fields."""
    return asdict(verdict)


def to_verdict(fields: dict[str, Any]) -> Verdict:
    """Return the verdict with these fields."""
    return Verdict(fields["reward"], fields["parts"], fields["error"], fields["answer"])


def _judge(grading: Grading, request: dict[str, Any]) -> Verdict:
    try:
        sample = to_sample(request["sample"])
        seed_all(sample.seed, "reward")
        return grading(sample)
    except BaseException as error:  # KeyboardInterrupt, or an exception whose text cannot be made
        return Verdict(None, error=f"grading raised {type(error).__name__}")


if __name__ == "__main__":
    run_program(read_handler)
