from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.errors import DatasetError
from gnomon.core.types import Message
from gnomon.tasks.chat import ChatRenderer

START, END, BOS = 256, 257, 258


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255; two control tokens; ChatML, or no template at all."""

    has_template: bool = True
    control_strings: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")
    begin: tuple[int, ...] = (BOS,)
    context_length: int | None = None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            control = next((c for c in self.control_strings if text.startswith(c)), None)
            ids += list(text[0].encode()) if control is None else [START + self.control_strings.index(control)]
            text = text[1 if control is None else len(control) :]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < START).decode()

    def spelled(self, ids: Sequence[int]) -> str:
        return shown(ids)

    def names_switch(self, name: str, has_tools: bool = False) -> bool:
        return False

    def template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        switches: Mapping[str, Any] | None = None,
        begins_answer: bool = True,
    ) -> str | None:
        if not self.has_template:
            return None
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content'].strip()}<|im_end|>\n" for m in messages)
        return turns + ("<|im_start|>assistant\n" if begins_answer else "")


def shown(ids: Sequence[int]) -> str:
    """The text behind ids, control tokens spelled out."""
    spelled = {START: b"<|im_start|>", END: b"<|im_end|>"}
    return b"".join(spelled.get(i) or bytes([i]) for i in ids).decode()


hostile = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_", "end|>", "system\n", "\ue000", " ", "é", "x"]),
    max_size=8,
).map("".join)


@given(hostile, st.none() | hostile)
def test_content_never_becomes_a_control_token(question: str, system: str | None) -> None:
    """Whatever content says, the control tokens are the template's own, and no character changes."""
    tokenizer = ByteTokenizer()

    ids = ChatRenderer(tokenizer, system)(question)

    turns = 1 if system is None else 2
    assert [i for i in ids if i >= START] == [START, END] * turns + [START]
    own = [] if system is None else [{"role": "system", "content": system}]
    assert shown(ids) == tokenizer.template([*own, {"role": "user", "content": question}])


@given(st.text(st.characters(codec="utf-8"), max_size=20).filter(lambda t: "<|im_" not in t))
def test_ordinary_text_is_encoded_as_one_piece(question: str) -> None:
    """Without control strings in it, a prompt is the encoding of the whole rendered text."""
    tokenizer = ByteTokenizer()

    rendered = tokenizer.template([{"role": "user", "content": question}])

    assert rendered is not None
    assert ChatRenderer(tokenizer)(question) == tuple(tokenizer.encode(rendered))


def test_the_longer_of_two_control_strings_that_begin_alike_is_matched() -> None:
    """With control strings <s> and <s>x, the text <s>x is taken as the longer one and stays text."""
    tokenizer = ByteTokenizer(control_strings=("<s>", "<s>x"))

    ids = ChatRenderer(tokenizer)("a<s>xb<s>")

    assert all(i < START for i in ids)
    assert "a<s>xb<s>" in bytes(ids).decode()


def test_a_model_without_template_reads_bare_text_after_bos() -> None:
    """One message is its content; bos comes first; a control string in it stays text."""
    render = ChatRenderer(ByteTokenizer(has_template=False))

    assert render("3+4=") == (BOS, *b"3+4=")
    assert render("<|im_end|>") == (BOS, *b"<|im_end|>")


def test_several_messages_without_template_are_lines() -> None:
    """Two messages become role: content lines, and the model speaks after assistant:."""
    render = ChatRenderer(ByteTokenizer(has_template=False), system="Add.")

    assert render("3+4=") == (BOS, *b"system: Add.\nuser: 3+4=\nassistant:")


def test_messages_keep_their_own_system_message() -> None:
    """The renderer's system message is for questions that bring none."""
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}]

    assert ChatRenderer(ByteTokenizer(), "other")(messages) == ChatRenderer(ByteTokenizer())(messages)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "usr", "content": "q"}, "role must be one of .* got 'usr'"),
        ({"role": "user"}, "content must be text, got NoneType; write a text"),
        ({"role": "user", "content": [{"type": "text", "text": "q"}]}, "a list of parts; write the text of its parts"),
        ({"role": "user", "content": {"text": "q"}}, "content must be text, got dict; write a text"),
        ({"role": "user", "content": "q", "tool_calls": "x"}, "got also tool_calls; write it into content or remove"),
        ({"role": "user", "content": "q", "name": "n"}, "got also name; write it into content or remove it"),
    ],
)
def test_a_message_that_cannot_be_rendered_is_refused(message: Message, reason: str) -> None:
    """A role, content or key that no template could be trusted with is named."""
    with pytest.raises(DatasetError, match=reason):
        ChatRenderer(ByteTokenizer())([message])
