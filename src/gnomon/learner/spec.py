"""The specification of a learner, the same for one process and for several that share a model."""

from dataclasses import dataclass

import torch
from torch import nn

from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.sections import EmaProximal
from gnomon.core.errors import ConfigError
from gnomon.learner.learner import TorchLearner
from gnomon.learner.precision import dtype_of, resolve_precision
from gnomon.learner.reference import ReferenceModels
from gnomon.learner.sections import LearnerConfig
from gnomon.models.adapter_config import LoraConfig
from gnomon.models.critic import head_for, load_critic
from gnomon.models.device import resolve_device
from gnomon.models.load import load_model
from gnomon.models.routing import moe_layers


@dataclass(frozen=True)
class LearnerSpec:
    """Everything that a process needs to build its learner.

    Attributes:
        model: Name or folder of the model.
        algorithm: Decides about critic, reference and averaged proximal policy.
        plan: The learner's section.
        steps: Training step at which schedules end.
        device: Device as the user wrote it; see `resolve_device`.
        seed: Seed of the adapters that a run begins with.
        yields_device: An engine that sleeps while the learner works is on the same device.
    """

    model: str
    algorithm: Algorithm
    plan: LearnerConfig
    steps: int
    lora: LoraConfig | None = None
    trust_remote_code: bool = False
    device: str = "cpu"
    seed: int = 0
    yields_device: bool = False

    def check(self) -> None:
        """Refuse what cannot be meant with several processes, or is not here, before anything is loaded.

        Raises:
            ConfigError: A setting does not fit the device or the number of processes.
        """
        plan, device = self.plan, resolve_device(self.device)
        # Any number of CPU processes can share a machine; only GPUs have to be one each.
        if plan.processes == 1 or device.type == "cpu":
            return
        if ":" in self.device:
            raise ConfigError(
                f"device = '{self.device}' is one GPU, and learner.processes = {plan.processes} needs one each, from "
                "the first on; set device = 'cuda'"
            )
        if plan.processes > torch.cuda.device_count():
            raise ConfigError(
                f"learner.processes = {plan.processes} needs a GPU each, and there are {torch.cuda.device_count()} "
                f"here; set learner.processes = {torch.cuda.device_count()}, or device = 'cpu'"
            )

    def network(self, device: torch.device) -> nn.Module:
        """Return the model on ``device``, adapters included, as it computes; the same weights every time."""
        # New adapters are drawn from the run's seed in every process alike, and the caller's generator is left as it
        # was.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return load_model(self.model, self._dtype, self.lora, self.trust_remote_code, device)

    def learner(self, model: nn.Module, device: torch.device) -> TorchLearner:
        """Return what trains ``model``, with its reference and critic, on the mesh that this process is on.

        Raises:
            ConfigError: The algorithm replays routing, and the model's routers have a form that cannot be replayed.
        """
        algorithm = self.algorithm
        if algorithm.routing != "free":
            # Called for its error: a router of an unknown form is refused here, not in the first step.
            moe_layers(model)
        reference, critic = self.references(device), self._critic(model, device)
        return TorchLearner(model, self.plan, self.steps, reference, critic, algorithm.proximal)

    def references(self, device: torch.device) -> ReferenceModels:
        """Return what the reference policy computes with, each teacher once; nothing where no piece reads it."""
        plan = self.algorithm.reference
        if "reference" not in self.algorithm.needs:
            return ReferenceModels()
        precision = self.plan.precision if plan.precision == "auto" else plan.precision
        dtype = dtype_of(resolve_precision(precision, str(resolve_device(self.device))))
        teachers = {
            name: load_model(name, dtype, trust_remote_code=plan.trust_remote_code, device=device)
            for name in plan.teachers
        }
        # With LoRA the first weights are the policy without its adapters, so no second model is loaded for them.
        model = self.network(device) if plan.model == "start" and self.lora is None else teachers.get(plan.model)
        average = EmaProximal(plan.decay) if plan.model == "average" else None
        return ReferenceModels(
            model,
            {teacher.task: teachers[teacher.model] for teacher in plan.tasks},
            plan.model == "policy",
            average,
            self.algorithm.reference_top,
        )

    @property
    def _dtype(self) -> torch.dtype:
        return dtype_of(resolve_precision(self.plan.precision, str(resolve_device(self.device))))

    def _critic(self, policy: nn.Module, device: torch.device) -> nn.Module | None:
        """Return a value model with a trunk of its own, a head for the policy's trunk, or None."""
        plan = self.algorithm.critic
        if plan is None or plan.trunk == "shared":
            return None if plan is None else head_for(policy, self.model if plan.ranks_pairs else None)
        trusts = plan.trust_remote_code
        return load_critic(self.model, plan.initial, self._dtype, self.trust_remote_code, device, trusts)
