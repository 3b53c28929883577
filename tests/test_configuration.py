"""Tables to dataclasses: strict, complete, and every message with its path."""

from dataclasses import dataclass
from typing import Literal

import pytest

from gnomon.configuration import build, set_path, to_table
from gnomon.errors import ConfigError


@dataclass(frozen=True)
class Circle:
    radius: float
    kind: Literal["circle"] = "circle"

    def __post_init__(self) -> None:
        if self.radius <= 0:
            raise ConfigError(f"radius must be > 0, got {self.radius}")


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
        ({"shapes": [{"kind": "square", "side": "2"}]}, r"shapes\[0\].side = '2': should be a valid integer"),
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


def test_a_path_is_set_in_tables_that_do_not_exist_yet():
    """`a.b=1` makes the table a."""
    table: dict[str, object] = {"name": "x"}

    set_path(table, "frame.side", 4)

    assert table == {"name": "x", "frame": {"side": 4}}


def test_a_text_on_the_way_becomes_the_table_that_it_stands_for():
    """The algorithm's is a preset, a piece's of it a piece, and anything else's a kind."""
    table: dict[str, object] = {"algorithm": "grpo", "task": "arithmetic"}

    set_path(table, "algorithm.correction", "Truncated")
    set_path(table, "algorithm.correction.level", "sequence")
    set_path(table, "task.size", 4)

    correction = {"piece": "Truncated", "level": "sequence"}
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
