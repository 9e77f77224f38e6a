"""The view of one run: its events in, what the notebook shows out."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from taas_magic.display.failure import headline
from taas_magic.display.log import LogText
from taas_magic.display.screen import screen_for
from taas_magic.display.state import RunState
from taas_magic.plan import Plan

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

HEAD_GAP_S = 0.1
"""The head changes at most this often."""

HEAD_TICK_S = 1.0
"""While a run goes on and nothing happens, its elapsed time changes this often."""

WRITE_GAP_S = 0.003
"""Jupyter's server stops the output of a kernel that sends 1,000 messages a second."""


class View:
    """Shows a run in the notebook's kernel; belongs to the thread that runs the cell.

    `feed` takes events, `tick` writes what they came to, in one message: call it after every batch
    of events, and no later than `next_due` says. Nothing here starts a thread or a timer.

    Args:
        plan: What was decided.
        run_dir: The run folder.
        log_ranks: Ranks whose lines are shown; None shows all.
        gpus: GPUs that the run holds; 0 for CPU ranks.
        shell: The shell that shows it; default is the one that runs.
        clock: Seconds that never go back; `tick` and `next_due` speak of its time.
    """

    def __init__(
        self,
        plan: Plan,
        run_dir: Path | str,
        *,
        log_ranks: frozenset[int] | None = None,
        gpus: int = 0,
        shell: "InteractiveShell | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        now = clock()
        self._clock = clock
        self._state = RunState(
            run_id=plan.run_id,
            name=plan.name,
            pool=plan.pool,
            world_size=plan.world_size,
            n_hosts=len(plan.hosts),
            run_dir=str(run_dir),
            gpus=gpus,
            units=plan.units,
            began=now,
            notes=list(plan.notes),
        )
        logs_dir = str(Path(run_dir) / "logs")
        self._log = LogText(plan.world_size, len(plan.hosts), logs_dir, log_ranks, now)
        self._screen = screen_for(shell or get_ipython(), plan.run_id)
        self._written_at = float("-inf")
        self._head_at = now
        self._head_is_stale = False
        self._screen.open(self._state, now)

    def feed(self, event: dict[str, Any]) -> None:
        """Takes the next event. Displays are shown at once, after the lines before them."""
        now = self._clock()
        self._state.apply(event, now)
        match event["kind"]:
            case "lines":
                self._log.lines(event, now)
            case "dropped":
                self._log.dropped(event)
            case "restart":
                self._log.say(_restart_line(event), now)
            case "display" if event["rank"] == 0:
                self._write_all(now)
                self._screen.display(event)
            case "clear" if event["rank"] == 0:
                self._write_all(now)
                self._screen.clear(bool(event.get("wait")))
        self._head_is_stale = self._head_is_stale or event["kind"] not in ("lines", "dropped")

    def tick(self, now: float) -> None:
        """Writes what is to be shown by now."""
        self._log.due(now)
        if self._log.has_text and now >= self._written_at + WRITE_GAP_S:
            self._write(now)
        due = self._head_due()
        if due is not None and due <= now:
            self._head_at, self._head_is_stale = now, False
            self._screen.show(self._state, now)

    def next_due(self) -> float | None:
        """When to call `tick` although no event came; None when there is no need to."""
        write_due = self._written_at + WRITE_GAP_S if self._log.has_text else None
        dues = (self._log.next_due(), self._head_due(), write_due)
        return min((due for due in dues if due is not None), default=None)

    def close(self) -> None:
        """Writes all that is left and the head as it stands."""
        now = self._clock()
        self._log.close(now)
        self._write(now)
        self._screen.close(self._state, now)

    def _head_due(self) -> float | None:
        if self._head_is_stale:
            return self._head_at + HEAD_GAP_S
        return None if self._state.has_ended else self._head_at + HEAD_TICK_S

    def _write_all(self, now: float) -> None:
        self._log.flush(now)
        self._write(now)

    def _write(self, now: float) -> None:
        text = self._log.take()
        if text:
            self._written_at = now
            self._screen.write(text)


def _restart_line(event: dict[str, Any]) -> str:
    failure = event.get("failure")
    because = f" after {headline(failure)}" if failure else ""
    because = because or f": {event['cause']}" * ("cause" in event)
    return f"── restart {event['attempt']} of all ranks{because} ──"
