"""`gnomon plan --hardware` against what was measured. Each command prints JSON.

python -m experiments.capacity.run check                 # recorded benchmarks, published numbers, the stream's waits
python -m experiments.capacity.run driver                # seconds and bytes a token in the run's own process
python -m experiments.capacity.run measure               # calibrate here, then train, and compare: ten minutes
python -m experiments.capacity.run pages                 # write the tables of docs/planning.md again (`pages mixtures`:
                                                         # those whose names begin so)
"""

import json
import random
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "benchmarks" / "results"
MACHINE = "amd-epyc-2-cores-standard-{}-2026-11-21.json"
TRAINED = (
    "steps=4",
    "learner.precision=fp32",
    "evaluation.before=false",
    "held_out.size=20",
    "checkpoints.every=0",
    "device=cpu",
)
DECODED = (1, 8)
"""Prompts of the two decodings that the cost of a step is told apart with, 8 answers each."""


def check() -> dict[str, Any]:
    """Return predicted beside measured, for everything that is recorded."""
    from experiments.capacity.check import published

    return {
        "recorded": [row.as_row() for row in recorded()],
        "memory": [row.as_row() for row in memory()],
        "published": [row.as_row() for row in published()],
        "waits": [row.as_row() for row in waits()],
    }


def recorded() -> Iterator[Any]:
    """Yield the recorded benchmarks: efficiencies from one decoding and one update, everything else predicted."""
    from benchmarks.harness.report import BenchResult
    from experiments.capacity.check import calibrated, compared_work, machine_of, place_of_work

    from gnomon.analysis.planner.hardware import PUBLISHED

    found: dict[str, BenchResult] = {}
    machines = {}
    for case in ("engine", "update", "c1"):
        rows = json.loads((RECORDED / MACHINE.format(case)).read_text())["results"]
        results = [BenchResult.from_row(row) for row in rows if row["contender"] == "gnomon"]
        found[case] = next(result for result in results if result.case == case)
        machines[case] = machine_of(next(result for result in results if result.case == "roofline"))
    decode, full = found["engine"].find("decode"), found["update"].find("full")
    assert decode is not None, "the engine decodes"
    assert full is not None, "an update is whole"
    (decoded,) = found["engine"].facts["works"]["decode"]
    (updated,) = found["update"].facts["works"]["full"]
    reached = calibrated(
        [(place_of_work(decoded, machines["engine"], PUBLISHED), sum(decoded["lengths"]) / decode.median)],
        (place_of_work(updated, machines["update"], PUBLISHED), full.median),
    )
    for case, result in found.items():
        yield from compared_work(result, machines[case], reached, frozenset({"decode", "full"}))


def memory() -> Iterator[Any]:
    """Yield what `gnomon plan` says of the fixed work's memory beside the recorded peak of its process."""
    from benchmarks.harness.materials import experiment_of
    from benchmarks.harness.sizes import STANDARD
    from experiments.capacity.check import CheckedQuantity

    from gnomon.analysis.plan import make_plan
    from gnomon.models.size import model_size
    from gnomon.records.console import Console
    from gnomon.training.api import checked
    from gnomon.training.resolve import Resolved

    resolved = Resolved(experiment_of(STANDARD, "steps=4", "learner.precision=fp32"))
    with Console() as console:
        asked, _ = checked(resolved, console)
    planned = make_plan(resolved, asked, model_size(resolved.experiment.model)).memory_bytes / 2**30
    for date in ("c1", "c1-first"):
        rows = json.loads((RECORDED / MACHINE.format(date)).read_text())["results"]
        (row,) = [row for row in rows if (row["case"], row["contender"]) == ("c1", "gnomon")]
        (peak,) = [measure["median"] for measure in row["measures"] if measure["name"] == "peak memory"]
        yield CheckedQuantity(f"{date}: peak memory, by `gnomon plan`", "GiB", planned, peak)


def waits() -> Iterator[Any]:
    """Yield the stream on the virtual clock beside real processes on the wall clock (experiments/group_free)."""
    from experiments.capacity.check import CheckedQuantity
    from experiments.group_free.waiting import LogNormal, QueueSetting, simulate

    table = json.loads((ROOT / "experiments" / "group_free" / "measured.json").read_text())
    latency = LogNormal(table["sigma"], table["median_seconds"])
    for name, setting in table["settings"].items():
        seconds = simulate(QueueSetting(**setting), latency, table["steps"]).seconds
        yield CheckedQuantity(f"10 steps, {name}", "s", seconds, table["found"][name]["seconds"])


def driver(rows: int = 64, tokens: int = 2048) -> dict[str, Any]:
    """Return what a token of an answer costs in the run's own process, part by part, once and in bytes."""
    from benchmarks.harness.materials import BenchShape, make_groups

    from gnomon.algorithms import GRPO
    from gnomon.algorithms.metrics import measure_advantages
    from gnomon.core.metrics import Metrics
    from gnomon.core.types import Rollout
    from gnomon.models.load import load_tokenizer
    from gnomon.records.rollouts import RolloutLog
    from gnomon.rollouts.collate import collate
    from gnomon.rollouts.metrics import measure_round, measure_waste
    from gnomon.rollouts.rollout import RolloutTimer
    from gnomon.rollouts.scheduler import RolloutBatch

    tokenizer = load_tokenizer("smollm2-135m-instruct", False)
    shape = BenchShape((512,) * (rows // 8), 8, tokens, tokens)
    tracemalloc.start()
    draws = random.Random(0)

    def drawn(rollout: Rollout) -> Rollout:
        sampled, full = (tuple(-draws.random() for _ in rollout.response) for _ in range(2))
        return replace(rollout, logprobs=sampled, full_logprobs=full)

    made = make_groups(shape, tokenizer.vocab_size)
    groups = tuple(replace(group, rollouts=tuple(map(drawn, group.rollouts))) for group in made)
    del made
    held = tracemalloc.get_traced_memory()[0] / (rows * tokens)
    tracemalloc.stop()
    answers = [rollout.response for group in groups for rollout in group.rollouts]
    finished = RolloutBatch(0, groups, (), RolloutTimer())
    batch = collate(groups, 1.0)
    prepared = GRPO.prepare(batch)
    with tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Callable[[], object]] = {
            "text of answers": lambda: [tokenizer.decode(answer) for answer in answers],
            "batch": lambda: collate(groups, 1.0),
            "metrics": lambda: (measure_round(finished, 0), measure_waste(finished, prepared, Metrics())),
            "advantages": lambda: measure_advantages(GRPO, GRPO.prepare(batch)),
            "minibatches": lambda: list(GRPO.minibatches(prepared, 0)),
            "records of rollouts": lambda: RolloutLog(Path(folder)).write(0, groups, (), prepared),
        }
        seconds = {name: _timed(work) / (rows * tokens) for name, work in parts.items()}
    return {
        "tokens": rows * tokens,
        "seconds_a_token": {name: float(f"{value:.3g}") for name, value in seconds.items()},
        "all_seconds_a_token": float(f"{sum(seconds.values()):.3g}"),
        "bytes_a_token": round(held, 1),
    }


def _timed(work: Callable[[], object]) -> float:
    # Of the processor, in one thread: other programs make the clock's seconds longer.
    work()
    began = time.process_time()
    work()
    return time.process_time() - began


def measure() -> dict[str, Any]:
    """Return a calibration of this machine and a real run's stages beside what they are predicted to be from it."""
    from benchmarks.harness.report import BenchResult
    from experiments.capacity.check import calibrated, machine_of, place_of_work

    from gnomon.analysis.planner.hardware import PUBLISHED

    roofline, update = (BenchResult.from_row(_separate(name)) for name in ("roofline", "update"))
    precision = update.facts["precision"]
    machine, item = machine_of(roofline, precision), 2 if precision == "bf16" else 4
    decodes = []
    for prompts in DECODED:
        result = BenchResult.from_row(_separate("decode", str(prompts)))
        (work,) = result.facts["works"]["decode"]
        rate = result.find("decode")
        assert rate is not None, "it decodes"
        decodes.append((place_of_work(work, machine, PUBLISHED, item), sum(work["lengths"]) / rate.median))
    full = update.find("full")
    assert full is not None, "an update is whole"
    (work,) = update.facts["works"]["full"]
    reached = calibrated(decodes, (place_of_work(work, machine, PUBLISHED, item), full.median))
    run = _separate("train")
    rows = list(_run_compared(run, machine, reached, precision))
    return {
        "machine": {"operations": machine.operations, "bandwidth": machine.bandwidth},
        "efficiencies": {name: float(f"{vars(reached)[name]:.3g}") for name in ("training", "products", "decode_step")},
        "run": run,
        "compared": [row.as_row() for row in rows],
    }


def _run_compared(run: dict[str, Any], machine: Any, reached: Any, precision: str) -> Iterator[Any]:
    from benchmarks.harness.report import BenchMeasure, BenchResult
    from experiments.capacity.check import CheckedQuantity, compared_work

    names = {"generate": "generate", "update": "update"}
    for number, step in enumerate(run["steps"], start=1):
        measures = tuple(BenchMeasure(name, "s", (step[f"time/{stage}_seconds"],)) for name, stage in names.items())
        works = {"generate": [step["work"] | {"part": "generate"}], "update": [step["work"] | {"part": "update"}]}
        result = BenchResult(f"quickstart, step {number}", "gnomon", measures, {"works": works, "precision": precision})
        yield from compared_work(result, machine, reached, frozenset())
    yield CheckedQuantity(
        "quickstart: memory by `gnomon plan`", "GiB", run["planned_bytes"] / 2**30, run["peak_bytes"] / 2**30
    )


def train() -> dict[str, Any]:
    """Return a real run's own metrics, the lengths of its answers, and what `gnomon plan` says of its memory."""
    from gnomon.analysis.plan import make_plan
    from gnomon.config.experiment import Loaded, load
    from gnomon.models.size import model_size
    from gnomon.records.console import Console
    from gnomon.records.jsonl import read_rows
    from gnomon.records.rollouts import read_rollouts
    from gnomon.training.api import checked, train_experiment
    from gnomon.training.resolve import resolve

    resolved = resolve(load("quickstart", TRAINED).experiment)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "run"
        train_experiment(Loaded(resolved.experiment, ()), folder)
        steps = []
        for row in read_rows(folder / "metrics.jsonl"):
            if row["step"] == 1:
                continue
            rollouts = [one.rollout for one in read_rollouts(folder / "rollouts" / f"step-{row['step']:06d}.jsonl")]
            prompts = list({one.task_id: len(one.prompt) for one in rollouts}.values())
            times = {name: value for name, value in row.items() if name.startswith("time/")}
            steps.append(times | {"work": {"prompts": prompts, "lengths": [len(one.response) for one in rollouts]}})
            peak = row["memory/peak_bytes"]
    with Console() as console:
        asked, _ = checked(resolved, console)
    planned = make_plan(resolved, asked, model_size(resolved.experiment.model)).memory_bytes
    return {"steps": steps, "peak_bytes": peak, "planned_bytes": planned}


def part(name: str, *arguments: str) -> dict[str, Any]:
    """Return one measurement that wants a process of its own."""
    from benchmarks.harness.generation import decode
    from benchmarks.harness.roofline import roofline
    from benchmarks.harness.sizes import STANDARD

    if name == "train":
        return train()
    if name == "decode":
        return asdict(decode(replace(STANDARD, prompts=int(arguments[0])), 2))
    return asdict(roofline(STANDARD, 2) if name == "roofline" else _whole_update())


def _whole_update() -> Any:
    """Return the seconds of the update that `gnomon bench update` calls full, without its other shapes."""
    from functools import partial

    from benchmarks.harness.materials import make_batch
    from benchmarks.harness.report import BenchMeasure, BenchResult
    from benchmarks.harness.sizes import STANDARD
    from benchmarks.harness.timing import repeat
    from benchmarks.harness.updates import shapes, trainer_of

    trainer, vocabulary = trainer_of(STANDARD)
    shape = shapes(STANDARD)["full"]
    batch = trainer.on_policy(make_batch(shape, vocabulary))
    seconds = repeat(partial(trainer.step, batch), 2)
    return BenchResult(
        "update",
        "gnomon",
        (BenchMeasure("full", "s", seconds),),
        {"works": {"full": [shape.work("update")]}, "precision": trainer.precision},
    )


def _separate(*arguments: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, __file__, "part", *arguments], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
    )
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def pages(beginning: str = "") -> dict[str, Any]:
    """Write the tables of docs/planning.md whose names begin so, and return which were written."""
    from experiments.capacity.pages import write

    return {"written": write(ROOT / "docs" / "planning.md", beginning)}


if __name__ == "__main__":
    command, *given = sys.argv[1:]
    if command == "part":
        print(json.dumps(part(*given)))
    else:
        commands = {"check": check, "driver": driver, "measure": measure, "pages": pages}
        print(json.dumps(commands[command](*given), indent=1))
