"""One live line on a terminal, a plain line a step elsewhere."""

import io
import os
import re
import subprocess
import sys
import time
from typing import Any

import pyte
import pytest

from gnomon.records.console import Console, duration

VALUES = {"rollout/reward_mean": 0.43219, "tokens/generated": 1000.0, "time/step_seconds": 2.0}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain(**changes: Any) -> tuple[Console, io.StringIO, Clock]:
    """Return a console whose stream is a log file."""
    stream, clock = io.StringIO(), Clock()
    return Console(stream=stream, clock=clock, **changes), stream, clock


def test_a_step_says_reward_speed_and_time_left():
    """1000 tokens in 2 s are 500 tokens/s; 1 of 100 steps in 2 s leaves 99 * 2 s = 3m 18s."""
    console, stream, clock = plain(steps=100)
    clock.now = 2.0
    console.step(1, VALUES)

    assert re.fullmatch(r"\d\d:\d\d:\d\d  step 1/100  reward 0\.432  500 tokens/s  3m 18s left\n", stream.getvalue())


@pytest.mark.parametrize("seconds", [0.1, 10.0, 40.0])
def test_a_log_file_gets_one_line_a_step(seconds: float):
    """Steps of any length, with an open phase that counts within each: no step loses its line to a phase."""
    console, stream, clock = plain(steps=24)
    for done in range(1, 25):
        with console.phase("answering", total=8, is_brief=True) as phase:
            for _ in range(8):
                clock.now += seconds / 8
                phase.advance()
        console.step(done, VALUES)

    assert re.findall(r"step (\d+)/", stream.getvalue()) == [str(done) for done in range(1, 25)]


def test_time_left_of_a_resumed_run_counts_this_session_alone():
    """Resumed at 90 of 100 and one step in 3 s: 9 steps are 27 s."""
    console, stream, clock = plain()
    clock.now = 500.0
    console.start(100, first=90)
    clock.now = 503.0
    console.step(91, VALUES)

    assert "27s left" in stream.getvalue()


def test_the_last_evaluation_stays_in_the_line():
    """It is said once, and shown with every step after it."""
    console, stream, _ = plain(steps=2)
    console.evaluated("0.460 [0.400, 0.520]")
    console.step(1, VALUES)

    assert re.sub(r"\d\d:\d\d:\d\d  ", "", stream.getvalue()).splitlines() == [
        "evaluation: 0.460 [0.400, 0.520]",
        "step 1/2  reward 0.432  500 tokens/s  0s left  evaluation 0.460 [0.400, 0.520]",
    ]


def test_a_long_phase_reports_as_it_goes_and_at_its_end():
    """200 prompts at 1 s: a line every 30 s with what is left, and one at the end."""
    console, stream, clock = plain()
    with console.phase("evaluating", total=200) as phase:
        for _ in range(200):
            clock.now += 1.0
            phase.advance()
    lines = stream.getvalue().splitlines()

    assert lines[0] == "evaluating  30/200  2m 50s left  (30s)"
    assert len(lines) == 7
    assert lines[-1] == "evaluating: 3m 20s"


def test_a_quick_phase_is_not_worth_a_line():
    """What takes less than a second leaves no trace in a log, nor does what asks for none."""
    console, stream, clock = plain()
    with console.phase("checking"):
        pass
    with console.phase("answering", is_brief=True):
        clock.now += 20

    assert stream.getvalue() == ""


def test_a_phase_that_fails_passes_its_error_on():
    """The error comes out, and the phase is no longer shown."""
    console, stream, _ = plain()
    with pytest.raises(KeyError, match="x"), console.phase("loading"):
        raise KeyError("x")
    console.say("on")

    assert stream.getvalue() == "on\n"


def test_a_terminal_gets_a_live_line_below_the_messages(monkeypatch: pytest.MonkeyPatch):
    """The line is redrawn in place; warnings stand above it; closing twice is harmless."""
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Console(steps=10, stream=stream) as console:
        with console.phase("loading model"):
            console.warn("wandb failed and is off")
        console.step(1, VALUES)
        console.close()
    console.say("after the end")
    shown = stream.getvalue()

    assert "loading model" in shown
    assert "warning: wandb failed and is off" in shown
    assert "step 1/10  reward 0.432" in shown
    assert "\x1b[2K" in shown
    assert shown.endswith("\x1b[?25hafter the end\n")


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch):
    """No control sequence goes where none is understood."""
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Console(steps=2, stream=stream) as console:
        console.step(1, VALUES)

    assert "\x1b" not in stream.getvalue()


def test_markup_in_a_message_is_text(monkeypatch: pytest.MonkeyPatch):
    """Square brackets of an answer or an interval are shown, not obeyed."""
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Console(steps=2, stream=stream) as console:
        console.say("[red]0.46[/red] [0.4, 0.5]")

    assert "[red]0.46[/red] [0.4, 0.5]" in stream.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (59.6, "1m 00s"), (3599.7, "1h 00m"), (90_000, "25h 00m")])
def test_durations_round_before_they_are_split(seconds: float, text: str):
    """59.6 seconds are a minute, not 60 seconds."""
    assert duration(seconds) == text


def test_sizes_are_counted_in_their_unit():
    """Half of 2 GiB in 30 s: 1.0 of 2.0 GiB, 30 s left."""
    console, stream, clock = plain()
    with console.phase("copying", 2 << 30, "bytes") as phase:
        clock.now += 30.0
        phase.advance(1 << 30)
        clock.now += 30.0

    assert stream.getvalue().splitlines() == ["copying  1.0/2.0 GiB  30s left  (30s)", "copying: 1m 00s"]


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_what_a_message_would_do_to_a_terminal_is_written_out(term: str, monkeypatch: pytest.MonkeyPatch):
    """An error that a user's tool raised, a model's name: no escape of theirs is obeyed, live or plain."""
    monkeypatch.setenv("TERM", term)
    stream = Terminal()
    with Console(steps=2, stream=stream) as console, console.phase("loading a\x1b]0;title\x07b"):
        console.warn("it said \x1b[2J and \u202emore")
    shown = stream.getvalue()

    assert "it said \\x1b[2J and \\u202emore" in shown
    assert "\x1b]0;" not in shown
    assert "\x1b[2J" not in shown


def test_what_is_being_done_stands_below_the_line_of_steps(monkeypatch: pytest.MonkeyPatch):
    """On a terminal two lines: the steps, and the open phases, the outer one first, without those of a moment."""
    monkeypatch.setenv("TERM", "xterm")
    stream, clock = Terminal(), Clock()
    with Console(steps=9, stream=stream, clock=clock) as console:
        console.step(3, VALUES)
        with console.phase("evaluating", 20), console.phase("verifying"):
            clock.now += 1
            with console.phase("a moment"):
                console.close()
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).splitlines()]

    assert any(line.startswith("step 3/9  reward 0.432") for line in lines)
    assert "evaluating  0/20  (1s)  ·  verifying  (1s)" in lines


def test_a_terminal_is_left_clean_when_there_were_no_steps(monkeypatch: pytest.MonkeyPatch):
    """A phase of a moment before a result: nothing of it stays, not even an empty line."""
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Console(stream=stream) as console, console.phase("loading libraries", is_brief=True):
        time.sleep(0.9)
    screen = pyte.Screen(80, 5)
    pyte.Stream(screen).feed(stream.getvalue().replace("\n", "\r\n"))

    assert "loading libraries" in stream.getvalue()
    assert "".join(screen.display).strip() == ""
    assert (screen.cursor.y, screen.cursor.x) == (0, 0)


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("os.dup2(os.open('/dev/full', os.O_WRONLY), 2)", 0),
        ("os.dup2(os.open('/dev/null', os.O_RDONLY), 2)", 0),
        ("os.close(2)", 0),
        ("sys.stderr.buffer.close()", 0),
        ("sys.stderr.detach()", 0),
        ("ours, theirs = os.pipe(); os.close(ours); os.dup2(theirs, 2)", 1),
    ],
)
def test_a_stream_that_takes_nothing_more_ends_no_run(how: str, status: int):
    """A full disk below the log, or a stream that somebody closed, costs the lines, and what others print there later.
    A pipe without a reader ends the process, as it ends any program."""
    code = f"import os, sys\nfrom gnomon.records.console import Console\nconsole = Console(steps=2)\n{how}\n"
    code += "console.say('one')\nconsole.step(1, {})\nprint('two', file=sys.stderr, flush=True)\nprint('done')"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == ((0, "done\n") if status == 0 else (1, ""))


def test_a_terminal_that_goes_away_takes_nobody_s_standard_error_along():
    """Live lines hold standard error; with their terminal gone, what others print goes nowhere and fails nowhere."""
    code = "import os, pty, sys\nours, theirs = pty.openpty()\nos.dup2(theirs, 2)\nos.close(theirs)\n"
    code += (
        "from gnomon.records.console import Console\nconsole = Console(steps=2)\nconsole.step(1, {})\nos.close(ours)\n"
    )
    code += "console.say('one')\nconsole.step(2, {})\nprint('two', file=sys.stderr, flush=True)\nprint('done')"

    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False, env=os.environ | {"TERM": "xterm"}
    )

    assert (done.returncode, done.stdout) == (0, "done\n")
