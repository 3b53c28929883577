"""A learner's processes are looked after while nothing is asked of them; one that dies: `test_strangers.py`."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.learner.together import recipe_for, together

from gnomon.algorithms import GRPO
from gnomon.core.errors import LearnerError
from gnomon.learner import distributed as module
from gnomon.learner.distributed import DistributedLearner
from gnomon.training.watchdog import run_with_watchdog


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_WATCH_SECONDS", 0.2)
    monkeypatch.setattr("gnomon.learner.worker_group.STILL_SECONDS", 1.0)


def hit(distributed: DistributedLearner, number: signal.Signals) -> None:
    """Send a signal to the second process."""
    os.kill(distributed.worker_group.members[1].program.pid, number)


@pytest.mark.slow
def test_one_that_is_stopped_between_two_calls_is_noticed():
    """The system says that it stands still."""
    with together(recipe_for(GRPO)) as distributed:
        hit(distributed, signal.SIGSTOP)
        with pytest.raises(LearnerError, match="process 1 of the learner's 2 stood still for 1 s"):
            asyncio.run(run_with_watchdog(distributed.watch(), asyncio.sleep(60)))


@pytest.mark.slow
def test_looking_is_in_nobodys_way(tmp_path: Path):
    """While all live nothing comes of it, whatever is asked meanwhile; and it ends with the work."""
    with together(recipe_for(GRPO)) as distributed:

        async def work() -> str:
            for number in range(3):
                await asyncio.to_thread(distributed.write_model, tmp_path / str(number))
                await asyncio.sleep(0.3)
            return "done"

        assert asyncio.run(run_with_watchdog(distributed.watch(), work())) == "done"
    assert (tmp_path / "2" / "model.safetensors").is_file()


def test_what_the_work_itself_meets_says_more():
    """Both fail in the same moment: the work's own error is raised."""

    async def fail(error: Exception) -> None:
        raise error

    with pytest.raises(LearnerError, match="its own"):
        asyncio.run(run_with_watchdog(fail(ValueError("watched")), fail(LearnerError("its own"))))
