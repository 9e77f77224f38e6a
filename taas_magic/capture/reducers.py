"""How objects travel that pickle takes by name, or not at all.

The notebook's classes, what functools and typing made of its functions, its streams, its namespace.
"""

import builtins
import functools
import sys
import typing
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any

from cloudpickle import cloudpickle as internals

from taas_magic.errors import CaptureError

_unfilled: set[str] = set()
_received: "weakref.WeakSet[type]" = weakref.WeakSet()


def reduce_by_value(cls: type, reduced: tuple[Any, ...], coming_home: bool) -> tuple[Any, ...]:
    """Turns cloudpickle's reduction of a class into ours.

    Args:
        cls: A class of the notebook.
        reduced: What cloudpickle makes of it.
        coming_home: Whether it goes back to the notebook that it may have come from.
    """
    make, args = reduced[:2]
    if make not in (internals._make_skeleton_class, internals._make_skeleton_enum):
        return reduced
    tracker_id = internals._get_or_create_tracker_id(cls)
    if coming_home and cls in _received:
        return _known_class, (tracker_id, cls.__qualname__)
    state = (tracker_id, reduced[2])
    return _make_class, (tracker_id, make, args), state, None, None, _fill_class


def _make_class(tracker_id: str, make: Callable[..., type], args: tuple[Any, ...]) -> type:
    """The class of that id if this process has it: a result that comes home finds its own."""
    known: type | None = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    if known is not None:
        return known
    _unfilled.add(tracker_id)
    return make(*args)


def _fill_class(cls: type, state: tuple[str, Any]) -> None:
    tracker_id, class_state = state
    if tracker_id in _unfilled:
        _unfilled.discard(tracker_id)
        internals._class_setstate(cls, class_state)
        _received.add(cls)


def _known_class(tracker_id: str, name: str) -> type:
    known: type | None = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    if known is None:
        raise CaptureError(
            f"the result holds `{name}`, a class of the notebook that started the run and of which "
            "this kernel knows nothing; load the run's payload first, or return a state_dict()"
        )
    return known


Reduced = tuple[Any, ...]

LruCache: Any = type(functools.lru_cache(lambda: None))

_single_dispatch = functools.singledispatch(lambda value: None)
_MADE_BY_SINGLE_DISPATCH = frozenset(vars(_single_dispatch)) - {"__wrapped__"}


def reduce_lru_cache(cached: Any) -> Reduced:
    """Reduces a cached function to the function and the cache's settings."""
    settings = cached.cache_parameters()
    state = {name: value for name, value in vars(cached).items() if name != "cache_parameters"}
    return make_lru_cache, (cached.__wrapped__, settings["maxsize"], settings["typed"]), state


def make_lru_cache(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def reduce_cached_property(prop: "functools.cached_property[Any]") -> Reduced:
    state = {name: value for name, value in vars(prop).items() if name != "lock"}
    return make_cached_property, (type(prop),), state


def make_cached_property(cls: Any) -> Any:
    """Makes a property that has nothing but its lock; the state brings the rest."""
    prop = cls.__new__(cls)
    functools.cached_property.__init__(prop, None)  # type: ignore[arg-type]
    return prop


def is_single_dispatch(value: Any) -> bool:
    """Whether `functools.singledispatch` made this function."""
    made: Any = _single_dispatch
    return isinstance(value, FunctionType) and value.__code__ is made.__code__


def reduce_single_dispatch(function: Any) -> Reduced:
    """Reduces a generic function to its default and its registered implementations."""
    names = [name for name in functools.WRAPPER_ASSIGNMENTS if hasattr(function, name)]
    attributes = {name: getattr(function, name) for name in names}
    attributes |= {n: v for n, v in vars(function).items() if n not in _MADE_BY_SINGLE_DISPATCH}
    state = attributes, dict(function.registry)
    return (
        functools.singledispatch,
        (function.__wrapped__,),
        state,
        None,
        None,
        fill_single_dispatch,
    )


def fill_single_dispatch(function: Any, state: tuple[dict[str, Any], dict[type, Any]]) -> None:
    attributes, implementations = state
    for name, value in attributes.items():
        setattr(function, name, value)
    for kind, implementation in implementations.items():
        function.register(kind, implementation)


def reduce_new_type(new_type: Any) -> Reduced:
    where = {"__module__": new_type.__module__, "__qualname__": new_type.__qualname__}
    return typing.NewType, (new_type.__name__, new_type.__supertype__), where


def reduce_type_parameter(parameter: Any) -> Reduced:
    return type(parameter), (parameter.__name__,)


REDUCERS: dict[type, Callable[[Any], Reduced]] = {
    typing.NewType: reduce_new_type,
    typing.ParamSpec: reduce_type_parameter,
}
if sys.version_info >= (3, 11):
    REDUCERS[typing.TypeVarTuple] = reduce_type_parameter


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


def stream_name(file: Any) -> str | None:
    """`stdout` or `stderr` if a file is that of this process, as Python or the kernel made it."""
    for stream in ("stdout", "stderr"):
        if file in (getattr(sys, stream), getattr(sys, f"__{stream}__")):
            return stream
        if type(file).__name__ == "OutStream" and file.name == stream:
            return stream
    return None


def reduce_file(file: Any) -> Any:
    stream = stream_name(file)
    if stream is not None:
        return _this_stream, (stream,)
    raise TypeError(f"cannot pickle {type(file).__name__!r} object: it is an open file")


def _this_stream(name: str) -> Any:
    return getattr(sys, name)


def this_shell() -> Any:
    from IPython import get_ipython

    return get_ipython()
