"""A model is given every argument by its own name for it, or is not given it and that is said."""

import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tests.models.architectures import SHAPE, llama, mistral, qwen2, qwen3

import gnomon
from gnomon.core.errors import ModelError
from gnomon.models import slow
from gnomon.models.cuda_graph_decoder import fastest_decoder
from gnomon.models.decoder import AlignedDecoder, Decoder, RecomputeDecoder, SameLengthDecoder
from gnomon.models.forward import CACHE_NAMES, Forward, accepted, cache_name, checked_arguments
from gnomon.models.size import model_size
from gnomon.models.slow import kernel_packages, slow_parts


def phi3() -> Any:
    """Queries, keys and values in one product."""
    return hf.Phi3ForCausalLM(hf.Phi3Config(**SHAPE))


def gpt2() -> Any:
    """Learned positions."""
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64))


def bloom() -> Any:
    """No positions as an argument: they come from the mask."""
    return hf.BloomForCausalLM(hf.BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4))


def olmo2() -> Any:
    """Norms behind the layers."""
    return hf.Olmo2ForCausalLM(hf.Olmo2Config(**SHAPE))


def gemma2() -> Any:
    """Windows and capped logits."""
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**SHAPE, head_dim=8))


def mixtral() -> Any:
    """Experts."""
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SHAPE, num_local_experts=4))


def mamba() -> Any:
    """A state in the place of keys and values."""
    return hf.MambaForCausalLM(hf.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=8))


MADE = [llama, mistral, qwen2, qwen3, phi3, gpt2, bloom, olmo2, gemma2, mixtral]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [*MADE, mamba])
def test_the_cache_goes_by_the_models_own_name(make: Any):
    """Whatever the installed transformers calls it, the model names it, and a pass with it gives it back, grown."""
    model = make().eval()
    forward = Forward(model)
    assert forward.cache_name in accepted(model)

    with torch.no_grad():
        first = forward.cache_of(forward(torch.tensor([[5, 6, 7]]), use_cache=True))
        after = forward(torch.tensor([[8]]), cache=first, use_cache=True).logits[:, -1]
        alone = forward(torch.tensor([[5, 6, 7, 8]]), use_cache=False).logits[:, -1]

    torch.testing.assert_close(after, alone, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", MADE)
def test_no_version_makes_a_decoder_compute_everything_again(make: Any):
    """Attention is decoded from a cache of ours, in every version of transformers that is supported."""
    decoder: Decoder = fastest_decoder(make().eval())

    assert isinstance(decoder, AlignedDecoder)


class Renamed(hf.LlamaForCausalLM):
    """A model of a version to come: its cache has a name that nobody here knows, and it swallows any other."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, memory=None, use_cache=None, **more):
        """Compute without what is not known."""
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache)


def test_a_cache_that_would_be_swallowed_is_an_error():
    """The model is not called; a decoder that needs it is not chosen."""
    model = Renamed(hf.LlamaConfig(**SHAPE)).eval()
    forward = Forward(model)

    with pytest.raises(ModelError, match="takes no argument 'cache', so it would be lost"):
        forward(torch.tensor([[5]]), cache=object())
    assert forward.calls == 0
    with pytest.warns(RuntimeWarning, match="every token is drawn by a whole forward pass: 164 times"):
        assert isinstance(fastest_decoder(model), RecomputeDecoder)
    assert "takes no cache, so every token" in next(slow_parts(model, 100, 256))


def test_every_fall_is_said_in_one_place():
    """No other module of models, engines and the learner warns; each sentence has a factor, and listeners hear it."""
    package = Path(gnomon.__file__).parent
    files = [file for room in ("models", "engines", "learner") for file in (package / room).rglob("*.py")]
    warning = [file.name for file in files if "warnings.warn(" in file.read_text()]

    assert warning == ["slow.py"]
    told: list[str] = []
    for way in slow._SLOW:
        said = partial(slow.warn_slow, way, "Tried", device="cpu", why="", variable="NAME")
        factor = pytest.warns(RuntimeWarning, match=r"Tried.*(\d times as|[Ss]lower.*not measured)")
        with slow.notify_slow(told.append), factor:
            said()
        with pytest.warns(RuntimeWarning, match=re.escape(told[-1])):
            said()
    assert len(told) == len(slow._SLOW)


@pytest.mark.parametrize(
    ("family", "packages"),
    [
        ("Mamba", {"causal_conv1d", "mamba_ssm"}), ("FalconH1", {"causal_conv1d", "mamba_ssm"}),
        ("Bamba", {"causal_conv1d", "mamba_ssm"}), ("Jamba", {"causal_conv1d", "mamba_ssm"}),
        ("Zamba2", {"causal_conv1d", "mamba_ssm"}), ("NemotronH", {"causal_conv1d", "mamba_ssm"}),
        ("Qwen3Next", {"causal_conv1d", "fla"}), ("RecurrentGemma", set()), ("GraniteMoeShared", set()),
        ("Llama", set()),
    ],
)  # fmt: skip
def test_kernels_are_those_that_the_layers_of_a_model_ask_for(family: str, packages: set[str]):
    """By the model's own code in transformers, whatever its type is called; none where no layer has a kernel."""
    with torch.device("meta"):
        model = getattr(hf, f"{family}ForCausalLM")(getattr(hf, f"{family}Config")())

    assert kernel_packages(model) == packages
    said = [said for said in slow_parts(model, 100, 256) if "plain PyTorch code" in said]
    assert all(any(name in line for line in said) for name in packages if find_spec(name) is None)
    assert packages or not said
    again = [said for said in slow_parts(model, 100, 256, turns=8) if "computes its conversation again: 4.5" in said]
    # RecurrentGemma looks like attention in older transformers, and is found by a trial there.
    assert bool(again) == bool(packages) or family == "RecurrentGemma"


def test_a_model_without_attention_has_a_size(tmp_path: Path):
    """A state-space config counts no heads, and no keys are kept: plan says what the others are told."""
    model = hf.MambaForCausalLM(hf.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=8))
    model.save_pretrained(tmp_path)

    found = model_size(str(tmp_path))

    assert (found.cache_bytes_per_token, found.layers, found.width) == (0, 2, 32)


class Deaf(hf.LlamaForCausalLM):
    """It names a cache and never looks at it."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, use_cache=None, **more):
        """Compute the new tokens alone."""
        return super().forward(input_ids, position_ids=position_ids, use_cache=False)


def test_a_cache_that_does_not_grow_is_an_error():
    """After the first step something must be in it."""
    model = Deaf(hf.LlamaConfig(**SHAPE)).eval()
    decoder = AlignedDecoder(model)
    decoder.admit([(5,)], 8, frozenset())

    with torch.no_grad(), pytest.raises(ModelError, match="left nothing in the cache"):
        decoder.step([5], 8)
    wave = SameLengthDecoder(model)
    wave.admit([(5,)], 8, frozenset())
    with torch.no_grad(), pytest.raises(ModelError, match="gives back no cache"):
        wave.step([5], 8)


@pytest.mark.parametrize(
    "lost", ["attention_mask", "position_ids", "cache_position", "seq_idx", "cu_seq_lens_q", "branches", "labels"]
)
def test_an_argument_that_a_model_does_not_take_is_named(lost: str):
    """Whatever changes what a model computes; what only spares work is left out."""
    network = torch.nn.Linear(2, 2)

    with pytest.raises(ModelError, match=f"Linear.forward of transformers .* takes no argument '{lost}'"):
        checked_arguments(network, accepted(network), {lost: 1})
    assert checked_arguments(network, accepted(network), {"use_cache": False, "logits_to_keep": 1}) == {}


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_every_name_of_a_cache_is_known(name: str):
    """Of 5.16 to 5.23, of state space models, and of 5.24."""
    assert cache_name(frozenset({"input_ids", name, "use_cache"})) == name
