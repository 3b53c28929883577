"""`gnomon dissect --verify`: agreement is said with what was checked, and disagreement with where."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gnomon.algorithms import (
    CISPO,
    GRPO,
    GSPO,
    KTO,
    P3O,
    RAFT,
    Accepted,
    Algorithm,
    Cap,
    Clip,
    ClippedSurrogate,
    PolicyGradient,
    ProspectLoss,
    TokenMean,
)
from gnomon.analysis.dissect.verify import _NAMES, FORMULATED, KINDS, draw, share_of_tolerance, to_batch, verify
from gnomon.cli.main import main

Capture = pytest.CaptureFixture[str]


def test_every_preset_agrees(capsys: Capture):
    """The command exits with 0 and names each preset, the kinds of batches, the tolerance and the versions."""
    assert main(["dissect", "--verify"]) == 0
    said = capsys.readouterr().out

    assert f"all {len(FORMULATED)} presets agree; 13 of 13 reference cases are right" in said
    assert re.search(r"python 3\.\d+\.\d+, numpy \d.*, torch \d", said)
    assert "<= 1e-10 of the larger one + 1e-13" in said
    assert [
        name for name in FORMULATED if not re.search(rf"^{name} +{2 * len(KINDS)} +\d+ +\S+ +agrees$", said, re.M)
    ] == []


@pytest.mark.parametrize(
    ("algorithm", "quantity"),
    [
        (replace(GRPO, surrogate=ClippedSurrogate(Clip(0.2, 0.21))), "gradient|loss|clipped fraction"),
        (replace(GRPO, aggregate=TokenMean()), "loss"),
        (replace(GSPO, ratio=replace(GSPO.ratio, clamp=30.0)), "loss"),
        (replace(CISPO, surrogate=PolicyGradient(Cap(5.0000001))), "loss"),
        (replace(P3O, regularizers=()), "loss"),
        (replace(KTO, surrogate=ProspectLoss(undesired=1.0000001)), "loss"),
        (replace(RAFT, advantage=Accepted()), "advantages|loss"),
    ],
    ids=["clip", "mean", "clamp", "cap", "leash", "prospect", "best"],
)
def test_a_wrong_preset_is_caught(algorithm: Algorithm, quantity: str):
    """A clip of 0.21, a token mean, a clamp of 30, a cap 1e-7 too high and a forgotten KL are each found, and where."""
    report = verify({algorithm.name: algorithm})
    difference = report.presets[algorithm.name].difference

    assert not report.agrees
    assert difference is not None
    assert re.fullmatch(quantity, difference.quantity)
    assert difference.kind in {kind.name for kind in KINDS}
    assert f"seed {difference.seed}" in str(report)


WRONG = """
from dataclasses import replace
from gnomon.algorithms import GRPO

MINE = replace(GRPO, advantage=replace(GRPO.advantage, ddof=0))
OTHER = replace(GRPO, name="other")
"""


def test_disagreement_is_exit_code_1_and_one_json_object(tmp_path: Path, capsys: Capture):
    """A user's own grpo with the population's deviation differs; preset, batch, seed, sequence, position are named."""
    (tmp_path / "own.py").write_text(WRONG)
    name = f"{tmp_path / 'own.py'}:MINE"

    assert main(["dissect", "--verify", "--algorithms", f"grpo,{name}", "--json"]) == 1
    row = json.loads(capsys.readouterr().out)
    assert (row["agrees"], row["algorithms"]["grpo"]["agrees"]) == (False, True)
    expected = r".*own.py:MINE: batch 'lengths, real rewards', seed 0: advantages at sequence \d+, position \d+ is -?\d"
    assert re.match(expected, row["algorithms"][name]["difference"])


def test_a_name_without_formulas_is_refused(tmp_path: Path, capsys: Capture):
    """An algorithm of a user's own cannot be verified unless it bears a preset's name; nobody wrote it twice."""
    (tmp_path / "own.py").write_text(WRONG)

    assert main(["dissect", "--verify", "--algorithms", f"{tmp_path / 'own.py'}:OTHER"]) == 2
    assert "no formulas are written for other" in capsys.readouterr().err


def test_the_tolerance_is_for_each_number():
    """1e-10 of a large number and 1e-13 of a small one are within; nan against a number is not."""
    ours, theirs = [1e8, 1e-20, float("nan"), 1.0], [1e8 + 0.009, 1e-14, 0.0, 1.0 + 1e-9]

    assert (share_of_tolerance(ours, theirs) <= 1).tolist() == [True, True, False, False]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_drawn_step_is_the_same_again(kind: object):
    """One seed is one batch, also as tensors; what is masked holds no number, and nothing reads it."""
    step = draw(kind, 7)  # type: ignore[arg-type]
    batch, current = to_batch(draw(kind, 7))  # type: ignore[arg-type]
    again = {ours: getattr(batch, theirs) for ours, theirs in _NAMES.items()} | {"current": current}

    assert step.mask.any()
    assert not np.isfinite(step.behavior[~step.mask]).any()
    for name in ("rewards", "mask", "group", "graded", "current", "behavior", "proximal", "reference", "baseline"):
        np.testing.assert_array_equal(vars(step)[name], again[name].numpy())
