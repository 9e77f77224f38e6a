"""Heads in this kernel's notebook that no view brings up to date any more, and their correction."""

import time

from IPython.core.display_functions import publish_display_data

from taas_magic.display import head
from taas_magic.display.head import RunState
from taas_magic.display.view import View
from taas_magic.notebook.runs import Run

_left: dict[str, Run] = {}
"""Runs whose heads were left before their ends."""


def leave(run: Run, view: View, state: RunState, title: str) -> None:
    """Close the view of a run that goes on; its head says how to see the run again.

    Args:
        title: What the head shows in the place of the run's state.
    """
    state.left = title
    view.close()
    if view.can_update:
        _left[run.run_id] = run


def forget(run: Run) -> None:
    """Correct a run's head no more: its end is shown."""
    _left.pop(run.run_id, None)


def correct() -> None:
    """Bring the heads up to date that were left, of runs that have ended since."""
    for run in [run for run in _left.values() if not run.is_active]:
        forget(run)
        name = {"display_id": f"{run.run_id}:head"}
        publish_display_data(head.both(run.head, time.time()), transient=name, update=True)
