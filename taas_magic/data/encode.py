"""Encoding of a batch as a small table of contents and large buffers, without copying the buffers.

torch tensors do not support pickle's out-of-band buffers. So the pickle contains a number in place
of each tensor, and this module decides which memory to send:

* For a tensor that is a view, only the bytes of the view are sent, not the whole storage.
* The memory of overlapping tensors is sent once, and the decoded tensors share memory again.
* A tensor that is not a plain dense CPU tensor (for example sparse, or with requires_grad) is
  encoded as a function call that rebuilds the tensor from plain tensors.

The encoded batch is called a body: `[table of contents][buffer][buffer]…`. The table of contents
(`Encoded.head`) includes the pickle. The table and each buffer are aligned to 64 bytes.
"""

import copyreg
import ctypes
import hashlib
import io
import math
import pickle
import struct
import sys
from collections import ChainMap, Counter
from collections.abc import Hashable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import cloudpickle
import torch

from taas_magic.data import protocol

_ZEROS = bytes(protocol.ALIGN)
_PREFIX = struct.Struct("<II")
"""Format of the first bytes of a table of contents: the table's size, and the pickle's size."""

_MOST_FORMS = 256
"""Maximum number of tables of contents in each of this module's caches."""

_CACHED_HEAD_BYTES = 4096
"""Maximum bytes of a table of contents whose checksum and decoded form are cached."""

_MOST_PARTS = 16
"""Maximum number of tensors in a common batch (see `_split`)."""

_PIECE_BYTES = 256 << 10
"""Bytes in each piece of a buffer: a piece is copied, then its checksum is computed."""

_WIDEST = 16
"""Size in bytes of an element of the dtype with the largest elements (complex128)."""

_THIN = 2
"""Maximum size of a span with overlapping tensors, as a multiple of the tensors' total size.

If the span is larger, each tensor is sent separately.
"""

_MOST_SPREAD, _SPREAD_FROM_BYTES = 16, 1 << 20
"""Limits on the span of a view with gaps; the span reaches from the first to the last value.

If the span exceeds both limits, the rank gets a dense tensor: a tensor with the view's strides
would need memory for the whole span. The first limit is a multiple of the size of the view's
values. The second limit is in bytes.
"""

SUM_MASK = (1 << 64) - 1

_DTYPES = {str(one)[6:]: one for one in vars(torch).values() if isinstance(one, torch.dtype)}
_NAMES = {value: name for name, value in _DTYPES.items()}

_numpy: Any = sys.modules.get("numpy")  # if numpy is installed, torch has imported it
_WORD = _numpy.dtype("<u8") if _numpy else None

_heads: dict[Hashable, tuple[bytes, int]] = {}
"""Cache of tables of contents and body sizes, by the form of a batch (see `_split`)."""


@dataclass(slots=True)
class Encoded:
    """Encoded batch. Its buffers are the memory of the batch's tensors and arrays, not copies.

    Attributes:
        head: Table of contents, padded to the alignment.
        body_bytes: Size of the whole encoded batch, including padding.
    """

    head: bytes
    buffers: tuple[memoryview, ...]
    body_bytes: int

    def parts(self) -> list[bytes | memoryview]:
        """Return the pieces of the encoded batch, including padding, in the order to write them."""
        parts: list[bytes | memoryview] = [self.head]
        for buffer in self.buffers:
            parts.append(buffer)
            if padding := -len(buffer) % protocol.ALIGN:
                parts.append(_ZEROS[:padding])
        return parts

    def copy_to(self, room: memoryview, is_summed: bool = False) -> int:
        """Copy the encoded batch into `room`, which has `body_bytes` bytes.

        Args:
            is_summed: Whether to compute the checksum of the copied bytes.

        Returns:
            The checksum; 0 if `is_summed` is False.
        """
        at = len(self.head)
        room[:at] = self.head
        # Do not cache the checksum of a large table of contents: no other batch has the same one.
        sum_of_head = _sum_of_head if at <= _CACHED_HEAD_BYTES else checksum
        total = sum_of_head(self.head) if is_summed else 0
        for buffer in self.buffers:
            for start in range(0, len(buffer), _PIECE_BYTES):
                # Compute the checksum piece by piece, while the data is in the processor's cache.
                piece = buffer[start : start + _PIECE_BYTES]
                room[at : at + len(piece)] = piece
                at += len(piece)
                total += checksum(piece) if is_summed else 0
            padding = -at % protocol.ALIGN
            room[at : at + padding] = _ZEROS[:padding]
            at += padding
        return total & SUM_MASK


NOTHING = Encoded(b"", (), 0)
"""Body without any bytes, for responses without content."""


class TensorRow(NamedTuple):
    """Entry of the table of contents for one tensor.

    Attributes:
        buffer: Index of the buffer that has the tensor's values; -1 for an empty tensor.
        offset: Byte offset of the first value in the buffer.
    """

    buffer: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _tensor_row(buffer: int, tensor: torch.Tensor) -> TensorRow:
    return TensorRow(buffer, 0, _NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is fully described by its values, dtype, shape and strides.

    This is true only for a strided CPU tensor without a gradient flag or Python attributes. The
    tensor must not be nested or quantized, and not be a conjugate or negative view.
    """
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__
    )


def _with_grad_and_attributes(
    plain: torch.Tensor, grad: bool, attributes: dict[str, Any]
) -> torch.Tensor:
    plain.requires_grad_(grad).__dict__.update(attributes)
    return plain


def _reduce(tensor: torch.Tensor) -> Any:
    """Return a function and arguments that rebuild a tensor.

    All tensors in the arguments are plain: described fully by values, dtype, shape and strides.

    This is a reducer for pickle's `dispatch_table`. It handles tensors with a gradient flag or
    attributes, conjugate and negative views, and nested and sparse tensors. For other tensors, it
    returns torch's own reduction.
    """
    if tensor.requires_grad or tensor.__dict__:
        return _with_grad_and_attributes, (
            tensor.detach(),
            tensor.requires_grad,
            dict(tensor.__dict__),
        )
    if tensor.is_conj():
        return torch.conj, (tensor.conj(),)
    if tensor.is_neg():
        return torch.Tensor.detach, (tensor.resolve_neg(),)
    if tensor.is_nested and tensor.layout is torch.strided:
        return torch.nested.as_nested_tensor, ([*tensor.unbind()],)
    # Do not use torch's own reduction of sparse tensors: unpickling keeps them in a list forever.
    if tensor.layout is torch.sparse_coo:
        is_coalesced = tensor.is_coalesced()
        coo = partial(torch.sparse_coo_tensor, check_invariants=False, is_coalesced=is_coalesced)
        return coo, (tensor._indices(), tensor._values(), tensor.shape)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        indices = tensor.crow_indices(), tensor.col_indices()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        indices = tensor.ccol_indices(), tensor.row_indices()
    else:
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    layout = tensor.layout
    compressed = partial(torch.sparse_compressed_tensor, check_invariants=False, layout=layout)
    return compressed, (*indices, tensor.values(), tensor.shape)


def _reduce_array(array: Any) -> Any:
    """Return the function call that rebuilds a numpy array with its strides.

    This is a reducer for pickle's `dispatch_table`. For an array with gaps, the result is a call of
    `_strided_array` with a dense copy of the array, because numpy's own reducer would lose the
    strides.

    Return the result of numpy's own reducer if the array is dense or empty, or has Python objects.
    Do the same if the gaps are too large (`_MOST_SPREAD`, `_SPREAD_FROM_BYTES`); the strides are
    then lost.
    """
    low, high = _span(array.shape, array.strides)
    is_far = high - low > max(_MOST_SPREAD * array.nbytes, _SPREAD_FROM_BYTES)
    is_dense = array.flags.c_contiguous or array.flags.f_contiguous
    if is_dense or is_far or not array.size or array.dtype.hasobject:
        return array.__reduce_ex__(5)
    return _strided_array, (_numpy.ascontiguousarray(array), array.strides)


def _strided_array(dense: Any, strides: tuple[int, ...]) -> Any:
    """Copy a dense array into a new array that has the given strides in bytes; return the copy."""
    low, high = _span(dense.shape, strides)
    memory = bytearray(high - low + dense.itemsize)
    array = _numpy.ndarray(dense.shape, dense.dtype, memory, -low, strides)
    array[...] = dense
    return array


def _span(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """Return the lowest and the highest byte offset of an array's elements.

    Offsets are relative to element 0, so the lowest one is negative if a stride is negative.
    """
    ends = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
    return sum(min(end, 0) for end in ends), sum(max(end, 0) for end in ends)


_Table = MutableMapping[type, Any]
_REDUCERS: dict[type, Any] = {torch.Tensor: _reduce}
if _numpy:
    _REDUCERS[_numpy.ndarray] = _reduce_array


class _TensorNumberingMixin:
    """Mixin for a pickler that writes a number in place of each plain tensor.

    The tensors are collected in `tensors`, in the order in which they occur in the batch.
    """

    tensors: list[torch.Tensor]
    _numbers: dict[int, int]

    def persistent_id(self, value: object) -> int | None:
        if type(value) is not torch.Tensor or not _is_plain(value):
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number


class _FastPickler(_TensorNumberingMixin, pickle.Pickler):
    """Fast pickler, written in C, for batches whose types can be imported."""

    dispatch_table: ClassVar[_Table] = ChainMap(_REDUCERS, copyreg.dispatch_table)  # type: ignore[misc]


class _CloudPickler(_TensorNumberingMixin, cloudpickle.Pickler):
    """Pickler for batches with types that the notebook defines; pickles these types by value."""

    dispatch_table: ClassVar[_Table] = ChainMap(_REDUCERS, cloudpickle.Pickler.dispatch_table)


def _pickle(
    value: object, pickler_type: type[_FastPickler] | type[_CloudPickler]
) -> tuple[bytes, list[pickle.PickleBuffer], list[torch.Tensor]]:
    """Pickle a value.

    Returns:
        The pickle, its out-of-band buffers, and the plain tensors. In the pickle, each plain tensor
        is replaced by its index in the list of plain tensors.
    """
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = pickler_type(file, protocol=5, buffer_callback=buffers.append)
    pickler.tensors, pickler._numbers = [], {}
    pickler.dump(value)
    return file.getvalue(), buffers, pickler.tensors


def encode(value: object) -> Encoded:
    """Encode a batch in a worker, if possible without copying its tensors and arrays.

    The result uses the memory of the batch, so do not modify the batch while the result is in use.
    For a common batch (`_split`), the table of contents comes from a cache; a missing table is
    made by pickling the batch, and added to the cache. A full cache is emptied first. Any other
    batch is pickled each time (`_encode_any`).

    Raises:
        Exception: Any exception that a custom type raises when it is pickled.
    """
    common = _split(value)
    if common is None:
        return _encode_any(value)
    form, buffers = common
    known = _heads.get(form)
    if known is None:
        if len(_heads) >= _MOST_FORMS:
            _heads.clear()
        pickled, _, numbered = _pickle(value, _FastPickler)
        rows = [_tensor_row(at, one) for at, one in enumerate(numbered)]
        known = _heads[form] = _head(pickled, buffers, rows)
    return Encoded(known[0], buffers, known[1])


def _split(batch: Any) -> tuple[Hashable, tuple[memoryview, ...]] | None:
    """Split a common batch into its form and the memory of its tensors.

    A common batch is a tensor, or a list, tuple or dict (with strings as keys) of 1 to
    `_MOST_PARTS` tensors. Instances of subclasses of these types are not common batches. The
    tensors are dense, not empty, and do not overlap. The table of contents depends
    only on the batch's form: container, names, dtypes and shapes. So the table is cached by form,
    which saves pickling.

    Returns:
        The form and the tensors' memory; None if the batch is not a common one.
    """
    kind, names = type(batch), ()
    if kind is torch.Tensor:
        parts: Sequence[torch.Tensor] = (batch,)
    elif kind is list or kind is tuple:
        parts = batch
    elif kind is dict and all([type(name) is str for name in batch]):
        parts, names = tuple(batch.values()), tuple(batch)
    else:
        return None
    if not 0 < len(parts) <= _MOST_PARTS:
        return None
    try:
        buffers = tuple([_memory(tensor) for tensor in parts])
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    if len(parts) > 1 and _overlap(parts):
        return None
    return (kind, names, *[(tensor.dtype, tensor.shape) for tensor in parts]), buffers


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return a view of the memory with a tensor's values.

    Raises:
        AttributeError, RuntimeError, TypeError, ValueError: The value is not a plain dense CPU
            tensor, or the tensor is empty.
    """
    if type(tensor) is not torch.Tensor or tensor.__dict__:
        raise TypeError
    array: Any = tensor.numpy()  # Any, because numpy's type annotations differ by version
    return memoryview(array).cast("B")


def _overlap(parts: Sequence[torch.Tensor]) -> bool:
    end = 0
    for start, size in sorted([(tensor.data_ptr(), tensor.nbytes) for tensor in parts]):
        if start < end:
            return True
        end = start + size
    return False


def _encode_any(value: object) -> Encoded:
    """Encode a batch of any form.

    Use the fast pickler. If it fails, or if the batch may contain types that the notebook defines,
    use the slower `_CloudPickler`, which also pickles the definitions of these types. Then choose
    the spans of the tensors' memory, and make the table of contents.
    """
    try:
        pickled, arrays, tensors = _pickle(value, _FastPickler)
        # A rank may lack the notebook's types, so the slower pickler pickles these types by value.
        # If "__main__" is only a text in the batch, the slower pickler gives the same batch.
        is_importable = b"__main__" not in pickled
    except (pickle.PicklingError, AttributeError, TypeError):
        is_importable = False
    if not is_importable:
        pickled, arrays, tensors = _pickle(value, _CloudPickler)
    rows, spans = _choose_spans(tensors, first_buffer=len(arrays))
    buffers = (*(array.raw() for array in arrays), *spans)
    head, body_bytes = _head(pickled, buffers, rows)
    return Encoded(head, buffers, body_bytes)


def _head(
    pickled: bytes, buffers: Sequence[memoryview], rows: list[TensorRow]
) -> tuple[bytes, int]:
    """Return the padded table of contents of a batch, and the size of the whole body."""
    sizes = [len(buffer) for buffer in buffers]
    table = pickle.dumps((sizes, [tuple(row) for row in rows]), protocol=5)
    head = _PREFIX.pack(len(table), len(pickled)) + table + pickled
    head += _ZEROS[: -len(head) % protocol.ALIGN]
    return head, protocol.layout(len(head), sizes)[1]


class _MemoryRange(NamedTuple):
    """Memory range of a tensor, and the tensor's number in the batch.

    Attributes:
        end: Address after the last byte.
    """

    start: int
    end: int
    number: int


def _memory_range(number: int, tensor: torch.Tensor) -> _MemoryRange:
    start, reach = tensor.data_ptr(), _range_length(tensor.shape, tensor.stride())
    return _MemoryRange(start, start + reach * tensor.element_size(), number)


def _range_length(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the length of a tensor's memory range in elements, including gaps."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def _overlapping(extents: Iterable[_MemoryRange]) -> list[list[_MemoryRange]]:
    """Return groups of tensors that overlap in memory.

    Two tensors are in the same group if they overlap, or if a chain of overlapping tensors connects
    them. A tensor without overlap is a group of its own. The groups are sorted by the smallest
    tensor number in each group. Sorted by address, they could differ between equal batches, which
    must have equal fingerprints.
    """
    groups: list[list[_MemoryRange]] = []
    end = 0
    for extent in sorted(extents):
        if groups and extent.start < end:
            groups[-1].append(extent)
            end = max(end, extent.end)
        else:
            groups.append([extent])
            end = extent.end
    return sorted(groups, key=lambda group: min(extent.number for extent in group))


def _choose_spans(
    tensors: Sequence[torch.Tensor], first_buffer: int
) -> tuple[list[TensorRow], list[memoryview]]:
    """Choose the spans of memory to send, and compute each tensor's offset in its span.

    - An empty tensor gets no span.
    - A dense tensor that overlaps no other tensor gets a span of its own.
    - Tensors whose memory overlaps share a span, if the span has at most `_THIN` times their total
      size. The start of a shared span is aligned to the widest element size.
    - Any other tensor is copied to a dense span of its own, unless it is dense already. The
      receiver restores the tensor's old strides, if their gaps are not too large (`_MOST_SPREAD`).

    Args:
        first_buffer: Index of the first span among the body's buffers.

    Returns:
        The table's entry for each tensor, and the spans.
    """
    rows = [_tensor_row(-1, tensor) for tensor in tensors]
    spans: list[memoryview] = []

    def add_span(
        start: int, end: int, extents: Iterable[_MemoryRange], owner: torch.Tensor
    ) -> None:
        for at, _, number in extents:
            buffer = first_buffer + len(spans)
            rows[number] = rows[number]._replace(buffer=buffer, offset=at - start)
        array = (ctypes.c_ubyte * (end - start)).from_address(start)
        array.owner = owner  # type: ignore[attr-defined]  # the view keeps it alive
        spans.append(pickle.PickleBuffer(array).raw())

    for group in _overlapping([_memory_range(k, t) for k, t in enumerate(tensors) if t.numel()]):
        owner = tensors[group[0].number]
        start, end = group[0].start, max([extent.end for extent in group])
        most_bytes = owner.nbytes
        if len(group) > 1:
            # Dtypes may differ: align the start, so that each offset is a multiple of the tensor's
            # element size.
            start -= (start - owner.untyped_storage().data_ptr()) % _WIDEST
            most_bytes = _THIN * sum([tensors[extent.number].nbytes for extent in group]) + _WIDEST
        if end - start <= most_bytes:
            add_span(start, end, group, owner)
            continue
        for extent in group:
            tensor = tensors[extent.number]
            dense = tensor.contiguous()
            if extent.end - extent.start > max(_MOST_SPREAD * tensor.nbytes, _SPREAD_FROM_BYTES):
                rows[extent.number] = rows[extent.number]._replace(stride=dense.stride())
            own = _memory_range(extent.number, dense)
            add_span(own.start, own.end, [own], dense)
    return rows, spans


def decode(body: memoryview, head_bytes: int) -> Any:
    """Decode a body and return the batch.

    The tensors and arrays of the batch are views of the memory of `body`, and keep this memory
    alive. Only one kind of tensor is a copy: its strides have gaps, but its values were sent
    without gaps. Decoded tables of contents of up to `_CACHED_HEAD_BYTES` bytes are cached.

    This function unpickles data of the body. So the body must come from a peer that has proved that
    it knows the run's key.

    Args:
        body: The whole body; writable, with an aligned start.
        head_bytes: Size of the body's table of contents.
    """
    read = _contents if head_bytes <= _CACHED_HEAD_BYTES else _contents.__wrapped__
    contents = read(bytes(body[:head_bytes]))
    tensors = _rebuild(contents.locations, body)
    if contents.is_lone:
        return tensors[0]
    buffers = [body[at : at + size] for at, size in contents.spans]
    unpickler = _Unpickler(io.BytesIO(contents.pickled), buffers=buffers)
    unpickler.tensors = tensors
    return unpickler.load()


class _TensorLocation(NamedTuple):
    """Location and description of one tensor in a body, in a form for fast decoding.

    Attributes:
        at: Byte offset of the tensor's first value in the body.
        values: Number of values.
        storage: Start and size of the tensor's buffer, if the buffer has gaps or also contains
            other tensors. None if the tensor's values fill a buffer completely.
        is_packed: Whether the values are dense in the body, but the tensor's strides have gaps.
    """

    at: int
    values: int
    storage: tuple[int, int] | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_packed: bool


class _TableOfContents(NamedTuple):
    """Decoded table of contents of a body.

    Attributes:
        spans: Offset and size of each buffer.
        pickled: Pickle of the batch, with numbers in place of tensors.
        is_lone: Whether the batch is a single tensor.
    """

    spans: list[tuple[int, int]]
    locations: list[_TensorLocation]
    pickled: bytes
    is_lone: bool


@lru_cache(_MOST_FORMS)
def _contents(head: bytes) -> _TableOfContents:
    """Decode a body's table of contents, and compute the location of each tensor in the body.

    The latest results are cached.
    """
    table_bytes, pickle_bytes = _PREFIX.unpack_from(head)
    after = _PREFIX.size + table_bytes
    sizes, rows = pickle.loads(head[_PREFIX.size : after])
    pickled = head[after : after + pickle_bytes]
    offsets, _ = protocol.layout(len(head), sizes)
    spans = list(zip(offsets, sizes, strict=True))
    uses = Counter(buffer for buffer, *_ in rows)
    locations = []
    for buffer, offset, name, shape, stride in rows:
        dtype, values = _DTYPES[name], math.prod(shape)
        start, size = spans[buffer] if buffer >= 0 else (0, 0)
        is_alone = uses[buffer] == 1 and values * dtype.itemsize == size
        storage = None if is_alone or not values else (start, size)
        is_packed = is_alone and _range_length(shape, stride) > values
        locations.append(
            _TensorLocation(start + offset, values, storage, dtype, shape, stride, is_packed)
        )
    return _TableOfContents(spans, locations, pickled, pickled == _ONE_PART)


def _rebuild(locations: Iterable[_TensorLocation], body: memoryview) -> list[torch.Tensor]:
    """Return the tensors of an encoded batch: views of `body` if possible, else copies.

    Tensors in the same buffer share one storage. If the values of a tensor were sent without gaps
    although its strides have gaps (`is_packed`), copy the values to new memory with these gaps.
    """
    storages: dict[tuple[int, int], torch.UntypedStorage] = {}
    tensors = []
    for at, values, storage, dtype, shape, stride, is_packed in locations:
        if not values:
            tensors.append(torch.empty_strided(shape, stride, dtype=dtype, device="cpu"))
        elif is_packed:
            dense = torch.frombuffer(body, dtype=dtype, offset=at, count=values).view(shape)
            apart = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
            tensors.append(apart.copy_(dense))
        elif storage is None:
            tensor = torch.frombuffer(body, dtype=dtype, offset=at, count=values)
            tensors.append(tensor if len(shape) == 1 else tensor.as_strided_(shape, stride))
        else:
            start, size = storage
            if storage not in storages:
                flat = torch.frombuffer(body, dtype=torch.uint8, offset=start, count=size)
                storages[storage] = flat.untyped_storage()
            tensor = torch.empty(0, dtype=dtype, device="cpu")
            offset = (at - start) // dtype.itemsize
            tensors.append(tensor.set_(storages[storage], offset, shape, stride))
    return tensors


class _Unpickler(pickle.Unpickler):
    tensors: list[torch.Tensor]

    def persistent_load(self, number: int) -> torch.Tensor:
        return self.tensors[number]


_ONE_PART = _pickle(torch.empty(0), _FastPickler)[0]


def raw(data: bytes) -> Encoded:
    """Return an `Encoded` whose body is `data`, unchanged."""
    return Encoded(data, (), len(data))


def as_bytes(value: object) -> bytes:
    """Encode a small object (a sample, an order, an error) into one bytes object."""
    encoded = encode(value)
    size = struct.pack("<Q", len(encoded.head)) + bytes(protocol.ALIGN - 8)
    return b"".join([size, *encoded.parts()])


def from_bytes(data: bytes) -> Any:
    """Decode the result of `as_bytes`."""
    (head_bytes,) = struct.unpack_from("<Q", data)
    return decode(memoryview(bytearray(data))[protocol.ALIGN :], head_bytes)


def checksum(data: bytes | memoryview) -> int:
    """Return the sum of the data's little-endian 64-bit words, modulo 2**64.

    The last word is padded with zeros. The checksum of a body is the sum of its parts' checksums.
    The sum runs without the interpreter lock, at 20 to 40 GB/s; a CRC reaches 3 GB/s. The sum
    detects damage that TCP's own 16-bit checksum misses.
    """
    size, words = len(data), len(data) >> 3
    total = int.from_bytes(data[size - (size & 7) :], "little") if size & 7 else 0
    if _numpy:  # takes a third of the time of torch's sum
        total += int(_numpy.add.reduce(_numpy.frombuffer(data, _WORD, words)))
    elif words:  # copy the data, because frombuffer warns about read-only memory
        total += int(torch.frombuffer(bytearray(data), dtype=torch.int64, count=words).sum())
    return total & SUM_MASK


def fingerprint(encoded: Encoded) -> int:
    """Return a 32-bit hash of a batch, never 0.

    If the batch has tensors or arrays, the hash covers only their values, because equal objects
    may have different pickles (for example, equal sets on two hosts). Otherwise the hash covers the
    pickle.
    """
    sums = [checksum(buffer) for buffer in encoded.buffers]
    data = struct.pack(f"<{len(sums)}Q", *sums) or encoded.head
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little") or 1


@lru_cache(_MOST_FORMS)
def _sum_of_head(head: bytes) -> int:
    """Return the checksum of a table of contents.

    The checksums are cached, because many batches have the same table.
    """
    return checksum(head)
