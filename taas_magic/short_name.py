"""The name `taas` in this process: `import taas` gives `taas_magic.api`, whatever is installed.

PyPI has another package of that name (0.9.2, DataSphere's old client), and the DataSphere guide
begins with `%pip install taas`.
"""

import importlib
import re
import shlex
import sys

NAME = "taas"

HERE = (
    "taas: `import taas` gives taas-magic, which is here already, and not pip's package of that "
    "name. No restart is needed."
)
IMPORT_AGAIN = "taas: another package `taas` is imported; run `import taas` again to get taas-magic"

# Also without its percent sign, as IPython's automagic takes it, and in a %%bash cell.
_INSTALL = re.compile(r"\s*[!%]{0,2}\s*(?:\S+\s+-m\s+|uv\s+)?pip[\d.]*\s+install\s(.+)")
_REQUIREMENT = re.compile(r"(?:.*/)?taas(?:$|\s*[=<>~!;\[@]|-\d)")


def claim() -> bool:
    """Makes `import taas` give `taas_magic.api` in this process and its forks.

    A rank, a fetcher and the kernel call it before any of the user's code runs. It costs a look
    into `sys.modules` where `taas_magic.api` is imported.

    Returns:
        Whether another module had the name.
    """
    api = importlib.import_module("taas_magic.api")
    before = sys.modules.get(NAME, api)
    sys.modules[NAME] = api
    return before is not api and hasattr(before, "__path__")


def release() -> None:
    """Undoes `claim`: the next `import taas` looks for what is installed."""
    if sys.modules.get(NAME) is sys.modules.get("taas_magic.api"):
        sys.modules.pop(NAME, None)


def installs(raw_cell: str) -> bool:
    """Whether a cell asks pip for the package of that name."""
    lines = (_INSTALL.fullmatch(line) for line in raw_cell.splitlines())
    words = [word for found in lines if found for word in _words(found[1])]
    return any(_REQUIREMENT.match(word) for word in words)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()
