"""Find the innermost object in a variable's value that cannot be sent to a rank.

An object cannot be sent if pickle fails on the object, or if the object works only in the process
that made it.
"""

import functools
import inspect
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any, Literal

from taas_magic.capture.reducers import LruCache, is_single_dispatch
from taas_magic.errors import CaptureError

Probe = Callable[[Any], object]
Destination = Literal["ranks", "jobs", "notebook", "fetchers"]
"""Destination of a value.

Values of the notebook go to the `ranks`, or to the `jobs` of a farm. Results go to the `notebook`.
Registered loaders go to the `fetchers`.
"""

Advice = Mapping[str, tuple[str, ...]]
"""Texts of advice for the user, each with endings of class names.

The user gets a text if the name of an object's class has one of the text's endings. If several
texts match, the user gets the first of these texts.
"""

_BUDGET_S = 5.0
"""Maximum seconds that `find_culprit` searches for the part that cannot be pickled."""

_MAX_DEPTH = 40
"""Maximum number of steps in the path that `find_culprit` returns, such as `[3]` or `.db`."""

_NAME_CHARS = 40
_ADVICE: Advice = {
    "open it inside the cell": ("IOBase",),
    "create it inside the cell": ("async_generator", "Executor"),
    "make a list of it, or create it inside the cell": ("generator",),
    "await it first, or create it inside the cell": ("coroutine",),
    "pass the loader and call iter() inside the cell": ("DataLoaderIter",),
    "connect inside the cell": ("socket", "Connection", "Cursor", "Session", "Client"),
    "start it inside the cell": ("Thread", "Process", "Popen"),
    "define the operator inside the cell": ("CustomOpDef",),
}
_IN_THE_CELL = "create it inside the cell (or delete the attribute)"
_PROCESS_BOUND = (
    "it records the ranks that it found in the notebook, process 0 of 1, and every rank would use "
    "that; create it inside the cell"
)
_COMPILED = "apply torch.compile inside the cell, or define the function there"
_RESULT_ADVICE: Advice = {
    "make a list of what it yields": ("async_generator",),
    "make a list of it": ("generator",),
    "await it": ("coroutine",),
    "make a list of its batches": ("DataLoaderIter",),
}
_CREATE_IN_DATASET = (
    "set it to None here, and create it in the dataset's `__getitem__` or `__iter__` when it is "
    "None"
)
_SELECTS_SHARD = (
    "it selects one rank's share of the data, but taas-magic already divides the batches of a "
    "registered loader among the ranks: remove it (use shuffle=True instead of a "
    "DistributedSampler, the dataset before it was split, the loader before accelerate's prepare)"
)
_BOUND_TO_PROCESS = "it belongs to one process, but fetchers run a registered loader: remove it"
_PLAIN_RESULT = "return plain data instead (a list, a state_dict(), one of its attributes)"


def make_capture_error(
    name: str,
    value: Any,
    probe: Probe,
    error: BaseException,
    note: str = "",
    to: Destination = "ranks",
) -> CaptureError:
    """Return the error for a variable whose value cannot be sent.

    Search the value for the innermost part that cannot be sent (`find_culprit`). The message has
    the path to this part, the class of the part, the destination, and advice. The advice depends on
    the class and on the destination. If there is no advice for the class, the message has general
    advice and pickle's error. If the part is a widget, the message has only the path to the
    widget's `.value`.

    Args:
        name: Name of the variable.
        value: Value of the variable.
        probe: Function that pickles a value on trial, and raises if the value cannot be sent.
        error: The exception that pickling the variable raised.
        note: Reason why the variable is captured; may be empty. The message has the reason only if
            `to` is `ranks` or `jobs`.
        to: Destination to which the value was to be sent.
    """
    path, offender = find_culprit(name, value, probe)
    kind = type_name(offender)
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    raised = f" (pickle raised {type(error).__name__}: {_short(error)})"
    what = f"`{path}` is {article} {kind} and cannot be sent to the {to}"
    if _is_one_of(type(offender), _WIDGETS):
        return CaptureError(f"`{path}` is a widget; use `{path}.value`")
    names = [each.__name__ for each in type(offender).__mro__]
    if to == "notebook":
        advice = _advice_for_class(names, _RESULT_ADVICE) or _PLAIN_RESULT + raised
        return CaptureError(f"{what}; {advice}")
    if to == "fetchers":
        advice = _CREATE_IN_DATASET + raised
        if is_shard(type(offender)):
            advice = _SELECTS_SHARD
        elif is_process_bound(type(offender)):
            advice = _BOUND_TO_PROCESS
        return CaptureError(f"{what}; {advice}")
    why = f" ({note})" if note else ""
    return CaptureError(
        f"{what}{why}; {_advice(offender, names) or _IN_THE_CELL + raised} and run again"
    )


def find_culprit(name: str, value: Any, dump: Probe) -> tuple[str, Any]:
    """Search `value` for the innermost part that `dump` cannot pickle.

    Each step of the search goes from a value to the first part of this value that cannot be
    pickled. Parts that were tried before are skipped. The search ends at a value whose parts can
    all be pickled. The search also ends at a value whose class can never be sent, such as a thread.
    It ends at the latest after `_BUDGET_S` seconds or `_MAX_DEPTH` steps.

    Args:
        name: Name of the variable that has the value. The path starts with this name.
        value: The value, which cannot be pickled.
        dump: Function that pickles a value on trial, and raises if the value cannot be sent.

    Returns:
        The path to the part at which the search ended (`config['a'][3].db`), and this part.
    """
    deadline = time.monotonic() + _BUDGET_S
    seen = {id(value): value}  # an id is only unique while its object lives
    path = name
    for _ in range(_MAX_DEPTH):
        if is_process_bound(type(value)) or is_shard(type(value)) or _is_compiled(value):
            break  # the object itself is the culprit, not one of its parts
        if _is_one_of(type(value), _RUNNING_CLASSES):
            break
        for step, child in _parts(value):
            if time.monotonic() > deadline:
                return path, value
            if id(child) in seen:
                continue
            seen[id(child)] = child
            try:
                dump(child)
            except Exception:  # pickling runs the user's code: anything may be raised
                path, value = path + step, child
                break
        else:
            break
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path step, object) for each object that pickle would save as a part of `value`.

    A path step is written as in Python, such as `[3]` or `.db`. Containers, functions, methods,
    classes and properties have rules of their own. For any other object, yield the parts that its
    `__reduce_ex__` returns.
    """
    match value:
        case dict() if type(value) is dict:
            yield from _entries(value)
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
        case FunctionType() if is_single_dispatch(value):
            implementations: Any = value
            yield from (("", function) for function in implementations.registry.values())
        case FunctionType():
            yield from _function_parts(value)
        case LruCache():
            yield "", value.__wrapped__
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


def _entries(value: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, item in list(value.items()):
        yield f"[{_short(repr(key)) if isinstance(key, str | int) else '…'}]", item
        yield ".<key>", key


def _function_parts(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield (path step, object) for the closure, defaults, attributes and globals of a function.

    Only globals that the function's own code uses count. Functions that are defined inside the
    function are not searched.
    """
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".<closure {name}>", cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
    for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items():
        if parameter.default is not parameter.empty:
            yield f".<default {name}>", parameter.default
    yield from ((f".{name}", value) for name, value in vars(function).items())
    for name in code.co_names:
        if name in function.__globals__:
            yield f".<global {name}>", function.__globals__[name]


def _reduced_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path step, object) for the parts that an object's `__reduce_ex__` returns.

    Yield the attributes in the state first, then list elements, dict entries, and the constructor's
    arguments. Yield nothing if `__reduce_ex__` raises an error, or returns only the name of a
    global variable.
    """
    try:
        reduced = value.__reduce_ex__(5)
    except Exception:  # this object itself cannot be pickled
        return
    if not isinstance(reduced, tuple):
        return
    _, args, state, listitems, dictitems, *_ = (*reduced, None, None, None, None)
    for attributes in state if isinstance(state, tuple) else (state,):
        yield from _attributes_in_state(attributes)
    entries: list[Any] = list(listitems or ())
    yield from ((f"[{index}]", entry) for index, entry in enumerate(entries))
    yield from _entries(dict(dictitems or ()))
    for part in args or ():
        yield f".<{part.__name__ if isinstance(part, type) else 'made from'}>", part


def _attributes_in_state(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path step, value) for each attribute in the pickled state of an object.

    The children, parameters and buffers of a torch module appear as its attributes. A state that
    is not a dict is one part.
    """
    if not isinstance(state, dict):
        yield ".<state>", state
        return
    for name, value in state.items():
        if name in ("_modules", "_parameters", "_buffers") and isinstance(value, dict):
            yield from ((f".{child}", item) for child, item in value.items())
        else:
            yield f".{name}", value


def type_name(value: Any) -> str:
    """Return the name of a value's class, such as `numpy.ndarray`.

    The name has no module for built-in classes and classes of `__main__`.
    """
    kind = type(value)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"


def _advice(value: Any, names: list[str]) -> str | None:
    """Return the advice for an object that cannot be sent to the ranks; None if no advice fits.

    There is advice for objects that work only in the process that made them, for functions that
    `torch.compile` made, for locks, and for the classes in `_ADVICE`.

    Args:
        names: Names of the object's class and its base classes.
    """
    if is_process_bound(type(value)):
        return _PROCESS_BOUND
    if _is_compiled(value):
        return _COMPILED
    if any(name in ("lock", "RLock") for name in names):
        return _IN_THE_CELL
    return _advice_for_class(names, _ADVICE)


def _is_compiled(value: Any) -> bool:
    """Return whether `value` is a function that `torch.compile` made."""
    scope = value.__globals__ if isinstance(value, FunctionType) else {}
    return scope.get("__name__") == "torch._dynamo.eval_frame"


def _advice_for_class(names: list[str], advice: Advice) -> str | None:
    """Return the advice for an object by the names of its classes; None if there is no advice.

    A text applies to a class name that has one of the text's endings. The first name to which a
    text applies decides.

    Args:
        names: Names of the object's class and of its base classes, in the order of the MRO.
        advice: Texts, each with the endings of class names to which the text applies.
    """
    known = itertools.product(names, advice.items())
    return next((text for name, (text, ends) in known if name.endswith(ends)), None)


def _short(text: object) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= 4 * _NAME_CHARS else line[: 4 * _NAME_CHARS] + "…"


_PROCESS_BOUND_CLASSES = {
    "accelerate": {
        "AcceleratedOptimizer",
        "AcceleratedScheduler",
        "Accelerator",
        "AcceleratorState",
        "GradientState",
        "PartialState",
    },
    "deepspeed": {"DeepSpeedEngine"},
    "lightning": {"Fabric", "Trainer"},
    "lightning_fabric": {"Fabric"},
    "pytorch_lightning": {"Trainer"},
    "torch": {
        "DTensor",
        "DeviceMesh",
        "DistributedDataParallel",
        "FSDPModule",
        "FullyShardedDataParallel",
        "ProcessGroup",
        "Store",
        "ZeroRedundancyOptimizer",
    },
    "transformers": {"Trainer", "TrainingArguments"},
}
"""Classes whose instances work only in the process that made them, by top-level package.

The table has no module names, because libraries move these classes from module to module.
"""


_SHARD_SELECTORS = {
    "accelerate": {
        "BatchSamplerShard",
        "DataLoaderDispatcher",
        "DataLoaderShard",
        "IterableDatasetShard",
    },
    "torch": {"DistributedSampler"},
    "transformers": {"IterableDatasetShard", "ShardSampler"},
}
"""Classes whose instances select one rank's part of the data, by top-level package.

A registered loader must not contain such an instance, because fetchers already divide the loader's
batches among the ranks.
"""

_WIDGETS = {"ipywidgets": {"Widget"}}
_RUNNING_CLASSES = {
    **_WIDGETS,
    "threading": {"Barrier", "Condition", "Event", "Semaphore", "Thread"},
    "multiprocessing": {"BaseProcess"},
    "subprocess": {"Popen"},
    "queue": {"Queue"},
    "torch": {"CustomOpDef"},
    "concurrent": {"Executor", "Future"},
    "asyncio": {"AbstractEventLoop", "Future"},
}
"""Classes such as threads, processes, queues, widgets and torch's operators, by top-level package.

The error message names an instance of these classes as a whole, not the part of the instance that
cannot be pickled.
"""

_SHARD_MARKERS = {"datasets": {"DistributedConfig"}}
"""Classes whose instances mark a dataset as one rank's part of the data, by top-level package.

A registered loader must not contain such a dataset: fetchers already divide the batches.
"""


def is_process_bound(kind: type) -> bool:
    """Return whether instances of a class work correctly only in the process that made them.

    Also return True for a class that selects one rank's part of the data, such as
    DistributedSampler.
    """
    return _is_one_of(kind, _PROCESS_BOUND_CLASSES) or _is_one_of(kind, _SHARD_SELECTORS)


def is_shard(kind: type) -> bool:
    """Return whether instances of a class select or mark one rank's part of the data.

    A DistributedSampler selects a part. A DistributedConfig marks a dataset that is only a part.
    """
    return _is_one_of(kind, _SHARD_SELECTORS) or _is_one_of(kind, _SHARD_MARKERS)


def _is_one_of(kind: type, classes: Mapping[str, Collection[str]]) -> bool:
    return any(
        base.__name__ in classes.get(str(base.__module__).partition(".")[0], ())
        for base in kind.__mro__
    )
