"""Nothing that gnomon reads can run code, lead out of a run, or carry a secret away."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.architecture.test_fences import PACKAGE, SOURCES, dotted, imported, parse

# Where text does become code, and why that is meant. Everywhere else it may not.
MEANT = {
    "models/weights.py": "names, shapes and some rows of a model's .bin files, read as weights only",
    "verifiers/sandbox/inside/program.py": "the model's program, on the far side of the sandbox",
    "user_file.py": "an algorithm, reward, environment or tool, by the name that stands in the experiment; a claim",
}
RUNNERS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load",
    "torch.load", "torch.save", "joblib.load", "pandas.read_pickle", "runpy.run_path", "runpy.run_module",
    "code.interact", "builtins.eval", "builtins.exec", "subprocess.getoutput", "subprocess.getstatusoutput",
}  # fmt: skip
READERS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "dbm", "runpy", "code"}


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Yield every call with the dotted name of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


def runs_text(tree: ast.Module) -> list[str]:
    """Return the calls that turn what is read into something that runs, also under another name."""
    aliases = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    found = []
    for name, call in calls(tree):
        name = aliases.get(name, name)
        keywords = {k.arg: k.value for k in call.keywords}
        is_pickling = name.endswith((".load", ".loadtxt")) and "allow_pickle" in keywords
        shell = keywords.get("shell")
        is_shell = shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False)
        is_module = name.endswith((".exec_module", ".source_to_code", "spec_from_file_location"))
        is_program = name.startswith(("os.spawn", "os.exec", "pty."))
        if name in RUNNERS or is_pickling or is_shell or is_module or is_program:
            found.append(name)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_what_is_read_is_never_run(path: Path):
    """No eval, exec, compile, shell, pickle in any disguise; `test_fences.py` looks for the commonest apart."""
    tree, name = parse(path), str(path.relative_to(PACKAGE))

    assert runs_text(tree) == [] or name in MEANT
    assert imported(tree) & READERS == set()


@pytest.mark.parametrize(
    "source",
    [
        "eval(x)", "from builtins import exec\nexec(x)", "compile(x, '', 'exec')", "__import__(x)",
        "import torch\ntorch.load(p, weights_only=True)", "from torch import load as get\nget(p)",
        "import numpy as np\nnp.load(p, allow_pickle=True)", "import subprocess\nsubprocess.run(x, shell=True)",
        "from subprocess import run\nrun(x, shell=flag)", "import os\nos.execv(x, y)", "import os\nos.popen(x)",
        "import yaml\nyaml.full_load(x)", "import pty\npty.spawn(x)", "from os import system as s\ns(x)",
    ],
)  # fmt: skip
def test_every_disguise_is_seen(source: str):
    """Aliases and from-imports too; a method called eval, or shell=False, is none."""
    assert len(runs_text(ast.parse(source))) == 1
    assert runs_text(ast.parse("model.eval()\nre.compile(x)\nsubprocess.run(x, shell=False)")) == []


def test_what_is_excused_is_still_there():
    """What is meant exists: a reason that nobody needs any more hides the next mistake."""
    assert {str(path.relative_to(PACKAGE)) for path in SOURCES if runs_text(parse(path))} == set(MEANT)


def test_entry_points_and_plugins_are_not_looked_for():
    """No directory and no installed package can add code to a run by being there."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        for name, _ in calls(parse(path))
        if name.endswith(("entry_points", "iter_entry_points")) or name in ("site.addsitedir", "addsitedir")
    }

    assert found == set()


def test_no_server_listens_to_the_world():
    """No address of all interfaces is written anywhere, and whatever binds does so to the loopback constant; but for
    the places where ranks of several machines, and engines that weights are sent to, meet: on the one interface that
    they use.
    """
    texts = {path: path.read_text() for path in SOURCES}
    assert [str(p) for p, text in texts.items() if "0.0.0.0" in text or '"::"' in text] == []
    for path in SOURCES:
        for name, call in calls(parse(path)):
            if name.endswith("create_server"):
                # Ranks of a learner on several machines meet on the network that they are told to use.
                is_meeting = path.relative_to(PACKAGE).as_posix() in ("learner/mesh.py", "engines/vllm_transfer.py")
                assert is_meeting or ast.unparse(call.args[0]).startswith("(LOOPBACK, "), f"{path}: {ast.unparse(call)}"
            if name.endswith("start_server"):
                assert "sock" in {k.arg for k in call.keywords}, f"{path}: listens on a socket of its own choice"
            if name.endswith(".bind"):
                assert path.name == "probes.py", f"{path}: only the sandbox's own probe binds a socket, to 127.0.0.1"


def test_a_model_s_own_code_is_off_by_default_everywhere():
    """Every default of trust_remote_code is False, and none is passed as a constant True."""
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.args, *node.args.kwonlyargs]
                defaults = [None] * (len(node.args.args) - len(node.args.defaults)) + node.args.defaults
                for argument, default in zip(arguments, [*defaults, *node.args.kw_defaults], strict=True):
                    if argument.arg == "trust_remote_code" and default is not None:
                        assert ast.unparse(default) == "False", f"{path}:{node.name}"
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert ast.unparse(node.value) != "True", str(path)
