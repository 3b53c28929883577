"""Curves hold what they are given, whatever it is, and a file of them is a picture by itself."""

import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.svg import Mark, Series, chart, write_svg

SVG = "{http://www.w3.org/2000/svg}"
ANY = st.floats(allow_nan=True, allow_infinity=True)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def drawn(text: str) -> ElementTree.Element:
    """Return the picture, parsed; fails where it is no XML."""
    return ElementTree.fromstring(text)


def curves(text: str) -> list[list[tuple[float, float]]]:
    """Return the places of the points of each curve."""
    paths = [p.attrib["d"] for p in drawn(text).iter(f"{SVG}path") if p.attrib.get("class") == "curve"]
    pairs = [[pair.split(" ") for pair in re.split("[ML]", path) if pair] for path in paths]
    return [[(float(x), float(y)) for x, y in points] for points in pairs]


def test_a_curve_lies_where_its_numbers_are():
    """In a picture of 640 by 260 the frame is from 48 to 628 and from 12 to 226: the ends of a range lie on its ends.

    x from 0 to 10 fills the width: 48 + 580 * 5 / 10 = 338 in the middle. y from 0 to 1 has 5% of air above and begins
    at 0: 0 lies at 226, 1 at 226 - 214 / 1.05 = 22.2.
    """
    found = curves(chart([Series("a", [0, 5, 10], [0.0, 1.0, 0.0])], "title", "x", "y"))

    assert found == [[(48.0, 226.0), (338.0, 22.2), (628.0, 226.0)]]


def test_what_is_not_finite_is_a_gap():
    """Two stretches on both sides of what is not a number; a point alone between gaps is a dot."""
    text = chart([Series("a", range(6), [1.0, 2.0, math.nan, 3.0, math.inf, 4.0])], "title", "x", "y")
    path = next(p.attrib["d"] for p in drawn(text).iter(f"{SVG}path") if p.attrib.get("class") == "curve")

    assert path.count("M") == 3
    assert len(list(drawn(text).iter(f"{SVG}circle"))) == 2


@given(st.lists(st.tuples(ANY, ANY, ANY, ANY), max_size=30), st.sampled_from(["line", "points"]))
def test_any_numbers_are_a_picture(points: list[tuple[float, float, float, float]], style: str):
    """Infinite, tiny, huge, equal, without order: the picture is XML, and nothing in it lies outside of its frame."""
    xs, ys, lows, highs = ([p[place] for p in points] for place in range(4))
    one = Series("a", xs, ys, lows, highs, "points" if style == "points" else "line")
    text = chart([one, Series("b", xs, ys)], "title", "x", "y", [Mark(x, "m") for x in xs[:2]])

    assert "nan" not in text.replace('role="img"', "")
    assert "inf" not in text
    for curve in curves(text):
        assert all(47.9 <= x <= 628.1 and 11.9 <= y <= 226.1 for x, y in curve)


@given(st.text(), st.text(), st.text(), st.text())
def test_any_text_is_only_text(title: str, name: str, label: str, mark: str):
    """Names, titles, labels and marks add no element, however they are spelled."""
    texts = ("a", "a", "a", "a"), (title, name, label, mark)
    shapes = []
    for one in texts:
        text = chart([Series(one[1], [0, 1], [0, 1])], one[0], one[2], one[2], [Mark(0.5, one[3])])
        shapes.append({element.tag for element in drawn(text).iter()})

    assert shapes[1] <= shapes[0] | {f"{SVG}text", f"{SVG}title"}


def test_peaks_of_long_curves_stay():
    """Of 100,000 points at most 640 are drawn, and one that is ten times as high as all others is among them."""
    ys = [0.0] * 100_000
    ys[77_777] = 10.0
    (curve,) = curves(chart([Series("a", range(100_000), ys)], "title", "x", "y"))

    assert len(curve) <= 640
    assert min(y for _, y in curve) == curves(chart([Series("a", [0, 1], [0.0, 10.0])], "t", "x", "y"))[0][1][1]


def test_integers_beyond_every_float_are_drawn_or_left_out():
    """A stranger's file may hold 10 ** 400: as a place, a value, an end of an interval and a mark."""
    large = 10**400
    for xs, ys in (([1, large], [1, 2]), ([1, 2], [large, -large]), ([large], [1])):
        ElementTree.fromstring(chart([Series("a", xs, ys, ys, ys)], "t", "x", "y", [Mark(large, "m")]))


def test_no_curve_hides_another():
    """Curves that lie on each other are one with both names; one that differs, or has another interval, stays."""
    xs, same, other = [1, 2, 3], [0.0, 5.0, 2.0], [0.0, 5.0, 3.0]
    text = chart(
        [Series("total", xs, same), Series("engine", xs, list(same)), Series("rounding", xs, other)], "t", "", ""
    )
    banded = chart([Series("a", xs, same, same, same), Series("b", xs, same)], "t", "", "")

    assert re.findall(r"<title>([^<]+)</title></path>", text) == ["total = engine", "rounding"]
    assert re.findall(r"<title>([^<]+)</title></path>", banded) == ["a", "b"]
    # A curve keeps its color whoever is drawn with it.
    assert "--series-3" in text
    assert "--series-2" not in text


def test_what_was_measured_now_and_then_is_a_point_in_the_legend_too():
    """A dot in the legend, no more than a hint of a line between points, and no bar on the picture's frame."""
    reward = Series("reward", [1, 2], [0.0, 1.0], color=-1)
    two = Series("held out", [0, 4], [0.0, 1.0], [0.0, 0.5], [0.5, 1.0], "points")
    three = Series("held out", [0, 2, 4], [0.0, 0.5, 1.0], [0.0, 0.5, 0.5], [0.5, 0.5, 1.0], "points")
    text = chart([reward, two], "t", "", "")
    edges = [float(edge) for edge in re.findall(r'data-frame="([^"]+)"', text)[0].split()]
    bars = [
        float(x)
        for x in re.findall(r"M(\d+\.?\d*) \d+\.?\d*V", text.partition('stroke-width="1.5"')[0].rpartition("<path")[2])
    ]

    assert text.count("<circle") == 3
    assert 'stroke-opacity=".4"' not in text
    assert 'stroke-opacity=".4"' in chart([reward, three], "t", "", "")
    assert 'stroke="#1b1e23"' in text
    assert len(bars) == 2
    assert all(48 < x < 640 - 12 for x in (*bars, edges[0], edges[2]))


def test_intervals_are_a_band_or_bars():
    """A band where there are curves, a bar for each point of what was measured now and then."""
    xs, ys, lows, highs = [0, 1, 2], [1.0, 2.0, 3.0], [0.5, 1.5, 2.5], [1.5, 2.5, 3.5]
    band = drawn(chart([Series("a", xs, ys, lows, highs)], "title", "x", "y"))
    bars = drawn(chart([Series("a", xs, ys, lows, highs, "points")], "title", "x", "y"))

    assert len(list(band.iter(f"{SVG}polygon"))) == 1
    assert len(list(bars.iter(f"{SVG}polygon"))) == 0
    assert any(p.attrib["d"].count("V") == 3 for p in bars.iter(f"{SVG}path"))


def test_nothing_is_said_to_be_nothing():
    """A chart without a point says so, and has a title for those who do not see it."""
    text = chart([], "Reward <b>", "x", "y")

    assert "nothing was measured" in text
    assert 'aria-label="Reward &lt;b&gt;"' in text


def test_labels_of_marks_do_not_overlap():
    """Of fifty marks beside each other all have a line and some a text; of two far apart both have one."""
    many = chart([Series("a", range(100), range(100))], "t", "x", "y", [Mark(n, "evaluation") for n in range(50)])
    few = chart([Series("a", range(100), range(100))], "t", "x", "y", [Mark(20, "one"), Mark(80, "two")])
    texts = [element.text for element in drawn(many).iter(f"{SVG}text")]

    assert many.count("stroke-dasharray") == 50
    assert 1 <= texts.count("evaluation") <= 8
    assert {"one", "two"} <= {element.text for element in drawn(few).iter(f"{SVG}text")}


def test_a_file_is_a_picture_by_itself(tmp_path: Path):
    """It has its own colors, also for dark mode, and is XML that names no other file."""
    path = tmp_path / "curve.svg"
    write_svg(path, chart([Series("a", [0, 1], [0, 1])], "title", "x", "y"))
    text = path.read_text()

    assert drawn(text).tag == f"{SVG}svg"
    assert "prefers-color-scheme:dark" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
