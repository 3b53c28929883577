"""A model as GGUF, read back by transformers: the same logits, the same tokens, or a refusal that says what to use."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import gnomon
from gnomon.cli.main import main
from gnomon.core.errors import ModelError
from gnomon.models.gguf import _PATTERNS, GgufModel
from gnomon.models.tiny import save_tiny

TEXTS = ("What is 12 + 345?", "It's a naïve test;\n\n  so\tit goes 2026.", "<|user|>déjà vu<|end|>")
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
SHAPE = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=128, tie_word_embeddings=True)),
}


def splitting(kind: str) -> Any:
    """Return how texts are split, as published tokenizers of that kind do it."""
    if kind == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "smollm":
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    split: Any = pre_tokenizers.Split(Regex(_PATTERNS[kind]), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def made(folder: Path, name: str, kind: str) -> Path:
    """Save a model with random weights, and a tokenizer of byte pairs that was trained on a few sentences."""
    own = Tokenizer(models.BPE())
    own.pre_tokenizer, own.decoder = splitting(kind), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=["<|user|>", "<|end|>"], initial_alphabet=alphabet)
    own.train_from_iterator(TEXTS * 4, trainer)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<|end|>", bos_token="<|user|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    model.save_pretrained(folder)
    return folder


def read_back(file: Path) -> tuple[Any, Any]:
    """Return model and tokenizer as transformers reads them of a GGUF file."""
    model: Any = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_model(name: str, tmp_path: Path):
    """Rotary order, biases, norms of queries and keys, tied embeddings: each weight stands where a reader looks."""
    source = made(tmp_path / "model", name, "gpt-2")
    GgufModel.of(source).write(tmp_path / "m.gguf", "f32")
    there, _ = read_back(tmp_path / "m.gguf")
    here: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokens = torch.arange(60).reshape(2, 30)

    with torch.no_grad():
        expected, found = here(tokens).logits, there(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_the_vocabulary_is_that_of_the_model(kind: str, tmp_path: Path):
    """Every token stands at its number, with its kind; merges, ends, template and way of splitting are there."""
    gguf = pytest.importorskip("gguf")
    source = made(tmp_path / "model", "llama", kind)
    GgufModel.of(source).write(tmp_path / "m.gguf", "f32")
    fields = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    own: Any = AutoTokenizer.from_pretrained(source)
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = json.loads((source / "tokenizer.json").read_text())["model"]["merges"]

    assert tokens[: len(own)] == own.convert_ids_to_tokens(range(len(own)))
    assert tokens[len(own) :] == [f"[PAD{n}]" for n in range(len(own), 400)]
    assert [kinds[n] for n in (0, 1, 2, 399)] == [3, 3, 1, 5]
    assert fields["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]
    assert fields["tokenizer.ggml.pre"] == kind
    assert (fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]) == (0, 1)
    assert fields["tokenizer.chat_template"] == TEMPLATE
    assert fields["tokenizer.ggml.add_bos_token"] is False


def test_a_token_before_each_text_is_said(tmp_path: Path):
    """A tokenizer that begins each text with a token is written as one that does."""
    gguf = pytest.importorskip("gguf")
    source = made(tmp_path / "model", "llama", "llama-bpe")
    vocabulary = json.loads((source / "tokenizer.json").read_text())
    parts = [{"SpecialToken": {"id": "<|user|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": parts, "pair": [], "special_tokens": {}}
    processor = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template]}
    (source / "tokenizer.json").write_text(json.dumps(vocabulary | {"post_processor": processor}))
    GgufModel.of(source).write(tmp_path / "m.gguf", "f32")

    assert gguf.GGUFReader(tmp_path / "m.gguf").fields["tokenizer.ggml.add_bos_token"].contents() is True


def test_a_reader_tokenizes_as_the_model_does(tmp_path: Path):
    """Texts with digits, accents, blanks and control tokens have the same numbers."""
    source = made(tmp_path / "model", "llama", "gpt-2")
    GgufModel.of(source).write(tmp_path / "m.gguf", "f32")
    (_, there), own = read_back(tmp_path / "m.gguf"), AutoTokenizer.from_pretrained(source)

    assert [there(text)["input_ids"] for text in TEXTS] == [own(text)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize(("precision", "near"), [("bf16", 0.05), ("f16", 0.01), ("q8_0", 0.1)])
def test_fewer_bits_are_near(precision: str, near: float, tmp_path: Path):
    """Matrices in 16 or 8 bits give logits near those of the model, in a file that is smaller by as much."""
    source = made(tmp_path / "model", "qwen3", "qwen2")
    for name in ("f32", precision):
        GgufModel.of(source).write(tmp_path / f"{name}.gguf", name)
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        exact, rough = (read_back(tmp_path / f"{n}.gguf")[0](tokens).logits for n in ("f32", precision))

    assert 0 < (exact - rough).abs().mean() < near * exact.std()
    assert (tmp_path / f"{precision}.gguf").stat().st_size < 0.7 * (tmp_path / "f32.gguf").stat().st_size


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("config.json", {"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM is not among LlamaForCausalLM"),
        ("config.json", {"rope_parameters": {"rope_type": "yarn"}}, "with rope_type 'yarn' is not written as GGUF"),
        ("config.json", {"hidden_act": "gelu"}, "with hidden_act 'gelu' is not written as GGUF, only with 'silu'"),
        ("config.json", {"use_sliding_window": True, "sliding_window": 64}, "with sliding_window 64 is not written"),
        (
            "tokenizer.json",
            {"model": {"type": "Unigram"}},
            r"the tokenizer of LlamaForCausalLM \(Unigram\) splits texts",
        ),
        (
            "tokenizer.json",
            {"pre_tokenizer": {"type": "Whitespace"}},
            r"LlamaForCausalLM \(BPE\) splits texts in a way",
        ),
    ],
)
def test_another_form_is_refused_before_a_weight_is_read(file: str, change: dict[str, Any], said: str, tmp_path: Path):
    """The message names what differs, and llama.cpp's script, which knows it."""
    source = made(tmp_path / "model", "llama", "gpt-2")
    (source / "model.safetensors").write_bytes(b"no weights")
    (source / file).write_text(json.dumps(json.loads((source / file).read_text()) | change))

    with pytest.raises(ModelError, match=f"{said}.*convert_hf_to_gguf.py"):
        GgufModel.of(source)


def test_a_vocabulary_of_bytes_is_refused_with_what_reads_it(tmp_path: Path):
    """tiny and tiny-sums have no merges, which every reader of GGUF asks for."""
    with pytest.raises(ModelError, match=r"a token for each byte and no merges.*`gnomon export RUN FOLDER` writes is"):
        GgufModel.of(save_tiny(tmp_path))


def test_a_run_is_exported_as_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What a run has trained, by the command; a file that exists, a wrong precision and a folder are refused."""
    source = made(tmp_path / "model", "llama", "smollm")
    run = gnomon.train("tiny", tmp_path / "run", model=str(source), steps=1, rollouts_per_step=16)
    file = tmp_path / "m.gguf"
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), str(file), "--to", "gguf", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(file)}
    here: Any = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        torch.testing.assert_close(read_back(file)[0](tokens).logits, here(tokens).logits, rtol=1e-5, atol=1e-5)
    for arguments, said in (
        ([str(file), "--to", "gguf"], "m.gguf exists, or its folder does not; name a new file"),
        ([str(tmp_path / "n.gguf"), "--to", "gguf:q4"], "unknown precision 'q4'"),
        ([str(tmp_path / "none" / "n.gguf"), "--to", "gguf"], "or its folder does not"),
        ([str(tmp_path / ("x" * 300)), "--to", "gguf"], "cannot be written: File name too long; name another file"),
    ):
        assert main(["export", str(tmp_path / "run"), *arguments]) == 2
        assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.glob("*gguf*")) == ["m.gguf"]


def test_a_weight_without_a_place_leaves_no_file(tmp_path: Path):
    """A weight that the architecture does not have is named; what was written by then is not kept as a file."""
    source = made(tmp_path / "model", "llama", "gpt-2")
    save_file(
        {**load_file(source / "model.safetensors"), "model.extra.weight": torch.ones(2)}, source / "model.safetensors"
    )

    with pytest.raises(ModelError, match=r"the weight model.extra.weight has no place in GGUF's llama"):
        GgufModel.of(source).write(tmp_path / "m.gguf", "f32")
    assert not (tmp_path / "m.gguf").exists()
