"""Prepared batches on disk, when memory for them is used up: one file each, in the lane's folder.

A batch comes back as memory that maps its file, so it costs the lane no memory of its own on its
way to the rank. Files are 0600 and are removed when their batch goes, when the lane starts and when
the fetcher ends.
"""

import mmap
import os
import shutil
import threading
from itertools import count
from pathlib import Path

from taas_magic.data import wire
from taas_magic.data.answer import Answer
from taas_magic.data.disk import Item
from taas_magic.data.encode import Encoded


class Spilled:
    """What stays in memory of a batch on disk."""

    size = 0

    def __init__(self, answer: Answer, head: bytes, path: Path, disk_bytes: int) -> None:
        self.kind, self.units, self.order = answer.kind, answer.units, answer.order
        self.head, self.path, self.disk_bytes = head, path, disk_bytes


class Spill:
    """A lane's share of the disk (a `disk.Disk`).

    Args:
        folder: The lane's own; emptied first, since a lane that died leaves its files there.
        limit_bytes: How much may lie there.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        self._folder, self._limit_bytes = folder, limit_bytes
        self._numbers, self._lock = count(), threading.Lock()
        self.bytes = 0
        self.is_full = False
        """Whether the disk refused a batch; nothing is written there any more."""

    @property
    def has_room(self) -> bool:
        """Whether more may be written."""
        return not self.is_full and self.bytes < self._limit_bytes

    def lay(self, item: Item) -> Item | None:
        """Write a batch; None for what is no batch, or when there is no room for it."""
        if not isinstance(item, Answer) or not isinstance(item.body, Encoded) or not self.has_room:
            return None
        path = self._folder / str(next(self._numbers))
        try:
            _write(path, item.body)
        except OSError:
            self.is_full = True
            path.unlink(missing_ok=True)
            return None
        with self._lock:
            self.bytes += item.size
        return Spilled(item, item.body.head, path, item.size)

    def fetch(self, item: Item) -> Item:
        """The batch itself, to be sent."""
        if not isinstance(item, Spilled):
            return item
        with item.path.open("rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        after_head = len(item.head) + -len(item.head) % wire.ALIGN
        buffers = (mapped[after_head:],) if after_head < len(mapped) else ()
        body = Encoded(item.head, buffers, item.disk_bytes)
        return Answer(item.kind, body, item.units, item.order)

    def drop(self, item: Item) -> None:
        """The batch is gone from the shelf; what maps its file still has it."""
        if isinstance(item, Spilled):
            item.path.unlink(missing_ok=True)
            with self._lock:
                self.bytes -= item.disk_bytes


def _write(path: Path, body: Encoded) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.writelines(body.parts())
