"""Run a notebook cell as N torch.distributed ranks: `%load_ext taas_magic`, `%%taas --gpus N`.

`import taas_magic` does not load torch or Dask. It also loads no module that needs Python's
`random`. Reason: during this import, the notebook's folder comes first on the import path. If that
folder has a file random.py, Python would load this file instead of its own module `random`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.1.0"
__all__ = ["__version__", "load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(shell: "InteractiveShell") -> None:
    """Register the magics, `#pragma taas` and Tab completion, and begin to warm the local pool.

    IPython calls this function for `%load_ext taas_magic`. A thread warms the pool; the function
    does not wait for the thread.
    """
    from taas_magic.notebook import magic

    magic.load(shell)


def unload_ipython_extension(shell: "InteractiveShell") -> None:
    """Remove the magics, `#pragma taas` and Tab completion from IPython. Running pools continue."""
    from taas_magic.notebook import magic

    magic.unload(shell)
