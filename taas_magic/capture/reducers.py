"""Reducers: functions that tell pickle how to save an object.

An object needs a reducer if pickle cannot save the object, would save only its name, or would save
too much of it. A reducer returns a value of the form that an object's `__reduce__` returns.
"""

import builtins
import copy
import copyreg
import ctypes
import dataclasses
import functools
import io
import os
import pickle
import sys
import types
import typing
import uuid
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from pathlib import PurePath
from pickle import PickleBuffer
from types import CellType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from taas_magic.errors import CaptureError

if TYPE_CHECKING:
    import torch

Reduced = tuple[Any, ...]

_ids: "weakref.WeakKeyDictionary[type, str]" = weakref.WeakKeyDictionary()
_classes: "weakref.WeakValueDictionary[str, type]" = weakref.WeakValueDictionary()
_received: "weakref.WeakSet[type]" = weakref.WeakSet()


def reduce_by_value(cls: type, reduced: Reduced, *, is_update: bool) -> Reduced:
    """Reduce a class of the notebook by value, together with a unique id.

    A process that has a class with this id uses its own class instead of making a copy. So objects
    that return to the notebook have the notebook's class. This function also saves what cloudpickle
    would lose: `__slots__`, the order of the attributes, and the attributes of an Enum's members.
    The class is registered by its id in this process.

    Args:
        reduced: The class as cloudpickle reduced it. For a built-in type such as NoneType, this is
            also the result.
        is_update: Whether a process that has the class already must set the attributes again.
    """
    if len(reduced) < 6:  # NoneType and similar built-in types are looked up, not made
        return reduced
    class_id = _ids.setdefault(cls, uuid.uuid4().hex)
    _classes[class_id] = cls
    make, args, state, _, _, fill = reduced
    names = cls.__members__ if issubclass(cls, Enum) else {}
    if issubclass(cls, Enum):
        make = _make_enum
        parts = {name: _parts_of(member) for name, member in names.items()}
        args = type(cls), cls.__name__, cls.__bases__, parts, cls.__qualname__
    else:
        args[3]["__qualname__"] = cls.__qualname__  # cloudpickle sends it only for an Enum
    if "__slots__" in vars(cls) and not issubclass(cls, tuple | Enum):
        # cloudpickle would set `__slots__` only after the class is made. That has no effect.
        args[3]["__slots__"] = vars(cls)["__slots__"]
    # This order is the class's own: cloudpickle sorts by name. An alias in an Enum is no attribute.
    ordered = {name: state[0][name] for name in vars(cls) if name in state[0]} | state[0]
    state = ({name: each for name, each in ordered.items() if name not in names}, *state[1:])
    members = {
        name: {n: v for n, v in vars(member).items() if n not in _SET_BY_ENUM}
        for name, member in names.items()
    }
    saved = class_id, fill, state, is_update, members
    return _make_class, (class_id, make, args), saved, None, None, _fill_class


def reduce_to_id(cls: type) -> Reduced:
    """Reduce a class to its id, for a digest that must not depend on the class's attributes."""
    return _known_class, (_ids.setdefault(cls, uuid.uuid4().hex), cls.__qualname__)


_SET_BY_ENUM = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_"})
"""Attributes that `Enum` sets on each member."""

_Parts = tuple[type, tuple[Any, ...], Any]
"""Parts of an Enum's member: base class with the data, arguments of its `__new__`, and value."""


def _parts_of(member: Any) -> _Parts:
    cls, base, value = type(member), type(member)._member_type_, member._value_
    if base is object:
        return base, (), value
    make, args, *_ = base.__reduce_ex__(member, 4)
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]
        return base, args[1:], value
    return base, args if make is cls else (value,), value


def _make_enum(
    meta: Any, name: str, bases: tuple[type, ...], members: dict[str, _Parts], qualname: str
) -> type[Enum]:
    """Make an Enum with its members, but without its methods and other attributes.

    The methods `__new__` and `__init__` of the Enum have run in the notebook. They do not run again
    here, because they would need the arguments that the user wrote. Methods that replace them are
    removed after they have made the members.

    Args:
        members: Parts of each member, by its name. A further name of a member, an alias, has the
            same value.
    """
    parts = iter(members.values())

    def make_member(cls: Any, *args: Any) -> Any:
        base: Any
        base, own_args, value = next(parts)
        member = base.__new__(cls, *own_args)
        member._value_ = value
        return member

    namespace: Any = type(Enum).__prepare__(name, bases)
    namespace["__qualname__"] = qualname
    namespace["__new__"], namespace["__init__"] = make_member, lambda *args: None
    namespace["__reduce_ex__"] = Enum.__reduce_ex__  # else, Python 3.10 may replace it
    for member_name in members:
        namespace[member_name] = member_name
    made: type[Enum] = _imported_metaclass(meta).__new__(meta, name, bases, namespace)
    for temporary in ("__new_member__", "__init__", "__reduce_ex__"):
        type.__delattr__(made, temporary)
    return made


def _make_class(class_id: str, make: Callable[..., type], args: tuple[Any, ...]) -> type:
    """Return the class with this id; if this process does not have the class, make it.

    A class that this process has must not be made again: objects would then have two different
    classes of the same name.

    The notebook's own metaclasses and base classes have run their code for this class in the
    notebook. The effects of this code on the notebook's objects are pickled, too. So run only the
    code of imported metaclasses and base classes here.

    Args:
        make: Function that makes a class without attributes: cloudpickle's or, for an Enum,
            `_make_enum`.
        args: Arguments of `make`. For a class that is no Enum, these are the metaclass, the name,
            the bases, the first attributes, and values for cloudpickle.
    """
    known = _classes.get(class_id)
    if known is not None:
        return known
    meta, name, bases, attributes, *_ = args
    with _no_subclass_hooks(bases):
        if meta not in _ids or make is _make_enum:
            return make(*args)
        imported = _imported_metaclass(meta)
        resolved = types.resolve_bases(bases)
        originals = {"__orig_bases__": bases} if resolved is not bases else {}
        namespace = {**attributes, **originals}
        made: type = imported.__new__(meta, name, resolved, namespace)
        imported.__init__(made, name, resolved, namespace)
        return made


def _imported_metaclass(meta: Any) -> Any:
    """Return `meta` or, if the notebook defines `meta`, its first base class that is imported."""
    return next(kind for kind in meta.__mro__ if kind not in _ids)


_HOOK = "__init_subclass__"


@contextmanager
def _no_subclass_hooks(bases: Sequence[Any]) -> Iterator[None]:
    """Make `__init_subclass__` of the notebook's classes only call that of imported base classes.

    This holds during the `with` block.

    Args:
        bases: Bases of the class that is made in the block. Only the methods of these classes, and
            of their own bases, are replaced.
    """
    kinds = {kind for base in types.resolve_bases(bases) for kind in base.__mro__ if kind in _ids}
    hooks = {kind: vars(kind)[_HOOK] for kind in kinds if _HOOK in vars(kind)}
    for kind in hooks:
        type.__setattr__(kind, _HOOK, _next_hook(kind))
    try:
        yield
    finally:
        for kind, hook in hooks.items():
            type.__setattr__(kind, _HOOK, hook)


def _next_hook(kind: Any) -> Any:
    """Return an `__init_subclass__` for `kind` that only calls the one of the next base class."""

    def call_next(cls: type[Any], /, **options: Any) -> None:
        super(kind, cls).__init_subclass__()

    return classmethod(call_next)


def _fill_class(
    cls: type,
    saved: tuple[str, Callable[[type, Any], None], Any, bool, Mapping[str, dict[str, Any]]],
) -> None:
    """Set the attributes of a class that `_make_class` returned, and register the class by its id.

    If this process had the class before, set the attributes only if the sender asks for an update.
    An Enum that this process had before stays unchanged, because its members cannot be set again.

    Args:
        saved: Five items:

            - id of the class
            - cloudpickle's function that sets the attributes of a class
            - the attributes, as this function expects them
            - whether the sender asks for an update
            - for an Enum, the attributes of each member, by name of the member
    """
    class_id, fill, state, is_update, members = saved
    if cls not in _ids:
        fill(cls, state)
        _ids[cls], _classes[class_id] = class_id, cls
        _received.add(cls)
        for name, attributes in members.items():
            vars(cls.__members__[name]).update(attributes)  # type: ignore[attr-defined]
    elif is_update and not issubclass(cls, Enum):
        fill(cls, state)


Copy = tuple[bytes, Sequence[PickleBuffer]]
"""Pickle of a class or variable of the notebook, with the pickle's out-of-band buffers.

A result contains such copies for kernels that load the result but did not start the run.
"""


def is_received(cls: type) -> bool:
    """Return whether this process (a rank) made a class by unpickling a class of the notebook."""
    return cls in _received


def reduce_received(cls: type, fallback: Copy | None) -> Reduced:
    """Reduce a class in a result to its id, because the class came from the notebook.

    Args:
        fallback: Pickle of the class, for a kernel that does not have the class; None if it cannot
            be pickled.
    """
    return _known_class, (_ids[cls], cls.__qualname__, fallback)


def _known_class(class_id: str, name: str, fallback: Copy | None = None) -> type:
    """Return the class of this process that has an id; if there is no such class, load the copy.

    Args:
        class_id: The id of the class.
        name: Name of the class, for the error message.
        fallback: Pickle of the class; None if there is no copy.

    Raises:
        CaptureError: This process does not have the class, and there is no copy.
    """
    known = _classes.get(class_id)
    if known is not None:
        return known
    if fallback is None:
        raise CaptureError(
            f"the result contains `{name}`, a class of the notebook that started the run, which "
            "this kernel does not have; return a state_dict() or other plain data"
        )
    copied: type = _load_copy(fallback)
    return copied


def _load_copy(fallback: Copy) -> Any:
    data, buffers = fallback
    return pickle.loads(data, buffers=buffers)


def make_cell() -> CellType:
    """Make an empty closure cell."""
    return CellType()


Contents = Sequence[tuple[CellType, Any]]


def fill_cell(made: CellType, contents: Contents) -> None:
    """Set the content of a closure cell that pickle has just made. Called by pickle.

    Args:
        made: The cell. Not used, because `contents` has the cell, too.
        contents: One pair (cell, content); empty if the cell has no content.
    """
    for cell, content in contents:
        cell.cell_contents = content


def fill_function(
    function: FunctionType, saved: tuple[Callable[[Any, Any], None], Any, Contents]
) -> None:
    """Set the state of a function that pickle has just made, and set its closure cells.

    The pickled globals are added to the function's globals. A global variable that exists already
    keeps its value, because the function's globals may be the notebook's namespace.

    Args:
        saved: Three items. First, cloudpickle's function that sets a function's state. Second, the
            pickled state. Third, pairs of a closure cell and its content.
    """
    fill, (attributes, slots), contents = saved
    for cell, content in contents:
        cell.cell_contents = content
    for name, value in slots["__globals__"].items():
        function.__globals__.setdefault(name, value)
    fill(function, (attributes, {**slots, "__globals__": {}}))


LruCache: Any = type(functools.lru_cache(lambda: None))

_single_dispatch = functools.singledispatch(lambda value: None)
_MADE_BY_SINGLE_DISPATCH = frozenset(vars(_single_dispatch)) - {"__wrapped__"}


def reduce_lru_cache(cached: Any) -> Reduced:
    """Reduce a function with `functools.lru_cache` to the bare function and the cache's settings.

    The cached results are not pickled.
    """
    settings = cached.cache_parameters()
    state = {name: value for name, value in vars(cached).items() if name != "cache_parameters"}
    return _make_lru_cache, (cached.__wrapped__, settings["maxsize"], settings["typed"]), state


def _make_lru_cache(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


ATTRIBUTES_MADE_BY_CONSTRUCTOR: dict[type, Collection[str]] = {
    functools.cached_property: {"lock"},
    functools.singledispatchmethod: vars(functools.singledispatchmethod(len)).keys()
    - {"dispatcher", "func"},
}
"""Attributes of a descriptor that cannot be pickled, by type of the descriptor.

The attributes are a lock (Python 3.10, 3.11) and a cache of weak references (Python 3.13). When a
descriptor is loaded, the constructor of its type makes these attributes anew.
"""


def reduce_descriptor(kind: type, descriptor: Any) -> Reduced:
    """Reduce a descriptor, without the attributes that its constructor makes anew at loading.

    These attributes cannot be pickled (`ATTRIBUTES_MADE_BY_CONSTRUCTOR`). An example of a
    descriptor is a `functools.cached_property`.

    Args:
        kind: Key of the descriptor in `ATTRIBUTES_MADE_BY_CONSTRUCTOR`: its class or base class.
    """
    state = {
        name: v
        for name, v in vars(descriptor).items()
        if name not in ATTRIBUTES_MADE_BY_CONSTRUCTOR[kind]
    }
    return _make_descriptor, (type(descriptor), kind), state


def _make_descriptor(cls: Any, kind: Any) -> Any:
    """Make a descriptor with only the attributes that its constructor makes."""
    made = cls.__new__(cls)
    kind.__init__(made, len)
    return made


def is_single_dispatch(value: Any) -> bool:
    """Return whether `functools.singledispatch` made this function."""
    made: Any = _single_dispatch
    return isinstance(value, FunctionType) and value.__code__ is made.__code__


def reduce_single_dispatch(function: Any) -> Reduced:
    """Reduce a function of `functools.singledispatch` to its implementations, by argument class."""
    names = [name for name in functools.WRAPPER_ASSIGNMENTS if hasattr(function, name)]
    attributes = {name: getattr(function, name) for name in names}
    attributes |= {n: v for n, v in vars(function).items() if n not in _MADE_BY_SINGLE_DISPATCH}
    state = attributes, dict(function.registry)
    made = functools.singledispatch, (function.__wrapped__,)
    return *made, state, None, None, _fill_single_dispatch


def _fill_single_dispatch(function: Any, state: tuple[dict[str, Any], dict[type, Any]]) -> None:
    attributes, implementations = state
    for name, value in attributes.items():
        setattr(function, name, value)
    for kind, implementation in implementations.items():
        function.register(kind, implementation)


def reduce_dict(value: Any) -> Any:
    """Reduce an instance of a dict's subclass that is its own `__dict__`.

    pickle's own rules would copy the items to a separate `__dict__`. Return NotImplemented for any
    other dict, and if the class decides itself how its objects are pickled.
    """
    kind: Any = type(value)
    plain: Any = object
    has_rule = kind.__reduce__ is not plain.__reduce__ or hasattr(kind, "__setstate__")
    if has_rule or kind.__reduce_ex__ is not plain.__reduce_ex__:
        return NotImplemented
    if not kind.__dictoffset__ or vars(value) is not value:
        return NotImplemented
    make, args, _, _, items = value.__reduce_ex__(5)
    return make, args, (), None, items, _set_own_dict


def _set_own_dict(value: Any, state: tuple[()]) -> None:
    value.__dict__ = value


def _reduce_new_type(new_type: Any) -> Reduced:
    where = {"__module__": new_type.__module__, "__qualname__": new_type.__qualname__}
    return typing.NewType, (new_type.__name__, new_type.__supertype__), where


def _reduce_type_parameter(parameter: Any) -> Reduced:
    return type(parameter), (parameter.__name__,)


REDUCERS: dict[type, Callable[[Any], Reduced]] = {
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_type_parameter,
}
REDUCERS[type(dataclasses.MISSING)] = lambda missing: (getattr, (dataclasses, "MISSING"))
if sys.version_info >= (3, 11):
    REDUCERS[typing.TypeVarTuple] = _reduce_type_parameter


_target: ContextVar[dict[str, Any] | None] = ContextVar("_target", default=None)


class NotebookNamespace(dict[str, Any]):
    """Placeholder for the notebook's namespace in a pickle.

    When the pickle is loaded, the namespace given to `loading_into` replaces the placeholder.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _current_namespace, ()


@contextmanager
def loading_into(namespace: dict[str, Any]) -> Iterator[None]:
    """Make unpickling in the block replace each `NotebookNamespace` by `namespace`.

    cloudpickle may replace `__builtins__` in the namespace by a dict. So after the block, set
    `__builtins__` to the module again, unless the namespace is empty.
    """
    token = _target.set(namespace)
    try:
        yield
    finally:
        _target.reset(token)
        if namespace:  # cloudpickle sets `__builtins__` to a dict; a namespace has the module
            namespace["__builtins__"] = builtins


def _current_namespace() -> dict[str, Any]:
    namespace = _target.get()
    assert namespace is not None, "use loads() or load_each() to unpickle the output of dump()"
    return namespace


def notebooks_own(name: str, fallback: Copy | None = None) -> Any:
    """Return the variable `name` of the namespace into which a pickle is loaded. Called by pickle.

    A pickle contains only the name of an object if the loading process should have the object
    already. For example, the kernel loads a result that contains a function of the notebook. Or a
    rank of a session loads a value that needs a class from an earlier cell.

    Args:
        name: Name of the variable.
        fallback: Pickle of the object; None if there is no copy. The object is loaded from this
            pickle if the namespace does not have the variable, or has another function.

    Raises:
        CaptureError: The namespace does not have the variable, and there is no copy.
    """
    namespace = _current_namespace()
    if fallback is None:
        if name not in namespace:
            raise CaptureError(f"the result uses `{name}`, which the notebook no longer has")
        return namespace[name]
    copy = _load_copy(fallback)
    return namespace[name] if _is_copy(copy, namespace.get(name)) else copy


def _is_copy(copy: Any, own: Any) -> bool:
    """Return whether a loaded object is a copy of the notebook's object `own`.

    Two objects of different types are no copies. For functions, compare the code, and default
    values that are numbers or texts. Other objects, such as sentinels, are not compared further.
    """
    if type(copy) is not type(own):
        return False
    if isinstance(copy, LruCache):
        return _is_copy(copy.__wrapped__, own.__wrapped__)
    if not isinstance(copy, FunctionType):
        return True
    is_same = is_same_code(copy.__code__, own.__code__)
    return is_same and _plain_defaults(copy) == _plain_defaults(own)


def _plain_defaults(function: FunctionType) -> list[str]:
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [repr(each) for each in defaults if isinstance(each, int | float | str | bytes | None)]


def is_same_code(one: CodeType, other: CodeType) -> bool:
    """Return whether the code of two functions is equal, except for line numbers."""
    return _without_lines(one) == _without_lines(other)


def _without_lines(code: CodeType) -> CodeType:
    constants = (_without_lines(it) if isinstance(it, CodeType) else it for it in code.co_consts)
    return code.replace(co_firstlineno=1, co_linetable=b"", co_consts=tuple(constants))


def stream_name(file: Any) -> str | None:
    """Return "stdout" if `file` is the stdout of this process, "stderr" for its stderr, else None.

    In a notebook, the objects by which ipykernel replaces these two streams count, too.
    """
    for stream in ("stdout", "stderr"):
        if file in (getattr(sys, stream), getattr(sys, f"__{stream}__")):
            return stream
        if type(file).__name__ == "OutStream" and file.name == stream:
            return stream
    return None


def reduce_file(file: Any) -> Any:
    """Reduce the stream stdout or stderr to its name; the loading process uses its own stream.

    Raises:
        TypeError: The file is any other open file.
    """
    stream = stream_name(file)
    if stream is not None:
        return getattr, (sys, stream)
    raise TypeError(f"cannot pickle {type(file).__name__!r} object: it is an open file")


def this_shell() -> Any:
    """Return the IPython shell of the loading process, or None if the process has no shell."""
    from IPython import get_ipython

    return get_ipython()


# Torch does not use out-of-band buffers: it writes every storage into the pickle. Torch rebuilds a
# tensor from a typed storage, and a typed storage from an untyped one. Only the untyped storage has
# bytes, so these bytes become a buffer. Views that share a storage still share it. The functions
# below are called only in processes that have imported torch already.

Storages = MutableMapping[int, "torch.UntypedStorage"]


def _reduce_untyped(storage: "torch.UntypedStorage", storages: Storages) -> Reduced:
    """Reduce a storage to a buffer over its bytes. A storage on a GPU is copied to the CPU.

    If `storages` already has another Python object of the same storage, reduce to that object.

    Args:
        storages: Storages in this pickle, by their ids (`storage_id`). This function adds
            `storage`.
    """
    first = storages.setdefault(storage._cdata, storage)
    if first is not storage:
        return _same, (first,)
    device = storage.device.type
    held = storage if device == "cpu" else storage.cpu()  # type: ignore[no-untyped-call]
    return rebuild_untyped, (PickleBuffer(bytes_of_storage(held)), device)


def _reduce_typed(storage: "torch.TypedStorage", storages: Storages) -> Reduced:
    untyped = storage._untyped_storage
    return rebuild_typed, (storages.setdefault(untyped._cdata, untyped), storage.dtype)


def _reduce_tensor(tensor: "torch.Tensor") -> Any:
    """Reduce a tensor that torch's own reducer would save incorrectly; NotImplemented for others.

    There are two such kinds of tensors. For a dtype without a typed storage class, such as uint16,
    torch pickles an untyped storage, but can rebuild the tensor only from a typed storage. An
    instance of a subclass of `torch.nn.Parameter` would become a plain parameter.
    """
    import torch

    kind, own = type(tensor), torch.nn.Parameter
    rebuild, args, *_ = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    if issubclass(kind, own) and kind is not own and kind.__reduce_ex__ is own.__reduce_ex__:
        return _rebuild_parameter, (kind, rebuild, args)
    if not args or not isinstance(args[0], torch.UntypedStorage):
        return NotImplemented
    return rebuild, (rebuild_typed(args[0], torch.uint8), *args[1:])


def _reduce_tensor_with_hooks(tensor: "torch.Tensor") -> Any:
    """Reduce a tensor with its backward hooks and its hooks after `.grad` is set.

    Torch itself leaves out the hooks, with or without a warning. These hooks stay left out:

    - hooks of an installed library such as wandb, which often need objects of the notebook's
      process;
    - hooks that torch's `unserializable_hook` has marked;
    - hooks of a tensor that is not a leaf, because the tensor's graph is left out as well;
    - hooks of a tensor whose class decides itself how its state is pickled.

    If no hook remains, return the result of `_reduce_tensor`, which may be NotImplemented. The hook
    ids are reserved as in `_with_hook_ids`.
    """
    kinds = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    hooks = [_hooks_to_send(kind) for kind in kinds]
    if not any(hooks) or not (tensor.is_leaf and tensor.requires_grad):
        return _reduce_tensor(tensor)
    from torch.utils.hooks import RemovableHandle

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it leaves out the hooks
        reduced = _reduce_tensor(tensor)
        if reduced is NotImplemented:
            reduced = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    if len(reduced) != 2:
        return reduced
    return *reduced, (*hooks, RemovableHandle.next_id), None, None, _fill_tensor_hooks


def _hooks_to_send(hooks: Mapping[int, Any] | None) -> OrderedDict[int, Any]:
    return OrderedDict(
        (number, hook)
        for number, hook in (hooks or {}).items()
        if not (getattr(hook, "__torch_unserializable__", False) or _is_of_library(hook))
    )


def _is_of_library(function: Any) -> bool:
    """Return whether a function, or the class of a callable object, is in an installed package."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    path = PurePath(getattr(module, "__file__", None) or "")
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _fill_tensor_hooks(
    tensor: "torch.Tensor",
    saved: tuple[OrderedDict[int, Any], OrderedDict[int, Any], int],
) -> None:
    backward_hooks, after_grad_hooks, next_id = saved
    _reserve_hook_ids(next_id)
    if backward_hooks:
        tensor._backward_hooks = backward_hooks
    if after_grad_hooks:
        tensor._post_accumulate_grad_hooks = after_grad_hooks


def _rebuild_parameter(kind: type, rebuild: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    made = rebuild(*args)
    made.__class__ = kind
    return made


def rebuild_untyped(buffer: Any, device: str) -> "torch.UntypedStorage":
    """Rebuild a storage from its bytes. On the CPU, the storage uses the memory of `buffer`.

    Args:
        device: Type of the original storage's device, "cpu" or "cuda". `target_device` chooses the
            device of the rebuilt storage.
    """
    import torch

    empty = memoryview(buffer).nbytes == 0  # torch.frombuffer refuses empty buffers
    host = torch.empty(0, device="cpu") if empty else torch.frombuffer(buffer, dtype=torch.uint8)
    return host.to(target_device(device)).untyped_storage()


def rebuild_typed(untyped: "torch.UntypedStorage", dtype: "torch.dtype") -> "torch.TypedStorage":
    """Make a typed storage that uses the memory of an untyped storage, without copying."""
    import torch

    return torch.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=untyped, dtype=dtype, _internal=True
    )


def target_device(device: str) -> str:
    """Return this process's device for a value that was pickled on `device`.

    Args:
        device: Type of the device of the pickled value, such as "cpu" or "cuda".

    Returns:
        "cpu" if `device` is not "cuda", or if this process can use no GPU. Otherwise, in a rank:
        the rank's GPU. In any other process: the current GPU if the process has already used CUDA,
        else "cpu", because most notebooks leave the memory of the GPUs to the ranks.
    """
    import torch

    if device != "cuda" or not torch.cuda.is_available():
        return "cpu"
    if (local_rank := os.environ.get("LOCAL_RANK")) is not None:
        return f"cuda:{int(local_rank) % torch.cuda.device_count()}"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return f"cuda:{torch.cuda.current_device()}"
    return "cpu"


def _rebuild_generator(device: str, state: "torch.Tensor") -> "torch.Generator":
    """Make a random generator on this process's device, and set the pickled state.

    If the pickled generator was on another type of device, its state does not fit. Then the new
    generator keeps torch's initial state.
    """
    import torch

    target = target_device(device)
    generator = torch.Generator(target)
    if target.partition(":")[0] == device:
        generator.set_state(state)
    return generator


def reduce_without_iterator(loader: Any) -> Any:
    """Reduce a DataLoader without its iterator, which `persistent_workers` keeps between epochs.

    The iterator has worker processes, so it cannot be pickled. If the loader has no iterator,
    return NotImplemented.
    """
    if getattr(loader, "_iterator", None) is None:
        return NotImplemented
    reduced: Reduced = loader.__reduce_ex__(5)
    state = {**reduced[2], "_iterator": None}
    return (*reduced[:2], state, *reduced[3:])


def reduce_array(array: Any) -> Any:
    """Reduce an array of a user's subclass of `numpy.ndarray`, and keep the array's attributes.

    numpy's own `__reduce__` would lose the attributes. Memory maps, arrays without attributes, and
    arrays whose class has a `__reduce__` of its own, are left to numpy.
    """
    import numpy

    kind: Any = type(array)
    plain: Any = numpy.ndarray
    is_numpys = kind.__reduce__ is plain.__reduce__ and kind.__reduce_ex__ is plain.__reduce_ex__
    attributes = getattr(array, "__dict__", None)
    if not attributes or not is_numpys or isinstance(array, numpy.memmap):
        return NotImplemented
    make, args, state = array.__reduce_ex__(5)
    return make, args, (state, attributes), None, None, _fill_array


def _fill_array(array: Any, saved: tuple[Any, dict[str, Any]]) -> None:
    state, attributes = saved
    array.__setstate__(state)
    vars(array).update(attributes)


def _reduce_torch_name(value: Any) -> Reduced:
    """Reduce an object such as `torch.channels_last` to its name in torch.

    Torch itself would save the object as a name in the first imported module that contains the
    object. That module may be the notebook, which ranks cannot import.
    """
    import torch

    return getattr, (torch, str(value).removeprefix("torch."))


def _reduce_script(script: Any) -> Reduced:
    """Reduce a module or function of `torch.jit` to the bytes that `torch.jit.save` writes.

    Also save the parameters and buffers of a module as tensors, so that the loaded module shares
    them with other loaded objects, such as its optimizer. Also save a type of device, such as
    "cuda": the type of the device of the first of these tensors or, without tensors, "cpu". From
    this type, the loading process chooses the device (`target_device`).
    """
    import torch

    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user has already seen that torch.jit is deprecated
        torch.jit.save(script, file)
    tensors: dict[str, torch.Tensor] = {}
    if isinstance(script, torch.jit.ScriptModule):
        tensors.update(script.named_parameters(remove_duplicate=False))
        tensors.update(script.named_buffers(remove_duplicate=False))
    device = next((each.device.type for each in tensors.values()), "cpu")
    return _rebuild_script, (file.getvalue(), device), tensors, None, None, _fill_script


def _rebuild_script(data: bytes, device: str) -> Any:
    """Load a module or function of `torch.jit`.

    For a function, the result is a module whose call runs the function, because torch loads
    functions in this form.

    Args:
        data: Bytes that `torch.jit.save` wrote.
        device: Type of the original object's device, "cpu" or "cuda" (`target_device`).
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        where = target_device(device)
        return torch.jit.load(io.BytesIO(data), map_location=where)  # type: ignore[no-untyped-call]


def _fill_script(script: Any, tensors: dict[str, "torch.Tensor"]) -> None:
    """Set the parameters and buffers of a loaded module of `torch.jit`, by their dotted names."""
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        setattr(functools.reduce(getattr, path, script), last, tensor)


def torch_reducers(
    storages: Storages, *, keeps_hooks: bool
) -> dict[type, Callable[[Any], Any] | None]:
    """Return the reducers of torch's classes, in the order in which they are tried.

    Args:
        storages: Storages in the pickle, by id. The reducers of storages add to this dict.
        keeps_hooks: Whether to pickle the hooks of tensors. Pass False for a result: the hooks that
            libraries register in a rank often need objects that only exist there.
    """
    import torch.optim.lr_scheduler
    import torch.utils.data

    return {
        torch.optim.Optimizer: _reduce_optimizer,
        torch.optim.lr_scheduler.LRScheduler: _reduce_scheduler,
        torch.Tensor: _reduce_tensor_with_hooks if keeps_hooks else _reduce_tensor,
        torch.UntypedStorage: lambda storage: _reduce_untyped(storage, storages),
        torch.TypedStorage: lambda storage: _reduce_typed(storage, storages),
        torch.Generator: lambda it: (_rebuild_generator, (it.device.type, it.get_state())),
        torch.utils.data.DataLoader: reduce_without_iterator,
        torch.memory_format: _reduce_torch_name,
        torch.qscheme: _reduce_torch_name,
        torch.jit.ScriptModule: _reduce_script,
        torch.jit.ScriptFunction: _reduce_script,
        torch.nn.Module: _reduce_module,
    }


def _reduce_module(module: Any) -> Any:
    """Reduce a module with parametrizations, such as weight norm, or with hooks.

    Torch gives each module with parametrizations a class of its own, which refuses to be pickled.
    So save the class that the module had before, the state that this class pickles, and the names
    of the parametrized tensors. For a module with hooks, `_with_hook_ids` says what is added. Leave
    all other modules to torch.
    """
    from torch.nn.utils import parametrize
    from torch.utils.hooks import RemovableHandle

    if not parametrize.is_parametrized(module):
        found = (each for name, each in vars(module).items() if name.endswith("hooks"))
        has_hooks = any(isinstance(each, dict) and each for each in found)
        return _with_hook_ids(module.__reduce_ex__(5)) if has_hooks else NotImplemented
    kind: Any = parametrize.type_before_parametrizations(module)
    saved = kind.__getstate__(module), list(module.parametrizations), RemovableHandle.next_id
    return kind.__new__, (kind,), saved, None, None, _fill_parametrized


def _fill_parametrized(module: Any, saved: tuple[Any, list[str], int]) -> None:
    """Set the state of a module that pickle has just made, and register its parametrizations.

    Registering temporary parametrizations lets torch make the module's class. Afterwards, the
    pickled parametrizations replace the temporary ones.
    """
    import torch
    from torch.nn.utils import parametrize

    own, names, next_id = saved
    _reserve_hook_ids(next_id)
    module.__setstate__(own)
    parametrizations = module.parametrizations
    del module.parametrizations
    for name in names:  # creates the class and its properties; the empty parameters are temporary
        module.register_parameter(name, torch.nn.Parameter(torch.empty(0)))
        parametrize.register_parametrization(module, name, torch.nn.Identity(), unsafe=True)
    module.parametrizations = parametrizations


def _reduce_optimizer(optimizer: Any) -> Any:
    """Reduce an optimizer with its hooks and with the attributes of its own class.

    Torch itself would save only `defaults`, `state` and `param_groups`. Leave out the method `step`
    of a learning rate scheduler (`_reduce_scheduler`). If the optimizer's class decides itself how
    its objects are pickled, return NotImplemented.
    """
    import torch

    rules = ("__getstate__", "__reduce__", "__reduce_ex__")
    if any(getattr(type(optimizer), it) is not getattr(torch.optim.Optimizer, it) for it in rules):
        return NotImplemented
    make, args, state = optimizer.__reduce_ex__(5)[:3]
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}
    return _with_hook_ids((make, args, own | state))


def _with_hook_ids(reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add to a reduced module or optimizer that hooks of the loading process get other ids.

    Torch identifies a hook by a number, which each process counts from 0. So without this change, a
    hook that the loading process registers could replace a hook of the loaded object. If the object
    was reduced in an unusual form, such as that of `torch.fx.GraphModule`, return it unchanged.
    """
    from torch.utils.hooks import RemovableHandle

    make, args, state, *items = (*reduced, None)
    if state is None or any(item is not None for item in items):
        return reduced
    return make, args, (state, RemovableHandle.next_id), None, None, _fill_hooked


def _fill_hooked(value: Any, saved: tuple[Any, int]) -> None:
    state, next_id = saved
    _reserve_hook_ids(next_id)
    value.__setstate__(state)


def _reserve_hook_ids(next_id: int) -> None:
    """Make this process give new hooks ids from `next_id` on, or higher ids."""
    from torch.utils.hooks import RemovableHandle

    RemovableHandle.next_id = max(RemovableHandle.next_id, next_id)


def _reduce_scheduler(scheduler: Any) -> Any:
    """Reduce a learning rate scheduler, so that the loaded scheduler counts its optimizer's steps.

    The constructor of a scheduler replaces the optimizer's method `step` by a method that counts
    the steps. pickle does not save the counting method. Without this method, the loaded scheduler
    would warn that the user has replaced `step`. If the optimizer has no such method, return
    NotImplemented.
    """
    if "step" not in vars(getattr(scheduler, "optimizer", object)):
        return NotImplemented
    make, args, state = scheduler.__reduce_ex__(5)[:3]
    return make, args, state, None, None, _fill_scheduler


def _fill_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Set the state of an unpickled scheduler, and make it count its optimizer's steps.

    The constructor of a temporary scheduler replaces the optimizer's method `step`. Afterwards, the
    settings and learning rates of the optimizer are restored.
    """
    import torch.optim.lr_scheduler

    vars(scheduler).update(state)
    groups = scheduler.optimizer.param_groups
    before = [(dict(group), copy.deepcopy(group["lr"])) for group in groups]
    # The constructor of any scheduler replaces `step`. It also sets the rates, which is undone.
    torch.optim.lr_scheduler.LambdaLR(scheduler.optimizer, lambda epoch: 1.0)
    for group, (values, rate) in zip(groups, before, strict=True):
        group.clear()
        group.update(values)
        if isinstance(rate, torch.Tensor):  # the scheduler has changed this tensor in place
            group["lr"].copy_(rate)


def storage_id(storage: "torch.UntypedStorage") -> int:
    """Return an id of a storage, which is the same for all Python objects of this storage."""
    return int(storage._cdata)


def bytes_of_storage(storage: "torch.UntypedStorage") -> Any:
    """Return the memory of a CPU storage as a buffer. The buffer keeps the storage alive."""
    array = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    array._storage = storage  # type: ignore[attr-defined]  # keeps the memory alive
    return array


def _same(value: Any) -> Any:
    return value


# Path objects in the project are pickled as paths on the notebook's machine, and load as paths of
# the host's copy. Strings stay unchanged, because a string may mean anything. The exception is the
# string in a zarr `DirectoryStore`, which is always a path.

_HOME, _COPY = "TAAS_PROJECT", "TAAS_PROJECT_COPY"


def copy_environ(home: str, copy: str) -> dict[str, str]:
    """Return environment variables with which a process converts paths.

    The process converts paths in `home` to paths in `copy` when it loads values, and back when it
    sends values.

    Args:
        home: The project folder on the notebook's machine.
        copy: The folder with the copy of the project on the process's host.
    """
    return {_HOME: home, _COPY: copy}


def project_home() -> str:
    """Return the project folder on the notebook's machine; "" if this host has no project copy."""
    return os.environ.get(_HOME, "")


def reduce_path(path: PurePath) -> tuple[Any, ...]:
    """Reduce a path, so that a host with a copy of the project loads it as a path in this copy.

    Paths outside the project stay unchanged.
    """
    return _path, (type(path), path_to_home(str(path)))


def _path(kind: type[PurePath], text: str) -> PurePath:
    return kind(path_from_home(text))


def path_to_home(path: str) -> str:
    """Convert a path in this host's project copy to the notebook's project; keep other paths."""
    return _move_path(path, _COPY, _HOME)


def path_from_home(path: str) -> str:
    """Convert a path in the notebook's project to this host's project copy; keep other paths."""
    return _move_path(path, _HOME, _COPY)


def reduce_directory_store(store: Any) -> tuple[Any, ...]:
    """Reduce a `DirectoryStore` of zarr 2.

    If its folder is in the notebook's project, the folder of the rebuilt store is in the project
    copy of the loading host.
    """
    state = {**vars(store), "path": _move_path(store.path, _COPY, _HOME)}
    return _directory_store, (type(store), state)


def _directory_store(kind: Any, state: dict[str, Any]) -> Any:
    store = kind.__new__(kind)
    vars(store).update(state, path=_move_path(state["path"], _HOME, _COPY))
    return store


def _move_path(path: str, source: str, target: str) -> str:
    """Convert a path below the source folder to the target folder; keep paths outside the source.

    Args:
        source: Environment variable with the source folder; if it is not set, keep the path.
        target: Environment variable with the target folder; if it is not set, keep the path.
    """
    at, to = os.environ.get(source), os.environ.get(target)
    if not at or not to or not (path == at or path.startswith(at.rstrip("/") + "/")):
        return path
    return to + path[len(at) :]
