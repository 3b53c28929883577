"""Load a language model and its tokenizer by folder, hub name or built-in name, and write a model folder."""

import copy
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch import Tensor, nn

from gnomon.core.atomic_files import real_path
from gnomon.core.errors import ModelError, on_one_line, refusal_of, shortened, unknown
from gnomon.models import default
from gnomon.models.adapter_config import LoraConfig, read_adapter_config
from gnomon.models.auto_class import auto_class, check_architecture, empty_model, made_by
from gnomon.models.device import placed
from gnomon.models.folder import belongings_of, check_json, moved, savable
from gnomon.models.lora import adapt, merged_tensors
from gnomon.models.place import BUILT_IN, check_hub, check_place, default_folder, is_prepared
from gnomon.models.quantized import quantize
from gnomon.models.tiny import TINY_MODELS, tiny_model, tiny_tokenizer
from gnomon.models.token_strings import first_line, parsed, untrusted
from gnomon.models.tokenizer import Tokenizer, wrap
from gnomon.models.weight_files import Read, Writer, folder_writer
from gnomon.models.weights_check import (
    Fit,
    Header,
    check_causal,
    check_files,
    check_numbers,
    check_plausible,
    check_positions,
    check_quantized,
    check_rotary,
    contradiction,
    headers,
    no_report,
    refuse,
    weight_files,
)

_OUTPUTS = {
    "return_dict": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
}
"""Settings of a config that choose what a pass gives back, and in which form; no number depends on them."""
_SMALL_BYTES = 64 << 20


def check_model(name: str, trust_remote_code: bool = False) -> None:
    """Check that ``name`` can be loaded, without reading a weight.

    Args:
        name: "tiny", "tiny-moe", "tiny-sums", "smollm2-135m-instruct", a folder in the Hugging Face layout, or a hub
            name ("org/name").
        trust_remote_code: Allow the model's code to run.

    Raises:
        ModelError: If the folder is missing or has no config or weights, the hub cannot be reached, the default model's
            package is missing, or transformers does not know the model as a causal language model.
    """
    if name in TINY_MODELS:
        return
    # Only the package is looked for: converting the default model takes 20 s, and a check must not.
    if name == default.NAME:
        if not is_prepared(default_folder()):
            default.weights_file()
        return
    with parsed(f"model '{name}': its config cannot be used"):
        check_architecture(config_of(name, trust_remote_code), name, trust_remote_code)


def config_of(name: str, trust_remote_code: bool = False) -> Any:
    """Return the config of a folder with weights or of a hub name, whatever model it describes.

    Raises:
        ModelError: If the folder is missing or has no config or weights, or the hub does not give it.
    """
    folder = check_place(name)
    if folder.is_dir():
        weight_files(folder)
        for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
            check_json(folder / file)
        check_rotary(json.loads((folder / "config.json").read_text()), str(folder))
        return _read_config(str(folder), trust_remote_code)
    return _hub_config(name, trust_remote_code)


def check_weights(name: str, trust_remote_code: bool = False) -> tuple[str, ...]:
    """Check that the files of ``name`` hold the weights of its config; return remarks.

    Names, shapes and dtypes are read from headers, numbers only from small files. The numbers of a large model are
    checked when it is loaded, and a hub model that is not in the local cache is not checked before.

    Raises:
        ModelError: As `check_model` does; or if weights are missing, of another shape or dtype, quantized, not finite,
            all zero, tied only by the config, or without a place in the model.
    """
    said, found = check_headers(name, trust_remote_code)
    if sum(file.stat().st_size for file in {header.file for header in found.values()}) <= _SMALL_BYTES and found:
        _from_pretrained(place_of(name), torch.float32, trust_remote_code)
    return said


def check_headers(name: str, trust_remote_code: bool = False) -> tuple[tuple[str, ...], Mapping[str, Header]]:
    """Do `check_weights` by headers alone; return remarks and headers. Raises as `check_weights` does."""
    check_model(name, trust_remote_code)
    folder = None if name in TINY_MODELS else local_folder(name)
    # Nothing to read yet: a model that is built in code, or one of the hub that is not in the cache.
    if folder is None or not weight_files(folder):
        return (), {}
    found = headers(folder)
    place = str(folder) if os.path.isdir(Path(name).expanduser()) else name
    config = _read_config(str(folder), trust_remote_code)
    check_quantized(config, place)
    with parsed(f"model '{place}': its config.json does not make a model"):
        check_plausible(config, found, place)
        check_positions(config, json.loads((folder / "config.json").read_text()), place)
        return check_files(empty_model(config, trust_remote_code), found, place), found


def load_model(
    name: str,
    dtype: torch.dtype,
    lora: LoraConfig | None = None,
    trust_remote_code: bool = False,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Return the causal language model ``name`` in ``dtype``, on ``device``, in eval mode, with SDPA attention.

    Rotary tables stay in float32 for every ``dtype``, so choose the precision here and not by ``.to``. With ``lora``
    the weights are frozen, or quantized, and float32 adapters are added; see `LoraConfig`.

    Raises:
        ModelError: As `check_model` does, or if the weights do not fit the config.
        ConfigError: If peft is missing.
    """
    check_headers(name, trust_remote_code)
    shape = TINY_MODELS.get(name)
    model = tiny_model(0, shape, dtype) if shape else _from_pretrained(place_of(name), dtype, trust_remote_code)
    if lora is not None:
        # Adapters before quantizing: peft finds plain linear layers, and only frozen ones are then replaced.
        model = adapt(model, lora, _base(name))
        model = model if lora.quantized is None else quantize(model, lora.quantized, device)
    # Move last: adapters are drawn on the CPU, so that a seed gives the same weights on every device.
    return placed(model, device)


def _base(name: str) -> str:
    """Return a model's name for the config of an adapter: a folder by its absolute path."""
    folder = Path(name).expanduser()
    return str(real_path(folder)) if folder.is_dir() else name


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Tokenizer:
    """Return the tokenizer of ``name``, with stop tokens and context length from the model's config.

    Raises:
        ModelError: If there is no tokenizer.
    """
    if name in TINY_MODELS:
        return tiny_tokenizer(TINY_MODELS[name])
    check_model(name, trust_remote_code)
    return read_tokenizer(place_of(name), trust_remote_code)


def read_tokenizer(place: str, trust_remote_code: bool = False) -> Tokenizer:
    """Return the tokenizer of a folder that need not hold weights, or of a hub name.

    Raises:
        ModelError: If there is none that transformers reads.
    """
    from transformers import AutoTokenizer

    with parsed(f"model '{place}' has no tokenizer that transformers can load (copy its tokenizer files beside it)"):
        backend = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
        config = _read_config(place, trust_remote_code)
        said = _with_processors_template(backend, place)
        ends, unapplied = _generation_settings(place, config)
        return wrap(backend, config, ends, said + unapplied)


def write_model(
    tensors: Iterable[tuple[str, Tensor]], config: Any, folder: Path, generation_config: Any = None
) -> None:
    """Write config and safetensors in the Hugging Face layout.

    Args:
        tensors: Plain names, as `merged_tensors` yields them; a tied head may be absent.
        config: ``model.config``; its dtype becomes the tensors' dtype.
        folder: The folder.
        generation_config: ``model.generation_config``.

    Raises:
        ModelError: If a weight is missing, or unknown to the config's architecture.
    """
    model_writer(dict(tensors), config, generation_config)(folder)


def adapter_tokenizer(adapter: Path, base: Tokenizer) -> Tokenizer | None:
    """Return the tokenizer that was saved beside an adapter where its chat template is not the base's; else None.

    Trainers save the tokenizer with the adapter, whose prompts they wrote by its template.

    Raises:
        ModelError: It cannot be loaded, or reads ids otherwise than the base's.
    """
    from transformers import AutoTokenizer

    if not (adapter / "tokenizer_config.json").is_file():
        return None
    with parsed(f"the tokenizer beside the adapter '{adapter}' cannot be loaded; correct its files, or remove them"):
        own = replace(base, backend=AutoTokenizer.from_pretrained(str(adapter)))
    if (why := base.difference(own)) is not None:
        raise ModelError(f"the adapter '{adapter}' has another tokenizer than its base: {why}; give its own base")
    return None if own.backend.chat_template in (None, base.backend.chat_template) else own


def write_merged(adapter: Path, folder: Path) -> None:
    """Write the model that a LoRA adapter makes of its base, in the base's precision, with the base's other files.

    The chat template is the adapter's where it was saved with one of its own.

    Raises:
        ModelError: It is no plain LoRA adapter, names no base, or the base is not found or does not fit it.
        ConfigError: If peft is missing.
    """
    base, settings = read_adapter_config(adapter)
    if not base:
        raise ModelError(f"the adapter '{adapter}' does not name its base model (base_model_name_or_path)")
    dtype = torch.float32 if base in TINY_MODELS else model_config(base).dtype or torch.float32
    model: Any = load_model(base, dtype, LoraConfig(**settings))
    write_model(merged_tensors(model), model.config, folder, getattr(model, "generation_config", None))
    tokenizer = load_tokenizer(base)
    (adapter_tokenizer(adapter, tokenizer) or tokenizer).save(folder)
    belongings_of(local_folder(base)).write(folder)


def model_writer(
    forms: Mapping[str, Tensor], config: Any, generation_config: Any = None, read: Read | None = None
) -> Writer:
    """Return a function that does `write_model` in a folder, from any thread.

    Process-wide settings of torch are changed and restored before this returns. Errors are those of `write_model`.

    Args:
        forms, read: See `folder_writer`.
        config, generation_config: See `write_model`.
    """
    written, generation = copy.deepcopy(config), copy.deepcopy(generation_config)
    if generation is not None:
        moved(written, generation)
    # A loader takes its precision from the config, so the config must state that of the tensors.
    written.dtype = next(tensor.dtype for tensor in forms.values() if tensor.is_floating_point())
    # An empty model knows its tied weights, and how its names are spelled on disk.
    empty = empty_model(written)
    named = {name for name, _ in merged_tensors(empty)}
    if named != set(forms):
        missing, extra = sorted(named - set(forms)), sorted(set(forms) - named)
        raise ModelError(f"these are not the weights of {type(empty).__name__}: missing {missing}, unknown {extra}")
    if generation is not None:
        empty.generation_config = savable(generation)[0]
    return folder_writer(empty, forms, read)


def model_config(name: str, trust_remote_code: bool = False) -> Any:
    """Return the config of a model that is not built in code.

    Raises:
        ModelError: As `check_model` does.
    """
    check_model(name, trust_remote_code)
    return _read_config(place_of(name), trust_remote_code)


def place_of(name: str) -> str:
    """Return from where transformers loads a model: the path of its folder, or its name on the hub."""
    if name == default.NAME:
        return str(default.prepare_default())
    folder = Path(name).expanduser()
    return str(folder) if folder.is_dir() else name


def local_folder(name: str) -> Path | None:
    """Return the model's folder on this machine: given, built in, or in the local hub cache; else None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    place = Path(place_of(name))
    if place.is_dir():
        return place
    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        # A run's own record may name anything, and no cache holds what the hub allows no model to be called.
        return None
    return Path(found).parent if isinstance(found, str) else None


def _read_config(place: str, trust_remote_code: bool, local_files_only: bool = False) -> Any:
    from transformers import AutoConfig

    # The caller reports what the hub cannot give.
    passing = () if os.path.isdir(place) else (OSError,)
    said = f"model '{place}': transformers cannot read its config"
    with untrusted(f"the model '{place}'", "trust_remote_code"), parsed(said, *passing):
        config = AutoConfig.from_pretrained(
            place, trust_remote_code=trust_remote_code, local_files_only=local_files_only
        )
        for part in (config, config.get_text_config()):
            for name, value in _OUTPUTS.items():
                # With tuples or further outputs, code that reads `.logits` and `.last_hidden_state` would fail or
                # waste memory.
                if getattr(part, name, value) != value:
                    setattr(part, name, value)
        return config


def _hub_config(name: str, trust_remote_code: bool) -> Any:
    """Return the config from the local hub cache, or from the hub if it answers."""
    # A config in the cache is used without asking the hub, so that a run starts offline.
    is_kept = check_hub(name)
    try:
        return _read_config(name, trust_remote_code, local_files_only=is_kept)
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(
            f"{unknown('model', name, BUILT_IN)}; the hub would not give it: {first_line(error)}"
        ) from error


def _from_pretrained(place: str, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    def load(**attention: str) -> Any:
        with no_report():
            return made_by(
                auto_class(config).from_pretrained,
                place,
                config=config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **attention,
            )

    with parsed(f"model '{place}' cannot be loaded by its config.json and generation_config.json; correct them"):
        config = _read_config(place, trust_remote_code)
        text = config.get_text_config()
        # SDPA does not bound scores: transformers drops the bound before 5.24, without a word, and refuses it since.
        is_bounded = vars(text).get("attn_logit_softcapping") is not None
        try:
            model, loading = load(attn_implementation="eager" if is_bounded else "sdpa")
        except ValueError as error:
            # An architecture without SDPA is loaded with the attention that it has.
            if "scaled_dot_product_attention" not in str(error):
                raise
            model, loading = load()
    refuse(Fit.of(loading), place)
    # transformers unties a head silently where the files hold two different weights, although the config ties them.
    for target, source in empty_model(model.config, trust_remote_code).all_tied_weights_keys.items():
        if target not in model.all_tied_weights_keys:
            raise ModelError(contradiction(place, target, source))
    check_numbers(model, place)
    loaded: nn.Module = model.eval()
    check_causal(loaded, place)
    return loaded


def _with_processors_template(backend: Any, place: str) -> list[str]:
    """Give a tokenizer without a chat template that of its processor (chat_template.json); return remarks.

    transformers reads that file for processors alone, so prompts would be plain text without a word.
    """
    folder = local_folder(place)
    file = None if folder is None else folder / "chat_template.json"
    if backend.chat_template is not None or file is None or not file.is_file():
        return []
    with parsed(f"'{file}' cannot be read as a chat template; correct it, or remove it"):
        backend.chat_template = str(json.loads(file.read_text())["chat_template"])
    return ["the chat template is that of chat_template.json, as the tokenizer has none; checkpoints have it in both"]


_ELSEWHERE: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": ([], {}),
    "exponential_decay_length_penalty": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "num_beams": (1,),
    "guidance_scale": (1.0,),
    "penalty_alpha": (0.0,),
    "diversity_penalty": (0.0,),
    "stop_strings": ([], ""),
    "watermarking_config": (),
}
"""Settings that change what transformers' generate() draws and no engine here applies, with values that do nothing."""


def _generation_settings(place: str, config: Any) -> tuple[list[int], list[str]]:
    """Return the ends that generation_config.json lists, and remarks on its settings that are not applied.

    Without that file these are config.json's, as elsewhere.
    """
    from transformers import GenerationConfig

    size, file, settings = int(config.get_text_config().vocab_size), "generation_config.json", config
    try:
        # What transformers would not write is said by the rehearsal.
        with no_report():
            settings = GenerationConfig.from_pretrained(place)
    except Exception as error:
        if refusal_of(error) is not None:
            raise
        if not isinstance(error, OSError) or (Path(place) / file).exists():
            raise ModelError(
                f"model '{place}': transformers does not take its generation_config.json ({first_line(error)}); "
                "correct the file, or remove it"
            ) from error
        file = "config.json"
    # -1 is how some files write that there is none.
    stated = _listed(getattr(settings, "eos_token_id", None))
    ends = [i for i in stated if i is not None and (type(i) is not int or i != -1)]
    for end in ends:
        if type(end) is not int or not 0 <= end < size:
            raise ModelError(
                f"model '{place}': {file} has {shortened(repr(end))} in eos_token_id, which is none of the model's "
                f"tokens (whole numbers from 0 to {size - 1}); correct the file"
            )
    return ends, _unapplied(vars(settings)) if settings is not config else []


def _unapplied(settings: Mapping[str, Any]) -> list[str]:
    """Return remarks on settings that generate() applies and gnomon does not; empty for none."""
    given = {name: settings.get(name) for name in _ELSEWHERE}
    found = [
        f"{name} = {shortened(on_one_line(repr(value)), 60)}"
        for name, value in given.items()
        if value is not None and value not in _ELSEWHERE[name]
    ]
    if not found:
        return []
    return [
        f"generation_config.json says {', '.join(found)}: gnomon draws without that in training and evaluation, and "
        "transformers' generate() applies it; remove it there to have one policy everywhere"
    ]


def _listed(eos: Any) -> list[Any]:
    return list(eos) if isinstance(eos, list | tuple) else [eos]


class ModelFolder(PosixPath):
    """The folder of a model in the Hugging Face layout. It is a path, and a call loads the model."""

    def __call__(self, **settings: Any) -> Any:
        """Load the model.

        Args:
            **settings: What ``from_pretrained`` of its auto class takes, such as ``dtype`` or ``device_map``.

        Returns:
            The transformers model.
        """
        config = _read_config(str(self), bool(settings.get("trust_remote_code")))
        return auto_class(config).from_pretrained(str(self), **settings)

    def tokenizer(self) -> Any:
        """Return the transformers tokenizer of the folder."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self))
