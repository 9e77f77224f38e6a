"""Update the status headers of runs that ended after their views were closed.

A view is closed before its run ends if the run is detached or the user stops watching the run.
"""

import time
from contextlib import suppress

from IPython.core.display_functions import publish_display_data

from taas_magic.display import head
from taas_magic.display.head import RunState
from taas_magic.display.view import View
from taas_magic.notebook import between_cells
from taas_magic.notebook.runs import Run

_left: dict[str, Run] = {}
"""Active runs whose views are closed and whose status headers can still be updated, by run id."""


def close_view(run: Run, view: View, state: RunState, title: str) -> None:
    """Close the view of an active run.

    The last status header of the view says how to show the run again. If the frontend can update
    this header later, record the run. The first cell after the run's end then updates the header
    (`update_ended_headers`).

    Args:
        run: The run.
        view: View of the run.
        state: The state of the run that the view shows.
        title: First word of the final status header, in place of a word such as RUNNING.
    """
    state.final_title = title
    view.close()
    if view.can_update:
        _left[run.id] = run


def forget_run(run: Run) -> None:
    """Remove a run from the runs whose status headers must be updated after their end.

    Call this when the end of the run has been shown.
    """
    _left.pop(run.id, None)


def update_ended_headers(raw_cell: str) -> None:
    """Update the status headers of runs that have ended since their views were closed.

    The magics call this function before each cell of the notebook. If the folder of a run has been
    removed, for example by another kernel, the run's status header stays as it is.

    Args:
        raw_cell: Text of the cell; not used.
    """
    for run in list(_left.values()):
        state = None
        with suppress(OSError, ValueError):  # the run's folder is not readable any more
            if run.is_active:
                continue
            state = run.head
        forget_run(run)
        if state is not None:
            data, name = head.mime_bundle(state, time.time()), {"display_id": f"{run.id}:head"}
            publish_display_data(data, transient=name, update=True)


between_cells.before_cell.append(update_ended_headers)
