"""Where the time of one step goes, operator by operator."""

import asyncio
from collections.abc import Callable
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity
from torch.profiler import profile as record

from benchmarks.harness.generation import asked
from benchmarks.harness.materials import make_batch
from benchmarks.harness.sizes import Size
from benchmarks.harness.updates import shapes, trainer_of
from gnomon.core.errors import ConfigError, unknown
from gnomon.core.types import Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.learner.allocator import tune_machine

PARTS = ("generate", "update")
_SHOWN = 25


def profile(size: Size, part: str) -> str:
    """Return a table of the operators of one "generate" or "update" of the fixed work's shape, costliest first.

    Warmed up by one call. Engine and learner work in threads of their own, which are all recorded. Seconds of an
    operator are its own, without those it calls; recording itself makes small operators look dearer.
    Raises: ConfigError for another part.
    """
    if part not in PARTS:
        raise ConfigError(unknown("part to profile", part, PARTS))
    work = _generation(size) if part == "generate" else _update(size)
    work()
    everywhere: Any = _ExperimentalConfig(profile_all_threads=True)
    with record(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as recorded:
        work()
    averages = recorded.key_averages()
    table: str = averages.table(sort_by="self_cpu_time_total", row_limit=_SHOWN, max_name_column_width=48)
    return table


def _generation(size: Size) -> Callable[[], None]:
    tune_machine()
    model, prompts, _ = asked(size)
    engine = LocalEngine(model, size.prompts * size.generations)
    sampling = Sampling(max_completion_length=size.budget)

    async def ask() -> None:
        await engine.load(Snapshot(0, lambda: iter(())))
        await asyncio.gather(*(engine.generate(prompt, range(size.generations), sampling) for prompt in prompts))

    return lambda: asyncio.run(ask())


def _update(size: Size) -> Callable[[], None]:
    trainer, vocabulary = trainer_of(size)
    made = trainer.on_policy(make_batch(shapes(size)["full"], vocabulary))
    return lambda: trainer.step(made)
