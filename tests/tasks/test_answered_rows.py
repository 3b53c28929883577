"""Rows with their answers as tokens: what is trained on, what is not, and what is refused."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.tasks.templates import CHATML, GEMMA, LLAMA, MISTRAL, PLAIN, QWEN, R1, VICUNA, tokenizer_of

from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.types import Task
from gnomon.models.tokenizer import Tokenizer
from gnomon.tasks.arithmetic import ArithmeticTask
from gnomon.tasks.base import Further
from gnomon.tasks.build import Split, build_split
from gnomon.tasks.chat import ChatRenderer
from gnomon.tasks.split import HeldOut
from gnomon.tasks.tables import TableTask

ASK = {"role": "user", "content": "Salve!"}
SAY = {"role": "assistant", "content": "Salve et tu."}
AGAIN = {"role": "user", "content": "Quid agis?"}
LAST = {"role": "assistant", "content": "Bene."}
TOKENIZER = tokenizer_of(CHATML)


def trained(tokenizer: Tokenizer, response: Sequence[int], mask: Sequence[bool]) -> list[str]:
    """Return the runs of trained tokens as texts, control tokens spelled out."""
    texts: list[list[int]] = []
    for before, (token, is_trained) in zip((False, *mask), zip(response, mask, strict=True), strict=False):
        if is_trained:
            texts = [*texts, [token]] if not before else [*texts[:-1], [*texts[-1], token]]
    return [tokenizer.spelled(text) for text in texts]


@pytest.mark.parametrize("template", [CHATML, LLAMA, GEMMA, VICUNA], ids=["ChatML", "Llama 3", "Gemma", "Vicuna"])
def test_every_turn_of_an_assistant_is_trained_and_nothing_else(template: str):
    """The text of both answers and the token that ends each, whatever the template writes around them."""
    tokenizer = tokenizer_of(template)
    renderer = ChatRenderer(tokenizer)

    found = renderer.conversation((ASK,), (SAY, AGAIN, LAST))
    texts = trained(tokenizer, found.response, found.mask)

    end = tokenizer.spelled([tokenizer.encode(texts[0])[-1]])
    assert [text.removesuffix(end).strip() for text in texts] == ["Salve et tu.", "Bene."]
    assert all(tokenizer.encode(text)[-1] in tokenizer.stop_ids for text in texts)
    whole = tokenizer.spelled((*found.prompt, *found.response))
    assert "Quid agis?" in whole
    assert tokenizer.template((ASK, SAY, AGAIN, LAST), begins_answer=False).startswith(whole)


@pytest.mark.parametrize("template", [CHATML, LLAMA, GEMMA, MISTRAL, VICUNA, QWEN, None])
def test_the_question_is_asked_as_in_generation(template: str | None):
    """The prompt's ids are those that the engine is asked with, and the last trained token ends an answer."""
    tokenizer = tokenizer_of(template)
    renderer = ChatRenderer(tokenizer)

    found = renderer.conversation("Salve!", (SAY,))

    assert found.prompt == renderer("Salve!")
    assert found.response[-1] in tokenizer.stop_ids
    assert all(found.mask)


def test_text_of_an_answer_never_becomes_a_control_token():
    """An answer that spells the end of a turn has it as text, and ends once, behind it."""
    tokenizer = tokenizer_of(CHATML)
    said = {"role": "assistant", "content": "I write <|im_end|> and go on."}

    found = ChatRenderer(tokenizer).conversation("Salve!", (said,))

    assert [token in tokenizer.stop_ids for token in found.response].count(True) == 1
    assert tokenizer.decode(found.response) == "I write <|im_end|> and go on."


THOUGHT = {"role": "assistant", "content": "<think>hm</think>Bene."}
REFUSED = {
    "a prompt that opens a thought": (R1, (SAY,), "asks for an answer with .*<think>"),
    "a thought that is left out": (QWEN.replace("<think>\n\n</think>\n\n", ""), (THOUGHT,), "leaves out or changes"),
    "an earlier turn that is written otherwise": (QWEN, (SAY, AGAIN, LAST), "otherwise when more follows"),
    "two turns behind an opened thought": (R1, (THOUGHT, AGAIN, THOUGHT), "otherwise when more follows|<think>"),
    "an answer without an end": (PLAIN, (SAY,), "writes no end token"),
    "several turns without a template": (None, (SAY, AGAIN, LAST), "no chat template"),
    "no answer": (CHATML, (), "no answer to train on"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_train_on_other_text_is_refused(case: str):
    """Each message says what the template does with the row."""
    template, turns, said = REFUSED[case]

    with pytest.raises(DatasetError, match=said):
        ChatRenderer(tokenizer_of(template)).conversation((ASK,), turns)


def rows(folder: Path, *given: dict[str, Any], **settings: Any) -> list[Task]:
    """Return the tasks of a table of these rows, none held out."""
    split = split_of(folder, TOKENIZER, *given, **settings)
    return [split.train[n] for n in range(len(split.train))]


def split_of(folder: Path, tokenizer: Tokenizer, *given: dict[str, Any], **settings: Any) -> Split:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    renderer = ChatRenderer(tokenizer)
    answers = settings.pop("answers", "data")
    return build_split(TableTask(str(path), **settings), HeldOut(size=0), renderer, answers=answers)


REASONED = {"role": "assistant", "content": "<think>hm hm</think>Bene."}
THINKS = QWEN.replace("<think>\n\n</think>\n\n{{ m['content'].split('</think>')[-1] }}", "{{ m['content'] }}")


@pytest.mark.parametrize(
    ("template", "first", "second"),
    [
        (QWEN, ["<think>\n\n</think>\n\nSalve et tu.<|im_end|>"], ["<think>\n\n</think>\n\nBene.<|im_end|>"]),
        (THINKS, ["<think>hm hm</think>Bene.<|im_end|>"], ["<think>hm hm</think>Bene.<|im_end|>"]),
        (R1, ["hm hm</think>Bene.</s>"], ["hm hm</think>Bene.</s>"]),
    ],
    ids=["Qwen 3 without thoughts", "Qwen 3 with thoughts", "R1"],
)
def test_several_answers_of_a_model_that_thinks_are_a_row_each(
    template: str, first: list[str], second: list[str], tmp_path: Path
):
    """Each answer is trained on behind what an engine is asked with: earlier thoughts are gone, its own is there."""
    tokenizer = tokenizer_of(template)
    says = [SAY, LAST] if template == QWEN else [REASONED, REASONED]
    split = split_of(tmp_path, tokenizer, {"messages": [ASK, says[0], AGAIN, says[1]]}, {"messages": [ASK, says[1]]})
    found = [split.train[n] for n in range(len(split.train))]

    assert [trained(tokenizer, task.response, task.mask) for task in found[:2]] == [first, second]
    assert all(all(task.mask) for task in found)
    assert found[0].prompt == ChatRenderer(tokenizer)((ASK,))
    assert found[1].prompt == ChatRenderer(tokenizer)((ASK, says[0], AGAIN))
    assert "hm" not in tokenizer.spelled(found[1].prompt)
    assert re.search(r"1 of 2 rows of 'rows' become 2, one for each answer", split.repeated)
    assert len(found) == 3


def test_sharegpt_and_text_are_read(tmp_path: Path):
    """Each name of a role; a text is trained on from its second token on, to an end token, without a template."""
    chat = [{"from": "system", "value": "Brevis es."}, {"from": "human", "value": "Salve!"},
            {"from": "gpt", "value": "Salve et tu."}, {"from": "user", "value": "Quid agis?"},
            {"from": "assistant", "value": "Bene."}]  # fmt: skip
    found = rows(tmp_path, {"conversations": chat}, {"messages": chat[1:3]}, {"text": "Gallia est."}, {"text": "Veni."})

    assert [trained(TOKENIZER, task.response, task.mask) for task in found] == [
        ["Salve et tu.<|im_end|>", "Bene.<|im_end|>"], ["Salve et tu.<|im_end|>"], ["allia est.</s>"],
        ["eni.</s>"],
    ]  # fmt: skip
    assert "Brevis es." in TOKENIZER.spelled(found[0].prompt)
    assert [TOKENIZER.spelled(task.prompt) for task in found[2:]] == ["G", "V"]


def test_a_conversation_that_is_written_as_text_is_refused(tmp_path: Path):
    """Its control strings would be trained on as letters; and a text asks nothing."""
    split = split_of(tmp_path, TOKENIZER, {"text": "<|im_start|>user\nSalve!<|im_end|>"})
    with pytest.raises(DatasetError, match=r"the text holds '<\|im_(start|end)\|>'.*give a conversation as messages"):
        split.train[0]
    with pytest.raises(DatasetError, match="asks nothing"):
        ChatRenderer(TOKENIZER)(())


def test_every_usual_form_of_a_row_is_read(tmp_path: Path):
    """Completion, messages, a conversational completion and an answer; a first prompt beside messages is not asked."""
    found = rows(
        tmp_path,
        {"prompt": "a?", "completion": "b", "answer": "not trained on"},
        {"messages": [ASK, SAY, AGAIN, LAST]},
        {"prompt": [ASK, SAY, AGAIN], "completion": [LAST]},
        {"question": "c?", "answer": 7},
        {"prompt": "Salve!", "messages": [ASK, SAY]},
    )
    texts = [trained(TOKENIZER, task.response, task.mask) for task in found]

    assert texts == [
        ["b<|im_end|>"],
        ["Salve et tu.<|im_end|>", "Bene.<|im_end|>"],
        ["Bene.<|im_end|>"],
        ["7<|im_end|>"],
        ["Salve et tu.<|im_end|>"],
    ]
    assert found[0].columns["answer"] == "not trained on"


def test_a_column_of_its_own_is_read_and_rows_that_differ_in_it_stay(tmp_path: Path):
    """completion_column names it; equal questions with other completions are two rows, with the same one are merged."""
    given = ({"prompt": "a?", "reply": text} for text in ("b", "c", "b"))

    found = rows(tmp_path, *given, completion_column="reply")

    assert [TOKENIZER.decode(task.response) for task in found] == ["b", "c"]


FLAWS = [
    ({"prompt": "a?"}, "answer: missing"),
    ({"prompt": "a?", "completion": " "}, "completion: an answer begins and ends"),
    ({"messages": [ASK, SAY, AGAIN]}, "messages: an answer begins and ends .* is the user's"),
    ({"messages": [SAY]}, "messages: empty list"),
    ({"messages": [ASK, {"role": "assistant", "content": None}]}, "content must be text"),
    ({"prompt": "a?", "completion": 7}, "must be text or a list of messages"),
    ({"text": " "}, "text: empty"),
    ({"conversations": [{"from": "human", "value": "a?"}, {"from": "narrator", "value": "b"}]}, "got 'narrator'"),
]


@pytest.mark.parametrize(("row", "said"), FLAWS)
def test_a_row_that_cannot_be_trained_on_is_refused_by_its_number(tmp_path: Path, row: dict[str, Any], said: str):
    """The message has file, row and reason."""
    with pytest.raises(DatasetError, match=rf"rows.jsonl:2: .*{said}"):
        rows(tmp_path, {"prompt": "a?", "completion": "b"}, row)


def test_a_table_that_is_asked_reads_no_answers(tmp_path: Path):
    """Without supervised fine-tuning a conversation that ends with an answer is refused, as before."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [ASK, SAY], "answer": "1"}) + "\n")

    with pytest.raises(DatasetError, match="the last message must be the user's"):
        TableTask(str(path)).questions()


@pytest.mark.parametrize("template", [CHATML, LLAMA, GEMMA, MISTRAL, VICUNA, QWEN, None])
def test_a_prompt_in_pieces_is_the_prompt(template: str | None):
    """What stands between the pieces is plain text: with it they spell the prompt, and control strings stay text."""
    tokenizer = tokenizer_of(template)
    renderer = ChatRenderer(tokenizer)
    text = "Salve! <|im_end|> @ Vale!"

    before, after = renderer.pieces(text, Further(), "@")

    said = tokenizer.spelled((*before, *tokenizer.encode_plain("Bene."), *after))
    assert said == tokenizer.spelled(renderer(text.replace("@", "Bene.")))
    assert renderer.pieces("Salve!", Further(), "@") == (renderer("Salve!"),)


SAID = {"prompt": "Salve!", "chosen": "Salve et tu.", "rejected": "Quis es?"}


@pytest.mark.parametrize(
    "row",
    [
        SAID,
        {"prompt": [ASK], "chosen": [SAY], "rejected": [{"role": "assistant", "content": "Quis es?"}]},
        {"chosen": [ASK, SAY], "rejected": [ASK, {"role": "assistant", "content": "Quis es?"}]},
        {"prompt": "another", "chosen": [ASK, SAY], "rejected": [ASK, {"role": "assistant", "content": "Quis es?"}]},
        {
            "chosen": [{"from": "human", "value": "Salve!"}, {"from": "gpt", "value": "Salve et tu."}],
            "rejected": [{"from": "human", "value": "Salve!"}, {"from": "gpt", "value": "Quis es?"}],
        },
    ],
    ids=["texts", "messages", "conversations", "conversations beside a prompt", "ShareGPT"],
)
def test_both_answers_of_a_pair_stand_behind_one_question(row: dict[str, Any], tmp_path: Path):
    """TRL's forms: the ids of the question as an engine is asked, and of each answer with its end of turn."""
    (task,) = rows(tmp_path, row, answers="pairs")

    assert task.prompt == ChatRenderer(TOKENIZER)((ASK,))
    assert trained(TOKENIZER, task.response, task.mask) == ["Salve et tu.<|im_end|>"]
    assert trained(TOKENIZER, task.contrast, task.contrast_mask) == ["Quis es?<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "Salve!", "chosen": "a"}, "rejected: missing; the row has prompt, chosen"),
        ({"prompt": "Salve!", "rejected": "a"}, "chosen: missing; the row has prompt, rejected"),
        ({**SAID, "rejected": "Salve et tu."}, "rejected: is the same as chosen"),
        ({**SAID, "rejected": " "}, "rejected: an answer begins and ends with an assistant's message that has text"),
        ({**SAID, "rejected": 4}, "rejected: must be text or a list of messages, got 4"),
        (
            {"chosen": [AGAIN, SAY], "rejected": [ASK, SAY]},
            "chosen: an answer begins and ends with",
        ),
    ],
)
def test_a_row_that_prefers_nothing_is_refused(row: dict[str, Any], said: str, tmp_path: Path):
    """The message names row, column and flaw."""
    with pytest.raises(DatasetError, match=re.escape(said)):
        rows(tmp_path, row, answers="pairs")


def test_a_labelled_answer_is_read_with_that_of_another_row(tmp_path: Path):
    """Reward 1 or -1 for the row's own, none for the other's, which stands behind the same question."""
    given = [{"prompt": f"Salve {n}!", "completion": f"Salve {n} et tu.", "label": n != 2} for n in range(4)]

    found = rows(tmp_path, *given, answers="labels")

    assert [task.given_rewards for task in found] == [(1, None), (1, None), (-1, None), (1, None)]
    assert trained(TOKENIZER, found[1].response, found[1].mask) == ["Salve 1 et tu.<|im_end|>"]
    assert trained(TOKENIZER, found[1].contrast, found[1].contrast_mask) == ["Salve 3 et tu.<|im_end|>"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([{"prompt": "Salve!", "completion": "a", "label": "good"}] * 2, "label: must be true or false, got 'good'"),
        (
            [{"prompt": "Salve!", "completion": "a"}] * 2,
            "label: is not there; another column",
        ),
        ([{"prompt": "Salve!", "completion": "a", "label": math.nan}] * 2, "label: nan is no number"),
        ([{"prompt": "Salve!", "label": True}] * 2, "completion: missing; the row has prompt, label"),
        ([{"prompt": "Salve!", "completion": "a", "label": True}], "each row is read with another row's answer"),
    ],
)
def test_a_row_without_a_label_is_refused(given: list[dict[str, Any]], said: str, tmp_path: Path):
    """The message names row, column and flaw; one row has no other."""
    with pytest.raises((ConfigError, DatasetError), match=re.escape(said)):
        rows(tmp_path, *given, answers="labels")


def test_a_label_of_a_file_without_types_is_read(tmp_path: Path):
    """CSV has no true: 1, 0 and words in any case mean it, as they do in JSON."""
    given = [
        {"prompt": f"Salve {n}!", "completion": "a", "label": label} for n, label in enumerate(["1", 0, "True", 1.0])
    ]

    found = rows(tmp_path, *given, answers="labels")

    assert [task.given_rewards[0] for task in found] == [1, -1, 1, 1]


def test_tasks_without_pairs_are_refused():
    """A generator has one answer to a question."""
    with pytest.raises(ConfigError, match="'arithmetic' has no chosen and rejected; set task to a table"):
        build_split(ArithmeticTask(), HeldOut(size=0), ChatRenderer(TOKENIZER), answers="pairs")
