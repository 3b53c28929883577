"""docs/walk.md: one prompt through few files, all of which exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "gnomon"
MOST = 15


def test_the_walk_follows_a_prompt_through_at_most_fifteen_files_that_exist() -> None:
    """A path of a module in the walk is that of a file of the package, and at most fifteen are named."""
    text = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", text))
    missing = sorted(path for path in named if not (SOURCE / path).is_file())
    assert not missing, f"docs/walk.md names files that are not there: {missing}"
    assert 10 <= len(named) <= MOST, f"docs/walk.md names {len(named)} files: {sorted(named)}"
