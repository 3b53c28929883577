"""Work says what it does and how far it is, however deep it lies, and every place that may take long does so."""

import ast
import io
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.insight.terminal import Terminal
from tests.random_model import RANDOM

from gnomon.core.progress import log_to, show_progress, track, use_progress
from gnomon.core.types import State
from gnomon.records.checkpoints import Checkpoints
from gnomon.records.console import Console
from gnomon.tasks.question import Question
from gnomon.tasks.split import disjoint, unique
from gnomon.training.api import export

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "gnomon"
PAGE = ROOT / "docs" / "watch.md"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """Questions of which each takes a second to make."""

    name = "slow"

    def __init__(self, clock: Clock, count: int) -> None:
        self.clock, self.count = clock, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Question:
        self.clock.now += 1.0
        return Question(str(index), f"{index}?", f"{index}?")


def test_without_a_listener_nothing_is_shown():
    """A library that is used from a program says nothing; the work is done all the same."""
    with show_progress("adding", total=2) as steps:
        steps.advance()
    assert list(track([1, 2], "adding", 2)) == [1, 2]


def test_the_latest_console_shows_it_and_the_one_before_comes_back():
    """Each text goes to one place, the innermost that listens."""
    said: list[str] = []
    with use_progress(log_to(said.append)), show_progress("outer"):
        with use_progress(log_to(lambda text: said.append(f"inner: {text}"))), show_progress("deep"):
            pass
        with show_progress("brief", is_brief=True), show_progress("after"):
            pass
    with show_progress("unseen"):
        pass

    assert said == ["outer ...", "inner: deep ...", "after ..."]


def test_an_error_ends_what_is_shown():
    """The phase of work that failed is over, and the console can go on."""
    stream = io.StringIO()
    with Console(stream=stream) as console:
        with pytest.raises(KeyError, match="x"), show_progress("loading"):
            raise KeyError("x")
        console.say("on")

    assert stream.getvalue() == "on\n"


def test_slow_questions_report_how_far_they_are_and_how_long_it_will_take():
    """100 questions of a second each: a line every 30 s, with the seconds that are left; then what it took."""
    clock, stream = Clock(), io.StringIO()
    with Console(stream=stream, clock=clock, every_seconds=30.0):
        unique(Slow(clock, 100))
    lines = stream.getvalue().splitlines()

    assert lines == [
        "comparing questions  30/100  1m 10s left  (30s)",
        "comparing questions  60/100  40s left  (1m 00s)",
        "comparing questions  90/100  10s left  (1m 30s)",
        "comparing questions: 1m 40s",
    ]


def test_work_inside_of_a_phase_leaves_no_line_of_its_own():
    """In a log the phase says how long all of it took; what it consisted of is said while it lasts."""
    clock, stream = Clock(), io.StringIO()
    slow = Slow(clock, 40)
    with Console(stream=stream, clock=clock) as console, console.phase("preparing tasks"):
        disjoint(slow, Slow(clock, 20))

    assert stream.getvalue().splitlines() == [
        "comparing questions  10/40  30s left  (10s)",
        "comparing questions  40/40  (40s)",
        "preparing tasks: 1m 00s",
    ]


def test_a_log_names_work_that_never_counts_while_it_lasts():
    """Two seconds into a phase without a count its name is in the log, before it has ended."""
    stream, clock = io.StringIO(), Clock()
    with Console(stream=stream, clock=clock) as console, console.phase("loading a model"):
        clock.now += 3.0
        end = time.monotonic() + 10
        while not stream.getvalue() and time.monotonic() < end:
            time.sleep(0.05)
        early = stream.getvalue()

    assert early == "loading a model ...\n"
    assert stream.getvalue() == "loading a model ...\nloading a model: 3s\n"


def test_verifying_a_checkpoint_counts_its_bytes(tmp_path: Path):
    """Every byte of the files is counted, once."""
    counts: list[tuple[str, int, str]] = []
    done: list[int] = []

    class Counting:
        def advance(self, count: int = 1) -> None:
            done.append(count)

    @contextmanager
    def show(text: str, total: int, unit: str, is_brief: bool, /) -> Iterator[Counting]:
        counts.append((text, total, unit))
        yield Counting()

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"part": State(values={"x": 1})}, lambda folder: _write(folder / "model.safetensors"))
    with use_progress(show):
        assert checkpoints.newest() is not None
    size = sum(p.stat().st_size for p in (tmp_path / "step-3").rglob("*") if p.is_file() and p.name != "manifest.json")

    assert counts == [("verifying step-3", size, "bytes")]
    assert sum(done) == size > 3_000_000


def _write(path: Path) -> None:
    path.write_bytes(b"x" * 3_000_000)


def test_export_says_how_much_is_copied(tmp_path: Path):
    """3 MB of a model: verified, then copied, file by file, with their content; a value head stays behind."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "experiment.toml").write_text('algorithm = "grpo"\nmodel = "tiny"\ntask = "arithmetic"\nrewards = "exact"\n')
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoints.save(3, {"part": State(values={"x": 1})}, lambda folder: _write(folder / "model.safetensors"))
    said: list[str] = []
    with use_progress(log_to(said.append)):
        export(run, tmp_path / "model")

    assert said == ["verifying step-3 ...", f"copying to {tmp_path / 'model'} ..."]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == b"x" * 3_000_000
    assert not (tmp_path / "model" / "manifest.json").exists()


def places() -> dict[str, set[str]]:
    """Return, for each file of the package, the beginnings of the texts that its work is shown by."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if not re.search(r"\b(show_progress|track|phase)\(", text):
            continue
        tree = ast.parse(text)
        constants = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            shown = _shown(node)
            if isinstance(shown, ast.Name):
                shown = constants.get(shown.id)
            for said in _beginnings(shown):
                found.setdefault(str(path.relative_to(PACKAGE)), set()).add(said)
    return found


def _shown(node: ast.AST) -> ast.expr | None:
    """Return the text of a call that shows work, None of any other node."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    called = node.func
    if isinstance(called, ast.Name) and called.id in ("show_progress", "track"):
        return node.args[called.id == "track"]
    is_phase = isinstance(called, ast.Attribute) and called.attr == "phase"
    return node.args[0] if is_phase else None


def _beginnings(text: ast.expr | None) -> list[str]:
    """Return what a text says for certain before its first gap."""
    if isinstance(text, ast.IfExp):
        return [*_beginnings(text.body), *_beginnings(text.orelse)]
    if isinstance(text, ast.JoinedStr):
        text = text.values[0]
    return [text.value.strip()] if isinstance(text, ast.Constant) and isinstance(text.value, str) else []


def test_every_place_that_shows_its_work_is_on_the_page():
    """docs/watch.md lists them, file by file: none is missing there, and none is there that the code does not have."""
    section = PAGE.read_text().split("## Progress everywhere")[1]
    listed = {
        file: set(re.findall(r"\"([^\"]+)\"", texts))
        for file, texts in re.findall(r"^\| `([\w/]+\.py)` \|(.*)\|$", section, re.M)
    }

    found = places()
    named = {file: ", ".join(f'"{text}"' for text in sorted(texts)) for file, texts in sorted(found.items())}
    rows = [f"| `{file}` | {texts} |" for file, texts in named.items()]

    assert listed == found, "the table should be:\n" + "\n".join(rows)


SLOW_REWARD = """
import time

time.sleep(6)


def reward(prompt, completion, **columns):
    time.sleep(3)
    return float(len(completion) > 1)
"""


@pytest.mark.slow
def test_no_part_of_a_slow_run_stands_still_on_the_screen(tmp_path: Path):
    """A reward that takes 6 s to import and 3 s to judge, 20,000 questions in a file, checkpoints: from the command to
    its end, the screen never stays as it is for 4 s, and what takes long is named on it.
    """
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    rows = "".join(f'{{"prompt": "{n} + {n} =", "answer": "{2 * n}"}}\n' for n in range(20_000))
    (tmp_path / "table.jsonl").write_text(rows)
    table = f'task={{kind="table", path="{tmp_path}/table.jsonl"}}'
    reward = f'rewards=[{{kind="function", function="{tmp_path}/slow.py:reward"}}]'
    overrides = [
        "steps=2",
        "rollouts_per_step=4",
        "algorithm.num_generations=2",
        "held_out.size=2",
        "learner.precision=fp32",
    ]
    limits = ["grading.deadline_seconds=30", "grading.workers=2", "sampling.max_completion_length=3"]
    run = ["train", RANDOM, table, reward, *overrides, *limits, "--run-dir", str(tmp_path / "run")]
    seen, longest, before, changed = set[str](), 0.0, "", time.monotonic()
    with Terminal(run, 160, 24) as terminal:
        while terminal.read(0.1):
            now = time.monotonic()
            if terminal.shown != before:
                seen.add(terminal.shown)
                longest, before, changed = max(longest, now - changed), terminal.shown, now
        code = terminal.end()
    shown = "\n".join(seen)

    assert code == 0, before
    assert longest < 4.0, before
    for text in ("trying rewards", "starting graders", "evaluating after step 0", "answering", "step 2/2"):
        assert text in shown
