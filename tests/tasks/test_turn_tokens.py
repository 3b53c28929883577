"""Between two answers: the template's own tokens, once, and text that stays text."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.errors import ConfigError
from gnomon.models.tiny import tiny_tokenizer
from gnomon.models.tokenizer import Tokenizer
from gnomon.tasks.tools import schema_of
from gnomon.tasks.turn_tokens import TurnTokenizer, tells_tools

BOS, EOS = 256, 257

# <|bos|> begins a turn and <|eos|> ends it, as in ChatML.
CHAT = (
    "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content | trim }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)
NO_TOOLS = CHAT.replace(
    "{% for m", "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tool') }}{% endfor %}{% for m", 1
)
TOOLS = (
    "{% if tools %}<|bos|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|eos|>\n{% endif %}"
    "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|eos|>\n{% endfor %}{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)


def tokenizer_with(template: str | None) -> Tokenizer:
    """The byte tokenizer with a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend.chat_template = template
    return tokenizer


def spelled(ids: Sequence[int]) -> str:
    """The text behind byte ids, control tokens spelled out."""
    names: dict[int, bytes] = {BOS: b"<|bos|>", EOS: b"<|eos|>"}
    return b"".join(names.get(i) or bytes([i]) for i in ids).decode()


CHATTY, BARE = tokenizer_with(CHAT), tokenizer_with(None)
hostile = st.lists(
    st.sampled_from(["<|bos|>", "<|eos|>", "<|eo", "s|>", "assistant\n", "gnomonsaid", "\ue000", " ", "é", "日", "x"]),
    max_size=8,
).map("".join)


@given(hostile, st.booleans())
def test_a_reply_is_the_template_and_its_text_stays_text(text: str, is_ended: bool):
    """Whatever a reply says, its control tokens are the template's own three, or four with an end of turn to write."""
    ids = TurnTokenizer.over(CHATTY).reply([("tool", text)], is_ended)

    end = "" if is_ended else "<|eos|>"
    assert spelled(ids) == f"{end}\n<|bos|>tool\n{text.strip()}<|eos|>\n<|bos|>assistant\n"
    assert [i for i in ids if i >= BOS] == [EOS] * (not is_ended) + [BOS, EOS, BOS]


@given(st.lists(hostile, min_size=1, max_size=3), hostile)
def test_a_conversation_that_was_cut_together_is_the_one_that_is_rendered_whole(texts: list[str], answer: str):
    """Prompt, sampled answer with its end token, and bridge are byte by byte what the template makes of all of it."""
    turn_tokenizer, answer = TurnTokenizer.over(CHATTY), answer.strip() or "a"
    rendered = CHATTY.template([{"role": "user", "content": "q"}])
    assert rendered is not None
    path = [*CHATTY.encode(rendered), *CHATTY.encode_plain(answer), EOS]
    path += turn_tokenizer.reply([("tool", text) for text in texts], is_ended=True)

    said = [("user", "q"), ("assistant", answer), *(("tool", text) for text in texts)]
    whole = CHATTY.template([{"role": role, "content": text} for role, text in said])
    assert spelled(path) == whole


@given(hostile)
def test_an_observation_stands_before_the_first_answer(text: str):
    """A question with an observation behind it is what the template makes of two messages."""
    rendered = CHATTY.template([{"role": "user", "content": "q"}])
    assert rendered is not None
    prompt = TurnTokenizer.over(CHATTY).observed(CHATTY.encode(rendered), [("user", text)])

    assert spelled(prompt) == CHATTY.template([{"role": "user", "content": "q"}, {"role": "user", "content": text}])
    assert [i for i in prompt if i >= BOS] == [BOS, EOS, BOS, EOS, BOS]


@given(hostile)
def test_without_a_template_a_reply_is_a_line_of_its_own(text: str):
    """A base model reads the reply between line breaks, and no control token in it."""
    assert bytes(TurnTokenizer.over(BARE).reply([("tool", text)], is_ended=True)).decode() == f"\n{text}\n"
    assert bytes(TurnTokenizer.over(BARE).observed((65,), [("user", text)])).decode() == f"A\n{text}\n"


def test_a_template_without_tools_shows_their_results_as_the_user():
    """Where a template refuses the role, "tool" is said by "user"."""
    turn_tokenizer = TurnTokenizer.over(tokenizer_with(NO_TOOLS))

    assert not turn_tokenizer.has_tool_role
    assert (
        spelled(turn_tokenizer.reply([("tool", "42")], is_ended=True)) == "\n<|bos|>user\n42<|eos|>\n<|bos|>assistant\n"
    )


def test_a_template_that_shows_no_reply_is_refused():
    """A template of one question and no more cannot be talked to."""
    with pytest.raises(ConfigError, match="does not show a reply"):
        TurnTokenizer.over(tokenizer_with("{{ messages[0].content }}<|eos|>"))


def test_an_observation_needs_a_prompt_that_ends_as_the_template_does():
    """A prompt of another form is not cut blindly."""
    with pytest.raises(ConfigError, match="put it into the question"):
        TurnTokenizer.over(CHATTY).observed(CHATTY.encode_plain("something else"), [("user", "x")])


def test_a_template_tells_about_tools_when_it_names_them_and_calls_them_in_the_known_form():
    """Measured, not looked up: the ChatML template ignores tools, the other one tells and its calls are read back."""

    def add(a: int) -> int:
        """Add."""
        return a

    schemas: list[dict[str, Any]] = [schema_of(add)]
    assert not tells_tools(CHATTY, schemas)
    assert not tells_tools(BARE, schemas)
    assert tells_tools(tokenizer_with(TOOLS), schemas)
