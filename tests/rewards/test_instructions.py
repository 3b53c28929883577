"""Instructions that a program can check: each kind followed, not followed, and refused."""

import pytest

from gnomon.rewards.base import Sample, VerifierError
from gnomon.rewards.instructions import CHECKS, LANGUAGE, Instructions, sentences

# id, arguments, texts that follow it, texts that do not
CASES = [
    ("keywords:existence", {"keywords": ["wren", "owl"]}, ["A Wren and owls."], ["A wren.", "birds"]),
    ("keywords:frequency", {"keyword": "owl", "relation": "at least", "frequency": 2}, ["Owl, owl"], ["An owl"]),
    ("keywords:frequency", {"keyword": "owl", "relation": "less than", "frequency": 2}, ["An owl"], ["Owl, owl"]),
    ("keywords:forbidden_words", {"forbidden_words": ["owl", "it"]}, ["Howl, with a bit."], ["An OWL.", "It is."]),
    ("keywords:letter_frequency", {"letter": "e", "let_relation": "at least", "let_frequency": 3}, ["Eee"], ["ee"]),
    ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 2}, ["One. Two!"], ["Dr. One"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a\n***\nb", "a *** b ***"],
     ["a\n\nb", "a *** *** b", "a *** b *** c"]),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}, ["two words"], ["now three words"]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "owl"},
     ["A.\n\n\"Owl, so.", "a\n\nowl"], ["owl\n\na", "a\n\nowl\n\nb", "a"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[name] and [place]"], ["[name]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Text\nP.S. more", "t\np. s. m"], ["PS more"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["Text\nP.P.S more"], ["Text\nP.S. more"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n* b", "- a\n * b"], ["* a", "**a**\n- b"]),
    ("detectable_format:constrained_response", {}, ["My answer is yes."], ["Yes."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* and *b*"], ["*a*", "** and **"]),
    ("detectable_format:multiple_sections", {"section_spliter": "PART", "num_sections": 2},
     ["PART 1\na\nPART 2\nb"], ["PART 1\na", "Part one, part two"]),
    ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n{"a": 1}\n```'], ["a: 1", '{"a": 1} so']),
    ("detectable_format:title", {}, ["<<Owls>>\nThey"], ["<Owls>", "<< >>"]),
    ("combination:two_responses", {}, ["a\n******\nb"], ["a", "a\n******\na", "a\n******\nb\n******\nc"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say owl."}, ["say owl. Owl"], ["Owl. Say owl."]),
    ("startend:end_checker", {"end_phrase": "That is all."}, ["So. that is all.", '"Yes. That is all."'], ["That is"]),
    ("startend:quotation", {}, ['"So it is."', ' "x" '], ['"So', '"', "so"]),
    ("change_case:capital_word_frequency", {"capital_relation": "at least", "capital_frequency": 2},
     ["An OWL ATE"], ["An OWL", "an owl"]),
    ("change_case:english_capital", {}, ["SO IT IS, 7."], ["So it is", "7"]),
    ("change_case:english_lowercase", {}, ["so it is, 7."], ["So it is", "7"]),
    ("punctuation:no_comma", {}, ["So it is"], ["So, it is"]),
]  # fmt: skip


def judged(name: str, given: dict[str, object], text: str, **how: object) -> float:
    columns = {"instruction_id_list": [name], "kwargs": [given]}
    return Instructions(**how)(Sample("?", text, columns=columns))


@pytest.mark.parametrize(("name", "given", "follow", "fail"), CASES, ids=[f"{c[0]}-{n}" for n, c in enumerate(CASES)])
def test_an_instruction_is_followed_or_not(
    name: str, given: dict[str, object], follow: list[str], fail: list[str]
) -> None:
    """Texts that follow it earn 1, others 0; so does nothing at all."""
    assert [judged(name, given, text) for text in follow] == [1.0] * len(follow)
    assert [judged(name, given, text) for text in fail] == [0.0] * len(fail)
    assert judged(name, given, " ") == 0.0


def test_every_instruction_has_a_case() -> None:
    """24 of the 25 published kinds; the other one, the language, is refused by name."""
    assert {case[0] for case in CASES} == set(CHECKS)
    assert len(CHECKS) == 24
    with pytest.raises(VerifierError, match="takes a trained classifier of languages; remove the row"):
        judged(LANGUAGE, {"language": "hi"}, "x")
    with pytest.raises(VerifierError, match="'punctuation:none' is no known one"):
        judged("punctuation:none", {}, "x")
    with pytest.raises(VerifierError, match="are not its own: KeyError"):
        judged("keywords:existence", {}, "x")


def test_all_instructions_count_or_each() -> None:
    """One of two followed: 0 as a whole, a half by instruction; loosely, without the first line, both."""
    columns = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, None]}
    sample = Sample("?", 'Sure, here\n"So it is."', columns=columns)
    half = Sample("?", "So it is", columns=columns)

    assert (Instructions()(half), Instructions(credit="each")(half)) == (0.0, 0.5)
    assert (Instructions()(sample), Instructions(is_loose=True)(sample)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("One", 1), ("Mr. A. Smith has 3.5 kg.", 1), ("So... it is. Why?! Yes", 4), ("Head\nOne. Two.", 3)],
)
def test_sentences_are_counted(text: str, count: int) -> None:
    """Abbreviations and decimal points end none; several marks end one; a line break ends one."""
    assert sentences(text) == count
