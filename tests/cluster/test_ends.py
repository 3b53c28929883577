"""However a run on a cluster ends, it says why, and leaves nothing behind (F11, F17)."""

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cluster.nodes import Others, others
from tests.cluster.running import SECONDS, ends_in_words, family, numbers, running, said_by, until_alone, until_step

from gnomon.records.checkpoints import Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LONG = ("steps=100000", "checkpoints.every=2", "evaluation.before=false")

ENDS = {
    "a rank is killed": ("ray::LearnerActor", signal.SIGKILL, "process [01] of the learner's 2 is gone .on 127.0.0.1"),
    "a rank stands still": (
        "ray::LearnerActor",
        signal.SIGSTOP,
        "process [01] of the learner's 2 stood still for 40 s",
    ),
    "the servers here die": ("raylet/raylet", signal.SIGKILL, "is gone|no engine is left|ended without a word"),
    "the head dies": ("gcs/gcs_server", signal.SIGKILL, "the head of the Ray cluster at .* is gone"),
    "the head stands still": ("gcs/gcs_server", signal.SIGSTOP, "has not answered for 30 s"),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_dies_or_stands_still_ends_the_run_in_words(name: str, tmp_path: Path):
    """With exit code 1, a typed error that says which and how, and no process left."""
    title, number, said = ENDS[name]
    folder = tmp_path / "run"
    with running(folder, *LONG) as program:
        until_step(folder, program)
        os.kill(numbers(program.pid, title)[-1], number)
        ends_in_words(folder, program, said)


def test_a_rank_that_dies_while_answers_are_awaited_ends_the_run(tmp_path: Path):
    """Nothing is asked of the learner, and the only engine draws nothing for ten minutes: it ends all the same."""
    folder = tmp_path / "run"
    with running(folder, *LONG, "engine.count=1", "engine.timeout_seconds=600") as program:
        until_step(folder, program)
        os.kill(numbers(program.pid, "ray::EngineActor")[0], signal.SIGSTOP)
        time.sleep(8)
        steps = (folder / "metrics.jsonl").read_text()
        os.kill(numbers(program.pid, "ray::LearnerActor")[-1], signal.SIGKILL)
        ends_in_words(folder, program, "process [01] of the learner's 2 is gone .on 127.0.0.1")

    assert (folder / "metrics.jsonl").read_text() == steps


@pytest.fixture
def kept() -> Iterator[Path]:
    """A folder for one run's temporary files, in a path that is short enough for its cluster's sockets."""
    with tempfile.TemporaryDirectory(prefix="k", dir="/tmp") as folder:
        yield Path(folder)


def test_a_run_that_is_killed_leaves_nothing(kept: Path, tmp_path: Path):
    """Soon after SIGKILL nobody of its cluster lives, and its folders are gone."""
    folder = tmp_path / "run"
    with running(folder, *LONG, environment={"TMPDIR": str(kept)}) as program:
        until_step(folder, program)
        assert list(kept.glob("gnomon-ray-*"))
        program.kill()
        program.wait()
        began = time.monotonic()
        left = until_alone(program.pid, SECONDS)
        print(f"alone after {time.monotonic() - began:.1f} s")
        assert left == {}
    until = time.monotonic() + 20
    while list(kept.glob("gnomon-*")) and time.monotonic() < until:
        time.sleep(0.2)
    assert list(kept.glob("gnomon-*")) == []


@pytest.mark.parametrize(
    ("number", "send"),
    [(signal.SIGTERM, os.kill), (signal.SIGTERM, os.killpg), (signal.SIGINT, os.killpg)],
    ids=["to the program", "to its group", "from the keyboard"],
)
def test_a_signal_stops_it_after_the_step_at_hand(
    number: signal.Signals, send: Callable[[int, int], None], tmp_path: Path
):
    """Whether it reaches the program alone or everybody in its group: a checkpoint is published all the same."""
    folder = tmp_path / "run"
    with running(folder, *LONG) as program:
        until_step(folder, program)
        send(program.pid, number)
        code = program.wait(SECONDS)
        left = until_alone(program.pid, 30)
    print(said_by(folder)[-600:])
    steps = len((folder / "metrics.jsonl").read_text().splitlines())

    assert code == 128 + number
    assert "go on with: gnomon resume" in said_by(folder)
    found = Checkpoints(folder / "checkpoints").newest()
    assert found is not None
    assert found.step == steps
    assert left == {}


@pytest.mark.parametrize("way", ["address", "client"])
def test_a_run_on_a_cluster_of_others_leaves_it_as_it_was(way: str, kept: Path, tmp_path: Path):
    """Killed, it leaves no actor there and no file here; the next run finds all places free."""
    with others(3, 4) as there:
        where = {"address": there.address, "client": there.client}[way]
        surroundings = {**there.environment, "TMPDIR": str(kept)}
        with running(tmp_path / "run", *LONG, cluster=where, environment=surroundings) as program:
            until_step(tmp_path / "run", program)
            assert actors(there)
            program.kill()
            program.wait()
            began = time.monotonic()
            while actors(there) and time.monotonic() - began < SECONDS:
                time.sleep(0.2)
            print(f"{way}: alone after {time.monotonic() - began:.1f} s")
            assert actors(there) == []
    assert list(kept.glob("gnomon-*")) == []
    assert "the run ended without a word" in said_by(tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_machine_that_is_gone_ends_the_run_in_words(number: signal.Signals, tmp_path: Path):
    """All of the second node's processes at once; the run says which rank or engines were there."""
    with others(3, 4) as there:
        layout = ("cluster.placement=spread", *LONG)
        with running(tmp_path / "run", *layout, cluster=there.address, environment=there.environment) as program:
            until_step(tmp_path / "run", program)
            second = family(there.nodes[1].pid)
            assert [line for line in second.values() if "ray::LearnerActor" in line]
            for one in second:
                os.kill(one, number)
            began = time.monotonic()
            code = program.wait(SECONDS)
            took = time.monotonic() - began
    print(f"{number.name}: {took:.1f} s\n{said_by(tmp_path / 'run')[-700:]}")

    assert code == 1
    said = said_by(tmp_path / "run")
    # Which it is depends on what the machine had to do when it stood still: answers, or the learner's part.
    rank = re.search(
        "process [01] of the learner's 2 (is gone|(stood still|gave no answer) for 40 s).*?pid ([0-9]+)", said
    )
    assert rank or (number is signal.SIGSTOP and "no engine is left to answer" in said), said
    if rank and number is signal.SIGSTOP:
        assert int(rank[3]) in second
    assert "is gone" not in said or re.search(r"what it wrote is in /\S+\.err on \S+", said)


def actors(there: Others) -> list[str]:
    """What gnomon has on the nodes."""
    kinds = ("ray::LearnerActor", "ray::EngineActor", "ray::GraderActor")
    return [line for node in there.nodes for line in family(node.pid).values() if line.startswith(kinds)]
