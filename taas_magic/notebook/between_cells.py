"""Functions and names that other modules register here, and that the magics read at each cell.

The magics do not read them from the other modules, because a background thread imports those
modules. While the first cells run, an import may not be complete.
"""

from collections.abc import Callable

before_cell: list[Callable[[], None]] = []
"""Functions to call before each cell, in the thread that runs the cell."""

set_in_ranks: set[str] = set()
"""Names that earlier `%%taas` cells without a session assigned on their ranks.

If a later cell of the notebook uses such a name, the user gets a hint to return it by `--out`.
"""
