"""Tables to dataclasses: strict, complete, and every message with its path."""

import re
from dataclasses import dataclass
from typing import Literal

import pytest
from experiments.group_free.waiting import QueueSetting

from gnomon.algorithms.critic import Pretraining
from gnomon.algorithms.sections import Greso, OverlongPenalty, SelfImitationBuffer, Updates
from gnomon.config.experiment import EvaluationConfig
from gnomon.core.errors import ConfigError, check_bounds
from gnomon.core.processes.client import Limits
from gnomon.core.sections import (
    BudgetConfig,
    CheckpointConfig,
    DoctorConfig,
    GradingConfig,
    RecordConfig,
    SamplingConfig,
)
from gnomon.core.tables import build, packaged_toml, parse_toml, set_path, to_table
from gnomon.learner.sections import OptimizerConfig
from gnomon.models.adapter_config import LoraConfig
from gnomon.rewards.sandbox.base import SandboxLimits
from gnomon.tasks.arithmetic import ArithmeticTask
from gnomon.tasks.build import MixtureTask
from gnomon.tasks.environment import EnvironmentConfig
from gnomon.tasks.split import HeldOut


@dataclass(frozen=True)
class Circle:
    radius: float
    kind: Literal["circle"] = "circle"

    def __post_init__(self) -> None:
        if self.radius <= 0:
            raise ConfigError(f"radius must be > 0, got {self.radius}")


@dataclass(frozen=True)
class Frame:
    width: int = 1
    height: int = 1

    def __post_init__(self) -> None:
        check_bounds("frame", self, width=(self.width > 0, "> 0"), height=(self.height > 0, "> 0"))


@dataclass(frozen=True)
class Square:
    side: int = 1
    kind: Literal["square"] = "square"


@dataclass(frozen=True)
class Drawing:
    shapes: tuple[Circle | Square, ...]
    name: str = "untitled"
    frame: Square | None = None


def test_tables_come_back_from_what_they_built():
    """`build` and `to_table` are each other's inverse."""
    table = {"shapes": [{"kind": "circle", "radius": 2}, {"kind": "square"}], "frame": {"side": 3}}

    drawing = build(Drawing, table)

    assert drawing.shapes == (Circle(2.0), Square(1))
    assert build(Drawing, to_table(drawing)) == drawing


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"shapes": [], "nmae": "x"}, "unknown key 'nmae'; did you mean 'name'"),
        ({"shapes": [{"kind": "circel", "radius": 1}]}, r"shapes\[0\]: unknown kind 'circel'; did you mean 'circle'"),
        ({"shapes": [{"kind": "circle", "radius": -1}]}, r"shapes\[0\]: radius must be > 0, got -1"),
        ({"shapes": [{"kind": "square", "side": "2"}]}, r"shapes\[0\].side = '2': should be a whole number; write 2"),
        ({"shapes": [{"kind": "square", "side": True}]}, r"shapes\[0\].side = True: should be"),
        ({"name": "x"}, "missing shapes"),
        ({"shapes": 3}, "shapes = 3"),
        ({"shapes": [{"radius": 1}]}, "needs a kind: circle, square"),
    ],
)
def test_what_is_wrong_is_named_with_its_path(table: dict[str, object], message: str):
    """A message says where, what, and the nearest thing that would have been right."""
    with pytest.raises(ConfigError, match=message):
        build(Drawing, table)


@pytest.mark.parametrize(
    ("cls", "key", "given", "expected"),
    [
        (RecordConfig, "sinks", "wandb", ("wandb",)),
        (SamplingConfig, "stop_ids", 5, (5,)),
        (GradingConfig, "environment", "HOME", ("HOME",)),
        (LoraConfig, "targets", "all-linear", "all-linear"),
        (LoraConfig, "targets", "q_proj", ("q_proj",)),
        (DoctorConfig, "stop_on", "severe", "severe"),
    ],
)
def test_one_value_is_a_list_of_one(cls: type, key: str, given: object, expected: object):
    """Where a list is asked for, and the value means nothing by itself."""
    assert getattr(build(cls, {key: given}), key) == expected


def test_a_mark_of_utf_8_at_the_beginning_is_no_part_of_the_text():
    """Editors write it, in a user's file and in a run's."""
    assert parse_toml("\ufeffsteps = 1") == {"steps": 1}


def test_a_path_is_set_in_tables_that_do_not_exist_yet():
    """`a.b=1` makes the table a."""
    table: dict[str, object] = {"name": "x"}

    set_path(table, "frame.side", 4)

    assert table == {"name": "x", "frame": {"side": 4}}


def test_a_text_on_the_way_becomes_the_table_that_it_stands_for():
    """The algorithm's is a preset, a piece's of it a piece, and anything else's a kind."""
    table: dict[str, object] = {"algorithm": "grpo", "task": "arithmetic"}

    set_path(table, "algorithm.correction", "TruncatedIS")
    set_path(table, "algorithm.correction.level", "sequence")
    set_path(table, "task.size", 4)

    correction = {"piece": "TruncatedIS", "level": "sequence"}
    assert table == {
        "algorithm": {"preset": "grpo", "correction": correction},
        "task": {"kind": "arithmetic", "size": 4},
    }


def test_a_number_on_the_way_counts_in_a_list():
    """The list's own entry is changed, and an entry that is not there is refused."""
    table: dict[str, object] = {"rewards": [{"weight": 1.0}, "numeric"]}

    set_path(table, "rewards.0.weight", 2.0)
    set_path(table, "rewards.1.weight", 3.0)

    assert table == {"rewards": [{"weight": 2.0}, {"kind": "numeric", "weight": 3.0}]}
    with pytest.raises(ConfigError, match=r"rewards\.2\.weight: '2' is no entry of a list of 2"):
        set_path(table, "rewards.2.weight", 1.0)
    set_path(made := {}, "rewards.0.kind", "numeric")
    assert made == {"rewards": [{"kind": "numeric"}]}, "where there is no list, it begins one"


@dataclass(frozen=True)
class Window:
    frame: Frame = Frame()


def test_a_field_out_of_bounds_is_named_once_with_its_value_alone():
    """A message that says the path already is not given it again, and the other fields are left out."""
    with pytest.raises(ConfigError, match=r"^frame\.height must be > 0, got -2$"):
        build(Window, {"frame": {"width": 3, "height": -2}})
    with pytest.raises(ConfigError, match=r"^frame\.width must be > 0, got 0; frame\.height must be > 0, got 0$"):
        Frame(0, 0)


REFUSED: list[tuple[type, dict[str, object], str]] = [
    (ArithmeticTask, {"lowest": 40}, "arithmetic.lowest must be from 0 to highest = 29, got 40"),
    (SandboxLimits, {"memory_mib": 8}, "sandbox.memory_mib must be at least 64, got 8"),
    (BudgetConfig, {"seconds": -1.0}, "budget.seconds must be 0 (no limit) or more, and finite, got -1.0"),
    (CheckpointConfig, {"keep_last": 0}, "checkpoints.keep_last must be at least 1, got 0"),
    (EnvironmentConfig, {"use": "a:b", "max_turns": 0}, "environment.max_turns must be at least 1, got 0"),
    (EvaluationConfig, {"samples": -1}, "evaluation.samples must be at least 0, got -1"),
    (GradingConfig, {"max_error_fraction": 1.0}, "grading.max_error_fraction must be in [0, 1), got 1.0"),
    (Greso, {"initial": 0.99}, "Greso.initial must be from lowest = 0.05 to highest = 0.95, got 0.99"),
    (HeldOut, {"fraction": 1.0}, "held_out.fraction must be above 0 and below 1, got 1.0"),
    (Limits, {"memory_gib": 0.0}, "grading.memory_gib must be above 0, or None for no limit, got 0.0"),
    (MixtureTask, {"parts": ()}, "mixture.parts must be at least one task, got ()"),
    (OptimizerConfig, {"epsilon": 0.0}, "learner.optimizer.epsilon must be > 0 and finite, got 0.0"),
    (OverlongPenalty, {"buffer": 1.5}, "OverlongPenalty.buffer must be in (0, 1], got 1.5"),
    (Pretraining, {"patience": 0}, "Pretraining.patience must be at least 1, got 0"),
    (SelfImitationBuffer, {"rows": 0}, "SelfImitationBuffer.rows must be at least 1, got 0"),
    (QueueSetting, {"batch": 3, "pool": 2}, "setting.pool must be from 1 to bound + 1 = 1, got 2"),
    (Updates, {"epochs": 0}, "updates.epochs must be at least 1, got 0"),
]


@pytest.mark.parametrize(("piece", "settings", "said"), REFUSED, ids=[piece.__name__ for piece, _, _ in REFUSED])
def test_pieces_name_the_setting_that_is_wrong_and_no_other(piece: type, settings: dict[str, object], said: str):
    """Of ten settings with one that is wrong, a message shows one."""
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        piece(**settings)


def test_a_packaged_table_is_each_callers_own():
    """What one caller writes into it, deep down too, no other caller reads."""
    first = packaged_toml("gnomon.cli", "arguments.toml")
    first["plan"]["arguments"]["overrides"]["default"].append("steps=1")
    first["none"] = {}
    again = packaged_toml("gnomon.cli", "arguments.toml")
    assert again["plan"]["arguments"]["overrides"]["default"] == []
    assert "none" not in again
