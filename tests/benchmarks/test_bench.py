"""The benchmarks: arithmetic of limits, spreads and ratios; each case at its small size; peers found and called."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness import peers, tables, timing
from benchmarks.harness import run as conduct
from benchmarks.harness.contender import CONTENDERS, measure
from benchmarks.harness.limits import Ceilings, with_limits
from benchmarks.harness.materials import BenchShape, make_batch, make_groups
from benchmarks.harness.peers import PeerProgram
from benchmarks.harness.report import BenchMeasure, BenchReport, BenchResult
from benchmarks.harness.run import Conditions
from benchmarks.harness.sizes import QUICK, SIZES, size_of
from benchmarks.harness.timing import repeat
from benchmarks.harness.updates import learned_from, learning_work, trainer_of
from rich.console import Console

from gnomon.cli.main import main
from gnomon.core.errors import ConfigError

CEILINGS = Ceilings(operations=1000.0, bytes=100.0, body=10, head=5, cache=2, item=4)
QUIET = Conditions(threads=1, limit_seconds=120, quiet_seconds=0)
MACHINE = {"cpu": "any", "cores": 2, "memory_gib": 8.0, "instructions": [], "precision": "fp32", "packages": {}}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contenders wait passively, so that two busy programs do not slow each other down."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")


def test_an_update_is_six_operations_a_parameter_and_token():
    """Two prompts of 3 and 4 tokens, answers of 5 and 6: layers see 18 tokens, the head 11; 16 where two
    tokens begin both. Scoring is a third of it, and a critic has no head.
    """
    assert CEILINGS.learning("update", [3, 4], [5, 6]) == pytest.approx(6 * (10 * 18 + 5 * 11) / 1000)
    assert CEILINGS.learning("score", [3, 4], [5, 6], 2) == pytest.approx(2 * (10 * 16 + 5 * 11) / 1000)
    assert CEILINGS.learning("fit", [3, 4], [5, 6]) == pytest.approx(6 * 10 * 18 / 1000)


def test_a_decode_step_takes_the_larger_of_arithmetic_and_reading():
    """Each step of two answers of 2 and 1 tokens, by hand: reading is the larger, and an ended answer costs nothing."""
    prompt = 2 * 10 * 3 / 1000
    first = max(2 * 15 * 2 / 1000, (15 + 2 * 3 * 2) * 4 / 100)
    second = max(2 * 15 * 1 / 1000, (15 + 1 * 4 * 2) * 4 / 100)

    assert CEILINGS.generation([3], [2, 1]) == pytest.approx(prompt + first + second)
    both = CEILINGS.generation([3, 3], [2, 1], beginning=2) - CEILINGS.generation([3], [2, 1])
    assert both == pytest.approx(prompt / 3)
    fast_memory = Ceilings(1000.0, 1e9, 10, 5, 2, 4)
    assert fast_memory.generation([3], [2, 1]) == pytest.approx(prompt + 2 * 15 * 3 / 1000)


def test_limits_are_put_beside_the_measures_that_say_their_work():
    """A time gets a time, a rate a rate, of the best ceiling in the precision; a measure without work gets none."""
    roofline = BenchResult(
        "roofline",
        "gnomon",
        (
            BenchMeasure("memory read", "GB/s", (1.0, 2.0)),
            BenchMeasure("fp32 square", "GFLOP/s", (3.0, 4.0)),
            BenchMeasure("bf16 square", "GFLOP/s", (9.0,)),
        ),
        {"body_parameters": 10, "head_parameters": 5, "cache_numbers": 2},
    )
    generate, update = ({"part": part, "prompts": [3], "lengths": [2, 1]} for part in ("generate", "update"))
    works = {"total": [generate, update], "decode": [generate]}
    measures = (
        BenchMeasure("total", "s", (1.0,)),
        BenchMeasure("decode", "tokens/s", (1.0,)),
        BenchMeasure("grade", "s", (1.0,)),
    )
    found = with_limits(BenchResult("c1", "gnomon", measures, {"precision": "fp32", "works": works}), roofline)
    ceilings = Ceilings(4e9, 2e9, 10, 5, 2, 4)
    generation, training = ceilings.generation([3], [2, 1]), ceilings.learning("update", [3], [2, 1])

    assert [m.limit for m in found.measures] == [
        pytest.approx(generation + training),
        pytest.approx(3 / generation),
        None,
    ]


def test_repeats_leave_warm_ups_out():
    """Three calls for two measurements, and what comes before each is outside the clock."""
    calls: list[str] = []
    seconds = repeat(lambda: calls.append("work"), 2, before=lambda: calls.append("before"))

    assert calls == ["before", "work"] * 3
    assert len(seconds) == 2
    assert all(0 <= s < 1 for s in seconds)


def test_a_lap_does_not_count_our_own_work_as_others(monkeypatch: pytest.MonkeyPatch):
    """The machine was busy for 3 s, 2 of them ours: others had 1 s. Where the system does not say, it is unknown."""
    busy, own = iter((100.0, 103.0)), iter((5.0, 7.0))
    monkeypatch.setattr(timing, "_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(timing, "_own_seconds", lambda: next(own))
    with timing.lap() as measured:
        pass
    assert measured.others == pytest.approx(1.0 / measured.seconds)

    monkeypatch.setattr(timing, "_busy_seconds", lambda: None)
    monkeypatch.setattr(timing, "_own_seconds", lambda: 0.0)
    with timing.lap() as unknown:
        pass
    assert unknown.others is None


def test_results_go_through_json_unchanged():
    """What a contender prints is what the report holds."""
    result = BenchResult("c1", "trl", (BenchMeasure("total", "s", (1.0, 3.0, 2.0), 0.5),), {"a": [1]}, None)
    report = BenchReport(MACHINE, {"size": "quick"}, (result,))
    row = json.loads(json.dumps(report.as_row()))

    assert BenchResult.from_row(row["results"][0]) == result
    assert row["results"][0]["measures"][0]["median"] == 2.0
    assert result.measures[0].spread == (1.0, 3.0)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_made_up_answers_have_the_lengths_that_are_asked_for(size: Any):
    """Between 1 and the budget, the mean within a fifth, always the same ones."""
    shape = BenchShape((size.prompt,) * size.prompts, size.generations, size.answer, size.budget)
    lengths = shape.lengths

    assert (min(lengths) >= 1, max(lengths) <= size.budget) == (True, True)
    assert sum(lengths) / len(lengths) == pytest.approx(size.answer, rel=0.2)
    assert BenchShape((1,), 3, 7, 7).lengths == (7, 7, 7)
    assert shape.lengths == lengths


def test_dead_groups_have_equal_rewards_and_their_work_is_not_counted():
    """Two of four groups degenerate: half of the work, and prompts apart when nothing is shared."""
    shape = BenchShape((5, 5, 5, 5), 2, 3, 4, degenerate=2)
    groups = make_groups(shape, 50)

    assert [group.is_degenerate for group in groups] == [True, True, False, False]
    assert shape.work("update") == {"prompts": [5, 5], "lengths": list(shape.lengths[4:]), "part": "update"}
    apart = BenchShape((5, 5), 2, 3, 4, is_shared=False)
    assert apart.work("update")["prompts"] == [5, 5, 5, 5]
    assert len({tuple(row) for row in make_batch(apart, 50).tokens[:, :5].tolist()}) == 4
    assert len({tuple(row) for row in make_batch(BenchShape((5, 5), 2, 3, 4), 50).tokens[:, :5].tolist()}) == 2


@pytest.mark.parametrize(
    ("case", "contender", "names"),
    [
        ("roofline", "gnomon", {"memory read", "fp32 square", "bf16 decode"}),
        ("engine", "gnomon", {"decode", "peak memory"}),
        ("engine", "transformers", {"decode", "peak memory"}),
        ("update", "gnomon", {"full", "half dead", "long prompt", "long prompt, not shared"}),
        ("growth", "batch", {"4 rows", "16 rows"}),
        ("growth", "length", {"64 tokens, update", "64 tokens, generate"}),
        ("growth", "group size", {"2 answers a prompt", "4 answers a prompt"}),
        ("growth", "vocabulary", {"4,096 tokens, update", "4,096 tokens, generate"}),
        ("growth", "prompts tracked", {"20,000 prompts, take 2,048"}),
        ("growth", "algorithms", {*QUICK.presets}),
        ("growth", "recording", {"metrics", "rollouts"}),
        pytest.param(
            "weights",
            "gnomon",
            {"a copy of memory", "in process", "rank and run", "store, 1 engine, adapters", "store, 2 engines"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_case_measures_at_its_small_size(case: str, contender: str, names: set[str]):
    """Every contender of ours gives positive numbers for what it names, as many as there are repeats.

    Memory that 20,000 prompts add may be none: the allocator had it already.
    """
    result = measure(case, contender, "quick", 1)

    assert (result.case, result.error) == (case, None)
    assert names <= {m.name for m in result.measures}
    assert all(value > 0 or "prompts" in m.name for m in result.measures for value in m.values)
    assert all(len(m.values) == 1 for m in result.measures)


@pytest.mark.slow
def test_a_bench_prints_one_object_with_limits_and_conditions(capsys: pytest.CaptureFixture[str]):
    """The fixed work in a process of its own: steps, their parts, tokens, memory, and the limit beside them."""
    code = main(["bench", "c1", "--quick", "--repeats", "2", "--json"])
    row = json.loads(capsys.readouterr().out)
    results = {(r["case"], r["contender"]): BenchResult.from_row(r) for r in row["results"]}
    step = results["c1", "gnomon"]

    assert (code, row["format"], row["settings"]["threads"]) == (0, "gnomon-bench/1", 1)
    assert set(row["machine"]) >= {"cpu", "cores", "instructions", "packages", "precision"}
    assert {"memory read", "fp32 training"} <= {m.name for m in results["roofline", "gnomon"].measures}
    totals, generate, update = (step.find(name) for name in ("total", "generate", "update"))
    assert totals is not None and generate is not None and update is not None  # noqa: PT018
    assert len(totals.values) == 2
    assert all(t > g + u for t, g, u in zip(totals.values, generate.values, update.values, strict=True))
    assert totals.limit == pytest.approx((generate.limit or 0) + (update.limit or 0))
    assert 0 < (generate.limit or 0) < totals.median
    tokens, peak = step.find("tokens"), step.find("peak memory")
    assert tokens is not None and 16 <= tokens.median <= 16 * QUICK.budget  # noqa: PT018
    assert peak is not None and 0.1 < peak.median <= step.facts["peak_process_gib"] + 0.01  # noqa: PT018


@pytest.mark.slow
def test_a_start_ends_with_the_first_answer():
    """Whole seconds of an interpreter, imports and weights, and less than a minute."""
    (first,) = measure("start", "gnomon", "quick", 1).measures

    assert 0.5 < first.median < 60


def test_a_contender_that_fails_is_reported_and_one_that_is_late_keeps_what_it_has():
    """Its last line on standard error, or what it printed before the time was up."""
    failing = PeerProgram("c1", "broken", (sys.executable, "-c", "raise SystemExit('no such model')"))
    row = json.dumps({"case": "c1", "contender": "x", "measures": [{"name": "total", "unit": "s", "values": [1.0]}]})
    late = PeerProgram("c1", "late", (sys.executable, "-c", f"import time; print({row!r}, flush=True); time.sleep(60)"))

    failed = conduct.play(failing, QUIET, print)
    stopped = conduct.play(late, Conditions(1, limit_seconds=2, quiet_seconds=0), print)

    assert (failed.measures, failed.error) == ((), "ended with code 1: no such model")
    assert (stopped.contender, stopped.facts["stopped"]) == ("late", "stopped after 2 s")
    assert [m.values for m in stopped.measures] == [(1.0,)]


def test_everybody_has_the_same_threads_and_allocator():
    """Seen from inside a contender; one that measures memory has the system's own allocator settings."""
    code = "import json, os; print(json.dumps([os.environ.get(k) for k in ('OMP_NUM_THREADS', 'GLIBC_TUNABLES')]))"
    command = (sys.executable, "-c", code)
    found = [
        json.loads(conduct.Ran.of(PeerProgram("c1", "seen", command, tuned), Conditions(3)).said)
        for tuned in (True, False)
    ]

    assert found[0] == ["3", conduct.ALLOCATOR]
    assert found[1] == ["3", os.environ.get("GLIBC_TUNABLES")]


def test_peers_are_found_by_what_an_interpreter_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """TRL in fp32, and in both bf16 settings where the machine has bf16; vLLM compiled and eager."""
    have = {"/a": ["trl"], "/b": ["vllm", "trl"], sys.executable: []}
    monkeypatch.setattr(peers, "libraries_of", have.__getitem__)
    found, work = peers.at_hand(["/a", "/b"]), tmp_path / "work.json"

    def chosen(precision: str, *cases: str) -> list[tuple[str, str]]:
        return [(p.contender, p.command[0]) for p in peers.programs(cases, found, work, 3, precision)]

    assert chosen("fp32", "c1", "engine") == [("trl fp32", "/a"), ("vllm", "/b"), ("vllm eager", "/b")]
    assert chosen("bf16", "c1") == [("trl fp32", "/a"), ("trl bf16 autocast", "/a"), ("trl bf16", "/a")]
    assert chosen("fp32", "update") == []


def test_this_interpreter_can_be_asked_and_a_wrong_path_is_explained():
    """A path that is no Python is the user's mistake, said before anything is measured."""
    assert isinstance(peers.libraries_of(sys.executable), list)
    with pytest.raises(ConfigError, match="--peer-python no/such/python cannot be run"):
        peers.libraries_of("no/such/python")
    with pytest.raises(ConfigError, match="is no Python interpreter: it ended with code"):
        peers.libraries_of("false")
    assert all(peers.script(name) is not None for name in ("trl_grpo.py", "vllm_decode.py"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("c2", "--quick"), "unknown case 'c2'; did you mean 'c1'"),
        (("c1", "--quick", "--peer-python", "no/such/python"), "cannot be run"),
    ],
)
def test_wrong_input_ends_with_one_message(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]):
    """Exit code 2, what is wrong and what to type, no traceback."""
    assert main(["bench", *arguments, "--repeats", "1"]) == 2
    assert said in capsys.readouterr().err


def test_an_unknown_size_is_named():
    """The nearest one comes with it."""
    with pytest.raises(ConfigError, match="did you mean 'quick'"):
        size_of("quik")


def test_the_tables_put_ratios_the_right_way_round():
    """Twice the time of ours is 2x; ours at twice the limit is 2x; a rate is turned around; failures are notes."""
    ours = BenchResult(
        "c1", "gnomon", (BenchMeasure("total", "s", (2.0,), 1.0), BenchMeasure("tokens", "tokens", (64.0,)))
    )
    trl = BenchResult(
        "c1", "trl fp32", (BenchMeasure("total", "s", (4.0, 5.0, 3.0)), BenchMeasure("tokens", "tokens", (70.0,)))
    )
    broken = BenchResult("c1", "trl bf16", error="ended with code 1: boom")
    engine = BenchResult("engine", "gnomon", (BenchMeasure("decode", "tokens/s", (100.0,), 400.0),))
    vllm = BenchResult("engine", "vllm", (BenchMeasure("decode", "tokens/s", (50.0,)),))
    settings = {"size": "quick", "repeats": 3, "threads": 1}
    report = BenchReport(MACHINE, settings, (ours, trl, broken, engine, vllm))
    step, decode = tables.grids(report)
    assert report.exit_code == 0
    assert BenchReport(MACHINE, settings, (BenchResult("c1", "gnomon", error="boom"),)).exit_code == 1

    assert step.rows[0] == ("total", "s", "2", "-", "1", "2.00x", "4", "2.00x")
    assert step.rows[1][-2:] == ("70", "-")
    assert step.notes == ("trl bf16: no result, ended with code 1: boom",)
    assert decode.rows[0] == ("decode", "tokens/s", "100", "-", "400", "4.00x", "50", "2.00x")
    assert "| total | s | 2 | - | 1 | 2.00x | 4 | 2.00x |" in tables.markdown(report)
    said = io.StringIO()
    tables.show(report, Console(width=160, file=said))
    assert "trl fp32 / gnomon" in said.getvalue()


def test_every_case_has_a_title():
    """A case that is added gets a heading."""
    assert set(tables.TITLES) == set(CONTENDERS)


def test_every_row_of_a_learners_measure_is_learned_from():
    """A measure of rows without an advantage would be one of passes that nobody makes, below its limit."""
    for name, (algorithm, shape) in learning_work(QUICK).items():
        trainer, vocabulary = trainer_of(QUICK, algorithm)
        batch = trainer.scored(learned_from(trainer, shape, vocabulary))
        for minibatch in trainer.algorithm.minibatches(batch, 0):
            assert bool(trainer.algorithm.live_rows(minibatch).all()), name
        trainer.learner.close()
