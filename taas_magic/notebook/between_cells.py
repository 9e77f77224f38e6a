"""Hooks and names that other modules add here, and that the magics read around each cell.

They are not in the modules that add them, because a background thread imports those modules. While
the first cells run, those modules may still be partly imported.
"""

from collections.abc import Callable

before_cell: list[Callable[[], None]] = []
"""Functions to call before each cell, in the thread that runs the cell."""

set_in_ranks: set[str] = set()
"""Names that earlier `%%taas` cells without a session assigned on their ranks.

If a later cell of the notebook uses such a name, the user gets a hint to return it by `--out`.
"""
