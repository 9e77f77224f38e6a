"""Functions and names that other modules register here, and that the magics read at each cell.

A background thread imports those other modules. Their import may not be complete while the first
cells run, so the magics read only this small module.
"""

from collections.abc import Callable

before_cell: list[Callable[[], None]] = []
"""Functions to call before each cell, in the thread that runs the cell."""

set_in_ranks: dict[str, str] = {}
"""Names that earlier `%%taas` cells without a session assigned on their ranks.

The value of a name is the id of the detached run that returns the name by `--out`; "" for any other
run. A later cell that uses such a name gets a hint.
"""
