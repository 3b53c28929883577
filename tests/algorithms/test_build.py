"""Names and tables to algorithms, and back."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from gnomon.algorithms import (
    DAPO,
    GRPO,
    NAMED,
    SPO,
    Algorithm,
    Clip,
    ClippedSurrogate,
    ConstantLength,
    Entropy,
    Kl,
    MaskedIS,
    Resolution,
    SequenceMean,
    TokenMean,
    TruncatedIS,
    Updates,
    override,
    resolve,
    resolve_with_notes,
    to_table,
)
from gnomon.algorithms.aliases import canonical, piece_of
from gnomon.algorithms.pieces import slots
from gnomon.core.errors import ConfigError

OWN = """
from dataclasses import dataclass, replace
from gnomon.algorithms import GRPO, LossInputs

@dataclass(frozen=True)
class Halved:
    by: float = 2.0

    def __call__(self, view):
        raise NotImplementedError

MINE = replace(GRPO, name="mine", num_generations=3)
WITH_OWN = replace(GRPO, name="with-own", surrogate=Halved(4.0))
NUMBER = 5
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    """Return the path of a user's file."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


@pytest.mark.parametrize("preset", NAMED.values(), ids=lambda a: a.name)
def test_tables_are_exact(preset: Algorithm):
    """Every preset survives its table, through JSON and TOML as well."""
    table = to_table(preset)

    assert resolve(table) == preset
    assert resolve(json.loads(json.dumps(table))) == preset
    assert resolve(tomllib.loads(tomli_w.dumps(table))) == preset
    assert resolve(preset.name) == preset == resolve({"preset": preset.name})


def test_changed_algorithms_survive_their_table_too():
    """Optional parts that are set, absent or infinite come back as they were."""
    changed = replace(
        DAPO,
        keep=None,
        correction=TruncatedIS(cap=float("inf")),
        surrogate=ClippedSurrogate(Clip(0.1, 0.3), dual=4.0),
        regularizers=(Kl("reference", 0.1), Entropy(0.01)),
    )

    assert resolve(to_table(changed)) == changed


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"surrogate": {"trust": {"high": 0.28}}}, replace(GRPO, surrogate=ClippedSurrogate(Clip(0.2, 0.28)))),
        ({"surrogate.trust.high": 0.28}, replace(GRPO, surrogate=ClippedSurrogate(Clip(0.2, 0.28)))),
        ({"surrogate.trust": {"high": 1}}, replace(GRPO, surrogate=ClippedSurrogate(Clip(0.2, 1.0)))),
        ({"num_generations": 4}, replace(GRPO, num_generations=4)),
        ({"aggregate": "TokenMean"}, replace(GRPO, aggregate=TokenMean())),
        ({"aggregate": {"piece": "TokenMean", "scope": "group"}}, replace(GRPO, aggregate=TokenMean("group"))),
        ({"aggregate.piece": "ConstantLength", "aggregate.length": 64}, replace(GRPO, aggregate=ConstantLength(64))),
        ({"updates": {"minibatches": 4}}, replace(GRPO, updates=Updates(minibatches=4))),
        ({"correction": {"piece": "MaskedIS", "high": 2.0}}, replace(GRPO, correction=MaskedIS(0.5, 2.0))),
        ({"regularizers": [{"piece": "Entropy", "coefficient": 0.1}]}, replace(GRPO, regularizers=(Entropy(0.1),))),
        (
            {"sampler": "Prioritized", "tracker": {"drift": "constant"}},
            replace(GRPO, sampler=SPO.sampler, tracker=replace(SPO.tracker, drift="constant")),
        ),
    ],
    ids=lambda x: json.dumps(x) if isinstance(x, dict) else "",
)
def test_overrides(changes: dict[str, Any], expected: Algorithm):
    """Nested or dotted, a value, a piece by name, or a piece with fields."""
    assert resolve({"preset": "grpo", **changes}) == expected


def test_a_part_is_removed_by_none():
    """The word "none", or Python's None, removes an optional part."""
    assert resolve({"preset": "dapo", "keep": "none"}).keep is None
    assert resolve({"preset": "dapo", "overlong": None}).overlong is None


def test_single_overrides():
    """A path of any depth, also into a list."""
    penalized = override(GRPO, "regularizers", [{"piece": "Kl", "coefficient": 0.1}])

    assert override(GRPO, "surrogate.dual", 3).surrogate == ClippedSurrogate(Clip(), dual=3.0)
    assert override(penalized, "regularizers.0.coefficient", 0.2).regularizers == (Kl(coefficient=0.2),)
    with pytest.raises(ConfigError, match=r"regularizers\.1: there are 1, counted from 0"):
        override(penalized, "regularizers.1.coefficient", 0.2)


WRONG: list[tuple[Any, str]] = [
    ("grop", "unknown algorithm 'grop'; did you mean 'grpo'"),
    ({"preset": "grop"}, "did you mean 'grpo'"),
    ({"preset": "grpo", "regularizers": {"²": {}}}, "'²' is no place in a list"),
    ("math:pi.real", "math: unknown name 'real'"),
    ({"preset": 3}, "algorithm.preset = 3"),
    ({"preset": "grpo", "surogate": {}}, "algorithm: unknown key 'surogate'; did you mean 'surrogate'"),
    ({"preset": "grpo", "surrogate.trust.hihg": 1.0}, r"algorithm\.surrogate\.trust: .*did you mean 'high'"),
    ({"preset": "grpo", "aggregate.scope": "step"}, "algorithm.aggregate has no key 'scope'"),
    ({"preset": "grpo", "surrogate.trust.high": "0.3"}, r"surrogate\.trust\.high = '0.3': should be a number"),
    ({"preset": "grpo", "surrogate.trust.high": float("nan")}, "high = nan: should be a number"),
    ({"preset": "grpo", "surrogate.trust.high": -1.0}, r"surrogate\.trust: Clip.high must be > 0, got -1.0"),
    ({"preset": "grpo", "num_generations": 2.0}, "num_generations = 2.0: should be a whole number; write 2"),
    ({"preset": "grpo", "num_generations": True}, "num_generations = True: should be a whole number"),
    ({"preset": "grpo", "mask_truncated": 1}, "mask_truncated = 1: should be true or false"),
    ({"preset": "grpo", "advantage.scale": "gruop"}, "unknown choice 'gruop'; did you mean 'group'"),
    ({"preset": "grpo", "advantage.ddof": 2}, "ddof = 2: should be 0 or 1"),
    ({"preset": "grpo", "aggregate": "TokenMeen"}, "unknown piece 'TokenMeen'; did you mean 'TokenMean'"),
    ({"preset": "grpo", "aggregate": 3}, "aggregate = 3: should be a table or the name of one of ConstantLength"),
    ({"preset": "grpo", "aggregate": {"piece": 3}}, "aggregate.piece = 3"),
    ({"preset": "grpo", "surrogate": {"piece": "PolicyGradient"}}, "algorithm.surrogate: missing trust"),
    ({"preset": "grpo", "correction": {"cap": 2.0}}, "algorithm.correction: say which piece"),
    ({"preset": "grpo", "regularizers": 1}, "regularizers = 1: should be a list"),
    ({"preset": "grpo", "num_generations": 1}, "algorithm: algorithm 'grpo': .*group size 1"),
    ({"preset": "grpo", "surrogate.dual": 3, "surrogate": {"dual": 4}}, "given twice"),
    ({"preset": "grpo", "surrogate": "SigmoidGate", "surrogate.positive": 4}, "goes below 'surrogate'"),
    ({"name": "x"}, "missing paper, .*start from a preset"),
    ("nowhere.py:X", "there is no file nowhere.py"),
    ("no_such_module_at_all:X", "could not be imported: ModuleNotFoundError"),
    (":X", "should be 'path.py:NAME'"),
]


@pytest.mark.parametrize(("spec", "message"), WRONG, ids=[str(w[0]) for w in WRONG])
def test_wrong_tables_say_where_and_what(spec: Any, message: str):
    """Path, value, expectation and the nearest name."""
    with pytest.raises(ConfigError, match=message):
        resolve(spec)


def test_algorithms_of_a_user(own: str):
    """An Algorithm in a user's file is found, can be overridden, and its own pieces survive a table."""
    assert resolve(f"{own}:MINE").num_generations == 3
    assert resolve({"preset": f"{own}:MINE", "aggregate": "TokenMean"}).aggregate == TokenMean()
    with_own = resolve(f"{own}:WITH_OWN")
    assert resolve(to_table(with_own)) == with_own
    assert resolve({"preset": "grpo", "surrogate": {"piece": f"{own}:Halved", "by": 4}}).surrogate == with_own.surrogate
    assert resolve("gnomon.algorithms.presets:SPO") == SPO


def test_wrong_files_of_a_user(own: str, tmp_path: Path):
    """A name that is not there, one of another type, and a file that raises, are the user's mistakes."""
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")

    with pytest.raises(ConfigError, match="unknown name 'MIN'; did you mean 'MINE'"):
        resolve(f"{own}:MIN")
    with pytest.raises(ConfigError, match="should be a gnomon Algorithm or a function, got int"):
        resolve(f"{own}:NUMBER")
    with pytest.raises(ConfigError, match="could not be imported: ZeroDivisionError"):
        resolve(f"{broken}:X")
    with pytest.raises(ConfigError, match="should be a dataclass or a function, got 5"):
        resolve({"preset": "grpo", "surrogate": {"piece": f"{own}:NUMBER"}})


ALIASED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"preset": "grpo", "group_size": 4}, {"preset": "grpo", "num_generations": 4}),
    ({"preset": "grpo", "n": 4}, {"preset": "grpo", "num_generations": 4}),
    ({"preset": "grpo", "num_iterations": 2}, {"preset": "grpo", "updates.epochs": 2}),
    (
        {"preset": "grpo", "epsilon": 0.1},
        {"preset": "grpo", "surrogate.trust.low": 0.1, "surrogate.trust.high": 0.1},
    ),
    (
        {"preset": "grpo", "epsilon": 0.1, "epsilon_high": 0.3},
        {"preset": "grpo", "surrogate.trust.low": 0.1, "surrogate.trust.high": 0.3},
    ),
    ({"preset": "dapo", "clip_ratio_low": 0.1}, {"preset": "dapo", "surrogate.trust.low": 0.1}),
    ({"preset": "grpo", "delta": 4.0}, {"preset": "grpo", "surrogate.dual": 4.0}),
    ({"preset": "grpo", "scale_rewards": False}, {"preset": "grpo", "advantage.scale": "none"}),
    ({"preset": "grpo", "scale_rewards": "batch"}, {"preset": "grpo", "advantage.scale": "batch"}),
    ({"preset": "grpo", "norm_adv_by_std_in_grpo": True}, {"preset": "grpo"}),
    ({"preset": "grpo", "loss_type": "dapo"}, {"preset": "grpo", "aggregate": "TokenMean"}),
    ({"preset": "grpo", "loss_agg_mode": "seq-mean-token-sum"}, {"preset": "grpo", "aggregate": "SequenceSum"}),
    ({"preset": "dr-grpo", "loss_type": "dr_grpo"}, {"preset": "dr-grpo"}),
    ({"preset": "grpo", "importance_sampling_level": "sequence"}, {"preset": "grpo", "ratio.level": "sequence"}),
    ({"preset": "grpo", "mask_truncated_completions": True}, {"preset": "grpo", "mask_truncated": True}),
    ({"preset": "rloo", "beta": 0.1}, {"preset": "rloo", "advantage.kl": 0.1}),
    ({"preset": "reinforce-pp", "kl_coef": 0.1}, {"preset": "reinforce-pp", "advantage.of.kl": 0.1}),
    ({"preset": "grpo", "routing": "R2"}, {"preset": "grpo", "routing": "proximal"}),
    ({"preset": "grpo", "routing": "r3"}, {"preset": "grpo", "routing": "behavior"}),
    ({"preset": "grpo", "correction": "TIS"}, {"preset": "grpo", "correction": "TruncatedIS"}),
    (
        {"preset": "grpo", "correction": {"piece": "tis", "cap": 3.0}},
        {"preset": "grpo", "correction": {"piece": "TruncatedIS", "cap": 3.0}},
    ),
    (
        {"preset": "grpo", "correction": "IcePop"},
        {"preset": "grpo", "correction": {"piece": "MaskedIS", "low": 0.5, "high": 5.0}},
    ),
    (
        {"preset": "grpo", "correction": "MIS"},
        {"preset": "grpo", "correction": {"piece": "MaskedIS", "low": 0.0, "high": 3.0, "level": "sequence"}},
    ),
    (
        {"preset": "grpo", "correction": {"piece": "MIS", "high": 2.0}},
        {"preset": "grpo", "correction": {"piece": "MaskedIS", "low": 0.0, "high": 2.0, "level": "sequence"}},
    ),
]


@pytest.mark.parametrize(("theirs", "ours"), ALIASED, ids=[str(a[0]) for a in ALIASED])
def test_names_of_other_libraries(theirs: dict[str, Any], ours: dict[str, Any]):
    """TRL's and verl's names give what ours give, and each is said back."""
    resolution = resolve_with_notes(theirs)

    assert resolution.algorithm == resolve(ours)
    assert all(any(note.startswith(key) for note in resolution.notes) for key in theirs if key != "preset")


def test_terms_of_other_libraries():
    """A KL coefficient, its estimator and an entropy bonus become regularizers; 0 removes the term."""
    kl = resolve({"preset": "grpo", "beta": 0.04, "kl_loss_type": "low_var_kl", "entropy_coeff": 0.01})
    off = resolve({"preset": "reinforce-pp-baseline", "beta": 0})

    assert kl.regularizers == (Kl("reference", 0.04, "k3"), Entropy(0.01))
    assert resolve({"preset": "grpo", "beta": 0.1}).regularizers == (Kl("reference", 0.1, "k2_grad_k3"),)
    assert off.regularizers == ()
    assert resolve({"preset": "reinforce-pp-baseline", "beta": 0.5}).regularizers == (Kl("reference", 0.5, "k2"),)


def test_the_sentence_says_what_a_name_became():
    """The note can be printed as it is."""
    notes = resolve_with_notes({"preset": "grpo", "loss_type": "dapo", "delta": 4.0}).notes

    assert resolve_with_notes({"preset": "grpo", "routing": "R3", "correction": "MIS"}).notes == (
        "routing = 'R3' is routing = 'behavior'",
        "correction = 'MIS' is correction = {piece = 'MaskedIS', low = 0.0, high = 3.0, level = 'sequence'}",
    )
    assert notes == ("loss_type = 'dapo' is aggregate = TokenMean", "delta = 4.0 is surrogate.dual = 4.0")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"preset": "cispo", "epsilon_high": 5.0}, r"surrogate\.trust\.cap, which is absolute"),
        ({"preset": "cispo", "delta": 5.0}, "'cispo' has no clip: remove it"),
        ({"preset": "grpo", "loss_type": "cispo"}, "another preset"),
        ({"preset": "grpo", "loss_type": "dr_grpo"}, "length = <completion budget in tokens>"),
        ({"preset": "spo", "scale_rewards": True}, "'spo' uses Tracked"),
        ({"preset": "grpo", "scale_rewards": "yes"}, "scale_rewards = 'yes': should be true"),
        ({"preset": "grpo", "group_size": 4, "num_generations": 8}, "given twice: 8 and 4"),
        ({"preset": "grpo", "n": 4, "group_size": 8}, "given twice"),
        ({"preset": "grpo", "beta": "0.1"}, "beta = '0.1': should be a number"),
        ({"preset": "grpo", "kl_estimator": "k3"}, "set beta as well"),
        ({"preset": "grpo", "beta": 0.1, "kl_estimator": "k9"}, "kl_estimator = 'k9': should be one of k1"),
        ({"preset": "grpo", "beta": 0.1, "regularizers": []}, "use one"),
    ],
    ids=str,
)
def test_names_that_say_nothing_here_are_refused(spec: dict[str, Any], message: str):
    """What the composition has no place for, or what is said twice, is an error that names our path."""
    with pytest.raises(ConfigError, match=message):
        resolve(spec)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("GRPO", "grpo"),
        ("reinforce++", "reinforce-pp"),
        ("REINFORCE++-baseline", "reinforce-pp-baseline"),
        ("a*-po", "a-star-po"),
        ("A*PO", "a-star-po"),
        ("dr_grpo", "dr-grpo"),
        ("Dr. GRPO", "dr-grpo"),
    ],
)
def test_presets_are_found_however_they_are_written(written: str, name: str):
    """Case, "++", "*" and what stands between the words do not matter; the name is said back."""
    note = f"algorithm = '{written}' is algorithm = '{name}'"

    assert resolve_with_notes(written) == resolve_with_notes({"preset": written})
    assert resolve_with_notes(written) == Resolution(NAMED[name], (note,))
    assert resolve_with_notes(name).notes == ()


def test_no_two_names_are_told_apart_by_spelling_alone():
    """Presets and pieces stay different when case and punctuation are gone; no piece is another library's name."""
    pieces = {piece for pieces in slots().values() for piece in pieces}
    names = [*NAMED, *pieces]

    assert len({canonical(name) for name in names}) == len(names)
    assert [name for name in pieces if piece_of(name)] == []


def test_sequence_mean_is_what_grpo_prints():
    """The preset is the paper's, whatever libraries call GRPO."""
    assert GRPO.aggregate == SequenceMean()
