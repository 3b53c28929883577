import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from gnomon.core.errors import ConfigError, ModelError
from gnomon.models.adapter_config import LoraConfig, read_adapter_config
from gnomon.models.load import load_model
from gnomon.models.lora import adapt, check_rank, merged_tensors, trainable
from gnomon.models.place import LINEAR_LAYERS
from gnomon.models.tiny import TinyConfig, tiny_model

IDS = torch.tensor([[256, 72, 105, 33]])


def perturb(model) -> None:
    """Give B a value, as an update would."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=generator)


def gpt2():
    """Its linear layers are stored transposed."""
    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2)).eval()


def mixture():
    """Experts and their router, whose weights are no linear layers' but are adapted like those."""
    return tiny_model(0, TinyConfig(architecture="qwen3_moe"))


def test_a_new_adapter_changes_nothing():
    """B is zero, so outputs are those of the plain model, to the bit of a float32 sum."""
    adapted = adapt(tiny_model(0), LoraConfig(rank=4))

    torch.testing.assert_close(adapted(IDS).logits, tiny_model(0)(IDS).logits)


def test_only_adapters_are_trained_and_in_float32():
    """Seven linear layers in each of two layers have A and B; nothing else has a gradient, and the head none."""
    model = load_model("tiny", torch.bfloat16, LoraConfig(rank=4))

    names = [name for name, _ in trainable(model)]
    assert len(names) == 2 * 7 * 2
    assert all("lora_" in name and "lm_head" not in name for name in names)
    assert {p.dtype for _, p in trainable(model)} == {torch.float32}
    assert len(list(trainable(tiny_model(0)))) == len(list(tiny_model(0).parameters()))


@pytest.mark.parametrize("make", [tiny_model, gpt2, mixture], ids=["linear", "conv1d", "experts"])
def test_merged_weights_are_w_plus_scale_b_a(make):
    """The plain model with merged weights gives the adapted model's logits; names are the plain model's."""
    adapted = adapt(make(), LoraConfig(rank=3, alpha=7.0))
    perturb(adapted)
    plain = make()
    before = plain(IDS).logits

    merged = dict(merged_tensors(adapted))

    assert merged.keys() == dict(merged_tensors(plain)).keys()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(merged[name])
    torch.testing.assert_close(plain(IDS).logits, adapted(IDS).logits, atol=1e-4, rtol=1e-4)
    assert (plain(IDS).logits - before).abs().max() > 0.01


def test_weights_without_adapter_are_not_copied():
    """A snapshot of a plain model is its live tensors."""
    model = tiny_model()

    live = {p.data_ptr() for p in model.parameters()}
    assert {tensor.data_ptr() for _, tensor in merged_tensors(model)} <= live


def test_named_targets_are_the_only_ones():
    """q_proj alone: one pair in each of two layers."""
    model = adapt(tiny_model(), LoraConfig(rank=2, targets=("q_proj",)))

    assert sorted(name.split(".")[4] for name, _ in trainable(model)) == ["q_proj"] * 4


@pytest.mark.parametrize(
    ("targets", "match"),
    [
        (("q_prj",), "unknown module 'q_prj'; did you mean 'q_proj'"),
        (("embed_tokens",), r"'embed_tokens' \(model.embed_tokens\) shares its weight"),
        (("lm_head",), "'lm_head'.*shares its weight"),
    ],
)
def test_targets_that_cannot_be_are_refused(targets, match):
    """A misspelt module is corrected; a tied weight, which merging would change twice, is named."""
    with pytest.raises(ConfigError, match=match):
        adapt(tiny_model(), LoraConfig(rank=2, targets=targets))


@pytest.mark.parametrize(
    "broken", [{"rank": 0}, {"rank": 4, "alpha": 0.0}, {"rank": 4, "targets": ()}, {"rank": 4, "targets": "q_proj"}]
)
def test_a_plan_that_cannot_be_meant_is_refused(broken):
    """rank, alpha and targets are checked when the plan is made."""
    with pytest.raises(ConfigError, match="lora"):
        LoraConfig(**broken)


def test_a_missing_peft_is_named(monkeypatch):
    """The pip command is in the message, before a model loads."""
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lora.rank = 4 needs peft.*; install it: pip install 'gnomon\[lora\]'"):
        load_model("tiny", torch.float32, LoraConfig(rank=4))


HYBRIDS = {
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "expand": 2},
    "falcon_mamba": {"state_size": 8},
    "falcon_h1": {
        "head_dim": 8, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
        "mamba_d_state": 8,
    },
    "nemotron_h": {
        "head_dim": 8, "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 1,
    },
    "llama4_text": {
        "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48,
        "attention_chunk_size": 32, "no_rope_layers": [1, 0], "interleave_moe_layer_step": 1,
    },
    "jamba": {
        "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "bamba": {
        "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "attn_layer_indices": [1],
    },
    "granitemoehybrid": {
        "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"],
    },
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip


def hybrid(kind):
    """A model of two layers of an architecture with state-space layers, convolutions or routers of its own."""
    shape = {"vocab_size": 263, "hidden_size": 32, "num_hidden_layers": 2}
    if "mamba" not in kind:
        shape |= {
            "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 64, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258,
        }  # fmt: skip
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(kind, **shape | HYBRIDS[kind])).eval()


@pytest.mark.parametrize("kind", HYBRIDS)
def test_no_adapter_of_a_hybrid_or_mixture_goes_without_a_gradient(kind):
    """Layers that kernels read past an adapter, that no pass calls or that return pairs are left out by themselves."""
    model = adapt(hybrid(kind), LoraConfig(rank=4))

    logits = model(input_ids=torch.arange(128).view(4, 32), use_cache=False).logits
    logits.log_softmax(-1)[..., 7].sum().backward()

    adapters = dict(trainable(model))
    assert adapters
    assert [name for name, parameter in adapters.items() if parameter.grad is None] == []
    assert [n for n, p in adapters.items() if "lora_B" in n and not p.grad.abs().sum()] == []


@pytest.mark.parametrize(
    ("kind", "target", "why"),
    [
        ("mamba", "out_proj", "is read by kernels"),
        ("mamba", "x_proj", "is read by kernels"),
        ("mamba", "conv1d", "has no matrix of its own"),
        ("falcon_h1", "mamba", "has no matrix of its own"),
        ("jamba", "dt_proj", "is read by kernels"),
        ("nemotron_h", "out_proj", "is read by kernels"),
        ("llama4_text", "router", "computes in a way of its own"),
        ("phimoe", "router", "computes in a way of its own"),
    ],
)
def test_a_named_target_that_cannot_be_adapted_is_refused_with_those_that_fit(kind, target, why):
    """The message names lora.targets, the module, and what to type instead."""
    with pytest.raises(ConfigError, match=rf"lora.targets: '{target}' \(.*\) {why}.*those that fit: .*_proj"):
        adapt(hybrid(kind), LoraConfig(rank=4, targets=(target,)))


@pytest.mark.parametrize(
    ("rank", "targets", "most"),
    [
        (65, "all-linear", 64),
        (10**6, "all-linear", 64),
        (65, ("q_proj",), 64),
        (33, ("k_proj",), 32),
        (512, ("down_proj",), 64),
    ],
)
def test_a_rank_that_no_target_can_have_is_refused(rank: int, targets: Any, most: int):
    """B A of more columns than the weight has rows or columns is that weight again, and more numbers."""
    model = tiny_model()
    with pytest.raises(ConfigError, match=f"lora.rank = {rank} is above {most}, .*set lora.rank = {most} or less"):
        check_rank(model, LoraConfig(rank=rank, targets=targets))

    assert check_rank(model, LoraConfig(rank=most, targets=targets)) is None or targets == "all-linear"


def test_a_rank_that_some_targets_cannot_have_is_said():
    """Narrow keys and values are adapted too, with more numbers than they need."""
    said = check_rank(tiny_model(), LoraConfig(rank=40))

    assert said == "lora.rank = 40 is above the rank that k_proj, v_proj can have, whose adapters are wasteful"
    assert check_rank(tiny_model(), LoraConfig(rank=4)) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("r", value) for value in (0, -1, 2.5, True, "8", None, math.inf, math.nan, 10**400, [8], {})),
        *(("lora_alpha", value) for value in (0, -8, True, "16", None, math.inf, math.nan, 10**400, [16], {})),
        *(("base_model_name_or_path", value) for value in (True, 7, ["base"], {"a": 1}, math.nan)),
        *(("target_modules", value) for value in ([None], [["q_proj"]], ["q_proj", {}], [1, "q_proj"], [math.nan])),
    ],
)
def test_a_setting_of_an_adapter_that_peft_does_not_write_is_named(tmp_path: Path, key: str, value: Any):
    """A rank of 2.5 is no rank of 2, and no value ends in an error of Python."""
    table = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "use_rslora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(table | {key: value}))

    with pytest.raises(ModelError, match=rf"adapter_config.json': .*{key} is .*, and should be"):
        read_adapter_config(tmp_path)


@pytest.mark.parametrize("architecture", LINEAR_LAYERS)
def test_linear_layers_known_without_torch_are_those_of_the_architecture(architecture: str):
    """As transformers makes the model, of one layer and without memory; a table cannot fall behind."""
    config = hf.AutoConfig.for_model(architecture)
    for name in ("num_hidden_layers", "n_layer"):
        if hasattr(config, name):
            setattr(config, name, 1)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    kinds = (torch.nn.Linear, hf.pytorch_utils.Conv1D)
    found = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, kinds)}
    assert sorted(LINEAR_LAYERS[architecture]) == sorted(found)
