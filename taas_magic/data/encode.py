"""A batch <-> a small table of contents and large buffers that nobody copies.

Pickle protocol 5 carries buffers out of band, but torch tensors offer none and a view would drag
its whole storage along. Here a tensor leaves the pickle as a number; after the pickle is done, the
tensors' memory is laid out (`tensors`).

Body of a batch: `[head][buffer][buffer]…`, each aligned to 64 bytes (`protocol.layout`).
"""

import copyreg
import functools
import io
import pickle
import struct
import sys
from collections import ChainMap
from collections.abc import Hashable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cloudpickle
import torch

from taas_magic.data import protocol, tensors

_ZEROS = bytes(protocol.ALIGN)
_PREFIX = struct.Struct("<II")
_MOST_FORMS = 256
_COMMON_HEAD_BYTES = 4096
_MOST_TENSORS = 16
_PIECE_BYTES = 256 << 10
_CHUNK_WORDS = 31 << 10
"""Under torch's bound for summing with several threads, which would fight with the rank's own."""

SUM_MASK = (1 << 64) - 1

_numpy: Any = sys.modules.get("numpy")  # torch imports it where there is one
_WORD = _numpy.dtype("<u8") if _numpy else None

_heads: dict[Hashable, tuple[bytes, int]] = {}
"""The table of contents and the size of a body, for each form of common batches (`_take_apart`)."""


@dataclass(slots=True)
class Encoded:
    """A batch ready to be sent.

    Attributes:
        head: Table of contents: sizes of the buffers, tensors, pickle; padded as buffers are.
        buffers: The bytes themselves, in place; they keep their memory alive.
        body_bytes: Size of the body on the wire.
    """

    head: bytes
    buffers: tuple[memoryview, ...]
    body_bytes: int

    def parts(self) -> list[bytes | memoryview]:
        """The body as consecutive pieces, padding included, for a vectored write."""
        parts: list[bytes | memoryview] = [self.head]
        for buffer in self.buffers:
            parts.append(buffer)
            if padding := -len(buffer) % protocol.ALIGN:
                parts.append(_ZEROS[:padding])
        return parts

    def copy_to(self, room: memoryview, is_summed: bool = False) -> int:
        """Copy the body into memory of its size; returns its checksum, if that is wanted, or 0."""
        at = len(self.head)
        room[:at] = self.head
        total = _sum_of_head(self.head) if is_summed else 0
        for buffer in self.buffers:
            for start in range(0, len(buffer), _PIECE_BYTES):
                # Summed piece by piece, while it is in the processor's cache.
                piece = buffer[start : start + _PIECE_BYTES]
                room[at : at + len(piece)] = piece
                at += len(piece)
                total += checksum(piece) if is_summed else 0
            padding = -at % protocol.ALIGN
            room[at : at + padding] = _ZEROS[:padding]
            at += padding
        return total & SUM_MASK


NOTHING = Encoded(b"", (), 0)
"""No body."""


def raw(data: bytes) -> Encoded:
    """Bytes that are a body as they are."""
    return Encoded(data, (), len(data))


_Table = MutableMapping[type, Any]
_TENSOR: dict[type, Any] = {torch.Tensor: tensors.reduce}


class _Numbered:
    """Mixed into a pickler: plain tensors become numbers, in the order they are met."""

    tensors: list[torch.Tensor]
    _numbers: dict[int, int]

    def persistent_id(self, value: object) -> int | None:
        if type(value) is not torch.Tensor or not tensors.is_plain(value):
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

    Runs in a worker. The batch must not be changed while the result is in use.

    Raises:
        Exception: Whatever the pickling of a custom type raises.
    """
    common = _take_apart(value)
    if common is None:
        return _encode_any(value)
    form, buffers = common
    known = _heads.get(form)
    if known is None:
        if len(_heads) >= _MOST_FORMS:
            _heads.clear()
        known = _heads[form] = _common_head(value, [len(buffer) for buffer in buffers])
    return Encoded(known[0], buffers, known[1])


def _take_apart(batch: Any) -> tuple[Hashable, tuple[memoryview, ...]] | None:
    """Return a common batch's form and its tensors' memory; None for any other batch.

    Common is a tensor, or a list, tuple or dict of some, each dense and apart from the rest. What
    the wire says about it depends on its form alone (container, dtypes, shapes), so that is made
    once for a form, and a batch of a form seen before costs a few microseconds.
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
    if not 0 < len(parts) <= _MOST_TENSORS:
        return None
    try:
        buffers = tuple([_memory(tensor) for tensor in parts])
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    if len(parts) > 1 and _overlap(parts):
        return None
    return (kind, names, *[(tensor.dtype, tensor.shape) for tensor in parts]), buffers


def _memory(tensor: torch.Tensor) -> memoryview:
    """A tensor's memory.

    Raises:
        Exception: It is not plain, dense and on the CPU (numpy refuses it), or it is empty.
    """
    if type(tensor) is not torch.Tensor or tensor.__dict__:
        raise TypeError
    array: Any = tensor.numpy()  # numpy's types differ by version
    return memoryview(array).cast("B")


def _overlap(parts: Sequence[torch.Tensor]) -> bool:
    end = 0
    for start, size in sorted([(tensor.data_ptr(), tensor.nbytes) for tensor in parts]):
        if start < end:
            return True
        end = start + size
    return False


def _encode_any(value: object) -> Encoded:
    try:
        pickled, arrays, numbered = _pickle(value, _FastPickler)
    except (pickle.PicklingError, AttributeError, TypeError):
        pickled, arrays, numbered = _pickle(value, _CloudPickler)
    rows, spans = tensors.lay_out(numbered, first_buffer=len(arrays))
    buffers = (*(array.raw() for array in arrays), *spans)
    head, body_bytes = _head(pickled, [len(buffer) for buffer in buffers], rows)
    return Encoded(head, buffers, body_bytes)


def _common_head(value: object, sizes: list[int]) -> tuple[bytes, int]:
    pickled, _, numbered = _pickle(value, _FastPickler)
    return _head(pickled, sizes, [tensors.row(at, one) for at, one in enumerate(numbered)])


def _head(pickled: bytes, sizes: list[int], rows: list[tensors.TensorRow]) -> tuple[bytes, int]:
    """The table of contents, and the size of the whole body."""
    table = pickle.dumps((sizes, [tuple(row) for row in rows]), protocol=5)
    head = _PREFIX.pack(len(table), len(pickled)) + table + pickled
    head += _ZEROS[: -len(head) % protocol.ALIGN]
    return head, protocol.layout(len(head), sizes)[1]


def decode(body: memoryview, head_bytes: int) -> Any:
    """Put a batch together; its tensors and arrays are views of `body`, which they keep alive.

    Only what a peer sent that has proved the run's key may come here: it is unpickled.

    Args:
        body: The whole body, writable, its start aligned.
        head_bytes: Size of its table of contents.
    """
    read = _contents if head_bytes <= _COMMON_HEAD_BYTES else _contents.__wrapped__
    contents = read(bytes(body[:head_bytes]))
    made = tensors.rebuild(contents.places, body)
    if contents.is_lone:
        return made[0]
    buffers = [body[at : at + size] for at, size in contents.spans]
    unpickler = _Unpickler(io.BytesIO(contents.pickled), buffers=buffers)
    unpickler.tensors = made
    return unpickler.load()


class _Contents(NamedTuple):
    """What the table of contents of a body says.

    Attributes:
        spans: Where its buffers lie (start and size).
        places: Its tensors in them.
        pickled: The rest of the batch.
        is_lone: Whether the batch is its only tensor.
    """

    spans: list[tuple[int, int]]
    places: list[tensors.TensorPlace]
    pickled: bytes
    is_lone: bool


@functools.lru_cache(_MOST_FORMS)
def _contents(head: bytes) -> _Contents:
    table_bytes, pickle_bytes = _PREFIX.unpack_from(head)
    after = _PREFIX.size + table_bytes
    sizes, rows = pickle.loads(head[_PREFIX.size : after])
    pickled = head[after : after + pickle_bytes]
    offsets, _ = protocol.layout(len(head), sizes)
    spans = list(zip(offsets, sizes, strict=True))
    places = tensors.places([tensors.TensorRow(*row) for row in rows], spans)
    return _Contents(spans, places, pickled, pickled == _LONE_TENSOR)


@functools.lru_cache(_MOST_FORMS)
def _sum_of_head(head: bytes) -> int:
    return checksum(head)


class _Unpickler(pickle.Unpickler):
    tensors: list[torch.Tensor]

    def persistent_load(self, number: int) -> torch.Tensor:
        return self.tensors[number]


_LONE_TENSOR = _pickle(torch.empty(0), _FastPickler)[0]


def as_bytes(value: object) -> bytes:
    """Encode into one piece (small things: a sample, an order, an error)."""
    encoded = encode(value)
    return (
        struct.pack("<Q", len(encoded.head)) + bytes(protocol.ALIGN - 8) + b"".join(encoded.parts())
    )


def from_bytes(data: bytes) -> Any:
    """Undo `as_bytes`."""
    (head_bytes,) = struct.unpack_from("<Q", data)
    return decode(memoryview(bytearray(data))[protocol.ALIGN :], head_bytes)


def checksum(data: bytes | memoryview) -> int:
    """Sum of the data's 64-bit little-endian words, the last filled up with zeros.

    A sum can be taken as fast as memory is read (20 to 40 GB/s, a CRC reaches 3), over the parts
    of a body one by one, and sees every flipped, lost or overwritten run of bits that TCP's own
    16-bit sum lets through. It runs without the interpreter lock.
    """
    size = len(data)
    rest = int.from_bytes(data[size - (size & 7) :], "little") if size & 7 else 0
    return (sum_of_words(data, size >> 3) + rest) & SUM_MASK


def with_numpy(data: bytes | memoryview, words: int) -> int:
    """The sum of the first words, modulo 2**64; a call costs a third of what torch's does."""
    return int(_numpy.add.reduce(_numpy.frombuffer(data, _WORD, words)))


def with_torch(data: bytes | memoryview, words: int) -> int:
    """The same where torch has no numpy beside it."""
    if not words:
        return 0
    # frombuffer warns of memory that it may not write.
    values = torch.frombuffer(bytearray(data), dtype=torch.int64, count=words)
    total = 0
    for start in range(0, words, _CHUNK_WORDS):
        total += int(values[start : start + _CHUNK_WORDS].sum())
    return total & SUM_MASK


sum_of_words = with_numpy if _numpy else with_torch
