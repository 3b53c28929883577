"""The least that a case can take, from the ceilings that the machine showed in the same run.

Linear layers and the reading of weights, keys and values are counted; attention, elementwise work, sampling and the
optimizer are not. So these are bounds, not targets: no program can be faster with these weights in this precision, and
a good one may well need 1.5 times as long.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness.report import BenchMeasure, BenchResult


@dataclass(frozen=True)
class Ceilings:
    """operations: floating-point, a second, the best rate seen in the precision that computes. bytes: read a second.

    body, head: parameters of the layers' linear maps, and of the head. cache: key and value numbers of one token.
    item: bytes of a number.
    """

    operations: float
    bytes: float
    body: int
    head: int
    cache: int
    item: int

    @classmethod
    def of(cls, roofline: BenchResult, precision: str) -> "Ceilings":
        """Return what `roofline` measured, for "fp32" or "bf16"."""
        rates = [m for m in roofline.measures if m.name.startswith(precision)]
        reads = roofline.find("memory read")
        assert rates, f"the roofline has no rate in {precision}"
        assert reads is not None, "the roofline reads memory"
        return cls(
            operations=max(max(m.values) for m in rates) * 1e9,
            bytes=max(reads.values) * 1e9,
            body=roofline.facts["body_parameters"],
            head=roofline.facts["head_parameters"],
            cache=roofline.facts["cache_numbers"],
            item=2 if precision == "bf16" else 4,
        )

    def generation(self, prompts: Sequence[int], lengths: Sequence[int], beginning: int = 0) -> float:
        """Return seconds to answer prompts with answers of ``lengths`` tokens.

        ``prompts``: tokens of each, which are computed once, and the ``beginning`` that all have once for all.
        A decode step takes the larger of its arithmetic and of reading weights, keys and values; answers that ended are
        not computed on. Every answer reads at least the shortest prompt.
        """
        seconds = 2 * self.body * (sum(prompts) - beginning * max(len(prompts) - 1, 0)) / self.operations
        for done in range(max(lengths, default=0)):
            rows = sum(length > done for length in lengths)
            arithmetic = 2 * (self.body + self.head) * rows / self.operations
            cached = rows * (min(prompts) + done) * self.cache
            reading = (self.body + self.head + cached) * self.item / self.bytes
            seconds += max(arithmetic, reading)
        return seconds

    def learning(self, part: str, prompts: Sequence[int], lengths: Sequence[int], beginning: int = 0) -> float:
        """Return seconds of one pass: what prompts begin with and each prompt once, the head on answers only.

        A forward pass takes 2 operations a parameter and token, a backward pass 4. part: "score" and "value" make the
        first alone, "update" and "fit" both; a critic ("value", "fit") has no head over the vocabulary.
        """
        answers = sum(lengths)
        tokens = sum(prompts) + answers - beginning * max(len(prompts) - 1, 0)
        head = 0 if part in ("value", "fit") else self.head * answers
        return (2 if part in ("score", "value") else 6) * (self.body * tokens + head) / self.operations


def with_limits(result: BenchResult, roofline: BenchResult | None) -> BenchResult:
    """Return ``result`` with a limit on each measure whose work its facts tell.

    ``facts["works"]``: name of a measure -> the parts of its work, each ``{"part": "generate" or as in `learning`,
    "prompts": tokens of each, "lengths": tokens of each answer, "beginning": tokens that all prompts begin with}``. The
    limit of a rate is answer tokens over those seconds.
    """
    works = result.facts.get("works")
    if roofline is None or not works:
        return result
    ceilings = Ceilings.of(roofline, result.facts["precision"])

    def seconds(part: dict[str, Any]) -> float:
        work = part["prompts"], part["lengths"], part.get("beginning", 0)
        return ceilings.generation(*work) if part["part"] == "generate" else ceilings.learning(part["part"], *work)

    def limited(measure: BenchMeasure) -> BenchMeasure:
        parts = works.get(measure.name, ())
        least = sum(map(seconds, parts))
        if not least:
            return measure
        tokens = sum(sum(part["lengths"]) for part in parts)
        return replace(measure, limit=tokens / least if measure.is_rate else least)

    return replace(result, measures=tuple(limited(measure) for measure in result.measures))
