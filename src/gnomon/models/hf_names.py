"""Names of weights as in an architecture's files, for other programs."""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon.core.errors import ModelError
from gnomon.models import default
from gnomon.models.auto_class import empty_model, reads_images
from gnomon.models.load import model_config
from gnomon.models.lora import merged_tensors
from gnomon.models.tiny import TINY_MODELS, save_tiny, tiny_model
from gnomon.models.weight_files import spell


class HfNames:
    """Renames one model's weights from module names to file names.

    Most architectures have equal names. A mixture of experts is fused in memory and has one matrix per expert on disk.

    Args:
        model: A folder, a hub name or a built-in name.

    Raises:
        ModelError: As `models.load.check_model` does.
    """

    def __init__(self, model: str, trust_remote_code: bool = False) -> None:
        shape = TINY_MODELS.get(model)
        # Only names and shapes are needed.
        with torch.device("meta"):
            self._empty: Any = (
                tiny_model(0, shape)
                if shape
                else empty_model(model_config(model, trust_remote_code), trust_remote_code)
            )

    @functools.cached_property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Shapes of a complete set of weights by module name, without a tied head."""
        return {name: tensor.shape for name, tensor in merged_tensors(self._empty)}

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return any("experts" in name.split(".") for name in self.shapes)

    @property
    def architecture(self) -> str:
        """Name of the model's class in transformers."""
        return type(self._empty).__name__

    @property
    def reads_images(self) -> bool:
        """Whether the model takes images beside text."""
        return reads_images(self._empty.config)

    @property
    def head_size(self) -> int | None:
        """Width of an attention head; None without heads, or where keys are compressed and vLLM counts otherwise."""
        config = self._empty.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None)
        if not heads or getattr(config, "kv_lora_rank", None):
            return None
        return int(getattr(config, "head_dim", None) or config.hidden_size // heads)

    @property
    def is_plain(self) -> bool:
        """Whether every weight has the same name in memory and in files."""
        return not self.has_experts and self.spell(merged_tensors(self._empty)).keys() == self.shapes.keys()

    def spell(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return the weights by file name; unchanged tensors are not copied.

        Raises:
            ModelError: Naming every missing, unknown or wrongly shaped weight.
        """
        given = dict(tensors)
        # transformers' conversion ignores names that it does not know, so a typo would be a missing weight without a
        # word.
        missing, extra = sorted(self.shapes.keys() - given.keys()), sorted(given.keys() - self.shapes.keys())
        if missing or extra:
            raise ModelError(f"these are not the model's weights: missing {missing}, unknown {extra}")
        wrong = [f"{n} {tuple(given[n].shape)} for {tuple(s)}" for n, s in self.shapes.items() if given[n].shape != s]
        if wrong:
            raise ModelError(f"these are not the model's weights: shapes {', '.join(wrong)}")
        return spell(self._empty, given)


def as_folder(model: str, spare: Path) -> str:
    """Return a place from which other programs can load ``model``; a built-in model is written into ``spare``."""
    if model in TINY_MODELS:
        return str(save_tiny(spare, config=TINY_MODELS[model]))
    if model == default.NAME:
        return str(default.prepare_default())
    folder = Path(model).expanduser()
    return str(folder) if folder.is_dir() else model
