"""Start a program: read the job, put up the walls, say which ones stand, and run.

Two processes: this one stays outside to say how the program ended, its child is the program. Everything the
program could speak to is closed before its first line runs, so what is said about it cannot be forged by it.
"""

import _signal  # type: ignore[import-not-found] # the module signal takes 5 ms to import
import os
import resource
import select
import site
import sys
from types import CodeType, FunctionType

from . import kernel, landlock, namespaces, program, seccomp

_SIGKILL, _SIGCONT, _SIGSTOP = 9, 18, 19  # of x86-64 and ARM
_STOP_SIGNALS = (1, 2, 10, 15)  # SIGHUP, SIGINT, SIGUSR1, SIGTERM: for the run, which finishes its step first


class SandboxJob:
    """What is to be run, as it comes on the command line. No dataclass: importing those takes as long as a start.

    parent: number of the process that asked, 0 where another stands between. source, report: descriptors to read the
    program and to report on. walls: names of those to put up: namespaces, landlock, seccomp; limits are always set.
    packages: places of those that may be imported. is_kept: whether it is an interpreter that is asked again and again
    (``files_mib`` is then written below zero). seed: of what a forked process draws, "" for the system's.
    """

    def __init__(self, words: list[str]) -> None:
        self.parent, self.source, self.report = map(int, words[:3])
        self.walls = tuple(words[3].split(","))
        self.cpu_seconds, self.memory_mib, self.files_mib, self.threads = map(int, words[4:8])
        self.packages = words[8:]
        self.seed: str | None = None
        self.is_kept = self.files_mib < 0
        self.files_mib = abs(self.files_mib)


def main() -> None:
    """Run the job of the command line. Exits as the program does, or after having reported "refused"."""
    sys.dont_write_bytecode = True
    sys.exit(_run(SandboxJob(sys.argv[1:])))


def forked(parent: int, ends: list[int], control: int, words: list[str]) -> None:
    """Run a job in a process that a template has forked; as `main`, this returns nothing and exits.

    Args:
        ends: Standard input, output and error, source and report.
        control: A descriptor of the template's.
    """
    try:
        os.setsid()
        os.close(control)
        for number, end in enumerate(ends[:3]):
            os.dup2(end, number)
            os.close(end)
        sys.stdin, sys.stdout, sys.stderr = program.streams()
        job = SandboxJob([str(parent), *map(str, ends[3:]), *words[1:]])
        job.seed = words[0]
        program.leave(_run(job))
    except SystemExit as error:
        program.leave(error.code)
    finally:
        program.EXIT(1)


def pass_over_stop_signals() -> None:
    """Ignore what asks a run to stop, here and in programs: a scheduler sends it to every process of a job."""
    for number in _STOP_SIGNALS:
        _signal.signal(number, _signal.SIG_IGN)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _STOP_SIGNALS)  # they were blocked while the interpreter started


def _run(job: SandboxJob) -> int | None:
    """Run a job and return its program's status. Only the program's own process comes back."""
    pass_over_stop_signals()
    kernel.die_with_parent()
    # The parent may have died before the death signal was set: nobody would ever end this process.
    if job.parent and os.getppid() != job.parent:
        os._exit(1)
    with open(job.source, "rb") as file:
        source = None if job.is_kept else file.read()
    # The limit on threads counts those of a user in all its processes, but in a user namespace only those inside.
    others = _threads_of_all()
    # Entered before the fork: a process namespace holds for children only.
    has_namespaces = "namespaces" in job.walls and namespaces.enter()
    job.threads += 0 if has_namespaces and os.getuid() == namespaces.NOBODY else others
    child = os.fork()
    if child:
        _witness(child, job)
    try:
        stand = _wall_in(job, has_namespaces)
    except Exception as error:
        _say(job.report, f"refused {type(error).__name__}: {error}")
        os._exit(1)
    _say(job.report, f"walls {' '.join(stand)}")
    if job.packages and not any(type(finder) is program.AllowedPackages for finder in sys.meta_path):
        sys.meta_path.append(program.AllowedPackages(job.packages))
    if job.seed is not None:
        program.reseed(job.seed)
    del job, others
    # Everything but the three streams, the report among them: the program cannot speak to its witness.
    os.closerange(3, 1 << 16)
    _forget()
    return program.serve() if source is None else program.become(source)


def nameless() -> None:
    """Take the path of this package from its modules and code, which a program can see in the frames that called it.

    Before `main`, since code that runs already keeps its name.
    """
    folder = os.path.dirname(__file__)
    for name in [name for name in sys.modules if name.partition(".")[0] == __package__]:
        names = vars(sys.modules[name])
        for key in ("__file__", "__path__", "__cached__", "__spec__", "__loader__"):
            names.pop(key, None)
        for value in list(names.values()):
            for function in (value, *vars(value).values()) if isinstance(value, type) else (value,):
                # A property and a static method hold the function that they are.
                function = getattr(function, "fget", None) or getattr(function, "__func__", function)
                if isinstance(function, FunctionType) and function.__code__.co_filename.startswith(folder):
                    function.__code__ = _named(function.__code__)
    sys.path.remove(os.path.dirname(folder))
    for path in (folder, os.path.dirname(folder)):
        sys.path_importer_cache.pop(path, None)


def _named(code: CodeType) -> CodeType:
    inner = tuple(_named(part) if isinstance(part, CodeType) else part for part in code.co_consts)
    return code.replace(co_filename=os.path.basename(code.co_filename), co_consts=inner)


def _witness(child: int, job: SandboxJob) -> None:
    """Wait for the program and report how it ended; the kernel's kill at the limit of processor time is SIGXCPU.

    Who asked can have it stopped ("s"), go on ("c"), or ended, by closing the other end of the report; and can ask
    whether something stopped it ("?").
    """
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    ended = os.pidfd_open(child)
    waiting = select.poll()
    waiting.register(ended, select.POLLIN)
    waiting.register(job.report, select.POLLIN)
    while ended not in (events := dict(waiting.poll())):
        asked = os.read(job.report, 1) if events[job.report] & select.POLLIN else b""
        if asked == b"s":
            os.kill(child, _SIGSTOP)
            os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            _say(job.report, "still")
        elif asked == b"c":
            os.kill(child, _SIGCONT)
        elif asked == b"?":
            is_stopped = os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
            _say(job.report, "stopped" if is_stopped else "running")
        else:
            os.kill(child, _SIGKILL)
            waiting.unregister(job.report)
    _, status, used = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    # The soft and the hard limit are equal, so the kernel kills at once
    # where it would have sent SIGXCPU; the time used tells the two apart.
    if code == -9 and used.ru_utime + used.ru_stime > job.cpu_seconds - 0.1:
        code = -24
    _say(job.report, f"exit {code}" if code >= 0 else f"signal {-code}")
    os._exit(0)


def _wall_in(job: SandboxJob, has_namespaces: bool) -> list[str]:
    """Put up the walls and return the names of those that stand.

    Raises:
        OSError: If a wall falls over.
    """
    readable, hidden = _library()
    stand = ["limits"]
    writable = ["/dev/null"]
    if has_namespaces:
        namespaces.furnish(readable, hidden, job.packages, job.files_mib)
        writable.append(namespaces.WORK)
        stand.append("namespaces")
    elif "bubblewrap" in job.walls:
        has_namespaces = True
        writable.append(namespaces.WORK)
    readable += job.packages
    _limit(job)
    # The order matters: mounts need rights, so rights are dropped after them. A change of user undoes the death
    # signal, so it is set again. Landlock needs no_new_privs. seccomp comes last, because it forbids these calls.
    _drop_rights(readable)
    kernel.die_with_parent()
    kernel.never_gain_privileges()
    os.umask(0o077)
    version = landlock.restrict(readable, writable) if "landlock" in job.walls else 0
    if version:
        stand.append(f"landlock-{version}")
    if "seccomp" in job.walls:
        seccomp.restrict(os.getpid(), has_namespaces)
        stand.append("seccomp")
    return stand


def _library() -> tuple[list[str], list[str]]:
    """Return the paths that Python needs, and the folders of installed packages below them."""
    library = os.path.dirname(os.path.realpath(os.__file__))
    dynamic = {p for p in sys.path if p.endswith("lib-dynload") and os.path.isdir(p)}
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
    devices = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
    wanted = [library, *sorted(dynamic), *system, *devices]
    readable = [path for path in dict.fromkeys(wanted) if os.path.exists(path)]
    hidden = [f"{library}/{name}" for name in ("site-packages", "dist-packages")]
    return readable, [path for path in hidden if os.path.isdir(path)]


def _limit(job: SandboxJob) -> None:
    limits = {
        resource.RLIMIT_AS: job.memory_mib << 20,
        resource.RLIMIT_CPU: job.cpu_seconds,
        resource.RLIMIT_FSIZE: job.files_mib << 20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: job.threads,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    for name, wanted in limits.items():
        _, hard = resource.getrlimit(name)
        # A hard limit can only be lowered by anyone but root.
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(name, (limit, limit))


def _threads_of_all() -> int:
    """Return how many threads the machine has, which is at least as many as any user has."""
    try:
        with open("/proc/loadavg") as file:
            return int(file.read().split()[3].partition("/")[2])
    except OSError:
        return 4096


def _drop_rights(readable: list[str]) -> None:
    """Stop being root, if this is root and the library can be read by others; hold no capability either way."""
    if os.geteuid() == 0 and kernel.reachable([path for path in readable if os.path.isdir(path)]):
        os.setgroups([])
        os.setresgid(namespaces.NOBODY, namespaces.NOBODY, namespaces.NOBODY)
        os.setresuid(namespaces.NOBODY, namespaces.NOBODY, namespaces.NOBODY)
    kernel.drop_capabilities()


def _forget() -> None:
    """Leave the interpreter as a program expects it: `exit` is there, this package and its command line are not."""
    for name in [name for name in sys.modules if name.partition(".")[0] == __package__]:
        del sys.modules[name]
    sys.argv, sys.orig_argv = [program.NAME], ["python", program.NAME]
    site.setquit()


def _say(report: int, text: str) -> None:
    try:
        os.write(report, text.encode(errors="replace").replace(b"\n", b" ")[:2000] + b"\n")
    except OSError:  # nobody listens any more
        return
