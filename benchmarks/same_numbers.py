"""``python -m benchmarks.same_numbers write|compare FILE``: whether a change of the code left every number as it was.

Six presets train on `tiny`, and with ``--quickstart`` SmolLM2-135M makes the quickstart's first three steps, all under
fixed seeds and one thread. What is compared: the metrics of every step that time, memory and paths do not enter, the
sampled tokens with their log-probabilities, and the weights with the state of the optimizer. Only the command
``gnomon`` and the files of a run directory are used, so code of any arrangement can be compared with any other:

    python -m benchmarks.same_numbers write before.json --gnomon ../before/.venv/bin/gnomon
    python -m benchmarks.same_numbers compare before.json

A comparison holds for one machine and one version of torch: another processor adds in another order.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PRESETS = ("grpo", "spo", "gspo", "p3o", "vapo", "dapo")
QUICKSTART = "quickstart"
STEPS = 3

# Each preset's settings for a run of a few short steps: value pre-training would take longer than everything else.
_SETTINGS = {"vapo": ("algorithm.critic.pretraining.steps=2",)}
_TRAINING = ("advantage", "critic", "learner", "loss", "mismatch", "reward", "rollout")
_SAMPLED = {"sampled tokens": ("prompt", "response"), "log-probabilities": ("logprobs",), "rewards": ("reward",)}
_WEIGHTS = {
    "weights": "model.safetensors",
    "weights of the critic": "critic/model.safetensors",
    "state of the optimizer": "state/learner.safetensors",
}

Digests = dict[str, dict[str, dict[str, str]]]
"""Of each run, by step, by what was digested."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the digests into a file or compare them with a file's; returns 1 where a number differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_numbers", description=__doc__)
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--gnomon", type=Path, default=Path(sys.executable).with_name("gnomon"), metavar="PATH")
    parser.add_argument("--preset", action="append", choices=PRESETS, help="this one alone; may be repeated")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="of each preset on tiny")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--quickstart", action="store_true", help="its first three steps too: some minutes")
    given = parser.parse_args(arguments)
    names = (*(given.preset or PRESETS), *((QUICKSTART,) if given.quickstart else ()))
    found = {name: _run(given.gnomon, name, given.steps, given.seed) for name in names}
    if given.what == "write":
        given.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    difference = first_difference(json.loads(given.file.read_text(encoding="utf-8")), found)
    if difference is not None:
        print(f"differs: {difference}")
        return 1
    print(f"the same: {', '.join(names)}: {_count(found)} digests")
    return 0


def first_difference(before: Digests, after: Digests) -> str | None:
    """Return the first place where the two differ as "run, step, what", or None.

    A run that ``before`` alone has was not asked for, and is no difference.

    >>> first_difference({"grpo": {"step 1": {"weights": "a"}}}, {"grpo": {"step 1": {"weights": "b"}}})
    'grpo, step 1, weights'
    """
    for name, steps in after.items():
        was = before.get(name, {})
        for step in {**steps, **was}:
            old, new = was.get(step, {}), steps.get(step, {})
            for what in {**new, **old}:
                if old.get(what) != new.get(what):
                    return f"{name}, {step}, {what}"
    return None


def digests_of(run: Path) -> dict[str, dict[str, str]]:
    """Return the digests of a finished run's directory, by step."""
    found: dict[str, dict[str, str]] = {}
    for number, row in enumerate(_rows(run / "pretraining.jsonl"), start=1):
        found[f"pre-training batch {number}"] = _metrics(row)
    # A rollout comes before what is computed of it: the first difference is the earliest.
    for number, row in enumerate(_rows(run / "metrics.jsonl"), start=1):
        sampled = list(_rows(run / "rollouts" / f"step-{number:06d}.jsonl"))
        columns = {
            what: _digest(json.dumps([[row[key] for key in keys] for row in sampled]).encode())
            for what, keys in _SAMPLED.items()
        }
        found[f"step {number}"] = columns | _metrics(row)
    for folder in sorted((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.partition("-")[2])):
        if re.fullmatch(r"step-\d+", folder.name):
            kept = {what: folder / file for what, file in _WEIGHTS.items() if (folder / file).is_file()}
            step = found.setdefault(f"step {folder.name.partition('-')[2]}", {})
            step.update({what: _tensors(path) for what, path in kept.items()})
    return found


def _run(gnomon: Path, name: str, steps: int, seed: int) -> dict[str, dict[str, str]]:
    """Train in a folder of its own, which is deleted, and return the digests of the run."""
    overrides = [f"seed={seed}", "evaluation.before=false"]
    if name == QUICKSTART:
        overrides += [f"steps={STEPS}", "checkpoints.every=0"]
    else:
        overrides += [f"algorithm={name}", f"steps={steps}", "checkpoints.every=1", f"checkpoints.keep_last={steps}"]
    overrides += _SETTINGS.get(name, ())
    with tempfile.TemporaryDirectory() as folder:
        command = [str(gnomon.absolute()), "train", QUICKSTART if name == QUICKSTART else "tiny", "--run-dir", "run"]
        done = subprocess.run(
            [*command, *overrides],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return digests_of(Path(folder) / "run")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        with path.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def _metrics(row: dict[str, Any]) -> dict[str, str]:
    """Return the training's numbers, each exact to its last digit."""
    return {key: repr(row[key]) for key in sorted(row) if key.partition("/")[0] in _TRAINING}


def _tensors(path: Path) -> str:
    """Return the digest of a safetensors file: its header, where names, types, shapes and places are, and its bytes."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    return _digest(json.dumps(header, sort_keys=True).encode() + content[8 + size :])


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _count(found: Digests) -> int:
    return sum(len(what) for steps in found.values() for what in steps.values())


if __name__ == "__main__":
    sys.exit(main())
