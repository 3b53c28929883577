"""Accelerators, the links between them, and the machines that they sit in: numbers of public data sheets."""

from dataclasses import dataclass

from gnomon.core.errors import ConfigError, unknown


@dataclass(frozen=True)
class Hardware:
    """One accelerator and what is around it. Rates are a second, sizes in bytes; links are counted in one direction.

    operations: floating-point, dense, in bfloat16. bandwidth: of the device's own memory. memory: of the device.
    link: to the others of its node. net: of its own adapter, to other nodes. host_link: to the node's memory.
    node: devices of a node. host_memory: of a node. source: where the numbers are from.
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
        """Return how many nodes so many devices fill."""
        return -(-devices // self.node)

    def between(self, devices: int) -> float:
        """Return the rate at which each of ``devices`` takes in what all others hold.

        Inside of a node that is its link. Between nodes every byte enters each node once, through all of its adapters
        together, and goes round inside by the links.
        """
        return self.link if devices <= self.node else min(self.link, self.net * self.node)


_GPUS = (
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


def hardware_of(name: str) -> Hardware:
    """Return the accelerator of that name. Raises: ConfigError naming those that are known."""
    if name.lower() not in GPUS:
        raise ConfigError(unknown("hardware", name, GPUS))
    return GPUS[name.lower()]


def processor(operations: float, bandwidth: float, memory: float) -> Hardware:
    """Return a machine without accelerators, by what its roofline measured (`gnomon bench`): all in one memory."""
    return Hardware(
        "this processor", operations, bandwidth, memory, bandwidth, bandwidth, bandwidth, 1, memory, "gnomon bench"
    )
