"""Functions and names that other modules register here, and that the magics read at each cell.

A background thread imports the other modules after `%load_ext`. The first cells may run before this
import is complete. So the magics read only this small module, and need not wait for the import.
"""

from collections.abc import Callable

before_cell: list[Callable[[str], None]] = []
"""Functions to call before each cell with the cell's text, in the thread that runs the cell."""

names_set_on_ranks: dict[str, str] = {}
"""Names that earlier `%%taas` cells without a session assigned on their ranks.

Each name is a key of the dict. If a detached run returns the variable by `--out`, the key has the
run's id as its value, else "". If a later cell uses the name but the notebook lacks the variable,
the user gets a hint.
"""
