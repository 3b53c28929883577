"""The plan's formulas against what was measured: benchmarks of this repository, numbers that others published."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness.report import BenchResult

from gnomon.analysis.planner.deployment import Deployment, Lengths, PlannedJob
from gnomon.analysis.planner.hardware import GPUS, PUBLISHED, Efficiencies, Hardware
from gnomon.analysis.planner.layout import Layout, answering, communicating, learner_memory, pace_of, update_seconds
from gnomon.analysis.planner.shapes import SHAPES

GIB = 2**30
_ALONE = Layout(1, 1, micro=324, is_recomputed=False)
"""One process that does everything; its passes were of 324 tokens when these numbers were measured."""


@dataclass(frozen=True)
class CheckedQuantity:
    """One number. is_fitted: a formula's efficiency was chosen so that it comes out, so it shows nothing."""

    what: str
    unit: str
    predicted: float
    measured: float
    is_fitted: bool = False

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1

    def as_row(self) -> dict[str, object]:
        """Return it with the error, rounded to what can be meant."""
        return {
            "what": self.what,
            "unit": self.unit,
            "predicted": float(f"{self.predicted:.4g}"),
            "measured": float(f"{self.measured:.4g}"),
            "error": round(self.error, 3),
            "fitted": self.is_fitted,
        }


@dataclass(frozen=True)
class MeasuredLengths:
    """Observed tokens of responses, with what the formulas ask of `Lengths`."""

    lengths: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Mean tokens."""
        return sum(self.lengths) / len(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest response."""
        return max(self.lengths)

    def alive(self, tokens: float) -> float:
        """Return the share of responses with more than ``tokens``."""
        return sum(length > tokens for length in self.lengths) / len(self.lengths)

    def longest_of(self, answers: int) -> int:
        """Return the length of the longest response."""
        return self.longest


def processor(operations: float, bandwidth: float, memory: float) -> Hardware:
    """Return a machine without accelerators, from the roofline that `gnomon bench` measured."""
    return Hardware(
        "this processor", operations, bandwidth, memory, bandwidth, bandwidth, bandwidth, 1, memory, "gnomon bench"
    )


def machine_of(roofline: BenchResult, precision: str = "fp32") -> Hardware:
    """Return a processor by its roofline: products of a training step's shapes in that precision, and memory reads."""
    products, reads = roofline.find(f"{precision} training"), roofline.find("memory read")
    assert products is not None, "the roofline multiplies"
    assert reads is not None, "the roofline reads"
    return processor(max(products.values) * 1e9, max(reads.values) * 1e9, 24.0 * GIB)


def place_of_work(work: Mapping[str, Any], machine: Hardware, reached: Efficiencies, item: int = 4) -> Deployment:
    """Return one part of a benchmark's work: the fixed work's model, answers of the lengths that came."""
    prompts, lengths = work["prompts"], work["lengths"]
    job = PlannedJob(
        prompts=len(prompts),
        generations=len(lengths) // len(prompts),
        prompt=sum(prompts) / len(prompts),
        answers=MeasuredLengths(tuple(lengths)),
        item=item,
        concurrent=64,
    )
    return Deployment(SHAPES["smollm2-135m"], machine, job, reached, 1)


def calibrated(decodes: Sequence[tuple[Deployment, float]], update: tuple[Deployment, float]) -> Efficiencies:
    """Return efficiencies that give these seconds: of one or two decodings, and of one update.

    With one decoding, a step of it costs nothing by itself; with two of different rows it is what they do not share.
    """
    plain = replace(PUBLISHED, training=1.0, products=1.0, reading=1.0, decode_step=0.0)

    def bare(place: Deployment) -> float:
        return answering(replace(place, reached=plain), _ALONE)

    if len(decodes) == 1:
        (place, seconds) = decodes[0]
        step, slope = 0.0, seconds / bare(place)
    else:
        (few, some), (many, more) = decodes
        steps = [place.job.answers.longest for place in (few, many)]
        # seconds = bare * slope + steps * step, twice.
        slope = (more * steps[0] - some * steps[1]) / (bare(many) * steps[0] - bare(few) * steps[1])
        step = (some - bare(few) * slope) / steps[0]
    trained = update_seconds(replace(update[0], reached=plain), _ALONE)[0] / update[1]
    return replace(plain, training=trained, products=1 / slope, reading=1 / slope, decode_step=step)


def compared_work(
    result: BenchResult, machine: Hardware, reached: Efficiencies, fitted: frozenset[str]
) -> Iterator[CheckedQuantity]:
    """Yield each measure whose work the result tells, in seconds. fitted: names that the efficiencies come from."""
    for name, parts in result.facts.get("works", {}).items():
        measure = result.find(name)
        if measure is None:
            continue
        item = 2 if result.facts.get("precision") == "bf16" else 4
        predicted = sum(_seconds(part, machine, reached, item) for part in parts)
        tokens = sum(sum(part["lengths"]) for part in parts)
        measured = tokens / measure.median if measure.is_rate else measure.median
        yield CheckedQuantity(f"{result.case}: {name}", "s", predicted, measured, name in fitted)


def _seconds(part: Mapping[str, Any], machine: Hardware, reached: Efficiencies, item: int) -> float:
    place = place_of_work(part, machine, reached, item)
    return answering(place, _ALONE) if part["part"] == "generate" else update_seconds(place, _ALONE)[0]


def published() -> Iterator[CheckedQuantity]:
    """Yield numbers that others published for hardware that we have not, against the efficiencies that are printed."""
    model = SHAPES["llama-3.1-8b"]
    yield from _torchtitan()
    place = Deployment(model, GPUS["h100"], PlannedJob(1, 1, 128, Lengths(8, 8, sigma=0)), PUBLISHED, 8)
    pace = pace_of(place, Layout(1, 1))
    yield CheckedQuantity(
        "sglang 1008: Llama 3 8B, a step of 1 row", "ms", 1e3 * pace.step(1, 132), 7.37, is_fitted=True
    )
    yield CheckedQuantity("the same, 128 rows", "ms", 1e3 * pace.step(128, 132), 11.84, is_fitted=True)
    split = pace_of(place, Layout(1, 1, 8))
    yield CheckedQuantity("the same, 1 row on 8 GPUs", "ms", 1e3 * split.step(1, 132), 3.35, is_fitted=True)
    # 256 rows at once, each of 256 tokens after 256: a prompt comes whenever an answer ends.
    job = PlannedJob(1, 1, 256, Lengths(256, 256, sigma=0))
    full = pace_of(replace(place, job=job), Layout(1, 1))
    seconds = full.step(256, 384) + full.prompt
    yield CheckedQuantity("vLLM 11078: Llama 3 8B, 256 + 256 tokens, answer tokens", "1/s", 256 / seconds, 11_364)


def _torchtitan() -> Iterator[CheckedQuantity]:
    """Yield torchtitan's Llama 3.1 8B by FSDP2 on 8 and 128 H100: 16,384 tokens a GPU and step, not compiled."""
    model, rows = SHAPES["llama-3.1-8b"], Lengths(8191, 8191, sigma=0)
    rates, held = [], []
    for devices in (8, 128):
        place = Deployment(model, GPUS["h100"], PlannedJob(2 * devices, 1, 1, rows), PUBLISHED, devices)
        layout = Layout(devices, 1, micro=16_384, is_recomputed=False)
        computing, moving = update_seconds(place, layout)
        seconds = max(computing, moving) + (1 - PUBLISHED.hidden) * min(computing, moving)
        rates.append(16_384 / seconds)
        held.append(learner_memory(place, layout).total)
        assert moving == communicating(place, layout)
    yield CheckedQuantity("torchtitan: Llama 3.1 8B, tokens a GPU, 8 H100", "1/s", rates[0], 5762, is_fitted=True)
    yield CheckedQuantity("the same on 128 H100", "1/s", rates[1], 5605)
    yield CheckedQuantity("memory a GPU, 8 less 128 H100", "GiB", (held[0] - held[1]) / GIB, 82.4 - 67.0)
