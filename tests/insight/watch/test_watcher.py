"""What a watcher knows of a run, whatever happens to its directory; and that it leaves no trace."""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.insight.made_runs import add_rows, finding, fingerprint, made_run, metrics, rollout, write_rollouts

from gnomon.insight.watch.watcher import RunSnapshot, Watcher
from gnomon.records.corruption import damaged
from gnomon.records.directory import LockOwner, RunDirectory, lock_owner


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 20 steps of which 12 are done."""
    return made_run(tmp_path / "run", done=12)


@pytest.fixture
def live(run: Path) -> Iterator[Path]:
    """The same, while somebody works on it."""
    with RunDirectory.reopen(run):
        yield run


def test_a_run_that_is_worked_on_is_live(live: Path):
    """The kernel says that it is locked, and its note says by whom."""
    seen = Watcher(live).look()

    assert seen.state == "live"
    assert seen.owner is not None
    assert (seen.owner.pid > 1, seen.step, seen.steps) == (True, 12, 20)


def test_a_note_without_a_process_is_no_sign_of_life(run: Path):
    """What a killed process left in the file of the lock says nothing: the run stopped."""
    assert Watcher(run).look().state == "stopped"
    assert lock_owner(run) is None


def test_looking_keeps_no_run_from_being_taken(live: Path, run: Path):
    """Looked at a hundred times while it is free: it can be taken at once, and the note is the new holder's."""
    assert isinstance(lock_owner(live), LockOwner)
    RunDirectory(live).close()
    free = made_run(live.parent / "free", done=1)
    watcher = Watcher(free)
    for _ in range(100):
        watcher.look()
    with RunDirectory.reopen(free):
        assert watcher.look().state == "live"


def test_nothing_of_the_run_changes(live: Path):
    """Content, time and rights of every file are what they were, after looks at all of it."""
    add_rows(live / "findings.jsonl", [finding("entropy", "warning", 9)])
    before = fingerprint(live)
    watcher = Watcher(live)
    for _ in range(3):
        watcher.look()

    assert fingerprint(live) == before


@pytest.mark.parametrize(
    ("done", "checkpoint", "state"),
    [(20, None, "finished"), (20, 20, "finished"), (20, 12, "stopped"), (12, 12, "stopped"), (0, None, "stopped")],
)
def test_a_run_is_finished_when_its_last_step_is_saved(tmp_path: Path, done: int, checkpoint: int | None, state: str):
    """All steps without a checkpoint beside (they were removed) count, with one of an earlier step they do not."""
    run = made_run(tmp_path / "run", done)
    if checkpoint is not None:
        (run / "checkpoints" / f"step-{checkpoint}").mkdir(parents=True)

    assert Watcher(run).look().state == state


def test_a_budget_that_is_spent_ends_a_run(tmp_path: Path):
    """12 of 20 steps, and 6,000 of 6,000 tokens; or 24 of 24 seconds."""
    run = made_run(tmp_path / "run", 12)
    add_rows(run / "metrics.jsonl", [metrics(13, **{"tokens/generated_total": 6000})])
    text = (run / "experiment.toml").read_text()
    states = []
    for budget in ("tokens = 6000", "tokens = 6001", "seconds = 26.0", "seconds = 27.0"):
        (run / "experiment.toml").write_text(f"{text}\n[budget]\n{budget}\n")
        states.append(Watcher(run).look().state)

    assert states == ["finished", "stopped", "finished", "stopped"]


def test_a_run_that_comes_later_goes_and_comes_again(tmp_path: Path):
    """Absent, there, gone, there again with other steps: each look says so, and none fails."""
    run, watcher = tmp_path / "later", Watcher(tmp_path / "later")
    absent = watcher.look()
    made_run(run, done=5)
    there = watcher.look()
    shutil.rmtree(run)
    gone = watcher.look()
    made_run(run, done=2)
    again = watcher.look()

    assert (absent.state, absent.was_there) == ("absent", False)
    assert (there.step, there.samples.step) == (5, 5)
    assert (gone.state, gone.was_there, gone.step) == ("absent", True, 0)
    assert (again.step, again.samples.step) == (2, 2)


def test_a_resumed_run_goes_back_to_its_checkpoint(run: Path):
    """Cut back from step 12 to 6, with other numbers after it: nothing of the cut steps is left."""
    watcher = Watcher(run)
    watcher.look()
    (run / "metrics.jsonl").unlink()
    add_rows(run / "metrics.jsonl", [metrics(step) for step in range(1, 7)])
    shutil.rmtree(run / "rollouts")
    (run / "rollouts").mkdir()
    back = watcher.look()
    add_rows(run / "metrics.jsonl", [metrics(7, **{"rollout/reward_mean": 0.125})])
    on = watcher.look()

    assert (back.step, back.samples.count) == (6, 0)
    assert (on.step, on.last["rollout/reward_mean"]) == (7, 0.125)


def test_samples_of_the_newest_step_are_read_when_they_are_there(run: Path):
    """Rollouts are written after metrics: until then those of the step before stay; then they are read once."""
    watcher = Watcher(run)
    watcher.look()
    add_rows(run / "metrics.jsonl", [metrics(13)])
    early = watcher.look().samples
    write_rollouts(run, 13, [rollout(13, 0, "newest", 1.0)])
    newest = watcher.look().samples

    assert (early.step, newest.step, newest.best[0].response) == (12, 13, "newest")
    assert watcher.look().samples is newest


def test_of_each_rule_the_latest_finding_counts_and_the_worst_comes_first(run: Path):
    """Two of one rule are one; severe before warning before note, whatever their order in the file."""
    rows = [finding("a", "note", 3), finding("b", "warning", 5), finding("c", "severe", 4), finding("b", "warning", 9)]
    add_rows(run / "findings.jsonl", rows)

    assert [(f.rule, f.step) for f in Watcher(run).look().findings] == [("c", 4), ("b", 9), ("a", 3)]


def test_findings_are_shown_in_their_newest_words(run: Path):
    """What stands counts; where that file is gone, or none, what was news is shown again."""
    add_rows(run / "findings.jsonl", [finding("a", "warning", 5)])
    watcher = Watcher(run)
    news = watcher.look().findings
    newer = finding("a", "warning", 12, summary="a is still seen at step 12")
    (run / "diagnosis.json").write_text(json.dumps({"findings": [newer]}))
    standing = watcher.look().findings
    (run / "diagnosis.json").write_text("{")

    assert [f.summary for f in news] == ["a was seen at step 5"]
    assert [(f.summary, f.step) for f in standing] == [("a is still seen at step 12", 12)]
    assert [f.summary for f in watcher.look().findings] == ["a was seen at step 5"]


def test_damaged_lines_are_counted_as_everywhere(run: Path):
    """As `records.corruption` counts them, also of files that come later, and anew when a run is cut back."""
    watcher = Watcher(run)
    assert watcher.look().damaged == {}
    with open(run / "metrics.jsonl", "a") as file:
        file.write('nonsense\n{"step": 13}\n{"a": 1}\n')
    write_rollouts(run, 13, [rollout(13, 0, "sound", 1.0), {"step": 13}])
    seen = watcher.look().damaged
    assert seen == damaged(RunDirectory(run)) == {"metrics.jsonl": 2, "rollouts": 1}
    (run / "rollouts" / "step-000013.jsonl").unlink()
    made = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:12]
    (run / "metrics.jsonl").write_text("".join(made))
    assert watcher.look().damaged == {}


def test_files_may_hold_anything(run: Path):
    """Rows that are none, numbers that are none, an experiment that is no TOML: what is sound is shown."""
    odd = [{"step": True}, {"step": -1}, {"step": 10**400}, {"step": "1"}, {}, {"step": 13, "loss/policy": "x"}]
    add_rows(run / "metrics.jsonl", odd)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 14, "loss/policy": NaN, "time/step_seconds": 1e999}\n[[[[[\n')
    add_rows(run / "evaluations.jsonl", [{"step": 1, "scores": {"a": 1}}, {"step": 2, "scores": []}, {"scores": {}}])
    changes = [{"evidence": []}, {"advice": "x"}, {"severity": "grave"}, {"summary": 1}, {"step": None}, {"rule": []}]
    add_rows(run / "findings.jsonl", [finding("x", "note", 1) | change for change in changes])
    (run / "experiment.toml").write_text("steps = [")
    seen = Watcher(run).look()

    assert (seen.step, seen.last, seen.steps) == (14, {"step": 14}, 0)
    assert len(seen.evaluations) == 1
    assert not seen.findings


def test_time_left_is_of_wall_clock_with_what_lies_between_steps(live: Path):
    """A row every 2 s, 12 of 20 done, the last one now: 16 s are left; a budget of 6,000 tokens at 500 each: none."""
    seen = Watcher(live).look()
    spent = {**seen.table, "budget": {"tokens": 12 * 600}}
    rows = [*seen.rows[:-1], {**seen.last, "tokens/generated_total": 12 * 600}]

    assert seen.step_seconds == pytest.approx(2.0)
    assert replace(seen, now=seen.written).seconds_left == pytest.approx(16.0)
    assert replace(seen, now=seen.written + 1.5).seconds_left == pytest.approx(14.5)
    assert replace(seen, rows=rows, table=spent).seconds_left == 0.0
    assert replace(seen, state="stopped").seconds_left is None


def test_a_live_run_is_silent_when_steps_are_long_overdue(live: Path):
    """Steps of 2 s: 29 s without one are nothing to speak of, 31 s are; after the last step nothing is overdue."""
    seen = Watcher(live).look()
    done = replace(seen, table={"steps": 12})

    assert replace(seen, now=seen.written + 29).silent_seconds == 0
    assert replace(seen, now=seen.written + 31).silent_seconds == pytest.approx(31)
    assert replace(done, now=seen.written + 1000).silent_seconds == 0


def test_a_long_run_costs_little_to_look_at_again(tmp_path: Path):
    """2,000 steps with 60 numbers each: the next look, with one step more, takes a tenth of the first, or 50 ms."""
    run = made_run(tmp_path / "run", done=0, steps=2001)
    more = {f"mismatch/other_{number}_nats": 0.123456 for number in range(25)}
    add_rows(run / "metrics.jsonl", [metrics(step, **more) for step in range(1, 2001)])
    watcher = Watcher(run)
    first = _seconds(watcher)
    add_rows(run / "metrics.jsonl", [metrics(2001, **more)])
    again = min(_seconds(watcher) for _ in range(3))

    assert watcher.look().step == 2001
    assert again < max(first / 10, 0.05)


def _seconds(watcher: Watcher) -> float:
    began = time.perf_counter()
    watcher.look()
    return time.perf_counter() - began


def test_a_glance_of_nothing_says_nothing():
    """Without a row there is no step, no pace and no time left."""
    empty = RunSnapshot(Path("x"), 0.0)

    assert (empty.step, empty.steps, empty.share, empty.step_seconds, empty.seconds_left) == (0, 0, 0.0, None, None)
