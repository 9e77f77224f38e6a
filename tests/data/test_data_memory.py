"""Tests of the memory for batches, which is reused only if no view of it is left."""

import contextlib
import gc
import mmap
import os
import socket
from collections.abc import Callable, Iterator

import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from taas_magic.data.memory import Arena, ArenaMapping, BorrowedSpans, ReceiveBlocks, SpanAllocator
from taas_magic.data.protocol import ALIGN, SharedSpan, aligned

MEGABYTE = 1 << 20


class SpansMachine(RuleBasedStateMachine):
    """State machine of random allocations and frees.

    No spans overlap, and each allocation uses the first gap that is large enough.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spans, self.used = SpanAllocator(), dict[int, int]()

    @rule(size=st.integers(0, 1000))
    def take(self, size: int) -> None:
        room = aligned(max(size, 1))
        fits = [start for start, end in self.gaps() if end - start >= room]
        start = self.spans.allocate(size)
        assert start == min(fits, default=max(self.used.values(), default=0))
        self.used[start] = start + room

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.used)))
        del self.used[start]
        self.spans.free(start)

    @invariant()
    def nothing_overlaps(self) -> None:
        assert all(start % ALIGN == 0 for start in self.used)
        assert all(start <= end for start, end in self.gaps())

    @invariant()
    def the_end_is_that_of_the_last_span(self) -> None:
        assert self.spans.end == max(self.used.values(), default=0)

    def gaps(self) -> list[tuple[int, int]]:
        """Return the start and end of each gap between the spans in use."""
        spans = sorted(self.used.items())
        return [(end, start) for (_, end), (start, _) in zip([(0, 0), *spans], spans, strict=False)]


TestSpans = SpansMachine.TestCase
TestSpans.settings = hypothesis.settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_a_gap_between_spans_is_reused_before_the_memory_grows() -> None:
    spans = SpanAllocator()
    first, second, third = (spans.allocate(1000) for _ in range(3))
    end = spans.end
    spans.free(first)
    spans.free(second)
    assert (spans.allocate(2000), spans.end) == (first, end)
    spans.free(third)
    assert spans.end == third


def test_an_arena_whose_batches_are_freed_does_not_grow() -> None:
    arena = Arena(os.memfd_create("batches"))
    for _ in range(50):
        spans = [arena.allocate(size) for size in (100, 3 * MEGABYTE, 5000)]
        for place, room in spans:
            room[:] = b"x" * len(room)
            arena.free(place)
    assert os.fstat(arena.descriptor).st_blocks * 512 < 5 * MEGABYTE


def test_an_arena_can_grow_while_batches_in_it_are_in_use() -> None:
    arena = Arena(os.memfd_create("batches"))
    _, first = arena.allocate(100)
    first[:] = b"x" * 100
    offset, _ = arena.allocate(3 << 30)
    _, last = arena.allocate(100)
    last[:] = b"y" * 100
    memory = ArenaMapping(os.dup(arena.descriptor))
    assert bytes(memory.view(0, 100)) == bytes(first) == b"x" * 100
    assert bytes(memory.view(aligned(offset + (3 << 30)), 100)) == b"y" * 100


class Writer:
    """Child process that has an arena and writes and frees spans on request."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            self._socket.close()
            os._exit(self._work(theirs))
        theirs.close()
        _, descriptors, _, _ = socket.recv_fds(self._socket, 16, 1)
        self.descriptor = descriptors[0]

    @staticmethod
    def _work(sock: socket.socket) -> int:
        arena = Arena(os.memfd_create("batches"))
        socket.send_fds(sock, [b"here"], [arena.descriptor])
        while said := sock.recv(64).split():
            if said[0] == b"free":
                arena.free(int(said[1]))
                sock.send(b"freed")
                continue
            size = int(said[2])
            offset, room = arena.allocate(size)
            room[:] = said[1] * size
            sock.send(b"%d" % offset)
        return 0

    def write(self, letter: str, size: int) -> int:
        self._socket.send(f"write {letter} {size}".encode())
        return int(self._socket.recv(64))

    def free(self, offset: int) -> None:
        self._socket.send(f"free {offset}".encode())
        self._socket.recv(64)

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(ChildProcessError):  # the test may have closed the writer before
            os.waitpid(self.pid, 0)


@pytest.fixture
def writer() -> Iterator[Writer]:
    one = Writer()
    yield one
    one.close()


def test_another_process_sees_what_a_worker_writes(writer: Writer) -> None:
    memory = ArenaMapping(writer.descriptor)
    small = writer.write("a", 100)
    view = memory.view(small, 100)
    large = writer.write("b", 3 * MEGABYTE)
    assert bytes(memory.view(large, 3 * MEGABYTE)) == b"b" * 3 * MEGABYTE
    assert bytes(view) == b"a" * 100, "though more of the arena has been mapped since"
    writer.free(small)
    assert writer.write("c", 100) == small
    assert bytes(view) == b"c" * 100, "it is the same memory"


def test_a_mapping_outlives_its_writer(writer: Writer) -> None:
    offset = writer.write("a", 5000)
    memory = ArenaMapping(writer.descriptor)
    writer.close()
    assert bytes(memory.view(offset, 5000)) == b"a" * 5000


def is_open(descriptor: int, file: os.stat_result) -> bool:
    """Return whether a descriptor still refers to `file`.

    After the descriptor was closed, another thread may have opened another file with its number.
    """
    try:
        return os.path.samestat(os.fstat(descriptor), file)
    except OSError:
        return False


def test_a_mapping_without_references_closes_its_descriptor(writer: Writer) -> None:
    memory, file = ArenaMapping(writer.descriptor), os.fstat(writer.descriptor)
    view = memory.view(writer.write("a", 100), 100)
    del memory
    assert not is_open(writer.descriptor, file)
    assert bytes(view) == b"a" * 100


class Watched(BorrowedSpans):
    """`BorrowedSpans` object that adds True to the list `closed` each time it is closed."""

    def __init__(self) -> None:
        closed = list[bool]()
        super().__init__(lambda: closed.append(True))
        self.closed = closed


@pytest.fixture
def lent(writer: Writer) -> Watched:
    one = Watched()
    one.add_arena(3, writer.descriptor)
    return one


def test_a_borrowed_span_is_returned_once_when_the_last_view_is_gone(
    writer: Writer, lent: Watched
) -> None:
    first, second = writer.write("a", 5000), writer.write("b", 5000)
    one, other = (
        lent.map_span(SharedSpan(3, first), 5000),
        lent.map_span(SharedSpan(3, second), 5000),
    )
    part = one[100:200]
    del one
    assert lent.pop_released() == []
    assert bytes(part) == b"a" * 100
    del part
    assert lent.pop_released() == [(3, first)]
    assert lent.pop_released() == []
    del other
    assert lent.pop_released() == [(3, second)]


def test_a_span_that_is_borrowed_again_is_returned_again(writer: Writer, lent: Watched) -> None:
    offset = writer.write("a", 5000)
    for _ in range(3):
        assert bytes(lent.map_span(SharedSpan(3, offset), 5000)[:1]) == b"a"
        assert lent.pop_released() == [(3, offset)]


def test_batches_stay_readable_when_the_connection_is_closed(writer: Writer, lent: Watched) -> None:
    view = lent.map_span(SharedSpan(3, writer.write("a", 5000)), 5000)
    lent.close()
    assert lent.closed == []
    assert bytes(view) == b"a" * 5000
    del view
    assert lent.closed == [True]


def test_a_connection_is_closed_at_once_if_none_of_its_batches_is_in_use(
    writer: Writer, lent: Watched
) -> None:
    view = lent.map_span(SharedSpan(3, writer.write("a", 100)), 100)
    del view
    assert lent.closed == []
    lent.close()
    assert lent.closed == [True]


def test_a_child_process_that_drops_a_view_does_not_return_the_span(
    writer: Writer, lent: Watched
) -> None:
    offset = writer.write("a", 5000)
    view = lent.map_span(SharedSpan(3, offset), 5000)
    pid = os.fork()
    if not pid:
        del view
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    assert lent.pop_released() == []
    assert bytes(view) == b"a" * 5000
    del view
    assert lent.pop_released() == [(3, offset)]


def fork_reader(view: memoryview) -> Callable[[], bytes]:
    """Fork a child; return a function that gets the child's copy of `view`, as it is then."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        try:
            ours.close()
            theirs.recv(1)
            theirs.sendall(bytes(view))
        finally:
            os._exit(0)
    theirs.close()

    def read() -> bytes:
        with ours:
            ours.send(b".")
            found = b"".join(iter(lambda: ours.recv(1 << 16), b""))
        os.waitpid(pid, 0)
        return found

    return read


def test_a_forked_child_keeps_its_copy_of_a_span_that_is_reused(
    writer: Writer, lent: Watched
) -> None:
    offset, other = writer.write("a", 5000), writer.write("o", 5000)
    view = lent.map_span(SharedSpan(3, offset), 5000)
    unchanged = fork_reader(view)
    view[4999:] = b"z"
    changed = fork_reader(view)
    mine = bytes(view)
    del view
    released = lent.pop_released()
    writer.free(other)
    writer.free(offset)
    again = writer.write("b", 7000)
    later = bytes(lent.map_span(SharedSpan(3, again), 7000))
    found = unchanged(), changed()  # the children end before anything can fail
    assert found == (b"a" * 5000, b"a" * 4999 + b"z")
    assert mine == found[1]
    assert (released, again) == ([(3, offset)], offset)
    assert later == b"b" * 7000


def test_a_forked_child_keeps_its_copy_of_a_block_that_is_reused() -> None:
    blocks = ReceiveBlocks(MEGABYTE)
    view = blocks.allocate(5000)
    view[:] = b"a" * 5000
    read = fork_reader(view)
    del view
    blocks.allocate(5000)[:] = b"b" * 5000
    assert read() == b"a" * 5000


def test_held_bytes_is_the_mapped_size_of_the_arenas(writer: Writer, lent: Watched) -> None:
    assert lent.held_bytes == 0
    view = lent.map_span(SharedSpan(3, writer.write("a", 2 * MEGABYTE)), 2 * MEGABYTE)
    assert 2 * MEGABYTE <= lent.held_bytes <= 4 * MEGABYTE
    assert len(view) == 2 * MEGABYTE


def test_a_block_is_reused_if_no_view_of_it_is_left() -> None:
    blocks = ReceiveBlocks(MEGABYTE)
    first = blocks.allocate(5000)
    first[:3] = b"one"
    second = blocks.allocate(5000)
    second[:3] = b"two"
    assert bytes(first[:3]) == b"one"
    held = blocks.held_bytes
    del first
    third = blocks.allocate(5000)
    assert (blocks.held_bytes, bytes(second[:3])) == (held, b"two")
    assert bytes(third[:3]) == b"one"


def test_a_view_of_a_part_keeps_the_whole_block() -> None:
    blocks = ReceiveBlocks(MEGABYTE)
    part = blocks.allocate(5000)[4000:4003]
    part[:] = b"one"
    other = blocks.allocate(5000)
    other[:] = bytes(5000)
    assert bytes(part) == b"one"


def test_the_memory_of_free_blocks_is_limited_and_views_stay_valid() -> None:
    blocks = ReceiveBlocks(MEGABYTE)
    views = [blocks.allocate(1 << 19) for _ in range(6)]
    for number, view in enumerate(views):
        view[0] = number
    assert blocks.held_bytes <= MEGABYTE
    assert [view[0] for view in views] == list(range(6))


@hypothesis.given(st.integers(1, 3 * MEGABYTE))
@hypothesis.settings(deadline=None, max_examples=30)
def test_a_block_is_as_large_as_asked_and_not_much_larger(size: int) -> None:
    blocks = ReceiveBlocks(0)
    assert len(blocks.allocate(size)) == size
    assert size <= blocks.held_bytes <= size + max(size // 4, mmap.PAGESIZE)
