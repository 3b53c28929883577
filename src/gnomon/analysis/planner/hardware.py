"""Accelerators, their links and machines: data sheets, the share of those that is reached, and quantities as text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gnomon.core.errors import ConfigError, unknown
from gnomon.core.tables import packaged_toml

KNOWN = packaged_toml("gnomon.analysis.planner", "known.toml")


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
        # The slower of the two decides: the network adapters of all devices of a node together, or the links inside it.
        return self.link if devices <= self.node else min(self.link, self.net * self.node)


GPUS = {name: Hardware(name, **numbers) for name, numbers in KNOWN["hardware"].items()}
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

    training: float
    products: float
    mixture: float
    reading: float
    links: float
    broadcast: float
    hidden: float
    memory: float
    decode_step: float
    exchange: float
    hop_inside: float
    hop_between: float
    driver_token: float
    grade: float
    store: float
    tcp: float
    merging: float
    libraries: float


_KNOWN: Mapping[str, Mapping[str, Any]] = KNOWN["efficiencies"]
PUBLISHED = Efficiencies(**{name: known["value"] for name, known in _KNOWN.items()})
SOURCES: Mapping[str, tuple[str, str]] = {name: (known["kind"], known["source"]) for name, known in _KNOWN.items()}
"""Kind of evidence and source of every efficiency."""


# Bytes, seconds and counts as short text.

_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_COUNTS = ((1e9, "billion"), (1e6, "million"))


def size(number: float) -> str:
    """Format bytes.

    >>> size(3.3e12), size(459e9), size(362_000), size(12)
    ('3.3 TB', '459 GB', '362 kB', '12 bytes')
    """
    for unit, name in _SIZES:
        if number >= unit:
            return f"{number / unit:.2g} {name}" if unit == 1e12 else f"{number / unit:,.3g} {name}"
    return f"{number:.0f} bytes"


def seconds(number: float) -> str:
    """Format a time.

    >>> seconds(84.2), seconds(3.25), seconds(0.643), seconds(0.034), seconds(0.0012), seconds(2e-6)
    ('84 s', '3.2 s', '0.64 s', '34 ms', '1.2 ms', 'under 0.1 ms')
    """
    if number >= 0.1:
        return f"{number:.0f} s" if number >= 10 else f"{number:.{1 if number >= 1 else 2}f} s"
    if number < 1e-4:
        return "under 0.1 ms"
    return f"{number * 1e3:.0f} ms" if number >= 0.01 else f"{number * 1e3:.1f} ms"


def count(number: float) -> str:
    """Format a count.

    >>> count(8.19e9), count(134_515_008), count(45_321)
    ('8.2 billion', '134.5 million', '45,321')
    """
    for unit, name in _COUNTS:
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:,.0f}"
