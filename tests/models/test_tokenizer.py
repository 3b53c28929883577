import copy
import random
import resource
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import LlamaConfig, PreTrainedTokenizerFast

from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.sections import DATE
from gnomon.models.tiny import tiny_tokenizer
from gnomon.models.tokenizer import TokenBytes, Tokenizer, wrap
from gnomon.tasks.base import Further
from gnomon.tasks.chat import ChatRenderer

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
    """In text that we rendered, <|eos|> is id 257."""
    tokenizer = tiny_tokenizer()

    assert tokenizer.encode("a<|eos|>b") == [97, 257, 98]
    assert tokenizer.control_strings == ("<|bos|>", "<|eos|>", "<|pad|>")


def test_nothing_is_added_in_front():
    """encode adds no beginning-of-text token: whoever renders the prompt decides."""
    assert tiny_tokenizer().encode("a") == [97]
    assert unigram().encode("<s>")[0] == unigram().bos


def test_stop_ids_come_from_tokenizer_generation_config_and_template():
    """</s> is the tokenizer's end (2), 40 the generation config's, <end> (3) what the template writes after a turn."""
    assert unigram().stop_ids == (2, 3, 40)
    assert tiny_tokenizer().stop_ids == (257,)


def test_a_template_that_leaves_answers_out_says_no_end():
    """Of a template that writes the user's turns alone, the first token, <s> (1), ends no answer; </s> (2) does."""
    backend = copy.deepcopy(unigram().backend)
    backend.chat_template = "{% for m in messages if m.role == 'user' %}<s>{{ m.content }}<end>{% endfor %}"

    assert wrap(backend, LlamaConfig(vocab_size=len(backend))).stop_ids == (2,)


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


MARKS = ("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "[THINK]", "<|channel|>")
ANSWERS = {
    "<think>x</think>7</s>": "<think>x</think>7",
    "<think>x</think><answer>7</answer></s>": "<think>x</think><answer>7</answer>",
    '<tool_call>{"a": 1}</tool_call><end>': '<tool_call>{"a": 1}</tool_call>',
    "<|channel|>final</s>": "<|channel|>final",
    "[THINK]a": "[THINK]a",
    "</think>": "</think>",
    "<s>7</s>": "7",
    "<s><s>7": "7",
    "7</s></s>": "7",
    "7<end><pad></s>": "7",
    "<pad>7": "7",
    "a<pad>b</s>": "a<pad>b",
    "a</s>b</s>": "a</s>b",
    "</s>": "",
    "<pad>": "",
    "": "",
    " 7 \n</s>": " 7 \n",
}


def byte_level(*special: str, **settings: object) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with marks that are control tokens; settings are those of transformers."""
    backend = Backend(models.BPE(vocab={c: n for n, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


@pytest.mark.parametrize("said", ANSWERS)
def test_an_answer_keeps_its_marks(said):
    """Ends of turn and pads come off behind, beginnings and pads in front; every other control token is in the text."""
    backend = byte_level("<s>", "</s>", "<pad>", "<end>", *MARKS, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    end = backend.convert_tokens_to_ids("<end>")
    tokenizer = wrap(backend, LlamaConfig(vocab_size=512), generation_eos=[end])

    assert tokenizer.decode(tokenizer.encode(said)) == ANSWERS[said]


OWN = {
    "nothing, as GPT-2": (None, []),
    "one, as Llama": ("<s> $A", ["<s>"]),
    "two, as GLM": ("<gmask> <s> $A", ["<gmask>", "<s>"]),
    "an end, as T5": ("$A </s>", []),
    "both, as BERT": ("<s> $A </s>", ["<s>"]),
}


@pytest.mark.parametrize("way", OWN)
def test_a_prompt_begins_as_the_tokenizer_begins_texts(way):
    """None, one or two tokens in front, the tokenizer's own ids in all; an end is left off, for an answer follows."""
    form, begin = OWN[way]
    backend = byte_level("<s>", "</s>", "<gmask>", bos_token="<s>", eos_token="</s>")
    ids = {t: backend.convert_tokens_to_ids(t) for t in ("<s>", "</s>", "<gmask>")}
    if form is not None:
        named = [(t, i) for t, i in ids.items() if t in form]
        backend.backend_tokenizer.post_processor = processors.TemplateProcessing(single=form, special_tokens=named)
    tokenizer = wrap(backend, LlamaConfig(vocab_size=512))

    own = [i for i in backend("3+4=")["input_ids"] if i != ids["</s>"]]

    assert [*tokenizer.begin, *tokenizer.encode_plain("3+4=")] == own
    assert list(tokenizer.begin) == [ids[t] for t in begin]


ENDLESS = {
    "two loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop within a macro": "{% macro m() %}{% for i in range(99999) %}{{ i }}{% endfor %}{% endmacro %}"
    "{% for j in range(99999) %}{{ m() }}{% endfor %}",
    "loops over a message": "{% for a in range(999) %}{% for b in range(999) %}{% for c in messages[0].content %}"
    "{{ c }}{% endfor %}{% endfor %}{% endfor %}",
    "a power": "{{ 10 ** 10 ** 10 }}",
    "a wide number": "{{ 'x' * 10000000000 }}",
    "a wide format": "{{ 'x'|center(99999999999) }}",
    "a text that doubles": "{% set n = namespace(x=messages[0].content) %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "a list that doubles": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "a product of numbers": "{{ 'x' * 1000000 * 1000000 }}",
    "texts of many": "{% for i in range(90000) %}{{ 'x' * 1000000 }}{% endfor %}",
    "a long text": "{{ 'x' * 1000000 * 20 }}",
    "a filter that joins": "{{ (['x' * 1000000] * 100000) | join }}",
    "itself without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a wrong type": "{{ messages + 1 }}",
    "what is no template": "{% for %}",
    "an attribute of nothing": "{{ messages[0].nothing.more }}",
}


@pytest.mark.parametrize("fault", ENDLESS)
def test_a_template_ends_in_words(fault):
    """A template that loops, computes without bound, or fails as a program does, is a ConfigError."""
    backend = byte_level("</s>", eos_token="</s>")
    backend.chat_template = ENDLESS[fault]

    with pytest.raises(ConfigError, match=r"chat template (does not end|has|refuses|fails|writes)"):
        wrap(backend, LlamaConfig(vocab_size=512)).template([{"role": "user", "content": "hello"}])


def test_a_template_that_fills_the_memory_leaves_the_limits_as_they_were():
    """What the process may take afterwards is what it could before, and a long row is no long template."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    backend = byte_level("</s>", eos_token="</s>")
    backend.chat_template = ENDLESS["a text that doubles"]
    with pytest.raises(ConfigError, match=r"more than 10,000,000 characters, or fills 1 GiB of memory, for 1 messages"):
        wrap(backend, LlamaConfig(vocab_size=512)).template([{"role": "user", "content": "hello"}])
    backend.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    text = wrap(backend, LlamaConfig(vocab_size=512)).template([{"role": "user", "content": "x" * 11_000_000}])

    assert text is not None
    assert len(text) == 11_000_000
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_long_conversation_is_no_endless_template():
    """Five hundred turns are rendered, and the tracing of whoever debugs is as it was."""
    turns = [{"role": role, "content": "x"} for _ in range(250) for role in ("user", "assistant")]

    text = unigram().template(turns, begins_answer=False)

    assert text is not None
    assert text.count("<end>") == 500


CLOCKS = {
    "Llama 3.1": "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "Today Date: {{ date_string }}",
    "gpt-oss": "Current date: {{ strftime_now('%Y-%m-%d') }}",
    "a time of day": "{{ strftime_now('%H:%M:%S.%f on %A') }}",
}


@pytest.mark.parametrize(
    ("model", "date", "shown"),
    [
        ("Llama 3.1", DATE, "Today Date: 01 Jan 2025"),
        ("Llama 3.1", "2024-02-29", "Today Date: 29 Feb 2024"),
        ("gpt-oss", "2026-12-31", "Current date: 2026-12-31"),
        ("a time of day", "2026-11-26", "00:00:00.000000 on Thursday"),
    ],
)
def test_a_template_that_reads_the_clock_reads_a_fixed_day(model, date, shown):
    """Rows rendered today and tomorrow, by a run and by whoever resumes or evaluates it, are the same; it is said."""
    backend = byte_level("</s>", eos_token="</s>")
    backend.chat_template = CLOCKS[model] + "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = replace(wrap(backend, LlamaConfig(vocab_size=512)), date=date)

    assert tokenizer.template([{"role": "user", "content": "!"}]) == f"{shown}!"
    assert any(f"reads the clock: every prompt has the date {date}" in note for note in tokenizer.notes)


@pytest.mark.parametrize(
    "drawn",
    ["{{ range(99999) | random }}", "{{ lipsum(n=1) }}", "{{ [range(99), range(999)] | map('random') | list }}"],
)
def test_a_template_that_draws_draws_the_same_for_the_same_row(drawn):
    """Whatever was drawn before; another row has its own; Python's generator is left as it was."""
    backend = byte_level("</s>", eos_token="</s>")
    backend.chat_template = drawn + "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = wrap(backend, LlamaConfig(vocab_size=512))
    asked = [{"role": "user", "content": "a"}]

    random.seed(1)
    before, first = random.getstate(), tokenizer.template(asked)
    assert random.getstate() == before
    random.seed(2)
    assert tokenizer.template(asked) == first
    assert {tokenizer.template([{"role": "user", "content": text}])[:-1] for text in "bcdefgh"} != {first[:-1]}


def test_a_token_without_an_embedding_is_refused_where_it_is_used():
    """A tokenizer longer than its model is taken until a text has such a token, in plain and in rendered text."""
    backend = byte_level("</s>", "<extra>", eos_token="</s>")
    extra = backend.convert_tokens_to_ids("<extra>")
    tokenizer = wrap(backend, LlamaConfig(vocab_size=extra))

    assert tokenizer.encode("a</s>") == [*tokenizer.encode("a"), backend.eos_token_id]
    assert tokenizer.encode_plain("a<extra>")
    with pytest.raises(ConfigError, match=rf"gives '<extra>' the id {extra}, and the model has embeddings for 0 to"):
        tokenizer.encode("a<extra>")
    with pytest.raises(ConfigError, match=r"the model has embeddings for 0 to 9"):
        wrap(backend, LlamaConfig(vocab_size=10)).encode_plain("zebra")
    with pytest.raises(DatasetError, match=r"row 7: the tokenizer gives .* the model has embeddings"):
        ChatRenderer(wrap(backend, LlamaConfig(vocab_size=10)))("zebra", Further("row 7"))
    assert wrap(backend, LlamaConfig(vocab_size=backend.eos_token_id)).stop_ids == ()


@every_tokenizer
def test_an_id_without_a_token_is_seen(tokenizer):
    """A padded vocabulary has logits for ids that a tokenizer writes nothing for: U+FFFD stands in their place.

    An answer of such ids alone is not empty, and stop texts are looked for in the bytes of the same text.
    """
    seven, end = tokenizer.encode_plain("b"), max(tokenizer.backend.get_vocab().values())
    padded = replace(tokenizer, vocab_size=end + 60)
    beyond = [end + 1, end + 59]

    assert padded.decode([*seven, beyond[0], *seven, tokenizer.stop_ids[-1]]) == "b\ufffdb"
    assert padded.decode(beyond) == padded.spelled(beyond) == "\ufffd\ufffd"
    assert TokenBytes(padded)[end + 7].decode() == "\ufffd"
    assert padded.decode(range(end + 1)) == tokenizer.decode(range(end + 1))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_truncation_of_a_tokenizer_change_no_prompt(side):
    """Sides, and lengths that stand in tokenizer.json itself, are for batches of others."""
    backend = byte_level("</s>", eos_token="</s>", pad_token="</s>", padding_side=side, truncation_side=side)
    backend.backend_tokenizer.enable_truncation(max_length=4)
    backend.backend_tokenizer.enable_padding(length=20)
    tokenizer = wrap(backend, LlamaConfig(vocab_size=512))

    assert tokenizer.spelled(tokenizer.encode_plain("a longer text")) == "a longer text"


def test_a_tokenizer_that_changes_texts_is_said():
    """Line ends that it reads as blanks, capitals that it takes away; a tokenizer of bytes keeps all."""
    assert any("changes texts" in note for note in unigram().notes)
    assert tiny_tokenizer().notes == ()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}\n{{ m['content'] }", "mistake in line 2: unexpected '}'"),
        ("{{ messages[0].content.nothing.there }}", "fails for messages .*UndefinedError"),
        ("{{ messages.__class__.__mro__ }}", "fails for messages .*SecurityError"),
        ("{{ messages[0] + 1 }}", "fails for messages .*TypeError"),
    ],
)
def test_a_template_with_a_mistake_is_not_said_to_refuse_messages(template, said):
    """Only a template that raises an exception of its own refuses; the others are to be corrected."""
    tokenizer = unigram()
    tokenizer.backend.chat_template = template
    with pytest.raises(ConfigError, match=said) as refused:
        tokenizer.template([{"role": "user", "content": "x"}])
    assert "in an order that it takes" not in str(refused.value)


@pytest.mark.parametrize(("kind", "is_said"), [("NFKC", True), ("NFKD", True), ("NFC", False), (None, False)])
def test_compatibility_forms_are_said(kind, is_said):
    """A square becomes a digit behind its base, which is another question; canonical forms change no meaning."""
    tokenizer = tiny_tokenizer()
    if kind is not None:
        tokenizer.backend.backend_tokenizer.normalizer = getattr(normalizers, kind)()
    assert any("compatibility forms" in note for note in tokenizer.notes) == is_said


def test_an_end_that_the_model_cannot_draw_is_said():
    """A tokenizer that was enlarged without its model names an end that no answer reaches."""
    backend = byte_level("<|end|>", eos_token="<|end|>")
    end = backend.eos_token_id
    told, silent = (wrap(backend, LlamaConfig(vocab_size=size), (7,)) for size in (end, end + 1))
    assert f"the end token '<|end|>' has the id {end}, and the model draws 0 to {end - 1}" in told.said[-1]
    assert (told.stop_ids, silent.said) == ((7,), ())
