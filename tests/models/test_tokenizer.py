import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import LlamaConfig, PreTrainedTokenizerFast

from gnomon.errors import ConfigError
from gnomon.models.tiny import tiny_tokenizer
from gnomon.models.tokenizer import Tokenizer, wrap

CHAT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message here') }}{% endif %}"
    "<s>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def unigram() -> Tokenizer:
    """The hardest case: control strings are ordinary pieces of the vocabulary too, and text is normalized (NFKC)."""
    letters = sorted({*"abcdefgh<>/send| ▁", "sssss"})
    pieces = [("<unk>", 0.0), ("<s>", -0.1), ("</s>", -0.1), ("<end>", -0.1), *((c, -5.0) for c in letters)]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>", "<end>")])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=CHAT
    )
    return wrap(fast, LlamaConfig(vocab_size=64, max_position_embeddings=77), generation_eos=[40, 2])


TOKENIZERS = [tiny_tokenizer(), unigram()]
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "unigram"])
WIDE = "\uff1cs\uff1e"  # NFKC makes a control string of it
PARTS = st.sampled_from(["<|bos|>", "<|eos|>", "<s>", "</s>", "<end>", WIDE, "<", "s", ">", "|", "e", " ", "é"])


@every_tokenizer
@given(st.lists(st.one_of(PARTS, st.text(max_size=4)), max_size=12))
@example(["<s>"])
@example(["a</s>b<|eos|>"])
@example([WIDE])
def test_plain_text_never_becomes_a_control_token(tokenizer, parts):
    """Whatever the text says, none of its ids is a control token (the unknown token stands for unknown text)."""
    text = "".join(parts)

    ids = tokenizer.encode_plain(text)

    forbidden = {i for string, i in tokenizer.control.items() if string != "<unk>" or "<unk>" in text}
    assert not forbidden & set(ids)


@given(st.text(max_size=40))
def test_bytes_come_back(text):
    """decode(encode_plain(text)) is the text, control strings in it included."""
    tokenizer = tiny_tokenizer()

    assert tokenizer.decode(tokenizer.encode_plain(text + "<|eos|>")) == text + "<|eos|>"


def test_control_strings_of_ours_become_control_tokens():
    """In text that we rendered, <|eos|> is id 257; decoding leaves it out."""
    tokenizer = tiny_tokenizer()

    assert tokenizer.encode("a<|eos|>b") == [97, 257, 98]
    assert tokenizer.decode([97, 257, 98]) == "ab"
    assert tokenizer.control_strings == ("<|bos|>", "<|eos|>", "<|pad|>")


def test_nothing_is_added_in_front():
    """encode adds no beginning-of-text token: whoever renders the prompt decides."""
    assert tiny_tokenizer().encode("a") == [97]
    assert unigram().encode("<s>")[0] == unigram().bos


def test_stop_ids_come_from_tokenizer_generation_config_and_template():
    """</s> is the tokenizer's end (2), 40 the generation config's, <end> (3) what the template writes after a turn."""
    assert unigram().stop_ids == (2, 3, 40)
    assert tiny_tokenizer().stop_ids == (257,)


def test_context_length_is_the_models():
    """The config's positions count, not what the tokenizer says."""
    assert unigram().context_length == 77
    assert tiny_tokenizer().context_length == 1024


def test_a_template_renders_up_to_the_answer():
    """Messages become text that ends where the model begins; without a template there is None."""
    assert unigram().template([{"role": "user", "content": "x"}]) == "<s>user\nx<end>\n<s>assistant\n"
    assert tiny_tokenizer().template([{"role": "user", "content": "x"}]) is None


def test_a_template_that_refuses_says_why():
    """The template's own words and the roles it was given are in the error."""
    with pytest.raises(ConfigError, match=r"refuses messages with roles \['system'\].*no system message"):
        unigram().template([{"role": "system", "content": "x"}])
