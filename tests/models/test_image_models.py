"""Models that also read images are trained on text: as exact as others, their parts for images untouched."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from benchmarks.architectures import differences
from safetensors.torch import load_file

import gnomon
from gnomon.core.errors import ModelError
from gnomon.models.adapter_config import LoraConfig
from gnomon.models.load import check_model, load_model
from gnomon.models.lora import trainable
from gnomon.models.size import model_size
from gnomon.models.tiny import save_tiny

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
QUARTER = {**ROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
SMALL: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "head_dim": 8, "pad_token_id": 258, "bos_token_id": 256,
    "eos_token_id": 257, "initializer_range": 0.2, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "sliding_window": 9, "embed_dim": 32,
    "depth": 2, "num_heads": 4, "image_size": 16, "patch_size": 8, "out_hidden_size": 32, "projection_dim": 32,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "vision_output_dim": 32, "intermediate_size_mlp": 48, "attention_chunk_size": 8, "num_global_layers": 1,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1], "projector_input_dim": 32,
    "projector_output_dim": 32,
}  # fmt: skip
TEXT: dict[str, dict[str, Any]] = {
    "Qwen2_5_VL": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
    "Gemma3": {}, "Qwen3VL": {}, "Qwen3VLMoe": {}, "Llama4": {}, "Mistral3": {}, "Llava": {}, "LlavaOnevision": {},
    "Idefics3": {}, "SmolVLM": {}, "Mllama": {}, "AyaVision": {}, "Lfm2Vl": {}, "Ovis2": {},
    "Qwen2VL": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
    "Qwen3_5": {"rope_parameters": QUARTER, "initializer_range": 0.1},
    "Qwen3_5Moe": {"rope_parameters": QUARTER, "initializer_range": 0.1},
    "Gemma4": {"num_kv_shared_layers": 0, "per_layer_config": {}},
    "Glm4v": {"rope_parameters": QUARTER | {"mrope_section": [1, 1]}},
}  # fmt: skip
"""By family, what its language model's config changes."""
PARTS: dict[str, dict[str, Any]] = {"Gemma4": {"vision_config": {}, "audio_config": {}}}
"""By family, the parts that its config leaves out unless they are asked for."""


def small(config: Any, sizes: dict[str, Any]) -> Any:
    """Make a config and those within it small, in place."""
    for name, value in list(vars(config).items()):
        if isinstance(value, hf.PretrainedConfig):
            small(value, sizes)
        elif name in sizes and value is not None:
            setattr(config, name, sizes[name])
        elif name == "layer_types" and value:
            config.layer_types = [value[0], value[-1]]
        elif name == "cross_attention_layers":
            config.cross_attention_layers = []
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int) and value > 255:
            setattr(config, name, 250)
        elif name == "rope_parameters" and isinstance(value, dict) and "mrope_section" in value:
            value["mrope_section"] = [2, 1, 1]
    return config


def saved(
    family: str, folder: Path, sizes: dict[str, Any] | None = None, of_text: dict[str, Any] | None = None
) -> Path:
    """Write a small model of a family as its publisher would, with a tokenizer of bytes; some sizes may be others."""
    save_tiny(folder)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).unlink()
    config = small(getattr(hf, f"{family}Config")(**PARTS.get(family, {})), SMALL | (sizes or {}))
    text = config.get_text_config()
    for name, value in {**TEXT[family], **(of_text or {})}.items():
        setattr(text, name, value)
    if "partial_rotary_factor" in vars(text):
        text.partial_rotary_factor = text.rope_parameters["partial_rotary_factor"]
    torch.manual_seed(0)
    getattr(hf, f"{family}ForConditionalGeneration")(config).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family", [f if f in ("Qwen2_5_VL", "Qwen3_5") else pytest.param(f, marks=pytest.mark.slow) for f in TEXT]
)
def test_rows_of_text_are_scored_and_drawn_as_if_alone(family: str, tmp_path: Path):
    """The class is the one that config.json names; its numbers are those of a plain forward pass of each row.

    What text gives a gradient to is trained, and nothing else is.
    """
    if not hasattr(hf, f"{family}Config"):
        pytest.skip(f"transformers {hf.__version__} has no {family}")
    model = load_model(str(saved(family, tmp_path / "model")), torch.float32)

    assert type(model).__name__ == f"{family}ForConditionalGeneration"
    assert max(differences(model)) <= 1e-5

    trained = {name for name, _ in trainable(model)}
    model.requires_grad_(True)
    model(input_ids=torch.arange(10).reshape(2, 5)).logits.square().sum().backward()
    assert trained == {name for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.filterwarnings("ignore")
def test_adapters_are_those_of_the_language_model(tmp_path: Path):
    """No pass over text calls a layer for images, so "all-linear" leaves them out."""
    model = load_model(str(saved("Mistral3", tmp_path / "model")), torch.float32, LoraConfig(rank=2))
    adapted = {name for name, _ in model.named_parameters() if "lora_A" in name}

    assert adapted
    assert not [name for name in adapted if "vision" in name or "projector" in name]


def test_what_writes_no_text_is_refused(tmp_path: Path):
    """Reading images is no reason to take an encoder with a decoder."""
    folder = save_tiny(tmp_path / "model")
    config = hf.Florence2Config(architectures=["Florence2ForConditionalGeneration"])
    config.save_pretrained(folder)

    with pytest.raises(ModelError, match="is not a causal language model that transformers knows"):
        check_model(str(folder))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["Gemma3", "Gemma4", "Qwen3VL", "Qwen3_5", "Llama4", "Mistral3"])
def test_a_run_changes_the_language_model_alone(family: str, tmp_path: Path):
    """Checkpoints have every weight under its published name; those for images are the source's, in training's form."""
    source, run = saved(family, tmp_path / "model"), tmp_path / "run"
    gnomon.train(
        model=str(source),
        dataset=[{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)],
        rewards=[lambda prompt, completion: float(len(set(completion)))],
        run_dir=str(run),
        steps=2,
        rollouts_per_step=16,
        sampling={"max_completion_length": 4},
        learner={"optimizer": {"weight_decay": 0.1}},
    )
    before, after = (load_file(f / "model.safetensors") for f in (source, run / "checkpoints" / "step-2"))
    changed = {name for name in before if not torch.equal(before[name].to(after[name].dtype), after[name])}

    size = model_size(str(source))
    model = load_model(str(source), torch.float32)
    assert size.parameters - size.frozen == sum(p.numel() for _, p in trainable(model))
    assert 0 < size.frozen < size.parameters
    assert before.keys() == after.keys()
    assert changed
    assert not [name for name in changed if any(part in name for part in ("visual", "vision", "projector"))]
