"""docs/algorithms.md and its picture are what `python -m website.algorithms` writes."""

import re

from website.algorithms import PAGE, PICTURE, claims, costs, difference, family, page, picture
from website.pages import ROOT

from gnomon.algorithms import NAMED, PRESETS
from gnomon.algorithms.describe import USES


def test_the_page_and_the_picture_are_those_of_the_presets():
    """A change of a preset, a note or a verdict is written there again."""
    again = "write it again: python -m website.algorithms"
    assert PAGE.read_text(encoding="utf-8") == page(), again
    assert PICTURE.read_text(encoding="utf-8") == picture(), again


def test_every_preset_has_its_place():
    """A sentence when to take it, a measured cost, and one parent with which it is not equal; one has no parent."""
    parent = family()

    assert USES.keys() == parent.keys() == costs().keys() == NAMED.keys()
    assert [name for name, above in parent.items() if above is None] == ["grpo"]
    assert [name for name, above in parent.items() if above and not difference(NAMED[name], NAMED[above])] == []


def test_pages_count_the_presets():
    """The README and the changelog count all, the page of laws those that laws hold for."""
    said = {"README.md": NAMED, "CHANGELOG.md": NAMED, "docs/laws.md": PRESETS}

    for name, presets in said.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert re.search(rf"{len(presets)} (presets|of `gnomon.PRESETS`)", text), name


def test_claims_are_of_the_presets_that_their_arms_train():
    """GSPO's, not all of GRPO's; what has no claim says so."""
    found = claims()

    assert {link.partition("](")[2].split("/")[2] for link in found["gspo"]} >= {"gspo_clipping", "gspo_engine"}
    assert any("vapo_ablation" in link for link in found["vapo"])
    assert found["rae"] == []
