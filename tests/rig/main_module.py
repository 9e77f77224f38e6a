"""A forkserver for the tests' processes, which start without pytest's main module."""

import multiprocessing
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver

CONTEXT = multiprocessing.get_context("forkserver")

# All tests use one list of modules, because a process has one forkserver.
CONTEXT.set_forkserver_preload(
    [
        *("torch", "numpy", "sqlite3", "taas_magic.store.guard"),
        *("taas_magic.host.fetcher", "tests.data.data_rig"),
    ]
)


@contextmanager
def plain_main() -> Iterator[None]:
    """Replace `__main__` by an empty module until the block ends.

    multiprocessing imports the parent's main module in a new process; here that would be pytest.
    The rest of sys.modules stays, because other threads may import modules meanwhile.
    """
    own, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = own


def end_forkserver() -> None:
    """Stop this process's forkserver; the next start of a process starts it again."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # the stub has no private names
