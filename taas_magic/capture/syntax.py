"""Parse Python source in several threads at the same time, without CPython's SystemError."""

import ast
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_lock = threading.Lock()
_TRIES = 5


def parse(source: str, filename: str = "<unknown>") -> ast.Module:
    """Parse Python source. Any thread may call this.

    While another thread parses, `ast.parse` of CPython 3.11 may raise SystemError ("AST constructor
    recursion depth mismatch"), because all threads count the depth in one variable. A lock prevents
    this error between callers of this function. Other code, such as the formatting of a traceback,
    parses without the lock, so this function retries after the error.

    Raises:
        SyntaxError: The source is not Python.
        ValueError: The source contains a null character.
    """
    with _lock:
        for _ in range(_TRIES - 1):
            with suppress(SystemError):
                return ast.parse(source, filename)
        return ast.parse(source, filename)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Show no warnings in the `with` block, such as the SyntaxWarnings of `compile`.

    The rank compiles the cell again, and then shows these warnings. Keep the block short: during
    the block, the warnings of all threads are hidden.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
