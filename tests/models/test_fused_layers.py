"""What a GPU computes in one kernel gives a model's own numbers: compiled here for the CPU, to run anywhere."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from benchmarks.gpu.shapes import SHAPES, make
from torch import Tensor

from gnomon.models.fused_layers import fuse, fused, use_own_layers

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 5, 7, 11, 13], [17, 19, 23, 29, 31]])


def moved(dtype: torch.dtype) -> Any:
    """Return a model with adapters that are not zero."""
    model = make(SHAPES["small-lora"], CPU, dtype)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def numbers(model: Any) -> tuple[Tensor, Tensor]:
    """Return logits, and the gradients of what is trained."""
    logits = model(IDS).logits.float()
    logits.log_softmax(-1)[..., 7].sum().backward()
    return logits.detach(), torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def relative(one: Tensor, other: Tensor) -> float:
    """Return the difference's share of the length."""
    return float((one - other).norm() / one.norm())


@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
@pytest.mark.slow  # compiles for half a minute
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gemma3_text", "olmo2", "phi3", "granite", "lora"])
def test_fused_parts_give_the_models_own_numbers(kind: str) -> None:
    """Values and gradients are the model's own to 1e-5 in float32, for rows and positions of any number."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if kind == "lora":
        model = moved(torch.float32)
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        others = {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "pad_token_id": 2}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **others)).eval()
    plain = deepcopy(model)
    fuse(model)
    assert [module for module in model.modules() if "forward" in vars(module)], "nothing was fused"
    for own, found in zip(numbers(plain), numbers(model), strict=True):
        assert relative(own, found) < 1e-5
    with torch.no_grad():
        for ids in (IDS[:1, :1], IDS[:1], IDS[:, :1]):
            assert relative(plain(ids).logits, deepcopy(model)(ids).logits) < 1e-5


def test_adapters_in_the_precision_of_what_they_multiply() -> None:
    """In bf16 the adapters' way is as near to float32 as peft's, and their gradients stay float32."""
    exact, plain = moved(torch.float32), moved(torch.bfloat16)
    model = deepcopy(plain)
    for name, module in model.named_modules():
        if type(module).__module__.startswith("peft") and name.endswith("_proj"):
            fuse(module)
    (wanted, slope), (own, own_slope), (found, found_slope) = map(numbers, (exact, plain, model))
    assert not torch.equal(own, found), "adapters are as peft computes them"
    # bfloat16 through two layers is 0.01 from float32 whatever the adapters are multiplied in.
    assert relative(wanted, found) < 1.5 * relative(wanted, own)
    assert relative(slope, found_slope) < 3 * relative(slope, own_slope)
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert {p.grad.dtype for p in adapters if p.grad is not None} == {torch.float32}


def test_nothing_changes_on_a_cpu() -> None:
    """A CPU has its own kernels."""
    model = moved(torch.float32)
    use_own_layers(model)
    assert not [module for module in model.modules() if "forward" in vars(module)]
    assert fused(numbers, CPU) is numbers


class GatedRMSNorm(torch.nn.Module):
    """A norm that is told a gate too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return something of both."""
        return hidden if gate is None else hidden * gate


def test_a_part_that_takes_more_than_hidden_states_stays() -> None:
    """A norm with a gate would lose it."""
    norm = GatedRMSNorm()
    fuse(norm)
    assert "forward" not in vars(norm)
