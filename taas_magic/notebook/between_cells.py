"""What modules of this kernel leave for the moments before and after each cell.

The magics' module imports this one at once. The modules that fill it are imported by a thread, so
the first cells may run while they are only half imported.
"""

from collections.abc import Callable

before_cell: list[Callable[[], None]] = []
"""Functions to call before each cell, in the thread that runs it."""

set_in_ranks: set[str] = set()
"""Names that earlier `%%taas` cells have assigned in their ranks."""
