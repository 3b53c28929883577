import asyncio
import gc
import json
import signal
import subprocess
import sys
import warnings
from asyncio import CancelledError
from pathlib import Path
from typing import Any

import pytest

from gnomon.core.errors import ConfigError, GradingError, RewardError
from gnomon.core.processes.client import ForkServer, Limits
from gnomon.core.processes.pool import WorkerPool
from gnomon.rewards.code.reward import Code
from gnomon.rewards.exact import Numeric
from gnomon.rewards.function import UserFunction
from gnomon.rewards.grading import Grading, WeightedReward
from gnomon.rewards.grading_worker import grading_program
from gnomon.rewards.reward_trial import try_rewards


def by(function: str) -> Grading:
    return Grading((WeightedReward(UserFunction(function)),))


def test_a_good_reward_passes_the_check(hostile: Grading):
    """Before any model loads."""
    try_rewards(hostile, Limits(), ())


def test_a_process_is_started_for_what_imports():
    """Numbers are compared by what is loaded; a sandbox is chosen, and its walls are tried, elsewhere."""
    no_time = Limits(start_seconds=1e-6)

    assert try_rewards(Grading((WeightedReward(Numeric()),)), no_time, ()) == ()
    with pytest.raises(RewardError, match=r"importing the rewards .* took more than"):
        try_rewards(Grading((WeightedReward(Numeric()), WeightedReward(Code()))), no_time, ())


def test_the_check_says_what_is_wrong(rewards: Path):
    """The function's nearest name, through the process that looked for it."""
    with pytest.raises(RewardError, match="unknown function 'scor'; did you mean 'score'"):
        try_rewards(by(f"{rewards}:scor"), Limits(), ())


def test_importing_that_hangs_is_ended(tmp_path: Path):
    """Within the time that starting may take, and the message says which reward it was."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1000)\ndef score(completion): return 1.0")

    with pytest.raises(RewardError, match=r"importing the rewards \(.*slow.py:score\) took more than 1 s"):
        try_rewards(by(f"{tmp_path}/slow.py:score"), Limits(start_seconds=1.0), ())


def test_importing_that_ends_the_process_shows_what_it_said(tmp_path: Path):
    """What was written to standard error is in the message."""
    (tmp_path / "gone.py").write_text("import os\nos.write(2, b'out of licenses')\nos.abort()")

    with pytest.raises(GradingError, match=r"was killed by SIGABRT while it imported the rewards .*: out of licenses"):
        try_rewards(by(f"{tmp_path}/gone.py:score"), Limits(), ())


@pytest.mark.parametrize(
    ("end", "said"),
    [("import ctypes; ctypes.CDLL(None)._exit(0)", "exited with status 0"), ("os.abort()", "was killed by SIGABRT"),
     ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV")],
)  # fmt: skip
def test_importing_that_ends_the_process_is_the_users_fault(tmp_path: Path, end: str, said: str):
    """A status, or a fault of its own, of a program that said nothing: the input is wrong."""
    (tmp_path / "gone.py").write_text(f"import os\n{end}")

    with pytest.raises(
        RewardError, match=rf"{said} while it imported the rewards \(.*gone.py:score\); an import must not end"
    ):
        try_rewards(by(f"{tmp_path}/gone.py:score"), Limits(), ())


def test_a_program_that_is_killed_while_it_imports_is_started_again(tmp_path: Path):
    """Twice killed from outside is no fault of the rewards; three times is an error."""
    (tmp_path / "killed.py").write_text(
        f"import os\nwith open({str(tmp_path / 'starts')!r}, 'a') as file: print(file=file)\n"
        f"if len(open({str(tmp_path / 'starts')!r}).read()) <= int(os.environ['KILLS']): os.kill(os.getpid(), 9)\n"
        "def score(completion): return 1.0"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KILLS", "2")
        assert try_rewards(by(f"{tmp_path}/killed.py:score"), Limits(environment=("KILLS",)), ()) == ()
        patch.setenv("KILLS", "9")
        with pytest.raises(GradingError, match=r"was killed by SIGKILL .* while it imported the rewards"):
            try_rewards(by(f"{tmp_path}/killed.py:score"), Limits(environment=("KILLS",)), ())


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one(monkeypatch: pytest.MonkeyPatch):
    """A nursery that was stopped when it should end a worker still forks the next one when it goes on."""
    fork_server = ForkServer(grading_program(Grading((WeightedReward(Numeric()),))), Limits())
    fork_server.open()
    program: Any = fork_server._program
    try:
        first, talk = fork_server.fork()
        monkeypatch.setattr("gnomon.core.processes.client._ANSWER_SECONDS", 0.3)
        program.send_signal(signal.SIGSTOP)
        assert fork_server.end(first).is_foreign
        program.send_signal(signal.SIGCONT)
        monkeypatch.undo()
        second, other = fork_server.fork()
        talk.close()
        other.close()
        assert second != first
    finally:
        program.send_signal(signal.SIGCONT)
        fork_server.close()


def test_a_fork_that_nobody_waits_for_leaves_no_connection_open():
    """A conversation may be withdrawn while a worker is forked for it."""

    async def withdrawn() -> None:
        pool = WorkerPool(ForkServer(grading_program(Grading((WeightedReward(Numeric()),))), Limits()), "graders", 30.0)
        await pool.open()
        forks = [asyncio.ensure_future(pool.fork()) for _ in range(4)]
        await asyncio.sleep(0)
        for fork in forks:
            fork.cancel()
        assert [type(each) for each in await asyncio.gather(*forks, return_exceptions=True)] == [CancelledError] * 4
        await pool.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(withdrawn())
        gc.collect()

    assert [str(each.message) for each in caught] == []


def test_grading_leaves_no_compiled_modules(tmp_path: Path):
    """Neither of the reward's file nor of what it imports: under a limit of file sizes half of one would stay."""
    (tmp_path / "beside_it.py").write_text("PAID = 1.0")
    (tmp_path / "mine.py").write_text("from beside_it import PAID\ndef score(completion): return PAID")

    try_rewards(by(f"{tmp_path}/mine.py:score"), Limits(), ())

    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside_it.py", "mine.py"]


def test_importing_may_print(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Nothing of it reaches the conversation or the terminal."""
    (tmp_path / "loud.py").write_text("print('{}' * 100000)\ndef score(completion): return 1.0")

    try_rewards(by(f"{tmp_path}/loud.py:score"), Limits(), ())

    assert capfd.readouterr() == ("", "")


def test_a_library_that_is_not_there_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    """As for every optional library."""
    from gnomon.rewards.math import Mathematics

    monkeypatch.setitem(sys.modules, "math_verify", None)

    with pytest.raises(ConfigError, match=r"pip install 'gnomon\[math\]'"):
        Mathematics().prepare()


def test_the_grading_program_loads_no_torch():
    """Its memory and its start-up are those of the rewards alone."""
    code = (
        "import json, sys; from gnomon.rewards import grading_worker\n"
        "print(json.dumps(sorted(m for m in sys.modules if m in ('torch', 'numpy', 'transformers'))))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment())

    assert json.loads(said.stdout) == []


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
