"""Packages that programs in the sandbox may import beside the standard library: an allow-list, read-only."""

import functools
import importlib.util
import os
from collections.abc import Sequence

from gnomon.core.errors import ConfigError, unknown

KNOWN: dict[str, tuple[str, ...]] = {
    "numpy": (),
    "pandas": ("numpy", "dateutil", "six", "pytz", "tzdata"),
    "scipy": ("numpy",),
    "sympy": ("mpmath",),
}
"""Packages that may be allowed, each with what it imports: those that the hostile programs are tried with."""

_ROOM_MIB = 512  # of address space, which their libraries take before a program has done anything


def check_names(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that cannot be allowed."""
    for name in names:
        if name not in KNOWN:
            raise ConfigError(
                f"{unknown('package', name, KNOWN)}; packages = [...] allows programs in the sandbox those of "
                f"{', '.join(KNOWN)} that are installed"
            )


def importable(names: Sequence[str]) -> frozenset[str]:
    """Return the names that programs may import when these are allowed."""
    return frozenset(names).union(*(KNOWN[name] for name in names))


@functools.cache
def places(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the folders and files that programs may read to import these packages.

    What such a package needs comes along where it is installed, and the libraries that its wheel brings.

    Raises:
        ConfigError: A package is not known or not installed here; nothing is imported to find that out.
    """
    check_names(names)
    found: list[str] = []
    for name in sorted(importable(names)):
        # Found and not imported: this process needs no pandas to allow it.
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec is not None else None
        if origin is None and name in names:
            raise ConfigError(
                f"packages = {list(names)}: {name} is not installed in the environment of gnomon; pip install {name}, "
                f"or leave it out"
            )
        if origin is not None:
            is_folder = os.path.basename(origin) == "__init__.py"
            place = os.path.realpath(os.path.dirname(origin) if is_folder else origin)
            found += [path for path in (place, f"{place}.libs") if os.path.exists(path)]
    return tuple(found)


def folders_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the folders that these packages lie in."""
    return tuple(dict.fromkeys(os.path.dirname(place) for place in places(names)))


def room_mib(names: tuple[str, ...]) -> int:
    """Return the MiB of address space that a program gets beyond its limit, for the libraries of these packages."""
    return _ROOM_MIB if names else 0
