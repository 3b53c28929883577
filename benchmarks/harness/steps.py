"""The fixed work, as a user runs it: whole training steps, and the seconds until the first token."""

import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness.report import BenchMeasure, BenchResult
from benchmarks.harness.sizes import Size
from benchmarks.harness.timing import repeat
from gnomon.core.errors import RunError
from gnomon.core.redaction import without_secrets
from gnomon.models.prefix import common_beginning

_START_SECONDS = 600.0
_STAGES = {"total": "step", "generate": "generate", "grade": "grade", "score": "score", "update": "update"}


def step(size: Size, repeats: int) -> BenchResult:
    """Return where the seconds of the fixed work's steps go, measured by the run itself, the first step left out.

    A step is everything from asking to published weights and observed rewards, with graders in processes of their own,
    as `gnomon train` does it; writing the step down is not in it (see the case "growth", part "recording"). "update"
    has the forward and backward passes and the optimizer. Peak memory is the process's largest resident size up to the
    last measured step.
    """
    from benchmarks.harness.materials import experiment_of
    from gnomon.config.experiment import Loaded
    from gnomon.records.jsonl import read_rows
    from gnomon.training.api import train_experiment

    experiment = experiment_of(size, f"steps={repeats + 1}")
    with tempfile.TemporaryDirectory(prefix="gnomon-bench-") as made:
        directory = Path(made) / "run"
        train_experiment(Loaded(experiment, ()), directory)
        rows = [row for row in read_rows(directory / "metrics.jsonl") if row["step"] > 1]
        works = [_work(directory / "rollouts" / f"step-{row['step']:06d}.jsonl") for row in rows]
    measures = [BenchMeasure(name, "s", _column(rows, f"time/{stage}_seconds")) for name, stage in _STAGES.items()]
    measures.append(BenchMeasure("tokens", "tokens", _column(rows, "tokens/generated")))
    measures.append(BenchMeasure("peak memory", "GiB", (rows[-1]["memory/peak_bytes"] / 2**30,)))
    totals = measures[0].values
    middle = works[totals.index(statistics.median_low(totals))]
    facts = {
        "precision": experiment.learner.precision,
        "model": experiment.model,
        "works": {"total": list(middle.values()), **{name: [part] for name, part in middle.items()}},
        "rewards": [row["rollout/reward_mean"] for row in rows],
        "degenerate_groups": [row["rollout/degenerate_group_fraction"] for row in rows],
    }
    return BenchResult("c1", "gnomon", tuple(measures), facts)


def start(size: Size, repeats: int) -> BenchResult:
    """Return the seconds from the command `gnomon train` to the first generated token, the model cached.

    One question is asked with a budget of one token before the first step; the clock stops when the graded answer is
    written down. The interpreter, the imports, tasks, graders and weights are all in it. The first start, which fills
    the file cache, is not counted.
    """
    one = ("sampling.max_completion_length=1", "evaluation.before=true", "held_out.size=1", "steps=1")
    seconds = repeat(lambda: _until_first_token(size, one), repeats)
    return BenchResult("start", "gnomon", (BenchMeasure("first token", "s", seconds),))


def _until_first_token(size: Size, overrides: Iterable[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="gnomon-bench-") as made:
        directory = Path(made) / "run"
        code = "import sys; from gnomon.cli.main import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, "train", size.experiment, *size.overrides, *overrides]
        log = (Path(made) / "log").open("w+")
        running = subprocess.Popen([*command, "--run-dir", str(directory)], stdout=log, stderr=log)
        try:
            _await_file(directory / "evaluations.jsonl", running, log)
        finally:
            # It is asked to stop after the step at hand; what it does after the first answer is not waited for.
            running.send_signal(signal.SIGKILL)
            running.wait()
            log.close()


def _await_file(path: Path, running: "subprocess.Popen[bytes]", log: Any) -> None:
    end = time.monotonic() + _START_SECONDS
    while not (path.is_file() and path.stat().st_size):
        if running.poll() is not None or time.monotonic() > end:
            log.seek(0)
            raise RunError(
                f"the run ended, or took too long, before its first answer: {without_secrets(log.read())[-500:]}"
            )
        time.sleep(0.005)


def _work(rollouts: Path) -> dict[str, dict[str, Any]]:
    """Return the parts of one step's work as `limits.with_limits` reads them; each prompt counts once a group.

    Groups of equal rewards have no advantage under GRPO, so no update need compute them.
    """
    from gnomon.records.rollouts import read_rollouts

    found = list(read_rollouts(rollouts))
    rewards: dict[int, set[float | None]] = {}
    for line in found:
        rewards.setdefault(line.group, set()).add(line.rollout.grade.reward)

    def part(name: str, groups: Iterable[int]) -> dict[str, Any]:
        wanted = set(groups)
        chosen = [line for line in found if line.group in wanted]
        prompts = {line.group: tuple(line.rollout.prompt) for line in chosen}
        lengths = [len(line.rollout.response) for line in chosen]
        beginning = common_beginning(set(prompts.values()))
        return {"part": name, "prompts": [*map(len, prompts.values())], "lengths": lengths, "beginning": beginning}

    alive = [group for group, seen in rewards.items() if len(seen) > 1]
    return {"generate": part("generate", rewards), "update": part("update", alive)}


def _column(rows: list[dict[str, Any]], key: str) -> tuple[float, ...]:
    return tuple(float(row.get(key, 0.0)) for row in rows)
