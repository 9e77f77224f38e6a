"""Memory for batches: shared memory that workers write, and blocks that ranks receive into.

Each worker writes its batches into one anonymous file (`Arena`: a memfd, which needs no /dev/shm).
The server and the ranks on the same host map this file (`ArenaMapping`). The part of the file that
has one batch is called a span.
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

from taas_magic.data.protocol import SharedSpan, aligned

_STEPS = 8
"""Number of block sizes for each power of two; `ReceiveBlocks` rounds up to one of these sizes."""

_FIRST_BYTES = 1 << 30
"""Initial size in bytes of an arena's file; only pages that were written use memory.

The file is large from the start. If the file grew later, each process would have to map the file
again. The page faults after a new mapping would take longer than copying the data.
"""


_MAP_FIXED = 0x10
"""Flag of Linux's `mmap` for a mapping at the given address; Python's `mmap` does not have it."""

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]


class SpanAllocator:
    """Allocator for the memory of batches in an arena; uses the first hole that is large enough.

    Attributes:
        end: Byte offset of the end of the last used span.
    """

    def __init__(self) -> None:
        self.end = 0
        self._used: dict[int, int] = {}
        self._holes: list[tuple[int, int]] = []

    def allocate(self, size: int) -> int:
        """Allocate a span of `size` bytes, rounded up to the alignment; return its start.

        Use the first hole that is large enough. If there is none, the span begins at `end`, and
        `end` grows.
        """
        size = aligned(max(size, 1))
        for at, (start, end) in enumerate(self._holes):
            if end - start >= size:
                self._holes[at : at + 1] = [(start + size, end)] if end - start > size else []
                break
        else:
            start, self.end = self.end, self.end + size
        self._used[start] = size
        return start

    def free(self, start: int) -> None:
        """Free the span that begins at `start`, and merge it with adjacent holes.

        If the merged hole reaches `end`, which is the end of the used part, record no hole, but set
        `end` to the start of the hole.
        """
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
    """Return the largest file that this process may create (`ulimit -f`), in bytes."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return limit if limit != resource.RLIM_INFINITY else 1 << 62


class ArenaMapping:
    """A process's mapping of an arena, the anonymous file with the batches of one worker.

    Attributes:
        descriptor: Descriptor of the file; the mapping owns and closes it.
        used_bytes: Size of the part of the file, from its start, that this process has accessed.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._whole, self.used_bytes = memoryview(b""), 0
        self._close = weakref.finalize(self, os.close, descriptor)

    def mapped(self, end: int) -> memoryview:
        """Return the arena's memory, at least up to offset `end`; map the file again if needed.

        If `end` is larger than `used_bytes`, also set `used_bytes` to `end`.
        """
        self.used_bytes = max(self.used_bytes, end)
        whole = self._whole  # another thread may fork, and so reset the attribute at any time
        if end > len(whole):
            # Views of the old mapping keep it alive.
            size = os.fstat(self.descriptor).st_size
            whole = self._whole = memoryview(mmap.mmap(self.descriptor, size))
        return whole

    def make_private(self, spans: Sequence[tuple[int, Any]]) -> None:
        """Give this process its own copy of spans that it reads; the views of them stay valid.

        A page of the copy may also contain a part of another span. So the next call of `mapped`
        maps the file again.

        Args:
            spans: Offset and memory of each span.
        """
        self._whole = memoryview(b"")
        for offset, owner in spans:
            extra = offset % mmap.PAGESIZE
            address, size = ctypes.addressof(owner) - extra, ctypes.sizeof(owner) + extra
            flags, protection = mmap.MAP_PRIVATE | _MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
            at = _mmap(address, size, protection, flags, self.descriptor, offset - extra)
            if at != address:
                raise OSError(
                    ctypes.get_errno(), "cannot copy a batch for a forked child; use a clone of it"
                )
            # Linux copies a page of a private mapping when the process writes to the page.
            pages = (ctypes.c_ubyte * size).from_address(address)
            for first in range(0, size, mmap.PAGESIZE):
                pages[first] = pages[first]

    def view(self, offset: int, size: int) -> memoryview:
        """Return a view of the `size` bytes at `offset`, which are the memory of one batch."""
        return self.mapped(offset + size)[offset : offset + size]


class Arena(ArenaMapping):
    """A worker's mapping of its own arena, in which the worker allocates memory for batches.

    Linux frees the file when the last process that has the file open or mapped has ended.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._most = largest_file_bytes()
        self._spans, self._size = SpanAllocator(), min(_FIRST_BYTES, self._most)
        os.ftruncate(descriptor, self._size)

    def allocate(self, size: int) -> tuple[int, memoryview]:
        """Allocate a span of `size` bytes; return its offset and its memory.

        If necessary, double the size of the arena's file, but at most to the largest file size.

        Raises:
            OSError: The arena would exceed the largest file size of this process.
        """
        offset = self._spans.allocate(size)
        if self._spans.end > self._most:
            needed_mb, most_mb = self._spans.end / 1e6, self._most / 1e6
            self._spans.free(offset)
            raise OSError(
                errno.EFBIG,
                f"a worker's prepared batches need {needed_mb:,.0f} MB in one file of shared "
                f"memory, but files can have at most {most_mb:,.0f} MB here (ulimit -f): raise "
                "that limit where the pool is started",
            )
        while self._spans.end > self._size:
            self._size = min(2 * self._size, self._most)
            os.ftruncate(self.descriptor, self._size)
        return offset, self.view(offset, size)

    def free(self, offset: int) -> None:
        """Free the span at `offset` for reuse; call only when no process reads the span."""
        self._spans.free(offset)


class BorrowedSpans:
    """The spans of a fetcher's shared memory that a rank reads; each span has one batch.

    A span is in use as long as the rank has a tensor whose memory is in the span. Afterwards
    `pop_released` returns the span, so that the rank can tell the fetcher to reuse the memory.

    Args:
        on_unused: Called when `close` has been called and no span is in use any more.
    """

    def __init__(self, on_unused: Callable[[], object]) -> None:
        self._on_unused = on_unused
        self._arenas: dict[int, ArenaMapping] = {}
        self._read: dict[SharedSpan, weakref.ref[Any]] = {}
        self._gone: deque[SharedSpan] = deque()
        self._is_closed = False
        _all_borrowed.add(self)

    def add_arena(self, arena: int, descriptor: int) -> None:
        """Add an arena of the fetcher, so that `map_span` can map spans of the arena.

        Args:
            arena: Number of the arena.
            descriptor: Descriptor of the arena's file; this object closes it.
        """
        self._arenas[arena] = ArenaMapping(descriptor)

    def map_span(self, span: SharedSpan, size: int) -> memoryview:
        """Return a view of a batch's span; the span is in use until its last view is deleted."""
        mapped = self._arenas[span.arena].mapped(span.offset + size)
        owner: Any = (ctypes.c_ubyte * size).from_buffer(mapped, span.offset)
        owner.borrowed = self  # keeps the connection open while the span is in use
        owner.is_private = False
        self._read[span] = weakref.ref(owner, lambda _: self._record_unused(span))
        return memoryview(owner).cast("B")

    def pop_released(self) -> list[SharedSpan]:
        """Return the spans whose use has ended since the last call, for reuse by the fetcher."""
        spans: list[SharedSpan] = []
        while self._gone:
            spans.append(self._gone.popleft())
        return spans

    def make_private(self) -> None:
        """Replace the memory of all spans in use by copies of this process.

        Call before a fork. The fetcher may reuse a span when the rank does not use it any more, but
        the child may still read its tensors. With the copies, the child has its own values.
        """
        spans: dict[int, list[tuple[int, Any]]] = {}
        for span, reference in list(self._read.items()):
            owner = reference()
            if owner is not None and not owner.is_private:
                owner.is_private = True
                spans.setdefault(span.arena, []).append((span.offset, owner))
        for arena, found in spans.items():
            self._arenas[arena].make_private(found)

    def close(self) -> None:
        """Call `on_unused` as soon as no span is in use, possibly now; spans in use stay valid."""
        self._is_closed = True
        if not self._read:
            self._on_unused()

    @property
    def held_bytes(self) -> int:
        """Bytes of the fetcher's shared memory that this process has accessed."""
        return sum(arena.used_bytes for arena in list(self._arenas.values()))

    def _record_unused(self, span: SharedSpan) -> None:
        """Record that the last view of a span was deleted.

        If `close` has been called, and no other span is in use, also call `on_unused`. Python may
        call this method in any thread.
        """
        del self._read[span]
        self._gone.append(span)
        if self._is_closed and not self._read:
            self._on_unused()


_all_borrowed: weakref.WeakSet[BorrowedSpans] = weakref.WeakSet()


def _make_spans_private() -> None:
    """Before a fork of this process, make the spans private that the process reads."""
    for borrowed in list(_all_borrowed):
        borrowed.make_private()


os.register_at_fork(before=_make_spans_private)


def _new_block(size: int) -> mmap.mmap:
    """Return a new block of memory, which a forked child gets as a copy."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _references(blocks: Sequence[object]) -> list[int]:
    return [sys.getrefcount(block) for block in blocks]


_IDLE = _references([_new_block(1)])[0]
"""Reference count of an unused block, as `_references` returns it.

Only the list of blocks refers to an unused block.
"""


class ReceiveBlocks:
    """Set of reusable, page-aligned memory blocks, in which a rank receives batches.

    Only one thread may use the set at a time. Blocks are reused because fresh memory costs a page
    fault for every 4 KiB, which would halve the throughput of large batches. Each tensor of a batch
    holds a reference to the block that contains its values. A block is free if only this set refers
    to it.

    Args:
        keep_bytes: Maximum total size of all blocks in bytes. If a new block exceeds the limit, the
            set drops its oldest blocks; a dropped block stays valid as long as tensors refer to it.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._blocks: list[mmap.mmap] = []

    def allocate(self, size: int) -> memoryview:
        """Return `size` bytes of writable memory that is not in use; reuse a block if possible.

        A block that is larger than about twice `size` is not reused. After making a new block, drop
        the oldest blocks while all blocks together exceed `keep_bytes`.
        """
        for block, references in zip(self._blocks, _references(self._blocks), strict=True):
            if references == _IDLE and size <= len(block) <= 2 * size + mmap.PAGESIZE:
                return memoryview(block)[:size]
        # Round up to one of eight sizes for each power of two, so that batches of similar size fit
        # into the same block.
        step = max(mmap.PAGESIZE, (1 << max(size - 1, 1).bit_length()) // _STEPS)
        block = _new_block(-(-max(size, 1) // step) * step)
        self._blocks.append(block)
        # A dropped block lives until the last tensor in it is deleted.
        while len(self._blocks) > 1 and self.held_bytes > self._keep_bytes:
            del self._blocks[0]
        return memoryview(block)[:size]

    @property
    def held_bytes(self) -> int:
        """Total size in bytes of all blocks, free or in use."""
        return sum(map(len, self._blocks))
