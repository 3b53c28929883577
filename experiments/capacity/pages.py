"""The tables of docs/planning.md: three sizes of cluster by three models, each planned as `gnomon plan` does."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from gnomon.analysis.planner.deployment import place_of
from gnomon.analysis.planner.layout import GIGABYTE, concurrency, engine_memory, learner_memory, micro_batches
from gnomon.analysis.planner.text import ClusterForecast, forecast
from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError
from gnomon.training.resolve import Resolved

MODELS = ("qwen2.5-7b", "qwen3-32b", "qwen3-235b-a22b")
MIXTURES = ("qwen3-30b-a3b", "gpt-oss-20b")
DEVICES = {8: 512, 64: 2048, 1024: 8192}
"""Of H100, to answers of a step."""
WAYS: Mapping[str, tuple[str, ...]] = {
    "all weights": (),
    "offloaded": ("learner.offload=true",),
    "adapters": ("lora.rank=32",),
}
"""What is tried, in this order, until it fits."""
PROMPT, ANSWER, BUDGET = 512, 2048, 8192
_MIXED = 64
_MARK = r"(<!-- planned: {} -->\n).*?(<!-- /planned -->)"


@dataclass(frozen=True)
class Cell:
    """One model on one cluster. way: how it is trained; "" where nothing fits. reason: why the way before did not."""

    model: str
    devices: int
    way: str
    plan: ClusterForecast | None
    reason: str


def overrides(model: str, devices: int, way: str) -> tuple[str, ...]:
    """Return what is asked for, as `gnomon plan quickstart` takes it."""
    return (
        f"model={model}",
        f"rollouts_per_step={DEVICES[devices]}",
        "algorithm.num_generations=16",
        f"sampling.max_completion_length={BUDGET}",
        "max_staleness=2",
        "engine.max_concurrent=256",
        "cluster=auto",
        f"cluster.graders={devices // 8}",
        "grading.workers=8",
        *WAYS[way],
    )


@cache
def cell(model: str, devices: int) -> Cell:
    """Return the plan of the first way that fits."""
    reason = ""
    for way in WAYS:
        experiment = load("quickstart", overrides(model, devices, way)).experiment
        try:
            return Cell(
                model, devices, way, forecast(place_of(Resolved(experiment), "h100", devices, PROMPT, ANSWER)), reason
            )
        except ConfigError as error:
            reason = str(error)
    return Cell(model, devices, "", None, reason)


def tables(devices: Sequence[int] = tuple(DEVICES), models: Sequence[str] = MODELS) -> Mapping[str, Callable[[], str]]:
    """Return the name of each table to what makes its Markdown."""
    plain = [partial(cell, model, count) for count in devices for model in models]
    mixed = [partial(cell, model, count) for count in devices if count <= _MIXED for model in MIXTURES]
    return {
        "layout": lambda: _table(_LAYOUT, (_layout(one()) for one in plain)),
        "seconds": lambda: _table(_SECONDS, (_seconds(one()) for one in plain)),
        "limits": lambda: "\n".join(line for one in plain for line in _limits(one())),
        "mixtures": lambda: _table(_LAYOUT, (_layout(one()) for one in mixed)),
        "mixtures, seconds": lambda: _table(_SECONDS, (_seconds(one()) for one in mixed)),
        "mixtures, settings": lambda: "\n".join(line for one in mixed for line in _settings(one())),
    }


def write(page: Path, beginning: str = "") -> list[str]:
    """Put the tables whose names begin so between their marks in ``page``, and return their names."""
    text = page.read_text(encoding="utf-8")
    made = {name: make() for name, make in tables().items() if name.startswith(beginning)}
    for name, table in made.items():
        text = replaced(text, name, table)
    page.write_text(text, encoding="utf-8")
    return list(made)


def replaced(text: str, name: str, table: str) -> str:
    """Return ``text`` with a table between the marks of that name."""
    return re.sub(_MARK.format(name), lambda found: f"{found[1]}{table}\n{found[2]}", text, flags=re.S)


_LAYOUT = ("GPUs", "model", "training", "learn", "answer", "learner, GB", "engine, GB", "at once", "tokens a pass")
_SECONDS = (
    "GPUs",
    "model",
    "answer",
    "update",
    "publish",
    "by NCCL",
    "driver",
    "step",
    "tokens/s",
    "idle",
    "bottleneck",
)


def _layout(one: Cell) -> tuple[str, ...]:
    if one.plan is None:
        return (str(one.devices), one.model, "does not fit", *("-",) * 6)
    place, layout = one.plan.place, one.plan.found.layout
    again = ", again" if layout.is_recomputed else ""
    return (
        str(one.devices),
        one.model,
        one.way,
        str(layout.learners),
        f"{layout.engines} x {layout.parts}",
        f"{learner_memory(place, layout).total / GIGABYTE:.0f}",
        f"{engine_memory(place, layout).total / GIGABYTE:.0f}",
        str(concurrency(place, layout)),
        f"{micro_batches(place, layout)} x {layout.micro:,}{again}",
    )


def _seconds(one: Cell) -> tuple[str, ...]:
    if one.plan is None:
        return (str(one.devices), one.model, *("-",) * 9)
    stages, flow = one.plan.found.stages, one.plan.found.flow
    return (
        str(one.devices),
        one.model,
        f"{stages.answering:.0f} ({stages.flowing:.0f})",
        f"{stages.updating:.0f}",
        f"{stages.publishing:.0f}",
        f"{stages.by_nccl:.1f}",
        f"{stages.driving:.0f}",
        f"{flow.step_seconds:.0f}",
        f"{flow.tokens_per_second:,.0f}",
        f"{1 - flow.answering:.0%}, {1 - flow.learning:.0%}",
        one.plan.bottleneck,
    )


def _limits(one: Cell) -> Iterator[str]:
    yield f"**{one.model} on {one.devices}.**"
    if one.reason:
        yield f"- What was tried before does not fit: {' '.join(one.reason.split())}."
    for said in one.plan.limits if one.plan is not None else ():
        yield f"- {said}"
    yield ""


def _settings(one: Cell) -> Iterator[str]:
    set_by_plan = "does not fit" if one.plan is None else f"`{' '.join(one.plan.settings)}`"
    yield f"- {one.model} on {one.devices}, {one.way or 'however it is trained'}: {set_by_plan}"
    if one.reason:
        yield f"    - What was tried before does not fit: {one.reason.splitlines()[0].rstrip('.')}."


def _table(head: Sequence[str], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
