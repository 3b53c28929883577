"""Checkpoints whose manifests fit and whose states hold what no run writes: words, and never a hang or a traceback."""

import copy
import json
import math
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.random_model import RANDOM

from gnomon.cli.main import main
from gnomon.records.manifest import write_manifest

ODD: list[Any] = [-1, 2**70, 10**400, math.inf, math.nan, True, None, "x", [], {}, 0.5, [[1, 2, 3, 4]] * 99]
RUN = [
    "steps=4", "task.size=40", "rollouts_per_step=8", "held_out.size=3", "checkpoints.every=2",
    "checkpoints.keep_last=9", "algorithm.num_generations=2", "grading.workers=1",
]  # fmt: skip
SECONDS = 60


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that was broken off after its checkpoint of step 2."""
    run = tmp_path_factory.mktemp("forged") / "base"
    assert main(["train", RANDOM, *RUN, "--run-dir", str(run)]) == 0
    shutil.rmtree(run / "checkpoints" / "step-4")
    return run


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where each leaf of a JSON value is; of long lists the first and the last."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list) and value:
        yield path
        for number in sorted({0, len(value) - 1}):
            yield from places(value[number], (*path, number))
    else:
        yield path


def forged(base: Path, run: Path, part: str, path: tuple[Any, ...], value: Any) -> Path:
    """Return a copy of a run with another value at that place of a part's state, and a manifest that fits."""
    shutil.copytree(base, run)
    folder = run / "checkpoints" / "step-2"
    file = folder / "state" / f"{part}.json"
    whole = json.loads(file.read_text())
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = copy.deepcopy(value)
    file.write_text(json.dumps(whole) + "\n")
    sealed(folder)
    return run


def sealed(folder: Path) -> None:
    """Write the manifest of a changed checkpoint anew."""
    (folder / "manifest.json").unlink()
    write_manifest(folder, 2)


def ended(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Resume a run and return the exit code and what was said. Raises: whatever nobody foresaw, a hang too."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"it hung: {run}")

    capsys.readouterr()
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        code = main(["resume", str(run)])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "path", "value"),
    [
        ("generators", ("numpy", 0), math.inf), ("generators", ("numpy", 0), 10**9), ("generators", ("python", 0), 7),
        ("generators", ("python", 2), math.inf), ("generators", ("python", 2), "x"),
        ("generators", ("numpy", 2), math.nan), ("generators", ("python", 1, 624), 10**9),
        ("generators", ("python", 1, 0), -5),
        ("stream", ("taken",), math.inf),
        ("stream", ("slack",), True), ("stream", ("slack",), 3), ("stream", ("next",), -1),
        ("stream", ("pending",), {}),
        ("stream", ("pending",), [[1, 2, 3, 4]] * 99), ("stream", ("pending",), [[10**6, 0, 0, 0]]),
        ("learner", ("version",), -1), ("learner", ("version",), 0.5), ("learner", ("work",), [1]),
        ("learner", ("lag", "behavior"), "x"), ("learner", ("lag", "proximal", 0), math.nan),
        ("curriculum", ("position",), 10**9), ("curriculum", ("passed_over",), [-7]), ("curriculum", ("epoch",), 2**70),
    ],
)  # fmt: skip
def test_a_value_that_no_run_writes_ends_in_words(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str], part: str, path: tuple[Any, ...], value: Any
):
    """One message of at most five lines that names the part and the checkpoint, and exit code 1."""
    code, said = ended(forged(base, tmp_path / "run", part, path, value), capsys)

    assert code == 1, said
    assert "Traceback" not in said
    message = said[said.rindex("gnomon resume: ") :]
    assert len(message.strip().splitlines()) <= 5
    assert part in message or "random numbers" in message


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_value_of_any_state_ends_in_a_traceback(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]):
    """Every leaf of every state, with twelve values each: refused in words, or gone on with; never a hang."""
    for file in sorted((base / "checkpoints" / "step-2" / "state").glob("*.json")):
        for path in places(json.loads(file.read_text())):
            for value in ODD if path else ():
                code, said = ended(forged(base, tmp_path / "run", file.stem, path, value), capsys)
                assert code in (0, 1, 2), (file.stem, path, value, said)
                assert "Traceback" not in said, (file.stem, path, value)
                shutil.rmtree(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_tensor_of_another_shape_or_type_ends_in_a_traceback(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
):
    """Tensors of every state: missing, shorter, of other axes, of another type."""
    for file in sorted((base / "checkpoints" / "step-2" / "state").glob("*.safetensors")):
        names = sorted(load_file(file))
        for name in [*names[:2], *names[-2:]] if len(names) > 4 else names:
            for change in (None, lambda t: t[:1] * 1, lambda t: t.unsqueeze(0), lambda t: t.to(torch.int8)):
                shutil.copytree(base, tmp_path / "run")
                folder = tmp_path / "run" / "checkpoints" / "step-2"
                tensors = load_file(folder / "state" / file.name)
                whole = tensors.pop(name)
                if change is not None and whole.dim() > 0:
                    tensors[name] = change(whole).contiguous()
                save_file(tensors, folder / "state" / file.name)
                sealed(folder)
                code, said = ended(tmp_path / "run", capsys)
                assert code in (0, 1, 2), (file.stem, name, said)
                assert "Traceback" not in said, (file.stem, name)
                shutil.rmtree(tmp_path / "run")
