"""One file that holds a pickle and its out-of-band buffers, to be mapped rather than read.

    magic 8 | sizes 3 x u64: meta, pickle, number of buffers | lengths u64 each | meta (JSON)
    | pickle | buffers, each at a multiple of 64 bytes

All processes of a host that map the file share its pages; a page that one of them writes to
becomes its own (`MAP_PRIVATE`), so values are writable and nobody sees anybody's changes.
"""

import json
import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import PickleBuffer
from typing import Any

from taas_magic.errors import CaptureError

_MAGIC = b"TAASPAY1"
_SIZES = struct.Struct("<QQQ")
_ALIGNMENT = 64


@dataclass(frozen=True)
class Pickled:
    """A pickle and the memory that it refers to; the memory stays that of the pickled values."""

    data: bytes
    buffers: Sequence[PickleBuffer]

    @property
    def size_bytes(self) -> int:
        return len(self.data) + sum(buffer.raw().nbytes for buffer in self.buffers)


@dataclass(frozen=True)
class Archive:
    """An archive as mapped: `meta` is decoded, the pickle and its buffers are untouched."""

    meta: dict[str, Any]
    mapped: mmap.mmap
    pickle_at: int
    buffers: Sequence[memoryview]

    def stream(self) -> mmap.mmap:
        """The mapping, placed at the pickle's first byte, to unpickle from."""
        self.mapped.seek(self.pickle_at)
        return self.mapped


def write(path: Path, pickled: Pickled, meta: dict[str, Any] | None = None) -> None:
    """Writes an archive that only its owner may read and that appears whole or not at all.

    Raises:
        OSError: The disk is full, or the folder cannot be written.
    """
    described = json.dumps(meta or {}).encode()
    raws = [buffer.raw() for buffer in pickled.buffers]
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(_MAGIC + _SIZES.pack(len(described), len(pickled.data), len(raws)))
            file.write(struct.pack(f"<{len(raws)}Q", *(raw.nbytes for raw in raws)))
            file.write(described)
            file.write(pickled.data)
            for raw in raws:
                file.write(bytes(-file.tell() % _ALIGNMENT))
                file.write(raw)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


def read(path: Path) -> Archive:
    """Maps an archive; the file may be removed afterwards.

    Raises:
        CaptureError: The file is no archive, or is cut short.
        OSError: The file cannot be opened.
    """
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < len(_MAGIC) + _SIZES.size:
            raise _damaged(path)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    view = memoryview(mapped)
    if view[: len(_MAGIC)] != _MAGIC:
        raise _damaged(path)
    meta_bytes, pickle_bytes, count = _SIZES.unpack_from(view, len(_MAGIC))
    lengths_at = len(_MAGIC) + _SIZES.size
    meta_at = lengths_at + 8 * count
    pickle_at = meta_at + meta_bytes
    if pickle_at + pickle_bytes > len(view):
        raise _damaged(path)
    lengths = struct.unpack_from(f"<{count}Q", view, lengths_at)
    spans = list(_spans(lengths, pickle_at + pickle_bytes))
    if spans and spans[-1].stop > len(view):
        raise _damaged(path)
    meta = json.loads(bytes(view[meta_at:pickle_at]))
    return Archive(meta, mapped, pickle_at, [view[span] for span in spans])


def _spans(lengths: Sequence[int], position: int) -> Iterator[slice]:
    for length in lengths:
        position += -position % _ALIGNMENT
        yield slice(position, position + length)
        position += length


def _damaged(path: Path) -> CaptureError:
    return CaptureError(f"{path} is not a whole payload; run the cell again")
