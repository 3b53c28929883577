"""Messages between an engine and its server as JSON values; `core/http.py` carries them."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gnomon.core.types import Completion
from gnomon.engines.base import Sampling
from gnomon.models.transfer.fingerprint import Fingerprint

KEY = "GNOMON_ENGINE_KEY"
"""The environment variable that holds the key, here and at the client: all users can read a program's arguments."""


def sampling_to(sampling: Sampling) -> dict[str, Any]:
    """Return JSON values of sampling settings."""
    return asdict(sampling)


def sampling_from(values: Mapping[str, Any]) -> Sampling:
    """Return what `sampling_to` was given.

    Raises:
        TypeError: The names are not those of `Sampling`.
    """
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return Sampling(**given)


def completion_to(done: Completion) -> dict[str, Any]:
    """Return JSON values of an answer; numbers survive to the bit. Which experts were chosen does not travel."""
    return {
        "tokens": done.tokens,
        "logprobs": done.logprobs,
        "full_logprobs": done.full_logprobs,
        "oldest_version": done.oldest_version,
        "newest_version": done.newest_version,
        "stop": done.stop,
    }


def completion_from(values: Mapping[str, Any]) -> Completion:
    """Return what `completion_to` was given."""
    sequences = {name: tuple(values[name]) for name in ("tokens", "logprobs", "full_logprobs")}
    return Completion(**{**values, **sequences})


def fingerprint_to(print_: Fingerprint) -> list[Any]:
    """Return JSON values of a fingerprint."""
    return [print_.dtype, list(print_.shape), print_.digest]


def fingerprint_from(values: tuple[str, list[int], int]) -> Fingerprint:
    """Return what `fingerprint_to` was given."""
    dtype, shape, digest = values
    return Fingerprint(dtype, tuple(shape), digest)
