"""Where a run is shown: under a notebook's cell, or in a terminal. Thin; runs in the cell's thread.

No ipywidgets: a display with an id is updated in place, which JupyterLab, Notebook 7, VS Code and
nbclient all render.
"""

import shutil
import sys
from typing import TYPE_CHECKING, Any, Protocol

from IPython.core.display_functions import clear_output, publish_display_data

from taas_magic.display import head
from taas_magic.display.state import RunState

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class Screen(Protocol):
    """What shows a run. Text comes in whole lines; `show` brings the head up to date."""

    def open(self, state: RunState, now: float) -> None: ...
    def show(self, state: RunState, now: float) -> None: ...
    def write(self, text: str) -> None: ...
    def display(self, event: dict[str, Any]) -> None: ...
    def clear(self, wait: bool) -> None: ...
    def close(self, state: RunState, now: float) -> None: ...


def screen_for(shell: "InteractiveShell | None", run_id: str) -> Screen:
    """The screen that fits a shell: a kernel's has a front end, the others have a terminal."""
    return NotebookScreen(run_id) if hasattr(shell, "kernel") else TerminalScreen()


class NotebookScreen:
    """The output of the cell that runs now."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._head: dict[str, str] = {}
        self._clears_first = False

    def open(self, state: RunState, now: float) -> None:
        self._head = self._render(state, now)
        self._publish_head(update=False)

    def show(self, state: RunState, now: float) -> None:
        rendered = self._render(state, now)
        if rendered != self._head:
            self._head = rendered
            self._publish_head(update=True)

    def write(self, text: str) -> None:
        self._clear_now()
        sys.stdout.write(text)
        sys.stdout.flush()

    def display(self, event: dict[str, Any]) -> None:
        """Shows what a rank displayed; its ids are kept apart from those of other runs."""
        if not event.get("update"):
            self._clear_now()
        display_id = event.get("display_id")
        publish_display_data(
            event["data"],
            event.get("metadata") or {},
            transient={"display_id": f"{self._run_id}:{display_id}"} if display_id else {},
            update=bool(event.get("update")),
        )

    def clear(self, wait: bool) -> None:
        """Clears the cell's output, but for the head."""
        self._clears_first = True
        if not wait:
            self._clear_now()

    def close(self, state: RunState, now: float) -> None:
        self.show(state, now)

    def _clear_now(self) -> None:
        """Carries out a clearing that was asked for; the new head is what the old gives way to."""
        if self._clears_first:
            self._clears_first = False
            clear_output(wait=True)
            self._publish_head(update=False)

    def _publish_head(self, update: bool) -> None:
        transient = {"display_id": f"{self._run_id}:head"}
        publish_display_data(self._head, transient=transient, update=update)

    def _render(self, state: RunState, now: float) -> dict[str, str]:
        return {"text/html": head.html(state, now), "text/plain": head.text(state, now)}


class TerminalScreen:
    """Standard output: the head at both ends of a run and, on a terminal, the progress bar."""

    def __init__(self) -> None:
        self._progress = ""

    def open(self, state: RunState, now: float) -> None:
        self.write(head.text(state, now) + "\n")

    def show(self, state: RunState, now: float) -> None:
        progress = head.plain(state.progress)
        if progress != self._progress and sys.stdout.isatty():
            self._progress = progress
            self.write("")

    def write(self, text: str) -> None:
        if self._progress:
            width = shutil.get_terminal_size().columns - 1
            text = f"\r\x1b[K{text}{self._progress[:width]}"
        sys.stdout.write(text)
        sys.stdout.flush()

    def display(self, event: dict[str, Any]) -> None:
        self.write(f"{event['data'].get('text/plain', '')}\n")

    def clear(self, wait: bool) -> None:
        """A terminal keeps what it has shown."""

    def close(self, state: RunState, now: float) -> None:
        if self._progress:
            self._progress = ""
            self.write("\r\x1b[K")
        self.write(head.text(state, now) + "\n")
