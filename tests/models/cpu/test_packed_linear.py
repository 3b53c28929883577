"""Which matrices are rounded: those of linear layers and experts, and no other."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gnomon.models.adapter_config import LoraConfig
from gnomon.models.cpu.packed_linear import input_axes
from gnomon.models.lora import adapt, merged_tensors
from gnomon.models.tiny import TinyConfig, tiny_model

MATRICES = {f"self_attn.{p}_proj" for p in "qkvo"} | {f"mlp.{p}_proj" for p in ("gate", "up", "down")}


def test_of_a_dense_model_the_seven_matrices_of_each_layer():
    """Norms stay, and the embedding, which is the head as well."""
    names = {f"model.layers.{layer}.{matrix}.weight" for layer in range(2) for matrix in MATRICES}

    assert input_axes(tiny_model()) == dict.fromkeys(names, -1)


@pytest.mark.parametrize("plan", [LoraConfig(rank=2), LoraConfig(rank=2, targets=("q_proj",))], ids=["all", "one"])
def test_adapters_change_no_name(plan):
    """An adapted model's snapshot has the plain names, and its adapters are none of them."""
    plain = input_axes(tiny_model())
    adapted = adapt(tiny_model(), plan)

    assert input_axes(adapted) == plain
    assert plain.keys() <= dict(merged_tensors(adapted)).keys()


@pytest.mark.parametrize("architecture", ["qwen3_moe", "olmoe"])
def test_of_a_mixture_attention_and_experts(architecture):
    """Experts by one tensor [experts, outputs, inputs]; the router stays."""
    model = tiny_model(0, TinyConfig(architecture=architecture))
    axes = input_axes(model)
    kinds = {name.split(".", 3)[3] for name in axes}

    assert kinds == {f"self_attn.{p}_proj.weight" for p in "qkvo"} | {
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }
    assert set(axes.values()) == {-1}


def test_transposed_weights_have_their_inputs_first():
    """GPT-2's layers are stored [inputs, outputs]; its positions are an embedding too."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=16)
    axes = input_axes(GPT2LMHeadModel(config))

    layers = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    assert axes == {f"transformer.h.0.{layer}.weight": 0 for layer in layers}
