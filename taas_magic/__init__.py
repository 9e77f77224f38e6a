"""A notebook cell as N torch.distributed ranks: `%load_ext taas_magic`, then `%%taas --gpus N`.

The public names are in `taas_magic.api`. Importing this package imports neither torch nor Dask. It
also imports nothing that needs `random`: at this time the notebook's folder is still on the import
path, and may have a random.py. `taas_magic.kernel` removes that folder later.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.1.0"
__all__ = ["__version__", "load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(shell: "InteractiveShell") -> None:
    """Register the magics, `#pragma taas` and Tab completion, and begin to warm the local pool.

    IPython calls this in the notebook's kernel. It returns at once, because a thread warms the
    pool.
    """
    from taas_magic.notebook import magic

    magic.load(shell)


def unload_ipython_extension(shell: "InteractiveShell") -> None:
    """Remove what `load_ipython_extension` has registered. Pools that run continue to run."""
    from taas_magic.notebook import magic

    magic.unload(shell)
