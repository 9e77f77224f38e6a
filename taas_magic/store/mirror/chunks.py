"""Files cut and packed for the way, and how a host asks for them."""

import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from taas_magic.store.mirror.manifest import Entry

CHUNK_BYTES = 4 << 20
"""What one message carries at most; and what is in memory of a file at a time."""

MAX_PARTS = 1000
_SAMPLE_BYTES = 1 << 16
_PAYS_BELOW = 0.7

_FIRST_BYTES, _LEAST_BYTES = 1 << 18, 1 << 16
_QUICK_S, _SLOW_S = 0.25, 1.0

Part = tuple[str, int, int]
"""Path, offset, bytes."""


class Pace:
    """How much one message should carry: so little that it never fills a slow link for long.

    What watches over the run, its logs and its leases, goes the same way.

    Attributes:
        size: Bytes.
    """

    def __init__(self) -> None:
        self.size = _FIRST_BYTES

    def took(self, seconds: float) -> None:
        """Takes down how long a message was on its way."""
        if seconds < _QUICK_S:
            self.size = min(2 * self.size, CHUNK_BYTES)
        elif seconds > _SLOW_S:
            self.size = max(self.size // 2, _LEAST_BYTES)


def batches(entries: Iterable[Entry], pace: Pace) -> Iterator[list[Part]]:
    """What to ask for, message by message; the parts of a file come in order."""
    batch: list[Part] = []
    room = pace.size
    for entry in entries:
        offset = 0
        while True:
            size = min(entry.size - offset, room)
            batch.append((entry.path, offset, size))
            offset, room = offset + size, room - size
            if room == 0 or len(batch) == MAX_PARTS:
                yield batch
                batch, room = [], pace.size
            if offset == entry.size:
                break
    if batch:
        yield batch


class Bundle(Struct):
    """Parts of files: the bytes of each, -1 for what could not be read; and all of them."""

    sizes: list[int]
    data: bytes
    packed: bool


def plain(value: object) -> object:
    """A struct as Dask sends it: plain values, bytes as they are; `msgspec.convert` reads it."""
    return msgspec.to_builtins(value, builtin_types=(bytes,))


def pack(parts: Sequence[bytes | None]) -> object:
    """Parts as one message, a plain `Bundle`; None stands for what could not be read."""
    data = b"".join(part for part in parts if part is not None)
    sizes = [-1 if part is None else len(part) for part in parts]
    is_packed = _compresses(data)
    return plain(Bundle(sizes, zlib.compress(data, 1) if is_packed else data, is_packed))


def unpack(message: object) -> list[bytes | None]:
    """The inverse of `pack`; never makes more of a message than a chunk.

    Raises:
        ValueError: It is no such message.
    """
    bundle = msgspec.convert(message, Bundle)
    sizes, data = bundle.sizes, bundle.data
    total = sum(size for size in sizes if size > 0)
    if total > CHUNK_BYTES:
        raise ValueError(f"a message of {total:,} bytes; at most {CHUNK_BYTES:,} are possible")
    if bundle.packed:
        data = _decompress(data, total)
    if len(data) != total:
        raise ValueError(f"a message of {len(data):,} bytes that says it has {total:,}")
    parts: list[bytes | None] = []
    offset = 0
    for size in sizes:
        parts.append(None if size < 0 else data[offset : offset + size])
        offset += max(size, 0)
    return parts


def _compresses(data: bytes) -> bool:
    """Whether compression pays, judged by a piece from the middle."""
    middle = max(0, (len(data) - _SAMPLE_BYTES) // 2)
    sample = data[middle : middle + _SAMPLE_BYTES]
    return len(sample) > 512 and len(zlib.compress(sample, 1)) < _PAYS_BELOW * len(sample)


def _decompress(data: bytes, size: int) -> bytes:
    try:
        return zlib.decompressobj().decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"a message that cannot be unpacked: {error}") from error


class Ask(Protocol):
    """Blocks until the desk has answered; any thread may call it."""

    def __call__(self, what: str, **arguments: Any) -> Any: ...


def ask_at_pace(ask: Ask, pace: Pace, what: str, **arguments: Any) -> Any:
    """Asks, and lets the time that it took decide how much is asked next."""
    began = time.monotonic()
    answer = ask(what, **arguments)
    pace.took(time.monotonic() - began)
    return answer
