"""Every pane fits its room, says what it should, and survives runs of any kind."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.text import Text
from tests.insight.made_runs import add_rows, evaluation, finding, made_run, metrics, rollout, write_rollouts

from gnomon.insight.watch import views
from gnomon.insight.watch.lines import chart, spark
from gnomon.insight.watch.views import head, overview, subject
from gnomon.insight.watch.watcher import RunSnapshot, Watcher
from gnomon.records.directory import LockOwner

SIZES = [(80, 20), (78, 20), (120, 36), (200, 60), (60, 15), (40, 10), (20, 5), (10, 2)]
HOSTILE = "\x1b[2J\x1b[31m漢字" * 30 + "\u202e" + "[red]" + "a\u0301\u0301\u0301\u0301" * 50 + "\n" * 5 + "end"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with an evaluation after its steps and two findings."""
    run = made_run(tmp_path / "run", done=12)
    add_rows(run / "evaluations.jsonl", [evaluation(12, 0.75)])
    add_rows(run / "findings.jsonl", [finding("entropy", "severe", 9), finding("length", "note", 3)])
    return run


def snapshot(run: Path, state: str = "live") -> RunSnapshot:
    """Return what is seen of a run, one second after its last row."""
    seen = Watcher(run).look()
    owner = LockOwner(7, "here", "today") if state == "live" else None
    return replace(seen, state=state, owner=owner, now=seen.written + 1.0)


def plain(lines: list[Text]) -> str:
    """Return lines as text."""
    return "\n".join(line.plain.rstrip() for line in lines)


def every_pane(seen: RunSnapshot, width: int, height: int) -> list[list[Text]]:
    """Return what all panes show."""
    scrolled = [pane(seen, width) for pane in (views.curves, views.samples, views.findings)]
    return [head(seen, width), overview(seen, width, height), *scrolled]


def test_a_name_and_a_number_that_fill_their_columns_stay_apart(run: Path):
    """An estimate of a KL may be below zero, and its minus sign is no part of the name."""
    add_rows(run / "metrics.jsonl", [metrics(13, **{"loss/kl_behavior_nats": -5e-8})])

    shown = plain(overview(snapshot(run), 78, 20))

    assert "KL behavior -5.0e-08 " in shown
    lines = [line for line in shown.splitlines() if line.startswith(("KL behavior", "mismatch"))]
    assert len({line.index("│") for line in lines}) == 1


def test_the_overview_has_it_all_at_80_by_24(run: Path):
    """20 lines of 78 cells: reward and health, stages, throughput, engines and queue, evaluation, samples, finding."""
    shown = plain(overview(snapshot(run), 78, 20))

    for text in (
        "0.699 now", "entropy", "2.000", "truncated", "25%", "time of a step", "answering", "50%", "tokens/s", "300",
        "60% trained, 3.0 GiB", "engines", "1 at work", "queue", "4 asked", "staleness", "0.50",
        "step 12", "0.750 [0.700, 0.800]", "step 0", "0.250 [0.200, 0.300]", "best", "answer 7", "worst", "answer 0",
        "entropy was seen at step 9", "and 1 more, press f",
    ):  # fmt: skip
        assert text in shown
    assert len(shown.splitlines()) <= 20


def test_the_head_says_which_run_it_is_and_how_far(run: Path):
    """Name and state; algorithm, task and model; steps, share and time left: 8 steps of 2 s less 1 s."""
    shown = plain(head(snapshot(run), 78))

    for text in ("run", "● live", "grpo · arithmetic · tiny", "step 12/20", "60%", "15s left"):
        assert text in shown


@pytest.mark.parametrize(
    ("state", "texts"),
    [
        ("live", ["● live"]),
        ("finished", ["✓ finished"]),
        ("stopped", ["■ stopped", "ended at step 12 of 20", "no checkpoint and begins again with:", "gnomon resume"]),
        ("absent", ["○ gone", "is gone", "looked for"]),
    ],
)
def test_every_state_is_said_in_words(run: Path, state: str, texts: list[str]):
    """Live, finished, stopped with the command that goes on, gone."""
    seen = snapshot(run, state)
    shown = plain([*head(seen, 200), *overview(seen, 200, 30)])

    assert all(text in shown for text in texts)


def test_a_stopped_run_names_the_checkpoint_that_it_goes_on_from(run: Path):
    """The newest one's step, and the command with the directory as it was given."""
    shown = plain(overview(replace(snapshot(run, "stopped"), checkpoint=10), 300, 30))

    assert f"has a checkpoint of step 10 and goes on from there with:\ngnomon resume {run}" in shown


def test_silence_is_told(run: Path):
    """A live run of 2-second steps that has made none for a minute."""
    seen = snapshot(run)
    shown = plain(overview(replace(seen, now=seen.written + 61), 78, 20))

    assert "No step for 1m 01s; lately one took 2s." in shown


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("state", ["live", "finished", "stopped", "absent"])
def test_no_line_is_wider_than_the_screen_whatever_is_shown(run: Path, size: tuple[int, int], state: str):
    """Hostile text in every place a run has for text, at sizes from 10 by 2 to 200 by 60; the overview fits."""
    write_rollouts(run, 12, [rollout(12, n, HOSTILE, n / 8, HOSTILE if n == 3 else None) for n in range(8)])
    add_rows(run / "findings.jsonl", [finding(HOSTILE, "warning", 9, summary=HOSTILE, advice=[HOSTILE, ""])])
    add_rows(run / "metrics.jsonl", [metrics(13, **{f"reward/{HOSTILE}_mean": 0.5})])
    seen = snapshot(run, state)
    seen = replace(seen, table={**seen.table, "model": HOSTILE, "max_staleness": HOSTILE, "engine": {"kind": HOSTILE}})
    width, height = size
    panes = every_pane(seen, width, height)

    assert [line.plain for pane in panes for line in pane if line.cell_len > width] == []
    assert len(panes[1]) <= height
    assert not any(ord(c) < 32 or c == "\u202e" for pane in panes for line in pane for c in line.plain)


def test_a_run_that_has_done_nothing_yet_is_shown(tmp_path: Path):
    """No metrics, no rollouts, no evaluation, an empty experiment: words instead of curves."""
    run = made_run(tmp_path / "run", done=0)
    (run / "evaluations.jsonl").unlink()
    (run / "experiment.toml").write_text("")
    seen = snapshot(run)
    shown = "\n".join(plain(pane) for pane in every_pane(seen, 78, 20))

    assert "no step yet" in shown
    assert "no rollouts on disk yet" in shown
    assert "no findings so far" in shown
    assert subject(seen) == ""


def test_value_pretraining_is_shown_while_there_is_no_step(tmp_path: Path):
    """Its batch and how much of the variance the critic explains."""
    run = made_run(tmp_path / "run", done=0)
    add_rows(run / "pretraining.jsonl", [{"step": 7, "critic/explained_variance": 0.375}])

    assert "batch 7: explains 0.38" in plain(overview(snapshot(run), 120, 36))


def test_samples_are_shown_with_question_reward_and_error(run: Path):
    """Best, worst and those without a reward, of how many, from which step."""
    write_rollouts(run, 12, [rollout(12, 0, "right", 1.0), rollout(12, 1, "x", None, "the verifier timed out")])
    shown = plain(views.samples(snapshot(run), 78))

    for text in ("best  of 2 answers of step 12", "reward 1.000", "question 0", "right", "the verifier timed out"):
        assert text in shown


def test_findings_are_shown_with_evidence_meaning_and_advice(run: Path):
    """The severe one first, with its steps, numbers, what it means and what to try."""
    shown = plain(views.findings(snapshot(run), 78))

    assert shown.index("entropy") < shown.index("length")
    for text in ("severe, steps 1 to 9", "share 0.500", "It usually means this.", "→ Try that.", "→ Or that."):
        assert text in shown


def test_curves_has_one_for_each_metric_that_the_run_has(run: Path):
    """Two columns at 80 cells, with the latest value; a metric that was never measured is left out."""
    shown = plain(views.curves(snapshot(run), 78))

    for text in ("reward", "answer", "entropy", "gradient", "1.500", "rate", "3.0e-05"):
        assert text in shown
    assert "explained" not in shown


def test_a_curve_of_more_values_than_columns_keeps_its_shape():
    """5,000 rising values in 10 columns rise; a rising line of braille begins below and ends above."""
    values = [step / 5000 for step in range(5000)]
    drawn = spark(values, 10)
    rows = chart(values, 10, 3, 0.0, 1.0)

    assert drawn == "".join(sorted(drawn))
    assert (drawn[0], drawn[-1], len(drawn)) == ("▁", "█", 10)
    assert [len(row) for row in rows] == [10, 10, 10]
    assert rows[0][0] == rows[2][-1] == "\u2800"
    assert rows[2][0] != "\u2800"
    assert rows[0][-1] != "\u2800"


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 1.0], [1e300, -1e300], [0.0] * 1000])
def test_odd_curves_are_drawn(values: list[float]):
    """None, one, equal and huge values: as many rows and cells as were asked for, and no error."""
    assert len(spark(values, 8)) <= 8
    assert [len(row) for row in chart(values, 8, 2, min(values, default=0.0), max(values, default=0.0))] == [8, 8]
