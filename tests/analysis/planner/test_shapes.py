"""Models by their shapes: published sizes, configs, and what cannot be read."""

import json
from pathlib import Path

import pytest

from gnomon.analysis.planner.shapes import SHAPES, from_config, shape_of
from gnomon.core.errors import ConfigError
from gnomon.models.size import model_size
from gnomon.models.tiny import TINY_MODELS, save_tiny

PUBLISHED = {
    "qwen2.5-7b": 7.62, "llama-3.1-8b": 8.03, "qwen3-8b": 8.19, "qwen3-32b": 32.76, "qwen3-235b-a22b": 235.09,
    "Qwen/Qwen2.5-32B": 32.76, "Qwen/Qwen2.5-1.5B-Instruct": 1.54, "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-4B-Thinking-2507": 4.02, "Qwen/Qwen3-30B-A3B-Base": 30.53, "meta-llama/Llama-3.2-1B-Instruct": 1.236,
    "meta-llama/Meta-Llama-3-8B": 8.03, "meta-llama/Llama-3.3-70B-Instruct": 70.55, "openai/gpt-oss-20b": 20.91,
    "openai/gpt-oss-120b": 116.83, "allenai/OLMo-2-1124-7B-Instruct": 7.30, "allenai/OLMo-2-0325-32B": 32.23,
    "google/gemma-3-1b-it": 1.00, "google/gemma-3-27b-pt": 27.01,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1.777, "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": 32.76,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8.03, "Qwen/Qwen3-Coder-30B-A3B-Instruct": 30.53,
}  # fmt: skip
MIXTURE = {
    "hidden_size": 4096, "intermediate_size": 12_288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936, "num_experts": 128,
    "num_experts_per_tok": 8, "tie_word_embeddings": False, "mlp_only_layers": [],
}  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_sizes_are_the_published_ones(name: str, billions: float):
    """Parameters as on the models' cards, to half a percent, under any name that the hub gives the shape."""
    assert shape_of(name).parameters / 1e9 == pytest.approx(billions, rel=5e-3)


def test_a_token_of_the_mixture_meets_22_billion():
    """A22B: 94 layers of attention, router and 8 of 128 experts, table and head."""
    assert SHAPES["qwen3-235b-a22b"].active_parameters / 1e9 == pytest.approx(22.19, rel=1e-3)


def test_a_config_gives_the_built_in_shape():
    """The mixture's public config.json, read from a table, is the shape in the list."""
    assert from_config(MIXTURE, "qwen3-235b-a22b") == SHAPES["qwen3-235b-a22b"]


@pytest.mark.parametrize("kind", ["tiny", "tiny-moe"])
def test_a_folder_and_a_name_are_as_large_as_the_model_itself(kind: str, tmp_path: Path):
    """Of a model that is built, all weights count but biases and norms inside of attention: 1% of so little."""
    folder = save_tiny(tmp_path / "model", config=TINY_MODELS[kind])

    assert shape_of(str(folder)).parameters == pytest.approx(model_size(kind).parameters, rel=0.01)
    assert shape_of(kind).parameters == shape_of(str(folder)).parameters


def test_few_rows_read_few_experts_and_many_read_all():
    """One row meets 8 of 128 experts; 128 rows meet 128 (1 - (15/16)^128), which is 127.97."""
    shape = SHAPES["qwen3-235b-a22b"]
    resting = shape.read(0)

    assert shape.read(1) - resting == pytest.approx(94 * 8 * shape.expert)
    assert (shape.read(128) - resting) / (94 * shape.expert) == pytest.approx(127.97, abs=0.01)


def test_keys_and_values_are_parted_as_far_as_there_are_heads():
    """Four key heads on eight devices: each holds one of them, so no less than on four."""
    shape = SHAPES["qwen3-235b-a22b"]

    assert [shape.cache(parts, 2) // (2 * 94 * 128 * 2) for parts in (1, 2, 4, 8)] == [4, 2, 1, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": None}, "has no hidden_size above 0, so its shape is not known"),
        ({"num_attention_heads": 0}, "has no num_attention_heads above 0"),
        ({"vocab_size": True}, "has no vocab_size above 0"),
        ({"num_experts": 0, "intermediate_size": None}, "has no intermediate_size above 0"),
        ({"num_experts_per_tok": 129}, "128 experts, of which num_experts_per_tok = 129"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok = 0"),
        ({"first_k_dense_replace": 95}, "95 of 94 layers"),
        ({"text_config": {"hidden_size": 1}}, "has no num_hidden_layers, num_attention_heads, vocab_size"),
        ({"kv_lora_rank": 512}, "has latent attention"),
    ],
)
def test_what_cannot_be_reckoned_is_refused(change: dict[str, object], said: str):
    """A config that lacks a size, has one that no model can have, or another form of attention is named."""
    with pytest.raises(ConfigError, match=said):
        from_config(MIXTURE | change, "mine")


def test_an_unknown_model_is_refused_with_the_nearest_name(tmp_path: Path):
    """A slip of the finger gets the name that was meant; a broken file is named."""
    with pytest.raises(ConfigError, match=r"qwen3-32b.*or a folder with a config\.json"):
        shape_of("qwen3-32")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        shape_of(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="is no table of settings"):
        shape_of(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    assert shape_of(str(tmp_path)).experts == 128
