"""Which answers of a step are shown, and what reading them costs."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.insight.made_runs import rollout, write_rollouts

from gnomon.insight.watch import watcher
from gnomon.insight.watch.watcher import read_samples


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty run with a place for rollouts."""
    (tmp_path / "rollouts").mkdir()
    return tmp_path


def read(folder: Path, *rows: dict[str, Any]) -> watcher.Samples:
    """Return what is shown of step 3 with these rollouts."""
    write_rollouts(folder, 3, rows)
    return read_samples(folder / "rollouts" / "step-000003.jsonl", 3)


def test_the_best_and_the_worst_are_of_different_prompts(folder: Path):
    """Five groups of two: the best of the four best groups, the worst of the four worst ones, each group once."""
    found = read(folder, *(rollout(3, n // 2, f"answer {n}", n / 10) for n in range(10)))

    assert [sample.response for sample in found.best] == ["answer 9", "answer 7", "answer 5", "answer 3"]
    assert [sample.response for sample in found.worst] == ["answer 0", "answer 2", "answer 4", "answer 6"]
    assert (found.count, found.is_part, found.failed) == (10, False, ())


def test_an_answer_without_a_reward_is_no_worst_one(folder: Path):
    """It could not be judged, and is shown as that."""
    found = read(folder, rollout(3, 0, "good", 1.0), rollout(3, 1, "bad", -1.0), rollout(3, 2, "x", None, "timed out"))

    assert [sample.response for sample in found.worst] == ["bad"]
    assert [(sample.response, sample.error) for sample in found.failed] == [("x", "timed out")]


def test_where_all_rewards_are_equal_no_answer_is_shown_twice(folder: Path):
    """Of four equal ones of one prompt: the first are the best, and none of these is the worst."""
    found = read(folder, *(rollout(3, 0, f"answer {n}", 0.0) for n in range(8)))
    best, worst = ([sample.response for sample in samples] for samples in (found.best, found.worst))

    assert len(best) == 4
    assert len(worst) == 4
    assert not set(best) & set(worst)


def test_damaged_lines_are_passed_over(folder: Path):
    """Torn, of another kind, with a reward that is no number: what is sound is shown."""
    path = folder / "rollouts" / "step-000003.jsonl"
    sound = json.dumps(rollout(3, 0, "sound", 1.0))
    odd = [rollout(3, 0, "x", 1.0) | {name: {}} for name in ("text", "reward", "question", "error", "step", "task_id")]
    path.write_text("\n".join(["{", "[]", '"x"', *map(json.dumps, odd), '{"reward": 1e999}', sound, sound[:40]]) + "\n")

    assert [sample.response for sample in read_samples(path, 3).best] == ["sound"]
    assert read_samples(folder / "absent", 3).count == 0


def test_text_that_looks_like_the_end_of_the_wanted_part_is_text(folder: Path):
    """The bytes before the tokens are escaped inside of an answer, so it is not cut there."""
    said = 'see , "prompt": [ and \\", "prompt": [1]'

    assert read(folder, rollout(3, 0, said, 1.0)).best[0].response == said


def test_token_ids_and_logprobs_are_not_parsed(folder: Path):
    """16 answers of 8,000 tokens, 2 MB: what is shown is read although no number of theirs could be."""
    rows = [rollout(3, n, "answer", n / 16) | {"response": [31_000] * 8000, "logprobs": [-0.123456789] * 8000}
            for n in range(16)]  # fmt: skip
    write_rollouts(folder, 3, rows)
    path = folder / "rollouts" / "step-000003.jsonl"
    # No parser takes these numbers, so whoever reads the answers has not looked at them.
    path.write_bytes(path.read_bytes().replace(b"31000", b"31x00").replace(b"-0.123456789", b"-0.1234x789"))
    with pytest.raises(json.JSONDecodeError):
        json.loads(path.read_bytes().splitlines()[0])

    assert read_samples(path, 3).count == 16


def test_of_a_huge_file_the_beginning_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Past the limit of bytes reading ends, and what is shown says that it is a part."""
    monkeypatch.setattr(watcher, "_MOST_BYTES", 1000)
    found = read(folder, *(rollout(3, n, f"answer {n}", 0.5) for n in range(50)))

    assert 1 <= found.count < 10
    assert found.is_part
