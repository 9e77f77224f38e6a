"""Show the view of a run again, for `%taas attach`.

The view reads only the run's folder, and needs no connection to the pool.
"""

import sys
import time

from taas_magic.display.failure import details, with_labels
from taas_magic.display.head import RunState
from taas_magic.display.replay import Replay
from taas_magic.display.view import View
from taas_magic.errors import interrupted
from taas_magic.journal.folder import RunFolder
from taas_magic.journal.reader import JournalReader, decode_lines
from taas_magic.notebook import heads
from taas_magic.notebook.run import Interrupts
from taas_magic.notebook.runs import Run, still_active_message

POLL_S = 0.1
"""Seconds between two reads of the journal of the run that the view shows."""

CHECK_S = 1.0
"""Minimum seconds between checks whether the process that owns a silent run is alive."""

NOT_ATTACHED = "NOT ATTACHED"
"""Title of the status header after the user has stopped watching the run, which may continue."""


def attach(run: Run) -> None:
    """Show a run, as recorded in its folder, until the run has ended or the user interrupts.

    If the run failed, print the details of its first failure, such as the traceback. The traceback
    names each cell by its label in the notebook, such as `In[3]`. If `--timeout` ended the run,
    print no details.

    The run may have been shown before, for example by its own cell. When the run has ended, call
    `heads.forget_run`, so that later cells do not update the status header there.

    Raises:
        KeyboardInterrupt: The user interrupted the view. The run continues, and the error's message
            says how to show the run again or end it.
    """
    with Interrupts() as interrupts:
        state = _show_events(run, interrupts)
    if not state.has_ended:
        raise interrupted(still_active_message(run.id))
    heads.forget_run(run)
    first = with_labels(state.first, run.context.labels)
    if first is not None and first.how != "timeout":
        sys.stdout.write("\n".join(details(first)) + "\n")


def _show_events(run: Run, interrupts: Interrupts) -> RunState:
    """Show the past and new events of a run until the run has ended or the user interrupts.

    First read all past events from the journal, and open the view with their output. Then read the
    journal every `POLL_S` seconds, and show new events. While the journal has no new event, check
    whether the run's owner still exists. If not, show the run as LOST, and stop.

    At the end, close the view. If the user interrupted, the status header gets the title
    `NOT_ATTACHED`. A later cell may update this header when the run has ended.

    Returns:
        The state that the view showed last.
    """
    reader = JournalReader(RunFolder(run.path).events)
    replay = Replay(run.new_state())
    for chunk in reader.chunks():
        replay.read(chunk)
    state, ahead_s = replay.state, time.time() - time.monotonic()
    if not state.has_ended and (ended := run.unrecorded_end()):
        state.apply(ended, ended.time)

    def now() -> float:
        return ahead_s + time.monotonic()  # wall-clock time as in the journal, without clock jumps

    view = View(state, clock=now, past=replay.pieces())
    checked_at = now()
    while not state.has_ended and not interrupts.count:
        is_silent = True
        for chunk in reader.chunks():
            is_silent = False
            for event in decode_lines(chunk):
                view.feed(event, event.time)
        view.tick(now())
        if is_silent and now() - checked_at > CHECK_S:
            checked_at = now()
            if ended := run.unrecorded_end():
                view.feed(ended, ended.time)
        time.sleep(POLL_S)
    if state.has_ended:
        view.close()
    else:
        heads.close_view(run, view, state, NOT_ATTACHED)
    return state
