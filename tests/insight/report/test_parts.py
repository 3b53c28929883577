"""The numbers on the page: trust, shares, differences, choices."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from gnomon.algorithms import resolve
from gnomon.core.types import Grade, Group, Rollout, Task
from gnomon.insight.report.compare import distinct
from gnomon.insight.report.facts import card_rows, default_differences, preset_differences, time_shares, waste_shares
from gnomon.insight.report.rollouts import (
    Scan,
    ScannedRollout,
    ShownTurn,
    Visit,
    algorithm_of,
    chosen,
    prompts_of,
    reward_intervals,
    scan,
    trust_letters,
    turns_of,
)
from gnomon.models.tiny import tiny_tokenizer
from gnomon.models.token_strings import Vocabulary
from gnomon.records.reading import RunRecord
from gnomon.records.rollouts import RecordedRollout, RolloutLog, TokenRecord


def recorded(ratios: list[float], advantages: list[float], mask: list[bool] | None = None) -> RecordedRollout:
    """Return a rollout of which proximal over behavior are these ratios."""
    count = len(ratios)
    behavior = (-1.0,) * count
    chosen_by = tuple(mask or [True] * count)
    rollout = Rollout("t", (1,), (5,) * count, chosen_by, behavior, behavior, "", Grade(1.0), 0, 0, "stop")
    return RecordedRollout(
        1, 0, True, "q", rollout, TokenRecord(tuple(advantages), tuple(-1.0 + math.log(r) for r in ratios))
    )


def test_the_card_says_on_which_cluster_a_run_was():
    """Beside the machine's own rows, of the newest session; a run without one has no such row."""
    said = "Ray 2.60.0, joined at auto: 2 nodes, token authentication on"

    assert ("Cluster", said) in card_rows({"device": "cpu", "cluster": "", "resumed": [{"cluster": said}]})
    assert "Cluster" not in dict(card_rows({"device": "cpu", "cluster": ""}))


def test_a_clip_stops_what_moved_far_enough_the_right_way():
    """Clip 0.2: at ratio 1.5 a token of advantage 1 is stopped, of -1 it is not; at 0.5 the other way; 1.1 is free."""
    step = [recorded([1.5, 0.5, 1.1], [1.0, 1.0, 1.0]), recorded([1.5, 0.5, 1.1], [-1.0, -1.0, 0.0])]

    assert trust_letters(resolve("ppo"), step) == {0: "x..", 1: ".x0"}


def test_a_cap_holds_back():
    """CISPO's cap of 5 holds back a ratio of 9; what a tool wrote is not trained."""
    assert trust_letters(resolve("cispo"), [recorded([9.0, 2.0, 1.0], [1.0] * 3, [True, True, False])]) == {0: "-. "}


def test_the_effective_size_is_that_of_the_whole_step():
    """P3O caps at (sum r)^2 / (n sum r^2): ratios 4, 1, 1, 1 in two rollouts give 49 / 76 = 0.64, below every ratio."""
    step = [recorded([4.0, 1.0], [1.0, 1.0]), recorded([1.0, 1.0], [1.0, 1.0])]

    assert trust_letters(resolve("p3o"), step) == {0: "--", 1: "--"}
    assert trust_letters(resolve("p3o"), [recorded([1.0, 1.0], [1.0, 1.0])]) == {0: ".."}


@pytest.mark.parametrize("name", ["grpo", "gspo", "gmpo", "sapo", "rloo", "dapo", "spo", "reinforce", "decoupled-ppo"])
def test_equal_policies_are_pushed_as_their_ratios_say(name: str):
    """Where the learner and the sampler agree, no bound of any algorithm is in the way."""
    assert trust_letters(resolve(name), [recorded([1.0, 1.0], [0.5, 0.5])]) == {0: ".."}


def test_what_was_not_scored_has_no_trust():
    """Without proximal log-probabilities, and without advantages, nothing is claimed."""
    one = recorded([1.0], [1.0])
    bare = RecordedRollout(1, 0, True, "q", one.rollout, TokenRecord(advantages=(1.0,)))

    assert trust_letters(resolve("grpo"), [bare]) == {}
    assert list(trust_letters(resolve("grpo"), [bare, one])) == [1]


@pytest.mark.parametrize("name", ["sdft", "sdpo"])
def test_a_loss_over_distributions_has_no_trust(name: str):
    """They are not recorded, and the page is drawn all the same."""
    assert trust_letters(resolve(name), [recorded([1.0], [1.0])]) == {}


def test_trust_survives_numbers_that_are_not_finite():
    """A refused step has them; the page is drawn all the same."""
    assert len(trust_letters(resolve("ppo"), [recorded([1.0, 2.0], [math.nan, 1.0])])[0]) == 2


def test_time_and_waste_are_whole():
    """Shares add up to 1, with what no stage and no cause names beside them; without rows there are none."""
    rows = [{"step": 1, "seconds": 4.0, "time/step_seconds": 3.0, "time/generate_seconds": 1.0, "tokens/generated": 10,
             "tokens/idle": 4, "tokens/failed": 1}]  # fmt: skip

    assert {s.name: s.fraction for s in time_shares(rows) if s.fraction} == {
        "generate": 0.25, "other": 0.5, "between steps": 0.25,
    }  # fmt: skip
    assert {s.name: s.fraction for s in waste_shares(rows)} == {"trained": 0.5, "idle": 0.4, "failed": 0.1}
    assert time_shares([]) == waste_shares([]) == []


def test_the_former_name_of_off_policy_tokens_is_read():
    """A run that an earlier version began has one cause, whichever of the two names a step recorded."""
    former, today = "waste/stale_fraction", "waste/off_policy_fraction"
    rows = [{"step": n, "tokens/generated": 10, name: 0.5} for n, name in enumerate([former, today], start=1)]

    assert {s.name: s.fraction for s in waste_shares(rows)} == {"trained": 0.5, "off policy": 0.5}


def test_what_differs_is_named_by_its_path():
    """One changed value of the preset and one of the defaults; whatever is required is not called different."""
    table = {
        "model": "tiny", "task": {"kind": "arithmetic"}, "steps": 7,
        "algorithm": {
            "name": "grpo",
            "surrogate": {"piece": "ClippedSurrogate", "trust": {"piece": "Clip", "high": 0.3}},
        },
    }  # fmt: skip
    name, changed = preset_differences(table)

    assert name == "grpo"
    assert ("surrogate.trust.high", "0.3", "0.2") in [(d.key, d.here, d.there) for d in changed]
    assert ("steps", "7", "100") in [(d.key, d.here, d.there) for d in default_differences(table)]
    assert preset_differences({"algorithm": {"name": "mine"}}) == (None, [])


def test_lists_hold_what_they_say():
    """The latest of the highest and the lowest rewards come first, and another prompt before a second answer."""
    seen = [ScannedRollout(1, 0, "a", 1.0, 0.5), ScannedRollout(2, 0, "a", 1.0, 0.1),
            ScannedRollout(2, 1, "a", 0.0, 0.9), ScannedRollout(2, 2, "b", 1.0, 0.1),
            ScannedRollout(3, 0, "c", None, is_error=True)]  # fmt: skip
    lists = chosen(Scan(seen))

    assert [(s.step, s.task_id) for s in lists["best"]] == [(2, "a"), (2, "b"), (1, "a"), (2, "a")]
    assert lists["worst"][0] == seen[2]
    assert lists["surprising"][0] == seen[2]
    assert lists["errors"] == [seen[4]]
    assert [s.step for s in lists["course"]] == [1, 2]


def test_of_equal_answers_those_are_shown_that_were_looked_at():
    """An older one with entropies comes before a newer one without, but never before a better one."""
    seen = [
        ScannedRollout(1, 0, "a", 1.0, 0.5, True),
        ScannedRollout(2, 0, "b", 1.0, 0.5),
        ScannedRollout(3, 0, "c", 0.5, 0.7, True),
    ]
    lists = chosen(Scan(seen))

    assert [s.task_id for s in lists["best"]] == ["a", "b", "c"]
    assert [s.task_id for s in lists["surprising"]] == ["c", "a", "b"]
    assert [s.task_id for s in lists["course"]] == ["a", "b", "c"]


def test_prompts_are_told_apart():
    """One that went from 0 to 1 was learned, one from 1 to 0 forgotten, one that stayed at 0 never solved."""
    rewards = {"up": [0.0, 0.5, 1.0], "down": [1.0, 1.0, 0.0], "none": [0.0, 0.0]}
    visits = {name: [Visit(step, reward) for step, reward in enumerate(listed)] for name, listed in rewards.items()}
    found = prompts_of(Scan(visits=visits))
    titles = {kind.title: [p.task_id for p in kind.prompts] for kind in found.lists}

    assert (found.asked, found.again, found.is_tracked) == (3, 3, False)
    assert titles["Learned"] == ["up"]
    assert titles["Forgotten"] == ["down"]
    assert titles["Never solved"] == ["none"]


def test_long_runs_are_read_at_even_steps(tmp_path: Path):
    """With room for a third of the bytes about a third of the steps are read, the last one and those of errors too."""
    rollout = recorded([1.0], [1.0]).rollout
    for step in range(1, 31):
        RolloutLog(tmp_path / "rollouts").write(step, [Group(Task("t", (1,), "q"), (rollout,))])
    size = (tmp_path / "rollouts" / "step-000001.jsonl").stat().st_size
    rows = [{"step": 2, "rollout/error_fraction": 0.5}]
    found = scan(RunRecord(tmp_path), rows, budget=10 * size)
    steps = [seen.step for seen in found.seen]

    assert found.of_steps == 30
    assert {2, 30} <= set(steps)
    assert 10 <= found.steps == len(steps) <= 14


def test_the_interval_of_a_step_is_over_its_groups():
    """Group means 0.25 and 0.75: 0.5 ± 1.96 * 0.25 / sqrt(1) = 0.01 to 0.99; of 0 and 1 the ends stay at 0 and 1.

    Where steps were left out there is none.
    """
    seen = [ScannedRollout(1, 0, "a", 0.0), ScannedRollout(1, 1, "b", 1.0)]
    found = reward_intervals(Scan(seen, {1: [0.25, 0.75], 2: [0.0, 1.0], 3: [0.5]}, steps=3, of_steps=3))

    assert found[1] == pytest.approx((0.01001, 0.98999), abs=1e-4)
    assert found[2] == (0.0, 1.0)
    assert 3 not in found
    assert reward_intervals(Scan(seen, {1: [0.25, 0.75]}, steps=1, of_steps=2)) == {}


def test_damaged_lines_are_counted(tmp_path: Path):
    """Whatever is no rollout is counted, and huge numbers are no rewards."""
    rollout = recorded([1.0], [1.0]).rollout
    RolloutLog(tmp_path / "rollouts").write(1, [Group(Task("t", (1,), "q"), (rollout,))])
    path = tmp_path / "rollouts" / "step-000001.jsonl"
    row = json.loads(path.read_text())
    odd = [json.dumps(row | {"reward": value}) for value in (10**400, True, "1", [1])] + ["", "null", "[" * 9000]
    path.write_text("\n".join([json.dumps(row), *odd]) + "\n")

    assert (len(scan(RunRecord(tmp_path), []).seen), scan(RunRecord(tmp_path), []).damaged) == (1, len(odd))


def test_code_is_not_resolved(tmp_path: Path):
    """An algorithm that names a file as one of its pieces is not built."""
    (tmp_path / "experiment.toml").write_text('[algorithm]\npreset = "grpo"\nratio = {piece = "nothing.py:Here"}\n')

    assert algorithm_of(RunRecord(tmp_path)) is None


def test_runs_of_one_name_are_told_apart_by_their_folders():
    """As many of the last parts of the paths as are needed; the same folder twice gets a number."""
    assert distinct([Path("a/x/run"), Path("b/x/run")]) == ["a/x/run", "b/x/run"]
    assert distinct([Path("run"), Path("run")]) == ["run (1)", "run (2)"]


def test_a_conversation_is_shown_turn_by_turn():
    """Each answer of each segment has its tokens, its calls, the reply behind it, what it earned, and its seconds."""
    tokenizer = tiny_tokenizer()
    call = tuple(tokenizer.encode('<tool_call>{"name": "add", "arguments": {}}</tool_call>'))
    zeros, mask = (-1.0,) * (len(call) + 5), (*[True] * len(call), False, False, False, True, True)
    row = Rollout("t", (1,), (*call, 65, 65, 65, 66, 67), mask, zeros, zeros, "", Grade(1.0), 0, 0, "stop")
    row = replace(row, turn_ends=(len(call), len(mask)), turn_rewards=(0.25, 0.5), turn_seconds=(2.0, 1.5))
    other = replace(row, response=(65, 66), mask=(True, True), turn_ends=(2,), turn_rewards=(0.25,), turn_seconds=())

    assert turns_of(replace(row, segments=(other,)), Vocabulary(tokenizer.backend.backend_tokenizer)) == [
        ShownTurn(len(call), 3, 1, 0.25, 2.0),
        ShownTurn(2, 0, 0, 0.5, 1.5),
        ShownTurn(2, 0, 0, 0.25),
    ]
    assert [turn.calls for turn in turns_of(row, None)] == [None, None]
    assert turns_of(other, None) == []
