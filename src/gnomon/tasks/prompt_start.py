"""How an answer begins: what a chat template writes before it, and what of that belongs to the answer.

Measured, by rendering a question, and a question with an answer that is a probe. Templates of reasoning models open
the thought in the prompt: the model goes on behind ``<think>``, and a reward that asks for the whole thought would
never see where it began.
"""

import contextlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.core.errors import ConfigError
from gnomon.core.types import Message
from gnomon.tasks.chat import ChatTokenizer
from gnomon.tasks.rendered import Template

_ASKED, _SAID = "gnomonasked", "gnomonsaid"
_QUESTION: Message = {"role": "user", "content": _ASKED}
_THOUGHT = re.compile(r"<(think|thinking|thought|reasoning|reason|analysis)>|\[THINK\]|<\|channel\|>")
_CLOSED = re.compile(r"\s*(<(\w+)>.*?</\2>|\[THINK\].*?\[/THINK\])\s*", re.DOTALL)
_MARK = re.compile(r"<[|\uff5c][^<>|\uff5c\s]{1,40}[|\uff5c]>|<(?:start|end)_of_turn>")
_TAIL = 200
"""Tokens at a prompt's end that are looked at."""


@dataclass(frozen=True)
class Beginning:
    """What stands at a prompt's end behind the header of the answer's turn, and so belongs to the answer.

    Attributes:
        header: What the template writes before every answer; "" where that is nothing, or not known.
        notes: What is to be said of this template once.
        is_shown: Whether rewards see what is opened.
    """

    tokenizer: ChatTokenizer
    header: str = ""
    notes: tuple[str, ...] = ()
    is_shown: bool = True

    def opening(self, prompt: Sequence[int]) -> str:
        """Return the text that the prompt opens the answer with: "" for none, and for a thought that it also closes."""
        if not (self.header and self.is_shown):
            return ""
        _, header, opened = self.tokenizer.spelled(prompt[-_TAIL:]).rpartition(self.header)
        if not header or not opened.strip() or _ASKED in opened:
            return ""
        return "" if _CLOSED.fullmatch(opened) else opened


def beginning_of(tokenizer: ChatTokenizer, is_opening_shown: bool = True) -> Beginning:
    """Return how the template begins answers, with a note on what is unusual about it.

    Args:
        is_opening_shown: Whether rewards see what a prompt opens the answer with.

    Raises:
        ConfigError: If prompts end with the end of an answer.
    """
    try:
        asked = tokenizer.template([_QUESTION])
        plain = tokenizer.template([_QUESTION], begins_answer=False) or ""
    except ConfigError:
        return Beginning(tokenizer)
    if asked is None:
        return Beginning(tokenizer)
    # Templates with add_generation_prompt write more with it than without it. Of a template that
    # writes the same either way, the turn it always begins is found by another conversation.
    plain = _always_begun(tokenizer, asked) if asked == plain else _shared(tokenizer, asked, plain)
    # What stands before an answer in a conversation is the header
    # alone; what a prompt has beyond it was opened for the answer.
    headers = _headers(tokenizer, plain)
    begun, ids = asked.removeprefix(plain), tokenizer.encode(asked)
    bare = [cut for header in headers if (cut := header[: _thought_at(header)]).strip()]
    header = min((cut for cut in bare if begun.startswith(cut)), key=len, default="")
    opened = Beginning(tokenizer, header).opening(ids)
    # The last token that is no blank: templates often end with a line break.
    if opened and ids[-1 - _blank_end(tokenizer, ids)] in tokenizer.stop_ids:
        raise ConfigError(
            f"the model's chat template ends the assistant's turn itself: prompts end with {_end(asked)!r}, behind "
            "which no answer stands; remove that end from its add_generation_prompt (chat_template.jinja or "
            "tokenizer_config.json)"
        )
    notes = (
        _turn_note(asked, plain, headers),
        _opening_note(opened, is_opening_shown),
        _twice_note(tokenizer, asked),
        _repeated_note(asked),
        _spelled_note(tokenizer, asked),
    )
    return Beginning(tokenizer, header, tuple(note for note in notes if note), is_opening_shown)


def _shared(tokenizer: ChatTokenizer, asked: str, plain: str) -> str:
    """Return ``plain``, or what both begin with where a template writes something behind the question in any case."""
    if asked.startswith(plain):
        return plain
    # Compared token by token: a common beginning in characters may end within a control string.
    pairs = zip(tokenizer.encode(asked), tokenizer.encode(plain), strict=False)
    common = tokenizer.spelled([one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
    return common if _ASKED in common and asked.startswith(common) else plain


def _always_begun(tokenizer: ChatTokenizer, asked: str) -> str:
    """Return what stands before the turn that a template begins in any case; ``asked`` if it begins none."""
    answer: Message = {"role": "assistant", "content": _SAID}
    with contextlib.suppress(ConfigError):
        answered, again = (
            tokenizer.template([_QUESTION, further], begins_answer=False) or "" for further in (answer, _QUESTION)
        )
        common = _shared(tokenizer, answered, again)
        if _SAID not in common and common != again and asked.startswith(common):
            return common
    return asked


def _blank_end(tokenizer: ChatTokenizer, ids: Sequence[int]) -> int:
    """Return how many tokens at the end are white space."""
    return sum(1 for _ in itertools.takewhile(lambda i: not tokenizer.spelled([i]).strip(), reversed(ids)))


def _headers(tokenizer: Template, plain: str) -> list[str]:
    """Return what the template writes between a question and its answer, the last one and an earlier one."""
    found = []
    answer: Message = {"role": "assistant", "content": _SAID}
    for messages in ([_QUESTION, answer], [_QUESTION, answer, _QUESTION]):
        with contextlib.suppress(ConfigError):
            before, said, _ = (tokenizer.template(messages, begins_answer=False) or "").partition(_SAID)
            if said and before.startswith(plain):
                found.append(before[len(plain) :])
    return found


def _thought_at(header: str) -> int:
    found = _THOUGHT.search(header)
    return len(header) if found is None else found.start()


def _turn_note(asked: str, plain: str, headers: Sequence[str]) -> str | None:
    """Return that no turn is begun for the answer; None where one is, or where the template needs none."""
    if asked == plain:
        if headers and not any(header.strip() for header in headers):
            return None
        said = f"before an answer it writes {headers[0]!r}, and " if headers else ""
        return (
            f"the model's chat template has no add_generation_prompt: {said}prompts end with {_end(asked)!r}; unless "
            "that is where the assistant's turn is begun, use a tokenizer whose template begins one"
        )
    begun = asked.removeprefix(plain).strip()
    if headers and not any(_is_one_turn(header.strip(), begun) for header in headers):
        return (
            f"the model's chat template begins answers with {headers[0]!r} in a conversation, and prompts end with "
            f"{_end(asked)!r}: the assistant's turn is begun otherwise than the model was trained on"
        )
    return None


def _is_one_turn(header: str, begun: str) -> bool:
    """Whether two headers begin alike: by their first words, a mark and a role, as far as both have them.

    >>> _is_one_turn("<|im_start|>assistant", "<|im_start|>assistant\\n<think>"), _is_one_turn("<|user|>", "<|model|>")
    (True, False)
    """
    one, other = (re.findall(r"\w+", text)[:2] for text in (header, begun))
    return header[:1] == begun[:1] and all(mine == theirs for mine, theirs in zip(one, other, strict=False))


def _opening_note(opened: str, is_shown: bool) -> str | None:
    if not opened:
        return None
    seen = "rewards see it before what the model says (grading.opening = false leaves it out)"
    hidden = "rewards do not see it, only what follows (grading.opening = true shows it)"
    return f"the model's chat template opens every answer with {opened!r}: {seen if is_shown else hidden}"


def _twice_note(tokenizer: ChatTokenizer, asked: str) -> str | None:
    ids = tuple(tokenizer.encode(asked))
    begin = tokenizer.begin or ids[:1]
    if ids[: 2 * len(begin)] != begin * 2 or tokenizer.spelled(begin[:1]) not in tokenizer.control_strings:
        return None
    return f"prompts begin with {tokenizer.spelled(begin)} twice: the model's chat template writes it twice"


def _repeated_note(asked: str) -> str | None:
    count = asked.count(_ASKED)
    return f"the model's chat template writes every question {count} times" if count > 1 else None


def _spelled_note(tokenizer: ChatTokenizer, asked: str) -> str | None:
    """Return which marks of the template are no tokens; None where all are."""
    tail = ""
    with contextlib.suppress(ConfigError):
        answered = tokenizer.template([_QUESTION, {"role": "assistant", "content": _SAID}], begins_answer=False) or ""
        tail = answered.rpartition(_SAID)[2]
    # Some vocabularies have a token for the blank before a mark.
    counts = {
        mark: sum(bool(tokenizer.spelled([i]).strip()) for i in tokenizer.encode(mark))
        for mark in _MARK.findall(asked + tail)
    }
    marks = [mark for mark, count in counts.items() if count > 1]
    if not marks:
        return None
    said = (
        f"the model's chat template writes {', '.join(marks[:3])}, which are no tokens of its tokenizer ({marks[0]} is "
        f"{counts[marks[0]]} of them)"
    )
    end = next((mark for mark in marks if tail.lstrip().startswith(mark)), None)
    if end is not None:
        said = f'{said}, and {end} ends no answer (sampling.stop = ["{end}"] does)'
    return f"{said}: unless the model was trained so, use the tokenizer or the template that belongs to it"


def _end(text: str) -> str:
    return text.partition(_ASKED)[2][-60:] or text[-60:]
