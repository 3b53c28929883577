"""What training and held-out questions have in common beyond the identical ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.errors import ConfigError
from gnomon.tasks.arithmetic import ArithmeticTask
from gnomon.tasks.build import build_split, named_held_out
from gnomon.tasks.contamination import Overlap, Pair, overlap
from gnomon.tasks.question import ListDataset, Question
from gnomon.tasks.reasoning import ReasoningGymTask, spread
from gnomon.tasks.split import RESERVED, HeldOut

STORY = "A farmer has seven goats and sells three of them to a man who walks to the market every Monday morning"


def listed(name: str, *texts: str) -> ListDataset:
    return ListDataset(name, tuple(Question(f"{name}/{n}", text, text) for n, text in enumerate(texts)))


@pytest.mark.parametrize(
    ("asked", "trained", "is_same"),
    [
        ("What is 3 - 5?", "what is 3-5", True),
        ("Who's there?", "whos there", False),
        ("What is 3 - 5?", "What is 3 + 5?", False),
        ("What is (1 + 2) * 3?", "What is 1 + 2 * 3?", False),
        ("What is 3.5 + 1?", "What is 35 + 1?", False),
        ("Say: yes.", "say yes", True),
    ],
)
def test_the_same_words_are_the_same_question(asked: str, trained: str, is_same: bool):
    """Case, spaces and prose punctuation are no difference; operators, brackets and decimal points are."""
    found = overlap(listed("t", "another", trained), listed("h", asked))

    assert found.same == ((Pair("h/0", "t/1"),) if is_same else ())
    assert bool(found.said) == is_same


def test_a_long_row_of_words_is_suspicious():
    """Two questions that end in another way share 13 words in a row; a third has a word changed every 8, and none."""
    words = STORY.split()
    mixed = " ".join(w if n % 8 else f"other{n}" for n, w in enumerate(words))
    found = overlap(listed("t", f"{STORY}. How many are left?"), listed("h", f"{STORY}: what remains?", mixed))

    assert (found.words, found.compared) == (13, 2)
    assert found.near == (Pair("h/0", "t/0"),)
    assert found.same == ()
    assert "1 of 2 held-out questions share 13 words in a row with a training question (h/0 and t/0)" in found.said[0]


def test_rows_are_as_long_as_most_questions():
    """95% of 40 questions of 9 words have at least 9; below 8 words nothing is compared but the whole."""
    nine = [f"{n} b{n} c d e f g h i" for n in range(40)]
    short = overlap(listed("t", "one two three"), listed("h", "one two three four"))

    assert overlap(listed("t", "x"), listed("h", *nine)).words == 9
    assert (short.words, short.compared, short.near) == (8, 0, ())


@pytest.mark.parametrize(("times", "is_near"), [(10, True), (11, False)])
def test_what_many_training_questions_say_is_a_template(times: int, is_near: bool):
    """A sentence in 11 training questions is how they are asked, not what; in 10 it may still be copies."""
    trained = listed("t", *(f"{STORY}, {n} of them" for n in range(times)))

    assert bool(overlap(trained, listed("h", f"{STORY} now")).near) == is_near


texts = st.lists(st.text("ab 1+-?", max_size=12), max_size=6)


@given(texts, texts)
def test_identical_questions_are_always_found(trained: list[str], asked: list[str]):
    """Whatever the texts: each held-out question that training asks word for word is named once."""
    found = overlap(listed("t", *trained), listed("h", *asked))

    identical = {f"h/{n}" for n, text in enumerate(asked) if text in trained}
    assert identical <= {pair.held_out for pair in found.same}
    assert found.held_out == len(asked)
    assert not {p.held_out for p in found.same} & {p.held_out for p in found.near}


def test_names_of_questions_cannot_speak_to_a_terminal():
    """An id with a control sequence is shown without it."""
    held = ListDataset("h", (Question("\x1b[2Jx", "one", "one"),))

    assert "\x1b" not in overlap(listed("t", "one"), held).said[0]


def test_a_split_knows_what_is_left_in_common():
    """Generated sums share none but identical questions, which training gives up."""
    split = build_split(ArithmeticTask(highest=9), HeldOut(size=20), lambda q: (1,))

    assert split.dropped > 0
    assert split.overlap == Overlap(held_out=20, words=8)


@pytest.mark.parametrize("task", [ArithmeticTask(seed=RESERVED[0]), ReasoningGymTask("gcd", seed=RESERVED[-1])])
def test_seeds_of_held_out_questions_cannot_be_trained_on(task: ArithmeticTask | ReasoningGymTask):
    """Otherwise one run would be evaluated on what another was trained on."""
    with pytest.raises(ConfigError, match="are kept for held-out questions"):
        build_split(task, HeldOut(size=5, seed=1), lambda q: (1,))


def test_a_generator_that_is_named_for_evaluation_has_the_held_out_seed():
    """The same questions as `held_out` asks by default; the first of them, whatever the number."""
    asked = named_held_out("chain_sum").questions()
    split = build_split(ReasoningGymTask("chain_sum"), HeldOut(size=3), lambda *_: (1,))

    assert [asked[i].text for i in range(3)] == [split.held_out[i].text for i in range(3)]


def test_items_of_held_out_seeds_are_no_training_seeds_items():
    """The generator's own seeds of 1,000 items of the held-out seed are none of 1,000 items of seeds 0 to 9,999."""
    start = spread(HeldOut().seed)

    assert min(abs(spread(seed) - start) for seed in range(10_000)) >= 1_000
