"""The filter of system calls, run by an interpreter of its own for both processors."""

import errno
import re
import struct
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("seccomp is Linux's", allow_module_level=True)

from gnomon.rewards.sandbox.inside.seccomp import ALLOWED, build

ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, MISSING = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINES = ("x86_64", "aarch64")
SELF = 7


def verdict(machine: str, number: int, *arguments: int, own_files: bool = True, architecture: int | None = None) -> int:
    """Return what the filter says about a call, by the four instructions that it consists of."""
    words = [*arguments, *[0] * (6 - len(arguments))]
    call = struct.pack("=IIQ6Q", number, architecture or ARCHITECTURE[machine], 0, *words)
    code = [struct.unpack("HBBI", step) for step in build(machine, SELF, own_files)]
    at, held = 0, 0
    while True:
        operation, if_true, if_false, value = code[at]
        at += 1
        if operation == 0x06:
            return int(value)
        if operation == 0x20:
            held = int.from_bytes(call[value : value + 4], "little")
        elif operation == 0x54:
            held &= value
        else:
            holds = held == value if operation == 0x15 else held >= value
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_listed_is_allowed_and_the_rest_is_not(machine):
    """Of the first 600 numbers exactly the listed ones pass without conditions; unknown ones are refused."""
    column = MACHINES.index(machine)
    listed = {numbers[column] for numbers in ALLOWED.values()} - {None}
    conditional = (
        {56, 62, 234, 302, 72, 16, 157, 53, 44, 228, 229, 230}
        if column == 0
        else {220, 129, 131, 261, 25, 29, 167, 199, 206, 113, 114, 115}
    )
    passed = {n for n in range(600) if verdict(machine, n, 0xFFFF, 0xFFFF, 0, 0, 1) == ALLOW}

    assert passed == listed
    assert not conditional & listed


@pytest.mark.parametrize(("machine", "clone"), [("x86_64", 56), ("aarch64", 220)])
def test_threads_are_allowed_and_processes_are_not(machine, clone):
    """The flags of a thread pass; those of fork, of vfork, and of a thread in a new namespace do not."""
    thread = 0x3D0F00

    assert verdict(machine, clone, thread) == ALLOW
    for flags in (0x11, 0x4111, 0x100, thread | 0x10000000, thread | 0x20000000, thread | 0x80):
        assert verdict(machine, clone, flags) == REFUSE
    assert verdict(machine, 435) == MISSING


@pytest.mark.parametrize(("machine", "kill", "tgkill"), [("x86_64", 62, 234), ("aarch64", 129, 131)])
def test_signals_reach_only_oneself(machine, kill, tgkill):
    """Its own number passes; another's, a group's and everybody's do not, and SIGKILL never does."""
    assert verdict(machine, kill, SELF, 9) == verdict(machine, tgkill, SELF, SELF, 9) == REFUSE
    assert verdict(machine, kill, SELF) == verdict(machine, tgkill, SELF) == ALLOW
    for target in (1, 0, 2**32 - 1, SELF + 1):
        assert verdict(machine, kill, target) == verdict(machine, tgkill, target) == REFUSE


@pytest.mark.parametrize(("machine", "calls"), [("x86_64", (228, 229, 230)), ("aarch64", (113, 114, 115))])
def test_only_the_machine_s_clocks_and_its_own_can_be_read(machine, calls):
    """What another process has computed so far is a clock too, by the negative of its number: of the grader, say."""
    for call in calls:
        assert [clock for clock in range(64) if verdict(machine, call, clock) == ALLOW] == [*range(8), 11]
        for process in (1, SELF, 12345):
            for clock in (~process << 3 | 2, ~process << 3 | 6):
                assert verdict(machine, call, clock % 2**32) == verdict(machine, call, clock % 2**64) == REFUSE


@pytest.mark.parametrize(("machine", "pair", "send"), [("x86_64", 53, 44), ("aarch64", 199, 206)])
def test_a_pair_of_sockets_speaks_to_itself_only(machine, pair, send):
    """A stream pair passes (asyncio wakes itself with one); datagrams, other families and any address do not."""
    assert verdict(machine, pair, 1, 1 | 0x80000) == verdict(machine, send, 3, 0, 1, 0, 0) == ALLOW
    assert verdict(machine, pair, 1, 2) == verdict(machine, pair, 2, 1) == REFUSE
    assert verdict(machine, send, 3, 0, 1, 0, 1 << 40) == verdict(machine, send, 3, 0, 1, 0, 1) == REFUSE


@pytest.mark.parametrize(("machine", "flock", "fcntl"), [("x86_64", 73, 72), ("aarch64", 32, 25)])
def test_locks_are_granted_and_none_is_taken(machine, flock, fcntl):
    """Setting a lock answers zero without being done; asking who holds one, and locks of open files, are refused."""
    granted = 0x00050000

    assert verdict(machine, flock, 3, 2) == verdict(machine, fcntl, 3, 6) == verdict(machine, fcntl, 3, 7) == granted
    for command in (5, 36, 37, 38, 1024, 1025):
        assert verdict(machine, fcntl, 3, command) == REFUSE


@pytest.mark.parametrize(("machine", "truncate", "chmod"), [("x86_64", 76, 90), ("aarch64", 45, 53)])
def test_files_of_the_user_cannot_be_changed_in_place(machine, truncate, chmod):
    """Where the file system is shared, calls that Landlock does not stop are refused."""
    assert verdict(machine, truncate) == verdict(machine, chmod) == ALLOW
    assert verdict(machine, truncate, own_files=False) == verdict(machine, chmod, own_files=False) == REFUSE


def test_another_architecture_and_the_second_table_do_not_slip_through():
    """32-bit calls, whose numbers mean something else, kill; x32 numbers are refused."""
    assert verdict("x86_64", 20, architecture=0x40000003) == KILL
    assert verdict("x86_64", 0x40000000 + 39) == REFUSE


@pytest.mark.parametrize(
    ("column", "header"),
    [(0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (1, "/usr/include/asm-generic/unistd.h")],
)
def test_numbers_are_those_of_the_kernels_headers(column, header):
    """Every number of the table is the one that Linux's own header gives that name."""
    if not Path(header).exists():
        pytest.skip("the kernel's headers are not installed")
    defined = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", Path(header).read_text())
    numbers = {("newfstatat" if name == "fstatat" else name): int(number) for name, number in defined}

    assert {name: n[column] for name, n in ALLOWED.items()} == {name: numbers.get(name) for name in ALLOWED}
