"""Bytes, seconds and counts as short text."""

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
