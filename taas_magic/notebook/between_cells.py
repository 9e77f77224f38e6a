"""Lists that other modules fill, and that the magics read before and after each cell.

`notebook.magic` must not read these from the modules that fill them: a thread imports those
modules, so the first cells may run while they are only half imported.
"""

from collections.abc import Callable

before_cell: list[Callable[[], None]] = []
"""Functions to call before each cell, in the thread that runs it."""

set_in_ranks: set[str] = set()
"""Names that earlier `%%taas` cells without a session assigned on their ranks.

If a later cell of the notebook uses such a name, the user gets a hint to return it by `--out`.
"""
