"""Other people's programs: which are at hand, and how they are called. They run in their own interpreters."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gnomon.core.errors import ConfigError

LIBRARIES = ("trl", "vllm")
_ASK = (
    "import importlib.util as u, json, sys; print(json.dumps([n for n in sys.argv[1:] if u.find_spec(n) is not None]))"
)


@dataclass(frozen=True)
class PeerProgram:
    """One contender: a command that prints its `Result` as a JSON object in its last line.

    is_tuned: whether it gets the allocator settings that every contender in a race gets.
    """

    case: str
    contender: str
    command: tuple[str, ...]
    is_tuned: bool = True


def script(name: str) -> Path | None:
    """Return the program that drives a peer."""
    place = Path(__file__).resolve().parents[1] / "peers" / name
    return place if place.is_file() else None


def libraries_of(python: str) -> list[str]:
    """Return which peers an interpreter has. Raises: ConfigError when it cannot be run."""
    try:
        ran = subprocess.run([python, "-c", _ASK, *LIBRARIES], capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise ConfigError(
            f"--peer-python {python} cannot be run ({error.strerror}); give a Python interpreter"
        ) from error
    if ran.returncode:
        raise ConfigError(f"--peer-python {python} is no Python interpreter: it ended with code {ran.returncode}")
    return [str(name) for name in json.loads(ran.stdout)]


def at_hand(pythons: Sequence[str]) -> dict[str, str]:
    """Return library -> interpreter, the first of ``pythons`` that has it, else this one.

    Raises: ConfigError when one cannot be run.
    """
    found: dict[str, str] = {}
    for python in (*pythons, sys.executable):
        for library in libraries_of(python):
            found.setdefault(library, python)
    return found


def programs(
    cases: Sequence[str], found: Mapping[str, str], work: Path, repeats: int, precision: str
) -> list[PeerProgram]:
    """Return the peers of ``cases`` that are at hand. ``found``: of `at_hand`. ``work``: the file that they read.

    TRL runs with fp32 weights, the settings that learn: all in fp32, and where the machine computes faster in bf16 with
    bf16 autocast; there also with bf16 weights, which is faster still and learns less. (Without bf16 hardware autocast
    is emulated: no step ended in ten minutes.) vLLM decodes compiled and eager, in our precision.
    """
    chosen: list[PeerProgram] = []
    trl, vllm = script("trl_grpo.py"), script("vllm_decode.py")
    if "c1" in cases and "trl" in found and trl is not None:
        step = (found["trl"], str(trl), str(work), str(repeats))
        chosen.append(PeerProgram("c1", "trl fp32", (*step, "fp32")))
        if precision == "bf16":
            chosen.append(PeerProgram("c1", "trl bf16 autocast", (*step, "autocast")))
            chosen.append(PeerProgram("c1", "trl bf16", (*step, "bf16")))
    if "engine" in cases and "vllm" in found and vllm is not None:
        dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
        decode = (found["vllm"], str(vllm), str(work), str(repeats), dtype)
        chosen += [PeerProgram("engine", "vllm", decode), PeerProgram("engine", "vllm eager", (*decode, "eager"))]
    return chosen
