"""Where a model lies: a folder, the local hub cache, or the hub. No torch: a name is looked for before its import."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gnomon.core.atomic_files import read_plain
from gnomon.core.errors import ModelError, shortened, unknown
from gnomon.models.token_strings import first_line

TINY, TINY_MIXTURE, TINY_SUMS = "tiny", "tiny-moe", "tiny-sums"
DEFAULT = "smollm2-135m-instruct"
BUILT_IN = (TINY, TINY_MIXTURE, TINY_SUMS, DEFAULT)
FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_HUB_SECONDS = 5.0


def check_place(name: str) -> Path:
    """Return the folder of a model, which is not there where the name is one of the hub.

    Raises:
        ModelError: It is a file, a folder without config or weights, or a path where nothing is.
    """
    if not name.strip() or "://" in name:
        raise ModelError(f"model = '{name}' is neither a folder, nor the name of a model on the hub as ORG/NAME")
    try:
        folder = Path(name).expanduser()
        is_there = folder.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"model {shortened(ascii(name))} cannot be looked for: {error.args[-1]}") from error
    if folder.is_dir():
        _check_folder(folder)
    elif is_there:
        raise ModelError(f"model '{name}' is a file; give the folder that holds config.json and the weights")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"model folder '{name}' does not exist (looked for {folder.absolute()})")
    return folder


def check_hub(name: str) -> bool:
    """Return whether the config of a hub's model is in the local cache.

    Raises:
        ModelError: It is not, and the hub cannot be reached.
    """
    from huggingface_hub import constants, get_session, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    hint = f"{unknown('model', name, BUILT_IN)}; it is no folder here"
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return True
    except HFValidationError as error:
        raise ModelError(f"{hint} and no name of the hub: {first_line(error)}") from error
    if constants.HF_HUB_OFFLINE:
        raise ModelError(f"{hint}, not in the local hub cache, and HF_HUB_OFFLINE forbids fetching it")
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception as error:
        raise ModelError(
            f"{hint}, not in the local hub cache, and the hub could not be reached "
            f"({first_line(error)}). Give a local folder or a built-in name"
        ) from error
    return False


LINEAR = ("down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj")
_OTHER_MODULES = (
    "act_fn", "embed_tokens", "input_layernorm", "k_norm", "layers", "mlp", "model", "norm", "post_attention_layernorm",
    "q_norm", "rotary_emb", "self_attn",
)  # fmt: skip


def modules_of(name: str) -> Collection[str]:
    """Return the names of modules in a model of the common architecture, none where a model has another.

    Args:
        name: A built-in model, a folder, or a model of the hub, which counts where its config is in the local cache.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if name in (TINY, TINY_SUMS, DEFAULT):
        return (*LINEAR, *_OTHER_MODULES)
    file: Any = Path(name).expanduser() / "config.json"
    try:
        file = file if file.is_file() else try_to_load_from_cache(name, "config.json")
        config = json.loads(read_plain(Path(file)))
        is_common = config["model_type"] in ("llama", "mistral", "qwen2", "qwen3") and "auto_map" not in config
    except (HFValidationError, OSError, ValueError, TypeError, KeyError):
        return ()
    return (*LINEAR, *_OTHER_MODULES) if is_common else ()


def _check_folder(folder: Path) -> None:
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ModelError(
            f"'{folder}' holds a LoRA adapter only; name its base as model and this folder as lora.adapter"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"model folder '{folder}' has no config.json; it holds: {_listing(folder)}")
    has_weights = any((folder / name).is_file() for name in FILES)
    gone = next((name for name in FILES if (folder / name).is_symlink() and not (folder / name).exists()), None)
    if not has_weights and gone is not None:
        raise ModelError(f"'{folder / gone}' is a link to '{(folder / gone).readlink()}', which is not there; copy it")
    if not has_weights:
        raise ModelError(
            f"model folder '{folder}' has no weights; looked for {', '.join(FILES)}; it holds: {_listing(folder)}"
        )


def _listing(folder: Path, most: int = 8) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "nothing"
