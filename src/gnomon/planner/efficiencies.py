"""What share of a data sheet is reached, and who says so: measured, published, fitted to published, or assumed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Efficiencies:
    """Every number in the formulas that is not on a data sheet.

    Shares, of 1: training: of the operations, in passes of the learner. products: of them, in an engine. mixture: of
    either that is left in a mixture of experts. reading: of the memory's bandwidth, while decoding. links: of a link's
    rate in a collective. broadcast: of the adapter's rate, when weights go from one device to all. hidden: of the
    shorter of computing and communicating that happens while the longer does. memory: of a device that may be planned.
    Seconds: decode_step: of each step of decoding, whatever it computes. exchange: of one sum over devices of tensor
    parallelism, two of which each layer makes. hop_inside, hop_between: of one of the n - 1 steps of a ring, in a node
    and between nodes. driver_token: of the run's own process, for each token of an answer. grade: of judging an answer.
    Rates, bytes a second: store: into or out of an object store in the machine's memory. tcp: from node to node through
    it. merging: of weights that a node merges with adapters. Bytes: libraries: of each device that no formula sees.
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
    "driver_token": ("measured here", "python experiments/capacity/run.py driver"),
    "grade": ("assumed", "a comparison of two numbers takes 0.1 ms, a program in a sandbox half a second"),
    "store": ("assumed", "copying and fingerprinting in one process"),
    "tcp": ("assumed", "one stream of 25 Gb/s Ethernet or better"),
    "merging": ("assumed", "eight threads; one of an AMD EPYC merges 1.0 GB/s of bfloat16 at ranks 8 and 16"),
    "libraries": ("assumed", "CUDA, NCCL's buffers, kernels"),
}  # fmt: skip
"""Of every efficiency: what kind of knowledge it is, and where it is from."""

PUBLISHED = Efficiencies()
