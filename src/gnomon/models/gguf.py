"""A model's folder as one GGUF file, which llama.cpp, Ollama and LM Studio read; written with the `gguf` package.

The converter that knows every architecture is llama.cpp's own script, which no package installs. Here are decoders
whose tensors map one to one: Llama, Mistral, Qwen 2 and Qwen 3. Others are refused with that script's name.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from gnomon.core.errors import ModelError
from gnomon.core.optional import import_optional
from gnomon.models.weights_check import weight_files

PRECISIONS = ("f32", "f16", "bf16", "q8_0")
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_SCRIPT = "convert the folder that `gnomon export RUN FOLDER` writes with llama.cpp's convert_hf_to_gguf.py"
_LETTERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {"qwen2": _LETTERS.replace("DIGITS", ""), "llama-bpe": _LETTERS.replace("DIGITS", "{1,3}")}
"""How llama.cpp names the ways to split a text before byte pairs are merged, by the pattern that splits it."""


@dataclass(frozen=True)
class GgufModel:
    """A model's folder that can be written as GGUF; `of` refuses what cannot.

    Attributes:
        folder: Of the model.
        architecture: As llama.cpp names it.
        config: The model's config.json.
        vocabulary: The model's tokenizer.json.
        split: How a text is split before byte pairs are merged, as llama.cpp names it.
    """

    folder: Path
    architecture: str
    config: Mapping[str, Any]
    vocabulary: Mapping[str, Any]
    split: str

    @classmethod
    def of(cls, folder: Path) -> "GgufModel":
        """Return the model of a folder, from its configuration alone.

        Raises:
            ModelError: Its architecture, rotary positions, attention or tokenizer is of another form.
        """
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        name = next(iter(config.get("architectures") or ["?"]))
        if name not in _ARCHITECTURES:
            raise ModelError(f"{name} is not among {', '.join(_ARCHITECTURES)}, which GGUF is written for; {_SCRIPT}")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        window = (
            config.get("sliding_window") if config.get("use_sliding_window", name == "MistralForCausalLM") else None
        )
        # What llama.cpp's architectures of these names cannot express: each setting with the one value that they have.
        given = {
            "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
            "hidden_act": (config.get("hidden_act", "silu"), "silu"),
            "sliding_window": (window, None),
        }
        for key, (value, wanted) in given.items():
            if value != wanted:
                raise ModelError(f"{name} with {key} {value!r} is not written as GGUF, only with {wanted!r}; {_SCRIPT}")
        file = folder / "tokenizer.json"
        vocabulary = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if (vocabulary.get("model") or {}).get("merges") == []:
            # llama.cpp's converter refuses such a vocabulary too, and its readers look for merges.
            raise ModelError(
                f"the tokenizer of {name} has a token for each byte and no merges, which no reader of GGUF "
                "knows; the folder that `gnomon export RUN FOLDER` writes is read by transformers and vLLM"
            )
        split = _split(vocabulary)
        if split is None:
            kind = (vocabulary.get("model") or {}).get("type", "no tokenizer.json")
            raise ModelError(
                f"the tokenizer of {name} ({kind}) splits texts in a way that is not known here; {_SCRIPT}"
            )
        return cls(folder, _ARCHITECTURES[name], config, vocabulary, split)

    @property
    def own_precision(self) -> str:
        """The precision that the model's weights have."""
        return {"bfloat16": "bf16", "float16": "f16"}.get(str(self.config.get("dtype")), "f32")

    def write(self, file: Path, precision: str) -> None:
        """Write the file: settings, vocabulary and chat template, then the weights; vectors stay in float32.

        Args:
            file: A new file.
            precision: One of `PRECISIONS`, of the matrices; with q8_0 those whose rows are no multiple of 32 are f16.

        Raises:
            ConfigError: The gguf package is not installed.
            ModelError: A weight has no place in the architecture.
        """
        gguf = import_optional("gguf", "default-model", "a GGUF file")
        writer = gguf.GGUFWriter(file, self.architecture)
        types = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
        writer.add_file_type(gguf.LlamaFileType[types[precision]])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        self._write_settings(writer)
        self._write_vocabulary(gguf, writer)
        placed = [
            (opened, name, there, _kind(gguf, opened.get_slice(name).get_shape(), precision))
            for opened in map(_opened, weight_files(self.folder))
            for name, there in self._places(gguf, opened)
        ]
        for opened, name, there, kind in placed:
            shape = opened.get_slice(name).get_shape()
            size = math.prod(gguf.quants.quant_shape_to_byte_shape(shape, kind))
            # The header lists all tensors before the first one's data, so no two weights need be in memory at once.
            writer.add_tensor_info(there, shape, np.dtype(np.float32), size, raw_dtype=kind)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for opened, name, _, kind in placed:
                values = self._turned(name, opened.get_tensor(name)).float().contiguous().numpy()
                writer.write_tensor_data(gguf.quants.quantize(values, kind))
        finally:
            writer.close()

    def _write_settings(self, writer: Any) -> None:
        config, heads = self.config, self.config["num_attention_heads"]
        wide = config.get("head_dim") or config["hidden_size"] // heads
        # Before transformers 5, the base of the rotary positions stood in the config itself.
        rope = config.get("rope_parameters") or config
        writer.add_name(self.folder.name)
        writer.add_vocab_size(config["vocab_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(heads)
        writer.add_head_count_kv(config.get("num_key_value_heads", heads))
        writer.add_key_length(wide)
        writer.add_value_length(wide)
        writer.add_rope_dimension_count(wide)
        writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])

    def _write_vocabulary(self, gguf: Any, writer: Any) -> None:
        size, added = self.config["vocab_size"], self.vocabulary.get("added_tokens", [])
        texts = {number: text for text, number in self.vocabulary["model"]["vocab"].items()}
        texts |= {token["id"]: token["content"] for token in added}
        kinds = {t["id"]: gguf.TokenType.CONTROL if t["special"] else gguf.TokenType.USER_DEFINED for t in added}
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.split)
        # A vocabulary may be padded: llama.cpp wants a text for every row of the embedding.
        writer.add_token_list([texts.get(n, f"[PAD{n}]") for n in range(size)])
        unused = {n: gguf.TokenType.UNUSED for n in range(size) if n not in texts}
        writer.add_token_types([kinds.get(n, unused.get(n, gguf.TokenType.NORMAL)) for n in range(size)])
        special = gguf.SpecialVocab(self.folder, load_merges=True, n_vocab=size)
        # Said in any case: where nothing is, llama.cpp decides by the way of splitting.
        special.add_special_token["bos"] = _begins(self.vocabulary.get("post_processor") or {})
        special.add_to_gguf(writer, quiet=True)

    def _places(self, gguf: Any, opened: Any) -> Iterator[tuple[str, str]]:
        """Yield the weights of a file and their names in GGUF."""
        kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == self.architecture)
        names = gguf.get_tensor_name_map(kind, self.config["num_hidden_layers"])
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            # GGUF's readers use the embedding for a head that is not there.
            if name == "lm_head.weight" and self.config.get("tie_word_embeddings"):
                continue
            there = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if there is None:
                raise ModelError(f"the weight {name} has no place in GGUF's {self.architecture}; {_SCRIPT}")
            yield name, there

    def _turned(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight as llama.cpp wants it; its other decoders rotate as transformers does."""
        heads = self.config["num_attention_heads"]
        of = {"q_proj": heads, "k_proj": self.config.get("num_key_value_heads", heads)}
        part = name.split(".")[-2]
        return _interleaved(weight, of[part]) if self.architecture == "llama" and part in of else weight


def _opened(file: Path) -> Any:
    return safe_open(file, framework="pt")


def _kind(gguf: Any, shape: Sequence[int], precision: str) -> Any:
    kinds = gguf.GGMLQuantizationType
    if len(shape) == 1:
        return kinds.F32
    # q8_0 has blocks of 32 numbers of one row.
    return kinds.F16 if precision == "q8_0" and shape[-1] % 32 else kinds[precision.upper()]


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows of queries or keys in the order of the original Llama, where the two halves of a pair are neighbors.

    transformers rotates the first half of a head with the second; llama.cpp's Llama rotates neighbors.
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _begins(processor: Mapping[str, Any]) -> bool:
    """Whether a tokenizer puts a token before each text."""
    if processor.get("type") == "Sequence":
        return any(map(_begins, processor.get("processors", ())))
    return "SpecialToken" in next(iter(processor.get("single", ())), {})


def _split(vocabulary: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name of how a byte-level tokenizer splits texts; None where there is none."""
    # A wrong name would split texts otherwise, and the model would read other tokens without a word; so anything
    # unknown is refused.
    if (vocabulary.get("model") or {}).get("type") != "BPE" or vocabulary["model"].get("byte_fallback"):
        return None
    if (vocabulary.get("normalizer") or {"type": "NFC"}) != {"type": "NFC"}:
        return None
    top = vocabulary.get("pre_tokenizer") or {}
    steps = top.get("pretokenizers", [top])
    *first, last = [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
    by_regex = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    if last == by_regex:
        digits = [{"type": "Digits", "individual_digits": True}]
        return "gpt-2" if not first else "smollm" if first == digits else None
    if last != {**by_regex, "use_regex": False}:
        return None
    asked = {"type": "Split", "behavior": "Isolated", "invert": False}
    return next((n for n, p in _PATTERNS.items() if first == [{**asked, "pattern": {"Regex": p}}]), None)
