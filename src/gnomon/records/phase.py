"""A stretch of work that a person waits for, and how it is said."""

from collections.abc import Callable

from gnomon.core.redaction import visible

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


class Phase:
    """Work with a name, and a count when its length is known: ``with console.phase("loading") as phase``.

    Args:
        total: Number of units to do; 0 when the number is not known.
        unit: "bytes" for sizes.
        is_unlogged: Leaves no line of its own behind.
        clock: seconds.
        report: Called whenever more is done.
    """

    def __init__(
        self,
        text: str,
        total: int,
        unit: str,
        is_unlogged: bool,
        clock: Callable[[], float],
        report: Callable[[], None],
    ) -> None:
        self.text, self.total, self.unit, self.is_unlogged, self.done = text, total, unit, is_unlogged, 0
        self.is_announced = False
        self._clock, self._began, self._report = clock, clock(), report

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began

    def advance(self, count: int = 1) -> None:
        """Note that so many more are done."""
        self.done += count
        self._report()

    def __str__(self) -> str:
        parts = [visible(self.text)]
        if self.total:
            parts.append(sizes(self.done, self.total) if self.unit == "bytes" else f"{self.done}/{self.total}")
        if 0 < self.done < self.total:
            parts.append(f"{duration(self.seconds * (self.total - self.done) / self.done)} left")
        return f"{'  '.join(parts)}  ({duration(self.seconds)})"


def duration(seconds: float) -> str:
    """Return seconds as a person says them.

    >>> duration(7.4), duration(192), duration(7500)
    ('7s', '3m 12s', '2h 05m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def sizes(done: int, total: int) -> str:
    """Return how much of a size is done, in the unit that suits the whole.

    >>> sizes(300 << 20, 2 << 30), sizes(10, 999)
    ('0.3/2.0 GiB', '10/999 bytes')
    """
    power = min(max(total.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    if power == 0:
        return f"{done}/{total} bytes"
    return f"{done / 1024**power:.1f}/{total / 1024**power:.1f} {_UNITS[power]}"
