"""Two programs that speak to each other: the tests, which ask, and the answer, which is called.

Each runs in a sandbox of its own, the output of one being the input of the other. What the tests find goes to their
standard error with a secret that the answer never sees. Calls go over as pickles (from the tests, which a dataset
wrote), and come back as JSON (from the answer, which a model wrote), from which the tests build plain values alone.
"""

import os
import secrets
import threading

from gnomon.rewards.base import VerifierError
from gnomon.rewards.code.cases import Script
from gnomon.rewards.code.program import ENTERED, PLAIN, headed
from gnomon.rewards.code.published import RUNNER
from gnomon.rewards.sandbox.base import Outcome
from gnomon.rewards.sandbox.linux import LinuxSandbox
from gnomon.rewards.sandbox.watch import Ends, Watched

# Time in which the program's side may end by itself after the tests have ended.
_OWN_END_SECONDS = 0.5
# The answer's side: its own input is empty and its output goes nowhere; the tests speak on copies of both.
_BEFORE = (
    "import os as _; _ends_SECRET = _.dup(0), _.dup(1); _null = _.open('/dev/null', 2); _.dup2(_null, 0); "
    "_.dup2(_null, 1); del _null\n"
)
# The answer's side. It reads calls from its copy of standard input, and answers each with one line that
# begins with the secret. Objects that are no plain values stay in `kept`, and their number goes over.
_SERVE = """
def _serve_SECRET(ends):
    import io, json, os, sys
    import collections, marshal, pickle, types
PLAIN
    kept = []

    class Reader(pickle.Unpickler):
        def persistent_load(self, number):
            return kept[number] if type(number) is int else eval(number, globals())

        def find_class(self, module, name):
            if module == "gnomon":
                return lambda code, name: types.FunctionType(marshal.loads(code), globals(), name)
            return super().find_class(module, name)

    def said(value, is_kept):
        found = plain(value)
        if is_kept and type(found) is dict and "opaque" in found:
            kept.append(value)
            return {"object": len(kept) - 1}
        return found

    def answer(kind, target, given, words, is_kept):
        target = kept[target] if type(target) is int else eval(target, globals())
        if kind == "set":
            return plain(setattr(target, *given))
        if kind == "get":
            found = getattr(target, *given)
            return {"method": True} if callable(found) else said(found, True)
        if kind == "method":
            name, *given = given
            target = getattr(target, name)
        try:
            before = pickle.dumps(given)
        except Exception:
            before = None
        found = said(target(*given, **words), is_kept)
        if before is None or pickle.dumps(given) == before:
            return found
        return {"changed": [found, *map(plain, given)]}

    def tell(said):
        text = ("\\nSECRET " + json.dumps(said) + "\\n").encode()
        while text:
            text = text[os.write(ends[1], text):]

    with open(ends[0], "rb") as asked:
        for line in asked:
            try:
                reply = answer(*Reader(io.BytesIO(bytes.fromhex(line.decode()))).load())
            except BaseException as error:
                reply = {"raised": [[kind.__name__ for kind in type(error).__mro__], str(error)[:500]]}
            tell(reply)
_serve_SECRET(_ends_SECRET)
"""

# The tests' side, which alone decides. Whatever comes from the answer becomes a plain value, or one without any use.
_TESTS = """
def _begin(source, names, entry, tolerance, secret, verdict):
    import builtins, io, json, marshal, os, pickle, sys, types
    ends = os.dup(0), os.dup(1), os.dup(2)
    null = os.open("/dev/null", 2)
    for number in range(3):
        os.dup2(null, number)
    answers = open(ends[0], "rb")
    made, raised = [0], [0]

    class Unusable(BaseException):
        pass

    class Raised(Exception):
        pass

    class Opaque:
        __hash__ = None
        def none(self, *others):
            raise TypeError("an object of the program's own")
        __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = none

    def function(code, name):
        return None
    function.__module__ = "gnomon"
    function.__qualname__ = "function"
    sys.modules["gnomon"] = types.ModuleType("gnomon")
    sys.modules["gnomon"].function = function

    class Writer(pickle.Pickler):
        def persistent_id(self, value):
            if type(value) is Thing:
                return object.__getattribute__(value, "number")
            return value.path if type(value) is Function else None

        def reducer_override(self, value):
            if type(value) is types.FunctionType and value is not function and value.__module__ == "tests":
                if value.__closure__ or value.__defaults__:
                    raise Unusable("a function with variables of the tests is given to the program")
                return function, (marshal.dumps(value.__code__), value.__name__)
            home = value.__module__ if isinstance(value, type) else type(value).__module__
            if home in ("tests", "__main__"):
                raise Unusable("an object that only the tests know is given to the program")
            return NotImplemented

    def end(said):
        os.write(ends[2], ("\\n" + verdict + " " + said + "\\n").encode(errors="replace"))
        os._exit(0)

    def value(said, depth=60):
        if type(said) is not dict:
            return Opaque() if type(said) is list else said
        if len(said) != 1 or not depth:
            return Opaque()
        (kind, inner), = said.items()
        if kind == "number":
            return float(inner) if inner in ("inf", "-inf", "nan") else Opaque()
        if type(inner) is not list:
            return Opaque()
        try:
            if kind == "bytes":
                return bytes(inner)
            if kind == "complex":
                return complex(*map(float, inner))
            if kind == "array":
                return array(*inner, depth - 1)
            if kind == "dict":
                return {value(k, depth - 1): value(v, depth - 1) for k, v in inner}
            items = [value(item, depth - 1) for item in inner]
            if kind == "set":
                return set(frozenset(item) if type(item) is set else item for item in items)
        except (TypeError, ValueError, OverflowError):
            return Opaque()
        return items if kind == "list" else tuple(items) if kind == "tuple" else Opaque()

    def array(items, dtype, depth):
        numpy = sys.modules.get("numpy")
        if numpy is None or type(items) is not dict:
            return Opaque()
        if not re.fullmatch("bool|<U[0-9]+|(u?int|float|complex)[0-9]+", dtype):
            return Opaque()
        return numpy.array(value(items, depth), dtype=None if dtype[0] == "<" else dtype)

    def ask(kind, target, given=(), words={}, is_kept=False):
        made[0] += 1
        held = io.BytesIO()
        try:
            Writer(held).dump((kind, target, list(given), words, is_kept))
        except Exception as error:
            raise Unusable(f"{type(error).__name__}: {error}")
        text = held.getvalue().hex().encode() + b"\\n"
        try:
            while text:
                text = text[os.write(ends[1], text):]
            for line in answers:
                if line.startswith(secret):
                    return given_back(json.loads(line[len(secret):]), given, is_kept)
        except (OSError, RecursionError):
            pass
        end("fail: the program ended")

    def given_back(said, given, is_kept):
        if type(said) is dict and "changed" in said:
            said, *changed = said["changed"]
            for ours, theirs in zip(given, map(value, changed)):
                if type(ours) is list and type(theirs) is list:
                    ours[:] = theirs
                elif type(ours) in (dict, set) and type(theirs) is type(ours):
                    ours.clear()
                    ours.update(theirs)
                elif hasattr(ours, "dtype") and getattr(theirs, "shape", None) == ours.shape:
                    ours[...] = theirs
        if type(said) is dict and "raised" in said:
            kinds, text = said["raised"]
            kinds = [getattr(builtins, kind, None) for kind in kinds]
            kind = next((k for k in kinds if isinstance(k, type) and issubclass(k, Exception)), Raised)
            try:
                error = kind(text)
            except TypeError:
                error = Raised(text)
            raised[0] += 1
            raise error
        if is_kept and type(said) is dict and type(said.get("object")) is int:
            return Thing(said["object"], is_kept == "root")
        return said if type(said) is dict and "method" in said else value(said)

    def is_class(path):
        return path.rpartition(".")[2][:1].isupper()

    class Function:
        def __init__(self, path):
            self.path = path
        def __call__(self, *given, **words):
            return ask("call", self.path, given, words, is_class(self.path) and "root")
        def __getattr__(self, name):
            if name[:2] == "__" or not is_class(self.path):
                raise AttributeError(name)
            return Function(self.path + "." + name)
        __hash__ = None
        __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = Opaque.none

    def method(name):
        def called(self, *given, **words):
            if not object.__getattribute__(self, "is_root"):
                raise TypeError("a method of an object that the program made")
            return ask("method", object.__getattribute__(self, "number"), (name, *given), words)
        return called

    class Thing:
        def __init__(self, number, is_root):
            object.__setattr__(self, "number", number)
            object.__setattr__(self, "is_root", is_root)
        def __getattribute__(self, name):
            if name[:2] == "__":
                return object.__getattribute__(self, name)
            found = ask("get", object.__getattribute__(self, "number"), (name,), {}, "part")
            if type(found) is dict and "method" in found:
                return lambda *given, **words: method(name)(self, *given, **words)
            return found
        def __setattr__(self, name, new):
            ask("set", object.__getattribute__(self, "number"), (name, new))
        __hash__ = None
        __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = Opaque.none
        __len__, __getitem__, __contains__ = map(method, ("__len__", "__getitem__", "__contains__"))
        __setitem__, __call__, __str__ = map(method, ("__setitem__", "__call__", "__str__"))
        def __bool__(self):
            return True

    def equal(left, right):
        if type(left) is float and type(right) in (int, float):
            try:
                return left == right or abs(left - right) <= tolerance * max(1.0, abs(right)) < float("inf")
            except OverflowError:
                return False
        return left == right

RUNNER
    tests = sys.modules["tests"] = types.ModuleType("tests")
    space = vars(tests)
    space.update({name: Function(name) for name in names}, candidate=Function(entry))
    space.update(equal_=equal, run_tests_=run_tests)
    try:
        exec(compile(source, "tests", "exec"), space)
    except (Unusable, SystemExit) as error:
        end(f"unusable {error}")
    except (NameError, ImportError) as error:
        end("fail" if raised[0] else f"unusable {error}")
    except BaseException as error:
        end(f"fail: {type(error).__name__}")
    end("pass" if made[0] else "unusable nothing is asked of a program")
_begin(*WORDS)
"""


def judge_isolated(sandbox: LinuxSandbox, program: str, script: Script, tolerance: float) -> bool:
    """Whether the tests, run apart from the program, find what they claim.

    Raises:
        VerifierError: If a sandbox did not run, or the tests cannot be used whatever the program is.
    """
    # Two secrets: the answer knows the first one, which marks its
    # lines, and never sees the second one, which marks the verdict.
    secret, verdict = secrets.token_hex(16), secrets.token_hex(16)
    words = (script.source, sorted(script.names), script.entry, tolerance, f"{secret} ".encode(), verdict)
    serve = _SERVE.replace("PLAIN", PLAIN).replace("SECRET", secret)
    answer = f"{headed(program, _BEFORE.replace('SECRET', secret) + ENTERED)}\n{serve}"
    tests = _TESTS.replace("RUNNER", RUNNER).replace("WORDS", repr(words))
    outcomes = _both(sandbox, answer, tests)
    # Run once more, as `run_now` does for one program: the machine may have been short of memory for a moment.
    if any(outcome.cause == "refused" for outcome in outcomes):
        outcomes = _both(sandbox, answer, tests)
    for outcome in outcomes:
        if outcome.cause == "refused":
            raise VerifierError(f"the sandbox did not run the program: {outcome.stderr}")
    lines = outcomes[0].stderr.split("\n")
    said = [line.removeprefix(f"{verdict} ") for line in lines if line.startswith(f"{verdict} ")]
    if said and said[0].startswith("unusable"):
        raise VerifierError(f"the tests cannot be used: {said[0].removeprefix('unusable ')[:300]}")
    # Exactly one line: a second verdict means that something forged one.
    return said == ["pass"]


def _both(sandbox: LinuxSandbox, answer: str, tests: str) -> list[Outcome]:
    """Run the two beside each other; return how the tests ended, and how the answer did."""
    # Each pipe is the output of one side and the input of the other; `watch` closes the ends in this process.
    (asked, asking), (answered, answering) = os.pipe(), os.pipe()
    watched, outcomes = Watched(), list[Outcome]()
    side = threading.Thread(
        target=lambda: outcomes.append(sandbox.run_now(answer, "", watched, Ends(asked, answering))), daemon=True
    )
    side.start()
    try:
        found = sandbox.run_now(tests, "", None, Ends(answered, asking))
    finally:
        # It ends by itself with its input, or was killed, which a kill of ours would hide.
        side.join(_OWN_END_SECONDS)
        # Asked before `end`, which kills: afterwards a stopped process cannot be told from one that was slow.
        is_stopped = side.is_alive() and watched.is_stopped()
        watched.end()
        side.join()
    if is_stopped:
        return [found, Outcome("", "something outside of the sandbox stopped it", "refused", found.seconds)]
    return [found, *outcomes]
