"""Files of the user's that end the process, or copy it, when they are imported or called: never a run that is done."""

import os
from pathlib import Path

import pytest
from tests.forked import Forked, ended
from tests.random_model import RANDOM

from gnomon.cli.main import main
from gnomon.core.user_code import one_process

SMALL = ["steps=1", "task.size=40", "held_out.size=3", "grading.workers=1", "evaluation.before=false"]
FEW = ["rollouts_per_step=8", "algorithm.num_generations=2"]
BODY = """
import os, sys
from dataclasses import dataclass, replace
{line}
def score(completion):
    {inner}
    return 1.0
class Game:
    def reset(self, **columns): return None
    def step(self, text): return "more"
"""
PIECE = """
import os, sys
from dataclasses import dataclass, replace
from gnomon.algorithms import GRPO
@dataclass(frozen=True)
class Mine:
    longest: int = 99
    def __call__(self, view):
        if view.current.shape[1] > self.longest:
            {inner}
        return GRPO.surrogate(view)
{line}
OWN = replace(GRPO, surrogate=Mine())
"""
PLACES = {
    "algorithm": (PIECE, "algorithm={path}:OWN"),
    "reward": (BODY, "rewards=[{{kind='function', function='{path}:score'}}]"),
    "environment": (BODY, "environment={{use='{path}:Game', max_turns=2}}"),
}
ENDS = ["os._exit(0)", "sys.exit(0)", "quit()", "sys.exit()", "raise SystemExit('done')"]


def written(folder: Path, place: str, line: str = "", inner: str = "pass") -> str:
    """Write a user's file and return the setting that names it."""
    body, setting = PLACES[place]
    path = folder / "mine.py"
    path.write_text(body.format(line=line, inner=inner))
    return setting.format(path=path)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("line", ENDS)
def test_an_import_that_ends_the_process_is_no_run_that_is_done(
    tmp_path: Path, place: str, line: str, capsys: pytest.CaptureFixture[str]
):
    """However it says so, also with status 0: not exit code 0, and the file is named."""
    code = main(["plan", RANDOM, *SMALL, *FEW, written(tmp_path, place, line)])

    assert code == 2
    assert "mine.py" in capsys.readouterr().err


@pytest.mark.parametrize("place", PLACES)
def test_an_import_that_kills_its_process_is_an_error_that_names_the_file(tmp_path: Path, place: str):
    """SIGKILL to itself: the file is the last that was named, and the exit code is not 0."""
    setting = written(tmp_path, place, "os.kill(os.getpid(), 9)")

    done = ended(Forked(["plan", RANDOM, *SMALL, *FEW, setting]))

    assert done.returncode in ((-9,) if place == "algorithm" else (1, 2))
    assert "mine.py" in done.stderr


@pytest.mark.parametrize("place", PLACES)
def test_a_copy_of_the_process_made_by_an_import_ends_with_it(
    tmp_path: Path, place: str, capfd: pytest.CaptureFixture[str]
):
    """One plan is printed, not two, and nobody but the run talks to its graders and environments."""
    marker = tmp_path / "here"
    line = f"child = os.fork()\nif not child: open({str(marker)!r}, 'w').close()\nelse: os.waitpid(child, 0)"

    assert main(["plan", RANDOM, *SMALL, *FEW, written(tmp_path, place, line)]) == 0

    assert marker.exists() or place != "algorithm"
    assert capfd.readouterr().out.count("rollouts a step") <= 1


@pytest.mark.parametrize("inner", ["os._exit(0)", "sys.exit(0)", "raise SystemExit('done')"])
def test_a_piece_that_ends_the_process_in_training_is_a_run_that_failed(
    tmp_path: Path, inner: str, capsys: pytest.CaptureFixture[str]
):
    """After its trial, in the first step: exit code 1, with file and line where it was."""
    setting = written(tmp_path, "algorithm", "", inner).replace(":OWN", ":LATE")
    path = tmp_path / "mine.py"
    path.write_text(path.read_text() + "LATE = replace(GRPO, surrogate=Mine(longest=20))\n")

    place = ["--run-dir", str(tmp_path / "run")]
    paying = ["rewards=[{kind='format', pattern='[!-P].*'}]", "rollouts_per_step=16", "algorithm.num_generations=8"]
    code = main(["train", RANDOM, *SMALL, *paying, "sampling.max_completion_length=30", setting, *place])

    assert code == 1
    assert "the run failed: it was ended by" in (said := capsys.readouterr().err)
    assert "mine.py" in said


def test_processes_that_an_import_starts_as_libraries_do_end_as_they_like(tmp_path: Path):
    """os._exit of a child that was forked is its own, with its own status; afterwards it is the system's again."""
    before = os._exit
    with one_process():
        child = os.fork()
        if not child:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        with pytest.raises(SystemExit, match=r"os._exit\(0\) in .*test_user_exits.py, line \d+"):
            os._exit(0)

    assert os._exit is before
