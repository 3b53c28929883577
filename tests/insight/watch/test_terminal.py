"""`gnomon watch` as a person starts it: a program on a terminal, its screen read back, its keys pressed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.insight.made_runs import fingerprint, made_run
from tests.insight.terminal import Terminal
from tests.random_model import RANDOM

KEYS = ("q quit", "s samples", "f findings", "? help")
_TRAIN = "import sys; from gnomon.cli.main import main; sys.exit(main())"
_TINY = ("task.size=40", "rollouts_per_step=8", "algorithm.num_generations=4", "held_out.size=4", "grading.workers=1")
_SOURCES = str(Path(__file__).resolve().parents[3] / "src")


def started(run: Path, *overrides: str) -> "subprocess.Popen[bytes]":
    """Start a tiny run in a process of its own."""
    command = [sys.executable, "-c", _TRAIN, "train", RANDOM, *_TINY, *overrides, "--run-dir", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _SOURCES}
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)


def frame(terminal: Terminal) -> list[str]:
    """Return the lines of a screen when the keys stand in the last one."""
    shown = terminal.wait_until(lambda shown: all(key in shown.split("\n")[-1] for key in KEYS))
    return shown.split("\n")


def test_a_stopped_run_on_a_screen_of_80_by_24(tmp_path: Path):
    """Seen, walked through by keys, left by q: exit code 0, the terminal as it was, the run as it was."""
    run = made_run(tmp_path / "run", done=12)
    before = fingerprint(run)
    with Terminal(["watch", str(run)]) as terminal:
        terminal.wait_for("■ stopped", "gnomon resume", "entropy", "tokens/s", "answer 7")
        frame(terminal)
        for key, text in (("s", "of 8 answers of step 12"), ("f", "no findings so far"), ("c", "gradient")):
            terminal.press(key)
            terminal.wait_for(text)
        terminal.press("\t")
        terminal.wait_for("of 8 answers of step 12")
        terminal.press("\x1b[D")
        terminal.wait_for("gradient", gone=["of 8 answers"])
        terminal.press("?")
        terminal.wait_for("end the view; the run is not touched")
        terminal.press("q")
        assert terminal.end() == 0

    assert b"\x1b[?1049l" in terminal.received
    assert b"\x1b[?25h" in terminal.received
    assert fingerprint(run) == before


def test_hostile_answers_reach_no_terminal(tmp_path: Path):
    """Escapes of an answer are text on the screen: nothing is cleared, no title set, no bell rung."""
    run = made_run(tmp_path / "run", done=1)
    path = run / "rollouts" / "step-000001.jsonl"
    path.write_text(path.read_text().replace("answer 7", "\\u001b[2J\\u001b]0;owned\\u0007\\u009b31m"))
    with Terminal(["watch", str(run)], 120, 40) as terminal:
        terminal.press("s")
        terminal.wait_for("\\x1b[2J\\x1b]0;owned\\x07\\x9b31m")
        terminal.press("q")
        assert terminal.end() == 0

    assert b"]0;owned" not in terminal.received.replace(b"\\x1b]0;owned", b"")
    assert "owned" not in terminal.screen.title


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_leaves_the_terminal_in_order(tmp_path: Path, number: signal.Signals):
    """Ended from outside: the screen before comes back, and the cursor."""
    run = made_run(tmp_path / "run", done=1)
    with Terminal(["watch", str(run)]) as terminal:
        terminal.wait_for("step 1/20")
        terminal.program.send_signal(number)
        assert terminal.end() == 0

    assert b"\x1b[?1049l" in terminal.received


def test_a_dumb_terminal_gets_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """TERM=dumb: no control sequence at all."""
    run = made_run(tmp_path / "run", done=20)
    environment = {**os.environ, "TERM": "dumb"}
    ran = subprocess.run(
        [sys.executable, "-c", _TRAIN, "watch", str(run)], capture_output=True, text=True, env=environment, check=True
    )

    assert ran.stdout.endswith("finished after step 20\n")
    assert "\x1b" not in ran.stdout


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Path]:
    """A real run that goes on for longer than any test; it is killed in the end."""
    run = tmp_path / "run"
    program = started(run, "steps=100000", "checkpoints.every=5", "evaluation.every=20")
    yield run
    program.kill()
    program.wait()


@pytest.mark.slow
def test_a_real_run_from_before_its_beginning_to_after_its_death(training: Path):
    """Watched before it is there: it comes, it goes on, the window changes its size, it is killed with SIGKILL, and
    the view says so and how to go on; looked at while nobody works, nothing of it changes.
    """
    with Terminal(["watch", str(training), "--wait", "--interval", "0.3"]) as terminal:
        terminal.wait_for("● live", "/100000", "answering", "best", "worst")
        frame(terminal)
        terminal.resize(120, 40)
        terminal.wait_until(lambda shown: "q quit" in shown.split("\n")[-1] and len(shown.split("\n")) == 40)
        terminal.wait_for("● live", "entropy", "evaluation")
        terminal.resize(80, 24)
        terminal.wait_until(lambda shown: "q quit" in shown.split("\n")[-1] and len(shown.split("\n")) == 24)
        os.kill(_worker(training), signal.SIGKILL)
        terminal.wait_for("■ stopped", "gnomon resume")
        before = fingerprint(training)
        time.sleep(1.0)
        terminal.press("s")
        terminal.wait_for("best  of 8 answers")
        terminal.press("q")
        assert terminal.end() == 0

    assert fingerprint(training) == before


def _worker(run: Path) -> int:
    from gnomon.records.directory import lock_owner

    owner = lock_owner(run)
    assert owner is not None
    return owner.pid


@pytest.mark.slow
def test_a_real_run_to_its_end_as_lines(tmp_path: Path):
    """--plain --wait beside a run of 8 steps: waits for it, says its steps, ends with it with exit code 0."""
    run = tmp_path / "run"
    with Terminal(["watch", str(run), "--plain", "--wait", "--interval", "0.2"], 160, 50) as terminal:
        program = started(run, "steps=8", "checkpoints.every=0")
        assert terminal.end() == 0
        assert program.wait() == 0
    said = terminal.received.decode()

    assert "not there yet" in said
    assert "step 8/8  reward" in said
    assert said.strip().endswith("finished after step 8")


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_is(tmp_path: Path):
    """Looked at live, once and as an object: the same files, of the same times."""
    run = tmp_path / "run"
    assert started(run, "steps=3").wait() == 0
    before = fingerprint(run)
    with Terminal(["watch", str(run)], 120, 40) as terminal:
        terminal.wait_for("✓ finished", "step 3/3", "100%")
        terminal.press("q")
        assert terminal.end() == 0
    for form in ("--once", "--json"):
        command = [sys.executable, "-c", _TRAIN, "watch", str(run), form]
        assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0

    assert fingerprint(run) == before
