"""A program of its own: train on a disk that is full sooner or later, then look at what is left. Needs a namespace.

on_a_small_disk.py FOLDER KIB [KIB ...] prints one JSON object a size.
"""

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

from tests.random_model import RANDOM

from gnomon.cli.main import main
from gnomon.records.checkpoints import Checkpoints, load
from gnomon.records.jsonl import read_rows

TINY = [
    "rewards=[{kind='format', pattern='[!-P].*'}]", "task.size=40", "rollouts_per_step=8", "held_out.size=4", "steps=6",
    "grading.workers=1", "algorithm.num_generations=4", "checkpoints.every=1", "checkpoints.keep_last=100",
    "grading.deadline_seconds=600", "engine.timeout_seconds=600",
]  # fmt: skip


def attempt(place: Path, kib: int) -> dict[str, object]:
    """Train with so much space, free some, go on; return how both ended, and what there was in between."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place)], check=True)
    run, said = place / "run", io.StringIO()
    with redirect_stderr(said):
        code = main(["train", RANDOM, *TINY, "--run-dir", str(run)])
    checkpoints = Checkpoints(run / "checkpoints")
    found = checkpoints.newest() if run.is_dir() else None
    left = sorted(path.name for path in run.glob("checkpoints/.tmp-*"))
    steps = [row["step"] for row in read_rows(run / "metrics.jsonl")]
    parts = [] if found is None else sorted(load(found.path))
    subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
    began = (run / "experiment.toml").is_file()
    with redirect_stderr(said):
        again = main(["resume", str(run)]) if began else None
    after = [row["step"] for row in read_rows(run / "metrics.jsonl")]
    subprocess.run(["umount", "-l", str(place)], check=True)
    return {
        "kib": kib, "code": code, "newest": None if found is None else found.step, "left": left, "parts": parts,
        "steps": steps, "again": again, "after": after, "said": said.getvalue(),
    }  # fmt: skip


if __name__ == "__main__":
    for size in sys.argv[2:]:
        print(json.dumps(attempt(Path(sys.argv[1]), int(size))), flush=True)
