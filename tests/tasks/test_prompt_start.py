"""How answers begin: what templates write before them, and what is said of it."""

import pytest
from tests.tasks.templates import (
    CHATML,
    GEMMA,
    HARMONY,
    LLAMA,
    MISTRAL,
    MODELS,
    PLAIN,
    QWEN,
    QWEN_THINKING,
    R1,
    VICUNA,
    tokenizer_of,
)

from gnomon.core.errors import ConfigError
from gnomon.tasks.base import Further
from gnomon.tasks.chat import ChatRenderer
from gnomon.tasks.prompt_start import beginning_of

OPENINGS = {
    "ChatML": (CHATML, ""),
    "Llama 3": (LLAMA, ""),
    "Mistral": (MISTRAL, ""),
    "Gemma": (GEMMA, ""),
    "Vicuna": (VICUNA, ""),
    "gpt-oss": (HARMONY, ""),
    "no template": (None, ""),
    "contents alone": (PLAIN, ""),
    "R1": (R1, "<think>\n"),
    "Qwen 3": (QWEN, ""),
    "Qwen 3 thinking": (QWEN_THINKING, "<think>\n"),
    "ChatML that thinks": (CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif"), "<think>"),
    "ChatML that reasons": (CHATML.replace("assistant\n{% endif", "assistant\n<reasoning>\n{% endif"), "<reasoning>\n"),
    "a begun sentence": (CHATML.replace("assistant\n{% endif", "assistant\nSure: {% endif"), "Sure: "),
    "a box": (LLAMA.replace("\n\n{% endif", "\n\n\\boxed{{ '{' }}{% endif"), "\\boxed{"),
    "gpt-oss that analyses": (
        HARMONY.replace("assistant{% endif", "assistant<|channel|>analysis<|message|>{% endif"),
        "<|channel|>analysis<|message|>",
    ),
}


@pytest.mark.parametrize("model", OPENINGS)
def test_what_a_prompt_opens_is_seen(model):
    """The text behind the turn's header belongs to the answer, whatever is asked, and is said once."""
    template, opening = OPENINGS[model]
    tokenizer = tokenizer_of(template)

    found = beginning_of(tokenizer)

    for asked in ("2+2=", "<think>?", "<|im_start|>assistant\n and <|Assistant|>"):
        assert found.opening(ChatRenderer(tokenizer)(asked)) == opening
    assert [note for note in found.notes if "opens every answer" in note] == (
        [f"the model's chat template opens every answer with {opening!r}: rewards see it before what the model says "
         "(grading.opening = false leaves it out)"] if opening else []
    )  # fmt: skip


def test_an_opening_can_be_left_out_and_that_is_said():
    """With grading.opening = false rewards see only what the model said."""
    tokenizer = tokenizer_of(R1)
    found = beginning_of(tokenizer, is_opening_shown=False)

    assert found.opening(ChatRenderer(tokenizer)("2+2=")) == ""
    assert "rewards do not see it, only what follows" in found.notes[0]


def test_a_switch_of_a_row_changes_its_own_opening():
    """A template that opens a thought where a row asks for one."""
    tokenizer = tokenizer_of(CHATML.replace("assistant\n{% endif", "assistant\n{{ '<think>' if thinking }}{% endif"))
    found, renderer = beginning_of(tokenizer), ChatRenderer(tokenizer)

    assert found.opening(renderer("2+2=")) == ""
    assert found.opening(renderer("2+2=", Further(switches={"thinking": True}))) == "<think>"


def test_a_thought_that_the_prompt_closes_is_no_opening():
    """Qwen 3 without thinking writes an empty thought, behind which the answer begins."""
    tokenizer = tokenizer_of(QWEN)
    prompt = ChatRenderer(tokenizer)("2+2=", Further(switches={"enable_thinking": False}))

    assert tokenizer.spelled(prompt).endswith("</think>\n\n")
    assert beginning_of(tokenizer).opening(prompt) == ""


UNBEGUN = {
    "ChatML": CHATML.partition("{% if add_generation_prompt")[0],
    "Llama 3": LLAMA.partition("{% if add_generation_prompt")[0],
    "Gemma": GEMMA.partition("{% if add_generation_prompt")[0],
    "Vicuna": VICUNA.partition("{% if add_generation_prompt")[0],
    "R1": R1.partition("{% if add_generation_prompt")[0],
    "ChatML with the user's turn": CHATML.replace("<|im_start|>assistant", "<|im_start|>user"),
    "Llama 3 with the user's turn": LLAMA.replace("<|head|>assistant", "<|head|>user"),
    "Gemma with another name": GEMMA.replace("<|head|>model", "<|head|>assistant"),
    "gpt-oss": HARMONY.partition("{% if add_generation_prompt")[0],
    "white space alone": CHATML.partition("{% if add_generation_prompt")[0]
    + "{% if add_generation_prompt %}\n{% endif %}",
    "the user's turn": CHATML.replace(
        "{% if add_generation_prompt %}<|im_start|>assistant", "<|head|>user{% if true %}"
    ),
}


@pytest.mark.parametrize("model", UNBEGUN)
def test_a_prompt_that_begins_no_turn_is_said(model):
    """Templates without add_generation_prompt, or with another one, give one note."""
    (note,) = beginning_of(tokenizer_of(UNBEGUN[model])).notes

    assert "chat template" in note
    assert "assistant's turn is begun" in note


@pytest.mark.parametrize("model", MODELS)
def test_usual_templates_need_no_word_on_their_turns(model):
    """Where an answer begins as the template itself begins one, nothing is said of turns; so with Mistral's."""
    assert not [note for note in beginning_of(tokenizer_of(MODELS[model])).notes if "turn" in note]


def test_a_beginning_that_is_written_twice_is_said():
    """A template that writes the beginning of text in front of a template that writes it."""
    tokenizer = tokenizer_of("{{ bos_token }}" + LLAMA)
    own = tokenizer.__class__(**{**vars(tokenizer), "begin": (tokenizer.bos,)})

    for each in (own, tokenizer):
        assert beginning_of(each).notes == ("prompts begin with <s> twice: the model's chat template writes it twice",)


_BLOCK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ALWAYS = {
    "a thought": (CHATML.replace(_BLOCK, _BLOCK + "<think>"), "<think>"),
    "a thought in brackets": (CHATML.replace(_BLOCK, _BLOCK + "[THINK]"), "[THINK]"),
    "a thought in words": (
        VICUNA.replace("ASSISTANT:{% endif %}", "ASSISTANT: {% endif %}<reasoning>"), "<reasoning>",
    ),
    "a sentence": (CHATML.replace(_BLOCK, "<|im_start|>assistant\nThe answer is "), "The answer is "),
    "a thought behind a turn of its own": (CHATML.replace(_BLOCK, "<|im_start|>assistant\n<think>"), "<think>"),
    "a thought of R1": (R1.replace("<think>\n{% endif %}", "{% endif %}<think>"), "<think>"),
}  # fmt: skip


@pytest.mark.parametrize("what", ALWAYS)
def test_an_opening_outside_of_the_generation_prompt_is_seen(what):
    """A template that writes it with and without add_generation_prompt: rewards see it, and it is said."""
    template, opening = ALWAYS[what]
    tokenizer = tokenizer_of(template)

    found = beginning_of(tokenizer)

    assert found.opening(ChatRenderer(tokenizer)("2+2=")) == opening
    assert any(f"opens every answer with {opening!r}" in note for note in found.notes)


CLOSED = {
    "ChatML": CHATML.replace("assistant\n{% endif", "assistant\n<|im_end|>\n{% endif"),
    "Llama 3": LLAMA.replace("<|body|>\n\n{% endif", "<|body|>\n\n<|im_end|>{% endif"),
    "R1": R1.replace("<think>\n{% endif", "{{ eos_token }}{% endif"),
    "outside of its block": CHATML + "<|im_end|>",
    "the end of the text": LLAMA + "{{ eos_token }}",
}


@pytest.mark.parametrize("model", CLOSED)
def test_a_template_that_ends_the_assistants_turn_is_refused(model):
    """Behind the end of an answer there is none: said with what prompts end with, and what to remove."""
    with pytest.raises(
        ConfigError, match=r"ends the assistant's turn itself: prompts end with .*add_generation_prompt"
    ):
        beginning_of(tokenizer_of(CLOSED[model]))


def test_an_end_of_text_that_stands_behind_every_turn_is_no_end_of_the_answers():
    """DialoGPT's form has no header, and an end behind every turn, the question's too."""
    template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"

    assert beginning_of(tokenizer_of(template)).notes == ()


@pytest.mark.parametrize("count", [2, 3])
def test_a_question_that_is_written_more_than_once_is_said(count):
    """With the number of times."""
    tokenizer = tokenizer_of(CHATML.replace("{{ m['content'] }}", "{{ m['content'] }} " * count))

    assert f"the model's chat template writes every question {count} times" in beginning_of(tokenizer).notes


_KNOWN = "{% for m in messages %}<|head|>{{ m['role'] }}\n{{ m['content'] }}<|body|>\n{% endfor %}<|head|>assistant\n"


@pytest.mark.parametrize(
    ("template", "marks", "end"),
    [
        (_KNOWN.replace("head", "turn").replace("body", "stop"), ["<|turn|>", "<|stop|>"], "<|stop|>"),
        (_KNOWN.replace("head", "turn"), ["<|turn|>"], None),
        (_KNOWN.replace("body", "eot_id"), ["<|eot_id|>"], "<|eot_id|>"),
        (_KNOWN.replace("<|head|>", "<start_of_turn>").replace("<|body|>", "<end_of_turn>"),
         ["<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
        (_KNOWN.replace("<|head|>", "<\uff5cUser\uff5c>"), ["<\uff5cUser\uff5c>"], None),
    ],
)  # fmt: skip
def test_marks_of_a_template_that_are_no_tokens_are_said(template, marks, end):
    """A template copied onto a base model's tokenizer is spelled in bytes: its end of turn ends nothing."""
    [note] = [note for note in beginning_of(tokenizer_of(template)).notes if "no tokens" in note]

    assert f"writes {', '.join(marks)}, which are no tokens of its tokenizer" in note
    assert ("ends no answer" in note) == (end is not None)
    assert end is None or f'{end} ends no answer (sampling.stop = ["{end}"] does)' in note


@pytest.mark.parametrize("template", [_KNOWN, CHATML, R1, HARMONY, MISTRAL, VICUNA, PLAIN, None])
def test_marks_that_are_tokens_are_not_said(template):
    """Nor what is no mark: [INST], USER: and plain contents."""
    assert not [note for note in beginning_of(tokenizer_of(template)).notes if "no tokens" in note]
