"""Rows with fewer columns than others are tried before anything is trained, by the user's own reward."""

import json
import re
from pathlib import Path

import pytest

from gnomon.cli.main import main

SMALL = ["held_out.size=2", "rollouts_per_step=8", "steps=0", "grading.workers=1"]


def plan(folder: Path, reward: str, lacking: tuple[int, ...], nothing: tuple[int, ...] = ()) -> int:
    """Plan a run on forty rows, of which some have no level and some none that holds anything."""
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "level": n % 3} for n in range(1, 41)]
    for place in lacking:
        del rows[place]["level"]
    for place in nothing:
        rows[place]["level"] = None  # type: ignore[assignment]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(reward)
    own = f"rewards=[{{kind='function',function='{folder}/mine.py:score'}}]"
    return main(["plan", "tiny", *SMALL, f"task={folder}/rows.jsonl", own])


FORMS = {
    "ours": "def score(completion, level):\n    return float(len(completion) % 2)\n",
    "trl": "def score(completions, level, **k):\n    return [float(len(c) % 2) for c in completions]\n",
    "verl": "def score(data_source, solution_str, ground_truth, extra_info, level):\n    return 1.0\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_row_without_a_column_that_the_reward_needs_is_named(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
):
    """Wherever it stands: the first of its kind, how many there are, and the column, with exit code 2."""
    assert plan(tmp_path, FORMS[form], (9, 10, 11, 12)) == 2

    said = capsys.readouterr().err
    assert re.search(r"cannot judge row 1\d \(of [2-4] with its columns\): .*needs level, which is no column of", said)
    assert "Traceback" not in said


@pytest.mark.parametrize("places", [{"lacking": (9, 10)}, {"lacking": (), "nothing": (9, 10)}])
def test_a_row_on_which_the_reward_always_fails_is_said(
    tmp_path: Path, places: dict[str, tuple[int, ...]], capsys: pytest.CaptureFixture[str]
):
    """What it reads itself can be lacking for a reason, so that is a warning with the row."""
    reads = "def score(completion, **columns):\n    return float(columns['level'] > 1)\n"

    assert plan(tmp_path, reads, **places) == 0
    assert "fails on each answer that was tried to row 10 (of 2 with its columns): " in capsys.readouterr().err


def test_a_default_value_is_no_lack(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A reward that can do without is asked nothing more."""
    assert plan(tmp_path, "def score(completion, level=1):\n    return float(len(completion) % 2)\n", (9, 10)) == 0
    assert "with its columns" not in capsys.readouterr().err


def test_a_row_with_every_column_is_tried_though_the_first_have_fewer(tmp_path: Path):
    """A reward of some rows returns None for the others, and those may stand first."""
    some = (
        "def score(completions, level, **k):\n"
        "    return [v if v is None else float(len(c)) for v, c in zip(level, completions)]\n"
    )

    assert plan(tmp_path, some, (), nothing=tuple(range(30))) == 0
