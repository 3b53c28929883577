"""Decoding without the model's own code: the same numbers, for exactly the models that it was written for."""

import functools
import random

import pytest
import torch
import transformers as hf
from tests.models.architectures import SHAPE, llama, mistral, qwen2, qwen3

from gnomon.models.adapter_config import LoraConfig
from gnomon.models.cpu.fused_decoder import FusedDecoder, GroupedKVCache
from gnomon.models.cuda_graph_decoder import fastest_decoder
from gnomon.models.decoder import AlignedDecoder, RecomputeDecoder, choose_decoder
from gnomon.models.llama_like import is_standard_head
from gnomon.models.lora import adapt
from gnomon.models.tiny import TinyConfig, tiny_model

pytestmark = pytest.mark.usefixtures("way")

FIRST = [(3, 1, 4, 1, 5), (3, 1, 4, 1, 5), (9,), (9, 2, 6)]
LATER = [(5, 3, 5, 8, 9, 7, 9, 3, 2, 3), (9, 2, 6), (9, 2, 6)]


def packed():
    """Layers large enough to be packed; one key and value head; embeddings are tied; another activation."""
    shape = {**SHAPE, "hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 1, "initializer_range": 0.05}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**shape, tie_word_embeddings=True, hidden_act="gelu"))


def scaled():
    """Rotary frequencies that are stretched."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, rope_parameters=rope))


def mistral_with_window():
    """It sees four positions."""
    return hf.MistralForCausalLM(hf.MistralConfig(**SHAPE, sliding_window=4))


def gemma():
    """Another norm, and scaled embeddings."""
    return hf.GemmaForCausalLM(hf.GemmaConfig(**SHAPE, head_dim=8))


def gpt2():
    """Another architecture."""
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4))


def mixture():
    """Experts."""
    return tiny_model(0, TinyConfig(architecture="qwen3_moe"))


def adapted():
    """Linear layers with adapters."""
    return adapt(tiny_model(0), LoraConfig(rank=2))


def hooked():
    """Somebody looks at what a layer gives, and may change it."""
    model = tiny_model(0)
    model.model.layers[1].mlp.register_forward_hook(lambda module, given, made: 2 * made)
    return model


class Doubled(hf.LlamaForCausalLM):
    """A Llama that does something more."""

    def forward(self, *given, **named):
        """Double the logits."""
        output = super().forward(*given, **named)
        output.logits = 2 * output.logits
        return output


def doubled():
    """A class of somebody's own."""
    return Doubled(hf.LlamaConfig(**SHAPE))


STANDARD = [llama, packed, scaled, mistral, qwen2, qwen3]
OTHERS = [mistral_with_window, gemma, gpt2, mixture, adapted, hooked, doubled]


def build(make):
    """Return the model with seeded weights, norms and biases included."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def script(decoder, change=lambda: None):
    """Return the logits of steps between which rows join, leave and are changed under."""
    found = []

    def steps(count, rows):
        for turn in range(count):
            found.append(decoder.step([(7 * turn + 3 * row + 1) % 96 for row in range(rows)], 90).clone())

    decoder.admit(FIRST, 90, frozenset(LATER))
    steps(3, 4)
    change()
    decoder.invalidate()
    decoder.leave(1)
    decoder.admit(LATER, 90, frozenset())
    steps(2, 6)
    decoder.admit([(8, 8)] * 12, 90, frozenset())  # more rows than one multiple of 16
    steps(80, 18)
    for slot in (17, 0, 3, 3):
        decoder.leave(slot)
    steps(2, 14)
    for _ in range(14):
        decoder.leave(0)
    decoder.release()
    decoder.admit(FIRST, 90, frozenset())
    steps(2, 4)
    return found


@functools.cache
def plain(make, dtype):
    """Return the logits of a plain forward pass in float32 with weights of a precision."""
    return script(RecomputeDecoder(build(make).to(dtype).float()))


@torch.no_grad()
@pytest.mark.parametrize("make", STANDARD, ids=lambda f: f.__name__)
def test_logits_are_those_of_a_plain_forward_pass(make):
    """Rows that join, leave and share prompts, buffers that grow and are given back: within 1e-5, in fp32."""
    ours = script(FusedDecoder(build(make)))

    for each, wanted in zip(ours, plain(make, torch.float32), strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("make", STANDARD, ids=lambda f: f.__name__)
def test_in_half_precision_it_is_as_near_as_the_models_own_code(make):
    """Against float32 with the same weights, the error is at most 1.1 times that of the model with a cache."""
    model = build(make).bfloat16()
    ours, theirs = script(FusedDecoder(model)), script(AlignedDecoder(model))
    exact = plain(make, torch.bfloat16)

    def error(found):
        return sum(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))

    assert error(ours) < 1.1 * error(theirs)


@torch.no_grad()
@pytest.mark.parametrize("make", STANDARD, ids=lambda f: f.__name__)
def test_it_decodes_the_models_that_it_knows(make):
    """Biases, norms, tied heads and stretched positions are found on the model itself."""
    assert type(fastest_decoder(build(make))) is FusedDecoder


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:no cache gave the answers")
@pytest.mark.parametrize("make", OTHERS, ids=lambda f: f.__name__)
def test_any_other_model_is_decoded_by_its_own_code(make):
    """Whatever is not accounted for makes it another model, and the next decoder is asked."""
    model = build(make)

    assert not is_standard_head(model)
    assert not isinstance(fastest_decoder(model), FusedDecoder)


@torch.no_grad()
def test_a_model_that_only_looks_right_is_found_by_trying():
    """A layer that doubles what it makes: the script by which decoders are chosen sees it."""
    model = build(hooked)

    assert isinstance(choose_decoder(model, [FusedDecoder]), AlignedDecoder)


@torch.no_grad()
def test_new_weights_are_seen_after_forget():
    """Changed in place between two steps: rows go on with what they have, by the weights of now."""
    ours, plain = build(packed), build(packed)

    def doubling(model):
        return lambda: [p.mul_(1.5) for p in model.model.layers[1].mlp.parameters()]

    found = script(FusedDecoder(ours), doubling(ours))
    unchanged = script(FusedDecoder(build(packed)))
    own_code = script(AlignedDecoder(plain), doubling(plain))

    for each, wanted in zip(found, own_code, strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    assert float((found[-1] - unchanged[-1]).abs().max()) > 0.01


@torch.no_grad()
def test_equal_calls_give_equal_bits():
    """Rows that are only there for rounding, and what others left in the buffers, reach nobody."""
    decoder = FusedDecoder(build(packed).bfloat16())
    decoder.admit([(1, 2, 3)] * 40, 90, frozenset())
    for turn in range(70):
        decoder.step([turn] * 40, 90)
    for _ in range(40):
        decoder.leave(0)

    used, new = script(decoder), script(FusedDecoder(build(packed).bfloat16()))

    assert all(torch.equal(a, b) for a, b in zip(used, new, strict=True))


@torch.no_grad()
def test_a_prompt_is_computed_once_and_every_step_counts():
    """Eight rows of one prompt, then four more while it is kept: one pass for the prompt, one for each step."""
    decoder = FusedDecoder(build(qwen3))
    decoder.admit([(1, 2, 3)] * 8, 9, {(1, 2, 3)})
    decoder.step([1] * 8, 9)
    decoder.admit([(1, 2, 3)] * 4, 9, frozenset())
    decoder.step([1] * 12, 9)

    assert decoder.passes == 3


@torch.no_grad()
def test_nothing_is_kept_at_rest():
    """Copies of the weights and the cache are given back when nobody waits."""
    decoder = FusedDecoder(build(packed))
    decoder.admit([(1, 2, 3)], 9, frozenset())
    decoder.step([1], 9)
    decoder.leave(0)

    decoder.release()

    assert decoder._network is None
    assert all(layer.keys is None and layer.values is None for layer in decoder._grouped.layers)


def crowd(decoder, groups, seed):
    """Return the logits of steps in which answers end one by one, in an order of its own, and a group comes late."""
    ends = random.Random(seed)
    found, alive = [], 0
    for turn in range(48):
        if turn in (0, 30):
            decoder.admit(groups, 90, frozenset())
            alive += len(groups)
        found.append(decoder.step([(7 * turn + 3 * row + 1) % 96 for row in range(alive)], 90).clone())
        for _ in range(min(alive - 1, ends.randrange(4))):
            decoder.leave(ends.randrange(alive))
            alive -= 1
    return found


@torch.no_grad()
@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_stay_are_put_together(seed, count, monkeypatch, way):
    """Blocks become fewer, narrower and wider again as answers end and come; the numbers stay."""
    widths = []
    regroup = GroupedKVCache._regroup

    def watched(cache, families, width):
        regroup(cache, families, width)
        widths.append((width, len(cache._blocks)))

    monkeypatch.setattr(GroupedKVCache, "_regroup", watched)
    model = build(llama)
    groups = [tuple(range(first, first + 40)) for first in range(count) for _ in range(8)] + [(5, 6)] * 3
    ours, plain = crowd(FusedDecoder(model), groups, seed), crowd(RecomputeDecoder(model), groups, seed)

    for each, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))

    # Attention that reads a row's own columns alone gains nothing by it.
    assert bool(widths) == (way == "torch")
