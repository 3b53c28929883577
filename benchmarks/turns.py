"""``python -m benchmarks.turns``: what the turns of conversations cost the local engine that keeps what it computed.

All conversations of a step are played at once, with answers and replies of fixed lengths, by an engine that keeps keys
and values and by one that keeps none, in one process and with the same weights. Beside both is the limit as the harness
has it (`harness.limits`): every new token through the layers once, and decoding steps that read weights, keys and
values. The engine is told of new weights before each repeat, so nothing is carried over from the one before.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness.limits import Ceilings
from benchmarks.harness.machine import describe
from benchmarks.harness.roofline import roofline
from benchmarks.harness.run import quick_or_standard
from benchmarks.harness.timing import peak_gib, repeat
from gnomon.core.types import Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.rng import sample_key
from gnomon.learner.allocator import tune_machine
from gnomon.learner.precision import dtype_of, resolve_precision
from gnomon.models.decoder import vocabulary_size
from gnomon.models.load import load_model


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--precision", default="auto", choices=["auto", "fp32", "bf16"])
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--question", type=int, default=50, metavar="TOKENS")
    parser.add_argument("--answer", type=int, default=40, metavar="TOKENS")
    parser.add_argument("--reply", type=int, default=160, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--no-limit", action="store_true", help="leave the machine's ceilings out")
    parser.add_argument("--into", type=Path, metavar="FILE", help="write the result as JSON")
    given = parser.parse_args(arguments)
    tune_machine()
    precision = resolve_precision("auto") if given.precision == "auto" else given.precision
    model = load_model(given.model, dtype_of(precision))
    found = {name: measured(model, kept, given) for name, kept in (("kept", 2**40), ("computed again", 0))}
    kept, again = (found[name]["median"] for name in found)
    report = {
        "date": str(date.today()),
        "machine": describe(),
        "precision": precision,
        "work": {name: value for name, value in vars(given).items() if name not in ("into", "no_limit")},
        "seconds": found,
        "times faster": round(again / kept, 2),
        "peak_gib": round(peak_gib(), 2),
    }
    if not given.no_limit:
        ceilings = Ceilings.of(roofline(quick_or_standard(False), 2), precision)
        report |= {"limit": (least := limit(ceilings, given)), "kept / limit": round(kept / least, 2)}
    text = json.dumps(report, indent=1)
    print(text)
    if given.into is not None:
        given.into.write_text(text + "\n", encoding="utf-8")
    return 0


def measured(model: Any, kept_bytes: int, given: argparse.Namespace) -> dict[str, object]:
    """Return seconds of each repeat, their median, and the tokens that one repeat computed and drew."""
    engine = LocalEngine(model, given.conversations, kept_bytes=kept_bytes)
    sampling = Sampling(max_completion_length=given.answer)
    version, vocabulary = 0, vocabulary_size(model)

    async def conversation(number: int) -> None:
        made = random.Random(f"{number}")
        said = [made.randrange(1, vocabulary) for _ in range(given.question)]
        for turn in range(given.turns):
            [done] = await engine.generate(said, [sample_key(version, 0, "", number, turn)], sampling)
            said += [*done.tokens, *(made.randrange(1, vocabulary) for _ in range(given.reply))]

    async def step() -> None:
        await asyncio.gather(*(conversation(number) for number in range(given.conversations)))

    def renew() -> None:
        nonlocal version
        version += 1
        asyncio.run(engine.load(Snapshot(version, lambda: iter(()))))

    renew()
    asyncio.run(engine.generate([1, 2], [0], Sampling(max_completion_length=2)))  # libraries and kernels
    before = engine.computed
    seconds = repeat(lambda: asyncio.run(step()), given.repeats, warmups=0, before=renew)
    computed = (engine.computed - before) // given.repeats
    asyncio.run(engine.close())
    return {"each": [round(s, 3) for s in seconds], "median": statistics.median(seconds), "tokens computed": computed}


def limit(ceilings: Ceilings, given: argparse.Namespace) -> float:
    """Return the least seconds of all turns: new tokens alone are computed, and each answer reads all before it."""
    seconds, rows = 0.0, given.conversations
    for turn in range(given.turns):
        before = turn * (given.answer + given.reply)
        again = 2 * ceilings.body * before * rows / ceilings.operations
        seconds += ceilings.generation([before + given.question] * rows, [given.answer] * rows) - again
    return seconds


if __name__ == "__main__":
    sys.exit(main())
