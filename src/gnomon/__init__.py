"""gnomon: algorithm-first reinforcement learning for language models. Measure, do not guess.

Names are imported when they are first used, so `import gnomon` is quick and needs no torch.
"""

import importlib
import os
from typing import Any

# Threads that wait for work soon sleep instead of spinning. OpenMP reads this once, when torch is loaded. Beside one
# other busy process a spinning pair made a decoding step 22 times slower; sleeping at once made it a third slower alone
# than a short spin does, which costs a quarter beside one busy process (docs/log.md). Your own setting wins.
SPIN = "3000"
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN)

_HOMES = {
    "gnomon.errors": ("GnomonError", "UserError", "ConfigError", "RunError"),
    "gnomon.types": ("Batch", "Completion", "Grade", "Group", "Rollout", "Task"),
    "gnomon.algorithms": ("Algorithm", "PRESETS", "CISPO", "DAPO", "GRPO", "GSPO", "P3O", "PPO", "SPO", "VAPO"),
    "gnomon.experiment": ("Experiment",),
    "gnomon.launch": ("train", "resume", "evaluate", "export"),
    "gnomon.studies.dissect": ("dissect",),
}
_WHERE = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'gnomon' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
