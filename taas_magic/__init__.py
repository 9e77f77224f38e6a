"""A notebook cell as N torch.distributed ranks: `%load_ext taas_magic`, then `%%taas --gpus N`.

Importing this package imports neither torch nor Dask, nor what would import `random`: it comes
before `taas_magic.kernel` can take the notebook's folder, which may hold a random.py, off the
import path. The public names are in `taas_magic.api`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.1.0"
__all__ = ["__version__", "load_ipython_extension", "unload_ipython_extension"]


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
