"""A batch <-> a small table of contents and large buffers that nobody copies.

Pickle protocol 5 carries buffers out of band, but torch tensors offer none and a view would drag
its whole storage along. Here a tensor leaves the pickle as a number; after the pickle is done, the
tensors' memory is laid out (`tensors`).

Body of a batch: `[head][buffer][buffer]…`, each aligned to 64 bytes (`wire.layout`).
"""

import copyreg
import io
import pickle
import struct
from collections import ChainMap
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

import cloudpickle
import torch

from taas_magic.data import tensors, wire
from taas_magic.data.checksum import MASK, checksum

_ZEROS = bytes(wire.ALIGN)
_PREFIX = struct.Struct("<II")


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
        return sum([checksum(piece) for piece in self._pieces()]) & MASK

    def _pieces(self) -> list[bytes | memoryview]:
        return [self.head, *self.buffers]


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

    Runs in a fetcher's lane. The batch must not be changed while the result is in use.

    Raises:
        Exception: Whatever the pickling of a custom type raises.
    """
    try:
        pickled, arrays, numbered = _pickle(value, _FastPickler)
    except (pickle.PicklingError, AttributeError, TypeError):
        pickled, arrays, numbered = _pickle(value, _CloudPickler)
    rows, spans = tensors.lay_out(numbered, first_buffer=len(arrays))
    buffers = (*(array.raw() for array in arrays), *spans)
    sizes = [len(buffer) for buffer in buffers]
    table = pickle.dumps((sizes, [tuple(row) for row in rows]), protocol=5)
    head = _PREFIX.pack(len(table), len(pickled)) + table + pickled
    _, body_bytes = wire.layout(len(head), sizes)
    return Encoded(head, buffers, body_bytes)


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
    unpickler.tensors = tensors.rebuild(rows, buffers)
    return unpickler.load()


class _Unpickler(pickle.Unpickler):
    tensors: list[torch.Tensor]

    def persistent_load(self, number: int) -> torch.Tensor:
        return self.tensors[number]


def as_bytes(value: object) -> bytes:
    """Encode into one piece (small things: a sample, an order, an error)."""
    encoded = encode(value)
    return struct.pack("<Q", len(encoded.head)) + bytes(wire.ALIGN - 8) + b"".join(encoded.parts())


def from_bytes(data: bytes) -> Any:
    """Undo `as_bytes`."""
    (head_bytes,) = struct.unpack_from("<Q", data)
    return decode(memoryview(bytearray(data))[wire.ALIGN :], head_bytes)
