"""`gnomon dissect`: the contract's JSON, the text, and what a user gets wrong."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gnomon.cli.main import main

Capture = pytest.CaptureFixture[str]

OWN = Path(__file__).resolve().parents[2] / "examples" / "own_algorithm.py"

# p0: one right, one wrong answer; p1: a group of one. The third position of the first is a tool's word.
SEQUENCES: list[dict[str, Any]] = [
    {
        "prompt_id": "p0",
        "reward": 1.0,
        "mask": [1, 1, 0, 1],
        "current": [-0.1, -1.2, None, -0.4],
        "behavior": [-0.1, -1.3, None, -0.9],
    },
    {"prompt_id": "p0", "reward": 0.0, "mask": [1, 1], "current": [-0.5, -2.0], "behavior": [-0.6, -1.5]},
    {"prompt_id": "p1", "reward": 1.0, "mask": [1], "current": [-0.7], "behavior": [-0.7]},
]


def written(folder: Path, sequences: Any = SEQUENCES) -> str:
    """Return the path of a recorded batch."""
    path = folder / "batch.json"
    path.write_text(json.dumps({"format": "gnomon-batch/1", "sequences": sequences}))
    return str(path)


def refused(capsys: Capture, *arguments: str) -> str:
    """Return what is said on standard error by a command that exits with 2, and nothing on standard output."""
    try:
        code = main(["dissect", *arguments])
    except SystemExit as exit_:  # argparse
        code = exit_.code  # type: ignore[assignment]
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert "Traceback" not in said.err
    return said.err


def test_json_is_the_contract_s(tmp_path: Path, capsys: Capture):
    """One object; rows as long as their sequences; 0 where masked and for a group of one; the numbers add up."""
    assert main(["dissect", written(tmp_path), "--algorithms", "grpo,p3o", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)

    assert set(row) == {"algorithms", "cosine"}
    assert list(row["algorithms"]) == ["grpo", "p3o"]
    for found in row["algorithms"].values():
        assert {"loss", "policy_loss", "value_loss", "advantages", "gradient", "statistics"} <= set(found)
        assert [len(r) for r in found["advantages"]] == [len(r) for r in found["gradient"]] == [4, 2, 1]
        assert found["gradient"][0][2] == found["advantages"][0][2] == found["advantages"][2][0] == 0
        norm = sum(x * x for r in found["gradient"] for x in r) ** 0.5
        assert found["statistics"]["gradient_norm"] == pytest.approx(norm)
        needed = {"clipped_fraction", "out_of_band_fraction", "ess_fraction", "zero_gradient_token_fraction"}
        assert needed <= set(found["statistics"])
    # Of six trained tokens: exp(0.5) = 1.65 with A > 0, and exp(-0.5) = 0.61 with A < 0, and the group of one.
    grpo = row["algorithms"]["grpo"]
    assert grpo["statistics"]["clipped_fraction"] == pytest.approx(2 / 6)
    assert grpo["statistics"]["zero_gradient_token_fraction"] == pytest.approx(3 / 6)
    assert grpo["trust"] == [".. x", ".x", "0"]
    assert grpo["loss"] == grpo["policy_loss"]
    assert row["cosine"]["grpo"]["p3o"] == row["cosine"]["p3o"]["grpo"]


def test_overrides_are_for_every_algorithm(tmp_path: Path, capsys: Capture):
    """Wider clips let both tokens through; other libraries' names are translated, and said."""
    wide = ("surrogate.trust.high=0.7", "algorithm.surrogate.trust.low=0.5")
    assert main(["dissect", written(tmp_path), *wide, "--algorithms", "grpo,dapo", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert [a["statistics"]["clipped_fraction"] for a in row["algorithms"].values()] == [0.0, 0.0]

    assert main(["dissect", written(tmp_path), "--algorithms", "grpo", "clip_ratio_high=0.7"]) == 0
    assert "note: clip_ratio_high = 0.7 is surrogate.trust.high = 0.7" in capsys.readouterr().out


def test_the_text_shows_everything_side_by_side(tmp_path: Path, capsys: Capture):
    """Tables of numbers, advantages, trust, gradients and cosines, at most 100 columns wide."""
    names = f"grpo,dr-grpo,dapo,gspo,cispo,p3o,{OWN}:CAUTIOUS"
    assert main(["dissect", written(tmp_path), "--algorithms", names]) == 0
    said = capsys.readouterr().out

    assert "3 sequences of 2 prompts, 6 trained tokens of 7" in said
    assert re.search(r"^ clipped, bound wins +0\.3333 +0\.3333 ", said, re.M)
    assert re.search(r"^ 0 +grpo +\.\._x", said, re.M)
    assert re.search(r"^ 0:3 +-0\.4 +1\.649 +0 x", said, re.M)
    assert all(part in said for part in ("advantages", "trust", "gradient", "cosine between gradients", "CAUTIOUS"))
    assert max(len(line) for line in said.splitlines()) <= 100


def test_long_batches_are_cut_and_say_so(tmp_path: Path, capsys: Capture):
    """--rows bounds sequences and tokens, and the rest is counted."""
    many = [s | {"prompt_id": f"\x1b[31m{n}"} for n, s in enumerate(SEQUENCES * 4)]
    assert main(["dissect", written(tmp_path, many), "--algorithms", "reinforce", "--rows", "3"]) == 0
    said = capsys.readouterr().out

    assert "... and 9 more sequences" in said
    assert "?[31m0" in said
    assert "... and 21 more tokens" in said
    assert "\x1b" not in said


def test_a_long_response_is_cut(tmp_path: Path, capsys: Capture):
    """Sixty letters of its trust, and how many more there are."""
    long = [s | {n: s[n][:1] * 90 for n in ("mask", "current", "behavior")} for s in SEQUENCES[:2]]
    long[0]["behavior"] = [-2.0] * 90
    assert main(["dissect", written(tmp_path, long), "--algorithms", "grpo"]) == 0

    assert f" 0    grpo       {'x' * 60} and 30 more" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--algorithms", "grop"), "unknown algorithm 'grop'; did you mean 'grpo'?"),
        (("--algorithms", "grpo", "surrogate.trust.hihg=1"), "grpo: algorithm.surrogate.trust: unknown key 'hihg'"),
        (("--algorithms", "cispo", "surrogate.trust.high=1"), "cispo: algorithm.surrogate.trust: unknown key 'high'"),
        (
            ("--algorithms", "spo"),
            "algorithm 'spo' reads what the batch does not hold. Give each sequence \"baseline\"",
        ),
        (("--algorithms", "ppo"), '"values", the critic\'s value before each token'),
        (("--algorithms", ","), "--algorithms names none"),
        (("--algorithms", "no.py:X"), "no.py"),
        (("--algorithms", "grpo", "--rows", "0"), "--rows should be at least 1"),
        ((), "give a recorded batch and --algorithms"),
        (("--verify",), "--verify draws its own batches"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_what_is_asked_wrongly_is_said(tmp_path: Path, capsys: Capture, arguments: tuple[str, ...], said: str):
    """One message on standard error, exit code 2."""
    assert said in refused(capsys, written(tmp_path), *arguments)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"current": [-0.5]}, 'sequence 1: "current" has 1 positions, and "mask" has 2'),
        ({"behavior": [-0.5, float("nan")]}, 'sequence 1: "behavior" at position 1 should be a finite number, got NaN'),
        ({"mask": [1, 2]}, 'sequence 1: "mask" at position 1 should be 0 or 1, got 2'),
        ({"reward": "1"}, 'sequence 1: "reward" should be a finite number, got "1"'),
        ({"bootstrap": 1.0}, 'sequence 0: "bootstrap" is missing, and other sequences have it'),
        ({"bootstrap": []}, 'sequence 1: "bootstrap" should be a finite number, got []'),
    ],
    ids=["ragged", "nan", "mask", "text", "some", "list"],
)
def test_a_malformed_batch_names_sequence_field_and_position(
    tmp_path: Path, capsys: Capture, change: dict[str, Any], said: str
):
    """One message, exit code 2."""
    wrong = [SEQUENCES[0], SEQUENCES[1] | change, SEQUENCES[2]]

    assert said in refused(capsys, written(tmp_path, wrong), "--algorithms", "grpo")


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path, capsys: Capture):
    """No such file, and a folder."""
    assert "none.json does not exist" in refused(capsys, str(tmp_path / "none.json"), "--algorithms", "grpo")
    assert "cannot be read: it is a folder" in refused(capsys, str(tmp_path), "--algorithms", "grpo")
