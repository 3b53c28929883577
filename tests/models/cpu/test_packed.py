"""Packed linear layers: the same numbers, from the weights of now."""

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from gnomon.models.cpu.packed_linear import PackedLinears, _families
from gnomon.models.decoder import AlignedDecoder, RecomputeDecoder

pytestmark = pytest.mark.usefixtures("way")


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        attention_bias=True,
    )
    return LlamaForCausalLM(config).eval()


class Siblings(nn.Module):
    """Two layers that are given one tensor, or two equal ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(256, 256), nn.Linear(256, 512)

    def forward(self, inputs: Tensor, is_shared: bool = True) -> tuple[Tensor, Tensor]:
        return self.left(inputs), self.right(inputs if is_shared else inputs.clone())


@torch.no_grad()
def packed(layers: PackedLinears, model: nn.Module, *arguments: object) -> tuple[Tensor, ...]:
    with layers:
        result: tuple[Tensor, ...] = model(*arguments)
    return result


@torch.no_grad()
def test_a_decoding_step_gives_the_logits_of_a_plain_forward_pass(llama):
    """Rows of different lengths, many steps, biases: the largest difference is rounding."""
    ours, plain = AlignedDecoder(llama), RecomputeDecoder(llama)
    prompts = [(3, 1, 4, 1, 5), (9, 2), (6, 5, 3)]
    for decoder in (ours, plain):
        decoder.admit(prompts, 16, frozenset())

    for turn in range(6):
        tokens = [(7 * turn + row) % 512 for row in range(3)]
        torch.testing.assert_close(ours.step(tokens, 16), plain.step(tokens, 16), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_layers_that_are_given_one_tensor_become_one_product(llama):
    """Query, key and value; gate and up; and three layers that have no sibling."""
    layers = PackedLinears(llama)
    with layers:
        llama(torch.tensor([[1, 2, 3]]))

    names = {module: name.split(".")[-1] for name, module in llama.named_modules()}
    found = [[names[layer] for layer in family] for family in layers._families]

    block = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert found == [*block, *block, ["lm_head"]]


def test_a_layer_that_meets_another_tensor_than_its_sibling_multiplies_alone():
    """What was watched once is a guess about later calls, checked at each of them."""
    model = Siblings()
    layers = PackedLinears(model)
    packed(layers, model, torch.randn(3, 256))
    inputs = torch.randn(3, 256)

    for is_shared in (True, False, True):
        for ours, plain in zip(packed(layers, model, inputs, is_shared), model(inputs, is_shared), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_a_layer_called_twice_in_a_step_has_no_sibling():
    """Its second call would be answered with what its first one made."""
    left, right = nn.Linear(4, 4), nn.Linear(4, 4)
    inputs = torch.zeros(1, 4)

    assert _families([(left, inputs), (right, inputs), (left, inputs)]) == [[right]]


def test_packed_weights_are_those_of_the_last_forget():
    """They are copies: a change of the weights shows once they are forgotten."""
    model = Siblings()
    layers = PackedLinears(model)
    inputs = torch.randn(3, 256)
    packed(layers, model, inputs)
    before, _ = packed(layers, model, inputs)
    with torch.no_grad():
        model.left.weight.add_(1.0)

    stale, _ = packed(layers, model, inputs)
    layers.invalidate()
    fresh, _ = packed(layers, model, inputs)

    torch.testing.assert_close(stale, before, rtol=0, atol=0)
    torch.testing.assert_close(fresh, model.left(inputs).detach(), rtol=1e-5, atol=1e-5)
    assert float((fresh - stale).abs().max()) > 1.0


def test_outside_of_the_block_nothing_is_changed():
    """Training sees the module's own forward, also after an error."""
    model = Siblings()
    layers = PackedLinears(model)
    for _ in range(2):
        packed(layers, model, torch.randn(2, 256))
        assert all("forward" not in vars(layer) for layer in (model.left, model.right))

    with pytest.raises(RuntimeError, match="primitive"):
        packed(layers, model, torch.randn(2, 255))
    assert all("forward" not in vars(layer) for layer in (model.left, model.right))

    model.left(torch.randn(2, 256)).sum().backward()

    assert model.left.bias.grad.tolist() == pytest.approx([2.0] * 256)


def test_many_rows_are_multiplied_as_ever():
    """A prefill is bound by arithmetic: bit-equal to the plain layer."""
    model = Siblings()
    layers = PackedLinears(model)
    inputs = torch.randn(300, 256)
    packed(layers, model, inputs)

    ours, _ = packed(layers, model, inputs)

    torch.testing.assert_close(ours, model.left(inputs).detach(), rtol=0, atol=0)
