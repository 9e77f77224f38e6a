"""Processes that are to begin as if nobody ran tests: their main module, and who forks them."""

import multiprocessing
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver

CONTEXT = multiprocessing.get_context("forkserver")

# One list for all, since a process has one forkserver: of two lists the later would hold alone.
CONTEXT.set_forkserver_preload(
    [
        *("torch", "numpy", "sqlite3", "taas_magic.store.guard"),
        *("taas_magic.host.fetcher", "tests.data.data_rig"),
    ]
)


@contextmanager
def plain_main() -> Iterator[None]:
    """Have an empty main module for the time of the block: what spawns a process looks at it.

    Nothing else in sys.modules is touched, since other threads import meanwhile.
    """
    own, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = own


def end_forkserver() -> None:
    """End this process's forkserver; whatever is started next starts it again."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # the stub has no private names
