"""Functions and names that other modules register here, and that the magics read at each cell.

A background thread imports those other modules. Their import may not be complete while the first
cells run, so the magics read only this small module.
"""

from collections.abc import Callable

before_cell: list[Callable[[], None]] = []
"""Functions to call before each cell, in the thread that runs the cell."""

set_in_ranks: dict[str, str] = {}
"""Names that earlier `%%taas` cells without a session assigned on their ranks.

Each name is a key of the dict. If a detached run returns the variable by `--out`, the key has the
run's id as its value, else "". If a later cell uses the name but the notebook lacks the variable,
the user gets a hint.
"""
