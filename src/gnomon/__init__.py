"""gnomon: algorithm-first reinforcement learning for language models. Measure, do not guess.

Names are imported when they are first used, so `import gnomon` is quick and needs no torch.
"""

import importlib
import importlib.machinery
import os
import sys
import warnings
from types import ModuleType
from typing import Any

# Threads that wait for work soon sleep instead of spinning. OpenMP reads this once, when torch is loaded. Beside one
# other busy process a spinning pair made a decoding step 22 times slower; sleeping at once made it a third slower alone
# than a short spin does, which costs a quarter beside one busy process (docs/log/2026-11-21.md). Your own setting wins.
SPIN = "3000"
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN)

_HOMES = {
    "gnomon.core.errors": ("GnomonError", "UserError", "ConfigError", "RunError"),
    "gnomon.core.types": ("Batch", "Completion", "Grade", "Group", "Rollout", "Task"),
    "gnomon.algorithms": ("Algorithm", "PRESETS", "CISPO", "DAPO", "GRPO", "GSPO", "P3O", "PPO", "SPO", "VAPO"),
    "gnomon.config.experiment": ("Experiment",),
    "gnomon.training.api": ("export",),
    "gnomon.training.python_api": ("train", "continue_", "sft", "resume", "evaluate", "load"),
    "gnomon.insight.model_card": ("push_to_hub",),
    "gnomon.analysis.dissect.dissect": ("dissect",),
}
_WHERE = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_WHERE)


# Modules that files of a user's own import by where they were before.
_FORMER = {
    "gnomon.algorithms.testing": "gnomon.testing",
    "gnomon.errors": "gnomon.core.errors",
    "gnomon.experiment": "gnomon.config.experiment",
    "gnomon.launch": "gnomon.training.api",
    "gnomon.metrics": "gnomon.core.metrics",
    "gnomon.types": "gnomon.core.types",
    "gnomon.verifiers.base": "gnomon.rewards.base",
    "gnomon.verifiers": "gnomon.rewards",
}


class _FormerModules:
    """Finds a former module under its present name, and says so."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in _FORMER else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} is {_FORMER[spec.name]} now", FutureWarning, stacklevel=2)
        return importlib.import_module(_FORMER[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_FormerModules())


def __getattr__(name: str) -> Any:
    if name == "__version__":
        metadata = importlib.import_module("importlib.metadata")
        try:
            return metadata.version("gnomon")
        except metadata.PackageNotFoundError:
            return "of a checkout"  # on PYTHONPATH, not installed
    if name not in _WHERE:
        raise AttributeError(f"module 'gnomon' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
