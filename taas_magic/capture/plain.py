"""Convert plain data to bytes that can be read without running code, and back.

Plain data are tensors, arrays, numbers, strings, bytes, None, dates, paths, and containers of them.
A value becomes a table. Each row of the table is called a node, and describes one object. The
memory of large tensors and arrays is in buffers outside the table.
As in a pickle, shared objects and storages stay shared, and a container may hold itself.
"""

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath, PurePosixPath
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from msgspec import Struct

from taas_magic.capture.reducers import (
    bytes_of_storage,
    path_from_home,
    path_to_home,
    rebuild_untyped,
    storage_id,
)
from taas_magic.messages import from_bytes, to_bytes

if TYPE_CHECKING:
    import torch

MAX_DEPTH = 100
"""Maximum nesting depth of containers.

The writer and the reader refuse deeper values. Reason: Python hashes nested tuples without checking
for a stack overflow, so a forged table could crash the process.
"""

_INLINE_BYTES = 4096
"""Maximum size in bytes of tensor or array memory in the table; larger memory gets a buffer."""

Item = None | bool | int | float | str | tuple[int]
"""One entry of a node: a number, string, bool or None, or a tuple with the number of a node."""


class NotPlainError(TypeError):
    """Raised if an object in a value is not plain data, or is nested more than `MAX_DEPTH` deep."""


class PlainNode(Struct, array_like=True):
    """A row of a plain value's table, which describes one object of the value.

    Attributes:
        kind: Type of the object: a key of `_MAKERS` or `_CONTAINERS`.
        items: The object's parts.
        data: The object's memory, if it is in the table.
        buffer: Number of the buffer with the object's memory; -1 if no buffer has it.
    """

    kind: str
    items: list[Item] = []
    data: bytes = b""
    buffer: int = -1


class _Container(NamedTuple):
    """The two functions that rebuild one kind of mutable container.

    A container may contain itself, so one function makes the empty container. After all objects of
    the value have been made, the other function adds the elements to the container.
    """

    make: Callable[[list[Item]], Any]
    fill: Callable[[Any, list[Any]], None]


class PlainWriter:
    """Writer of the table for one plain value.

    Attributes:
        buffers: Memory of large values, not copied.
    """

    def __init__(self) -> None:
        self._nodes: list[PlainNode] = []
        self._numbers: dict[Hashable, int] = {}
        self._held: list[Any] = []
        self._depth = 0
        self.buffers: list[PickleBuffer] = []

    def write_value(self, value: Any) -> None:
        """Write `value` and all objects in it to the table. Call this method only once per writer.

        Raises:
            NotPlainError: An object in the value is not plain data.
        """
        number = self._item(value)
        self._nodes.append(PlainNode("root", [number]))

    @property
    def data(self) -> bytes:
        """The encoded table, for `read_plain`."""
        return to_bytes(self._nodes)

    def shared_objects(self) -> dict[int, Any]:
        """Return the value's mutable objects and tensor storages, by id.

        Values that contain the same object must be parts of one table. Otherwise the reader would
        get two copies of the object.
        """
        mutable = {id(it): it for it in self._held if _is_mutable(it)}
        return mutable | {key[1]: key for key in self._numbers if isinstance(key, tuple)}

    def _item(self, value: Any) -> Item:
        """Return the entry that stands for `value` in the node of the object that contains `value`.

        For None, a bool, a float, a 64-bit int or a UTF-8 string, the entry is the value itself.
        For any other value, the entry is a tuple with the number of the value's node. If the table
        does not have this node yet, write the node.
        """
        kind = type(value)
        if value is None or kind is bool or kind is float:
            return value  # type: ignore[no-any-return]
        if kind is int and -(1 << 63) <= value < 1 << 63:
            return value  # type: ignore[no-any-return]
        if kind is str and (value.isascii() or _is_utf8(value)):
            return value  # type: ignore[no-any-return]
        return (self._number(value),)

    def _items(self, values: Sequence[Any]) -> list[Item]:
        return [self._item(value) for value in values]

    def _number(self, value: Any) -> int:
        """Return the number of a value's node; if the table has no such node, write the node first.

        Raises:
            NotPlainError: The value is not plain data, or is nested more than `MAX_DEPTH` deep.
        """
        known = self._numbers.get(id(value))
        if known is not None:
            return known
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotPlainError(f"it is nested more than {MAX_DEPTH} deep")
        try:
            number = self._write(value)
        finally:
            self._depth -= 1
        self._numbers[id(value)] = number
        self._held.append(value)  # so that no other object gets the same id
        return number

    def _write(self, value: Any) -> int:
        """Write the node of a value that the table lacks, and return the node's number.

        Containers, immutable objects (`_REDUCERS`), bytes, large ints and strings that are not
        UTF-8 each have a form of their own. Values of torch and numpy are tried last, if this
        process has imported the library.

        Raises:
            NotPlainError: The value is not plain data.
        """
        kind = type(value)
        if kind in _PARTS and not getattr(value, "__dict__", None):
            return self._write_container(value, _PARTS[kind])
        if kind is OrderedDict and vars(value).keys() <= {"_metadata"}:  # state_dict() sets it
            return self._write_container(value, _parts_of_ordered)
        if kind in _REDUCERS:
            return self._append(PlainNode(kind.__name__, self._items(_REDUCERS[kind](value))))
        if kind in (bytes, bytearray):
            return self._append_memory(kind.__name__, [], value)
        if kind is int:
            size = value.bit_length() // 8 + 1
            data = value.to_bytes(size, "little", signed=True)
            return self._append(PlainNode("int", data=data))
        if kind is str:
            return self._append(PlainNode("str", data=value.encode("utf-8", "surrogatepass")))
        for module, write in (("torch", self._write_torch), ("numpy", self._write_numpy)):
            number = write(value) if module in sys.modules else None
            if number is not None:
                return number
        raise NotPlainError(f"a {kind.__module__}.{kind.__qualname__} is not plain data")

    def _write_container(self, value: Any, parts: Callable[[Any], Sequence[Any]]) -> int:
        """Write a container and its parts. Return the number of the container's node.

        The container gets its number first, because a part may refer to it.
        """
        number = self._append(PlainNode(type(value).__name__))
        self._numbers[id(value)] = number
        self._nodes[number].items = self._items(parts(value))
        return number

    def _write_torch(self, value: Any) -> int | None:
        """Write a dtype, device, size, tensor or parameter of torch; return the number of the node.

        Return None, and write nothing, for any other object and for a tensor that `_is_dense`
        excludes. The storage of a tensor gets a separate node; tensors with the same storage share
        this node. A storage on a GPU is copied to the CPU.
        """
        import torch

        if isinstance(value, torch.dtype):
            return self._append(PlainNode("torch.dtype", [str(value).removeprefix("torch.")]))
        if type(value) is torch.device:
            return self._append(PlainNode("torch.device", [str(value)]))
        if type(value) is torch.Size:
            return self._append(PlainNode("torch.Size", [*value]))
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or not _is_dense(value):
            return None
        storage = value.untyped_storage()
        key = ("storage", storage_id(storage))
        number = self._numbers.get(key)
        if number is None:
            device = value.device.type
            held = storage if device == "cpu" else storage.cpu()
            number = self._append_memory("storage", [device], bytes_of_storage(held))
            self._numbers[key] = number
            self._held.append(storage)
        kind = "Parameter" if type(value) is torch.nn.Parameter else "Tensor"
        dtype = str(value.dtype).removeprefix("torch.")
        form = [dtype, value.requires_grad, value.storage_offset(), *value.shape, *value.stride()]
        return self._append(PlainNode(kind, [(number,), *form]))

    def _write_numpy(self, value: Any) -> int | None:
        """Write a dtype, scalar or array of numpy; return the number of the node.

        Return None, and write nothing, for any other object, and if the dtype is not simple: for
        example, if the dtype has fields. An array in Fortran order keeps its order.
        """
        import numpy

        if isinstance(value, numpy.dtype) and _is_simple(value):
            return self._append(PlainNode("numpy.dtype", [value.str]))
        if isinstance(value, numpy.generic) and _is_simple(value.dtype):
            return self._append(PlainNode("numpy.generic", [value.dtype.str], value.tobytes()))
        if type(value) is not numpy.ndarray or not _is_simple(value.dtype):
            return None
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        flat = value.ravel(order=order)  # type: ignore[arg-type]
        memory = flat.view(numpy.uint8) if value.nbytes else b""
        return self._append_memory("ndarray", [value.dtype.str, order, *value.shape], memory)

    def _append(self, node: PlainNode) -> int:
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _append_memory(self, kind: str, items: list[Item], memory: Any) -> int:
        if memoryview(memory).nbytes <= _INLINE_BYTES:
            return self._append(PlainNode(kind, items, bytes(memory)))
        self.buffers.append(PickleBuffer(memory))
        return self._append(PlainNode(kind, items, buffer=len(self.buffers) - 1))


def read_plain(data: bytes, buffers: Sequence[memoryview]) -> Any:
    """Return the value of a table that `PlainWriter` wrote.

    This function is safe for data from an untrusted sender: a forged table cannot run code. The
    function makes all objects in the order of the nodes, with empty containers. Afterwards, it
    fills the containers. Arrays, and tensors on the CPU, use the memory of `buffers` without
    copying it. A tensor from a GPU is moved to a GPU of this process, or to the CPU if this process
    uses no GPU (`target_device`).

    Raises:
        ValueError: The table is damaged or forged, or an object cannot be made.
    """
    nodes = from_bytes(data, list[PlainNode])
    made: list[Any] = []
    depths: list[int] = []
    try:
        for node in nodes:
            below = [it[0] for it in node.items if isinstance(it, tuple)]
            if (container := _CONTAINERS.get(node.kind)) is not None:
                depths.append(0)  # containers are filled after all nodes are made
                made.append(container.make(node.items))
                continue
            if any(not 0 <= number < len(made) for number in below):
                raise ValueError("a node refers to a node that does not precede it")
            depths.append(1 + max((depths[number] for number in below), default=0))
            if depths[-1] > MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
            memory = buffers[node.buffer] if node.buffer >= 0 else memoryview(bytearray(node.data))
            made.append(_MAKERS[node.kind]([_resolved(it, made) for it in node.items], memory))
        for node, value in zip(nodes, made, strict=True):
            if (container := _CONTAINERS.get(node.kind)) is not None:
                container.fill(value, [_resolved(it, made) for it in node.items])
        if not nodes or nodes[-1].kind != "root":
            raise ValueError("it has no value")
    except ValueError:
        raise
    except Exception as error:  # with a forged table, a constructor may raise anything
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return made[-1]


def _resolved(item: Item, made: Sequence[Any]) -> Any:
    """Return the value of an entry of a node: the entry itself, or the value of another node.

    Args:
        made: Values of the nodes that were rebuilt so far, by number of the node.

    Raises:
        ValueError: The number of the other node is negative.
        IndexError: The other node does not exist.
    """
    if not isinstance(item, tuple):
        return item
    if item[0] < 0:
        raise ValueError("a node has a negative number")
    return made[item[0]]


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_mutable(value: Any) -> bool:
    kinds = (list, dict, set, deque, bytearray)
    return isinstance(value, kinds) or type(value).__name__ in ("ndarray", "Tensor", "Parameter")


def _is_dense(tensor: "torch.Tensor") -> bool:
    """Return whether storage, dtype, shape and strides describe a tensor completely.

    The result is False in these cases:

    - The tensor is sparse, quantized or nested, or is a conjugate or negative view.
    - The tensor is on a device other than CPU and CUDA.
    - The user has added attributes or hooks to the tensor.
    """
    import torch

    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
        and not getattr(tensor, "_backward_hooks", None)
    )


def _is_simple(dtype: Any) -> bool:
    """Return whether `dtype.str` describes a numpy dtype completely.

    False for a dtype of Python objects, for a dtype with fields or metadata, and for a dtype that a
    package other than numpy defines.
    """
    import numpy

    return dtype.kind in "biufcSUmM" and not dtype.metadata and numpy.dtype(dtype.str) == dtype


def _flatten_items(values: dict[Any, Any]) -> list[Any]:
    return [each for pair in values.items() for each in pair]


_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)
}
"""Types that are allowed as the `default_factory` of a defaultdict, by name.

A `default_factory` of None is allowed, too. With any other `default_factory`, a defaultdict is not
plain data.
"""


def _parts_of_defaultdict(value: defaultdict[Any, Any]) -> list[Any]:
    made_by = value.default_factory
    name = getattr(made_by, "__name__", "")
    if made_by is not None and _FACTORIES.get(name) is not made_by:
        raise NotPlainError("a defaultdict whose default_factory is not a built-in type")
    return [name, *_flatten_items(value)]


def _parts_of_ordered(value: Any) -> list[Any]:
    return [getattr(value, "_metadata", None), *_flatten_items(value)]


_PARTS: dict[type, Callable[[Any], Sequence[Any]]] = {
    list: lambda value: value,
    dict: _flatten_items,
    set: tuple,
    deque: lambda value: [value.maxlen, *value],
    Counter: _flatten_items,
    defaultdict: _parts_of_defaultdict,
}
"""Functions that return the parts of a mutable container, by type of the container."""


def _time_parts(value: datetime | time) -> list[Any]:
    if value.tzinfo is not None and type(value.tzinfo) is not timezone:
        raise NotPlainError("a time whose time zone is not a datetime.timezone")
    return [value.isoformat(), value.fold]


_REDUCERS: dict[type, Callable[[Any], Sequence[Any]]] = {
    tuple: lambda value: value,
    frozenset: tuple,
    complex: lambda value: [value.real, value.imag],
    range: lambda value: [value.start, value.stop, value.step],
    slice: lambda value: [value.start, value.stop, value.step],
    Decimal: lambda value: [str(value)],
    Fraction: lambda value: [value.numerator, value.denominator],
    date: lambda value: [value.isoformat()],
    datetime: _time_parts,
    time: _time_parts,
    timedelta: lambda value: [value.days, value.seconds, value.microseconds],
    UUID: lambda value: [value.hex],
    PosixPath: lambda value: [path_to_home(str(value))],
    PurePosixPath: lambda value: [path_to_home(str(value))],
}
"""Functions that return the parts from which an immutable object can be made, by type."""


def _fill_dict(value: dict[Any, Any], items: list[Any]) -> None:
    dict.update(value, zip(items[::2], items[1::2], strict=True))


def _fill_ordered(value: Any, items: list[Any]) -> None:
    if items[0] is not None:
        value._metadata = items[0]
    for key, each in zip(items[1::2], items[2::2], strict=True):
        value[key] = each


def _fill_defaultdict(value: defaultdict[Any, Any], items: list[Any]) -> None:
    value.default_factory = _FACTORIES[items[0]] if items[0] else None
    _fill_dict(value, items[1:])


def _make_deque(items: list[Item]) -> deque[Any]:
    most = items[0]
    return deque(maxlen=most if type(most) is int else None)


_CONTAINERS: dict[str, _Container] = {
    "list": _Container(lambda items: [], list.extend),
    "dict": _Container(lambda items: {}, _fill_dict),
    "set": _Container(lambda items: set(), set.update),
    "deque": _Container(_make_deque, lambda value, items: value.extend(items[1:])),
    "Counter": _Container(lambda items: Counter(), _fill_dict),
    "OrderedDict": _Container(lambda items: OrderedDict(), _fill_ordered),
    "defaultdict": _Container(lambda items: defaultdict(), _fill_defaultdict),
}


def _make_tensor(items: list[Any], memory: memoryview) -> "torch.Tensor":
    """Make a tensor that uses an existing storage, without copying the storage.

    Args:
        items: Storage, name of the dtype, `requires_grad`, offset, sizes, and strides.
        memory: Not used; other functions in `_MAKERS` need it.

    Raises:
        ValueError: The tensor would exceed its storage, or an item is invalid.
    """
    import torch

    storage, name, requires_grad, offset, *form = items
    shape, stride = form[: len(form) // 2], form[len(form) // 2 :]
    dtype = _dtype([name], memory)
    if not isinstance(storage, torch.UntypedStorage) or min([offset, *form]) < 0:
        raise ValueError("no tensor can have this form")
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if 0 not in shape and (last + 1) * dtype.itemsize > storage.nbytes():
        raise ValueError("a tensor exceeds its storage")
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    tensor = empty.set_(storage, offset, shape, stride)
    return tensor.requires_grad_(bool(requires_grad))


def _make_parameter(items: list[Any], memory: memoryview) -> "torch.Tensor":
    import torch

    tensor = _make_tensor([*items[:2], False, *items[3:]], memory)
    return torch.nn.Parameter(tensor, bool(items[2]))


def _dtype(items: list[Any], memory: memoryview) -> "torch.dtype":
    import torch

    dtype = vars(torch).get(items[0])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {items[0]!r}")
    return dtype


def _make_device(items: list[Any], memory: memoryview) -> "torch.device":
    import torch

    return torch.device(str(items[0]))


def _make_size(items: list[Any], memory: memoryview) -> "torch.Size":
    import torch

    return torch.Size(items)


def _numpy_dtype(items: list[Any], memory: memoryview) -> Any:
    import numpy

    dtype = numpy.dtype(str(items[0]))
    if not _is_simple(dtype):
        raise ValueError(f"arrays of {dtype} are not plain data")
    return dtype


def _make_array(items: list[Any], memory: memoryview) -> Any:
    import numpy

    name, order, *shape = items
    dtype = _numpy_dtype([name], memory)
    if 0 in shape or not dtype.itemsize:
        return numpy.zeros(shape, dtype, order)
    return numpy.frombuffer(memory, dtype).reshape(shape, order=order)


def _make_scalar(items: list[Any], memory: memoryview) -> Any:
    return _make_array([*items, "C", 1], memory)[0]


def _make_datetime(items: list[Any], memory: memoryview) -> datetime:
    return datetime.fromisoformat(items[0]).replace(fold=items[1])


def _make_time(items: list[Any], memory: memoryview) -> time:
    return time.fromisoformat(items[0]).replace(fold=items[1])


_MAKERS: dict[str, Callable[[list[Any], memoryview], Any]] = {
    "root": lambda items, memory: items[0],
    "tuple": lambda items, memory: tuple(items),
    "frozenset": lambda items, memory: frozenset(items),
    "bytes": lambda items, memory: bytes(memory),
    "bytearray": lambda items, memory: bytearray(memory),
    "int": lambda items, memory: int.from_bytes(memory, "little", signed=True),
    "str": lambda items, memory: str(memory, "utf-8", "surrogatepass"),
    "complex": lambda items, memory: complex(*items),
    "range": lambda items, memory: range(*items),
    "slice": lambda items, memory: slice(*items),
    "Decimal": lambda items, memory: Decimal(items[0]),
    "Fraction": lambda items, memory: Fraction(*map(int, items)),
    "date": lambda items, memory: date.fromisoformat(items[0]),
    "datetime": _make_datetime,
    "time": _make_time,
    "timedelta": lambda items, memory: timedelta(*items),
    "UUID": lambda items, memory: UUID(hex=items[0]),
    "PosixPath": lambda items, memory: Path(path_from_home(items[0])),
    "PurePosixPath": lambda items, memory: PurePosixPath(path_from_home(items[0])),
    "storage": lambda items, memory: rebuild_untyped(memory, items[0] if items else "cpu"),
    "Tensor": _make_tensor,
    "Parameter": _make_parameter,
    "torch.dtype": _dtype,
    "torch.device": _make_device,
    "torch.Size": _make_size,
    "numpy.dtype": _numpy_dtype,
    "numpy.generic": _make_scalar,
    "ndarray": _make_array,
}
"""Functions that make the value of a node, by `PlainNode.kind`.

For security, `read_plain` calls only these functions and the functions in `_CONTAINERS`.
"""
