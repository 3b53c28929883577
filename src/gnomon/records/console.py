"""Show the progress of a run: a live line or two on a terminal, a plain line a step in a log."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.text import Text

from gnomon.core.progress import use_progress
from gnomon.core.redaction import for_people, visible
from gnomon.records.phase import Phase, duration

__all__ = ["Console", "Phase", "duration"]

ANNOUNCED_SECONDS = 2.0
"""A phase that has lasted so long is named in a log while it lasts, and not at its end alone."""
_LOOK_SECONDS = _SEEN_SECONDS = 0.5


class Console:
    """Progress of a run on ``stream`` (standard error), so that standard output is free for results.

    On a terminal, the console redraws one line of steps and one of open phases, with messages above them. In a log
    file, the console prints one line a step with the time of day; it names a phase of two seconds while the phase
    lasts, reports a longer phase after each ``every_seconds`` without another line, and says when a phase has ended.
    Inside of ``with`` the console also shows what is reported with `gnomon.core.progress`.

    Args:
        steps: Number of steps of the whole run.
        first: Number of steps that were done before this session.
        stream: Where to write; standard error by default.
        every_seconds: Seconds without a line after which an open phase reports.
        clock: Seconds of a monotonic clock.
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
        self._listening: AbstractContextManager[None] | None = None
        # Reentrant: `_report` holds it while `_print` takes it again.
        # Lines come from the run and from the watching thread.
        self._writing = threading.RLock()
        self._is_over: threading.Event | None = None

    def start(self, steps: int, first: int = 0) -> None:
        """Begin to count steps, from ``first`` to ``steps``; time left is estimated from here."""
        self.steps, self.first = steps, first
        self._began = self._printed = self._clock()

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """Show that ``done`` steps are done; ``values`` are the metrics of the latest."""
        self._line = self._describe(done, values)
        if self._is_live:
            self._draw()
        else:
            self._print(f"{time.strftime('%H:%M:%S')}  {self._line}")

    def evaluated(self, text: str) -> None:
        """Show the result of an evaluation, and keep it in the line."""
        self._evaluation = text
        self.say(f"evaluation: {text}")

    @contextmanager
    def phase(self, text: str, total: int = 0, unit: str = "", is_brief: bool = False) -> Iterator[Phase]:
        """Show that something takes its time.

        Args:
            total: Number of units to do; 0 when the number is not known.
            unit: "bytes" for sizes.
            is_brief: Leave no line behind; otherwise what took a second or more says how long it took, unless it is a
                part of another phase.
        """
        # A phase within another one leaves no line: the outer one says how long it all took.
        phase = Phase(text, total, unit, is_brief or bool(self._phases), self._clock, self._tick)
        self._phases.append(phase)
        self._draw()
        self._look_on()
        try:
            yield phase
        finally:
            self._phases.remove(phase)
        if phase.seconds >= 1 and not phase.is_unlogged:
            self.say(f"{phase.text}: {duration(phase.seconds)}")

    def say(self, message: str) -> None:
        """Print one line, above the live one."""
        self._print(message)

    def warn(self, message: str) -> None:
        """Print one line that is seen."""
        self._print(f"warning: {message}", "yellow")

    def close(self) -> None:
        """Leave the line of the last step as it is; what is said later is plain."""
        # Before the live display stops, or a line printed meanwhile would start it again.
        self._is_live = False
        if self._is_over is not None:
            self._is_over.set()
            self._is_over = None
        if self._live is not None:
            # Without a step there is nothing worth keeping on the screen.
            self._live.transient = not self._line
            self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        self._listening = use_progress(self.phase)
        self._listening.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listening is not None:
            self._listening.__exit__(kind, error, trace)
            self._listening = None
        self.close()

    def _describe(self, done: int, values: Mapping[str, float]) -> str:
        seconds = values.get("time/step_seconds", 0.0)
        parts = [f"step {done}/{self.steps}"]
        if "rollout/reward_mean" in values:
            parts.append(f"reward {values['rollout/reward_mean']:.3f}")
        elif "tokens/epochs" in values:
            parts.append(f"loss {values['loss/policy']:.4f}")
        if seconds > 0:
            parts.append(f"{values.get('tokens/generated', 0.0) / seconds:.0f} tokens/s")
        # The estimate counts this session alone: another machine may have made the steps before.
        made = done - self.first
        if made > 0 and done < self.steps:
            parts.append(f"{duration((self._clock() - self._began) / made * (self.steps - done))} left")
        if self._evaluation:
            parts.append(f"evaluation {self._evaluation}")
        return "  ".join(parts)

    def _tick(self) -> None:
        self._draw()
        if not self._is_live and self._is_due():
            self._report()

    def _look_on(self) -> None:
        """Have a thread look on where nothing draws itself: work that never counts is seen to go on, too."""
        if self._is_live or self._is_over is not None:
            return
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, args=(self._is_over,), name="progress", daemon=True).start()

    def _watch(self, is_over: threading.Event) -> None:
        while not is_over.wait(_LOOK_SECONDS):
            self._announce()
            if self._is_due():
                self._report()

    def _announce(self) -> None:
        """Name the phases that have lasted a while and were not named yet."""
        for phase in list(self._phases):
            if not phase.is_unlogged and not phase.is_announced and phase.seconds >= ANNOUNCED_SECONDS:
                phase.is_announced = True
                self._print(f"{phase.text} ...")

    def _report(self) -> None:
        with self._writing:
            if self._phases and self._is_due():
                self._print(str(self._phases[-1]))

    def _is_due(self) -> bool:
        return self._clock() - self._printed >= self._every_seconds

    def _print(self, message: str, style: str = "") -> None:
        message = for_people(message)
        with self._writing:
            self._printed = self._clock()
            try:
                if self._is_live:
                    self._rich.print(Text(message, style=style))
                    return
                self._stream.write(message + "\n")
                self._stream.flush()
            except BrokenPipeError:
                # The reader is gone, as with `| head`: whoever started the run decides what that means.
                raise
            except (OSError, ValueError):
                self._lose()

    def _lose(self) -> None:
        """Go on without the stream: a full disk, a lost terminal, or a closed stream; the records have everything."""
        with suppress(OSError, ValueError):
            self.close()  # gives standard error back, which live lines had taken
        lost, self._stream = self._stream, open(os.devnull, "w")  # noqa: SIM115
        self._live = None
        if sys.stderr is lost:  # Others print there as well, and at its exit Python would try again what is left in it.
            sys.stderr = self._stream

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

    def _render(self) -> Group:
        # What is done again and again is named when it lasts: a screen that flickers cannot be read.
        seen = [phase for phase in list(self._phases) if not phase.is_unlogged or phase.seconds >= _SEEN_SECONDS]
        doing = "  ·  ".join(map(str, seen))
        lines = [visible(self._line), doing]
        return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines if line))
