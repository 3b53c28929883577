"""A wall clock that is set back or forward while a run trains changes no number, time limit or budget of it."""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.random_model import RANDOM
from tests.training.runs import gnomon, same, trace

import gnomon as package
from gnomon.records.jsonl import read_rows
from gnomon.records.reading import RunRecord

SOURCE = Path(__file__).with_name("jumping_clock.c")
TINY = [
    "rewards=[{kind='format', pattern='[!-P].*'}]", "task.size=40", "rollouts_per_step=8", "held_out.size=4",
    "grading.workers=1", "algorithm.num_generations=4", "checkpoints.every=2",
]  # fmt: skip
# Where the source asks what time it is on the wall, and why that bounds nothing.
WALL = {
    "insight/watch/watcher.py": "the age of files, which have that clock's times; it is never below 0",
    "records/sinks.py": "when a step was logged, a field that MLflow reads",
    "records/run_card.py": "when a session started, for people",
    "records/directory.py": "a new run's name, and since when one is at work, for people",
    "rollouts/chat_apis.py": "when an answer was made, a field that clients read",
    "tasks/verifiers_env.py": "a field that another library reads, from a start that it wrote itself",
}


@pytest.fixture(scope="module")
def jumping(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which the wall clock of a process jumps by a day at each look."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler, to put a clock before the system's")
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(library), "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    look = "import time; seen = [time.time() for _ in range(9)]; print(seen == sorted(seen), max(seen) - min(seen))"
    said = subprocess.run([sys.executable, "-c", look], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split()[0] == "False"
    assert float(said.stdout.split()[1]) > 86_400
    return environment


def trained(environment: dict[str, str], run: Path, *more: str) -> tuple[str, float]:
    """Train in a process of its own; return what it said, and the seconds that passed."""
    began = time.monotonic()
    command = gnomon("train", RANDOM, *TINY, *more, "--run-dir", str(run))
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr, time.monotonic() - began


@pytest.mark.slow
def test_a_run_under_a_jumping_clock_is_the_same_run(jumping: dict[str, str], tmp_path: Path):
    """Bit for bit, with every duration between 0 and what passed: nothing hung, and nothing was cut off."""
    plain = {name: value for name, value in jumping.items() if name != "LD_PRELOAD"}
    trained(plain, tmp_path / "plain", "steps=4")
    _, passed = trained(jumping, tmp_path / "jumping", "steps=4")

    same(trace(tmp_path / "jumping", 4), trace(tmp_path / "plain", 4))
    rows = [*read_rows(tmp_path / "jumping" / "metrics.jsonl"), *read_rows(tmp_path / "jumping" / "evaluations.jsonl")]
    seconds = [value for row in rows for name, value in row.items() if "seconds" in name]
    assert len(seconds) > 40
    assert all(0 <= value <= passed for value in seconds)


@pytest.mark.slow
def test_a_budget_of_seconds_is_of_seconds_that_passed(jumping: dict[str, str], tmp_path: Path):
    """Not spent by a day forward, and not refilled by a day back; nor does `gnomon watch` see a run of the future."""
    run = tmp_path / "run"
    _, passed = trained(jumping, run, "steps=100000", "budget.seconds=2", "checkpoints.every=0")
    record = RunRecord(run)
    spent = [row["time/step_seconds"] for row in record.metrics()]
    looked = subprocess.run(gnomon("watch", str(run), "--once", "--json"), env=jumping, capture_output=True, text=True)

    assert 2 <= sum(spent) < 2 + 2 * max(spent)
    assert sum(spent) <= passed
    assert looked.returncode == 0, looked.stderr
    json.loads(looked.stdout)


@pytest.mark.slow
def test_a_verifier_that_hangs_is_ended_in_time(jumping: dict[str, str], tmp_path: Path):
    """After its own seconds, neither at once nor a day later; SIGTERM is answered as ever."""
    (tmp_path / "score.py").write_text(
        "import time\ndef score(completion, **more):\n"
        "    if sum(map(ord, completion)) % 11 == 0:\n        time.sleep(1000)\n    return 1.0\n"
    )
    reward = f"rewards=[{{kind='function', function='{tmp_path}/score.py:score'}}]"
    run, more = tmp_path / "run", [reward, "grading.deadline_seconds=0.5", "grading.max_error_fraction=0.9"]
    program = subprocess.Popen(
        gnomon("train", RANDOM, *TINY, "steps=100000", *more, "--run-dir", str(run)),
        env=jumping,
        stderr=subprocess.PIPE,
    )
    until = time.monotonic() + 120
    while sum(row.get("rollout/error_fraction", 0) > 0 for row in read_rows(run / "metrics.jsonl")) < 2:
        assert program.poll() is None, program.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    program.send_signal(signal.SIGTERM)
    program.communicate(timeout=60)

    assert program.returncode == 143
    rows = list(read_rows(run / "metrics.jsonl"))
    hung = [row for row in rows if row["rollout/error_fraction"] > 0]
    assert all(row["rollout/error_fraction"] < 1 for row in rows)
    assert all(0.4 < row["time/generate_seconds"] + row["time/grade_seconds"] < 60 for row in hung)


def test_no_time_limit_asks_the_clock_on_the_wall():
    """In the whole source it is read in these places alone, each with its reason."""
    root = Path(package.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and (
                (
                    isinstance(node.value, ast.Name)
                    and (node.value.id, node.attr) in {("time", "time"), ("time", "time_ns")}
                )
                or (node.attr in ("now", "utcnow", "today") and ast.unparse(node.value).endswith(("datetime", "date")))
            ):
                found.add(str(path.relative_to(root)))
    assert found == set(WALL)
