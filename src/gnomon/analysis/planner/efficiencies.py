"""The share of a data sheet's numbers that is reached, with the source of every share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Efficiencies:
    """All numbers of the formulas that are not on a data sheet.

    Attributes:
        training: Share of the peak operations, in the learner's passes.
        products: Share of the peak operations, in an engine.
        mixture: Factor on both for a mixture of experts.
        reading: Share of the memory bandwidth while decoding.
        links: Share of a link's rate in a collective.
        broadcast: Share of the adapter's rate when one device sends weights to all.
        hidden: Share of the shorter of computing and communicating that overlaps with the longer.
        memory: Share of a device's memory that may be planned.
        decode_step: Fixed seconds of a decoding step.
        exchange: Seconds of one all-reduce of tensor parallelism; each layer makes two.
        hop_inside: Seconds of one of a ring's n - 1 steps, in a node.
        hop_between: Seconds of one of a ring's n - 1 steps, between nodes.
        driver_token: Seconds of the run's own process for each token of a response.
        grade: Seconds of grading one response.
        store: Bytes per second into or out of an object store in the machine's memory.
        tcp: Bytes per second from node to node through the object store.
        merging: Bytes per second of weights that a node merges with adapters.
        libraries: Bytes of each device that no formula counts.
    """

    training: float = 0.33
    products: float = 0.54
    mixture: float = 0.5
    reading: float = 0.75
    links: float = 0.8
    broadcast: float = 0.38
    hidden: float = 0.9
    memory: float = 0.9
    decode_step: float = 1.4e-3
    exchange: float = 19e-6
    hop_inside: float = 3.4e-6
    hop_between: float = 14e-6
    driver_token: float = 2.7e-6
    grade: float = 0.01
    store: float = 3e9
    tcp: float = 2.5e9
    merging: float = 8e9
    libraries: float = 2e9


Kind = Literal["measured here", "published", "fitted", "assumed"]

SOURCES: Mapping[str, tuple[Kind, str]] = {
    "training": ("published", "torchtitan 2024-12: Llama 3.1 8B by FSDP2, not compiled, on 8 and 128 H100"),
    "products": ("fitted", "sglang issue 1008: Llama 3 8B on one GPU, 11.8 ms a step of 128 rows"),
    "mixture": ("assumed", "small products, and tokens that are sorted by expert; nothing was measured"),
    "reading": ("assumed", "a bare copy kernel reaches 0.9 of it, decoding less"),
    "links": ("assumed", "of large messages; nccl-tests on one's own machines say better"),
    "broadcast": ("published", "LMSYS 2026-04: NCCL broadcast of 1 TB of weights took 53 s, which is 19 GB/s of 50"),
    "hidden": ("assumed", "torchtitan lost 3% from 8 to 128 GPUs, where communicating is short"),
    "memory": ("assumed", "the rest is fragments; vLLM's own default is 0.9"),
    "decode_step": ("fitted", "sglang issue 1008: 7.4 ms a step of one row"),
    "exchange": ("fitted", "sglang issue 1008: 3.35 ms a step of one row on eight GPUs"),
    "hop_inside": ("published", "NCCL's own table of latencies, ring, simple protocol, NVLink (src/graph/tuning.cc)"),
    "hop_between": ("published", "the same, network"),
    "driver_token": ("measured here", "python -m experiments.capacity.run driver"),
    "grade": ("assumed", "a comparison of two numbers takes 0.1 ms, a program in a sandbox half a second"),
    "store": ("assumed", "copying and fingerprinting in one process"),
    "tcp": ("assumed", "one stream of 25 Gb/s Ethernet or better"),
    "merging": ("assumed", "eight threads; one of an AMD EPYC merges 1.0 GB/s of bfloat16 at ranks 8 and 16"),
    "libraries": ("assumed", "CUDA, NCCL's buffers, kernels"),
}  # fmt: skip
"""Kind of evidence and source of every efficiency."""

PUBLISHED = Efficiencies()
