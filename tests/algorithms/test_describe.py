"""Algorithms and pieces in words, and values as they are typed."""

import re
from dataclasses import dataclass, replace

import pytest

from gnomon.algorithms import (
    NAMED,
    AdvantageSum,
    Algorithm,
    Clip,
    ClippedSurrogate,
    InRole,
    Kl,
    LeaveOneOut,
    MarginalBest,
    MaskedIS,
    Normalized,
    PerReward,
    Requires,
    Returns,
    RewardAtLeast,
    Scaled,
    Where,
    describe,
    resolve,
)
from gnomon.algorithms.describe import as_row, find_piece, notes_on, piece_text, pieces_summary
from gnomon.algorithms.formulas import formula, latex, plain
from gnomon.algorithms.pieces import slots
from gnomon.algorithms.user_pieces import spelled
from gnomon.cli.main import main
from gnomon.config.experiment import load
from gnomon.config.reading import parse_override
from gnomon.core.errors import ConfigError


@dataclass(frozen=True)
class Threshold:
    """A piece of one's own."""

    at: float


PIECES = {name: cls for pieces in slots().values() for name, cls in pieces.items()}


@pytest.mark.parametrize("name", PIECES)
def test_every_piece_can_be_described(name: str):
    """By its name: its docstring, the place where it fits, and each field with what it may be."""
    cls = find_piece(name)
    assert cls is PIECES[name]
    said = piece_text(cls)

    assert said.text
    assert all(name in slots()[place] for place in said.places)
    assert all(field.type and field_name in str(said) for field_name, field in said.fields.items())
    assert name in pieces_summary()


def test_a_piece_says_what_its_fields_may_be():
    """Choices, numbers, pieces, and what holds when nothing is said."""
    masked, gae, score = (piece_text(PIECES[name]) for name in ("MaskedIS", "Gae", "PolicyGradient"))

    assert masked.places == ("correction",)
    assert masked.fields["low"].default == "0.5"
    assert masked.fields["level"].type == '"token" | "sequence" | "geometric"'
    assert gae.fields["policy_lambda"].type == "Fixed | LengthAdaptive | LengthSigmoid"
    assert (score.fields["trust"].type, score.fields["trust"].default) == (
        "Clip | Cap | EssCap | GammaKernel | Unbounded",
        None,
    )


def test_names_that_mean_no_piece():
    """Other libraries' names mean ours; algorithms are none; what is neither is refused with the nearest name."""
    assert find_piece("MIS") is find_piece("masked") is MaskedIS
    assert find_piece("GRPO") is None
    assert find_piece("mine.py:ALGORITHM") is None
    with pytest.raises(ConfigError, match="unknown algorithm or piece 'Truncatd'; did you mean 'TruncatedIS'"):
        find_piece("Truncatd")


@pytest.mark.parametrize("preset", NAMED.values(), ids=lambda a: a.name)
def test_every_preset_has_its_formula(preset: Algorithm):
    """In LaTeX with all braces closed, and in plain text without a command or a brace of LaTeX left over."""
    for name, text in formula(preset).items():
        assert text.count("{") == text.count("}"), name
        assert "<" not in re.sub(r"<\W", "", text), name
        assert not re.search(r"[\\{}]", plain(text)), name
        assert plain(text) in " ".join(describe(preset).split()), name


def test_the_formula_of_a_composition_is_made_of_its_parts():
    """A choice of a normal form of each reward or of a sum; and a piece of one's own by its name and settings."""
    chosen = Where(RewardAtLeast(1.0, "is_right"), Normalized(PerReward(), "length"), Scaled(LeaveOneOut(), 0.5))
    found = formula(replace(NAMED["grpo"], advantage=AdvantageSum((Returns(), chosen)), correction=MaskedIS()))

    assert plain(found["advantage"]) == (
        "A_t = sum_(s >= t) 1^(s - t) x_s + { 1 / |o| [ sum_c omega_c [ (R - mean R_G) / (s_G + 10^-6) ]_(R = r_c) ] "
        "if R_(is_right) >= 1; 0.5 [ R - 1 / (G - 1) sum_(j != i) R_j ] otherwise }"
    )
    assert (plain(found["loss"]), plain(found["correction"])) == (
        "L = sum_(i, t) w_t c_t l_t",
        "c_t = m_t [0.5 <= m_t <= 5]",
    )
    required = PerReward(Returns(), (Requires("length", "right"), Requires("length", "form", 0.5)))
    summed = AdvantageSum((Normalized(MarginalBest()), required))
    assert plain(latex(summed)) == (
        "[ (u - mean u_B) / (s_B + 10^-6), u = mean_S max(0, R - max_(j in S) R_j), S all sets of k - 1 others, "
        "k = all ] + [ sum_c omega_c [ sum_(s >= t) 1^(s - t) x_s ]_(R = r_c), r_(length) != 0 only where "
        "r_(right) >= 1, r_(length) != 0 only where r_(form) >= 0.5 ]"
    )
    assert latex(InRole("50%_$")) == r"\mathrm{role} = \mathrm{50\%\_\$}"
    assert plain(latex(InRole("50%_$"))) == "role = 50%_$"
    assert latex(Threshold(2e-3)) == r"\mathrm{Threshold}(at = 0.002)"


def test_the_command_prints_one_equation(capsys: pytest.CaptureFixture[str]):
    """Aligned at each first equals sign; not of a piece, nor of everything."""
    assert main(["algorithms", "grpo", "--latex"]) == 0
    lines = capsys.readouterr().out.splitlines()

    assert (lines[0], lines[-1]) == (r"\begin{aligned}", r"\end{aligned}")
    assert lines[1] == r"L &= \sum_{i, t} w_t \ell_t \\"
    with pytest.raises(SystemExit):
        main(["algorithms", "--latex"])


@pytest.mark.parametrize("preset", NAMED.values(), ids=lambda a: a.name)
def test_the_row_of_an_algorithm_is_its_table_and_notes(preset: Algorithm):
    """Without the notes it resolves to the algorithm again."""
    row = as_row(preset)

    assert row.pop("notes") == list(notes_on(preset))
    assert resolve(row) == preset


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("correction", None),
        ("correction", MaskedIS(0.0, 3.0, "sequence")),
        ("surrogate", ClippedSurrogate(Clip(0.1, 0.3), dual=4.0)),
        ("regularizers", (Kl("reference", 0.04, "k3"),)),
        ("num_generations", 4),
        ("mask_truncated", True),
        ("ratio.clamp", float("inf")),
    ],
)
def test_what_is_spelled_can_be_typed(path: str, value: object):
    """As an override on the command line, and back."""
    key, _ = parse_override(f"algorithm.{path} = {spelled(value)}")
    built = load("tiny", [f"{key} = {spelled(value)}"]).experiment.algorithm
    for part in path.split("."):
        built = getattr(built, part)

    assert built == value
