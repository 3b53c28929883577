"""The weights of an architecture by the names of its files, which is how other programs want them."""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon.core.errors import ModelError
from gnomon.models import default
from gnomon.models.load import model_config
from gnomon.models.lora import merged_tensors
from gnomon.models.tiny import TINY_MODELS, save_tiny, tiny_model


class HfNames:
    """Renames the weights of one model from the module's names to those of its files.

    For most architectures they are the same. A mixture of experts is fused in memory and one matrix an expert on disk.

    model: a folder, a hub name or a built-in name.
    Raises: ModelError as `models.load.check_model` does.
    """

    def __init__(self, model: str, trust_remote_code: bool = False) -> None:
        from transformers import AutoModelForCausalLM

        shape = TINY_MODELS.get(model)
        with torch.device("meta"):
            self._empty: Any = (
                tiny_model(0, shape)
                if shape
                else AutoModelForCausalLM.from_config(
                    model_config(model, trust_remote_code), trust_remote_code=trust_remote_code
                )
            )

    @functools.cached_property
    def shapes(self) -> Mapping[str, torch.Size]:
        """What a complete set of weights holds, by the module's names; a tied head is not among them."""
        return {name: tensor.shape for name, tensor in merged_tensors(self._empty)}

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return any("experts" in name.split(".") for name in self.shapes)

    @property
    def is_plain(self) -> bool:
        """Whether every weight is called in memory what it is called in the files."""
        return not self.has_experts and self.spell(merged_tensors(self._empty)).keys() == self.shapes.keys()

    def spell(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return the weights by the names of the files; those whose name stays are the same tensors, not copied.

        Raises: ModelError naming every weight that is missing, unknown or of another shape.
        """
        from transformers.core_model_loading import revert_weight_conversion

        given = dict(tensors)
        missing, extra = sorted(self.shapes.keys() - given.keys()), sorted(given.keys() - self.shapes.keys())
        if missing or extra:
            raise ModelError(f"these are not the model's weights: missing {missing}, unknown {extra}")
        wrong = [f"{n} {tuple(given[n].shape)} for {tuple(s)}" for n, s in self.shapes.items() if given[n].shape != s]
        if wrong:
            raise ModelError(f"these are not the model's weights: shapes {', '.join(wrong)}")
        spelled: dict[str, Tensor] = revert_weight_conversion(self._empty, given)
        return spelled


def as_folder(model: str, spare: Path) -> str:
    """Return where other programs find ``model``: its folder or hub name; a built-in one is written into ``spare``."""
    if model in TINY_MODELS:
        return str(save_tiny(spare, config=TINY_MODELS[model]))
    if model == default.NAME:
        return str(default.prepare_default())
    folder = Path(model).expanduser()
    return str(folder) if folder.is_dir() else model
