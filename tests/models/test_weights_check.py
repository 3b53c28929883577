import json
import logging
import shutil
from contextlib import nullcontext
from logging.handlers import BufferingHandler

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from gnomon.core.errors import ModelError
from gnomon.models.load import check_weights, load_model
from gnomon.models.tiny import TinyConfig, save_tiny

QUERY = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
FREQUENCIES = "self_attn.rotary_emb.inv_freq"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A tiny model as a Hugging Face folder."""
    return save_tiny(tmp_path_factory.mktemp("models") / "whole", seed=1)


@pytest.fixture
def rewritten(whole, tmp_path):
    """Write the model with its tensors changed by a function, and its config by values."""

    def write(change=lambda tensors: tensors, **config):
        folder = tmp_path / "changed"
        shutil.copytree(whole, folder)
        tensors = change(load_file(whole / "model.safetensors"))
        save_file({n: t.clone() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
        stated = json.loads((whole / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(stated | config))
        return str(folder)

    return write


def frequencies(theta, kind, size=16):
    """Return a layer's rotary frequencies as they are written."""
    return (theta ** (-torch.arange(0, size, 2) / size)).to(kind)


def named(rule):
    """Rename every tensor."""
    return lambda tensors: {rule(name): tensor for name, tensor in tensors.items()}


def put(**changes):
    """Replace the query weight of the first layer, by a function of it, or add tensors."""
    return lambda tensors: tensors | {QUERY: changes["query"](tensors[QUERY])}


def test_every_tensor_that_lacks_is_named(whole, tmp_path):
    """Each weight in turn is left out: refused by its name; a tied head is in no file and lacks nobody."""
    tensors = load_file(whole / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert check_weights(str(whole)) == ()
    shutil.copytree(whole, tmp_path / "torn")
    for lost in tensors:
        kept = {name: tensor for name, tensor in tensors.items() if name != lost}
        save_file(kept, tmp_path / "torn" / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=rf"lacks .*{lost}.*begin at random"):
            check_weights(str(tmp_path / "torn"))


@pytest.mark.parametrize(
    ("change", "config", "said"),
    [
        (named(lambda n: f"base_model.model.{n}"), {}, r"'base_model.model.' in front: save the model inside"),
        (named(lambda n: f"_orig_mod.{n}"), {}, r"'_orig_mod.' in front"),
        (named(lambda n: n.replace("model.layers", "transformer.h")), {}, r"lacks 18 weights"),
        (named(lambda n: n.replace("q_proj.", "q_proj.base_layer.")), {}, r"lacks 2 weights.*merge_and_unload"),
        (lambda t: {}, {}, r"lacks 21 weights .* and 17 more"),
        (lambda t: t, {"tie_word_embeddings": False}, r"lacks 1 weight \(lm_head.weight\).*tie_word_embeddings = true"),
        (lambda t: t, {"rope_theta": 7.0}, r"rope_theta = 7.0 by itself, and transformers reads .*the same number"),
        (lambda t: t, {"num_hidden_layers": 3}, r"lacks 9 weights \(model.layers.2"),
        (lambda t: t, {"num_hidden_layers": 1}, r"holds 9 tensors \(model.layers.1.*no place"),
        (lambda t: t, {"num_hidden_layers": 0}, r"num_hidden_layers = 0, and the files hold 20 tensors"),
        (lambda t: t, {"num_hidden_layers": -4}, r"num_hidden_layers = -4"),
        (lambda t: t, {"num_hidden_layers": 10**6}, r"num_hidden_layers = 1000000, and the files hold 20"),
        (lambda t: t, {"hidden_size": 10**9}, r"does not fit its config.json: 20 weights"),
        (lambda t: t, {"vocab_size": 10**15}, r"embed_tokens.weight is \[259, 64\] in the files"),
        (lambda t: t, {"quantization_config": {"quant_method": "fp8"}}, r"is quantized .*quant_method = 'fp8'"),
        (put(query=lambda w: w[:32]), {}, r"q_proj.weight is \[32, 64\] in the files and \[64, 64\] there"),
        (put(query=lambda w: w.flatten()), {}, r"q_proj.weight is \[4096\] in the files"),
        (put(query=lambda w: w.to(torch.int8)), {}, r"holds 1 tensor \(.*q_proj.weight \(I8\)\)"),
        (put(query=lambda w: w.to(torch.float8_e4m3fn)), {}, r"F8_E4M3.*bf16, fp16 or fp32"),
        (lambda t: {n: w > 0 for n, w in t.items()}, {}, r"holds 20 tensors .*BOOL"),
        (lambda t: {n: (w > 0).to(torch.uint8) for n, w in t.items()}, {}, r"holds 20 tensors .*U8"),
        (lambda t: {n: torch.zeros_like(w) for n, w in t.items()}, {}, r"nothing but zeros in 1 tensor"),
        (lambda t: t | {EMBEDDING: torch.zeros_like(t[EMBEDDING])}, {}, r"nothing but zeros in .*embed_tokens"),
        (
            lambda t: {n: torch.zeros_like(w) if "layers.1" in n else w for n, w in t.items()},
            {},
            r"nothing but zeros in 7 tensors \(model.layers.1",
        ),
        (put(query=lambda w: w.clone().fill_(float("nan"))), {}, r"q_proj.weight holds NaN or an infinity"),
        (put(query=lambda w: w.clone().index_fill(0, torch.tensor(3), float("-inf"))), {}, r"holds NaN or an infinity"),
        (put(query=lambda w: w * 1e30), {}, r"q_proj.weight holds numbers up to \d\.?\d*e\+\d\d, as no trained model"),
        (put(query=lambda w: w.clone().index_fill(0, torch.tensor(3), -1e7)), {}, r"q_proj.weight holds numbers up to"),
        (lambda t: t | {"lm_head.weight": t[EMBEDDING] + 1}, {}, r"ties lm_head.weight to model.embed_tokens.weight"),
        (
            lambda t: t | {"lm_head.weight": t[EMBEDDING].clone().index_fill(0, torch.tensor(7), 3.0)},
            {},
            r"two different ones; set tie_word_embeddings = false",
        ),
        (lambda t: t | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, {}, r"q_proj.bias\) for which its"),
        (lambda t: t | {"model.layers.0.q_proj.lora_A.weight": torch.zeros(4, 64)}, {}, r"merge the adapter"),
    ],
)  # fmt: skip
def test_weights_that_are_not_what_the_config_asks_for_are_refused(rewritten, change, config, said):
    """Renamed, wrapped, reshaped, quantized, empty, of other sizes: one message, the same for plan and for loading."""
    folder = rewritten(change, **config)
    with pytest.raises(ModelError, match=said) as refused:
        check_weights(folder)
    assert len(str(refused.value).splitlines()) == 1
    with pytest.raises(ModelError, match=said):
        load_model(folder, torch.float32)


@pytest.mark.parametrize(
    ("change", "config"),
    [
        (lambda t: t | {"lm_head.weight": t[EMBEDDING]}, {}),
        (named(lambda n: n.replace(EMBEDDING, "lm_head.weight")), {}),
        (lambda t: t | {"lm_head.weight": t[EMBEDDING] * 2}, {"tie_word_embeddings": False}),
        (lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, {}),
        (lambda t: {n: w.to(torch.float64) for n, w in t.items()}, {}),
        (put(query=torch.zeros_like), {}),
    ],
    ids=["tied twice", "tied by the head", "untied", "rotary table", "float64", "one matrix of zeros"],
)
def test_what_is_the_same_model_in_other_files_is_loaded(rewritten, change, config):
    """A tied head under either name or both, tables that follow from the config, other floats: nothing is said."""
    folder = rewritten(change, **config)
    assert check_weights(folder) == ()
    load_model(folder, torch.float32)


@pytest.mark.parametrize("extra", ["mtp.layers.0.norm.weight", "v_head.summary.weight", "score.weight"])
def test_tensors_of_another_use_are_said(rewritten, extra):
    """Layers for several tokens at once and value heads are not trained here: one sentence, and the model is taken."""
    said = check_weights(rewritten(lambda t: t | {extra: torch.ones(1, 64)}))
    assert len(said) == 1
    assert extra in said[0]
    assert "in no checkpoint" in said[0]


def test_an_expert_that_lacks_is_named_as_it_is_in_the_files(tmp_path):
    """Experts are fused in memory; of one that is in no file the name there is said."""
    folder = save_tiny(tmp_path / "mixture", config=TinyConfig(architecture="qwen3_moe"))
    tensors = load_file(folder / "model.safetensors")
    lost = next(name for name in tensors if "experts.1.up_proj" in name)
    save_file({n: t for n, t in tensors.items() if n != lost}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"lacks 1 weight \({lost}\)"):
        check_weights(str(folder))


def test_pickled_weights_are_checked_too(whole, tmp_path):
    """pytorch_model.bin is read by its names and shapes."""
    folder = tmp_path / "pickled"
    shutil.copytree(whole, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert check_weights(str(folder)) == ()
    torch.save({n: t for n, t in tensors.items() if n != QUERY}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=rf"lacks 1 weight \({QUERY}\)"):
        check_weights(str(folder))


@pytest.mark.parametrize("wrapped", [lambda state: {"state_dict": state}, lambda state: {**state, "epoch": 3}])
def test_a_trainers_own_checkpoint_is_no_model(whole, tmp_path, wrapped):
    """A file of weights that holds other things says so, and how to save the model."""
    shutil.copytree(whole, tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").unlink()
    torch.save(wrapped(load_file(whole / "model.safetensors")), tmp_path / "other" / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"holds 1 thing \((state_dict|epoch)\) besides tensors.*save_pretrained"):
        check_weights(str(tmp_path / "other"))


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_in_which_nothing_is_seen_is_refused(rewritten, window):
    """Every gradient would be NaN; no window is null."""
    with pytest.raises(ModelError, match=f"says sliding_window = {window}, within which a token sees nothing"):
        check_weights(rewritten(sliding_window=window))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"rope_theta": 0.0}, "rope_theta = 0.0"), ({"rope_theta": -1}, "rope_theta = -1"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta = 0,"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor = -2.0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.0, "rope_theta": 1e4}}, "factor = 0.0"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 0}}, "factor = 0,"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}},
         "original_max_position_embeddings = 0"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "attention_factor": -1.0}},
         "attention_factor = -1.0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0.0, "high_freq_factor": 0.0,
                           "original_max_position_embeddings": 64}}, "(low|high)_freq_factor = 0.0"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0, 0.0], "long_factor": [1.0, 1.0]}},
         r"short_factor = \[1.0, 0.0\]"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": -5.0}}}, "rope_theta = -5.0"),
    ],
)  # fmt: skip
def test_positions_that_are_none_are_refused_by_their_setting(rewritten, table, said):
    """Not called a matter of precision, and not left to a division by zero of transformers."""
    with pytest.raises(ModelError, match=f"config.json says {said}.* must be above 0; give the config.json"):
        check_weights(rewritten(**table))


def test_a_pad_that_is_no_token_is_refused(rewritten):
    """transformers says that a padding index must be within, and not which setting it is."""
    with pytest.raises(ModelError, match=r"config.json says pad_token_id = 5000, and the model has the tokens 0 to"):
        check_weights(rewritten(pad_token_id=5000))


def in_shards(whole, folder, change=lambda first, second: None, index=None):
    """Write the model in two files with an index, after a change to what they hold."""
    shutil.copytree(whole, folder)
    (folder / "model.safetensors").unlink()
    tensors = load_file(whole / "model.safetensors")
    names, parts = sorted(tensors), ("one.safetensors", "two.safetensors")
    held = [{n: tensors[n] for n in names[:9]}, {n: tensors[n] for n in names[9:]}]
    listed = {name: part for part, inside in zip(parts, held, strict=True) for name in inside}
    change(*held)
    for part, inside in zip(parts, held, strict=True):
        save_file({n: t.clone() for n, t in inside.items()}, folder / part, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": listed} if index is None else index)
    )
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one, two: two.update({EMBEDDING: one[EMBEDDING] + 1}), "two different tensors model.embed_tokens"),
        (lambda one, two: two.update({EMBEDDING: one[EMBEDDING][:5]}), "two different tensors .* one.* and two"),
    ],
)
def test_a_tensor_that_two_files_hold_is_one_or_refused(whole, tmp_path, change, said):
    """transformers takes the last of two files' tensors without a word; differing ones are refused by name."""
    folder = in_shards(whole, tmp_path / "shards", change)
    with pytest.raises(ModelError, match=said):
        check_weights(str(folder))
    in_shards(whole, tmp_path / "alike", lambda one, two: two.update({EMBEDDING: one[EMBEDDING]}))
    assert check_weights(str(tmp_path / "alike")) == ()


@pytest.mark.parametrize("index", [{}, [], {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": 3}}])
def test_an_index_that_names_no_files_is_refused(whole, tmp_path, index):
    """An index without files made a model of random weights, which only its loading would have found."""
    folder = in_shards(whole, tmp_path / "shards", index=index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json' (names no file|cannot be read).*copy it"):
        check_weights(str(folder))


def test_weights_that_a_folder_holds_twice_are_refused(whole, tmp_path):
    """transformers reads the one file and vLLM the shards; an index of what was never fetched is nobody's."""
    folder = in_shards(whole, tmp_path / "shards")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "pytorch_model-1.bin"}}))
    assert check_weights(str(folder)) == ()
    shutil.copy(whole / "model.safetensors", folder)
    with pytest.raises(ModelError, match=r"holds weights twice.*remove"):
        check_weights(str(folder))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_frequencies_of_another_theta_are_refused(rewritten, kind):
    """A config that lost its rope_theta: the files remember it, and transformers passes their frequencies over."""
    with pytest.raises(ModelError, match=r"rotary_emb.inv_freq of rope_theta = .*its config.json gives 10000; write"):
        check_weights(
            rewritten(lambda t: t | {f"model.layers.{n}.{FREQUENCIES}": frequencies(1e6, kind) for n in (0, 1)})
        )


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_frequencies_of_the_config_are_passed_over(rewritten, kind):
    """Former versions of transformers wrote them beside the weights."""
    folder = rewritten(lambda t: t | {f"model.layers.{n}.{FREQUENCIES}": frequencies(1e4, kind) for n in (0, 1)})

    assert check_weights(folder) == ()


def test_an_adapter_beside_a_model_is_refused(whole, tmp_path):
    """transformers loads both, and the checkpoints of a run would hold neither's numbers."""
    folder = shutil.copytree(whole, tmp_path / "both")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"a model and a LoRA adapter.*merge_and_unload.*or remove the adapter's"):
        check_weights(str(folder))


def test_a_warning_of_rotary_positions_is_given_once():
    """transformers gives it whenever a config is read or copied: at each checkpoint."""
    logger = logging.getLogger("transformers.modeling_rope_utils")
    kept = BufferingHandler(10)
    logger.addHandler(kept)
    try:
        for _ in range(3):
            logger.warning("a factor of %s", "a test")
        logger.warning("a factor of another")
    finally:
        logger.removeHandler(kept)
    assert [r.getMessage() for r in kept.buffer] == ["a factor of a test", "a factor of another"]


@pytest.mark.parametrize("table", ["rope_parameters", "rope_scaling"])
def test_positions_that_are_read_as_other_numbers_are_refused(tmp_path, table):
    """Phi-3's original length that stands in its table alone is read as 4096: the model would be another one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    few = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 258}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("phi3", **sizes, **few)).save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
    stated |= {"rope_parameters": None, table: factors | {"original_max_position_embeddings": 24}}
    del stated["original_max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(stated))
    with pytest.raises(ModelError, match=rf"original_max_position_embeddings = 24 in {table}.*reads 4096; write"):
        check_weights(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(stated | {"original_max_position_embeddings": 24}))
    assert check_weights(str(tmp_path)) == ()


@pytest.mark.parametrize(
    ("tables", "is_taken"),
    [
        ({"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 4.0}}, False),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "yarn"}}, False),
        ({"rope_scaling": {"type": "mrope", "rope_type": "default"}}, True),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, True),
    ],
)
def test_positions_of_two_kinds_are_refused(rewritten, tables, is_taken):
    """transformers reads one of them, and whoever wrote the other has another model."""
    folder = rewritten(**{"rope_parameters": None, "rope_theta": 10000.0} | tables)
    with nullcontext() if is_taken else pytest.raises(ModelError, match=r"transformers reads rope_type = .* one rope"):
        check_weights(str(folder))


def zeroed(*ends):
    """Set the tensors whose names end so to zeros."""
    return lambda tensors: {n: t * 0 if n.endswith(ends) else t for n, t in tensors.items()}


@pytest.mark.parametrize(
    "ends",
    [("norm.weight",), ("model.norm.weight",), ("0.input_layernorm.weight", "0.post_attention_layernorm.weight")],
    ids=["all", "the last", "a layer's"],
)
def test_norms_of_zeros_are_refused(rewritten, ends):
    """Such a layer, or the whole model, gives zeros for every input."""
    with pytest.raises(ModelError, match=r"nothing but zeros in .*norm\.weight.*copy it again"):
        load_model(rewritten(zeroed(*ends)), torch.float32)


@pytest.mark.parametrize("ends", [("0.input_layernorm.weight",), ("0.mlp.down_proj.weight",)])
def test_one_part_of_a_layer_may_be_zero(rewritten, ends):
    """A layer that was put in to do nothing at first has a norm or a matrix of zeros, and others."""
    assert load_model(rewritten(zeroed(*ends)), torch.float32)


def test_norms_that_are_added_to_one_may_be_zero(tmp_path):
    """Gemma's begin at zero, and do not make zeros."""
    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    config = hf.GemmaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    model = load_model(str(tmp_path), torch.float32)

    assert not model.model.norm.weight.any()


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", [QUERY, "model.norm.weight"])
def test_half_precision_that_overflowed_is_refused(rewritten, name, number):
    """One infinity in a file of fp16, in a matrix or a norm."""

    def change(tensors):
        half = {n: t.half() for n, t in tensors.items()}
        half[name].view(-1)[3] = number
        return half

    with pytest.raises(ModelError, match=rf"the weight {name} holds NaN or an infinity"):
        load_model(rewritten(change), torch.float32)


@pytest.mark.parametrize(
    "stated", [["Qwen2ForCausalLM"], ["MistralForCausalLM"], ["GPT2LMHeadModel"], ["Qwen3ForCausalLM", "LlamaModel"]]
)
def test_architectures_of_another_model_are_refused(rewritten, stated):
    """transformers goes by model_type and vLLM by architectures: two models of one folder."""
    with pytest.raises(ModelError, match=r"model_type 'llama', .* LlamaForCausalLM, and architectures .*vLLM loads"):
        check_weights(rewritten(architectures=stated))
