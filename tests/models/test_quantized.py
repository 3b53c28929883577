"""Frozen weights in 4 or 8 bits: what they stand for, that nothing else differs from a model which holds that."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from gnomon.core.errors import ConfigError
from gnomon.models.adapter_config import KINDS, Kind, LoraConfig
from gnomon.models.checkpoint_check import try_checkpoint
from gnomon.models.contexts import recomputing, with_weights, without_adapters
from gnomon.models.load import load_model
from gnomon.models.lora import adapt, merged_tensors, trainable
from gnomon.models.quantized import BITS, BLOCK, NF4, QuantizedLinear, check_quantizable, layers_of, quantize, stored
from gnomon.models.tiny import TinyConfig, tiny_model, tiny_tokenizer

IDS = torch.tensor([[256, 72, 105, 33, 7, 9, 11]])


def adapted(kind: Kind | None, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Return a tiny model with adapters that do something, its base quantized or not."""
    torch.manual_seed(1)
    model = adapt(tiny_model(seed, None, dtype), LoraConfig(rank=4))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=generator)
    return model if kind is None else quantize(model, kind)


def dequantized(model: Any) -> Any:
    """Return the unquantized model with the weights that a quantized one stands for."""
    plain = adapted(None, dtype=next(model.parameters()).dtype)
    with torch.no_grad():
        for name, layer in layers_of(model):
            plain.get_submodule(name).weight.copy_(layer.weight)
    return plain


def gradients(model: Any) -> Iterator[torch.Tensor]:
    """Yield the loss, and then the gradients of the adapters."""
    logits = model(input_ids=IDS).logits.float()
    loss = nn.functional.cross_entropy(logits[0, :-1], IDS[0, 1:])
    loss.backward()
    yield loss.detach()
    for _, parameter in trainable(model):
        assert parameter.grad is not None
        yield parameter.grad


def test_nf4_is_the_nearest_of_sixteen_values_times_the_largest_of_64():
    """By hand: a block of 64 with the largest magnitude 2; 1.0 -> 0.5 -> 0.44 * 2, -0.1 -> -0.05 -> -0.091 * 2."""
    layer = nn.Linear(BLOCK, 2, bias=False)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[0, :4] = torch.tensor([-2.0, 1.0, -0.1, 0.01])

    made = QuantizedLinear(layer, "nf4").weight

    expected = torch.tensor([-2.0, 0.44070982933044434 * 2, -0.09105003625154495 * 2, 0.0])
    torch.testing.assert_close(made[0, :4], expected, rtol=0, atol=1e-7)
    assert not made[0, 4:].any()
    assert not made[1].any()


@pytest.mark.parametrize(("rows", "columns"), [(5, 7), (3, 64), (9, 100)])
def test_every_weight_is_within_half_a_gap_of_what_it_was(rows: int, columns: int):
    """Rows that are no multiple of a block too: NF4 within half its widest gap of the block's largest, int8 half a unit
    of the row's.
    """
    torch.manual_seed(rows)
    layer = nn.Linear(columns, rows)
    four, eight = (QuantizedLinear(layer, kind).weight for kind in KINDS)

    gap = max(high - low for low, high in pairwise(NF4)) / 2
    assert (four - layer.weight).abs().max() <= gap * layer.weight.abs().max() + 1e-7
    most = layer.weight.abs().amax(1, keepdim=True)
    assert ((eight - layer.weight).abs() <= most / 254 + 1e-7).all()
    assert torch.equal(QuantizedLinear(layer, "nf4").codes, QuantizedLinear(layer, "nf4").codes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_gradients_are_those_of_a_model_that_was_dequantized_beforehand(kind: Kind, again: bool):
    """Loss and every adapter's gradient, to 1e-6 in float32, also where layers are computed again."""
    model = adapted(kind)
    exact = list(gradients(dequantized(model)))

    if again:
        with recomputing(model):
            found = list(gradients(model))
    else:
        found = list(gradients(model))

    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found[0], next(gradients(adapted(None))), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_no_dequantized_weight_is_kept_for_the_backward_pass(kind: Kind):
    """Nothing that autograd keeps has the shape of a linear layer's weight; a plain model keeps 14 of them."""
    kept = list[torch.Size]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    shapes = {layer.shape for _, layer in layers_of(adapted(kind))}
    counts = []
    for model in (adapted(kind), adapted(None)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(input_ids=IDS).logits.sum().backward()
        counts.append(sum(shape in shapes or shape[::-1] in shapes for shape in kept))
    assert counts[0] == 0 < counts[1]


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_head_and_norms_stay_and_the_rest_takes_few_bits(kind: Kind):
    """All seven layers of both blocks take the bits that a weight is said to take; the tied head is plain."""
    model = load_model("tiny", torch.bfloat16, LoraConfig(rank=4, base=kind))
    names = [name for name, _ in layers_of(model)]
    weights = sum(layer.shape.numel() for _, layer in layers_of(model))

    assert len(names) == 14
    assert not any("lm_head" in name or "embed" in name for name in names)
    held = sum(tensor.nbytes for _, tensor in stored(model))
    rows = sum(4 * layer.shape[0] for _, layer in layers_of(model)) if kind == "int8" else 0
    assert held == weights * BITS[kind] / 8 + rows
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {layer.weight.dtype for _, layer in layers_of(model)} == {torch.bfloat16}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_published_is_the_model_that_computes(kind: Kind):
    """The plain model with the published weights gives the quantized one's logits, under the plain model's names."""
    model, plain = adapted(kind), tiny_model(0)
    merged = dict(merged_tensors(model))

    assert merged.keys() == dict(merged_tensors(plain)).keys()
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)


def test_a_snapshot_is_computed_with_and_the_base_is_back_afterwards():
    """Inside the block the logits are those of the lent weights, outside as before; the reference is the base."""
    model, other = adapted("nf4"), tiny_model(5)
    with torch.no_grad():
        before, theirs = model(IDS).logits, other(IDS).logits
        with with_weights(model, merged_tensors(other)):
            torch.testing.assert_close(model(IDS).logits, theirs, rtol=1e-5, atol=1e-5)
        assert torch.equal(model(IDS).logits, before)
        with without_adapters(model), without_adapters(plain := dequantized(model)):
            torch.testing.assert_close(model(IDS).logits, plain(IDS).logits)


def test_what_cannot_be_quantized_is_refused_before_weights_are_read():
    """Experts and GPT-2's layers are no linear layers; a base of a wrong name, and one without adapters."""
    with pytest.raises(ConfigError, match=r"lora.base = 'nf4' stores linear .* leave lora.base out"):
        try_checkpoint("tiny-moe", tiny_tokenizer(TinyConfig()), lora=LoraConfig(rank=4, base="nf4"))
    gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(ConfigError, match="0% of a GPT2LMHeadModel's weights"):
        check_quantizable(gpt2, "int8")
    assert check_quantizable(tiny_model(), "nf4") is None
    with pytest.raises(ConfigError, match="unknown base 'nf8'; did you mean 'nf4'"):
        LoraConfig(base="nf8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"lora\.rank must be at least 1|lora\.alpha must be > 0"):
        LoraConfig(rank=0, base="nf4")
