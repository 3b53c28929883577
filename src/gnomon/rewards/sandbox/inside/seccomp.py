"""Which system calls the program may make: those on a list, everything else is "operation not permitted".

A list of what is allowed, not of what is forbidden, so calls that nobody thought of, and those of kernels to
come, are refused. Left out on purpose: fork and exec (one process, so nothing can outlive it and no
set-user-id program can be started), sockets of every kind, ptrace, mount, unshare, bpf, io_uring, keyctl,
perf_event_open, userfaultfd, memfd_create, shared memory, setsid, setting clocks, hard links, locks.

Source: seccomp(2), the classic BPF of Linux's filter.h; the numbers of asm/unistd_64.h and asm-generic/unistd.h.
"""

import ctypes
import errno
import struct

from .kernel import ARM, MACHINE, X86, call

_PRCTL = {X86: 157, ARM: 167}
_ARCHITECTURE = {X86: 0xC000003E, ARM: 0xC00000B7}
_SET_SECCOMP, _FILTER = 22, 2
_KILL, _ALLOW, _REFUSE, _MISSING = 0x80000000, 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_GRANTED = 0x00050000  # zero is returned, and nothing was done
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_SECOND_TABLE = 0x40000000  # the x32 numbers, which would slip past comparisons with the usual ones

# Numbers on x86-64 and on 64-bit ARM; None where ARM has no such call.
ALLOWED: dict[str, tuple[int, int | None]] = {
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226),
    "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66),
    "access": (21, None), "pipe": (22, None), "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216),
    "msync": (26, 227), "mincore": (27, 232), "madvise": (28, 233), "dup": (32, 23), "dup2": (33, None),
    "pause": (34, None), "nanosleep": (35, 101), "getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103),
    "getpid": (39, 172), "sendfile": (40, 71), "recvfrom": (45, 207), "shutdown": (48, 210), "getsockname": (51, 204),
    "getpeername": (52, 205), "setsockopt": (54, 208), "getsockopt": (55, 209), "exit": (60, 93), "wait4": (61, 260),
    "uname": (63, 160), "fsync": (74, 82), "fdatasync": (75, 83), "truncate": (76, 45),
    "ftruncate": (77, 46), "getdents": (78, None), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50),
    "rename": (82, None), "mkdir": (83, None), "rmdir": (84, None), "creat": (85, None), "unlink": (87, None),
    "symlink": (88, None), "readlink": (89, None), "chmod": (90, None), "fchmod": (91, 52), "umask": (95, 166),
    "gettimeofday": (96, 169), "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179),
    "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177),
    "getppid": (110, 173), "getpgrp": (111, None), "getgroups": (115, 158), "getresuid": (118, 148),
    "getresgid": (120, 150), "getpgid": (121, 155), "getsid": (124, 156), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "utime": (132, None),
    "statfs": (137, 43), "fstatfs": (138, 44), "arch_prctl": (158, None), "gettid": (186, 178), "time": (201, None),
    "futex": (202, 98), "sched_getaffinity": (204, 123), "epoll_create": (213, None), "getdents64": (217, 61),
    "set_tid_address": (218, 96), "restart_syscall": (219, 128), "exit_group": (231, 94), "epoll_wait": (232, None),
    "epoll_ctl": (233, 21), "utimes": (235, None), "waitid": (247, 95), "openat": (257, 56), "mkdirat": (258, 34),
    "newfstatat": (262, 79), "unlinkat": (263, 35), "renameat": (264, 38), "symlinkat": (266, 36),
    "readlinkat": (267, 78), "fchmodat": (268, 53), "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73),
    "set_robust_list": (273, 99), "get_robust_list": (274, 100), "utimensat": (280, 88), "epoll_pwait": (281, 22),
    "eventfd2": (290, 19), "epoll_create1": (291, 20), "dup3": (292, 24), "pipe2": (293, 59), "preadv": (295, 69),
    "pwritev": (296, 70), "getcpu": (309, 168), "renameat2": (316, 276), "getrandom": (318, 278),
    "membarrier": (324, 283), "statx": (332, 291), "rseq": (334, 293), "close_range": (436, 436),
    "faccessat2": (439, 439),
}  # fmt: skip

# Threads share memory and belong to the process; anything with a namespace flag or memory of its own is a process.
_NEW_NAMESPACE, _SHARE_MEMORY, _THREAD = 0x7E020080, 0x100, 0x10000
_FILE_COMMANDS = (0, 1, 2, 3, 4, 1030)  # duplicates and flags: not owners, signals, pipe sizes, or who holds a lock
# Locks are answered as granted, and none is taken: this process is alone with its files, and on those that it shares,
# the library's and /dev/null, a lock would tell programs of each other.
_LOCK_COMMANDS = (6, 7)
_DEVICE_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, its size, do not block
_FROM_OUTSIDE = (9, 19, 20, 21, 22)  # SIGKILL, SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU
_OWN_NAME = (15, 16, 0x53564D41)
# The machine's clocks and the caller's own processor time. A negative number is another process's, or a device.
_CLOCKS = (0, 1, 2, 3, 4, 5, 6, 7, 11)


# What Landlock does not stop where there is no file system of its own: changing files of the user in place.
_OF_FILES = ("chmod", "fchmod", "fchmodat", "utime", "utimes", "utimensat", "truncate")


def restrict(pid: int, has_own_files: bool) -> None:
    """Let this process, all its threads and nothing else go on under the filter.

    Args:
        pid: Its own number.
        has_own_files: Whether every file that it can name is its own or read-only.

    Raises:
        OSError: If the kernel has no seccomp.
        ValueError: If the numbers of the processor are not known.
    """
    code = b"".join(build(MACHINE, pid, has_own_files))
    text = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(text))
    call(_PRCTL[MACHINE], _SET_SECCOMP, _FILTER, ctypes.create_string_buffer(program, len(program)), 0, 0)


def build(machine: str, pid: int, has_own_files: bool) -> list[bytes]:
    """Return the filter's instructions, 8 bytes each.

    Raises:
        OSError, ValueError: As `restrict`.
    """
    column = (X86, ARM).index(machine)
    code = [
        _step(_LOAD, _ARCHITECTURE_AT),
        # Numbers of another architecture mean other calls, so its processes are killed before any number is compared.
        _step(_EQUAL, _ARCHITECTURE[machine], 1, 0), _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT),
        _step(_AT_LEAST, _SECOND_TABLE, 0, 1), _step(_RETURN, _REFUSE),
        # The C library asks for clone3 first and falls back to clone, whose flags a filter can read.
        _step(_EQUAL, 435, 0, 1), _step(_RETURN, _MISSING),
    ]  # fmt: skip
    # Each allowed number is one comparison and one return; a number
    # that matches none falls through to the refusal at the end.
    for name, numbers in ALLOWED.items():
        if (number := numbers[column]) is not None and (has_own_files or name not in _OF_FILES):
            code += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ALLOW)]
    for numbers, body in _conditional(pid):
        code += [_step(_EQUAL, numbers[column], 0, len(body)), *body]
    return [*code, _step(_RETURN, _REFUSE)]


def _conditional(pid: int) -> list[tuple[tuple[int, int], list[bytes]]]:
    # A filter sees arguments and not what pointers point to, so calls are judged by numbers and flags alone.
    flags = _NEW_NAMESPACE | _SHARE_MEMORY | _THREAD
    return [
        ((56, 220), [_argument(0), _step(_AND, flags), *_one_of(_SHARE_MEMORY | _THREAD)]),  # clone
        # kill, tgkill: oneself, and never by what kills or stops, so that who was killed or stopped was from outside
        ((62, 129), [_argument(1), *_answer(_REFUSE, *_FROM_OUTSIDE), _argument(0), *_one_of(pid)]),
        ((234, 131), [_argument(2), *_answer(_REFUSE, *_FROM_OUTSIDE), _argument(0), *_one_of(pid)]),
        ((302, 261), [_argument(0), *_one_of(0, pid)]),  # prlimit64
        ((73, 32), [_step(_RETURN, _GRANTED)]),  # flock
        ((72, 25), [_argument(1), *_answer(_GRANTED, *_LOCK_COMMANDS), *_one_of(*_FILE_COMMANDS)]),  # fcntl
        ((16, 29), [_argument(1), *_one_of(*_DEVICE_COMMANDS)]),  # ioctl
        ((157, 167), [_argument(0), *_one_of(*_OWN_NAME)]),  # prctl
        ((228, 113), [_argument(0), *_one_of(*_CLOCKS)]),  # clock_gettime
        ((229, 114), [_argument(0), *_one_of(*_CLOCKS)]),  # clock_getres
        ((230, 115), [_argument(0), *_one_of(*_CLOCKS)]),  # clock_nanosleep
        # socketpair: AF_UNIX streams only, which asyncio's loop wakes itself with
        ((53, 199), [
            _argument(0), _step(_EQUAL, 1, 1, 0), _step(_RETURN, _REFUSE),
            _argument(1), _step(_AND, 0xF), *_one_of(1),
        ]),
        # sendto: along the pair, with no address
        ((44, 206), [
            _argument(4), _step(_EQUAL, 0, 1, 0), _step(_RETURN, _REFUSE), _argument(4, high=True), *_one_of(0),
        ]),
    ]  # fmt: skip


def _one_of(*values: int) -> list[bytes]:
    return [*_answer(_ALLOW, *values), _step(_RETURN, _REFUSE)]


def _answer(answer: int, *values: int) -> list[bytes]:
    return [step for value in values for step in (_step(_EQUAL, value, 0, 1), _step(_RETURN, answer))]


def _argument(index: int, high: bool = False) -> bytes:
    return _step(_LOAD, _ARGUMENTS_AT + 8 * index + 4 * high)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
