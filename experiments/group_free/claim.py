"""SPO's group-free throughput: simulated again with several seeds, beside what `on_vllm.py` has written."""

import json

from gnomon.studies.claims import Claim, Workplace, ratio
from gnomon.studies.measured import Measured
from gnomon.studies.virtual import run_virtually
from gnomon.studies.waiting import LogNormal, Setting, answering_after, measure

WAITS, FREE = "group-synchronous", "group-free"
SETTINGS = {WAITS: Setting(64, 8), FREE: Setting(64, 1, pool=2, bound=16)}
SEEDS = range(8)
"""Of the simulation. Three of them, tried first, left 9.9 [3.9, 15.8], which decides nothing."""


def simulated(name: str, sigma: float, seed: int) -> float:
    """Return rollouts a second of virtual time, over 30 steps after 10 that fill the pool."""
    engine = answering_after(LogNormal(sigma))
    return run_virtually(measure(SETTINGS[name], engine, 30, 10, seed)).rollouts_per_second


def recorded(place: Workplace) -> Measured:
    """Return what is simulated now, and what vLLM gave: README.md says how that is measured again."""
    numbers: dict[str, dict[str, dict[int, float]]] = {}
    vllm = json.loads((place.home / "vllm.json").read_text())["found"]
    for name in SETTINGS:
        found = {f"simulated, sigma {s:g}": {n: simulated(name, s, n) for n in SEEDS} for s in (0.25, 1.0)}
        numbers[name] = found | {"vLLM": dict(enumerate(run["rollouts_per_second"] for run in vllm[name]["runs"]))}
    return Measured(numbers)


CLAIM = Claim(
    title="SPO: throughput without groups",
    claim=(
        "When rollouts take very different times, a batch of groups waits for its slowest member. Without groups a "
        "step trains whichever rollouts are ready."
    ),
    source="Single-stream Policy Optimization, arXiv 2509.13232 (ICLR 2026): 4.35 times the throughput, simulated.",
    protocol="README.md tells it; rollouts a second, 8 seeds simulated and 3 on vLLM.",
    measure=recorded,
    expectations=(
        ratio("simulated, long tail: at least 4.35 times as fast", WAITS, FREE, "simulated, sigma 1", above=4.35),
        ratio("simulated, short tail: less than 4.35 times", WAITS, FREE, "simulated, sigma 0.25", below=4.35),
        ratio("on vLLM: at least 4.35 times as fast", WAITS, FREE, "vLLM", above=4.35),
        ratio("on vLLM: faster at all", WAITS, FREE, "vLLM", above=1.0),
    ),
    is_own_page=True,
)
