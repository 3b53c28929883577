"""From what a person wrote to what a run computes with: an `Experiment` becomes `Resolved`, once.

Device, precision, the learner's parts and who holds weights are worked out here and handed on. Whatever needs one of
them takes a `Resolved` and asks that; only settings, which need no machine, are read from its experiment.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch

from gnomon.config.experiment import Experiment, with_absolute_paths
from gnomon.core.errors import ConfigError
from gnomon.core.sections import STARTED
from gnomon.learner.precision import Precision, dtype_of, resolve_precision
from gnomon.learner.spec import LearnerSpec
from gnomon.models.cpu.kernels import kernels_of
from gnomon.models.device import describe_device, resolve_device
from gnomon.models.size import outline
from gnomon.models.slow import slow_parts
from gnomon.records.run_card import PROMISES
from gnomon.rewards.judge import RubricJudge


@dataclass(frozen=True)
class Resolved:
    """An experiment with what it means on this machine, each part worked out when it is first asked for, and kept.

    So a plan for hardware that is not here asks for no device, and a device that is missing is refused by whoever
    needs it first. A process elsewhere is sent the experiment, and resolves it on its own machine.
    """

    experiment: Experiment

    @cached_property
    def device(self) -> torch.device:
        """What computes: of this machine, or "cuda" where the GPUs are those of a cluster that is joined.

        Raises:
            ConfigError: If it is not here, and is not looked for elsewhere.
        """
        is_elsewhere = bool(self.experiment.cluster.address) and self.experiment.device == "cuda"
        # A driver without a GPU may start a run whose learners and engines are on a cluster's GPUs.
        if is_elsewhere and not torch.cuda.is_available():
            return torch.device("cuda")
        return resolve_device(self.experiment.device)

    @cached_property
    def precision(self) -> Precision:
        """What the network computes in.

        Raises:
            ConfigError: If only a GPU that is elsewhere could say.
        """
        asked, device = self.experiment.learner.precision, self.device
        if asked == "auto" and device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "learner.precision = 'auto' asks the GPU, and this machine has none: the cluster's are elsewhere; set "
                "learner.precision = 'bf16', or 'fp32'"
            )
        return resolve_precision(asked, str(device))

    @property
    def dtype(self) -> torch.dtype:
        """The same as torch has it.

        Raises:
            ConfigError: As `precision`.
        """
        return dtype_of(self.precision)

    @cached_property
    def learner_spec(self) -> LearnerSpec:
        """What the learner is made of."""
        experiment = self.experiment
        return LearnerSpec(
            model=experiment.model,
            algorithm=experiment.algorithm,
            plan=experiment.learner,
            steps=experiment.steps,
            lora=experiment.lora,
            trust_remote_code=experiment.trust_remote_code,
            device=experiment.device,
            seed=experiment.seed,
            yields_device=experiment.engine.sleeps,
        )

    @property
    def shares_weights(self) -> bool:
        """Whether the engine reads the learner's own tensors: one local engine, never asked while they change.

        Rounded weights are others than the learner's, answers of older weights need those, each of several engines
        would have to stand still while another one computes with the same module, and parts of weights in other
        processes cannot be read at all.
        """
        experiment, plan = self.experiment, self.experiment.engine
        # Each condition has its reason in the docstring; all are needed at once.
        is_plain = plan.kind == "local" and plan.count == 1 and plan.rounding == "none"
        is_plain = is_plain and experiment.cluster.kind == "none"
        return is_plain and experiment.staleness_bound == 0 and not experiment.learner.is_sharded

    @property
    def own_copies(self) -> int:
        """Copies of the weights that engines hold on this machine, beside the learner's."""
        plan = self.experiment.engine
        is_elsewhere = plan.kind == "vllm" and plan.server not in ("", STARTED)
        return 0 if is_elsewhere or self.shares_weights else plan.count

    @property
    def kept_bytes(self) -> int:
        """Memory that each of gnomon's own engines keeps keys and values in between turns; 0 without turns."""
        experiment = self.experiment
        has_turns = experiment.environment is not None and experiment.environment.max_turns > 1
        return int(experiment.engine.kept_gib * 2**30) if has_turns and experiment.engine.kind == "local" else 0

    @property
    def determinism_limit(self) -> str | None:
        """What the experiment itself takes from bitwise repetition; None where only the device decides."""
        experiment = self.experiment
        if experiment.engine.draws == "vllm":
            return PROMISES["native"]
        if experiment.staleness_bound:
            return PROMISES["overlapped"]
        judges = (one.verifier for one in experiment.rewards if isinstance(one.verifier, RubricJudge))
        if experiment.environment is not None or any(judge.is_policy for judge in judges):
            return PROMISES["conversing"]
        if experiment.cluster.kind != "none":
            return PROMISES["clustered"]
        if experiment.engine.kind != "local" or experiment.engine.count > 1:
            return PROMISES["served"]
        processes = experiment.learner.processes
        if processes > 1 and self.device.type == "cpu":
            return PROMISES["parted"].format(processes=processes)
        return PROMISES["timed"] if experiment.budget.seconds else None

    @cached_property
    def native(self) -> str:
        """What a run's card says of the functions in C that it computes with; "" where there are none."""
        if self.device.type != "cpu":
            return ""
        kernels = kernels_of(torch.empty(0, dtype=self.dtype))
        return "" if kernels is None else kernels.name

    def slow_ways(self, prompt_tokens: float) -> tuple[str, ...]:
        """Return a sentence for each slower way that the run computes by, with its factor: for plan, start and card.

        Args:
            prompt_tokens: Tokens of a usual prompt.
        """
        experiment = self.experiment
        if experiment.engine.kind != "local":
            return ()
        answer = experiment.sampling.max_completion_length
        turns = 1 if experiment.environment is None else experiment.environment.max_turns
        is_kept = experiment.engine.kept_gib > 0
        model = outline(experiment.model, experiment.trust_remote_code)
        said = list(slow_parts(model, prompt_tokens, answer, turns, is_kept))
        if experiment.lora is not None and experiment.lora.quantized is not None:
            said.append(
                f"lora.base = '{experiment.lora.base}' is dequantized in every pass: where it was measured "
                "(SmolLM2-135M on a CPU, nf4) a decoding step of 16 rows took 2.7 times as long and an update 1.1 times"
            )
        if self.device.type == "cpu" and not self.native:
            said.append(
                "there are no functions in C (no compiler, or GNOMON_NATIVE=0), so PyTorch does what they would: "
                "generation and updates take up to twice as long (estimated: docs/speed.md)"
            )
        return tuple(said)

    @property
    def device_name(self) -> str:
        """What a run's card says of what computes."""
        device = self.device
        is_here = device.type == "cpu" or torch.cuda.is_available()
        return describe_device(device) if is_here else f"{device} (of the cluster's machines)"

    def with_absolute_paths(self) -> Self:
        """Return the same with the files that it names as absolute paths, as `config.experiment` does."""
        return replace(self, experiment=with_absolute_paths(self.experiment))


def resolve(experiment: Experiment) -> Resolved:
    """Return the experiment with what depends on this machine decided, so that its record says what was run.

    The device is left as it was asked for: it changes rounding alone.

    Raises:
        ConfigError: If it is not here.
    """
    # "auto" is written as what it means here, so that a resumed run on another machine does not change precision.
    learner = replace(experiment.learner, precision=Resolved(experiment).precision)
    return Resolved(replace(experiment, learner=learner))
