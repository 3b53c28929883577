"""What a small card holds, by the plan: against the bytes of a scaled-down model's tensors, and for real shapes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.random_model import RANDOM
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from gnomon.analysis.planner.deployment import Deployment, PlannedJob, job_of, place_of
from gnomon.analysis.planner.hardware import PUBLISHED, hardware_of
from gnomon.analysis.planner.layout import Layout, engine_memory, kept_bytes, learner_memory
from gnomon.analysis.planner.search import best_layout, layouts, remedies
from gnomon.analysis.planner.shapes import from_config
from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError
from gnomon.learner.optimizer import Optimizer
from gnomon.learner.sections import OptimizerConfig
from gnomon.models.adapter_config import KINDS, LoraConfig
from gnomon.models.contexts import recomputing
from gnomon.models.lora import adapt, trainable
from gnomon.models.quantized import quantize, stored
from gnomon.training.resolve import Resolved

CARDS = ("rtx3090", "rtx4090", "rtx5090", "a10", "l4", "l40s", "a100-40", "a100-80", "h100", "h200", "b200")
TOKENS = 512
# A twentieth of Qwen3-4B's width, a ninth of its layers.
SCALED = Qwen3Config(
    vocab_size=3000, hidden_size=128, intermediate_size=488, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=1, head_dim=64, tie_word_embeddings=True,
)  # fmt: skip


def job(*overrides: str, precision: str = "bf16") -> PlannedJob:
    return job_of(Resolved(load(RANDOM, [f"learner.precision={precision}", *overrides]).experiment), TOKENS)


def place(model: str, card: str, *overrides: str) -> Deployment:
    settings = [f"model={model}", "learner.precision=bf16", "sampling.max_completion_length=4096", *overrides]
    return place_of(Resolved(load(RANDOM, settings).experiment), card, 1, TOKENS, 1024)


def scaled(dtype: torch.dtype, base: Any, rank: int = 8) -> Any:
    torch.manual_seed(0)
    model = adapt(Qwen3ForCausalLM(SCALED).to(dtype).eval(), LoraConfig(rank=rank))
    return model if base is None else quantize(model, base)


def kept(model: Any) -> int:
    """Return the bytes that a forward pass below the head keeps, weights left out."""
    weights = {own.untyped_storage().data_ptr() for own in (*model.parameters(), *(t for _, t in stored(model)))}
    found, held = dict[int, int](), list[Any]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
            held.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.get_decoder()(input_ids=torch.arange(TOKENS)[None], use_cache=False)
    return sum(found.values())


@pytest.mark.parametrize("base", [None, *KINDS])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_weights_gradients_and_moments_are_the_tensors_that_are_there(base: Any, precision: str, moments: Any):
    """Each to 5% of what a step of the optimizer leaves: frozen and adapted weights, their gradients, both moments."""
    named = [] if base is None else [f"lora.base={base}"]
    asked = job("lora.rank=8", f"learner.optimizer.moments={moments}", *named, precision=precision)
    where = Deployment(from_config(SCALED.to_dict(), "scaled"), hardware_of("rtx4090"), asked, PUBLISHED, 1)
    planned = learner_memory(where, Layout(1, 1, micro=TOKENS)).parts
    model = scaled(torch.bfloat16 if precision == "bf16" else torch.float32, base)
    optimizer = Optimizer([*trainable(model)], OptimizerConfig(moments=moments))
    for _, parameter in trainable(model):
        parameter.grad = torch.ones_like(parameter)
    gradients = sum(parameter.grad.nbytes for _, parameter in trainable(model))
    optimizer.step(1e-3)

    held = [*model.parameters(), *(tensor for _, tensor in stored(model))]
    assert planned["weights"] == pytest.approx(sum(tensor.nbytes for tensor in held), rel=0.05)
    assert planned["gradients"] == pytest.approx(gradients, rel=0.05)
    masters = sum(parameter.nbytes for _, parameter in trainable(model))
    kept_in_all = sum(tensor.nbytes for tensor in optimizer.changing()) - masters
    assert planned["moments"] == pytest.approx(kept_in_all, rel=0.05)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("base", [None, "nf4"])
def test_activations_are_what_autograd_keeps(base: Any, precision: str):
    """To 5% a layer's activations, and to 5% the layers' inputs where they are computed again."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    shape, plan = from_config(SCALED.to_dict(), "scaled"), job("lora.rank=8", precision=precision)
    model = scaled(dtype, base)
    norm = TOKENS * 4 * SCALED.hidden_size  # the last norm's input in float32, in both

    assert kept(model) - norm == pytest.approx(TOKENS * kept_bytes(shape, plan, False), rel=0.05)
    with recomputing(model):
        inputs = kept(model) - norm
    layer = kept_bytes(shape, plan, False) / shape.layers
    assert inputs == pytest.approx(TOKENS * (kept_bytes(shape, plan, True) - layer), rel=0.05)


def test_four_billion_fit_twelve_gigabytes_and_eight_billion_twenty_four():
    """Qwen3-4B and 8B with adapters on a base in 4 bits, answers of 4,096 tokens, both while learning and answering."""
    small = place("qwen3-4b", "rtx4090", "lora.rank=32", "lora.base=nf4")
    for where in (
        replace(small, hardware=replace(small.hardware, memory=12e9)),
        place("qwen3-8b", "rtx4090", "lora.rank=32", "lora.base=nf4"),
    ):
        layout = best_layout(where).layout
        for held in (learner_memory(where, layout), engine_memory(where, layout)):
            assert held.total <= 0.9 * where.hardware.memory

    unquantized = place("qwen3-8b", "rtx4090", "lora.rank=32")
    with pytest.raises(
        ConfigError, match=r"fits with lora.base=int8 \(a step takes \d\.\d times as long\); or lora.base"
    ):
        best_layout(unquantized)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("model", ["qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b"])
def test_what_is_proposed_for_a_card_fits_it(card: str, model: str):
    """Each setting that is named makes a layout, the quickest first; few bits only where adapters alone do not fit."""
    asked = place(model, card)
    ways = dict(remedies(asked))

    settings = [way for way in ways if not way.startswith("--")]
    for way in settings:
        assert list(layouts(place(model, card, *way.split())))
        assert ("lora.base" in way) <= ("lora.rank=32" not in ways)
    assert settings == sorted(settings, key=lambda way: ways[way])


def test_a_quantized_base_is_one_process_and_no_mixture():
    """Of several devices one learns; experts are refused with what to leave out."""
    eight = replace(place("qwen3-4b", "rtx4090", "lora.rank=32", "lora.base=nf4"), devices=8)
    assert {layout.learners for layout in layouts(eight)} == {1}
    with pytest.raises(ConfigError, match=r"are one tensor a layer; leave lora\.base out"):
        place("qwen3-30b-a3b", "h100", "lora.rank=32", "lora.base=nf4")
