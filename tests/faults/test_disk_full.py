"""F2: a disk that is full, wherever it happens: what was saved stays, and the run goes on once there is room."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("on_a_small_disk.py")
ALONE = ["unshare", "--user", "--map-root-user", "--mount"]


def _may_mount(folder: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run([*ALONE, "mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True, check=False)
    return tried.returncode == 0


def filled(folder: Path, sizes: list[int]) -> list[dict[str, Any]]:
    """Return what happened on disks of so many KiB."""
    if not _may_mount(folder):
        pytest.skip("this user may not mount a small disk of its own")
    ran = subprocess.run(
        [*ALONE, sys.executable, str(PROGRAM), str(folder), *map(str, sizes)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    for end in found:
        assert end["code"] in (0, 74) or (end["code"] == 2 and not end["steps"]), end
        assert end["left"] == [], end
        # Lines are whole and in order; where the disk was full they may be missing, and a resumed run writes on.
        assert end["steps"] == sorted(set(end["steps"])), end
        assert end["again"] in (0, None), end
        if end["newest"] is not None:
            assert {"learner", "curriculum", "stream"} <= set(end["parts"]), end
        if end["code"] == 0:
            assert end["newest"] == 6
    return found


@pytest.mark.slow
def test_a_full_disk_costs_no_checkpoint_and_the_run_goes_on(tmp_path: Path):
    """A disk for a part of six checkpoints: exit code 74, the ones before load, and with room the run is finished."""
    ends = filled(tmp_path, [6500])

    assert {end["code"] for end in ends} == {74}
    assert all(end["after"][-1] == 6 for end in ends)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_disks_of_a_hundred_sizes(tmp_path: Path):
    """From too small for the first file to large enough for all."""
    ends = filled(tmp_path, [16, *range(40, 12_000, 120)])

    assert {end["code"] for end in ends} >= {0, 74}
    assert len(ends) >= 100
