"""What the architecture tests share."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tracked() -> list[Path]:
    """Return the files that are, or would be, committed."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    # A source archive has no git: then everything but what is made here.
    made = {".venv", "runs", "build", "dist"}
    tops = [p for p in ROOT.iterdir() if p.name not in made and not p.name.endswith("_cache")]
    paths = [path for top in tops for path in ([top] if top.is_file() else top.rglob("*"))]
    return [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
