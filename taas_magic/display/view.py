"""The view of one run: its events in, what the notebook shows out.

A screen is where it is shown: under a notebook's cell, in a console, or in a terminal. No
ipywidgets: a display with an id is updated in place, which JupyterLab, Notebook 7, VS Code and
nbclient all render. Runs in the cell's thread.
"""

import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.display_functions import clear_output, publish_display_data
from IPython.core.getipython import get_ipython
from msgspec import structs

from taas_magic.display import head
from taas_magic.display.failure import headline
from taas_magic.display.head import RunState
from taas_magic.display.log import CELL_BYTES, UNBOUNDED, LogText
from taas_magic.display.replay import TAIL_BYTES, Piece
from taas_magic.display.tails import last_lines
from taas_magic.messages import ClearOutput, Display, Event, Lines, LinesDropped, Restart

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class NotebookScreen:
    """The output of the cell that runs now.

    Attributes:
        limit_bytes: Text that a screen takes by `write`; of what comes after that, `show_rest` is
            told. Text comes in whole lines.
    """

    limit_bytes = CELL_BYTES

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._head: dict[str, str] = {}
        self._shows_rest = False
        self._clears_first = False

    def show(self, state: RunState, now: float) -> None:
        """Show the head, or bring it up to date."""
        is_shown, before = bool(self._head), self._head
        self._head = head.both(state, now)
        if self._head != before:
            self._publish_head(update=is_shown)

    open = show

    def write(self, text: str) -> None:
        """Write lines below the head, at once."""
        self._clear_now()
        sys.stdout.write(text)
        sys.stdout.flush()

    def show_rest(self, text: str) -> None:
        """Show what stands for the lines that the cell does not take."""
        self._clear_now()
        transient = {"display_id": f"{self._run_id}:rest"}
        publish_display_data({"text/plain": text}, transient=transient, update=self._shows_rest)
        self._shows_rest = True

    def display(self, event: Display) -> None:
        """Show what a rank displayed; its ids are kept apart from those of other runs and ranks."""
        if not event.update:
            self._clear_now()
        named = {}
        if event.display_id:
            named = {"display_id": f"{self._run_id}:{event.rank}:{event.display_id}"}
        publish_display_data(event.data, event.metadata or {}, transient=named, update=event.update)

    def clear(self, wait: bool) -> None:
        """Clear the cell's output, but for the head."""
        self._clears_first = True
        if not wait:
            self._clear_now()

    def close(self, state: RunState, now: float) -> None:
        """Bring the head up to date for the last time."""
        self.show(state, now)

    def _clear_now(self) -> None:
        """Carry out a clearing that was asked for; the new head is what the old gives way to."""
        if self._clears_first:
            self._clears_first = False
            self._shows_rest = False
            clear_output(wait=True)
            self._publish_head(update=False)

    def _publish_head(self, update: bool) -> None:
        transient = {"display_id": f"{self._run_id}:head"}
        publish_display_data(self._head, transient=transient, update=update)


class UrgentLines:
    """What of the head cannot wait for a run's end: new notes, and that the run hangs."""

    def __init__(self) -> None:
        self._notes, self._hangs = 0, False

    def lines(self, state: RunState, now: float) -> str:
        """Return what has come since the last call, as whole lines."""
        notes = head.shown_notes(state)
        said = [f"note: {note}" for note in notes[self._notes :]]
        if state.hang and not self._hangs:
            said += head.hang_lines(state.hang, now)
        self._notes, self._hangs = len(notes), bool(state.hang)
        return "".join(f"{line}\n" for line in said)


class ConsoleScreen(NotebookScreen):
    """A kernel's console: it shows no updates, so that the head comes at both ends of a run."""

    limit_bytes = 16 * CELL_BYTES
    _rest = ""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self._urgent = UrgentLines()

    def open(self, state: RunState, now: float) -> None:
        """Show the head."""
        super().show(state, now)
        self._urgent.lines(state, now)

    def show(self, state: RunState, now: float) -> None:
        """Bring the head up to date where it can be; write what cannot wait."""
        super().show(state, now)
        if news := self._urgent.lines(state, now):
            self.write(news)

    def show_rest(self, text: str) -> None:
        """Keep it for the end."""
        self._rest = f"{text}\n"

    def close(self, state: RunState, now: float) -> None:
        """Write the lines that were kept, and the head."""
        self.write(f"{self._rest}{head.text(state, now)}\n")


class TerminalScreen:
    """Standard output: the head at both ends of a run, and what cannot wait in between."""

    limit_bytes = UNBOUNDED

    def __init__(self) -> None:
        self._progress = ""
        self._urgent = UrgentLines()

    def open(self, state: RunState, now: float) -> None:
        """Write the head."""
        self.write(head.text(state, now) + "\n")
        self._urgent.lines(state, now)

    def show(self, state: RunState, now: float) -> None:
        """Redraw the progress bar in place; write what cannot wait."""
        progress = head.plain(state.progress).partition("\n")[0]
        if progress != self._progress and sys.stdout.isatty():
            self._progress = progress
            self.write("")
        if news := self._urgent.lines(state, now):
            self.write(news)

    def write(self, text: str) -> None:
        """Write lines above the progress bar."""
        if self._progress:
            width = shutil.get_terminal_size().columns - 1
            text = f"\r\x1b[K{text}{self._progress[:width]}"
        sys.stdout.write(text)
        sys.stdout.flush()

    def show_rest(self, text: str) -> None:
        """Do nothing: a terminal takes all lines."""

    def display(self, event: Display) -> None:
        """Write the text form of what a rank displayed."""
        self.write(f"{event.data.get('text/plain', '')}\n")

    def clear(self, wait: bool) -> None:
        """Do nothing: a terminal keeps what it has shown."""

    def close(self, state: RunState, now: float) -> None:
        """Remove the progress bar, and write the head once more."""
        if self._progress:
            self._progress = ""
            self.write("\r\x1b[K")
        self.write(head.text(state, now) + "\n")


Screen = NotebookScreen | TerminalScreen


def screen_for(shell: "InteractiveShell | None", run_id: str) -> Screen:
    """Return the screen that fits a shell: a kernel's has a front end, the others have a terminal.

    A console cannot update what it has shown. A notebook's frontend names the cell in its request
    (JupyterLab, Notebook 7, VS Code) or has nobody to ask (nbclient).
    """
    if not hasattr(shell, "kernel"):
        return TerminalScreen()
    request: Mapping[str, Any] = getattr(shell, "get_parent", dict)()
    asks = request.get("content", {}).get("allow_stdin", False)
    is_of_console = asks and "cellId" not in request.get("metadata", {})
    return ConsoleScreen(run_id) if is_of_console else NotebookScreen(run_id)


HEAD_GAP_S = 0.1
"""The head changes at most this often."""

HEAD_TICK_S = 1.0
"""While a run goes on and nothing happens, its elapsed time changes this often."""

DATA_TYPES = frozenset({"text/plain", "image/png", "image/jpeg"})
"""Media types that a browser shows without running anything of theirs."""

WRITE_GAP_S = 0.003
"""Jupyter's server stops the output of a kernel that sends 1,000 messages a second."""

FULL_CELL_GAP_S = 1.0
"""The more a cell holds, the longer a browser takes to add to it. A full one is written to at most
so often, and an emptier one in proportion."""


def _as_data(event: Display) -> Display:
    """Return a display without what a browser would run."""
    kept = {kind: held for kind, held in event.data.items() if kind in DATA_TYPES}
    data = kept or {"text/plain": "(a display of an untrusted pool, without a text or picture)"}
    return structs.replace(event, data=data, metadata=None)


class NoView:
    """Folds a run's events into its state and shows nothing; has the methods of `View`."""

    def __init__(self, state: RunState) -> None:
        self._state, state.began = state, time.monotonic()

    def feed(self, event: Event) -> None:
        """Take an event."""
        self._state.apply(event, time.monotonic())

    def tick(self, now: float) -> None:
        """Do nothing."""

    def next_due(self) -> float:
        """Return that `tick` need not be called."""
        return math.inf

    def close(self) -> None:
        """Do nothing."""


class View:
    """Shows a run in the notebook's kernel; belongs to the thread that runs the cell.

    `feed` takes events, `tick` writes what they came to, in one message: call it after every batch
    of events, and no later than `next_due` says. Nothing here starts a thread or a timer.

    Args:
        state: What is known of the run, which the events are folded into; it begins now, unless it
            has begun.
        shell: The shell that shows it; default is the one that runs.
        clock: Seconds that never go back; `tick` and `next_due` speak of its time.
        past: What is shown of the events that `state` has already.
    """

    def __init__(
        self,
        state: RunState,
        *,
        shell: "InteractiveShell | None" = None,
        clock: Callable[[], float] = time.monotonic,
        past: Sequence[Piece] = (),
    ) -> None:
        plan, now = state.plan, clock()
        self._clock, self._state = clock, state
        state.began = state.began or now
        self._screen = screen_for(shell or get_ipython(), plan.run_id)
        limit_bytes = self._screen.limit_bytes + (TAIL_BYTES if past else 0)
        self._clearing_rank = min(plan.log_ranks or plan.ranks or {0})
        self._log = LogText(plan, state.run_dir, limit_bytes)
        self._written_at = float("-inf")
        self._head_at = now
        self._head_is_stale = False
        self._screen.open(self._state, now)
        for piece in past:
            if isinstance(piece, str):
                self._log.say(piece)
            else:
                self._show(piece, piece.time)
        if past:
            self._log.flush()
            self._write(now)

    def feed(self, event: Event, now: float | None = None) -> None:
        """Take the next event. Displays are shown at once, after the lines before them.

        Args:
            now: When it came, by the view's clock; default is now.
        """
        now = self._clock() if now is None else now
        self._state.apply(event, now)
        self._show(event, now)

    def _show(self, event: Event, now: float) -> None:
        plan = self._state.plan
        match event:
            case Lines():
                self._log.lines(event, now)
                return
            case LinesDropped():
                self._log.dropped(event)
                return
            case Restart():
                because = f" after {headline(event.failure)}" if event.failure else ""
                because = because or f": {event.cause}" * bool(event.cause)
                said = f"── restart {event.attempt} of all ranks{because} ──"
                self._log.restart(said, event.world_size)
            case Display() if plan.shows_displays(event.rank):
                self._log.flush()
                if event.rank and not event.update:
                    self._log.say(f"[{event.rank}] displays:")
                self._write(now)
                self._screen.display(event if plan.trusted else _as_data(event))
            case ClearOutput() if event.rank == self._clearing_rank:
                self._log.flush()
                self._write(now)
                self._screen.clear(event.wait)
                self._log.clear()
        self._head_is_stale = True

    def tick(self, now: float) -> None:
        """Write what is to be shown by now."""
        self._log.due(now)
        if self._write_due() <= now:
            self._write(now)
        if self._head_due() <= now:
            self._head_at, self._head_is_stale = now, False
            self._screen.show(self._state, now)

    @property
    def can_update(self) -> bool:
        """Whether what it has shown can be changed after it was closed."""
        return type(self._screen) is NotebookScreen

    def next_due(self) -> float:
        """Return when to call `tick` although no event came; infinity when there is no need to."""
        return min(self._log.next_due(), self._head_due(), self._write_due())

    def close(self) -> None:
        """Write all that is left and the head as it stands."""
        now, state = self._clock(), self._state
        self._log.close(now)
        self._write(now)
        if state.has_ended and state.world_size > 1:  # the log of one rank is below the head
            failed_rank = state.first.rank if state.first else None
            state.tails = last_lines(state.run_dir, state.world_size, failed_rank)
        self._screen.close(state, now)

    def _write_due(self) -> float:
        if not self._log.has_text:
            return math.inf
        return self._written_at + max(WRITE_GAP_S, FULL_CELL_GAP_S * self._log.fullness)

    def _head_due(self) -> float:
        if self._head_is_stale:
            return self._head_at + HEAD_GAP_S
        return math.inf if self._state.has_ended else self._head_at + HEAD_TICK_S

    def _write(self, now: float) -> None:
        if not self._log.has_text:
            return
        self._written_at = now
        if text := self._log.take():
            self._screen.write(text)
        if (rest := self._log.rest) is not None and rest.has_news:
            self._screen.show_rest(rest.text())
