"""What tests of pages stand on."""

import shutil
from collections.abc import Iterator

import pytest
from tests.insight.browsing import NAMES, Browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for the whole session; without one its tests are skipped."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no Chromium on this machine: none of {', '.join(NAMES)} is a command")
    found = Browser(program, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()
