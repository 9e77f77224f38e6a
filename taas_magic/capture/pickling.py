"""Convert values of the notebook to bytes and shared memory, and back.

An archive is one file with a pickle and its out-of-band buffers.
"""

import argparse
import array
import functools
import importlib
import io
import logging
import mmap
import operator
import os
import pickle
import struct
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePath
from pickle import PickleBuffer
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
from msgspec import Struct

from taas_magic.capture.culprit import Destination, is_process_bound, is_shard, make_capture_error
from taas_magic.capture.names import code_use, may_set_any_name
from taas_magic.capture.reducers import (
    ATTRIBUTES_MADE_BY_CONSTRUCTOR,
    REDUCERS,
    Copy,
    LruCache,
    NotebookNamespace,
    Storages,
    fill_cell,
    fill_function,
    is_received,
    is_single_dispatch,
    loading_into,
    make_cell,
    notebooks_own,
    reduce_array,
    reduce_by_value,
    reduce_descriptor,
    reduce_dict,
    reduce_directory_store,
    reduce_file,
    reduce_lru_cache,
    reduce_path,
    reduce_received,
    reduce_single_dispatch,
    reduce_to_id,
    this_shell,
    torch_reducers,
)
from taas_magic.errors import CaptureError
from taas_magic.late_imports import module_if_imported
from taas_magic.messages import to_json
from taas_magic.shared_files import replace_atomically

_MAGIC = b"TAASPAY2"
_BEGIN = struct.Struct("<8sQ")
"""Header of an archive: the bytes `_MAGIC`, and the number of parts in the archive.

After the header, the archive has the size of each part, as 8 bytes. Then the parts follow: the
description, the pickle, and the buffers.
"""

_ALIGNMENT = 64


@dataclass(frozen=True)
class Pickled:
    """A pickle and its out-of-band buffers, which are the memory of arrays and tensors."""

    data: bytes
    buffers: Sequence[PickleBuffer]

    @property
    def size_bytes(self) -> int:
        """Bytes of the pickle and its buffers."""
        return len(self.data) + sum(buffer.raw().nbytes for buffer in self.buffers)


@dataclass(frozen=True)
class Archive:
    """An archive that is mapped into memory.

    Attributes:
        meta: Description of the content, as JSON that `messages.to_json` wrote.
        mapped: The whole file.
        pickle_at: Offset of the pickle in the file, in bytes.
        buffers: Out-of-band buffers of the pickle: the memory of arrays and tensors.
    """

    meta: bytes
    mapped: mmap.mmap
    pickle_at: int
    pickle_bytes: int
    buffers: Sequence[memoryview]

    def pickle(self) -> bytes:
        """Return a copy of the pickle or, from an archive of plain data, of the encoded table."""
        return bytes(memoryview(self.mapped)[self.pickle_at : self.pickle_at + self.pickle_bytes])

    def stream(self) -> mmap.mmap:
        """Return the mapped file, positioned at the pickle's first byte."""
        self.mapped.seek(self.pickle_at)
        return self.mapped


def write_archive(path: Path, pickled: Pickled, meta: Struct | None = None) -> None:
    """Write a pickle and its buffers to an archive, atomically and readable only by its owner.

    The header has the sizes of all parts. Each part begins at a multiple of `_ALIGNMENT` bytes.

    Args:
        meta: Description of the content, which a reader can decode without the pickle; None for an
            empty description.
    """
    described = to_json(meta) if meta is not None else b"{}"
    pieces: list[bytes | memoryview] = [
        described,
        pickled.data,
        *(buffer.raw() for buffer in pickled.buffers),
    ]
    sizes = [memoryview(piece).nbytes for piece in pieces]
    with replace_atomically(path) as file:
        file.write(_BEGIN.pack(_MAGIC, len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes))
        for piece in pieces:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            file.write(piece)


def read_archive(path: Path) -> Archive:
    """Map an archive into memory.

    The archive stays readable if the file is removed. The memory is a private copy (copy on write):
    if the caller changes this memory, the file stays the same.

    Raises:
        CaptureError: The file is no archive, or is cut short.
    """
    with open(path, "rb") as file:
        is_empty = not os.fstat(file.fileno()).st_size  # such a file cannot be mapped
        mapped = None if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    spans = list(_spans(mapped)) if mapped is not None else []
    if mapped is None or not spans or spans[-1].stop > len(mapped):
        raise CaptureError(f"the payload {path} is incomplete; run the cell again")
    view, (meta, pickled, *buffers) = memoryview(mapped), spans
    apart = [view[span] for span in buffers]
    return Archive(bytes(view[meta]), mapped, pickled.start, pickled.stop - pickled.start, apart)


def _spans(mapped: mmap.mmap) -> Iterator[slice]:
    """Yield the byte ranges of an archive's description, pickle and buffers, in this order.

    Yield nothing if the file is no archive.
    """
    try:
        magic, count = _BEGIN.unpack_from(mapped)
        sizes = struct.unpack_from(f"<{count}Q", mapped, _BEGIN.size) if magic == _MAGIC else ()
    except struct.error:
        return
    position = _BEGIN.size + 8 * count
    for size in sizes:
        position += -position % _ALIGNMENT
        yield slice(position, position + size)
        position += size


Handler = Callable[[Any], Any]

LOADER_REDUCERS: dict[int, Callable[[Any, dict[str, Any]], Any]] = {}
"""Functions that reduce registered loaders to remote loaders for the ranks, by id of the loader.

The key is not the loader's type, because `%autoreload` changes the type. `registry.py` sets these
functions. The first argument of a function is a loader. The second argument is the dict
`ValuePickler.replaced`, to which the function adds the loader, pickled for fetchers. If the loader
is no longer registered, the function returns NotImplemented.
"""


Stream = io.BytesIO | mmap.mmap


def dump(obj: Any, name: str = "value", namespace: dict[str, Any] | None = None) -> Pickled:
    """Pickle one value, without copying the memory of its arrays and tensors.

    Args:
        name: Name of the value in the message of a CaptureError.
        namespace: Namespace of `__main__`, as in `ValuePickler`.

    Raises:
        CaptureError: An object in the value cannot be sent; the message has the path to it.
    """
    pickler = ValuePickler(namespace)
    pickler.pickle_variable(name, obj)
    return pickler.pickled()


def loads(
    data: bytes | Stream,
    buffers: Sequence[PickleBuffer | memoryview] = (),
    *,
    namespace: dict[str, Any] | None = None,
) -> Any:
    """Load one value that `dump` pickled; arrays and tensors share the memory of `buffers`.

    Args:
        data: The pickle, or a file-like object whose position is the pickle's first byte.
        buffers: Out-of-band buffers of the pickle, as in `Pickled.buffers`.
        namespace: Globals for the functions that were pickled without their globals; None for an
            empty namespace.

    Raises:
        CaptureError: The value needs a notebook's class that this process does not have.
    """
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    return next(load_each(stream, buffers, {} if namespace is None else namespace))


def load_each(
    stream: Stream, buffers: Sequence[PickleBuffer | memoryview], namespace: dict[str, Any]
) -> Iterator[Any]:
    """Yield the values of one `ValuePickler` in the order in which they were added.

    After the last value, the generator raises EOFError, or reads bytes that follow the pickle. So
    the caller must know the number of values.

    Args:
        buffers: Out-of-band buffers of the pickle, as in `Pickled.buffers`.
        namespace: Globals for the functions that were pickled without their globals.
    """
    unpickler = pickle.Unpickler(stream, buffers=iter(buffers))
    while True:
        with loading_into(namespace):
            value = unpickler.load()
        yield value


_BEGIN_OF_PICKLE = b"".join(
    (
        pickle.PROTO + b"\x05",
        pickle.GLOBAL + b"argparse\nSUPPRESS\n",
        pickle.MEMOIZE,
        pickle.POP,
    )
)
"""Opcodes that make `argparse.SUPPRESS` the first object in the memo of pickle.

argparse compares this string by `is`. So the receiver must get its own string, not a copy.
"""


class ValuePickler(cloudpickle.Pickler):
    """Pickler that adds several values to one pickle, in which shared objects stay shared.

    Args:
        namespace: Namespace of `__main__`. A function with this namespace as globals is pickled
            without its globals; when `load_each` loads the function, the function gets the
            namespace of the loading process. If None, each function is pickled with copies of the
            globals that the function uses.
        to: Destination of the values. For `fetchers`, the pickle itself contains the memory of
            arrays and tensors, so that `pickle.loads` can load it without buffers.

    Attributes:
        memo: Objects pickled so far, by id (pickle's own attribute).
        needs: Names in `namespace` that the receiver needs: the variables that the added functions
            read, and the added functions and classes themselves. For `fetchers`, only the names of
            the added functions and classes of this process's `__main__`.
        modules: Modules that the added values refer to or import.
        filenames: Files of the functions that were pickled by value.
        stores: Names that the added functions set by `global`.
        sets_any: Whether an added function may set variables that its code does not name, for
            example by `globals()["x"] = 1`.
        attributes: Attribute names that the added functions look up.
        classes: Classes that the pickle contains only as a name, by id.
        replaced: Registered loaders among the added values, pickled for fetchers
            (`registry.PackedLoader`), by name.
        pickled_cells: Closure cells whose content is already in the pickle, by id.
        at_receiver: Names of functions and classes that the receiver has in its namespace, by id.
            The pickle contains only the names of these objects.
        is_digest: Whether the pickle is only for a digest. If so, a class inside of an added value
            is pickled as an id. So a change of a class's attributes does not change the digests of
            the class's instances.
        updated: Ids of the classes whose attributes the receiver must set again, if the receiver
            has these classes already.
        pending_values: Values of the variables that are being added, by name. If an added function
            reads such a variable, the value is pickled as one of the function's globals. Reason:
            loading the value may call the function before the variable is set. For example, loading
            a class runs the `__init_subclass__` of its base class.
    """

    memo: Any

    def __init__(
        self, namespace: dict[str, Any] | None = None, to: Destination | None = None
    ) -> None:
        self._file = io.BytesIO()
        self.buffers: list[PickleBuffer] = []
        self._to = to or ("notebook" if namespace is None else "ranks")
        apart = None if self._to == "fetchers" else self.buffers.append
        super().__init__(self._file, protocol=5, buffer_callback=apart)
        self._file.write(_BEGIN_OF_PICKLE)
        self.memo = {id(argparse.SUPPRESS): (0, argparse.SUPPRESS)}
        self.needs: dict[str, None] = {}
        self.modules: set[str] = set()
        self.filenames: set[str] = set()
        self.stores: set[str] = set()
        self.sets_any = False
        self.attributes: set[str] = set()
        self.classes: dict[int, type] = {}
        self.replaced: dict[str, Any] = {}
        self.pending_values: dict[str, Any] = {}
        self._namespace = namespace
        if namespace is not None:
            self.globals_ref[id(namespace)] = NotebookNamespace()
        self._storages: Storages = {}
        self.pickled_cells: dict[int, CellType] = {}
        self.at_receiver: Mapping[int, str] = {}
        self.updated: Collection[int] = ()
        self.is_digest = False
        self._value: Any = None
        self._rules = self._make_rules()
        self._handlers: dict[type, Handler | None] = {}

    def add(self, value: Any) -> int:
        """Pickle one more value. Return by how many bytes the pickle and its buffers have grown."""
        at, first_buffer = self._file.tell(), len(self.buffers)
        self._value = value
        self.dump(value)
        own = sum(buffer.raw().nbytes for buffer in self.buffers[first_buffer:])
        return self._file.tell() - at + own

    def pickle_variable(self, name: str, value: Any, note: str = "") -> int:
        """Pickle the value of a variable. Return the number of bytes that the value adds.

        Args:
            note: Reason for the variable's capture, for the message of a CaptureError; may be
                empty.

        Raises:
            CaptureError: An object in the value cannot be sent; the message has the path to it.
        """
        try:
            return self.add(value)
        except CaptureError:  # raised for a registered loader, with advice of its own
            raise
        except Exception as error:
            raise make_capture_error(name, value, self.probe, error, note, self._to) from error

    @contextmanager
    def rollback(self) -> Iterator[Callable[[], None]]:
        """Yield a function that removes all objects that the `with` block has added to the pickle.

        If the block raises an exception, the objects are removed without a call of the function.
        Only the pickle and its buffers are restored: `needs`, `modules` and the other attributes
        keep what the block added.
        """
        memo: dict[int, Any] = self.memo.copy()
        pickled_cells = self.pickled_cells.copy()
        at, first_buffer = self._file.tell(), len(self.buffers)

        def undo() -> None:
            self.memo, self.pickled_cells = memo, pickled_cells
            self._file.seek(at)
            self._file.truncate()
            del self.buffers[first_buffer:]

        try:
            yield undo
        except BaseException:
            undo()
            raise

    def add_definitions(self) -> None:
        """Add one more value: a dict of the functions and classes in `needs`, by name.

        A fetcher sets these functions and classes in its own `__main__`. Reason: a dataset may
        pickle a function or class in the fetcher, and pickle stores only the name in `__main__`.
        Pickling the dict may add names to `needs`. If so, the dict is pickled again with the added
        names.
        """
        main, is_complete = vars(sys.modules["__main__"]), False
        while not is_complete:
            names = list(self.needs)
            with self.rollback() as undo:
                self.add({name: main[name] for name in names})
                is_complete = names == list(self.needs)  # pickling a class may add further names
                if not is_complete:
                    undo()

    def pickled(self) -> Pickled:
        """Return the pickle of all values added so far; do not copy the memory of its buffers."""
        return Pickled(self._file.getvalue(), tuple(self.buffers))

    def shared_objects(self) -> dict[int, Any]:
        """Return those pickled objects that other values may also contain, by id.

        These are torch's storages and objects that can change in place (`must_stay_shared`). The
        caller must keep the returned dict until it has compared the ids: only the dict keeps some
        of the objects alive, and Python reuses the id of a freed object.
        """
        memo: dict[int, tuple[int, Any]] = self.memo.copy()
        mutable = {key: held for key, (_, held) in memo.items() if must_stay_shared(held)}
        return {**mutable, **self._storages}

    def probe(self, value: Any) -> None:
        """Pickle a value and drop the pickle, to test whether the value can be sent.

        If the value cannot be sent, this method raises an exception of any class.
        """
        pickler = ValuePickler(self._namespace, self._to)
        pickler.replaced = self.replaced  # a loader may be large, so it is packed only once
        pickler.pending_values = self.pending_values
        pickler.dump(value)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object by the rules of this pickler; called by pickle.

        If the destination is the ranks, and the object is a registered loader, the pickle contains
        a description of the loader. From this description, a rank makes a remote loader. The rule
        for each class is cached.

        Returns:
            The reduced object; NotImplemented if pickle's own rules apply.

        Raises:
            PicklingError: The object would not work at the destination, such as a process group.
        """
        kind = type(obj)
        try:
            handler = self._handlers[kind]
        except KeyError:
            handler = self._handlers[kind] = self._handler(kind)
        if self._to == "ranks" and id(obj) in LOADER_REDUCERS:
            stand_in = LOADER_REDUCERS[id(obj)](obj, self.replaced)
            if stand_in is not NotImplemented:
                return stand_in
        return NotImplemented if handler is None else handler(obj)

    def _handler(self, kind: type) -> Handler | None:
        """Return the function that reduces objects of a type; None if pickle's own rules apply."""
        if self._to != "notebook" and is_process_bound(kind):
            return functools.partial(_refuse, "belongs to the process that made it")
        if self._to == "fetchers" and is_shard(kind):
            return functools.partial(_refuse, "is one rank's share of the data")
        return next((h for base, h in self._rules.items() if issubclass(kind, base)), None)

    def _make_rules(self) -> dict[type, Handler | None]:
        """Return reducers by class; None means that pickle's own rules apply.

        A reducer also handles instances of subclasses. If an object is an instance of several
        classes in the dict, the first of these classes decides. Classes of zarr, numpy, torch and
        IPython are included only if this process has imported the library.
        """
        rules: dict[type, Handler | None] = {
            type: self._reduce_class,
            FunctionType: self._reduce_function,
            CellType: self._reduce_cell,
            CodeType: _reduce_code,
            ModuleType: self._reduce_module,
            LruCache: self._unless_importable(reduce_lru_cache),
            **{
                kind: functools.partial(reduce_descriptor, kind)
                for kind in ATTRIBUTES_MADE_BY_CONSTRUCTOR
            },
            **{kind: self._unless_importable(r) for kind, r in REDUCERS.items()},
            Enum: _reduce_member,
            PurePath: reduce_path,
            io.BytesIO: None,
            io.StringIO: None,
            io.IOBase: reduce_file,
            dict: reduce_dict,
        }
        if (kind := getattr(sys.modules.get("zarr.storage"), "DirectoryStore", None)) is not None:
            rules[kind] = reduce_directory_store
        if (numpy := module_if_imported("numpy")) is not None:
            rules[numpy.ndarray] = reduce_array
        if "torch" in sys.modules:
            rules |= torch_reducers(self._storages, keeps_hooks=self._to in ("ranks", "jobs"))
        if "IPython" in sys.modules:
            from IPython.core.interactiveshell import InteractiveShell

            rules[InteractiveShell] = lambda shell: (this_shell, ())
        return rules

    def _reduce_class(self, cls: type) -> Any:
        """Reduce a class to its name, to its id, or by value.

        - A class in `at_receiver` is reduced to its name in the receiver's namespace.
        - An importable class is reduced to its module and name. `classes` gets the class, and
          `modules` gets the module.
        - In a result, a class that came from the notebook is reduced to its id, with a copy for
          kernels that do not have the class.
        - For a digest, a class inside of the added value is reduced to its id. `_add_needs_of`
          records the names that the methods of the class read.
        - Any other class is reduced by value.

        In the last three cases, `needs` gets the class's name if the namespace has the class under
        this name.
        """
        if (name := self.at_receiver.get(id(cls))) is not None:
            return notebooks_own, (name,)
        _import_submodule_of(cls)
        reduced = super().reducer_override(cls)
        if reduced is NotImplemented:
            self.modules.add(cls.__module__)
            self.classes[id(cls)] = cls
            return reduced
        self._need_by_name(cls)
        if self._to == "notebook" and is_received(cls):
            return reduce_received(cls, self.pickle_copy(cls))
        if self.is_digest and cls is not self._value:
            self._add_needs_of(cls)
            return reduce_to_id(cls)
        return reduce_by_value(cls, reduced, is_update=id(cls) in self.updated)

    def _add_needs_of(self, cls: type) -> None:
        """Record the names that the methods of a class read: add these names to `needs`.

        The class itself is not added to the pickle: this method pickles the class with another
        pickler, only to find the names. If `needs` has the name of the class, do nothing. Reason:
        the variable with the class is then pickled on its own, which finds the same names.
        """
        if _qualname(cls).partition(".")[0] not in self.needs:
            pickler = ValuePickler(self._namespace, self._to)
            pickler.add(cls)
            self.needs |= pickler.needs

    def pickle_copy(self, value: Any) -> Copy | None:
        """Pickle an object of the notebook on its own; None if the object cannot be pickled.

        The kernel that started the run has the object itself. The copy is for any other kernel that
        loads the run's results.
        """
        pickler = ValuePickler(self._namespace, "ranks")
        try:
            pickler.add(value)
        except Exception:  # pickling runs the user's code: anything may be raised
            return None
        pickled = pickler.pickled()
        return pickled.data, pickled.buffers

    def _reduce_function(self, function: FunctionType) -> Any:
        """Reduce a function to its name or by value.

        - A function in `at_receiver` is reduced to its name in the receiver's namespace.
        - An importable function is reduced to its module and name. `modules` gets the module.
        - A function that `functools.singledispatch` made is reduced to its implementations.
        - Any other function is reduced by value. Its closure cells stay shared (`_with_cells`).

        In the last two cases, `needs` gets the function's name if the namespace has the function
        under this name. In the last case, record the function's file, and the modules and
        attributes that the code uses. If the globals are the notebook's namespace, also record the
        names that the code reads (`needs`) and sets (`stores`). Values in `pending_values` that the
        code reads are pickled as globals.
        """
        if (name := self.at_receiver.get(id(function))) is not None:
            return notebooks_own, (name,)
        reduced = super().reducer_override(function)
        if reduced is NotImplemented:
            self.modules.add(function.__module__)
            return reduced
        self._need_by_name(function)
        if is_single_dispatch(function):
            return reduce_single_dispatch(function)
        self.filenames.add(function.__code__.co_filename)
        use = code_use(function.__code__)
        self.modules |= use.imports
        self.attributes |= use.attributes
        if function.__globals__ is self._namespace:
            self.stores |= use.stores
            self.sets_any |= may_set_any_name(function.__code__)
            self.needs.update(dict.fromkeys(sorted(use.names)))
            pending = {
                name: self.pending_values[name]
                for name in sorted(use.names & self.pending_values.keys())
            }
            reduced[2][1]["__globals__"] = pending
        return self._with_cells(function.__closure__, reduced)

    def _with_cells(self, closure: tuple[CellType, ...] | None, reduced: Any) -> Any:
        """Return a reduced function that keeps its closure cells, so that functions can share them.

        cloudpickle would give each function new cells. Then two functions that share a variable
        would each get a variable of their own. All cells are pickled empty, because a cell may
        contain the function itself. Loading the first function that uses a cell also sets the
        cell's content.

        Args:
            closure: Closure cells of the function; None if it has none.
            reduced: The function as cloudpickle reduced it.
        """
        make, args, state, _, _, fill = reduced
        state[1]["__closure__"] = None
        unfilled = [cell for cell in closure or () if id(cell) not in self.pickled_cells]
        self.pickled_cells |= {id(cell): cell for cell in unfilled}
        contents = tuple((cell, content) for cell in unfilled for content in _contents(cell))
        return make, (*args[:-1], closure), (fill, state, contents), None, None, fill_function

    def _reduce_cell(self, cell: CellType) -> Any:
        """Reduce a closure cell. Leave out its content if the pickle already has the content."""
        if id(cell) in self.pickled_cells:
            return make_cell, ()
        self.pickled_cells[id(cell)] = cell
        contents = tuple((cell, content) for content in _contents(cell))
        return make_cell, (), contents, None, None, fill_cell

    def _unless_importable(self, handler: Handler) -> Handler:
        """Return a reducer that calls `handler`, except for importable objects.

        An importable object is pickled by its name, and the reducer adds the object's module to
        `modules`. For any other object, the reducer first calls `_need_by_name`, so that `needs`
        gets the object's name. Then the reducer calls `handler`.
        """

        def reduce(definition: Any) -> Any:
            if is_importable(definition):
                self.modules.add(definition.__module__)
                return NotImplemented
            self._need_by_name(definition)
            return handler(definition)

        return reduce

    def _reduce_module(self, module: ModuleType) -> Any:
        self.modules.add(module.__name__)
        if type(module) is ModuleType or sys.modules.get(module.__name__) is not module:
            return NotImplemented
        # An instance of a subclass (torch.backends.cudnn): cloudpickle does not see it as a module.
        return importlib.import_module, (module.__name__,)

    def _need_by_name(self, definition: Any) -> None:
        """Add the name of a function or class to `needs`, so that the receiver defines this name.

        The receiver needs the name if it pickles the function, or an instance of the class, for
        example in a result. Then pickle looks up the function or class by its name.

        Do nothing if the namespace does not have this function or class under this name. For
        `fetchers`, the namespace of this process's `__main__` counts.
        """
        name, namespace = _qualname(definition).partition(".")[0], self._namespace
        if self._to == "fetchers":
            namespace = vars(sys.modules["__main__"])
        if namespace is not None and _has_definition(namespace.get(name), definition):
            self.needs[name] = None


def _contents(cell: CellType) -> Iterator[Any]:
    """Yield the content of a closure cell; yield nothing if the cell is empty."""
    try:
        yield cell.cell_contents
    except ValueError:
        return


def _import_submodule_of(cls: type) -> None:
    """Import the module of a class if this process has imported only the module's package.

    An example is the class `numpy.recarray`. Without its module in `sys.modules`, the class would
    not count as importable, and would be pickled by value. Errors of the import are ignored.
    """
    name = cls.__module__ or ""
    package = name.rpartition(".")[0]
    if name not in sys.modules and package in sys.modules:
        with suppress(ImportError):
            importlib.import_module(name)


_CONSTANTS = (type, FunctionType, ModuleType, Enum, logging.Logger, PurePath)
_MUTABLE = (dict, list, set, bytearray, deque, array.array)
_MUTABLE_NAMES = frozenset({"ndarray", "Generator", "RandomState"})
"""Names of mutable types of numpy and torch.

A comparison by name does not need the types, so numpy and torch need not be imported.
"""


def must_stay_shared(value: Any) -> bool:
    """Return whether values that share this object must be sent together.

    True for an object that can change in place, because two copies could differ later. Also True
    for an instance of `object` itself, because code compares such a sentinel by `is`. False for
    constants of Python's modules, such as `dataclasses.MISSING`.
    """
    kind = type(value)
    if isinstance(value, _CONSTANTS) or kind.__module__ in ("typing", "dataclasses"):
        return False
    if isinstance(value, _MUTABLE) or kind is object or kind.__module__ == "itertools":
        return True
    has_slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    return has_slots or bool(kind.__dictoffset__) or kind.__name__ in _MUTABLE_NAMES


def group_sharers(shared: Mapping[str, Collection[int]]) -> list[list[str]]:
    """Group the names of values, so that values that share an object are in the same group.

    Values in a group may share objects indirectly: `a` with `b`, and `b` with `c`.

    Args:
        shared: Ids of the objects in each value that may also be in other values, by name.

    Returns:
        The groups. A value that shares no object is a group of one name.
    """
    groups: list[tuple[set[int], list[str]]] = []
    for name, own_ids in shared.items():
        held, names = set(own_ids), [name]
        for group in [group for group in groups if group[0] & held]:
            groups.remove(group)
            held, names = held | group[0], [*group[1], *names]
        groups.append((held, names))
    return [names for _, names in groups]


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """Reduce a code object, and keep its file name, which tracebacks need to find the cell.

    cloudpickle 3.1.3 and later drop the file name.
    """
    make, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _make_code, (make, args, code.co_filename)


def _make_code(make: Callable[..., CodeType], args: tuple[Any, ...], filename: str) -> CodeType:
    return make(*args).replace(co_filename=filename)


def _reduce_member(member: Any) -> Any:
    """Reduce a member of the notebook's Enum to its class and name.

    Python itself pickles the class and the value. But the copy of some values, such as a function
    or NaN, does not equal the value, so the class would not find the member. Members of importable
    classes, and members of a Flag without a name of their own, are left to Python.
    """
    cls, name = type(member), member._name_
    if is_importable(cls) or cls.__members__.get(name) is not member:
        return NotImplemented
    return operator.getitem, (cls, name)


def _refuse(why: str, value: Any) -> Any:
    raise pickle.PicklingError(f"a {type(value).__name__} {why}")


def is_importable(definition: Any) -> bool:
    """Return whether pickle finds a function or class by its name in an imported module.

    False for functions and classes in `__main__`, because each process has its own `__main__`.
    """
    module = getattr(definition, "__module__", None)
    name = _qualname(definition)
    if module in (None, "__main__") or module not in sys.modules or not name:
        return False
    return _has_definition(getattr(sys.modules[module], name.partition(".")[0], None), definition)


def _qualname(definition: Any) -> str:
    return str(getattr(definition, "__qualname__", getattr(definition, "__name__", "")))


def _has_definition(top: Any, definition: Any) -> bool:
    for part in _qualname(definition).split(".")[1:]:
        top = getattr(top, "__dict__", {}).get(part)
    return top is definition
