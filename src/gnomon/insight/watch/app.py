"""The live view on a terminal. The one module that imports textual."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.widgets import Static

from gnomon.insight.watch import views
from gnomon.insight.watch.lines import BAD, CALM, HEAD, MUTED, WARN, joined, line
from gnomon.insight.watch.views import head, overview
from gnomon.insight.watch.watcher import RunSnapshot, Watcher

_FOOT = (("q", "quit"), ("tab ← →", "panes"), ("s", "samples"), ("f", "findings"), ("c", "curves"), ("?", "help"))
_MARGIN = 1


class Body(VerticalScroll):
    """The pane that is looked at; its keys scroll it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", show=False),
        Binding("k", "scroll_up", show=False),
        Binding("space", "page_down", show=False),
    ]


class WatchApp(App[None]):
    """Shows a run and looks at it again every ``interval`` seconds.

    Colors are the terminal's own, so that it is readable on dark and on light ones; the mouse is left to the terminal,
    so that text can be marked and copied.
    """

    TITLE = "gnomon watch"
    ENABLE_COMMAND_PALETTE = False
    CSS = f"""
    Screen {{ layout: vertical; padding: 0 {_MARGIN}; }}
    #head {{ height: 2; }}
    #tabs {{ height: 1; }}
    #body {{ height: 1fr; scrollbar-size-vertical: 1; scrollbar-gutter: auto; }}
    #keys {{ height: 1; }}
    Static {{ text-wrap: nowrap; text-overflow: ellipsis; }}
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit"),
        Binding("ctrl+c", "quit", priority=True),
        Binding("tab,right", "pane(1)", priority=True),
        Binding("shift+tab,left", "pane(-1)", priority=True),
        Binding("o,1", "show('overview')"),
        Binding("c,2", "show('curves')"),
        Binding("s,3", "show('samples')"),
        Binding("f,4", "show('findings')"),
        Binding("question_mark,h,5", "show('help')"),
        Binding("escape", "show('overview')"),
    ]
    PANES: ClassVar[Sequence[str]] = ("overview", "curves", "samples", "findings", "help")

    def __init__(self, watcher: Watcher, interval: float = 1.0) -> None:
        super().__init__()
        # The terminal's own sixteen colors.
        self.theme = "ansi-dark"
        self.watcher, self.interval = watcher, interval
        self.snapshot: RunSnapshot | None = None
        self.pane = "overview"
        self._drawn: dict[str, Text] = {}

    def compose(self) -> ComposeResult:
        """Lay out head, tabs, pane and keys."""
        yield Static(id="head")
        yield Static(id="tabs")
        with Body(id="body"):
            yield Static(id="pane")
        yield Static(id="keys")

    def on_mount(self) -> None:
        """Look for the first time, then again and again; leave the terminal in order when asked to end."""
        self.query_one("#body").focus()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            # Where a loop takes no signal handlers the signal ends the process as always, only less tidily.
            with suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, self.exit)
        self.run_worker(self._look_on(), exit_on_error=True)

    async def _look_on(self) -> None:
        while True:
            # Reading files on a slow disk must not hold up the keys.
            self.snapshot = await asyncio.to_thread(self.watcher.look)
            self.draw()
            await asyncio.sleep(self.interval)

    def on_resize(self, event: Resize) -> None:
        """Lay everything out anew."""
        self.call_after_refresh(self.draw)

    def action_pane(self, by: int) -> None:
        """Go to a neighbor of the pane."""
        self.action_show(self.PANES[(self.PANES.index(self.pane) + by) % len(self.PANES)])

    def action_show(self, pane: str) -> None:
        """Show a pane from its beginning."""
        self.pane = pane
        self.draw()
        self.query_one(Body).scroll_home(animate=False)

    def draw(self) -> None:
        """Show what is known now, in the room that there is."""
        snapshot = self.snapshot
        if snapshot is None or not self.query("#pane"):
            return  # not there yet, or no longer
        width, body = self.size.width - 2 * _MARGIN, self.query_one(Body)
        height = body.size.height
        self._put("head", joined(head(snapshot, width)))
        self._put("tabs", self._tabs(snapshot))
        self._put("keys", line(*(part for key, what in _FOOT for part in ((key, HEAD), (f" {what}   ", MUTED)))))
        # Functions, so that only the pane that is shown is drawn.
        made: dict[str, Callable[[], list[Text]]] = {
            "overview": lambda: overview(snapshot, width, height),
            "curves": lambda: views.curves(snapshot, width - 2),
            "samples": lambda: views.samples(snapshot, width - 2),
            "findings": lambda: views.findings(snapshot, width - 2),
            "help": lambda: views.keys(width - 2),
        }
        lines = made[self.pane]()
        # Said, not left to be measured: what is measured while a window changes its size is kept for too long.
        self.query_one("#pane").styles.height = max(len(lines), 1)
        self._put("pane", joined(lines))

    def _tabs(self, snapshot: RunSnapshot) -> Text:
        parts: list[tuple[str, str]] = []
        for pane in self.PANES:
            count = len(snapshot.findings) if pane == "findings" else 0
            style = f"reverse {CALM}" if pane == self.pane else MUTED
            parts.append((f" {pane} ", style))
            if count:
                worst = snapshot.findings[0].severity
                parts.append((f"{count} ", BAD if worst == "severe" else WARN))
        return line(*parts)

    def _put(self, name: str, text: Text) -> None:
        """Give a widget its text, if it is another one: what stays the same is not sent over the line again."""
        if self._drawn.get(name) != text:
            self._drawn[name] = text
            self.query_one(f"#{name}", Static).update(text)
