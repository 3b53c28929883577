"""The pages of the site that are written by code: what exists, in the words of the classes that make it exist."""

import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path

from gnomon import _HOMES
from gnomon.algorithms.describe import piece_text
from gnomon.algorithms.pieces import slots
from gnomon.cli.arguments import parser_of
from gnomon.cli.main import VERBS, module_of
from gnomon.config.reference import Setting, kinds, of_kind
from gnomon.core import errors
from gnomon.core.metric_meanings import MEANINGS
from gnomon.diagnosis.catalog import RULES
from gnomon.rewards import base
from gnomon.tasks.benchmarks import BENCHMARKS

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "examples" / "notebooks"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown; a vertical bar within a cell stays one."""
    lines = [list(head), *(list(row) for row in rows)]
    cells = [[cell.replace("|", "\\|").replace("``", "`").replace("\n", " ") for cell in line] for line in lines]
    written = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([written[0], "|" + "---|" * len(cells[0]), *written[1:]])


def prose(text: str) -> str:
    """Return a docstring as Markdown: sections of Google's style as bold words, code marks as Markdown has them.

    >>> prose("What it is, as ``x``.\\n\\nAttributes:\\n    x: A number.")
    'What it is, as `x`.'
    """
    return text.partition("\n\nAttributes:")[0].partition("\n\n>>>")[0].replace("``", "`")


def settings_table(found: Iterable[Setting]) -> str:
    """Return settings as a table."""
    rows = (
        [f"`{s.key}`", s.type, "must be given" if s.default is None else f"`{s.default}`", s.meaning] for s in found
    )
    return table(["setting", "type", "default", "meaning"], rows)


def _kinds_page(path: str, title: str, opening: str) -> str:
    parts = [f"# {title}", opening]
    for kind, cls in kinds(path).items():
        parts += [f"## {kind}", prose(inspect.getdoc(cls) or ""), settings_table(of_kind(path, kind))]
    return "\n\n".join(parts) + "\n"


def rewards() -> str:
    """Return the page of rewards."""
    return _kinds_page(
        "rewards",
        "Rewards",
        "What `[[rewards]]` of an experiment may be; `gnomon rewards` prints the same. A function of your own is "
        '`rewards = ["path.py:function"]`.',
    )


def tasks() -> str:
    """Return the page of tasks."""
    head = ["test set", *(f.name for f in fields(next(iter(BENCHMARKS.values()))))]
    rows = ([f"`{name}`", *(str(getattr(each, part)) for part in head[1:])] for name, each in BENCHMARKS.items())
    page = _kinds_page(
        "task",
        "Tasks",
        "What `[task]` of an experiment may be; `gnomon tasks` prints the same, and the generators of reasoning-gym.",
    )
    opening = 'Of `kind = "benchmark"`, and for `gnomon evaluate --task NAME`.'
    return f"{page}\n## Test sets\n\n{opening}\n\n{table(head, rows)}\n"


def pieces() -> str:
    """Return the page of the pieces of algorithms, with their settings."""
    parts = [
        "# Pieces",
        "What stands at `algorithm.PLACE`: `gnomon algorithms PIECE` prints one, [Algorithms](../algorithms.md) has "
        "the presets that are made of them, and one may be your own ([Pieces of your own](../pieces.md)).",
    ]
    for place, fitting in slots().items():
        parts.append(f"## algorithm.{place}")
        for piece, cls in fitting.items():
            said = piece_text(cls)
            rows = (
                [f"`{n}`", f.type, f"`{f.default}`" if f.default else "must be given"] for n, f in said.fields.items()
            )
            parts += [f"### {piece}", prose(said.text)]
            parts += [table(["setting", "type", "default"], rows)] if said.fields else []
    return "\n\n".join(parts) + "\n"


def error_classes() -> str:
    """Return the page of error classes, with what each refines."""
    found = [c for m in (errors, base) for c in vars(m).values() if isinstance(c, type) and issubclass(c, Exception)]
    rows = [
        [f"`{cls.__name__}`", ", ".join(f"`{b.__name__}`" for b in cls.__bases__), prose(inspect.getdoc(cls) or "")]
        for cls in dict.fromkeys(found)
        if cls.__module__.startswith("gnomon.")
    ]
    opening = "What `except` can name; [Errors](../errors.md) has the tree, the exit codes and the rules."
    return f"# Error classes\n\n{opening}\n\n{table(['class', 'is a', 'meaning'], rows)}\n"


def rules() -> str:
    """Return the page of the rules of `gnomon doctor`."""
    parts = [
        "# Rules of the doctor",
        "What `gnomon doctor` and a run in progress look for, causes before consequences; `doctor.rules` chooses, and "
        "[Diagnosis](../diagnosis.md) has thresholds and what they were measured on.",
    ]
    for name, rule in RULES.items():
        parts += [f"## {name}", prose(inspect.getdoc(type(rule)) or "")]
    return "\n\n".join(parts) + "\n"


def command_line() -> str:
    """Return the page of commands: each verb with its help, as it is printed on 100 columns."""
    parts = [
        "# Commands",
        table(["command", "what it does"], ([f"[gnomon {v}](#gnomon-{v})", said] for v, said in VERBS.items())),
        "Each takes `--help`. Exit codes are in [Errors](../errors.md#exit-codes).",
    ]
    for verb in VERBS:
        parser = parser_of(verb, importlib.import_module(module_of(verb)).__doc__)
        parts += [f"## gnomon {verb}", f"```text\n{parser.format_help().replace('``', '').rstrip()}\n```"]
    return "\n\n".join(parts) + "\n"


def metrics() -> str:
    """Return the page of metrics: a table for each station."""
    parts = [
        "# Metrics",
        "What the steps of a run measure, as `metrics.jsonl`, `run.metrics` and trackers name it: "
        "`station/quantity_unit`. A step has the metrics that its experiment and algorithm can measure. Capitals stand "
        "for a name that the run gives. `run.metrics.meaning(NAME)` says the same.",
    ]
    for station in dict.fromkeys(name.partition("/")[0] for name in MEANINGS):
        rows = ([f"`{name}`", text] for name, text in MEANINGS.items() if name.startswith(f"{station}/"))
        parts += [f"## {station}", table(["metric", "meaning"], rows)]
    return "\n\n".join(parts) + "\n"


# Names in the order in which a reader needs them, and what the first of them return.
FIRST = ("train", "load", "resume", "evaluate", "export", "dissect", "Experiment", "Algorithm")
RETURNED = ("gnomon.training.result.Result", "gnomon.training.result.StepMetrics")


def python() -> str:
    """Return the page of public names, which mkdocstrings fills from their docstrings."""
    homes = {name: home for home, names in _HOMES.items() for name in names}
    presets = [name for name in homes if name.isupper() and name != "PRESETS"]
    others = [name for name in homes if not name.isupper() and name not in FIRST]
    paths = [f"{homes[name]}.{name}" for name in FIRST]
    paths[2:2] = RETURNED
    paths += [f"{homes[name]}.{name}" for name in others]
    parts = [
        "# Python",
        "The names of `import gnomon`, from their docstrings; [Training from Python](../python.md) is an introduction.",
        *(f"::: {path}\n    options:\n      heading_level: 2" for path in paths),
        "## Presets",
        f"{', '.join(f'`gnomon.{name}`' for name in presets)} are values of `gnomon.Algorithm`; `gnomon.PRESETS` has "
        "all by name ([Algorithms](../algorithms.md)).",
    ]
    return "\n\n".join(parts) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "reference/commands.md": command_line,
    "reference/error-classes.md": error_classes,
    "reference/metrics.md": metrics,
    "reference/pieces.md": pieces,
    "reference/python.md": python,
    "reference/rewards.md": rewards,
    "reference/rules.md": rules,
    "reference/tasks.md": tasks,
}


def notebook(path: Path) -> str:
    """Return a notebook as a page: its text, its code, and its outputs as far as it has text or SVG."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    name = path.relative_to(ROOT).as_posix()
    first, _, rest = "\n\n".join(parts).partition("\n")
    return f"{first}\n\nThis page is the notebook `{name}` of the repository.\n{rest}\n"


def repository_page(path: Path) -> str:
    """Return a file or folder of the repository as a page of the site, left out of the search if it is no text."""
    name = path.relative_to(ROOT).as_posix()
    hidden = "---\nsearch:\n  exclude: true\n---\n\n"
    if path.is_dir():
        inside = sorted(p for p in path.iterdir() if p.name[0] not in "._" and p.name != "runs")
        lines = [
            f"- [{p.name}/]({p.name}/README.md)" if (p / "README.md").is_file() else f"- `{p.name}`" for p in inside
        ]
        return f"{hidden}# {name}\n\n" + "\n".join(lines) + "\n"
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    fence = "`" * (3 + max(map(len, re.findall(r"`{3,}", text)), default=0))
    return f"{hidden}# {name}\n\n{fence}{path.suffix.removeprefix('.') or 'text'}\n{text}\n{fence}\n"
