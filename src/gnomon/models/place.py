"""Where a model lies: a folder, the local hub cache, or the hub. No torch: a name is looked for before its import."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from gnomon.core.atomic_files import read_plain
from gnomon.core.errors import ConfigError, ModelError, shortened, unknown
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
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
MARKER = "gnomon.json"
"""File of a converted default model that lists its files with their sizes."""
LAYOUT = 1
_NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


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
    # A name of the hub has one slash at most, so this was meant as a path.
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"model folder '{name}' does not exist (looked for {folder.absolute()})")
    return folder


def check_hub(name: str) -> bool:
    """Return whether the config of a hub's model is in the local cache.

    Raises:
        ModelError: It is not, and the hub cannot be reached.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    hint = f"{unknown('model', name, BUILT_IN)}; it is not a local folder"
    try:
        # The cache first: a cached model needs no network.
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return True
    except HFValidationError as error:
        raise ModelError(f"{hint}, nor a name of the hub: {first_line(error)}") from error
    if constants.HF_HUB_OFFLINE:
        raise ModelError(f"{hint} and not cached, and HF_HUB_OFFLINE=1 blocks the download")
    if fault := _hub_fault(constants.ENDPOINT):
        raise ModelError(
            f"{hint} and not cached, and the hub could not be reached ({fault}). Give a local folder or a built-in name"
        )
    return False


@cache
def _hub_fault(endpoint: str) -> str:
    """Return why the hub does not answer, asked once in a program; "" where it does."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=_HUB_SECONDS)
    except Exception as error:
        return first_line(error)
    return ""


def cache_root() -> Path:
    """Return the cache folder that runs share: GNOMON_CACHE, or ~/.cache/gnomon."""
    return Path(os.environ.get("GNOMON_CACHE") or Path.home() / ".cache" / "gnomon").expanduser()


def default_folder() -> Path:
    """Return the folder of the converted model, which may not exist yet."""
    return cache_root() / "models" / DEFAULT


def is_prepared(folder: Path) -> bool:
    """Whether ``folder`` holds a complete conversion: its marker lists every file with its size.

    Sizes and not checksums, because hashing 270 MB takes longer than loading, and a rename publishes the folder as a
    whole.
    """
    marker = folder / MARKER
    if not os.path.isfile(marker):  # and False where it may not be looked at
        return False
    recorded: dict[str, Any] = json.loads(marker.read_text())
    sizes: dict[str, int] = recorded.get("files", {})
    present = all((folder / n).is_file() and (folder / n).stat().st_size == size for n, size in sizes.items())
    return recorded.get("layout") == LAYOUT and set(_NEEDED) <= set(sizes) and present


def check_device(asked: str) -> None:
    """Check that ``asked`` has the form of a device: "auto", "cpu", "cuda" or "cuda:N". The device need not exist.

    Raises:
        ConfigError: For any other form.

    >>> check_device("cuda:1")
    """
    if _DEVICE.fullmatch(asked):
        return
    hint = "; did you mean 'cuda'?" if asked.lower().startswith(("gpu", "nvidia", "cuda")) else ""
    raise ConfigError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got '{asked}'{hint}")


_POINTER = b"version https://git-lfs.github.com"
_BY_LFS = (".safetensors", ".bin", ".json", ".model", ".jinja", ".txt")
"""Endings of files that a repository of models may keep in Git LFS."""

LINEAR = ("down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj")
_OF_EXPERTS = ("k_proj", "lm_head", "o_proj", "q_proj", "v_proj")
LINEAR_LAYERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((
        "llama", "mistral", "qwen2", "qwen3", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2",
        "gemma3_text", "granite", "helium", "olmo", "olmo2", "olmo3", "seed_oss", "smollm3", "stablelm",
    ), LINEAR),
    **dict.fromkeys(("gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen3_moe"), _OF_EXPERTS),
    **dict.fromkeys(("arcee", "apertus"), ("down_proj", *_OF_EXPERTS, "up_proj")),
    **dict.fromkeys(("glm", "glm4"), ("down_proj", "gate_up_proj", *_OF_EXPERTS)),
    **dict.fromkeys(("bloom", "gpt_neox"), ("dense", "dense_4h_to_h", "dense_h_to_4h", "lm_head", "query_key_value")),
    "gpt2": ("c_attn", "c_fc", "c_proj", "lm_head"),
    "gptj": ("fc_in", "fc_out", "k_proj", "lm_head", "out_proj", "q_proj", "v_proj"),
    "opt": ("fc1", "fc2", "k_proj", "lm_head", "out_proj", "q_proj", "v_proj"),
    "phi": ("dense", "fc1", "fc2", "k_proj", "lm_head", "q_proj", "v_proj"),
    "phi3": ("down_proj", "gate_up_proj", "lm_head", "o_proj", "qkv_proj"),
    "starcoder2": ("c_fc", "c_proj", *_OF_EXPERTS),
}  # fmt: skip
"""Names of the linear layers of an architecture, by its model_type; others are known once PyTorch is loaded."""
_OTHER_MODULES = (
    "act", "act_fn", "activation_fn", "attention", "attn", "block_sparse_moe", "dropout", "embed_in", "embed_tokens",
    "experts", "gate", "h", "input_layernorm", "k_norm", "layers", "ln_1", "ln_2", "ln_f", "mlp", "model", "norm",
    "post_attention_layernorm", "q_norm", "rotary_emb", "router", "self_attention", "self_attn", "transformer", "wpe",
    "wte",
)  # fmt: skip
"""Modules that no adapter fits, which whoever loads the model says."""


def check_modules_of(name: str, targets: Iterable[str]) -> None:
    """Refuse targets of adapters that no module of a model is called, where its architecture is known without PyTorch.

    Args:
        name: A built-in model, a folder, or a model of the hub, which counts where its config is in the local cache.
        targets: Names of modules, or paths that end in one.

    Raises:
        ConfigError: The message has the nearest name.
    """
    linear = LINEAR_LAYERS.get(_model_type(name), ())
    for target in targets:
        own = target.rpartition(".")[2]
        if linear and target != "all-linear" and own not in (*linear, *_OTHER_MODULES) and not own.isdigit():
            raise ConfigError(f"lora.targets: {unknown('module', target, sorted(linear))}")


def _model_type(name: str) -> str:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if name in BUILT_IN:
        return "qwen3_moe" if name == TINY_MIXTURE else "llama"
    file: Any = Path(name).expanduser() / "config.json"
    try:
        file = file if file.is_file() else try_to_load_from_cache(name, "config.json")
        config = json.loads(read_plain(Path(file)))
        return "" if "auto_map" in config else str(config["model_type"])  # remote code may name its modules otherwise
    except (HFValidationError, OSError, ValueError, TypeError, KeyError):
        return ""


def _check_folder(folder: Path) -> None:
    for file in sorted(path for path in folder.iterdir() if path.suffix in _BY_LFS and path.is_file()):
        with file.open("rb") as opened:
            if opened.read(len(_POINTER)) == _POINTER:
                raise ModelError(
                    f"'{file}' is a pointer of Git LFS and not the file; fetch it with `git lfs pull` in '{folder}'"
                )
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ModelError(
            f"'{folder}' holds a LoRA adapter only; name its base as model and this folder as lora.adapter"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"model folder '{folder}' has no config.json; it holds: {_listing(folder)}")
    has_weights = any((folder / name).is_file() for name in FILES)
    # A hub cache that was copied without its blobs has links that lead nowhere.
    gone = next((name for name in FILES if (folder / name).is_symlink() and not (folder / name).exists()), None)
    if not has_weights and gone is not None:
        raise ModelError(f"'{folder / gone}' is a link to '{(folder / gone).readlink()}', which is not there; copy it")
    if not has_weights:
        raise ModelError(
            f"model folder '{folder}' has no weights; looked for {', '.join(FILES)}; it holds: {_listing(folder)}"
        )


def _listing(folder: Path) -> str:
    names, most = sorted(path.name for path in folder.iterdir()), 8
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "nothing"
