"""Memory that batches lie in: what a worker writes and others map, and what a rank receives into.

A worker writes its batches into one anonymous file of its own (`Arena`; a memfd, which needs no
/dev/shm); the server and the ranks of its host map it (`Mapping`). What comes over a network is
received into `Blocks`, used again once nobody looks at them any more.
"""

import bisect
import ctypes
import errno
import mmap
import os
import resource
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from taas_magic.data.protocol import SharedPlace, aligned

_STEPS = 8
_FIRST_BYTES = 1 << 30
"""Of an arena's file, which takes memory only where something was written. To map it anew, when it
grows, costs every process a page fault for each page that it looks at: more than to copy it."""


class Spans:
    """Which bytes of an arena are in use: the first hole that is large enough is taken."""

    def __init__(self) -> None:
        self.end = 0
        self._used: dict[int, int] = {}
        self._holes: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        """Return where a span of `size` bytes begins, aligned."""
        size = aligned(max(size, 1))
        for at, (start, end) in enumerate(self._holes):
            if end - start >= size:
                self._holes[at : at + 1] = [(start + size, end)] if end - start > size else []
                break
        else:
            start, self.end = self.end, self.end + size
        self._used[start] = size
        return start

    def give_back(self, start: int) -> None:
        """Take a span back; holes beside each other become one."""
        end = start + self._used.pop(start)
        at = bisect.bisect(self._holes, (start, end))
        if at < len(self._holes) and self._holes[at][0] == end:
            end = self._holes.pop(at)[1]
        if at and self._holes[at - 1][1] == start:
            at -= 1
            start = self._holes.pop(at)[0]
        if end == self.end:
            self.end = start
        else:
            self._holes.insert(at, (start, end))


def largest_file_bytes() -> int:
    """Return how large a file this process may make (`ulimit -f`); an arena is one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return limit if limit != resource.RLIM_INFINITY else 1 << 62


class Mapping:
    """An arena, mapped: an anonymous file that one worker writes, whose descriptor it owns."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._whole, self.used_bytes = memoryview(b""), 0
        self._close = weakref.finalize(self, os.close, descriptor)

    def mapped(self, end: int) -> memoryview:
        """Return the arena's memory, at least up to there."""
        if end > self.used_bytes:
            self.used_bytes = end
            if end > len(self._whole):
                # What looks at the mapping before it keeps that alive.
                size = os.fstat(self.descriptor).st_size
                self._whole = memoryview(mmap.mmap(self.descriptor, size))
        return self._whole

    def view(self, offset: int, size: int) -> memoryview:
        """Return a span's memory."""
        return self.mapped(offset + size)[offset : offset + size]


class Arena(Mapping):
    """The worker's view of its arena: nothing is left of that file when its users are gone."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._most = largest_file_bytes()
        self._spans, self._size = Spans(), min(_FIRST_BYTES, self._most)
        os.ftruncate(descriptor, self._size)

    def take(self, size: int) -> tuple[int, memoryview]:
        """Return the offset of a free span, and its memory.

        Raises:
            OSError: No file of this process may be so large.
        """
        offset = self._spans.take(size)
        if self._spans.end > self._most:
            needed_mb, most_mb = self._spans.end / 1e6, self._most / 1e6
            self._spans.give_back(offset)
            raise OSError(
                errno.EFBIG,
                f"the batches that a worker has prepared, {needed_mb:,.0f} MB, lie in one file of "
                f"shared memory, and no file may be larger than {most_mb:,.0f} MB here (ulimit "
                "-f): raise that limit where the pool is started",
            )
        while self._spans.end > self._size:
            self._size = min(2 * self._size, self._most)
            os.ftruncate(self.descriptor, self._size)
        return offset, self.view(offset, size)

    def free(self, offset: int) -> None:
        """Take the span at `offset` back: nobody reads it any more."""
        self._spans.give_back(offset)


class Lent:
    """Spans of arenas that this process reads in place, and those that it reads no more.

    Args:
        on_unused: Called, once `close` was, when nothing is read any more.
    """

    def __init__(self, on_unused: Callable[[], object]) -> None:
        self._on_unused = on_unused
        self._arenas: dict[int, Mapping] = {}
        self._read: dict[SharedPlace, weakref.ref[Any]] = {}
        self._gone: deque[SharedPlace] = deque()
        self._is_closed = False

    def add(self, arena: int, descriptor: int) -> None:
        """Take an arena's descriptor."""
        self._arenas[arena] = Mapping(descriptor)

    def look(self, place: SharedPlace, size: int) -> memoryview:
        """Return a span's memory; it is lent until the last view of it is gone."""
        mapped = self._arenas[place.arena].mapped(place.offset + size)
        owner: Any = (ctypes.c_ubyte * size).from_buffer(mapped, place.offset)
        owner.lent = self  # the connection stays open as long as this is read
        self._read[place] = weakref.ref(owner, lambda _: self._let_go(place))
        return memoryview(owner).cast("B")

    def gone(self) -> list[SharedPlace]:
        """Return what is read no more since the last call."""
        places: list[SharedPlace] = []
        while self._gone:
            places.append(self._gone.popleft())
        return places

    def close(self) -> None:
        """Lend no more: what is read stays as it is until it is read no more."""
        self._is_closed = True
        if not self._read:
            self._on_unused()

    @property
    def held_bytes(self) -> int:
        """How far all arenas have been looked at."""
        return sum(arena.used_bytes for arena in list(self._arenas.values()))

    def _let_go(self, place: SharedPlace) -> None:
        del self._read[place]
        self._gone.append(place)
        if self._is_closed and not self._read:
            self._on_unused()


def _references(blocks: Sequence[object]) -> list[int]:
    return [sys.getrefcount(block) for block in blocks]


_IDLE = _references([mmap.mmap(-1, 1)])[0]


class Blocks:
    """A pool of page-aligned blocks to receive into, in one thread's hands at a time.

    Fresh memory costs a page fault for every 4 KiB, which halves the throughput of large batches.
    A batch's tensors are views of a block; Python counts those references, so a block is free when
    only the pool refers to it.

    Args:
        keep_bytes: How much free memory is kept for later.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._blocks: list[mmap.mmap] = []

    def take(self, size: int) -> memoryview:
        """Return writable memory of exactly `size` bytes that nobody else looks at."""
        for block, references in zip(self._blocks, _references(self._blocks), strict=True):
            if references == _IDLE and size <= len(block) <= 2 * size + mmap.PAGESIZE:
                return memoryview(block)[:size]
        # The next of eight sizes to each power of two: batches of like size fit the same block.
        step = max(mmap.PAGESIZE, (1 << max(size - 1, 1).bit_length()) // _STEPS)
        block = mmap.mmap(-1, -(-max(size, 1) // step) * step)
        self._blocks.append(block)
        # What someone still looks at of those that are let go of lives until they stop.
        while len(self._blocks) > 1 and self.held_bytes > self._keep_bytes:
            del self._blocks[0]
        return memoryview(block)[:size]

    @property
    def held_bytes(self) -> int:
        """Size of all blocks, free or looked at."""
        return sum(map(len, self._blocks))
