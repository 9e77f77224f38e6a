"""An empty main module, for a process that is to begin as if nobody ran tests."""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def plain_main() -> Iterator[None]:
    """Has an empty main module for the time of the block: what spawns a process looks at it.

    Nothing else in sys.modules is touched, since other threads import meanwhile.
    """
    own, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = own
