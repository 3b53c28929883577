"""Write a checkpoint and load it again before the first step, so that a bad model cannot fail a later save."""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gnomon.core.errors import ModelError
from gnomon.models.adapter_config import LoraConfig, other_base
from gnomon.models.folder import Belongings, belongings_of, moved, savable
from gnomon.models.load import check_headers, load_model, local_folder, read_tokenizer
from gnomon.models.lora import check_adapter, check_rank, check_targets, merged_tensors, misfits
from gnomon.models.place import TINY, TINY_MIXTURE
from gnomon.models.quantized import check_quantizable
from gnomon.models.size import outline
from gnomon.models.token_strings import parsed
from gnomon.models.tokenizer import Tokenizer
from gnomon.models.weights_check import check_form, no_report

_PROBE = "Question 12: is 3.50 < 4?\n\tné 日本 <b>"
_TOLERANCE = {torch.float32: 1e-5}
_ROUGH = 0.05
"""Of logits in fewer bits: two ways through attention round otherwise."""


@dataclass(frozen=True)
class SavedForm:
    """The parts of a checkpoint besides its weights; ``said`` holds sentences for the user."""

    belongings: Belongings = field(default_factory=Belongings)
    said: tuple[str, ...] = ()


_SOUND: dict[str, SavedForm] = {}
"""Of models that gnomon makes itself, so that they are the same each time: what this process has written and read."""


def try_checkpoint(
    name: str, tokenizer: Tokenizer, trust_remote_code: bool = False, lora: LoraConfig | None = None
) -> SavedForm:
    """Write a checkpoint of ``name`` without weights, load it again, and return its other files.

    Config, generation config, tokenizer, chat template and the files beside them are written. For weights, names and
    shapes are compared as they stand in files.

    Raises:
        ModelError: If a file cannot be written, or differs when it is read again.
        ConfigError: If the targets of ``lora`` match no module, or cannot be adapted, or its rank is above theirs.
    """
    if name in _SOUND and lora is None:
        return _SOUND[name]
    said = [*check_headers(name, trust_remote_code)[0]]
    belongings = belongings_of(local_folder(name), trust_remote_code)
    empty: Any = outline(name, trust_remote_code)
    said += _adapters(empty, lora)
    # Copies, since writing moves fields between the two, and the config is the model's own.
    config, generation = copy.deepcopy(empty.config), _generation(name, empty)
    moved(config, generation)
    repaired, dropped = savable(generation)
    with tempfile.TemporaryDirectory(prefix="gnomon-form-") as made:
        folder = Path(made)
        with parsed(f"model '{name}': a checkpoint of it cannot be written"), no_report():
            # As `save_pretrained` of a model writes it; a config alone does not know its class.
            config.architectures = [type(empty).__name__]
            config.save_pretrained(folder)
            repaired.save_pretrained(folder)
            tokenizer.save(folder)
            belongings.write(folder)
        # What a run would find out when it is resumed, hours later.
        with parsed(f"model '{name}': a checkpoint of it cannot be loaded again"), no_report():
            check_form(empty, folder, trust_remote_code)
            again = read_tokenizer(str(folder), trust_remote_code)
    _compare(name, tokenizer, again)
    if dropped:
        said.append(
            f"checkpoints of '{name}' leave out {', '.join(sorted(dropped))} of its generation_config.json, which "
            "transformers reads and would not write"
        )
    if belongings.left_out:
        said.append(
            f"checkpoints of '{name}' leave out {', '.join(belongings.left_out)}, which are too large, or links that "
            "lead out of its folder"
        )
    form = SavedForm(belongings, tuple(said))
    if name in (TINY, TINY_MIXTURE) and lora is None:
        _SOUND[name] = form
    return form


def check_written(
    folder: Path, name: str, dtype: torch.dtype, trust_remote_code: bool = False, lora: LoraConfig | None = None
) -> None:
    """Check that a checkpoint of ``name``, written before any step, has the model's weights and logits.

    Args:
        folder: The checkpoint.
        name: The run's model.
        dtype: Precision in which both are loaded.
        trust_remote_code: Allow the model's code to run.
        lora: The adapter that a run begins with is a part of these weights, and so is the quantization of its base.

    Raises:
        ModelError: Naming the first weights that differ.
    """
    begun = None if lora is None or (lora.adapter is None and lora.quantized is None) else lora
    one, other = (
        load_model(place, dtype, plan, trust_remote_code) for place, plan in ((name, begun), (str(folder), None))
    )
    ours, theirs = dict(merged_tensors(one)), dict(merged_tensors(other))
    wrong = sorted(ours.keys() ^ theirs.keys())
    wrong += sorted(n for n in ours.keys() & theirs.keys() if not torch.equal(ours[n], theirs[n]))
    if wrong:
        raise ModelError(
            f"model '{name}': a checkpoint of it does not hold the same weights when it is loaded again: "
            f"{', '.join(wrong[:4])}"
        )
    with parsed(f"model '{name}' cannot be run"), torch.no_grad():
        network: Any = one
        ids = torch.arange(16).unsqueeze(0) % network.config.get_text_config().vocab_size
        before, after = (model(input_ids=ids, use_cache=False).logits.float() for model in (one, other))
    if not before.isfinite().all():
        what = "NaN" if before.isnan().any() else "infinities"
        wider = "" if dtype == torch.float32 else ', or set learner.precision = "fp32"'
        raise ModelError(
            f"model '{name}' computes {what} in {str(dtype).removeprefix('torch.')}, though its weights are finite; "
            f"give the config.json that belongs to these weights{wider}"
        )
    far = float((before - after).abs().max())
    # Written so that NaN fails: every comparison with NaN is false.
    if not far <= _TOLERANCE.get(dtype, _ROUGH) * max(1.0, float(before.abs().max())):
        raise ModelError(
            f"model '{name}': a checkpoint of it computes other logits when it is loaded again, by up to {far:.2g}: "
            "its config is not written as it was read"
        )


def _adapters(empty: nn.Module, lora: LoraConfig | None) -> list[str]:
    """Check the targets of adapters; return the layers that "all-linear" leaves out."""
    if lora is None:
        return []
    check_targets(empty, lora)
    check_adapter(empty, lora)
    # One line for a kind of layer, not for each of its layers.
    left_out = {name.rpartition(".")[2]: why for name, why in misfits(empty).items()} if lora.is_everything else {}
    narrow = check_rank(empty, lora)
    left = None if lora.quantized is None else check_quantizable(empty, lora.quantized)
    return [*filter(None, [narrow, left, other_base(lora)])] + [
        f"lora.targets leaves out {name}, which {why}" for name, why in sorted(left_out.items())
    ]


def _generation(name: str, empty: Any) -> Any:
    from transformers import GenerationConfig

    folder = local_folder(name)
    if folder is None or not (folder / "generation_config.json").is_file():
        return empty.generation_config
    with parsed(f"model '{name}': its generation_config.json cannot be read"), no_report():
        return GenerationConfig.from_pretrained(folder)


def _compare(name: str, before: Tokenizer, after: Tokenizer) -> None:
    """Refuse a tokenizer that changes when it is written and read again. Raises ModelError."""
    known = [text for text in before.control_strings if before.control[text] < before.vocab_size]
    text = _PROBE + "".join(known[:8])
    asked: dict[str, Callable[[Tokenizer], object]] = {
        "ids of a text": lambda tokenizer: tokenizer.encode(text),
        "ids of a plain text": lambda tokenizer: tokenizer.encode_plain(text),
        "control tokens": lambda tokenizer: dict(tokenizer.control),
        "stop tokens": lambda tokenizer: tokenizer.stop_ids,
        "chat template": lambda tokenizer: tokenizer.backend.chat_template,
    }
    for what, ask in asked.items():
        if ask(before) != ask(after):
            raise ModelError(
                f"model '{name}': its tokenizer has other {what} when it is written and loaded again; save it with "
                "AutoTokenizer's save_pretrained and look at what differs"
            )
