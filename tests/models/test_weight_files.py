"""A model's folder written tensor by tensor is the one that transformers writes."""

import gc
import json
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen3MoeConfig

from gnomon.core.errors import CheckpointError
from gnomon.models.lora import merged_tensors
from gnomon.models.weight_files import folder_writer
from gnomon.records.manifest import NAME, find_damage, write_manifest

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}
SHAPES = {
    "llama": LlamaConfig(**SMALL, intermediate_size=48, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(
        **SMALL, head_dim=16, intermediate_size=48, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
    ),
    "gpt_oss": GptOssConfig(
        **SMALL, head_dim=16, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0
    ),
}


def model_of(shape: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(SHAPES[shape])


def weights_in(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("file_bytes", [50_000_000_000, 9000])
def test_the_folder_is_the_one_of_transformers(shape: str, file_bytes: int, tmp_path: Path):
    """Names, bits, config and index are those of save_pretrained, in one file and in many; the manifest knows it."""
    model = model_of(shape)
    model.save_pretrained(tmp_path / "theirs")
    hashes = folder_writer(model, dict(merged_tensors(model)), file_bytes=file_bytes)(tmp_path / "step-1")

    ours, theirs = weights_in(tmp_path / "step-1"), weights_in(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert (tmp_path / "step-1" / "config.json").read_text() == (tmp_path / "theirs" / "config.json").read_text()
    assert hashes.keys() == set((tmp_path / "step-1").glob("*.safetensors"))
    assert (len(hashes) > 3) == (file_bytes < 10_000)
    if len(hashes) > 1:
        index = json.loads((tmp_path / "step-1" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == ours.keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step-1")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    write_manifest(tmp_path / "step-1", 1, hashes)
    assert (tmp_path / "step-1" / NAME).is_file()
    assert find_damage(tmp_path / "step-1") is None


def test_numbers_of_several_widths_lie_at_multiples_of_theirs(tmp_path: Path):
    """A float32 router among bfloat16 weights comes first, as readers that map the file ask."""
    model = model_of("qwen3_moe").bfloat16()
    wide = {n: t.float() if "mlp.gate." in n or "norm" in n else t for n, t in merged_tensors(model)}
    folder_writer(model, wide)(tmp_path)

    file = next(tmp_path.glob("*.safetensors"))
    header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    kinds = [entry["dtype"] for name, entry in header.items() if name != "__metadata__"]
    assert kinds == sorted(kinds, reverse=True)
    assert set(kinds) == {"F32", "BF16"}
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_one_weight_is_in_memory_at_a_time(tmp_path: Path):
    """Each is asked for after the one before was written and let go."""
    model, alive, most = model_of("qwen3_moe"), weakref.WeakSet[Any](), 0
    held = dict(merged_tensors(model))

    def read(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for name in names:
            gc.collect()
            most = max(most, len(alive))
            copy = held[name].clone()
            alive.add(copy.untyped_storage())
            yield name, copy
            del copy

    folder_writer(model, {n: t.to("meta") for n, t in held.items()}, read)(tmp_path)

    assert most <= 1
    assert len(weights_in(tmp_path)) > len(held)


def test_where_writing_fails_every_weight_is_read(tmp_path: Path):
    """Other processes, which give their shares of each, are not left waiting; a folder is not asked of them."""
    model = model_of("llama")
    held, asked = dict(merged_tensors(model)), list[str]()

    def read(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            asked.append(name)
            yield name, held[name][:1] if name == "model.norm.weight" else held[name]

    write = folder_writer(model, held, read)
    assert write(None) == {}
    others, asked[:] = list(asked), []
    with pytest.raises(CheckpointError, match=r"model.norm.weight \(32,\) torch.float32 was to come"):
        write(tmp_path)

    assert asked == others
    assert set(asked) == set(held)
