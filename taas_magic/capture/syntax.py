"""Python's parser with a lock, for several threads."""

import ast
import threading

_lock = threading.Lock()


def parse(source: str, filename: str = "<unknown>") -> ast.Module:
    """Parse Python source. Any thread may call this.

    While another thread parses, `ast.parse` of CPython 3.11 may raise SystemError ("AST constructor
    recursion depth mismatch"), because all threads count the depth in one variable.

    Raises:
        SyntaxError: The source is not Python.
        ValueError: The source contains a null character.
    """
    with _lock:
        return ast.parse(source, filename)
