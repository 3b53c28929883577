"""Who can reach the processes of a learner: nobody through where they meet, and on loopback to no end."""

import asyncio
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.learner.together import apart, recipe_for, together, walk

from gnomon.algorithms import GRPO
from gnomon.core.errors import LearnerError
from gnomon.core.types import Batch, State
from gnomon.learner.distributed import DistributedLearner
from gnomon.learner.worker_group import LocalWorkerGroup
from gnomon.training.watchdog import run_with_watchdog

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc who listens where")
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[DistributedLearner, State]]:
    """Two processes, and the state that they began with."""
    with together(recipe_for(GRPO)) as distributed:
        yield distributed, distributed.state()


def listening(pid: int) -> dict[int, str]:
    """Return the ports at which a process listens, each with its address as the kernel spells it."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    lines = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    places = [line[1].rpartition(":") for line in lines if line[3] == "0A" and line[9] in own]
    return {int(port, 16): address for address, _, port in places}


def crew_of(distributed: DistributedLearner) -> LocalWorkerGroup:
    """Return the processes themselves."""
    assert isinstance(distributed.worker_group, LocalWorkerGroup)
    return distributed.worker_group


def test_they_meet_in_a_file_of_this_user_alone(started: tuple[DistributedLearner, State]):
    """In a folder that nobody else can enter; what they listen at is on loopback."""
    worker_group = crew_of(started[0])
    found = [listening(member.program.pid) for member in worker_group.members]

    assert Path(worker_group.rendezvous).parent == worker_group.scratch
    assert stat.S_IMODE(worker_group.scratch.stat().st_mode) == 0o700
    assert all(found)
    assert {address for ports in found for address in ports.values()} <= LOOPBACK


def test_strangers_at_the_ports_change_nothing(
    started: tuple[DistributedLearner, State], make_batch: Callable[..., Batch]
):
    """What they say is passed over, and who says nothing is not waited for: the same steps, to the bit."""
    distributed, first = started
    batches = [make_batch(seed, 3, 3) for seed in range(2)]
    measured = walk(distributed, GRPO, batches)
    wanted = distributed.state().tensors
    distributed.restore(first)
    guests = []
    for member in crew_of(distributed).members:
        for port in listening(member.program.pid):
            for said in (
                b"",
                b"\0" * 8,
                secrets.token_bytes(8),
                secrets.token_bytes(1 << 12),
                b"GET / HTTP/1.0\r\n\r\n",
            ):
                guest = socket.create_connection(("127.0.0.1", port), timeout=5)
                guest.sendall(said)
                guests.append(guest)
    again = walk(distributed, GRPO, batches)
    for guest in guests:
        guest.close()

    assert len(guests) >= 10
    assert again == measured
    assert apart(distributed.state().tensors, wanted) == 0.0
    distributed.restore(first)
    assert walk(distributed, GRPO, batches) == measured


def test_deaths_between_two_calls_are_noticed(
    started: tuple[DistributedLearner, State], monkeypatch: pytest.MonkeyPatch
):
    """Killed, it is named, the others are ended, the wait for answers is cut short, and later calls say the same.

    The last test that asks these processes: nobody is left.
    """
    monkeypatch.setattr("gnomon.learner.distributed._WATCH_SECONDS", 0.2)
    distributed, _ = started
    programs = [member.program for member in crew_of(distributed).members]

    async def wait() -> None:
        asyncio.get_running_loop().call_later(1.0, os.kill, programs[1].pid, signal.SIGKILL)
        await run_with_watchdog(distributed.watch(), asyncio.sleep(1000))

    with pytest.raises(LearnerError, match="process 1 of the learner's 2 is gone: it was killed"):
        asyncio.run(wait())
    with pytest.raises(LearnerError, match="process 1 of the learner's 2 is gone"):
        distributed.state()
    distributed.close()
    assert None not in [program.poll() for program in programs]


MEETING = """
import sys, torch
from gnomon.learner import mesh
rank, place = int(sys.argv[1]), sys.argv[2]
if rank == 0:
    place = mesh.init_store("127.0.0.1", 2)
    print(place, flush=True)
joined = mesh.init_mesh(place, rank, 2, torch.device("cpu"))
print(int(joined.all_reduce_sum(torch.tensor(rank + 1))))
"""


@pytest.mark.slow
def test_machines_without_a_folder_in_common_meet_at_a_port():
    """Rank 0 opens it at one address alone; the sum over both ranks is 1 + 2."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def rank(number: int, place: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", MEETING, str(number), place]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    first = rank(0, "")
    assert first.stdout is not None
    place = first.stdout.readline().strip()
    second = rank(1, place)

    assert place.startswith("tcp://127.0.0.1:")
    assert second.communicate(timeout=60)[0] == first.communicate(timeout=60)[0] == "3\n"
