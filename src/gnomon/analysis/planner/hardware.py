"""Accelerators, their links and their machines: numbers of public data sheets."""

from dataclasses import dataclass

from gnomon.core.errors import ConfigError, unknown


@dataclass(frozen=True)
class Hardware:
    """One accelerator and its surroundings. Rates are per second, sizes in bytes, links in one direction.

    Attributes:
        operations: Dense floating-point operations in bfloat16.
        bandwidth: Of the device's memory.
        memory: Of the device.
        link: To the other devices of the node.
        net: Of the device's network adapter.
        host_link: To the node's memory.
        node: Devices of a node.
        host_memory: Memory of a node.
        source: Source of the numbers.
    """

    name: str
    operations: float
    bandwidth: float
    memory: float
    link: float
    net: float
    host_link: float
    node: int
    host_memory: float
    source: str

    def nodes(self, devices: int) -> int:
        """Return the number of nodes for so many devices."""
        return -(-devices // self.node)

    def between(self, devices: int) -> float:
        """Return the rate at which each of ``devices`` receives what all others hold.

        In one node this is the link's rate. Between nodes, every byte enters each node once through all adapters
        together, and then travels over the links.
        """
        return self.link if devices <= self.node else min(self.link, self.net * self.node)


_PCIE = {4: 32e9, 5: 64e9}
"""Bytes per second of 16 lanes in one direction, by generation."""


def _pcie_gpu(name: str, operations: float, bandwidth: float, memory: float, lanes: int, sheet: str) -> Hardware:
    """Return a GPU without NVLink. Eight a node, a network of 100 Gb/s and 512 GB of memory are assumed."""
    source = f"{sheet}; PCIe {lanes}; network and memory of the node assumed"
    return Hardware(name, operations, bandwidth, memory, _PCIE[lanes], 12.5e9, _PCIE[lanes], 8, 0.5e12, source)


_GPUS = (
    _pcie_gpu("rtx3090", 71e12, 0.936e12, 24e9, 4, "NVIDIA GA102 white paper, BF16 with FP32 sums, dense"),
    _pcie_gpu("rtx4090", 165.2e12, 1.008e12, 24e9, 4, "NVIDIA Ada white paper, BF16 with FP32 sums, dense"),
    _pcie_gpu("rtx5090", 209.5e12, 1.792e12, 32e9, 5, "NVIDIA RTX Blackwell white paper, BF16 with FP32 sums, dense"),
    _pcie_gpu("a10", 125e12, 0.6e12, 24e9, 4, "NVIDIA A10 data sheet, dense"),
    _pcie_gpu("l4", 121e12, 0.3e12, 24e9, 4, "NVIDIA L4 data sheet, half of its number with sparsity"),
    _pcie_gpu("l40s", 362e12, 0.864e12, 48e9, 4, "NVIDIA L40S data sheet, dense"),
    Hardware(
        "a100-40", 312e12, 1.555e12, 40e9, 300e9, 25e9, 32e9, 8, 1e12,
        "NVIDIA A100 data sheet, SXM 40 GB; DGX A100 320GB: 200 Gb/s a GPU, PCIe 4, 1 TB",
    ),
    Hardware(
        "a100", 312e12, 2.039e12, 80e9, 300e9, 25e9, 32e9, 8, 2e12,
        "NVIDIA A100 data sheet, SXM 80 GB; DGX A100: 200 Gb/s a GPU, PCIe 4, 2 TB",
    ),
    Hardware(
        "h100", 989e12, 3.35e12, 80e9, 450e9, 50e9, 64e9, 8, 2e12,
        "NVIDIA H100 data sheet, SXM, dense; DGX H100: 400 Gb/s a GPU, PCIe 5, 2 TB",
    ),
    Hardware(
        "h200", 989e12, 4.8e12, 141e9, 450e9, 50e9, 64e9, 8, 2e12,
        "NVIDIA H200 data sheet, SXM, dense; DGX H200: 400 Gb/s a GPU, PCIe 5, 2 TB",
    ),
    Hardware(
        "b200", 2250e12, 8e12, 180e9, 900e9, 50e9, 64e9, 8, 2e12,
        "NVIDIA DGX B200 data sheet, an eighth of it, dense; 400 Gb/s a GPU, PCIe 5, 2 TB",
    ),
)  # fmt: skip
GPUS = {gpu.name: gpu for gpu in _GPUS}
_SAME = {"a100-80": "a100"}


def hardware_of(name: str) -> Hardware:
    """Return the accelerator of that name.

    Raises:
        ConfigError: If the name is unknown; the message lists the known names.
    """
    plain = _SAME.get(name.lower(), name.lower())
    if plain not in GPUS:
        raise ConfigError(unknown("hardware", name, [*GPUS, *_SAME]))
    return GPUS[plain]


def processor(operations: float, bandwidth: float, memory: float) -> Hardware:
    """Return a machine without accelerators, from the roofline that `gnomon bench` measured."""
    return Hardware(
        "this processor", operations, bandwidth, memory, bandwidth, bandwidth, bandwidth, 1, memory, "gnomon bench"
    )
