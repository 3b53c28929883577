"""The live view, driven through textual's own pilot."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.insight.made_runs import add_rows, finding, fingerprint, made_run, metrics
from textual.pilot import Pilot
from textual.widgets import Static

from gnomon.insight.watch.app import WatchApp
from gnomon.insight.watch.watcher import Watcher

Drive = Callable[[WatchApp, Pilot[None]], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A stopped run with a finding."""
    run = made_run(tmp_path / "run", done=12)
    add_rows(run / "findings.jsonl", [finding("entropy", "severe", 9)])
    return run


def driven(run: Path, drive: Drive, size: tuple[int, int] = (80, 24)) -> None:
    """Open the view on a run, and drive it."""

    async def all_of_it() -> None:
        app = WatchApp(Watcher(run), interval=0.05)
        async with app.run_test(size=size) as pilot:
            await seen(pilot, lambda: app.snapshot is not None)
            await drive(app, pilot)

    asyncio.run(all_of_it())


async def seen(pilot: Pilot[None], is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until, "it never was"
        await pilot.pause(0.02)


def text(app: WatchApp, name: str = "pane") -> str:
    """Return what a part of the screen says."""
    return str(app.query_one(f"#{name}", Static).content)


def test_keys_lead_to_every_pane_and_back(run: Path):
    """s, f, c, ? and o; tab and the right arrow go on, shift and tab and the left arrow go back, around the ends."""

    async def drive(app: WatchApp, pilot: Pilot[None]) -> None:
        places = []
        for key in ("s", "f", "c", "question_mark", "o", "tab", "right", "shift+tab", "left", "left"):
            await pilot.press(key)
            places.append(app.pane)
        assert places == [
            "samples", "findings", "curves", "help", "overview", "curves", "samples", "curves", "overview", "help"
        ]  # fmt: skip

    driven(run, drive)


def test_panes_show_what_they_are_called(run: Path):
    """The overview, then samples, findings with their number at the tab, curves, help, and the keys below."""

    async def drive(app: WatchApp, pilot: Pilot[None]) -> None:
        assert "tokens/s" in text(app)
        assert "findings 1" in text(app, "tabs")
        assert "stopped" in text(app, "head")
        for key, said in (("s", "answer 7"), ("f", "→ Try that."), ("c", "gradient"), ("question_mark", "next pane")):
            await pilot.press(key)
            assert said in text(app)
        assert all(word in text(app, "keys") for word in ("q quit", "tab", "s samples", "f findings", "? help"))

    driven(run, drive)


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
def test_it_quits(run: Path, key: str):
    """q, and what people press when they know no better; exit code 0."""

    async def drive(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press(key)
        await seen(pilot, lambda: not app.is_running)
        assert (app.return_code or 0) == 0

    driven(run, drive)


def test_it_goes_on_with_the_run(run: Path):
    """A step more is on the screen at the next look, and the files are what they were otherwise."""
    before = fingerprint(run)

    async def drive(app: WatchApp, pilot: Pilot[None]) -> None:
        add_rows(run / "metrics.jsonl", [metrics(13)])
        await seen(pilot, lambda: "step 13/20" in text(app, "head"))

    driven(run, drive)
    after = fingerprint(run)

    assert {name for name in before if before[name] != after[name]} == {"metrics.jsonl"}
    assert before.keys() == after.keys()


def test_a_run_that_comes_and_goes_is_survived(tmp_path: Path):
    """Not there yet, there, gone."""

    async def drive(app: WatchApp, pilot: Pilot[None]) -> None:
        assert "There is no run" in " ".join(text(app).split())
        made_run(tmp_path / "run", done=3)
        await seen(pilot, lambda: "step 3/20" in text(app, "head"))
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        await seen(pilot, lambda: "is gone" in " ".join(text(app).split()))  # wherever the line is broken

    driven(tmp_path / "run", drive)


@pytest.mark.parametrize("size", [(120, 40), (40, 12)])
def test_the_overview_fills_the_screen_and_no_more(run: Path, size: tuple[int, int]):
    """Laid out for the size; after a change of size laid out anew, without a bar to scroll."""

    async def drive(app: WatchApp, pilot: Pilot[None]) -> None:
        for columns, lines in (size, (80, 24), size):
            await pilot.resize_terminal(columns, lines)
            await pilot.pause(0.1)
            await seen(pilot, lambda: not app.query_one("#body").max_scroll_y)
            rows = text(app).split("\n")
            assert len(rows) <= lines - 4

    driven(run, drive, size)


def test_long_panes_scroll_by_keys(run: Path):
    """Curves are longer than 20 lines: down and page down move them, home goes back; another pane begins at its top."""

    async def drive(app: WatchApp, pilot: Pilot[None]) -> None:
        body = app.query_one("#body")
        await pilot.press("c")
        await pilot.pause(0.05)
        assert body.max_scroll_y > 0
        await pilot.press("pagedown", "down")
        await seen(pilot, lambda: body.scroll_target_y > 5)
        await pilot.press("s")
        await seen(pilot, lambda: body.scroll_target_y == 0)

    driven(run, drive)


def test_textual_is_imported_by_the_app_alone(run: Path):
    """The plain form, like the help, runs without it and without torch; without it the live view says what to type."""
    code = (
        "import sys; sys.modules['textual'] = None; from gnomon.cli.main import main; "
        f"assert main(['watch', {str(run)!r}, '--once']) == 0; assert 'torch' not in sys.modules; "
        f"from gnomon.cli.watch import _live; from pathlib import Path; _live(Path({str(run)!r}), 1.0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "■ stopped" in ran.stdout
    assert "pip install 'gnomon[watch]'" in ran.stderr
    assert f"gnomon watch {run} --plain" in ran.stderr
