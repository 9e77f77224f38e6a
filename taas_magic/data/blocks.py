"""Memory that batches are received into, used again once nobody looks at it any more.

Fresh memory costs a page fault for every 4 KiB, which halves the throughput of large batches. A
batch's tensors are views of a block; Python counts those references, so a block is free when only
its pool refers to it. No finaliser, no lock, no copy.
"""

import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = 8
_PARTS_AT_ONCE = 500


def _references(blocks: Sequence[object]) -> list[int]:
    return [sys.getrefcount(block) for block in blocks]


_IDLE = _references([mmap.mmap(-1, 1)])[0]


class Blocks:
    """A pool of page-aligned blocks, in one thread's hands at a time.

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
        block = mmap.mmap(-1, _rounded(size))
        self._blocks.append(block)
        self._trim()
        return memoryview(block)[:size]

    @property
    def held_bytes(self) -> int:
        """Size of all blocks, free or looked at."""
        return sum(map(len, self._blocks))

    def _trim(self) -> None:
        """Let go of old blocks; what someone still looks at lives until they stop."""
        while len(self._blocks) > 1 and self.held_bytes > self._keep_bytes:
            del self._blocks[0]


class SharedBlocks:
    """Blocks that a lane on this host writes and this process reads in place."""

    def __init__(self) -> None:
        self._blocks: dict[int, mmap.mmap] = {}
        self._read: set[int] = set()

    def add(self, number: int, descriptor: int, size: int) -> None:
        """Map a block that the lane has made."""
        self._blocks[number] = mmap.mmap(descriptor, size)

    @property
    def held_bytes(self) -> int:
        """Size of all of them."""
        return sum(map(len, list(self._blocks.values())))

    def look(self, number: int, size: int) -> memoryview:
        """The block's first bytes; the lane leaves them alone until it is told that it is free."""
        self._read.add(number)
        return memoryview(self._blocks[number])[:size]

    def free(self) -> list[int]:
        """Numbers of blocks that nobody looks at any more, each of them once."""
        numbers = list(self._read)
        references = _references([self._blocks[number] for number in numbers])
        # One reference more than in a pool: the list above is not where the block lives.
        free = [n for n, count in zip(numbers, references, strict=True) if count == _IDLE + 1]
        self._read.difference_update(free)
        return free


@dataclass
class Written:
    """A block of shared memory, on the writing side."""

    number: int
    descriptor: int
    size: int
    new: bool = True
    busy: bool = True


class WrittenBlocks:
    """Anonymous memory files that one rank maps: nothing is left of them when both are gone.

    Args:
        limit_bytes: How large all of them may become together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._blocks: dict[int, Written] = {}

    def write(self, parts: Sequence[bytes | memoryview], size: int) -> Written | None:
        """Copy parts into a free block; None when there is no room for one."""
        block = self._find(size)
        if block is not None:
            _write(block.descriptor, parts)
        return block

    def free(self, number: int) -> None:
        """The rank reads this block no more."""
        if number in self._blocks:
            self._blocks[number].busy = False

    def close(self) -> None:
        """Close the descriptors; the rank's mappings stay valid."""
        for block in self._blocks.values():
            os.close(block.descriptor)
        self._blocks.clear()

    def _find(self, size: int) -> Written | None:
        for block in self._blocks.values():
            if not block.busy and size <= block.size <= 2 * size:
                block.busy, block.new = True, False
                return block
        if sum(block.size for block in self._blocks.values()) + size > self._limit_bytes:
            return None
        number = len(self._blocks) + 1
        descriptor = os.memfd_create("taas-batch", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        self._blocks[number] = Written(number, descriptor, size)
        return self._blocks[number]


def _write(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    """Write all parts from the start; one call takes 2 GiB at most."""
    at = 0
    for start in range(0, len(parts), _PARTS_AT_ONCE):
        group = list(parts[start : start + _PARTS_AT_ONCE])
        while group:
            written = os.pwritev(descriptor, group, at)
            at += written
            while group and written >= len(group[0]):
                written -= len(group.pop(0))
            if group:
                group[0] = memoryview(group[0])[written:]


def _rounded(size: int) -> int:
    """The next of eight sizes to each power of two: batches of like size fit each other's block."""
    step = max(mmap.PAGESIZE, (1 << max(size - 1, 1).bit_length()) // _STEPS)
    return -(-max(size, 1) // step) * step
