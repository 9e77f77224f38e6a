"""What belongs to a process and not to a value: its namespace, its streams, its shell.

In a pickle each is only a name; loading gives what the loading process has in its place.
"""

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_target: ContextVar[dict[str, Any] | None] = ContextVar("_target", default=None)


class NotebookNamespace(dict[str, Any]):
    """Stands for the notebook's namespace in a pickle; loads as the loading side's."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _current_namespace, ()


@contextmanager
def loading_into(namespace: dict[str, Any]) -> Iterator[None]:
    token = _target.set(namespace)
    try:
        yield
    finally:
        _target.reset(token)
        if namespace:  # cloudpickle leaves a dict where a namespace has the module
            namespace["__builtins__"] = builtins


def _current_namespace() -> dict[str, Any]:
    namespace = _target.get()
    assert namespace is not None, "only loads() and load_each() unpickle what dump() made"
    return namespace


def reduce_file(file: Any) -> Any:
    for stream in ("stdout", "stderr"):
        if file in (getattr(sys, stream), getattr(sys, f"__{stream}__")):
            return _this_stream, (stream,)
        if type(file).__name__ == "OutStream" and file.name == stream:
            return _this_stream, (stream,)
    raise TypeError(f"cannot pickle {type(file).__name__!r} object: it is an open file")


def _this_stream(name: str) -> Any:
    return getattr(sys, name)


def this_shell() -> Any:
    from IPython import get_ipython

    return get_ipython()
