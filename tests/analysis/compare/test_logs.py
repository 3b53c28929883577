"""Runs of any library are compared by what they have logged."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tests import foreign

from gnomon.analysis.compare.logs import arms_of, compare_logs, text
from gnomon.analysis.compare.statistics import contrast, unpaired
from gnomon.cli.main import main
from gnomon.core.errors import DatasetError, RunDirectoryError

ORACLES = json.loads((Path(__file__).parents[2] / "core/statistics/oracles.json").read_text())


def asked(seed: int, rate: float, prompts: int = 12, named: str = "") -> foreign.Answers:
    """Return four 0-or-1 rewards of each prompt."""
    drawn = np.random.default_rng(seed).random((prompts, 4)) < rate
    return {f"{named}{n}+1?": [float(each) for each in row] for n, row in enumerate(drawn)}


def verl_runs(root: Path, name: str, rate: float, named: str = "") -> list[tuple[str, Path]]:
    """Write three runs of verl with validation answers."""
    return [
        (name, foreign.verl(root / f"{name}-{seed}", [0.1] * 10, asked(seed + int(100 * rate), rate, named=named)))
        for seed in range(3)
    ]


def test_arms_are_paired_by_prompts_that_agree(tmp_path: Path):
    """The contrast is that of gnomon's own runs: over seeds and prompts, with the same interval."""
    found = compare_logs([*verl_runs(tmp_path, "a", 0.2), *verl_runs(tmp_path, "b", 0.9)])
    tables = [
        np.array([[np.mean(asked(seed + offset, rate)[f"{n}+1?"]) for n in range(12)] for seed in range(3)])
        for offset, rate in ((20, 0.2), (90, 0.9))
    ]
    expected = contrast(*tables)
    (pair,) = found.pairs

    assert (found.kind, pair.prompts, pair.verdict) == ("held-out", 12, "b is better")
    assert pair.contrast is not None
    assert (pair.contrast.mean, pair.contrast.p_value) == pytest.approx((expected.mean, expected.p_value))
    assert str(pair.contrast.interval) == str(expected.interval)
    assert "12 prompts" in text(found)


def test_other_prompts_are_not_paired(tmp_path: Path):
    """Where fewer than six prompts agree, runs and prompts of either side vary for themselves."""
    found = compare_logs([*verl_runs(tmp_path, "a", 0.2), *verl_runs(tmp_path, "b", 0.9, named="what is ")])
    (pair,) = found.pairs

    assert (pair.prompts, pair.verdict) == (0, "b is better")
    assert "nothing" in text(found)
    assert "the runs held out different questions (12, 0 in common)" in text(found)


@pytest.mark.parametrize(
    ("prompts", "said"), [((12, 12), None), ((12, 9), "(9 and 12, 9 in common)"), ((2, 8), "(2 and")]
)
def test_other_questions_are_said(prompts: tuple[int, int], said: str | None, tmp_path: Path):
    """Scores of two sets of questions differ by the questions too, whether they can be paired or not."""
    arms = [
        (name, foreign.verl(tmp_path / name, [0.1], asked(1, 0.5, count)))
        for name, count in zip("ab", prompts, strict=True)
    ]
    shown = text(compare_logs(arms))

    assert ("held out different questions" in shown) == (said is not None)
    assert said is None or said in shown


def test_runs_without_answers_have_welchs_test(tmp_path: Path):
    """Numbers of runs alone: Welch's test, as scipy has it; of one run each nothing is said."""
    for first, second, p, low, high in ORACLES["welch"]:
        found = unpaired(*(np.array(values)[:, None] for values in (first, second)))
        assert found is not None
        assert (found.p_value, found.interval.low, found.interval.high) == pytest.approx((p, low, high), rel=1e-9)

    one = compare_logs([(name, foreign.trl(tmp_path / name, [level] * 5)) for name, level in (("a", 0.1), ("b", 0.4))])
    assert one.pairs[0].contrast is None
    assert one.pairs[0].verdict == "no interval: one run, no answers"


def test_training_rewards_are_those_of_the_last_tenth(tmp_path: Path):
    """Where a run has no held-out score, all are compared in training; asked for by name too."""
    trl = foreign.trl(tmp_path / "trl", [0.1] * 9 + [0.7], {20: asked(0, 0.7), 4: asked(1, 0.0)})
    prime = foreign.prime_rl(tmp_path / "prime", [0.2] * 20, {19: asked(2, 0.2), 2: asked(1, 1.0)})
    found = compare_logs([("a", trl), ("b", prime)])
    (pair,) = found.pairs

    assert (found.kind, pair.prompts) == ("training", 12)
    assert found.arms[0].score == pytest.approx(np.mean(list(asked(0, 0.7).values())))
    assert pair.verdict == "a is better (as a model)"
    with pytest.raises(DatasetError, match="only training scores"):
        compare_logs([("a", trl), ("b", prime)], "held-out")


def test_a_page_shows_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Curves of all runs, both tables, names escaped; a folder in the page's place is refused."""
    runs = [f"<b>{name}={path}" for name, path in (*verl_runs(tmp_path, "a", 0.2), *verl_runs(tmp_path, "b", 0.9))]
    page = tmp_path / "logs.html"
    for score in ("held-out", "training"):
        assert main(["compare", "--json", "--score", score, "--out", str(page), "--logs", *runs]) == 0
        assert json.loads(capsys.readouterr().out)["page"] == str(page)
        content = page.read_text()
        assert content.count('class="chart"') == 2
        assert "&lt;b&gt;a" in content
        assert "<b>a" not in content
        assert content.count("<tbody>") == 2
        assert len(set(re.findall(r'data-name="([^"]*)"', content))) in (0, 2)
    assert "is better" in content or "told apart" in content
    assert main(["compare", "--out", str(tmp_path), "--logs", *runs]) == 2
    assert "is a folder, and a page is a file" in capsys.readouterr().err


def test_identical_runs_cannot_be_told_apart():
    """Without any variance the interval is all that is possible, and the p-value 1."""
    found = unpaired(np.ones((3, 1)), np.zeros((3, 1)))

    assert found is not None
    assert (found.p_value, found.interval.low, found.interval.high) == (1.0, -1.0, 1.0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Text and JSON; a folder is its own name; what trains nothing takes no setting of a run."""
    runs = [f"{name}={path}" for name, path in (*verl_runs(tmp_path, "a", 0.2), *verl_runs(tmp_path, "b", 0.9))]
    assert main(["compare", "--logs", *runs]) == 0
    assert "b is better" in capsys.readouterr().out
    assert main(["compare", "--json", "--logs", *runs]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"][0]["verdict"] == "b is better"

    alike = [f"{name}={foreign.trl(tmp_path / f'{name}{n}', [-2.0] * 5)}" for name in ("c", "d") for n in (1, 2)]
    assert main(["compare", "--json", "--score", "training", "--logs", *alike]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"][0]["contrast"]["interval"] == {"low": None, "high": None}

    monkeypatch.chdir(tmp_path)
    assert [name for name, _ in arms_of(["a-0", "b=b-0"])] == ["a-0", "b"]
    with pytest.raises(RunDirectoryError, match="nothing"):
        arms_of(["a=nothing"])
    (tmp_path / "empty").mkdir()
    for arguments in (["--logs", "a-0"], ["--logs", "a-0", "empty"], ["tiny", "--logs", "a-0"], ["tiny"]):
        with pytest.raises(SystemExit) as ended:
            raise SystemExit(main(["compare", *arguments]))
        assert ended.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) <= 12
