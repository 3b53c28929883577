"""Any text and any number in any setting: refused in words, or written and read again as the same."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gnomon.cli.main import main
from gnomon.config.experiment import Experiment, from_table, load, to_toml
from gnomon.config.reading import read
from gnomon.core.errors import ConfigError, UserError
from gnomon.core.tables import parse_toml

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=12) | st.sampled_from(
    [
        "",
        " ",
        "a.b.c",
        "." * 1200,
        '"""',
        "'''",
        "\\",
        '\\"',
        "\r\n",
        "\0",
        "\ud800",
        "\ufeff",
        "]",
        "[x]\na = 1",
        "# no",
    ]
)
NUMBERS = st.integers() | st.sampled_from([2**31, 2**32 + 1, 2**53 + 1, 2**63 - 1, 2**63, 10**30, -1, -(10**30)])
FLOATS = st.floats() | st.sampled_from([1e308, 5e-324, -0.0, 0.1])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | FLOATS | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=6,
)
BASE = {
    "model": "tiny", "algorithm": {"preset": "grpo", "num_generations": 4}, "task": {"kind": "arithmetic"},
    "rollouts_per_step": 16, "held_out": {"size": 3}, "steps": 1,
}  # fmt: skip


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Return values that a field of this type may be written as."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return of_type(inner[0])
    if origin in (typing.Union, types.UnionType):
        return st.one_of([of_type(each) for each in inner if each is not type(None)])
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin is tuple:
        return st.lists(of_type(inner[0]), max_size=3)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        known = {f.name: of_type(hints[f.name]) for f in dataclasses.fields(hint) if f.init}
        kind = {"kind": known.pop("kind")} if "kind" in known else {}
        needed = {
            f.name: known.pop(f.name)
            for f in dataclasses.fields(hint)
            if f.name in known and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        }
        return st.fixed_dictionaries({**kind, **needed}, optional=known)
    simple = {str: ANY_TEXT, int: NUMBERS, float: FLOATS | NUMBERS, bool: st.booleans()}
    return simple.get(hint, st.dictionaries(ANY_TEXT, JSON, max_size=3) if origin in (dict, Mapping) else JSON)


HINTS = typing.get_type_hints(Experiment, include_extras=True)
FIELDS = {name: of_type(hint) for name, hint in HINTS.items() if name not in ("algorithm", "rewards", "model")}


@st.composite
def changes(draw: st.DrawFn) -> dict[str, Any]:
    """Return up to three keys of an experiment with values of their types, or any JSON."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=3, unique=True))
    return {name: draw(JSON if draw(st.integers(0, 5)) == 0 else FIELDS[name]) for name in names}


def accepted(table: Mapping[str, Any]) -> Experiment | None:
    """Return the experiment, or None where it is refused in words."""
    try:
        return from_table(table).experiment
    except UserError as error:
        said = str(error).encode().decode()
    assert said.count("\n") < 5
    return None


@given(changes())
@example({"system": "\n".join("Q. 1. A. b. c." * 3 for _ in range(80))})
@example({"seed": 2**63 - 1})
@example({"task": {"kind": "reasoning_gym", "generator": "x", "parameters": {"a": [None]}}})
@example({"task": {"kind": "reasoning_gym", "generator": "x", "parameters": {"\ud800": 1}}})
def test_what_an_experiment_may_be_is_read_again_as_it_was_written(tmp_path_factory: Any, changed: dict[str, Any]):
    """Whatever its fields hold, an experiment is refused in words, or its TOML is read as an equal experiment."""
    experiment = accepted({**BASE, **changed})
    if experiment is None:
        return

    path = tmp_path_factory.getbasetemp() / "written.toml"
    path.write_text(to_toml(experiment), encoding="utf-8")

    assert load(path).experiment == experiment


@given(ANY_TEXT)
def test_any_text_may_be_a_system_message(tmp_path_factory: Any, text: str):
    """Every text of whole characters is read again as it was, and half a surrogate pair is refused."""
    experiment = accepted({**BASE, "system": text})

    if any("\ud800" <= character <= "\udfff" for character in text):
        assert experiment is None
    else:
        path = tmp_path_factory.getbasetemp() / "system.toml"
        path.write_bytes(to_toml(experiment).encode())
        assert load(path).experiment.system == read(path).get("system", "") == text


@pytest.mark.parametrize(
    "text",
    [
        'x = """\n' + "a.b. " * 900 + '\n"""', "x = '''" + "." * 5000 + "'''", 'x = "' + "a." * 3000 + '"',
        "x = '" + "[a.b]." * 3000 + "'", "# " + "a." * 3000, "x = [" + "0.5, " * 3000 + "]",
        '"' + "a." * 3000 + '" = 1', 'x = "\\"' + "a." * 3000 + '"', 'x = """""' + "a." * 2000 + '"""""',
        "x = {a = '" + "." * 2000 + "', b = 0.5}", 'x = "#"\ny = "' + "." * 2000 + '"',
    ],
)  # fmt: skip
def test_dots_in_texts_are_no_names_of_keys(text: str):
    """Only names of one key are counted: not what is quoted, on one line or on several, nor comments and numbers."""
    parse_toml(text)


@pytest.mark.parametrize(
    "text",
    [
        "a" + ".a" * 1500 + " = 1", "[a" + ".a" * 1500 + "]", "[[a" + ". a" * 1500 + "]]",
        '"a"' + '."b.c"' * 1500 + " = 1",
        "x = {a" + ".'b'" * 1500 + " = 1}", 'x = """a"""\ny' + "\t.\ty" * 1500 + " = 1",
        "x = 'it''s'\ny" + ".y" * 1500 + " = 1",
    ],
)  # fmt: skip
def test_a_key_of_more_than_a_thousand_names_is_refused(text: str):
    """However the names are spelled, and whatever is quoted before them."""
    with pytest.raises(ValueError, match="more than 1000 names"):
        parse_toml(text)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=99999999999999999999999", "seed must be from 0 to 9223372036854775807"),
        ("seed=9223372036854775808", "got 9223372036854775808"),
        ("seed=-1", "seed must be from 0"),
        ("task.seed=-5", "task.seed must be from 0"),
        ("held_out.seed=18446744073709551616", "held_out.seed must be from 0"),
        ("steps=1000000000000000000000000000000", "steps = 1000000000000000000000000000000 is more than"),
        ("rollouts_per_step=1000000000000", "rollouts_per_step = 1000000000000 is more than 1000000"),
        ("steps=-1", "steps must be at least 0, got -1"),
        ("steps=nan", "steps = nan"),
        ("sampling.temperature=nan", r"sampling.temperature must be 0 \(greedy\) or more, and finite, got nan"),
        ("sampling.temperature=inf", r"sampling.temperature must be 0 \(greedy\) or more, and finite, got inf"),
        ("algorithm.num_generations=-4", "num_generations"),
        ("learner.optimizer.learning_rate=-inf", "learning_rate"),
        ("grading.deadline_seconds=inf", "grading.deadline_seconds"),
        ("task.highest=" + "9" * 4000, r"999999999999... \(4000 digits\) is beyond 63 bits"),
        ("max_staleness=99999999999999999999", "max_staleness = 99999999999999999999 is beyond 63 bits"),
        ("sampling.stop_ids=[99999999999999999999]", "beyond 63 bits"),
        ("evaluation.samples=0x" + "f" * 5000, "no sound TOML"),
    ],
)
def test_every_number_of_an_experiment_has_a_bound(override: str, said: str):
    """A number that nothing can be done with is refused with its key, its value and what it may be."""
    with pytest.raises(ConfigError, match=said) as caught:
        load("tiny", [override])

    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("seed", [2**32, 2**33 + 1, 2**53 + 1, 2**63 - 1])
def test_seeds_of_up_to_63_bits_train(tmp_path: Path, seed: int):
    """A step is trained with any seed, of the run, the task and what is held out."""
    seeds = [f"seed={seed}", f"task.seed={seed}", f"held_out.seed={seed - 1}"]
    small = ["steps=1", "rollouts_per_step=16", "held_out.size=3", "sampling.max_completion_length=4"]

    assert main(["train", "tiny", *small, *seeds, "--run-dir", str(tmp_path / "run")]) == 0
