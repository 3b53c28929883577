"""Nothing that gnomon reads can run code, lead out of a run, or carry a secret away."""

import ast
import re
from collections.abc import Iterator

import pytest
from tests.architecture.sources import MODULES, SOURCES, dotted, functions, imported, module_of, none_of, parse, spot

# Where text does become code, and why that is meant. Everywhere else it may not.
MEANT = {
    "gnomon.models.weights_check": "names, shapes and some rows of a model's .bin files, read as weights only",
    "gnomon.rewards.sandbox.inside.program": "the model's program, on the far side of the sandbox",
    "gnomon.core.user_code": "an algorithm, reward, environment or tool, by the name in the experiment; a claim",
}
# Writes pickles of a program's own objects for its own processes, and reads none: what reads them is a file of the
# user's code, which `gnomon.core.user_code` runs.
WRITES_PICKLES = "gnomon.training.objects"
# Where ranks of a learner on several machines, and engines that weights are sent to, meet: on the one interface that
# they are told to use. Everything else that listens does so on the loopback.
MEET_ON_A_NETWORK = {"gnomon.learner.mesh", "gnomon.engines.vllm.transfer"}
# Binds a socket to see that the sandbox does not let it.
SANDBOX_PROBES = "gnomon.rewards.sandbox.probes"
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


def runs_text(tree: ast.Module) -> list[tuple[int, str]]:
    """Return the calls that turn what is read into something that runs, also under another name, with their lines."""
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
            found.append((call.lineno, name))
    return found


def test_what_is_read_is_never_run():
    """No eval, exec, compile, shell, pickle in any disguise; `test_fences.py` looks for the commonest apart."""
    found = [
        f"{spot(path, line)}: {name}"
        for module, path in MODULES.items()
        if module not in MEANT
        for line, name in runs_text(parse(path))
    ]
    writer = MODULES[WRITES_PICKLES]
    readers = [path for path in SOURCES if path != writer and module_of(path) not in MEANT]
    found += [f"{spot(p)}: imports {name}" for p in readers for name in sorted(imported(parse(p)) & READERS)]
    found += [
        f"{spot(writer, c.lineno)}: {name}" for name, c in calls(parse(writer)) if name.endswith((".load", ".loads"))
    ]

    none_of(found, "read safetensors, JSON or TOML, which cannot run; a place where code is meant stands in MEANT")


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
    assert {module for module, path in MODULES.items() if runs_text(parse(path))} == set(MEANT)


def test_entry_points_and_plugins_are_not_looked_for():
    """No directory and no installed package can add code to a run by being there."""
    found = [
        f"{spot(path, call.lineno)}: {name}"
        for path in SOURCES
        for name, call in calls(parse(path))
        if name.endswith(("entry_points", "iter_entry_points")) or name in ("site.addsitedir", "addsitedir")
    ]

    none_of(found, "take code only from where the experiment names it")


def test_no_server_listens_to_the_world():
    """No address of all interfaces is written anywhere, and whatever binds does so to the loopback constant; but for
    the places where ranks of several machines, and engines that weights are sent to, meet: on the one interface that
    they use.
    """
    found = [
        f"{spot(p)}: the address of all interfaces" for p in SOURCES if re.search('0[.]0[.]0[.]0|"::"', p.read_text())
    ]
    for module, path in MODULES.items():
        for name, call in calls(parse(path)):
            where = f"{spot(path, call.lineno)}: {name}"
            is_local = bool(call.args) and ast.unparse(call.args[0]).startswith("(LOOPBACK, ")
            if name.endswith("create_server") and not is_local and module not in MEET_ON_A_NETWORK:
                found.append(f"{where} does not listen on LOOPBACK")
            if name.endswith("start_server") and "sock" not in {k.arg for k in call.keywords}:
                found.append(f"{where} listens on a socket of its own choice")
            if name.endswith(".bind") and module != SANDBOX_PROBES:
                found.append(f"{where} binds a socket, which only the sandbox's own probe does")

    none_of(found, "listen on (LOOPBACK, port)")


def test_a_model_s_own_code_is_off_by_default_everywhere():
    """Every default of trust_remote_code is False, and none is passed as a constant True."""
    found = []
    for path in SOURCES:
        for f in functions(parse(path)):
            given = [*f.args.posonlyargs, *f.args.args]
            defaults = [None] * (len(given) - len(f.args.defaults)) + f.args.defaults
            for argument, default in zip([*given, *f.args.kwonlyargs], [*defaults, *f.args.kw_defaults], strict=True):
                if argument.arg == "trust_remote_code" and default is not None and ast.unparse(default) != "False":
                    found.append(f"{spot(path, f.lineno)}: {f.name} trusts by default")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) == "True":
                found.append(f"{spot(path, node.value.lineno)}: a model's own code is trusted, whatever the user said")

    none_of(found, "pass on what the experiment says; the default is False")
