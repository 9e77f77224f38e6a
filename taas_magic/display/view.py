"""The view of one run: receives the run's events and shows its status header and log.

A screen writes the output below a notebook's cell, in a console, or in a terminal. Screens do not
use ipywidgets, but displays with an id, because more frontends can update these. The code of this
module runs in the cell's thread.
"""

import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.display_functions import clear_output, publish_display_data
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.getipython import get_ipython
from msgspec import structs

from taas_magic.display import head
from taas_magic.display.failure import headline
from taas_magic.display.head import RunState
from taas_magic.display.log import CELL_BYTES, NO_LIMIT_BYTES, LogText
from taas_magic.display.replay import TAIL_BYTES, OutputPiece
from taas_magic.display.tails import last_lines
from taas_magic.messages import ClearOutput, Display, Event, Lines, LinesDropped, Restart
from taas_magic.plan import Plan

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class NotebookScreen:
    """A screen that shows a run in the output of the notebook cell that is executing.

    Args:
        run_id: Id of the run.
        session: Name of the session whose ranks execute the run; "" without a session. All cells of
            a session use the same ids of displays, so that a cell can update displays of earlier
            cells.

    Attributes:
        limit_bytes: Maximum bytes of log text that the view passes to `write`. If the log is
            longer, the view passes a summary of the further lines to `show_summary`.
    """

    limit_bytes = CELL_BYTES

    def __init__(self, run_id: str, session: str = "") -> None:
        self._run_id, self._ranks_id = run_id, session or run_id
        self._head: dict[str, str] = {}
        self._shows_ranks = False
        self._shows_summary = False
        self._clears_first = False

    def show(self, state: RunState, now: float) -> None:
        """Show the status header, or update it if it has changed.

        While `%%capture` captures the cell's output, only `close` updates the header, because
        IPython would store each update.
        """
        publisher = getattr(get_ipython(), "display_pub", None)
        if not (self._head and isinstance(publisher, CapturingDisplayPublisher)):
            self._update_head(state, now)

    def open(self, state: RunState, now: float) -> None:
        """Show the status header and, below it, the table of an active run's ranks."""
        self.show(state, now)
        if not state.has_ended:
            self._publish_ranks(head.live_table_html(self._run_id))
            self._shows_ranks = True

    def prepare_for_input(self) -> None:
        """Do nothing before a prompt, because a notebook shows the prompt below the output."""

    def write(self, text: str) -> None:
        """Write whole lines below the status header, and flush standard output."""
        self._clear_now()
        sys.stdout.write(text)
        sys.stdout.flush()

    def show_summary(self, text: str) -> None:
        """Show or update the summary `text` of the log's lines beyond `limit_bytes`."""
        self._clear_now()
        transient = {"display_id": f"{self._run_id}:rest"}
        publish_display_data({"text/plain": text}, transient=transient, update=self._shows_summary)
        self._shows_summary = True

    def display(self, event: Display) -> None:
        """Show or update a display of a rank in the cell.

        Make the id of the display unique, so that ranks and runs cannot change displays of each
        other. The new id has the name of the session or the id of the run, and the rank's number.
        """
        if not event.update:
            self._clear_now()
        named = {}
        if event.display_id:
            named = {"display_id": f"{self._ranks_id}:{event.rank}:{event.display_id}"}
        publish_display_data(event.data, event.metadata or {}, transient=named, update=event.update)

    def clear(self, wait: bool) -> None:
        """Clear the cell's output except the status header.

        Args:
            wait: Whether to keep the old output until the next output comes, as the argument `wait`
                of IPython's `clear_output` does.
        """
        self._clears_first = True
        if not wait:
            self._clear_now()

    def close(self, state: RunState, now: float) -> None:
        """Remove the table of ranks below the status header, and update the header a last time.

        The status header of an ended run contains a table of ranks itself.
        """
        if self._shows_ranks:
            self._publish_ranks("", update=True)
        self._update_head(state, now)

    def _clear_now(self) -> None:
        """If `clear` was called since the last output, clear the cell, and show the header again.

        Also show the table of ranks again, if it was shown, but not the summary. The frontend
        replaces the old output in one step, so the cell does not flicker.
        """
        if self._clears_first:
            self._clears_first = False
            self._shows_summary = False
            clear_output(wait=True)
            self._publish_head(update=False)
            if self._shows_ranks:
                self._publish_ranks(head.live_table_html(self._run_id))

    def _publish_ranks(self, html: str, update: bool = False) -> None:
        transient = {"display_id": f"{self._run_id}:ranks"}
        data = {"text/html": html, "text/plain": ""}
        publish_display_data(data, transient=transient, update=update)

    def _update_head(self, state: RunState, now: float) -> None:
        is_shown, before = bool(self._head), self._head
        self._head = head.mime_bundle(state, now)
        if self._head != before:
            self._publish_head(update=is_shown)

    def _publish_head(self, update: bool) -> None:
        transient = {"display_id": f"{self._run_id}:head"}
        publish_display_data(self._head, transient=transient, update=update)


STATUS_GAP_S = 1.0
"""Minimum seconds between two changes of the status line, the last line of a terminal."""


class UrgentLines:
    """Lines that a user must see at once: new notes of the run, and the report of a hang.

    Screens that show the status header only at the start and end of a run write these lines.
    """

    def __init__(self) -> None:
        self._notes, self._hangs = 0, False

    def pop_lines(self, state: RunState, now: float) -> str:
        """Return the run's notes since the last call, one per line, and the report of a new hang.

        Each hang is reported only once. A hang that begins after the end of an earlier one is new.
        """
        notes = head.shown_notes(state)
        lines = [f"note: {note}" for note in notes[self._notes :]]
        if state.hang and not self._hangs:
            lines += head.hang_lines(state, now)
        self._notes, self._hangs = len(notes), bool(state.hang)
        return "".join(f"{line}\n" for line in lines)


class ConsoleScreen(NotebookScreen):
    """Screen for a kernel's console, which usually cannot update displays.

    The status header appears at the start and at the end of a run.
    """

    limit_bytes = 16 * CELL_BYTES
    _summary = ""

    def __init__(self, run_id: str, session: str = "") -> None:
        super().__init__(run_id, session)
        self._urgent = UrgentLines()

    def open(self, state: RunState, now: float) -> None:
        """Show the status header; record its notes, so that `show` does not write them again."""
        super().show(state, now)
        self._urgent.pop_lines(state, now)

    def show(self, state: RunState, now: float) -> None:
        """Update the status header; write the run's new notes, and the report of a new hang.

        Most consoles ignore the update of the header. So the notes and the report, which the header
        also has, are written as lines of the log.
        """
        super().show(state, now)
        if urgent := self._urgent.pop_lines(state, now):
            self.write(urgent)

    def show_summary(self, text: str) -> None:
        """Store the summary of the lines beyond `limit_bytes`, so that `close` writes it."""
        self._summary = f"{text}\n"

    def close(self, state: RunState, now: float) -> None:
        """Write the stored summary, if there is one, and the status header."""
        self.write(f"{self._summary}{head.header_text(state, now)}\n")


class TerminalScreen:
    """Screen that writes to standard output.

    The status header appears at the start and at the end of a run. In between, new notes and the
    reports of hangs appear as lines (`UrgentLines`). If standard output is a terminal, its last
    line is a status line with the metrics and the progress bar. The status line changes at most
    once in `STATUS_GAP_S`.
    """

    limit_bytes = NO_LIMIT_BYTES

    def __init__(self) -> None:
        self._status = ""
        self._status_at = -math.inf
        self._urgent = UrgentLines()

    def open(self, state: RunState, now: float) -> None:
        """Write the status header of an active run; for an ended run, only `close` writes it.

        Also record the run's notes, so that `show` does not write them again.
        """
        if not state.has_ended:
            self.write(head.header_text(state, now) + "\n")
        self._urgent.pop_lines(state, now)

    def show(self, state: RunState, now: float) -> None:
        """Redraw the status line; write the run's new notes, and the report of a new hang.

        Redraw the status line in place, if it has changed, and at most once in `STATUS_GAP_S`. If
        standard output is no terminal, there is no status line.
        """
        if now - self._status_at >= STATUS_GAP_S and sys.stdout.isatty():
            removal, before, self._status_at = self._removal(), self._status, now
            self._status = head.status_line(state, now)
            if self._status != before:
                self._print(removal)
        if urgent := self._urgent.pop_lines(state, now):
            self.write(urgent)

    def prepare_for_input(self) -> None:
        """Remove the status line until it is due again, because a prompt follows."""
        removal, self._status = self._removal(), ""
        self._print(removal)

    def write(self, text: str) -> None:
        """Write whole lines, and keep the status line below them as the last line."""
        self._print(f"{self._removal()}{text}")

    def show_summary(self, text: str) -> None:
        """Do nothing, because a terminal shows all lines."""

    def display(self, event: Display) -> None:
        """Write the text form of a rank's display."""
        self.write(f"{event.data.get('text/plain', '')}\n")

    def clear(self, wait: bool) -> None:
        """Do nothing, because a terminal cannot remove old output."""

    def close(self, state: RunState, now: float) -> None:
        """Remove the status line and write the status header again."""
        self.prepare_for_input()
        self._print(f"{head.header_text(state, now)}\n")

    def _removal(self) -> str:
        """Return the control characters that remove the status line; "" if no line is shown."""
        return "\r\x1b[K" if self._status else ""

    def _print(self, text: str) -> None:
        """Write `text`. Then write the status line, if any, cut to the terminal's width."""
        width = shutil.get_terminal_size().columns - 1
        sys.stdout.write(f"{text}{self._status[:width]}")
        sys.stdout.flush()


Screen = NotebookScreen | TerminalScreen


def screen_for(shell: "InteractiveShell | None", plan: Plan) -> Screen:
    """Return the screen for a run: for a notebook, a console or a terminal.

    A shell without a kernel writes to a terminal. For a kernel, the request to run the cell shows
    the kind of frontend. The frontend is a notebook if the request has the id of a cell
    (JupyterLab, Notebook 7, VS Code), or allows no input by the user (nbclient). Otherwise, the
    frontend is a console, which cannot update displays. If the request runs no cell, but the
    callback of a widget, the widget that shows the output cannot update displays either.

    Args:
        shell: The IPython shell of this process; None outside of IPython.
        plan: Plan of the run.
    """
    if not hasattr(shell, "kernel"):
        return TerminalScreen()
    request: Mapping[str, Any] = getattr(shell, "get_parent", dict)()
    runs_cell = request.get("header", {}).get("msg_type", "execute_request") == "execute_request"
    asks = request.get("content", {}).get("allow_stdin", False)
    is_of_console = not runs_cell or (asks and "cellId" not in request.get("metadata", {}))
    kind = ConsoleScreen if is_of_console else NotebookScreen
    return kind(plan.run_id, plan.session)


HEAD_GAP_S = 0.1
"""Minimum seconds between two updates of the status header."""

HEAD_TICK_S = 1.0
"""Seconds between updates of an active run's header while no events arrive."""

DATA_TYPES = frozenset({"text/plain", "image/png", "image/jpeg"})
"""Media types that a display of an untrusted pool may have: a browser runs no code in them."""

WRITE_GAP_S = 0.003
"""Minimum seconds between two writes of log text to a cell.

Jupyter's server stops the output of a kernel that sends 1,000 messages a second.
"""

FULL_CELL_GAP_S = 1.0
"""Minimum seconds between two writes to a cell whose output has reached the limit.

A browser adds text faster to a cell with less output. So for such a cell, the minimum is shorter,
in proportion to its output.
"""


def _without_active_content(event: Display) -> Display:
    """Return a copy of a display with only text and pictures, in which a browser runs no code."""
    kept = {kind: held for kind, held in event.data.items() if kind in DATA_TYPES}
    data = kept or {"text/plain": "(a display of an untrusted pool, without a text or picture)"}
    return structs.replace(event, data=data, metadata=None)


class SilentView:
    """A view that updates the state of a run, but shows nothing.

    The class has those methods of `View` that `RunDriver` calls, so it can replace a `View`.
    """

    def __init__(self, state: RunState) -> None:
        self._state, state.began = state, time.monotonic()

    def feed(self, event: Event) -> None:
        """Apply an event to the run's state."""
        self._state.apply(event, time.monotonic())

    def tick(self, now: float) -> None:
        """Do nothing, because this view has no output. `View.tick` writes output that is due."""

    def next_due(self) -> float:
        """Return infinity, because `tick` is never needed."""
        return math.inf

    def close(self) -> None:
        """Do nothing, because there is no output to finish."""


class View:
    """The view of one run in the notebook's kernel; used only in the cell's thread.

    `feed` receives the run's events, and buffers their output. `tick` writes the buffered output in
    one message. Call `tick` after every group of events, and at the latest at the time that
    `next_due` returns.

    Args:
        state: The state of the run, which `feed` updates. If the state has no start time, the run
            starts now.
        clock: Monotonic clock in seconds, used by `tick` and `next_due`.
        past: Output of events that came before the view was created, in their order. `state`
            already includes these events.
    """

    def __init__(
        self,
        state: RunState,
        *,
        clock: Callable[[], float] = time.monotonic,
        past: Sequence[OutputPiece] = (),
    ) -> None:
        plan, now = state.plan, clock()
        self._clock, self._state = clock, state
        state.began = state.began or now
        self._screen = screen_for(get_ipython(), plan)
        limit_bytes = self._screen.limit_bytes + (TAIL_BYTES if past else 0)
        self._log = LogText(plan, state.run_dir, limit_bytes)
        self._written_at = float("-inf")
        self._head_at = now
        self._head_is_stale = False
        self._screen.open(self._state, now)
        for piece in past:
            if isinstance(piece, str):
                self._log.add_line(piece)
            else:
                self._show(piece, piece.time)
        if past:
            self._log.flush()
            self._write(now)

    def feed(self, event: Event, now: float | None = None) -> None:
        """Update the run's state by the next event, and buffer the event's output.

        If the event is a display, show it at once, after all lines that the ranks printed before.

        Args:
            event: The event.
            now: Time at which the event arrived, on the view's clock; default is now.
        """
        now = self._clock() if now is None else now
        self._state.apply(event, now)
        self._show(event, now)

    def _show(self, event: Event, now: float) -> None:
        """Show one event, or add it to the text that `tick` will write.

        - Printed lines and dropped lines: add them to the log.
        - A restart: add a line about it to the log.
        - A display: write all waiting lines, and show the display at once. A line above a new
          display names the rank, unless it is rank 0. If the pool is untrusted, show only text and
          pictures.
        - A cleared output: write all waiting lines, and clear the cell at once.

        Ignore displays of ranks that the plan does not show. Only the lowest shown rank can clear
        the cell. After any event except lines, mark the status header as stale, so that `tick`
        updates it.
        """
        plan = self._state.plan
        match event:
            case Lines():
                self._log.add_lines(event, now)
                return
            case LinesDropped():
                self._log.add_dropped(event)
                return
            case Restart():
                because = f" after {headline(event.failure)}" if event.failure else ""
                self._log.add_line(f"── restart {event.attempt} of all ranks{because} ──")
            case Display() if plan.shows_displays(event.rank):
                self._log.flush()
                if event.rank and not event.update:
                    self._log.add_line(f"[{event.rank}] displays:")
                self._write(now)
                self._screen.display(event if plan.trusted else _without_active_content(event))
            case ClearOutput() if event.rank == self._state.plan.clearing_rank:
                self._log.flush()
                self._write(now)
                self._screen.clear(event.wait)
                self._log.clear()
        self._head_is_stale = True

    def tick(self, now: float) -> None:
        """Write log text, and update the status header, each if it is due at the time `now`."""
        self._log.add_due_lines(now)
        if self._write_due() <= now:
            self._write(now)
        if self._head_due() <= now:
            self._head_at, self._head_is_stale = now, False
            self._screen.show(self._state, now)

    def flush(self) -> None:
        """Write all buffered output and the status header now. Call this before a prompt."""
        self._log.flush()
        self._write(now := self._clock())
        self._head_at, self._head_is_stale = now, False
        self._screen.show(self._state, now)
        self._screen.prepare_for_input()

    @property
    def can_update(self) -> bool:
        """Whether displays of the screen can still be updated after the view was closed."""
        return type(self._screen) is NotebookScreen

    def next_due(self) -> float:
        """Return the time, on the view's clock, at which the next call of `tick` is due.

        At this time, `tick` has text to write, or a status header to update. A new event may make
        `tick` due earlier. After the run's end, return infinity if nothing is left to write.
        """
        return min(self._log.next_due(), self._head_due(), self._write_due())

    def close(self) -> None:
        """Write all remaining output and the final status header.

        If the run has ended and has several ranks, the header gets the last log lines of ranks.
        """
        now, state = self._clock(), self._state
        self._log.close(now)
        self._write(now)
        world_size = state.plan.world_size
        if state.has_ended and world_size > 1:  # a single rank's lines are all in the log
            failed_rank = state.first.rank if state.first else None
            state.tails = last_lines(state.run_dir, world_size, failed_rank)
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
        if text := self._log.pop_text():
            self._screen.write(text)
        if (rest := self._log.summary) is not None and rest.has_unshown_lines:
            self._screen.show_summary(rest.text())
