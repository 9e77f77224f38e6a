"""Values of the notebook as bytes and shared memory, and back.

cloudpickle (protocol 5) does the work. What is added here: large data stays out of the pickle;
the notebook's own functions find the rank's namespace as their globals; the notebook's streams
and shell become the rank's; and what cannot live in another process is refused, files too.

In a rank, `sys.modules["__main__"]` must be a module whose `__dict__` is the namespace that
values are loaded into: a DataLoader's own processes find the notebook's classes there by name.
"""

import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pickle import PickleBuffer
from types import FunctionType, ModuleType
from typing import Any, Protocol

import cloudpickle
from cloudpickle import cloudpickle as internals

from taas_magic.capture import classes, tensors
from taas_magic.capture.archive import Archive, Pickled, read, write
from taas_magic.capture.bytecode import code_use
from taas_magic.capture.culprit import refusal
from taas_magic.capture.standins import NotebookNamespace, loading_into, reduce_file, this_shell

__all__ = ["Archive", "Pickled", "ValuePickler", "dump", "dump_named", "load_each", "loads"]
__all__ += ["read", "write"]

Handler = Callable[[Any], Any]

STAND_INS: dict[type, Handler] = {}
"""What travels to the ranks instead of values of these types, or NotImplemented (registry.py)."""


class Stream(Protocol):
    """What unpickling reads from; a mapped file and `io.BytesIO` both do."""

    def read(self, size: int, /) -> bytes: ...
    def readline(self) -> bytes: ...


def dump(obj: Any, *, globals_dict: dict[str, Any] | None = None, name: str = "value") -> Pickled:
    """Pickles one value.

    Args:
        obj: Any value; the memory of its arrays and tensors is referred to, not copied.
        globals_dict: The notebook's namespace. Functions defined in it travel without the
            globals that they use and have the loading side's namespace in its place. Left out
            (results on their way back), functions bring copies of what they use.
        name: What a refusal calls the value.

    Raises:
        CaptureError: Something in the value cannot travel; the message has the path to it.
    """
    pickler = ValuePickler(globals_dict)
    try:
        pickler.add(obj)
    except Exception as error:
        raise refusal(name, obj, pickler.probe, error) from error
    return pickler.pickled()


def dump_named(values: Mapping[str, Any]) -> Pickled:
    """Pickles results by name (rank 0, for `--out`); refusals name the variable.

    Raises:
        CaptureError: Something in a value cannot travel.
    """
    pickler = ValuePickler()
    try:
        pickler.add(dict(values))
    except Exception:
        for name, value in values.items():
            dump(value, name=name)
        raise
    return pickler.pickled()


def loads(
    data: bytes | Stream,
    buffers: Sequence[PickleBuffer | memoryview] = (),
    *,
    namespace: dict[str, Any] | None = None,
) -> Any:
    """Loads one value that `dump` made; its arrays and tensors lie in `buffers`, uncopied.

    Raises:
        CaptureError: The value needs a class of a notebook that this process does not know.
    """
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    return next(load_each(stream, buffers, {} if namespace is None else namespace))


def load_each(
    stream: Stream, buffers: Sequence[PickleBuffer | memoryview], namespace: dict[str, Any]
) -> Iterator[Any]:
    """Yields the values of one `ValuePickler` in the order they were added, without end."""
    unpickler = pickle.Unpickler(stream, buffers=iter(buffers))
    while True:
        with loading_into(namespace):
            value = unpickler.load()
        yield value


class ValuePickler(cloudpickle.Pickler):
    """Adds values to one pickle in which what they share stays shared.

    Attributes:
        memo: What was pickled so far, by identity (pickle's own).
        needs: Names of the namespace that what was added looks up when it runs.
        modules: Modules that what was added refers to or imports.
        filenames: Files of the functions that travel by value.
    """

    memo: Any

    def __init__(self, namespace: dict[str, Any] | None = None) -> None:
        self._file = io.BytesIO()
        self.buffers: list[PickleBuffer] = []
        super().__init__(self._file, protocol=5, buffer_callback=self.buffers.append)
        self.needs: dict[str, None] = {}
        self.modules: set[str] = set()
        self.filenames: set[str] = set()
        self._namespace = namespace
        if namespace is not None:
            self.globals_ref[id(namespace)] = NotebookNamespace()
        self._storages: tensors.Storages = {}
        self._rules = self._make_rules()
        self._handlers: dict[type, Handler | None] = {}

    def add(self, value: Any) -> int:
        """Pickles one more value; returns the bytes that it added."""
        at, first_buffer = self._file.tell(), len(self.buffers)
        self.dump(value)
        own = sum(buffer.raw().nbytes for buffer in self.buffers[first_buffer:])
        return self._file.tell() - at + own

    @contextmanager
    def undoing(self) -> Iterator[Callable[[], None]]:
        """Gives a function that forgets what was added since; an error forgets it as well."""
        memo: dict[int, Any] = self.memo.copy()
        at, first_buffer = self._file.tell(), len(self.buffers)

        def undo() -> None:
            self.memo = memo
            self._file.seek(at)
            self._file.truncate()
            del self.buffers[first_buffer:]

        try:
            yield undo
        except BaseException:
            undo()
            raise

    def pickled(self) -> Pickled:
        return Pickled(self._file.getvalue(), tuple(self.buffers))

    def probe(self, value: Any) -> None:
        """Pickles a value by the same rules and keeps nothing; raises what prevents it."""
        ValuePickler(self._namespace).dump(value)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        try:
            handler = self._handlers[kind]
        except KeyError:
            handler = next((h for base, h in self._rules.items() if issubclass(kind, base)), None)
            self._handlers[kind] = handler
        if self._namespace is not None and kind in STAND_INS:
            stand_in = STAND_INS[kind](obj)
            if stand_in is not NotImplemented:
                return stand_in
        return NotImplemented if handler is None else handler(obj)

    def _make_rules(self) -> dict[type, Handler | None]:
        rules: dict[type, Handler | None] = {
            type: self._reduce_class,
            FunctionType: self._reduce_function,
            ModuleType: self._reduce_module,
            io.BytesIO: None,
            io.StringIO: None,
            io.IOBase: reduce_file,
        }
        if "torch" in sys.modules:
            rules |= tensors.reducers(self._storages)
        if "IPython" in sys.modules:
            from IPython.core.interactiveshell import InteractiveShell

            rules[InteractiveShell] = lambda shell: (this_shell, ())
        return rules

    def _reduce_class(self, cls: type) -> Any:
        reduced = internals._class_reduce(cls)
        if reduced is NotImplemented:
            self.modules.add(cls.__module__)
            return reduced
        self._need_by_name(cls)
        return classes.reduce_by_value(cls, reduced, coming_home=self._namespace is None)

    def _reduce_function(self, function: FunctionType) -> Any:
        reduced = self._function_reduce(function)
        if reduced is NotImplemented:
            self.modules.add(function.__module__)
            return reduced
        self._need_by_name(function)
        self.filenames.add(function.__code__.co_filename)
        use = code_use(function.__code__)
        self.modules |= use.imports
        if function.__globals__ is self._namespace:
            self.needs.update(dict.fromkeys(sorted(use.names)))
            reduced[2][1]["__globals__"] = {}
        return reduced

    def _reduce_module(self, module: ModuleType) -> Any:
        self.modules.add(module.__name__)
        return NotImplemented

    def _need_by_name(self, definition: Any) -> None:
        """A DataLoader's processes send instances back by the name of their class."""
        name = definition.__qualname__.partition(".")[0]
        if self._namespace is not None and _finds(self._namespace.get(name), definition):
            self.needs[name] = None


def _finds(top: Any, definition: Any) -> bool:
    for part in definition.__qualname__.split(".")[1:]:
        top = getattr(top, "__dict__", {}).get(part)
    return top is definition
