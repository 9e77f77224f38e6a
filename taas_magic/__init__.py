"""A notebook cell as N torch.distributed ranks: `%load_ext taas_magic`, then `%%taas --gpus N`.

Importing this package imports neither torch nor Dask.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.1.0"
__all__ = ["__version__", "load_ipython_extension", "unload_ipython_extension"]


def __getattr__(name: str) -> Any:
    """Return a public name, the same as that of `taas`.

    They are imported when asked for: this package is imported before `taas_magic.kernel` can take
    the notebook's folder, which may hold a random.py, off the import path.
    """
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:  # `from taas_magic import probe`
        raise AttributeError(f"{name} is a module: import it")
    return getattr(importlib.import_module("taas_magic.api"), name)


def load_ipython_extension(shell: "InteractiveShell") -> None:
    """Switch the magics, the comment form and Tab completion on; warms the local pool.

    Runs in the notebook's kernel and returns at once: the warming goes on in a thread.
    """
    from taas_magic.notebook import magic

    magic.load(shell)


def unload_ipython_extension(shell: "InteractiveShell") -> None:
    """Take all of it away again; pools that are up stay up."""
    from taas_magic.notebook import magic

    magic.unload(shell)
