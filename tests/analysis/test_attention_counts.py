"""The counted benchmark of attention over packed rows: its bound, its page, and its counts by hand."""

from pathlib import Path

from benchmarks.attention import EVEN, MOST, SHORT, PackedShape, counted, lines

PAGE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "attention-2026-11-26.md"


def test_eight_shapes_compute_at_most_a_tenth_more_than_needed():
    """By FlexAttention's block masks, partial blocks counted whole; two short shapes are shown to cost more."""
    assert len(EVEN) == 8
    assert all(counted(shape).blocks <= MOST * counted(shape).needed for shape in EVEN)
    assert all(MOST < counted(shape).blocks / counted(shape).needed < 1.25 for shape in SHORT)


def test_the_page_is_what_is_counted():
    """The committed table is the program's; write it again by `python -m benchmarks.attention`."""
    assert PAGE.read_text(encoding="utf-8") == "\n".join(lines()) + "\n"


def test_counts_by_hand():
    """A prompt of 128 and two answers of 128: blocks on the diagonal are partial, two whole ones see the prompt.

    Needed: 3 x 128 x 129 / 2 + 2 x 128 x 128 = 57,536. Dense: 384 x 384. Blocks: 5. Joined: 3 triangles' blocks, and 2.
    Padded: 128 x 128, and twice 128 x 256.
    """
    found = counted(PackedShape(1, 128, (128, 128)))

    assert found.needed == 57_536
    assert (found.dense, found.blocks, found.joined) == (384**2, 5 * 128**2, 5 * 128**2)
    assert found.padded == 128**2 + 2 * 128 * 256
