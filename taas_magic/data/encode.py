"""A batch <-> a small table of contents and large buffers that nobody copies.

Pickle protocol 5 carries buffers out of band, but torch tensors offer none and a view would drag
its whole storage along. Here a tensor leaves the pickle as a number; after the pickle is done, the
tensors' memory is laid out: a view travels as its own bytes, and tensors whose bytes overlap travel
once and share their memory again at the other end. Everything that is not a plain dense CPU tensor
(sparse, requires_grad, with attributes) is built from those that are.

Body of a batch: `[head][buffer][buffer]…`, each aligned to 64 bytes (`wire.layout`).
"""

import copyreg
import ctypes
import io
import pickle
import struct
from collections import ChainMap
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cloudpickle
import torch

from taas_magic.data import wire

_ZEROS = bytes(wire.ALIGN)
_PREFIX = struct.Struct("<II")
_MASK = (1 << 64) - 1
_SUM_CHUNK_BYTES = 256 << 10
_FEW_BYTES = 2048
_WIDEST = 16
_THIN = 2
"""Overlapping views travel together unless that costs more than so many times their own bytes."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A batch ready to be sent.

    Attributes:
        head: Table of contents: sizes of the buffers, tensors, pickle.
        buffers: The bytes themselves, in place; they keep their memory alive.
        body_bytes: Size of the body on the wire.
    """

    head: bytes
    buffers: tuple[memoryview, ...]
    body_bytes: int

    def parts(self) -> list[bytes | memoryview]:
        """The body as consecutive pieces, padding included, for a vectored write."""
        parts: list[bytes | memoryview] = []
        for part in self._pieces():
            parts.append(part)
            if padding := -len(part) % wire.ALIGN:
                parts.append(_ZEROS[:padding])
        return parts

    def checksum(self) -> int:
        """The checksum of the body (see `checksum`)."""
        return sum([checksum(piece) for piece in self._pieces()]) & _MASK

    def _pieces(self) -> list[bytes | memoryview]:
        return [self.head, *self.buffers]


def checksum(data: bytes | memoryview) -> int:
    """Sum of the data's 64-bit little-endian words, the last filled up with zeros.

    A sum can be taken as fast as memory is read (20 to 40 GB/s, a CRC reaches 3), over the parts
    of a body one by one, and sees every flipped, lost or overwritten run of bits that TCP's own
    16-bit sum lets through. It runs without the interpreter lock.
    """
    size = len(data)
    if size < _FEW_BYTES:
        return sum(memoryview(bytes(data) + bytes(-size % 8)).cast("Q")) & _MASK
    if isinstance(data, bytes) or data.readonly:
        # frombuffer warns of memory that it may not write.
        data = memoryview(bytearray(data))
    total, whole = int.from_bytes(data[size & ~7 :], "little"), size & ~7
    for start in range(0, whole, _SUM_CHUNK_BYTES):
        words = min(_SUM_CHUNK_BYTES, whole - start) >> 3
        chunk = torch.frombuffer(data, dtype=torch.int64, offset=start, count=words)
        total += int(chunk.sum().item())
    return total & _MASK


_DTYPES = {
    str(value)[6:]: value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_NAMES = {value: name for name, value in _DTYPES.items()}


class _Row(NamedTuple):
    """Where a tensor lies: which buffer (-1: it is empty), at which byte, and its form."""

    buffer: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__
    )


def _dressed(plain: torch.Tensor, grad: bool, attributes: dict[str, Any]) -> torch.Tensor:
    plain.requires_grad_(grad).__dict__.update(attributes)
    return plain


def _sparse_coo(
    indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, coalesced: bool
) -> torch.Tensor:
    made = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
    return made._coalesced_(coalesced)


def _sparse_compressed(
    compressed: torch.Tensor,
    plain: torch.Tensor,
    values: torch.Tensor,
    shape: torch.Size,
    layout: torch.layout,
) -> torch.Tensor:
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=layout, check_invariants=False
    )


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Build a tensor that is not plain from tensors that are."""
    if tensor.requires_grad or tensor.__dict__:
        bare = tensor.detach()
        return _dressed, (bare, tensor.requires_grad, dict(tensor.__dict__))
    if tensor.is_conj() or tensor.is_neg():
        return torch.Tensor.detach, (tensor.resolve_conj().resolve_neg(),)
    if tensor.layout is torch.sparse_coo:
        parts = tensor._indices(), tensor._values()
        return _sparse_coo, (*parts, tensor.shape, tensor.is_coalesced())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = tensor.crow_indices(), tensor.col_indices()
        return _sparse_compressed, (*parts, tensor.values(), tensor.shape, tensor.layout)
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = tensor.ccol_indices(), tensor.row_indices()
        return _sparse_compressed, (*parts, tensor.values(), tensor.shape, tensor.layout)
    return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]


_Table = MutableMapping[type, Any]
_TENSOR: dict[type, Any] = {torch.Tensor: _reduce_tensor}


class _Numbered:
    """Mixed into a pickler: plain tensors become numbers, in the order they are met."""

    tensors: list[torch.Tensor]
    _numbers: dict[int, int]

    def persistent_id(self, value: object) -> int | None:
        if type(value) is not torch.Tensor or not _is_plain(value):
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number


class _FastPickler(_Numbered, pickle.Pickler):
    """For types that an import finds: pickles in C."""

    dispatch_table: ClassVar[_Table] = ChainMap(_TENSOR, copyreg.dispatch_table)  # type: ignore[misc]


class _CloudPickler(_Numbered, cloudpickle.Pickler):
    """For types that a notebook defines: pickled by value."""

    dispatch_table: ClassVar[_Table] = ChainMap(_TENSOR, cloudpickle.Pickler.dispatch_table)


def _pickle(
    value: object, pickler_type: type[_FastPickler] | type[_CloudPickler]
) -> tuple[bytes, list[pickle.PickleBuffer], list[torch.Tensor]]:
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = pickler_type(file, protocol=5, buffer_callback=buffers.append)
    pickler.tensors, pickler._numbers = [], {}
    pickler.dump(value)
    return file.getvalue(), buffers, pickler.tensors


def encode(value: object) -> Encoded:
    """Take a batch apart; its tensors' and arrays' memory is referred to, not copied.

    Runs in a fetcher's lane. The batch must not be changed while the result is in use.

    Raises:
        Exception: Whatever the pickling of a custom type raises.
    """
    try:
        pickled, arrays, tensors = _pickle(value, _FastPickler)
    except (pickle.PicklingError, AttributeError, TypeError):
        pickled, arrays, tensors = _pickle(value, _CloudPickler)
    rows, spans = _lay_out(tensors, first_buffer=len(arrays))
    buffers = (*(array.raw() for array in arrays), *spans)
    sizes = [len(buffer) for buffer in buffers]
    table = pickle.dumps((sizes, [tuple(row) for row in rows]), protocol=5)
    head = _PREFIX.pack(len(table), len(pickled)) + table + pickled
    _, body_bytes = wire.layout(len(head), sizes)
    return Encoded(head, buffers, body_bytes)


class _Extent(NamedTuple):
    start: int
    end: int
    number: int


def _extent(number: int, tensor: torch.Tensor) -> _Extent:
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return _Extent(start, start + tensor.nbytes, number)
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return _Extent(start, start + (reach + 1) * tensor.element_size(), number)


def _overlapping(extents: Iterable[_Extent]) -> list[list[_Extent]]:
    """Group extents that overlap, directly or through others."""
    groups: list[list[_Extent]] = []
    end = 0
    for extent in sorted(extents):
        if groups and extent.start < end:
            groups[-1].append(extent)
        else:
            groups.append([extent])
            end = 0
        end = max(end, extent.end)
    return groups


def _lay_out(
    tensors: Sequence[torch.Tensor], first_buffer: int
) -> tuple[list[_Row], list[memoryview]]:
    """Decide which bytes travel, and where each tensor lies in them."""
    rows = [_Row(-1, 0, _NAMES[t.dtype], tuple(t.shape), t.stride()) for t in tensors]
    spans: list[memoryview] = []

    def travel(start: int, end: int, members: Iterable[_Extent], owner: torch.Tensor) -> None:
        for at, _, number in members:
            _, _, dtype, shape, stride = rows[number]
            rows[number] = _Row(first_buffer + len(spans), at - start, dtype, shape, stride)
        spans.append(_memory(start, end - start, owner))

    for group in _overlapping([_extent(k, t) for k, t in enumerate(tensors) if t.numel()]):
        owner = tensors[group[0].number]
        start, end = group[0].start, max([extent.end for extent in group])
        most_bytes = owner.nbytes
        if len(group) > 1:
            # Mixed dtypes: every offset stays a multiple of its element size.
            start -= (start - owner.untyped_storage().data_ptr()) % _WIDEST
            most_bytes = _THIN * sum([tensors[extent.number].nbytes for extent in group]) + _WIDEST
        if end - start <= most_bytes:
            travel(start, end, group, owner)
            continue
        for extent in group:
            dense = tensors[extent.number].contiguous()
            rows[extent.number] = rows[extent.number]._replace(stride=dense.stride())
            own = _extent(extent.number, dense)
            travel(own.start, own.end, [own], dense)
    return rows, spans


def _memory(address: int, size: int, owner: torch.Tensor) -> memoryview:
    """Bytes of a tensor, which the view keeps alive."""
    array = (ctypes.c_ubyte * size).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]
    return pickle.PickleBuffer(array).raw()


def decode(body: memoryview, head_bytes: int) -> Any:
    """Put a batch together; its tensors and arrays are views of `body`, which they keep alive.

    Only what a peer sent that has proved the run's key may come here: it is unpickled.

    Args:
        body: The whole body, writable, its start aligned.
        head_bytes: Size of its table of contents.
    """
    table_bytes, pickle_bytes = _PREFIX.unpack_from(body)
    after = _PREFIX.size + table_bytes
    sizes, rows = pickle.loads(body[_PREFIX.size : after])
    offsets, _ = wire.layout(head_bytes, sizes)
    buffers = [body[at : at + n] for at, n in zip(offsets, sizes, strict=True)]
    pickled = io.BytesIO(body[after : after + pickle_bytes])
    unpickler = _Unpickler(pickled, buffers=buffers)
    unpickler.tensors = _rebuild(rows, buffers)
    return unpickler.load()


class _Unpickler(pickle.Unpickler):
    tensors: list[torch.Tensor]

    def persistent_load(self, number: int) -> torch.Tensor:
        return self.tensors[number]


def _rebuild(rows: Iterable[tuple[Any, ...]], buffers: list[memoryview]) -> list[torch.Tensor]:
    storages: dict[int, torch.UntypedStorage] = {}
    tensors = []
    for buffer, offset, dtype_name, shape, stride in rows:
        tensor = torch.empty(0 if buffer >= 0 else shape, dtype=_DTYPES[dtype_name])
        if buffer >= 0:
            if buffer not in storages:
                flat = torch.frombuffer(buffers[buffer], dtype=torch.uint8)
                storages[buffer] = flat.untyped_storage()
            tensor.set_(storages[buffer], offset // tensor.element_size(), shape, stride)
        tensors.append(tensor)
    return tensors


def as_bytes(value: object) -> bytes:
    """Encode into one piece (small things: a sample, an order, an error)."""
    encoded = encode(value)
    return struct.pack("<Q", len(encoded.head)) + bytes(wire.ALIGN - 8) + b"".join(encoded.parts())


def from_bytes(data: bytes) -> Any:
    """Undo `as_bytes`."""
    (head_bytes,) = struct.unpack_from("<Q", data)
    return decode(memoryview(bytearray(data))[wire.ALIGN :], head_bytes)
