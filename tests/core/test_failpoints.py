"""Named points at which a test lets the program die."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gnomon.core import failpoints
from gnomon.core.errors import ConfigError

SOURCES = Path(failpoints.__file__).parents[1]
DIES = """
from gnomon.core.failpoints import failpoint

failpoint("ask")
print("once", flush=True)
failpoint("ask")
print("twice")
"""


def test_a_point_kills_when_it_is_reached_for_the_nth_time():
    """The second time, not the first, as SIGKILL does: nothing after it runs."""
    environment = {**os.environ, failpoints.VARIABLE: "ask:2"}
    ran = subprocess.run([sys.executable, "-c", DIES], env=environment, capture_output=True, text=True, check=False)

    assert (ran.returncode, ran.stdout) == (-signal.SIGKILL, "once\n")


def test_a_point_can_be_a_full_disk():
    """It raises what a full disk raises, once; other points, and the same one later, are passed."""
    failpoints.arm("record:1:full")
    try:
        failpoints.failpoint("ask")
        with pytest.raises(OSError, match="No space left") as raised:
            failpoints.failpoint("record")
        failpoints.failpoint("record")
    finally:
        failpoints.arm("")

    assert raised.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("aks:1", "did you mean 'ask'"), ("ask", "a count from 1"), ("ask:0", "count from 1"), ("ask:1:late", "count")],
)
def test_a_point_that_is_none_is_refused(wrong: str, said: str):
    """A misspelled point would let a test pass that tests nothing."""
    with pytest.raises(ConfigError, match=said):
        failpoints.arm(wrong)


def test_every_point_is_somewhere_in_the_program():
    """Each name stands in exactly one place of the package, and no other name is reached."""
    texts = [path.read_text() for path in SOURCES.rglob("*.py")]
    reached = [name for text in texts for name in re.findall(r'\bfailpoint\("([a-z-]+)"\)', text)]

    assert sorted(reached) == sorted(failpoints.POINTS)
