"""Metrics rows: whole or absent, JSON whatever the numbers."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gnomon.records.jsonl import JsonLines, JsonlSink, drop_after, read_rows

SOURCE = Path(__file__).resolve().parents[2] / "src"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def write(path: Path, steps: range) -> None:
    """Write one row for each step."""
    sink = JsonlSink(path)
    for step in steps:
        sink.write(step, {"rollout/reward_mean": step / 2})
    sink.close()


def steps(path: Path) -> list[int]:
    """Return the steps of the rows."""
    return [row["step"] for row in read_rows(path)]


def test_a_row_has_step_seconds_and_names(tmp_path: Path):
    """One object per step, and the seconds that the run has worked."""
    clock = Clock()
    sink = JsonlSink(tmp_path / "m.jsonl", clock=clock)
    clock.now += 2.5
    sink.write(1, {"loss/policy": -0.1})
    sink.close()

    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1, "seconds": 2.5, "loss/policy": -0.1}\n'


def test_seconds_go_on_after_a_resume(tmp_path: Path):
    """A second session adds to the first's 2.5 seconds; the time in between does not count."""
    clock, path = Clock(), tmp_path / "m.jsonl"
    for step in (1, 2):
        sink = JsonlSink(path, clock=clock)
        clock.now += 2.5
        sink.write(step, {})
        sink.close()
        clock.now += 1000

    assert [row["seconds"] for row in read_rows(path)] == [2.5, 5.0]


def test_numbers_that_are_not_finite_stay_visible_in_valid_json(tmp_path: Path):
    """NaN and infinities are null, and their names are listed."""
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write(1, {"a": float("nan"), "b": 1.0, "c": float("-inf")})
    sink.close()
    row = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=pytest.fail)

    assert (row["a"], row["b"], row["c"], row["not_finite"]) == (None, 1.0, None, ["a", "c"])


def test_a_row_is_there_at_once(tmp_path: Path):
    """A reader sees a row before the file is closed, and a killed run keeps it."""
    sink = JsonlSink(tmp_path / "m.jsonl", is_synced=True)
    sink.write(1, {})

    assert steps(tmp_path / "m.jsonl") == [1]
    sink.close()


def test_a_resume_drops_later_rows_and_a_torn_line(tmp_path: Path):
    """Rows 1 to 5 and half a row 6, resumed at 3: rows 1 to 3 stay, byte for byte."""
    path = tmp_path / "m.jsonl"
    write(path, range(1, 6))
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:3])
    with open(path, "ab") as file:
        file.write(b'{"step": 6, "sec')
    drop_after(path, 3)

    assert path.read_bytes() == kept


def test_a_damaged_line_in_the_middle_costs_only_itself(tmp_path: Path):
    """Later rows are kept when an earlier one cannot be read, or is no object."""
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\x00ep": \n[2]\n{"step": 3}\n')
    drop_after(path, 5)

    assert steps(path) == [1, 3]


def test_nothing_to_drop_touches_nothing(tmp_path: Path):
    """A complete file keeps its inode, and a missing one stays missing."""
    path = tmp_path / "m.jsonl"
    write(path, range(3))
    before = os.stat(path)
    drop_after(path, 2)
    drop_after(tmp_path / "none.jsonl", 2)

    assert os.stat(path).st_ino == before.st_ino
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize("torn", [b'{"step": 9, "x', b'{"step": 9, "x": "' + b"y" * 200_000])
def test_opening_cuts_a_torn_line(tmp_path: Path, torn: bytes):
    """A new row never ends up on the line that a crash tore off, however long that is."""
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn)
    write(path, range(2, 3))

    assert steps(path) == [1, 2]


FULL = """
import resource, sys
from pathlib import Path
from gnomon.records.jsonl import JsonLines, read_rows
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
said = []
lines = JsonLines(Path(sys.argv[1]), said.append)
for step in range(9):
    lines.append({"step": step, "text": "x" * 20})
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
lines.append({"step": 9})
lines.close()
print([row["step"] for row in read_rows(Path(sys.argv[1]))], lines.lost, len(said), "goes on" in said[0])
"""


def test_a_full_disk_costs_rows_and_not_the_run(tmp_path: Path):
    """With room for 100 bytes, 2 rows of 44 fit; the others are counted, said once, and leave no torn line."""
    command = [sys.executable, "-c", FULL, str(tmp_path / "m.jsonl")]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=SOURCE, check=True)

    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert ran.stdout == "[0, 1, 9] 7 1 True\n"


def test_rows_are_any_json(tmp_path: Path):
    """Evaluations are objects in objects, with text in any script, half a character, and numbers that are none."""
    lines = JsonLines(tmp_path / "e.jsonl")
    lines.append({"step": 0, "scores": {"exact": {"mean": 0.5}}, "text": "né\n\u2028\ud800", "x": (float("nan"),)})
    lines.close()

    (row,) = read_rows(tmp_path / "e.jsonl")
    assert (row["scores"]["exact"]["mean"], row["text"], row["x"]) == (0.5, "né\n\u2028\ud800", [None])
