"""Lists that other modules fill, and that the magics read before and after each cell.

The lists are not in the modules that fill them, because a background thread imports those modules.
While the first cells run, the modules may still be partly imported.
"""

from collections.abc import Callable

before_cell: list[Callable[[], None]] = []
"""Functions to call before each cell, in the thread that runs it."""

set_in_ranks: set[str] = set()
"""Names that earlier `%%taas` cells without a session assigned on their ranks.

If a later cell of the notebook uses such a name, the user gets a hint to return it by `--out`.
"""
