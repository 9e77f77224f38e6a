"""Update the status headers of runs that ended after their views were closed.

A view is closed before its run ends if the run is detached or the user stops watching the run.
"""

import time

from IPython.core.display_functions import publish_display_data

from taas_magic.display import head
from taas_magic.display.head import RunState
from taas_magic.display.view import View
from taas_magic.notebook import between_cells
from taas_magic.notebook.runs import Run

_left: dict[str, Run] = {}
"""Active runs with a closed view and a status header that can still be updated, by run id."""


def close_view(run: Run, view: View, state: RunState, title: str) -> None:
    """Close the view of an active run.

    The view's last status header says how to show the run again. If this header can be updated
    later, `update_ended_headers` writes the run's end into it.

    Args:
        run: The run.
        view: View of the run.
        state: State of the run, which the view shows.
        title: First word of the final status header, in place of a word such as RUNNING.
    """
    state.left = title
    view.close()
    if view.can_update:
        _left[run.id] = run


def forget(run: Run) -> None:
    """Do not update a run's status header again, because the header already shows the run's end."""
    _left.pop(run.id, None)


def update_ended_headers() -> None:
    """Update the status headers of runs that have ended since their views were closed."""
    for run in [run for run in _left.values() if not run.is_active]:
        forget(run)
        name = {"display_id": f"{run.id}:head"}
        publish_display_data(head.mime_bundle(run.head, time.time()), transient=name, update=True)


between_cells.before_cell.append(update_ended_headers)
