"""Read cells that tests run in notebooks. The cells are in the files of tests/cells.

A file has the cells of one notebook. A line `# %%` begins each cell. The lines above the first cell
do not run. They define the names that a test sets in the notebook, so that ruff and mypy know them.
"""

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "cells"


def cells_of(name: str) -> list[str]:
    """Return the source of each cell in `tests/cells/NAME.py`."""
    _, *cells = re.split("^# %%\n", (FOLDER / f"{name}.py").read_text(), flags=re.MULTILINE)
    return [cell.strip("\n") + "\n" for cell in cells]
