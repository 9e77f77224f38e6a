"""Run a notebook cell as N torch.distributed ranks: `%load_ext taas_magic`, `%%taas --gpus N`.

This package imports neither torch nor Dask, nor any module that needs `random`. While Python
imports this package, the notebook's folder is on the import path, so a random.py in that folder
would replace Python's own.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.1.0"
__all__ = ["__version__", "load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(shell: "InteractiveShell") -> None:
    """Register the magics, `#pragma taas` and Tab completion, and begin to warm the local pool.

    IPython calls this function in the kernel. A thread warms the pool; the function does not wait.
    """
    from taas_magic.notebook import magic

    magic.load(shell)


def unload_ipython_extension(shell: "InteractiveShell") -> None:
    """Remove the magics, `#pragma taas` and Tab completion from IPython. Running pools go on."""
    from taas_magic.notebook import magic

    magic.unload(shell)
