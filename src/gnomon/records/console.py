"""What a person sees while a run works: one live line on a terminal, now and then a plain line elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from gnomon.redaction import for_people


class Phase:
    """A stretch of work with a name, and a count when its length is known: ``with console.phase("loading") as p``."""

    def __init__(self, text: str, total: int, clock: Callable[[], float], report: Callable[[], None]) -> None:
        self.text, self.total, self.done = text, total, 0
        self._clock, self._began, self._report = clock, clock(), report

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began

    def advance(self, count: int = 1) -> None:
        """Note that so many more are done."""
        self.done += count
        self._report()

    def __str__(self) -> str:
        parts = [self.text]
        if self.total:
            parts.append(f"{self.done}/{self.total}")
        if 0 < self.done < self.total:
            parts.append(f"{duration(self.seconds * (self.total - self.done) / self.done)} left")
        return f"{'  '.join(parts)}  ({duration(self.seconds)})"


class Console:
    """Progress of a run on ``stream`` (standard error), so that standard output is free for results.

    On a terminal: a line that redraws itself, with messages above it. Elsewhere, a log file for one: a plain line for
    the first and the last step, and between them at most every ``every_seconds``; phases say when they end.
    steps: of the run in all. first: steps that were done before this session.
    """

    def __init__(
        self,
        steps: int = 0,
        first: int = 0,
        stream: TextIO | None = None,
        every_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.steps, self.first = steps, first
        self._stream = sys.stderr if stream is None else stream
        self._every_seconds, self._clock = every_seconds, clock
        self._began = self._printed = clock()
        self._line, self._evaluation = "", ""
        self._phases: list[Phase] = []
        self._is_live = self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._rich = RichConsole(file=self._stream, highlight=False, soft_wrap=False)
        self._live: Live | None = None

    def start(self, steps: int, first: int = 0) -> None:
        """Begin to count steps, from ``first`` to ``steps``; time left is reckoned from here."""
        self.steps, self.first = steps, first
        self._began = self._printed = self._clock()

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """Show that ``done`` steps are done; ``values`` are the metrics of the latest."""
        self._line = self._describe(done, values)
        is_edge = done in (self.first + 1, self.steps)
        if self._is_live:
            self._draw()
        elif is_edge or self._is_due():
            self._print(self._line)

    def evaluated(self, text: str) -> None:
        """Show the result of an evaluation, and keep it in the line."""
        self._evaluation = text
        self.say(f"evaluation: {text}")

    @contextmanager
    def phase(self, text: str, total: int = 0, is_brief: bool = False) -> Iterator[Phase]:
        """Show that something takes its time.

        total: how many there are to be done, 0 when that is not known. is_brief: leave no line behind; otherwise what
        took a second or more says how long it took.
        """
        phase = Phase(text, total, self._clock, self._tick)
        self._phases.append(phase)
        self._draw()
        try:
            yield phase
        finally:
            self._phases.remove(phase)
        if phase.seconds >= 1 and not is_brief:
            self.say(f"{text}: {duration(phase.seconds)}")

    def say(self, message: str) -> None:
        """Print one line, above the live one."""
        self._print(message)

    def warn(self, message: str) -> None:
        """Print one line that is seen."""
        self._print(f"warning: {message}", "yellow")

    def close(self) -> None:
        """Leave the last line as it is; what is said later is plain."""
        self._is_live = False
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _describe(self, done: int, values: Mapping[str, float]) -> str:
        seconds = values.get("time/step_seconds", 0.0)
        parts = [f"step {done}/{self.steps}"]
        if "rollout/reward_mean" in values:
            parts.append(f"reward {values['rollout/reward_mean']:.3f}")
        if seconds > 0:
            parts.append(f"{values.get('tokens/generated', 0.0) / seconds:.0f} tokens/s")
        made = done - self.first
        if made > 0 and done < self.steps:
            parts.append(f"{duration((self._clock() - self._began) / made * (self.steps - done))} left")
        if self._evaluation:
            parts.append(f"evaluation {self._evaluation}")
        return "  ".join(parts)

    def _tick(self) -> None:
        self._draw()
        if not self._is_live and self._is_due():
            self._print(str(self._phases[-1]))

    def _is_due(self) -> bool:
        return self._clock() - self._printed >= self._every_seconds

    def _print(self, message: str, style: str = "") -> None:
        self._printed = self._clock()
        message = for_people(message)
        if self._is_live:
            self._rich.print(Text(message, style=style))
            return
        self._stream.write(message + "\n")
        self._stream.flush()

    def _draw(self) -> None:
        # Drawn by a thread of its own, four times a second, so that seconds pass on the screen while a step works.
        if self._is_live and self._live is None:
            self._live = Live(
                console=self._rich,
                get_renderable=self._render,
                refresh_per_second=4,
                redirect_stdout=False,
                redirect_stderr=self._stream is sys.stderr,
            )
            self._live.start()

    def _render(self) -> Text:
        phases = [str(phase) for phase in self._phases]
        return Text("  ".join([self._line, *phases] if self._line else phases), no_wrap=True, overflow="ellipsis")


def duration(seconds: float) -> str:
    """Return seconds as a person says them.

    >>> duration(7.4), duration(192), duration(7500)
    ('7s', '3m 12s', '2h 05m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
