"""Tell the user that a variable does not have the value that a `%%taas` cell assigned to it.

If the notebook lacks the variable, NameError leads to a hint. If the notebook has an older value,
no error occurs, so a note tells the user.
"""

import sys
from contextlib import suppress
from typing import NamedTuple

from IPython.core.getipython import get_ipython

from taas_magic.capture.names import used_names
from taas_magic.capture.payload import Payload
from taas_magic.display.head import RunState
from taas_magic.errors import listed
from taas_magic.notebook import between_cells
from taas_magic.plan import variable_name

_MAX_LISTED = 10

_pending: dict[str, tuple[int, "_Cell"]] = {}
"""Variables that a `%%taas` cell assigned only in its ranks, if no note has told the user so.

Each name has the id of the notebook's object.
"""


class _Cell(NamedTuple):
    """A `%%taas` cell.

    Attributes:
        session: Name of the cell's session; "" if it has none.
        out: Values of the cell's `--out`, such as "loss@all".
    """

    session: str
    out: tuple[str, ...]


def record(captured: Payload, ended: RunState) -> None:
    """Record the variables for which the next cell that reads them prints a note.

    Leave out the variables of `--out`. If the run failed, record no new variables, because the cell
    may not have reached its assignments.
    """
    if ended.state not in ("FAILED", "LOST"):
        # A later cell of a session returns the values of its own `--out` only.
        cell = _Cell(ended.plan.session, () if ended.plan.session else tuple(ended.plan.out))
        for name, value_id in captured.replaced.items():
            _pending[name] = value_id, cell
    for name in map(variable_name, ended.plan.out):
        _pending.pop(name, None)


def print_notes(raw_cell: str) -> None:
    """Print a note if a plain cell reads a variable that a `%%taas` cell assigned in its ranks.

    The magics call this function before each cell. Forget the variables that the note names, that
    the cell assigns or deletes, or that have another value by now.
    """
    shell = get_ipython()
    if not _pending or shell is None:
        return
    with suppress(SyntaxError):  # the cell itself then shows the error
        source = shell.transform_cell(raw_cell)
        is_magic = source.lstrip().startswith("get_ipython().run_cell_magic(")
        if is_magic and ("%%taas" in source or "run_cell_magic('taas'" in source):
            return
        for name, (value_id, _) in list(_pending.items()):
            if name not in shell.user_ns or id(shell.user_ns[name]) != value_id:
                del _pending[name]
        used = used_names(source)
        deleted = used.updates - used.assigned.keys()
        names = sorted(_pending.keys() & used.why.keys() - deleted)
        read = {name: _pending[name][1] for name in names}
        for cell in dict.fromkeys(read.values()):
            sys.stdout.write(_note([name for name in read if read[name] == cell], cell))
        for name in {*read, *used.stores}:
            _pending.pop(name, None)


def _note(names: list[str], cell: _Cell) -> str:
    one = len(names) == 1
    where = f"a cell of session {cell.session}" if cell.session else "that cell"
    out = ",".join([*cell.out, *names[:_MAX_LISTED]])
    return (
        f"note: {listed(names, _MAX_LISTED)} {'has' if one else 'have'} the notebook's own "
        f"{'value' if one else 'values'}. A %%taas cell assigned "
        f"{'a new value' if one else 'new values'}, but only in its ranks. To get "
        f"{'this value' if one else 'these values'}, run {where} with "
        f"--out {out}\n"
    )


between_cells.before_cell.append(print_notes)
