"""The path from a variable to the innermost thing in it that cannot be pickled."""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from taas_magic.errors import CaptureError

Probe = Callable[[Any], object]
_BUDGET_S = 5.0
_DEPTH = 40
_NAME_CHARS = 40
_ADVICE = {
    "generator": "make a list of it, or create it inside the cell",
    "async_generator": "create it inside the cell",
    "coroutine": "await it first, or create it inside the cell",
    "_DataLoaderIter": "pass the loader and call iter() inside the cell",
    "DataLoaderIter": "pass the loader and call iter() inside the cell",
    "socket": "connect inside the cell",
    "Connection": "connect inside the cell",
    "Cursor": "connect inside the cell",
    "Session": "connect inside the cell",
    "Client": "connect inside the cell",
    "Thread": "start it inside the cell",
    "Process": "start it inside the cell",
    "Popen": "start it inside the cell",
    "Executor": "create it inside the cell",
}
_IN_THE_CELL = "create it inside the cell (or delete the attribute)"


def refusal(
    name: str, value: Any, probe: Probe, error: BaseException, note: str = ""
) -> CaptureError:
    """Says what in `value` cannot travel.

    Args:
        name: The variable.
        value: Its value, which could not be pickled.
        probe: Pickles a value and raises where it cannot.
        error: What pickling `value` raised.
        note: Why the variable travels at all; shown in brackets.
    """
    path, offender = culprit(name, value, probe)
    kind = type_name(offender)
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    advice = _advice(offender)
    if advice is None:
        advice = f"{_IN_THE_CELL} (pickling it said: {type(error).__name__}: {_short(error)})"
    why = f" ({note})" if note else ""
    return CaptureError(
        f"`{path}` is {article} {kind} and cannot travel to the ranks{why}; {advice} and run again"
    )


def culprit(name: str, value: Any, dump: Probe) -> tuple[str, Any]:
    """Follows what cannot be pickled down to the innermost part that cannot.

    Args:
        name: The variable; the path starts with it.
        value: Something for which `dump` raises.
        dump: Pickles a value by the rules of the capture, or raises.

    Returns:
        The path (`config['a'][3].db`) and the offending object. Where time or depth run out,
        or only a copy made by pickling fails, the nearest part known to fail.
    """
    deadline = time.monotonic() + _BUDGET_S
    seen = {id(value)}
    kept = [value]  # an id is only unique while its object lives
    path = name
    for _ in range(_DEPTH):
        failing = _first_failing(value, dump, seen, kept, deadline)
        if failing is None:
            break
        step, value = failing
        path += step
    return path, value


def _first_failing(
    value: Any, dump: Probe, seen: set[int], kept: list[Any], deadline: float
) -> tuple[str, Any] | None:
    for step, child in _parts(value):
        if time.monotonic() > deadline:
            return None
        if id(child) in seen:
            continue
        seen.add(id(child))
        kept.append(child)
        if not _travels(child, dump):
            return step, child
    return None


def _travels(value: Any, dump: Probe) -> bool:
    try:
        dump(value)
    except Exception:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What pickling `value` goes through next, each with its step in a path."""
    match value:
        case dict() if type(value) is dict:
            yield from _items(value)
        case list() | tuple() if type(value) in (list, tuple):
            yield from ((f"[{index}]", element) for index, element in enumerate(value))
        case set() | frozenset():
            yield from ((".<element>", element) for element in value)
        case tuple() if hasattr(value, "_fields"):
            yield from (
                (f".{name}", field) for name, field in zip(value._fields, value, strict=True)
            )
        case functools.partial():
            yield ".func", value.func
            yield from ((f".args[{index}]", arg) for index, arg in enumerate(value.args))
            yield from ((f".keywords['{key}']", arg) for key, arg in value.keywords.items())
        case FunctionType():
            yield from _function_parts(value)
        case MethodType():
            yield from ((".__self__", value.__self__), (".__func__", value.__func__))
        case type():
            yield from ((f".{key}", item) for key, item in vars(value).items())
            yield from ((f".<base {base.__name__}>", base) for base in value.__bases__)
        case staticmethod() | classmethod():
            yield "", value.__func__
        case property():
            yield from (("", part) for part in (value.fget, value.fset, value.fdel) if part)
        case _:
            yield from _reduced_parts(value)


def _items(value: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, item in list(value.items()):
        yield f"[{_short(repr(key)) if isinstance(key, str | int) else '…'}]", item
        yield ".<key>", key


def _function_parts(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".<closure {name}>", cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
    defaults = function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    for name, value in zip(names[len(names) - len(defaults) :], defaults, strict=True):
        yield f".<default {name}>", value
    for name, value in (function.__kwdefaults__ or {}).items():
        yield f".<default {name}>", value
    yield from ((f".{name}", value) for name, value in vars(function).items())
    for name in code.co_names:
        if name in function.__globals__:
            yield f".<global {name}>", function.__globals__[name]


def _reduced_parts(value: Any) -> Iterator[tuple[str, Any]]:
    try:
        reduced = value.__reduce_ex__(5)
    except Exception:  # this very object refuses
        return
    if not isinstance(reduced, tuple):
        return
    _, args, state, listitems, dictitems, *_ = (*reduced, None, None, None, None)
    for attributes in state if isinstance(state, tuple) else (state,):
        yield from _attributes(attributes)
    entries: list[Any] = list(listitems or ())
    yield from ((f"[{index}]", entry) for index, entry in enumerate(entries))
    yield from _items(dict(dictitems or ()))
    for part in args or ():
        yield f".<{part.__name__ if isinstance(part, type) else 'made from'}>", part


def _attributes(state: Any) -> Iterator[tuple[str, Any]]:
    """Attributes as the user writes them: a torch module's children are attributes of it."""
    if not isinstance(state, dict):
        yield ".<state>", state
        return
    for name, value in state.items():
        if name in ("_modules", "_parameters", "_buffers") and isinstance(value, dict):
            yield from ((f".{child}", item) for child, item in value.items())
        else:
            yield f".{name}", value


def type_name(value: Any) -> str:
    kind = type(value)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"


def _advice(value: Any) -> str | None:
    names = [kind.__name__ for kind in type(value).__mro__]
    if "IOBase" in names or "_IOBase" in names:
        return "open it inside the cell"
    if any(name in ("lock", "RLock") for name in names):
        return _IN_THE_CELL
    known = itertools.product(names, _ADVICE.items())
    return next((advice for name, (end, advice) in known if name.endswith(end)), None)


def _short(text: object) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= 4 * _NAME_CHARS else line[: 4 * _NAME_CHARS] + "…"
