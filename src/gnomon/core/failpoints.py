"""Named points at which a test lets the program die, or its disk be full; without one, each is a look at an empty dict.

``GNOMON_FAIL_AT=backward:3`` kills the process, as SIGKILL does, when the point "backward" is reached for the third
time; ``checkpoint-file:1:full`` raises what a full disk raises. It is read once, when this module is imported, and
only tests set it.
"""

import errno
import os
import signal
from collections.abc import Mapping

from gnomon.core.errors import ConfigError, unknown

VARIABLE = "GNOMON_FAIL_AT"
POINTS: Mapping[str, str] = {
    "start": "the run directory is made, nothing is loaded",
    "ask": "prompts were chosen, no engine was asked",
    "decode": "a token of some answers was sampled",
    "grade": "an answer is about to be judged",
    "advantages": "a batch was scored, its advantages are not computed",
    "backward": "a micro-batch has left its gradient",
    "optimizer": "masters were stepped, the module was not told",
    "update": "an optimizer step is complete, the training step is not",
    "deliver": "weights were sent to the engines and not yet proved",
    "exchange": "some weights of a new version are in an engine that has its own, others are not",
    "collect": "some weights were collected from a learner of several processes, others were not",
    "share": "a learner of several processes wrote a share of its state, which is not synced",
    "model": "a learner of several processes wrote its model, the run was not told",
    "record": "metrics of a step are written, its rollouts are not",
    "checkpoint-file": "the state of some parts is written, that of others is not",
    "checkpoint-manifest": "all files are written, the manifest is not",
    "checkpoint-rename": "a checkpoint got its name, its folder is not synced",
    "checkpoint-retire": "a checkpoint that is not kept lost its name, its files are there",
}

_armed: dict[str, tuple[int, str]] = {}


def failpoint(point: str) -> None:
    """Pass a point.

    Raises:
        OSError: ENOSPC, where the failpoint was armed with "full".
    """
    # The empty dict is asked first: this line is on every hot path.
    if _armed and point in _armed:
        _count(point)


def arm(what: str) -> None:
    """Let ``POINT:COUNT`` or ``POINT:COUNT:full`` come true from now on; "" lets nothing.

    Raises:
        ConfigError: There is no such point, count or ending.
    """
    _armed.clear()
    if not what:
        return
    point, _, rest = what.partition(":")
    count, _, ending = rest.partition(":")
    if point not in POINTS:
        raise ConfigError(f"{VARIABLE}: {unknown('point', point, POINTS)}")
    if not count.isdecimal() or int(count) < 1 or ending not in ("", "full"):
        raise ConfigError(f"{VARIABLE} is POINT:COUNT or POINT:COUNT:full with a count from 1, got {what!r}")
    _armed[point] = (int(count), ending)


def _count(point: str) -> None:
    left, ending = _armed[point]
    _armed[point] = (left - 1, ending)
    if left != 1:
        return
    if ending == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), point)
    # SIGKILL and no exception: nothing may be cleaned up, as when the machine goes down.
    os.kill(os.getpid(), signal.SIGKILL)


arm(os.environ.get(VARIABLE, ""))
