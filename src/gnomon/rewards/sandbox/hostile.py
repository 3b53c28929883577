"""More hostile programs, by what they attack: too many to try at every start, all tried by the tests.

As in `probes.py`: a program prints ``OPEN`` when it reached what it should not.
"""

from gnomon.rewards.sandbox.probes import Probe

_CALL = """
import ctypes, os
C = ctypes.CDLL(None, use_errno=True)
X = os.uname().machine == "x86_64"
def reach(result):
    error = ctypes.get_errno()
    print("OPEN" if result >= 0 or error not in (1, 13, 38, 95, 97) else "", result, error)
"""
_READ = "print('OPEN' if open({}, 'rb').read(1) else '')"
_SOCKET = "import socket; s = socket.socket({}); s.settimeout(1); s.connect({}); print('OPEN')"


def _call(expression: str) -> str:
    return f"{_CALL}reach({expression})"


RESOURCES = (
    Probe("fork bomb", "import os\nn = 0\nwhile True:\n    n += 1; os.fork(); print('OPEN')", ("exit 1",)),
    Probe(
        "thread bomb",
        "import threading, time\nthreading.stack_size(1 << 15)\nn = 0\ntry:\n    while n < 5000:\n"
        "        threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); n += 1\n"
        "except RuntimeError: pass\nprint('OPEN' if n >= 5000 else n)",
    ),
    Probe("memory in one piece", "x = b'x' * (4 << 30); print('OPEN')", ("memory",)),
    Probe("memory bit by bit",
          "x = []\nwhile len(x) < 4096: x.append(bytearray(1 << 20))\nprint('OPEN')", ("memory", "time")),
    Probe("memory mapped", "import mmap\nx = []\nwhile len(x) < 64: x.append(mmap.mmap(-1, 64 << 20))\nprint('OPEN')"),
    Probe("memory in a memory file", "import os\nfd = os.memfd_create('x')\nos.ftruncate(fd, 1 << 32)\nprint('OPEN')"),
    Probe("shared memory of System V", _call("C.shmget(0, 1 << 30, 0o1600)")),
    Probe("shared memory folder", "open('/dev/shm/gnomon', 'w').write('x'); print('OPEN')"),
    Probe("endless output", "while True: print('x' * 10000)", ("output",)),
    Probe("endless errors", "import sys\nwhile True: sys.stderr.write('x' * 10000)", ("output",)),
    Probe("endless loop", "while True: pass", ("time",)),
    Probe("endless loop that ignores signals",
          "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
          "    except (OSError, ValueError): pass\nwhile True: pass", ("time",)),
    Probe("sleep", "import time; time.sleep(600)", ("time",)),
    Probe("stop itself", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP); import time; time.sleep(600)",
          ("time",)),
    Probe("a big file",
          "f = open('big', 'wb')\nfor _ in range(256): f.write(bytes(1 << 20))\nprint('OPEN')", ("exit 1",)),
    Probe("big files", "for n in range(64): open(f'big{n}', 'wb').write(bytes(4 << 20))\nprint('OPEN')", ("exit 1",)),
    Probe("many files", "for n in range(9000): open(f'f{n}', 'w').close()\nprint('OPEN')", ("exit 1",)),
    Probe("many descriptors", "import os\nx = [os.pipe() for _ in range(600)]\nprint('OPEN')", ("exit 1",)),
    Probe("raise its own limits",
          "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1)); print('OPEN')", ("exit 1",)),
    Probe("a core dump", "import resource, os\nprint('OPEN' if resource.getrlimit(resource.RLIMIT_CORE)[1] else '')\n"
                         "os.abort()", ("signal 6", "signal 11", "signal 4")),
)  # fmt: skip

FILES = (
    Probe("passwords", _READ.format("'/etc/shadow'")),
    Probe("the home folder", "import os; print('OPEN', os.listdir('{home}'))"),
    Probe("the package", _READ.format("'{package}/verifiers/code.py'")),
    Probe("the run", _READ.format("'{secret}'")),
    Probe("every folder of the root",
          "import os\nfor f in ('/root', '/home', '/var', '/opt', '/srv', '/mnt', '/boot', '/sys', '/run'):\n"
          "    try: print('OPEN' if os.listdir(f) else '')\n    except OSError: pass"),
    Probe("write beside", "open('{folder}/mark', 'w').write('x')"),
    Probe("write in the library", "import json; open(json.__file__, 'a').write('#'); print('OPEN')"),
    Probe("rename", "import os; os.rename('{secret}', '{secret}2'); print('OPEN')"),
    Probe("delete", "import os; os.unlink('{secret}'); print('OPEN')"),
    Probe("permissions", "import os; os.chmod('{folder}', 0o700); print('OPEN')"),
    Probe("a symbolic link out", "import os; os.symlink('{secret}', 'l'); " + _READ.format("'l'")),
    Probe("a hard link out", "import os; os.link('{secret}', 'l'); " + _READ.format("'l'")),
    Probe("dots", "print('OPEN' if open('../../../../../../..{secret}').read() else '')"),
    Probe("memory of the parent", _READ.format("f'/proc/{__import__(\"os\").getppid()}/environ'")),
    Probe("memory of all",
          "import glob\nfor p in glob.glob('/proc/[0-9]*/environ'):\n    try:\n"
          "        print('OPEN' if 'GNOMON_PROBE' in open(p).read() else '')\n    except OSError: pass"),
    Probe("root of the parent", "import os; print('OPEN', os.listdir('/proc/{process}/root'))"),
    Probe("descriptors of the parent", "import os; print('OPEN', os.listdir('/proc/{process}/fd'))"),
    Probe("its own root", "import os; print('OPEN', os.listdir('/proc/self/root/etc'))"),
    Probe("its own program file", "open('/proc/self/exe', 'r+b').write(b'x'); print('OPEN')"),
    Probe("the kernel's settings", "open('/proc/sys/kernel/core_pattern', 'w').write('|/x'); print('OPEN')"),
    Probe("inherited descriptors",
          "import os\nfor fd in range(3, 200):\n    try: os.fstat(fd); print('OPEN', fd)\n    except OSError: pass"),
    Probe("a file by its handle", _call("C.open_by_handle_at(-100, b'x' * 64, 0)")),
    Probe("a device", "import os; os.mknod('disk', 0o60600, os.makedev(8, 0)); print('OPEN', open('disk', 'rb'))"),
    Probe("mount", _call("C.mount(b'none', b'/tmp', b'tmpfs', 0, None)")),
    Probe("change the root", "import os; os.mkdir('r'); os.chroot('r'); print('OPEN')"),
    Probe("unshare", _call("C.unshare(0x10020000)")),
    Probe("enter a namespace", _call("C.setns(0, 0)")),
)  # fmt: skip

NETWORK = (
    Probe("TCP", _SOCKET.format("", "('127.0.0.1', {port})")),
    Probe("TCP by IPv6", _SOCKET.format("socket.AF_INET6", "('::ffff:127.0.0.1', {port})")),
    Probe("UDP", "import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', 53)); print('OPEN')"),
    Probe("names", "import socket; print('OPEN', socket.gethostbyname('example.org'))"),
    Probe("listen", "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print('OPEN')"),
    Probe("a socket in a folder", _SOCKET.format("socket.AF_UNIX", "'{unix}'")),
    Probe("an abstract socket", _SOCKET.format("socket.AF_UNIX", "'\\0{abstract}'")),
    Probe("an abstract socket from a pair",
          "import socket; a, b = socket.socketpair(1, 2); a.sendto(b'x', '\\0{abstract}'); print('OPEN')"),
    Probe("netlink", "import socket; socket.socket(16, 3, 0); print('OPEN')"),
    Probe("raw", "import socket; socket.socket(2, 3, 1); print('OPEN')"),
    Probe("the host of a virtual machine", "import socket; socket.socket(40, 1); print('OPEN')"),
)  # fmt: skip

PROCESSES = (
    Probe("kill another", "import os; os.kill({bystander}, 9)"),
    Probe("kill all", "import os; os.kill(-1, 15)"),
    Probe("kill its group", "import os; os.killpg(0, 9); print('OPEN')"),
    Probe("kill itself", "import os; os.kill(os.getpid(), 9)\nwhile True: pass", ("signal 9", "time", "exit 1")),
    Probe("kill by descriptor", _call("C.syscall(424, C.syscall(434, {bystander}, 0), 9, 0, 0)")),
    Probe("trace", _call("C.ptrace(16, {bystander}, 0, 0)")),
    Probe("read another's memory", _call("C.process_vm_readv({bystander}, b'x' * 16, 1, b'x' * 16, 1, 0)")),
    Probe("a child that outlives it",
          "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)"),
    Probe("leave the group", "import os; os.setpgid(0, 0); print('OPEN')"),
    Probe("a shell", "import os; print('OPEN' if os.system('true') == 0 else '')"),
    Probe("a program", "import subprocess; print('OPEN', subprocess.run(['/usr/bin/env'], capture_output=True))"),
    Probe("nohup", "import subprocess; subprocess.Popen(['nohup', 'sleep', '600']); print('OPEN')"),
    Probe("a set-user-id program", "import os; os.execv('/usr/bin/su', ['su']); print('OPEN')"),
    Probe("become root", "import os; os.setuid(0); print('OPEN')"),
    Probe("go first", "import os; os.setpriority(0, 0, -10); print('OPEN')"),
)  # fmt: skip

KERNEL = (
    Probe("io_uring", _call("C.syscall(425, 1, None)")),
    Probe("bpf", _call("C.syscall(321 if X else 280, 0, b'x' * 64, 64)")),
    Probe("performance events", _call("C.syscall(298 if X else 241, b'x' * 128, 0, -1, -1, 0)")),
    Probe("keys", _call("C.syscall(250 if X else 219, 0, -3, 1)")),
    Probe("user faults", _call("C.syscall(323 if X else 282, 1)")),
    Probe("a kernel module", _call("C.syscall(175 if X else 105, b'x', 1, b'')")),
    Probe("the clock", "import time; time.clock_settime(time.CLOCK_REALTIME, 0); print('OPEN')"),
    Probe("the host's name", "import socket; socket.sethostname('x'); print('OPEN')"),
    Probe("another personality", _call("C.personality(0x0040000)")),
    Probe("allow itself to be traced", _call("C.prctl(4, 1, 0, 0, 0)")),
    Probe("the second table of calls", _call("C.syscall(0x40000000 + 39) if X else -1")),
    Probe("calls of 32 bits",
          "import ctypes, mmap, os\nif os.uname().machine == 'x86_64':\n    m = mmap.mmap(-1, 4096, prot=7)\n"
          "    m.write(bytes.fromhex('b814000000cd80c3'))\n"
          "    at = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
          "    print('OPEN', ctypes.CFUNCTYPE(ctypes.c_int)(at)())"),
)  # fmt: skip

SECRETS = (
    Probe("the environment", "import os; print('OPEN' if 'GNOMON_PROBE_SECRET' in os.environ else '')"),
    Probe("the environment as it was",
          "print('OPEN' if b'GNOMON_PROBE' in open('/proc/self/environ', 'rb').read() else '')"),
    Probe("keys in the environment",
          "import os\nprint('OPEN' if any(w in k for k in os.environ for w in ('KEY', 'TOKEN', 'SECRET')) else '')"),
    Probe("modules of the grader", "import sys; print('OPEN' if any('gnomon' in m for m in sys.modules) else '')"),
    Probe("import the grader", "import gnomon.rewards.grading; print('OPEN')"),
    Probe("paths in a traceback", "import json; json.loads('{')", ("exit 1",)),
)  # fmt: skip

ANSWERS = (
    Probe("forge the report",
          "import os, sys\nfor fd in range(3, 200):\n    try: os.write(fd, b'exit 0\\nwalls none\\n'); print('OPEN')\n"
          "    except OSError: pass\nprint('exit 0')\nsys.exit(3)", ("exit 3",)),
    Probe("exit at once", "import os; os._exit(0)", (None,)),
    Probe("exit at the end", "import atexit, os; atexit.register(os._exit, 0); raise ValueError", (None, "exit 1")),
    Probe("bytes that are no text", "import sys; sys.stdout.buffer.write(bytes(range(256)) * 9)", (None,)),
    Probe("half a character", "print('\\ud800')", ("exit 1",)),
    Probe("a huge traceback", "def f(n): return f(n + 1)\nf(0)", ("exit 1",)),
    Probe("a huge message", "raise ValueError('x' * 3_000_000)", ("output",)),
    Probe("close everything", "import os\nfor fd in (0, 1, 2): os.close(fd)\nwhile True: pass", ("time",)),
    Probe("close what it reads", "import sys; sys.stdin.close(); input()", ("exit 1",)),
    Probe("read more than there is", "input(); input()", ("exit 1",)),
    Probe("a null pointer", "import ctypes; ctypes.string_at(0)", ("signal 11",)),
    Probe("a program that breaks the compiler", "x = " + "(" * 5000 + ")" * 5000, ("exit 1", "memory")),
    Probe("a program that is no text", "print('\0\ud800')", ("exit 1",)),
    Probe("patch what everything uses",
          "import builtins, json, os, sys\nbuiltins.print = builtins.len = lambda *a: 0\njson.dumps = lambda *a: '1'\n"
          "os._exit = sys.exit = lambda *a: None\nint.__dict__", (None,)),
)  # fmt: skip

# The clock of another process: what clock_getcpuclockid(3) makes of its number.
_CLOCK_OF = "(~{} << 3) | 2"

TIMING = (
    Probe("a busy loop in pieces", "import time\nwhile True:\n    sum(range(1000)); time.sleep(0.001)", ("time",)),
    Probe("sleep in pieces", "import time\nwhile True: time.sleep(0.01)", ("time",)),
    Probe("a call that no signal interrupts", "x = 9 ** 9 ** 9", ("time", "memory")),
    Probe("a pattern without end", "import re; re.match('(a+)+$', 'a' * 64 + 'b')", ("time",)),
    Probe("drip output", "import time\nwhile True:\n    print('x', flush=True); time.sleep(0.02)", ("time",)),
    Probe("drip errors and output",
          "import sys, time\nwhile True:\n    sys.stderr.write('x'); sys.stderr.flush()\n"
          "    print(end='x', flush=True); time.sleep(0.02)", ("time",)),
    Probe("answer and stall", "import time; print(42, flush=True); time.sleep(600)", ("time",)),
    Probe("stall at exit", "import atexit, time; atexit.register(time.sleep, 600); print(42)", ("time",)),
    Probe("stall in a thread at exit",
          "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()\nprint(42)", ("time",)),
    Probe("stall in a finalizer",
          "import time\nclass A:\n    def __del__(self): time.sleep(600)\na = A()\nprint(42)", ("time",)),
    Probe("exit from every signal",
          "import os, signal, time\nfor n in range(1, 65):\n"
          "    try: signal.signal(n, lambda *_: os._exit(0))\n    except (OSError, ValueError): pass\n"
          "while True: time.sleep(0.01)", ("time",)),
    Probe("ask for the alarm again and again",
          "import signal\nsignal.signal(14, lambda *_: None); signal.setitimer(0, 0.001, 0.001)\n"
          "while True: signal.pause()", ("time",)),
    Probe("many threads that are busy",
          "import threading\nthreading.stack_size(1 << 16)\ndef f():\n    while True: pass\n"
          "for _ in range(32): threading.Thread(target=f, daemon=True).start()\nf()", ("time",)),
    Probe("the grader's clock", f"import time; print('OPEN', time.clock_gettime({_CLOCK_OF.format('{process}')}))"),
    Probe("another's clock", f"import time; print('OPEN', time.clock_gettime({_CLOCK_OF.format('{bystander}')}))"),
    Probe("how fine the grader's clock is",
          f"import time; print('OPEN', time.clock_getres({_CLOCK_OF.format('{process}')}))"),
    Probe("wait for the grader's clock",
          _call(f"C.syscall(230 if X else 115, {_CLOCK_OF.format('{process}')}, 0, (ctypes.c_long * 2)(0, 1), None)")),
    Probe("the grader's scheduling", "print('OPEN', open('/proc/{process}/schedstat').read())"),
    Probe("the machine's scheduling", "print('OPEN', open('/proc/stat').read() + open('/proc/loadavg').read())"),
    Probe("real time", "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); print('OPEN')"),
    Probe("the grader's processor",
          "import os; os.sched_setaffinity({process}, os.sched_getaffinity({process})); print('OPEN')"),
    Probe("a timer that outlives it", _call("C.syscall(222 if X else 107, 0, None, (ctypes.c_int * 1)())")),
    Probe("a timer as a file", _call("C.syscall(283 if X else 85, 1, 0)")),
    Probe("slow the clock down", _call("C.adjtimex(bytes(256))")),
)  # fmt: skip

ALL = RESOURCES + FILES + NETWORK + PROCESSES + KERNEL + SECRETS + ANSWERS + TIMING

# Through packages that are allowed: tried where they are, besides all others.
_NEIGHBORS = "import numpy, os; f = os.path.dirname(os.path.dirname(numpy.__file__)); "
PACKAGED = (
    Probe("numpy reads a file", "import numpy as n; print('OPEN' if len(n.fromfile('{secret}', 'u1')) else '')"),
    Probe("numpy maps a file", "import numpy as n; print('OPEN', n.memmap('{secret}', 'u1')[0])"),
    Probe("numpy maps the passwords", "import numpy as n; print('OPEN', n.memmap('/etc/passwd', 'u1')[0])"),
    Probe("numpy reads text", "import numpy as n; print('OPEN', n.loadtxt('{secret}', str))"),
    Probe("numpy writes", "import numpy as n; n.save('{folder}/mark', n.ones(3)); print('OPEN')"),
    Probe("numpy maps to write", "import numpy as n; n.memmap('{folder}/mark', 'u1', 'w+', shape=9)[:] = 1"),
    Probe("numpy fetches",
          "import numpy.lib.npyio as n; n.DataSource(None).open('http://127.0.0.1:{port}/'); print('OPEN')"),
    Probe("numpy's ctypes",
          "import numpy as n; print('OPEN' * (n.ctypeslib.ctypes.CDLL(None).system(b'touch {folder}/mark') == 0))"),
    Probe("numpy's compiler",
          "from numpy import f2py\nr = f2py.compile('end', 'x', verbose=False)\nprint('OPEN' if r == 0 else '')"),
    Probe("a pickle in an array",
          "import io, numpy as n, os\nclass A:\n    def __reduce__(s): return os.system, ('touch {folder}/mark',)\n"
          "b = io.BytesIO(); n.save(b, n.array([A()], object)); b.seek(0)\n"
          "print('OPEN' if n.load(b, allow_pickle=True)[0] == 0 else '')"),
    Probe("arrays beyond memory", "import numpy as n; n.ones(1 << 30); print('OPEN')", ("memory",)),
    Probe("arrays beyond memory, bit by bit",
          "import numpy as n\nx = []\nwhile len(x) < 4096: x.append(n.ones(1 << 17))\nprint('OPEN')",
          ("memory", "time")),
    Probe("an array into a big file",
          "import numpy as n; n.ones(8 << 20, 'u4').tofile('big'); print('OPEN')", ("exit 1",)),
    Probe("an array outside of itself",
          "import numpy as n; n.lib.stride_tricks.as_strided(n.ones(1), (1 << 40,), (8,))[1 << 36] = 1",
          ("signal 11",)),
    Probe("write in a package", "import numpy as n; open(n.__file__, 'a').write('#'); print('OPEN')", ("exit 1",)),
    Probe("a file beside a package's",
          "import numpy as n; open(n.__path__[0] + '/mark', 'w'); print('OPEN')", ("exit 1",)),
    Probe("what lies beside a package",
          _NEIGHBORS + "print('OPEN' * any(w in os.listdir(f) for w in ('torch', 'pip', 'pytest', 'gnomon')))"),
    Probe("read what lies beside a package", _NEIGHBORS + "print('OPEN', open(f + '/torch/__init__.py').read(9))"),
    Probe("import what is not allowed", "import torch; print('OPEN')", ("exit 1",)),
    Probe("the template's memory",
          "import os; print('OPEN', open(f'/proc/{os.getppid()}/mem', 'rb').read(1))", ("exit 1",)),
    Probe("the template's end", "import os; os.kill(os.getppid() or 1 << 21, 15); print('OPEN')", ("exit 1",)),
    Probe("the template's sockets",
          "import os\nfor fd in range(3, 4096):\n"
          "    try: os.write(fd, b'x'); print('OPEN', fd)\n    except OSError: pass"),
    Probe("the template's words", "import gc, socket\nfor o in gc.get_objects():\n"
          "    if isinstance(o, socket.socket) and o.fileno() >= 0: print('OPEN', o)"),
    Probe("sympy evaluates a command",
          "import sympy; sympy.sympify(\"__import__('os').system('touch {folder}/mark')\")"),
    Probe("sympy evaluates a file", "import sympy; print('OPEN', sympy.sympify(\"open('{secret}').read()\"))"),
    Probe("sympy makes a function of text",
          "import sympy; print('OPEN', sympy.lambdify([], \"open('{secret}').read()\")())"),
    Probe("sympy's compiler",
          "import sympy as s\nfrom sympy.utilities.autowrap import autowrap\nx = s.Symbol('x')\n"
          "autowrap(x + 1, backend='cython', tempdir='/tmp/w'); print('OPEN')"),
    Probe("sympy without end", "import sympy; sympy.factorint(10**220 + 7)", ("time",)),
    Probe("pandas reads a file", "import pandas as p; print('OPEN', p.read_csv('{secret}'))"),
    Probe("pandas fetches", "import pandas as p; print('OPEN', p.read_csv('http://127.0.0.1:{port}/x'))"),
    Probe("pandas writes", "import pandas as p; p.DataFrame([1]).to_csv('{folder}/mark'); print('OPEN')"),
    Probe("pandas evaluates",
          "import os, pandas as p\nf = lambda x: os.system('touch {folder}/mark')\n"
          "print('OPEN' if (p.DataFrame({'a': [1]}).query('@f(a) == 0')).size else '')"),
)  # fmt: skip

# A link that exists already would stop the next one, so these come in this order; and calls of 32 bits, which may end
# the program, come last.
_AT_START = (
    "a hard link out", "a symbolic link out", "passwords", "the home folder", "the package", "the run",
    "every folder of the root", "write beside", "dots", "memory of the parent", "memory of all", "root of the parent",
    "descriptors of the parent", "its own root", "inherited descriptors", "a file by its handle", "unshare",
    "enter a namespace", "TCP", "TCP by IPv6", "UDP", "names", "listen", "a socket in a folder", "an abstract socket",
    "an abstract socket from a pair", "netlink", "raw", "the host of a virtual machine", "kill another",
    "kill by descriptor", "trace", "read another's memory", "leave the group", "a shell", "a program", "become root",
    "go first", "io_uring", "bpf", "performance events", "keys", "user faults", "another personality",
    "allow itself to be traced", "the second table of calls", "the environment", "the environment as it was",
    "keys in the environment", "modules of the grader", "import the grader", "the grader's clock",
    "another's clock", "the grader's scheduling", "the machine's scheduling", "real time", "the grader's processor",
    "a timer that outlives it", "a timer as a file", "calls of 32 bits",
)  # fmt: skip
_BY_NAME = {probe.name: probe for probe in ALL}
MORE = tuple(_BY_NAME[name] for name in _AT_START)
"""What is tried at start once the nine were stopped: quick, one after the other in one program, and of what is outside
they touch nothing but their targets."""
