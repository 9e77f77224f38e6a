"""What the forkserver does before any run, so that a rank finds it done.

Imported for its effects, by multiprocessing's forkserver only.
"""

import gc

from taas_magic.remote import imported as imported
from taas_magic.remote.shell import RankShell


def preload() -> None:
    """Makes the ranks' shell."""
    RankShell.prepare()
    # a collection in a fork would write to, and so copy, every page that holds an object
    gc.collect()
    gc.freeze()
    gc.enable()


preload()
