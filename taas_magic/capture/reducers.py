"""How objects travel that pickle takes by name, not at all, or whole.

The notebook's classes, what functools and typing made of its functions, its streams, its namespace;
torch's storages, as memory beside the pickle; paths in the project, which mean a host's copy there.
"""

import builtins
import ctypes
import functools
import io
import os
import sys
import typing
import uuid
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from pathlib import PurePath
from pickle import PickleBuffer
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

from taas_magic.errors import CaptureError

if TYPE_CHECKING:
    import torch

Reduced = tuple[Any, ...]

_ids: "weakref.WeakKeyDictionary[type, str]" = weakref.WeakKeyDictionary()
_classes: "weakref.WeakValueDictionary[str, type]" = weakref.WeakValueDictionary()
_received: "weakref.WeakSet[type]" = weakref.WeakSet()


def reduce_by_value(cls: type, reduced: Reduced, coming_home: bool) -> Reduced:
    """Reduce a class so that it keeps its identity from process to process and back.

    Args:
        cls: A class of the notebook.
        reduced: What cloudpickle makes of it.
        coming_home: Whether it goes back to the notebook that it may have come from.
    """
    if len(reduced) < 6:  # NoneType and its like are found, not made
        return reduced
    if coming_home and cls in _received:
        return _known_class, (_ids[cls], cls.__qualname__)
    class_id = _ids.setdefault(cls, uuid.uuid4().hex)
    _classes[class_id] = cls
    make, args, state, _, _, fill = reduced
    if "__slots__" in vars(cls) and not issubclass(cls, tuple | Enum):
        # cloudpickle sets it later, when the class is made and has no slots
        args[3]["__slots__"] = vars(cls)["__slots__"]
    attributes = {name: state[0][name] for name in vars(cls) if name in state[0]}
    state = (attributes | state[0], *state[1:])  # cloudpickle sorts them by name
    return _make_class, (class_id, make, args), (class_id, fill, state), None, None, _fill_class


def _make_class(class_id: str, make: Callable[..., type], args: tuple[Any, ...]) -> type:
    """Return the class of that id if this process has it: a result that comes home finds its own.

    Making it again would run `__init_subclass__` of its bases again.
    """
    known = _classes.get(class_id)
    return make(*args) if known is None else known


def _fill_class(cls: type, given: tuple[str, Callable[[type, Any], None], Any]) -> None:
    class_id, fill, state = given
    if cls not in _ids:
        fill(cls, state)
        _ids[cls], _classes[class_id] = class_id, cls
        _received.add(cls)


def _known_class(class_id: str, name: str) -> type:
    known = _classes.get(class_id)
    if known is None:
        raise CaptureError(
            f"the result holds `{name}`, a class of the notebook that started the run and of which "
            "this kernel knows nothing; load the run's payload first, or return a state_dict()"
        )
    return known


def make_cell() -> CellType:
    """Make an empty cell: a variable that closures share."""
    return CellType()


Contents = Sequence[tuple[CellType, Any]]


def fill_cell(made: CellType, contents: Contents) -> None:
    """Fill cells with what they hold."""
    for cell, content in contents:
        cell.cell_contents = content


def fill_function(
    function: FunctionType, given: tuple[Callable[[Any, Any], None], Any, Contents]
) -> None:
    """Set a function's state, and fill the cells that it brings.

    Its globals may be those of a notebook, which has names of its own: they are kept.
    """
    fill, (attributes, slots), contents = given
    for cell, content in contents:
        cell.cell_contents = content
    for name, value in slots["__globals__"].items():
        function.__globals__.setdefault(name, value)
    fill(function, (attributes, {**slots, "__globals__": {}}))


def fill_in_main(definition: Any, given: tuple[Callable[[Any, Any], None], Any]) -> None:
    """Set the state of a function or class, and set it in `__main__` under its name."""
    fill, state = given
    vars(sys.modules["__main__"]).setdefault(definition.__name__, definition)
    fill(definition, state)


LruCache: Any = type(functools.lru_cache(lambda: None))

_single_dispatch = functools.singledispatch(lambda value: None)
_MADE_BY_SINGLE_DISPATCH = frozenset(vars(_single_dispatch)) - {"__wrapped__"}


def reduce_lru_cache(cached: Any) -> Reduced:
    """Reduce a cached function to the function and the cache's settings."""
    settings = cached.cache_parameters()
    state = {name: value for name, value in vars(cached).items() if name != "cache_parameters"}
    return _make_lru_cache, (cached.__wrapped__, settings["maxsize"], settings["typed"]), state


def _make_lru_cache(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


MADE_ANEW: dict[type, Collection[str]] = {
    functools.cached_property: {"lock"},
    functools.singledispatchmethod: vars(functools.singledispatchmethod(len)).keys()
    - {"dispatcher", "func"},
}
"""What these have of their constructors and cannot be pickled: a lock (Python 3.10, 3.11); a cache
of weak references (Python 3.13)."""


def reduce_descriptor(kind: type, descriptor: Any) -> Reduced:
    """Reduce one of `MADE_ANEW`, or of a class derived from it, without what is made anew."""
    state = {name: v for name, v in vars(descriptor).items() if name not in MADE_ANEW[kind]}
    return _make_descriptor, (type(descriptor), kind), state


def _make_descriptor(cls: Any, kind: Any) -> Any:
    """Make one that has nothing but what its constructor makes; the state brings the rest."""
    made = cls.__new__(cls)
    kind.__init__(made, len)
    return made


def is_single_dispatch(value: Any) -> bool:
    """Return whether `functools.singledispatch` made this function."""
    made: Any = _single_dispatch
    return isinstance(value, FunctionType) and value.__code__ is made.__code__


def reduce_single_dispatch(function: Any) -> Reduced:
    """Reduce a generic function to its default and its registered implementations."""
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


def _reduce_new_type(new_type: Any) -> Reduced:
    where = {"__module__": new_type.__module__, "__qualname__": new_type.__qualname__}
    return typing.NewType, (new_type.__name__, new_type.__supertype__), where


def _reduce_type_parameter(parameter: Any) -> Reduced:
    return type(parameter), (parameter.__name__,)


REDUCERS: dict[type, Callable[[Any], Reduced]] = {
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_type_parameter,
}
if sys.version_info >= (3, 11):
    REDUCERS[typing.TypeVarTuple] = _reduce_type_parameter


_target: ContextVar[dict[str, Any] | None] = ContextVar("_target", default=None)


class NotebookNamespace(dict[str, Any]):
    """Stands for the notebook's namespace in a pickle; loads as the loading side's."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _current_namespace, ()


@contextmanager
def loading_into(namespace: dict[str, Any]) -> Iterator[None]:
    """Have what a `NotebookNamespace` stands for be `namespace`, in this context, for the block."""
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


def notebooks_own(name: str) -> Any:
    """Return what the notebook has under a name: a rank had it from there, and left it as it is."""
    namespace = _current_namespace()
    if name not in namespace:
        raise CaptureError(f"the result uses `{name}` of the notebook, which has none any more")
    return namespace[name]


def stream_name(file: Any) -> str | None:
    """Return `stdout` or `stderr` if a file is this process's, as Python or the kernel made it."""
    for stream in ("stdout", "stderr"):
        if file in (getattr(sys, stream), getattr(sys, f"__{stream}__")):
            return stream
        if type(file).__name__ == "OutStream" and file.name == stream:
            return stream
    return None


def reduce_file(file: Any) -> Any:
    """Reduce stdout and stderr to those of the loading side; raises TypeError for other files."""
    stream = stream_name(file)
    if stream is not None:
        return getattr, (sys, stream)
    raise TypeError(f"cannot pickle {type(file).__name__!r} object: it is an open file")


def this_shell() -> Any:
    """Return the IPython shell of the process that loads; None where there is none."""
    from IPython import get_ipython

    return get_ipython()


# Torch gives pickle no buffers of its own and writes every storage into the pickle. A tensor is
# rebuilt from a typed storage, that from an untyped one, and only the untyped one holds bytes:
# handing pickle those bytes as a buffer serves every dtype, and views that share a storage still
# share it. Torch is imported only when these are called, by processes that have it already.

Storages = MutableMapping[int, "torch.UntypedStorage"]


def _reduce_untyped(storage: "torch.UntypedStorage", seen: Storages) -> Reduced:
    """Reduce a storage to a buffer over its bytes.

    Args:
        storage: On any device; what is not on the CPU is copied there first.
        seen: This pickle's storages by identity: torch may show one storage as several objects.
    """
    first = seen.setdefault(storage._cdata, storage)
    if first is not storage:
        return _same, (first,)
    device = storage.device.type
    held = storage if device == "cpu" else storage.cpu()  # type: ignore[no-untyped-call]
    return rebuild_untyped, (PickleBuffer(bytes_of_storage(held)), device)


def _reduce_typed(storage: "torch.TypedStorage", seen: Storages) -> Reduced:
    """Reduce a typed storage to its one untyped storage and a dtype."""
    untyped = storage._untyped_storage
    return rebuild_typed, (seen.setdefault(untyped._cdata, untyped), storage.dtype)


def _reduce_tensor(tensor: "torch.Tensor") -> Any:
    """Reduce a tensor of one of torch's newer dtypes (uint16 …), all others as torch does it.

    Torch rebuilds these only from a typed storage, but pickles an untyped one.
    """
    import torch

    rebuild, args, *_ = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    if not args or not isinstance(args[0], torch.UntypedStorage):
        return NotImplemented
    return rebuild, (rebuild_typed(args[0], torch.uint8), *args[1:])


def rebuild_untyped(buffer: Any, device: str) -> "torch.UntypedStorage":
    """Wrap a buffer as a storage without copying it.

    It moves to this rank's own GPU if it was on one and this process is a rank with CUDA.
    """
    import torch

    empty = memoryview(buffer).nbytes == 0  # torch.frombuffer refuses an empty one
    host = torch.empty(0, device="cpu") if empty else torch.frombuffer(buffer, dtype=torch.uint8)
    return host.to(target_device(device)).untyped_storage()


def rebuild_typed(untyped: "torch.UntypedStorage", dtype: "torch.dtype") -> "torch.TypedStorage":
    """Give a storage that was rebuilt its dtype back; nothing is copied."""
    import torch

    return torch.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=untyped, dtype=dtype, _internal=True
    )


def target_device(device: str) -> str:
    """Return where a value that lived on `device` belongs in this process."""
    import torch

    local_rank = os.environ.get("LOCAL_RANK")
    if device != "cuda" or local_rank is None or not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{int(local_rank) % torch.cuda.device_count()}"


def _rebuild_generator(device: str, state: "torch.Tensor") -> "torch.Generator":
    """Make a generator, afresh on another kind of device: the state means nothing there."""
    import torch

    target = target_device(device)
    generator = torch.Generator(target)
    if target.partition(":")[0] == device:
        generator.set_state(state)
    return generator


def reduce_loader(loader: Any) -> Any:
    """Reduce a DataLoader without the running iterator that persistent processes leave in it."""
    if getattr(loader, "_iterator", None) is None:
        return NotImplemented
    reduced: Reduced = loader.__reduce_ex__(5)
    state = {**reduced[2], "_iterator": None}
    return (*reduced[:2], state, *reduced[3:])


def _reduce_torch_name(value: Any) -> Reduced:
    """Reduce what torch pickles by a name that some module, perhaps the notebook, has torch by."""
    import torch

    return getattr, (torch, str(value).removeprefix("torch."))


def _reduce_script(script: Any) -> Reduced:
    """Reduce what `torch.jit` compiled to what `torch.jit.save` writes."""
    import torch

    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated; the user has been told
        torch.jit.save(script, file)
    values = [*script.parameters(), *script.buffers()] if hasattr(script, "parameters") else []
    device = values[0].device.type if values else "cpu"
    return _rebuild_script, (file.getvalue(), device)


def _rebuild_script(data: bytes, device: str) -> Any:
    """Load what was compiled; a function comes back as a module that is called alike."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        where = target_device(device)
        return torch.jit.load(io.BytesIO(data), map_location=where)  # type: ignore[no-untyped-call]


def torch_reducers(seen: Storages) -> dict[type, Callable[[Any], Any] | None]:
    """Return what to do with instances of these classes; the first match counts."""
    import torch.utils.data

    return {
        torch.Tensor: _reduce_tensor,
        torch.UntypedStorage: lambda storage: _reduce_untyped(storage, seen),
        torch.TypedStorage: lambda storage: _reduce_typed(storage, seen),
        torch.Generator: lambda it: (_rebuild_generator, (it.device.type, it.get_state())),
        torch.utils.data.DataLoader: reduce_loader,
        torch.memory_format: _reduce_torch_name,
        torch.qscheme: _reduce_torch_name,
        torch.jit.ScriptModule: _reduce_script,
        torch.jit.ScriptFunction: _reduce_script,
    }


def storage_id(storage: "torch.UntypedStorage") -> int:
    """Return the identity of a storage: torch may show one storage as several objects."""
    return int(storage._cdata)


def bytes_of_storage(storage: "torch.UntypedStorage") -> Any:
    """Return the memory of a storage on the CPU, as a buffer that keeps the storage alive."""
    array = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    array._storage = storage  # type: ignore[attr-defined]  # keeps the memory alive
    return array


def _same(value: Any) -> Any:
    return value


# Paths in the project travel as the notebook has them, and mean a host's copy there: ranks and
# fetchers of a host that does not share the project have both places in their environment. A path
# that is a text may be anything, and stays as it is; path objects are paths, and so is what a zarr
# store of the file system has.

_HOME, _COPY = "TAAS_PROJECT", "TAAS_PROJECT_COPY"


def copy_environ(home: str, copy: str) -> dict[str, str]:
    """Return what a host's processes have in their environment where `copy` is the project."""
    return {_HOME: home, _COPY: copy}


def project_home() -> str:
    """Return the project on the notebook's machine; "" where this process has no copy of it."""
    return os.environ.get(_HOME, "")


def reduce_path(path: PurePath) -> tuple[Any, ...]:
    """Reduce a path; one in the project becomes that of the loading host's copy."""
    return _path, (type(path), path_to_home(str(path)))


def _path(kind: type[PurePath], text: str) -> PurePath:
    return kind(path_from_home(text))


def path_to_home(path: str) -> str:
    """Return a path of this process as the notebook's machine has it."""
    return _moved(path, _COPY, _HOME)


def path_from_home(path: str) -> str:
    """Return a path of the notebook's machine as this process has it."""
    return _moved(path, _HOME, _COPY)


def reduce_directory_store(store: Any) -> tuple[Any, ...]:
    """Reduce a `DirectoryStore` of zarr 2, whose path is a text."""
    state = {**vars(store), "path": _moved(store.path, _COPY, _HOME)}
    return _directory_store, (type(store), state)


def _directory_store(kind: Any, state: dict[str, Any]) -> Any:
    store = kind.__new__(kind)
    vars(store).update(state, path=_moved(state["path"], _HOME, _COPY))
    return store


def _moved(path: str, source: str, target: str) -> str:
    """Return a path below `source` as one below `target`; both are variables of the environment."""
    at, to = os.environ.get(source), os.environ.get(target)
    if not at or not to or not (path == at or path.startswith(at.rstrip("/") + "/")):
        return path
    return to + path[len(at) :]
