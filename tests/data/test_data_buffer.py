"""Tests of `PrefetchBuffer`, the fetcher's store of batches: order, memory limit and removal."""

from collections.abc import Callable, Iterable
from itertools import islice

import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from taas_magic.data.protocol import (
    EpochDescription,
    LoaderRequest,
    Reply,
    RequestKind,
    ResponseKind,
)
from taas_magic.data.scheduler import _ALL, LATER, PrefetchBuffer, PrefetchOrder, PreparedResponse
from taas_magic.data.sharding import VOID, FetcherPart
from taas_magic.data.worker import WorkerHandle

BATCH_BYTES = 64 << 10
PLENTY = 1 << 40


def key(slot: int, epoch: int = 0, kind: RequestKind = RequestKind.GET) -> LoaderRequest:
    return LoaderRequest(kind, epoch, slot)


class Arena(WorkerHandle):
    """Stand-in for the handle of a worker. It only records the offsets of freed bodies."""

    def __init__(self) -> None:
        self.frees = []


def answer(
    slot: int = 0,
    units: int = 1,
    kind: ResponseKind = ResponseKind.BATCH,
    size: int = BATCH_BYTES,
    arena: Arena | None = None,
) -> PreparedResponse:
    """Return a prepared response. Its offset in the worker's memory equals its slot."""
    reply = Reply(slot, kind, units, body_bytes=size, offset=slot)
    return PreparedResponse(reply, arena or Arena())


def buffer_of(
    budget_bytes: int = PLENTY,
    batches: int = 0,
    workers: int = 1,
    worker_for: Callable[[LoaderRequest], int | None] = lambda request: None,
    has_streams: bool = False,
    keep_first: int = 0,
    ranks: int = 1,
    streams: int = 1,
    fetchers: int = 1,
) -> PrefetchBuffer:
    """Return a buffer in which each of 60 epochs has `batches` batches to prepare ahead.

    Args:
        budget_bytes: Memory limit of the buffer.
        batches: Number of batches of each epoch.
        workers: Number of workers of the fetcher.
        worker_for: Returns the only worker that may prepare a request, or None for any worker.
        has_streams: Whether the loader's dataset is iterable-style.
        keep_first: Number of first batches that the buffer keeps for padding.
        ranks: Number of ranks.
        streams: Number of streams, if the loader has streams.
        fetchers: Number of fetchers.
    """
    ahead = PrefetchOrder(FetcherPart(workers=workers))
    for epoch in range(60):
        ahead.record_epoch(epoch, EpochDescription(batches, streams if has_streams else None, 0))
    part = FetcherPart(fetchers=fetchers, keep_first=keep_first, ranks=ranks)
    buffer = PrefetchBuffer(budget_bytes, ahead, worker_for, part)
    buffer.record_kind(streams if has_streams else None)
    return buffer


def entries(buffer: PrefetchBuffer) -> int:
    """Return the number of entries and unit counts that the buffer stores."""
    return len(buffer._entries) + len(buffer._counts)


def ready(buffer: PrefetchBuffer) -> list[LoaderRequest]:
    return [one for one, entry in buffer._entries.items() if entry.prepared is not None]


def let_go(buffer: PrefetchBuffer) -> None:
    """Remove all prepared responses from the buffer."""
    for one in ready(buffer):
        buffer._remove(one)


def by_parity(key: LoaderRequest) -> int:
    """Return the worker for a slot: 0 if the slot is even, 1 if it is odd."""
    return key.slot % 2


def chosen(buffer: PrefetchBuffer, most: int = 1000) -> list[int]:
    """Choose requests for worker 0 until none is left, at most `most`; return their slots."""
    return [key.slot for key in islice(iter(lambda: buffer.choose(0), None), most)]


def prepare(
    buffer: PrefetchBuffer,
    slots: Iterable[int],
    epoch: int = 0,
    units: int = 1,
    arena: Arena | None = None,
) -> None:
    """Prepare the batches of `slots`, and put them into the buffer.

    A connection requests the batches, and cancels the requests afterwards.
    """
    for slot in slots:
        buffer.add_request("nobody", key(slot, epoch))
    while (one := buffer.choose(0)) is not None:
        buffer.put(one, answer(one.slot, units, arena=arena))
    buffer.cancel_requests("nobody")


def taken(buffer: PrefetchBuffer, who: str, one: LoaderRequest) -> PreparedResponse:
    """Remove and return the response to a connection's request; fail if it is not ready."""
    found = buffer.pop_ready(who, one)
    assert found is not None
    return found


def test_connections_are_served_in_turn_each_in_the_order_of_its_requests() -> None:
    buffer = buffer_of()
    for slot in range(0, 200, 2):
        buffer.add_request("rank 0", key(slot))
    for slot in (3, 1):
        buffer.add_request("rank 1", key(slot))
    assert chosen(buffer, 6) == [0, 3, 2, 1, 4, 6]


def test_a_batch_that_two_connections_request_is_prepared_once_and_both_get_it() -> None:
    buffer, arena = buffer_of(), Arena()
    for who in ("rank 0", "rank 1"):
        buffer.add_request(who, key(0))
    assert chosen(buffer) == [0]
    assert buffer.put(key(0), answer(0, arena=arena)) == {"rank 0", "rank 1"}
    first = taken(buffer, "rank 0", key(0))
    second = taken(buffer, "rank 1", key(0))
    assert first is second
    assert first.is_shared
    first.release()
    assert arena.frees == []
    assert not second.is_shared
    second.release()
    assert arena.frees == [0]


def test_a_worker_gets_only_requests_that_it_may_prepare() -> None:
    buffer = buffer_of(worker_for=by_parity)
    for slot in range(4):
        buffer.add_request("rank", key(slot))
    odd, even = list[int](), list[int]()
    for slots, worker in ((odd, 1), (even, 0)):
        while (one := buffer.choose(worker)) is not None:
            slots.append(one.slot)
    assert (odd, even) == ([1, 3], [0, 2])


def test_a_worker_restarts_a_stream_only_if_no_request_is_ahead_of_it() -> None:
    buffer = buffer_of(has_streams=True)
    for slot in (0, 2, 4):
        buffer.add_request("rank", key(slot))
    assert buffer.choose(0, lambda key: key.slot >= 2) == key(2)
    assert buffer.choose(0, lambda key: key.slot >= 3) == key(4)
    assert buffer.choose(0, lambda key: key.slot >= 5) == key(0)


def test_batches_of_a_stream_are_prepared_in_order_whoever_requested_them() -> None:
    buffer = buffer_of(has_streams=True)
    for slot in range(4):
        buffer.add_request("slow", key(slot))
    assert chosen(buffer, 1) == [0]
    for slot in range(6):
        buffer.add_request("fast", key(slot))
    assert chosen(buffer, 2) == [1, 2]
    buffer.requeue(key(1))
    buffer.requeue(key(2))
    buffer.cancel_requests("slow")
    assert chosen(buffer) == [1, 2, 3, 4, 5]


def test_the_only_rank_of_a_stream_needs_no_batches_before_the_next_one() -> None:
    """The buffer is full of batches of which the rank has requested only the units.

    If there is no other rank, the buffer may drop these batches. It then prepares the next ones.
    """
    budget_bytes = 3 * (BATCH_BYTES + 1280)
    for has_one_rank in (False, True):
        buffer = buffer_of(budget_bytes, has_streams=True, ranks=1 if has_one_rank else 2)
        for slot in range(8):
            buffer.add_request("rank", key(slot), only_count=bool(slot % 2))
        for slot in range(6):
            assert buffer.choose(0, lambda key: True) == key(slot), slot
            buffer.put(key(slot), answer(slot))
            if slot % 2:
                assert buffer.find_units("rank", key(slot)) == 1
            else:
                taken(buffer, "rank", key(slot)).release()
        assert buffer.is_full
        assert buffer.pop_ready("rank", key(6)) is None
        assert buffer.choose(0, lambda key: True) == key(6)
        assert buffer.is_full is not has_one_rank
        assert (buffer.choose(0, lambda key: True) == key(7)) is has_one_rank


def test_the_first_batches_of_a_stream_stay_for_padding() -> None:
    buffer = buffer_of(10 * (BATCH_BYTES + 1280), has_streams=True, keep_first=2)
    for slot in range(3):
        buffer.add_request("rank", key(slot))
        assert buffer.choose(0, lambda key: True) == key(slot)
        buffer.put(key(slot), answer(slot))
        taken(buffer, "rank", key(slot)).release()
    assert ready(buffer) == [key(0), key(1)]
    buffer.add_request("rank", key(0))
    taken(buffer, "rank", key(0)).release()
    assert ready(buffer) == [key(0), key(1)]
    buffer.add_request("rank", key(0, epoch=2))
    assert ready(buffer) == []


def send_in_turn(buffer: PrefetchBuffer, who: str, slots: range, voids: set[int]) -> None:
    """For each slot in turn: add the rank's request, prepare its response, and send it.

    The response to a slot in `voids` is VOID.
    """
    for slot in slots:
        buffer.add_request(who, key(slot))
        assert buffer.choose(0, lambda key: True) == key(slot)
        is_void = slot in voids
        kind = ResponseKind.VOID if is_void else ResponseKind.BATCH
        units, size = (VOID, 0) if is_void else (1, BATCH_BYTES)
        buffer.put(key(slot), answer(slot, units, kind, size))
        taken(buffer, who, key(slot)).release()


def test_the_first_batches_stay_even_if_some_streams_are_empty() -> None:
    buffer = buffer_of(
        20 * (BATCH_BYTES + 1280), has_streams=True, keep_first=2, ranks=2, streams=3
    )
    send_in_turn(buffer, "rank", range(24), voids={*range(1, 24, 3), *range(2, 24, 3)})
    assert [one for one in ready(buffer) if one.slot in (0, 3, 6)] == [key(0), key(3)]


def test_sent_batches_of_several_streams_stay_for_other_ranks_while_there_is_room() -> None:
    """If a rank guessed wrongly which batches are its own, another rank requests a sent batch, too.

    With one fetcher and no ended stream, no guess can be wrong, and no sent batch is kept.
    """
    buffer = buffer_of(16 * (BATCH_BYTES + 1280), has_streams=True, ranks=2, streams=2)
    send_in_turn(buffer, "rank 0", range(6), voids=set())
    assert not buffer._sent, "no stream has ended, so no guess was wrong"
    buffer = buffer_of(16 * (BATCH_BYTES + 1280), has_streams=True, ranks=2, streams=2, fetchers=2)
    send_in_turn(buffer, "rank 0", range(6), voids=set())
    assert buffer.ready_batches == 0
    assert not buffer.is_full
    buffer.add_request("rank 1", key(3))
    assert buffer.ready_batches == 1
    taken(buffer, "rank 1", key(3)).release()
    for slot in (0, 1):
        buffer.add_request("rank 1", key(slot))
        assert buffer.choose(0, lambda key: True) == key(slot), "a quarter of the limit: 4 batches"
    buffer.add_request("rank 1", key(0, epoch=2))
    assert not buffer._sent
    assert buffer._sent_bytes == 0


def test_requests_wait_until_the_loaders_kind_is_known() -> None:
    """Until then, the buffer cannot choose the worker that prepares a request."""
    known = list[bool]()
    worker_for = lambda one: 1 if known else LATER  # noqa: E731
    buffer = PrefetchBuffer(PLENTY, PrefetchOrder(FetcherPart(workers=2)), worker_for)
    for slot in (1, 0):
        buffer.add_request(f"rank {slot}", key(slot))
    assert [buffer.choose(worker) for worker in (0, 1)] == [None, None]
    known.append(True)
    buffer.record_kind(streams=1)
    assert [buffer.choose(worker) for worker in (0, 1, 1, 1)] == [None, key(0), key(1), None]


def test_a_worker_finishes_an_epoch_of_streams_before_the_next_one() -> None:
    buffer = buffer_of(has_streams=True)
    for one in (key(0, epoch=1), key(1, epoch=1)):
        buffer.add_request("ahead", one)
    buffer.add_request("behind", key(9))
    order = [buffer.choose(0, lambda key: key.slot < 9) for _ in range(3)]
    assert order == [key(9), key(0, epoch=1), key(1, epoch=1)]


def test_requested_batches_are_prepared_before_batches_ahead() -> None:
    buffer = buffer_of(batches=4)
    assert buffer.choose(0) is None
    assert buffer.choose_ahead(0) == key(0)
    buffer.add_request("rank", key(5))
    assert buffer.choose(0) == key(5)


def test_batches_after_the_requested_ones_are_prepared_ahead() -> None:
    buffer = buffer_of(batches=8)
    buffer.add_request("rank", key(4))
    assert buffer.choose(0) == key(4)
    assert [buffer.choose_ahead(0) for _ in range(3)] == [key(5), key(6), key(7)]
    assert buffer.choose_ahead(0) == key(0, epoch=1)


def test_a_batch_that_is_prepared_or_requested_is_not_prepared_ahead() -> None:
    buffer = buffer_of(batches=4)
    assert buffer.choose_ahead(0) == key(0)
    prepare(buffer, [2])
    buffer.add_request("rank", key(1))
    assert buffer.choose_ahead(0) == key(3)


def test_a_requested_batch_of_another_worker_is_not_prepared_ahead() -> None:
    """Only worker 1 may prepare the requested batches 0 and 1. So worker 0 prepares batch 2."""
    buffer = buffer_of(batches=3, worker_for=lambda key: 1)
    for slot in (0, 1):
        buffer.add_request("rank", key(slot))
    assert buffer.choose(0) is None
    assert buffer.choose_ahead(0) == key(2)
    assert [buffer.choose(1) for _ in range(3)] == [key(0), key(1), None]


def test_each_worker_prepares_only_its_own_batches_ahead() -> None:
    buffer = buffer_of(batches=5, worker_for=by_parity, workers=2)
    buffer.add_request("rank", key(1))
    assert [buffer.choose_ahead(0) for _ in range(3)] == [key(0), key(2), key(4)]
    assert buffer.choose_ahead(1) == key(3)
    assert buffer.choose(1) == key(1)


def test_a_full_buffer_drops_batches_that_no_rank_has_requested() -> None:
    buffer = buffer_of(2 * BATCH_BYTES)
    prepare(buffer, range(2))
    assert buffer.is_full
    buffer.add_request("rank", key(7))
    assert buffer.choose(0) == key(7)
    assert buffer.is_full, "by what is left and what is being prepared"
    assert (buffer.units(key(0)), buffer.units(key(1))) == (1, None), "the latest goes first"


def test_a_full_buffer_drops_no_batch_of_a_stream_that_a_rank_still_needs() -> None:
    """To prepare a dropped batch again, a worker would have to restart the stream."""
    buffer = buffer_of(2 * BATCH_BYTES)
    prepare(buffer, [2, 3])
    buffer.add_request("rank", key(0))
    assert buffer.choose(0, lambda key: True) is None
    assert buffer.pop_ready("rank", key(0)) is None
    assert buffer.choose(0, lambda key: True) == key(0)
    assert (buffer.units(key(2)), buffer.units(key(3))) == (1, 1)


def test_a_full_buffer_drops_batches_of_a_stream_whose_epoch_is_over() -> None:
    buffer = buffer_of(2 * BATCH_BYTES)
    prepare(buffer, [2, 3])
    buffer.add_request("rank", key(0, epoch=1))
    assert buffer.pop_ready("rank", key(0, epoch=1)) is None
    assert buffer.choose(0, lambda key: True) == key(0, epoch=1)
    assert (buffer.units(key(2)), buffer.units(key(3))) == (1, None)


def test_a_full_buffer_prepares_the_batches_of_a_stream_in_their_order() -> None:
    buffer = buffer_of(0)
    for rank, slot in (("first", 4), ("second", 2), ("third", 0)):
        assert buffer.pop_ready(rank, key(slot)) is None
    chosen = [buffer.choose(0, lambda key: key.slot >= 2) for _ in range(3)]
    assert chosen == [key(2), key(4), key(0)]


def test_batches_in_preparation_count_towards_the_limit() -> None:
    buffer = buffer_of(4 * BATCH_BYTES, batches=100)
    assert buffer.choose_ahead(0) == key(0)
    buffer.put(key(0), answer(0))
    begun = 0
    while not buffer.is_full:
        assert buffer.choose_ahead(0) is not None
        begun += 1
    assert begun == 3


def test_a_full_buffer_does_not_drop_requested_batches() -> None:
    buffer = buffer_of(2 * BATCH_BYTES)
    for slot in range(3):
        buffer.add_request("rank", key(slot))
    for slot in (0, 1):
        assert buffer.choose(0) == key(slot)
        buffer.put(key(slot), answer(slot))
    buffer.make_room()
    assert buffer.is_full
    assert buffer.choose(0) is None
    taken(buffer, "rank", key(0)).release()
    assert buffer.choose(0) == key(2)


def test_the_batch_that_a_connection_must_send_next_is_prepared_in_a_full_buffer() -> None:
    """A later batch has filled the memory, because its worker could prepare it first.

    The batch that the connection must send next is prepared nevertheless.
    """
    buffer = buffer_of(BATCH_BYTES)
    for slot in (0, 2, 4):
        buffer.add_request("rank", key(slot))
    assert buffer.choose(0, lambda key: key.slot >= 2) == key(2)
    buffer.put(key(2), answer(2))
    assert buffer.choose(0) is None
    assert buffer.pop_ready("rank", key(0)) is None
    assert buffer.choose(0) == key(0)
    assert buffer.put(key(0), answer(0)) == {"rank"}
    assert buffer.choose(0) is None
    assert taken(buffer, "rank", key(0)).reply.offset == 0


def test_a_slow_rank_does_not_keep_batches_from_other_ranks() -> None:
    buffer = buffer_of(2 * BATCH_BYTES)
    for slot in range(10):
        buffer.add_request("slow", key(slot))
    for one in (key(0), key(1)):
        assert buffer.choose(0) == one
        buffer.put(one, answer(one.slot))
    for slot in range(10, 20):
        buffer.add_request("fast", key(slot))
        assert buffer.pop_ready("fast", key(slot)) is None
        assert buffer.choose(0) == key(slot)
        buffer.put(key(slot), answer(slot))
        taken(buffer, "fast", key(slot)).release()
    assert buffer.ready_bytes == 2 * BATCH_BYTES


@pytest.mark.parametrize(
    "kind", [RequestKind.OPEN, RequestKind.SAMPLE, RequestKind.ORDER, RequestKind.STATE]
)
def test_requests_other_than_for_batches_need_no_room_in_the_buffer(kind: RequestKind) -> None:
    buffer = buffer_of(0)
    one = key(0, kind=kind)
    buffer.add_request("rank", one)
    assert buffer.pop_ready("rank", one) is None
    assert buffer.choose(0) == one


def test_a_batch_that_a_full_buffer_dropped_is_prepared_again() -> None:
    buffer = buffer_of(BATCH_BYTES)
    prepare(buffer, [0])
    buffer.add_request("rank", key(0), only_count=True)
    assert buffer.find_units("rank", key(0)) == 1
    buffer.add_request("other", key(1))
    assert chosen(buffer) == [1]
    buffer.put(key(1), answer(1))
    assert buffer.pop_ready("rank", key(0)) is None
    assert chosen(buffer) == [0]


def test_a_unit_count_that_was_dropped_is_determined_again() -> None:
    buffer = buffer_of()
    prepare(buffer, [3], units=5)
    buffer.add_request("slow", key(3), only_count=True)
    for epoch in (1, 2):
        prepare(buffer, [0], epoch)
    assert buffer.find_units("slow", key(3)) is None
    assert buffer.choose(0) == key(3)
    assert buffer.put(key(3), answer(3, units=5)) == {"slow"}
    assert buffer.find_units("slow", key(3)) == 5


def test_a_request_for_units_leaves_the_batch_to_other_requests() -> None:
    buffer = buffer_of()
    for who, only_count in (("peeks", True), ("gets", False)):
        buffer.add_request(who, key(0), only_count)
    assert chosen(buffer) == [0]
    buffer.put(key(0), answer(0, units=7))
    assert buffer.find_units("peeks", key(0)) == 7
    assert taken(buffer, "gets", key(0)).reply.units == 7
    buffer.add_request("late", key(0), only_count=True)
    assert chosen(buffer) == [], "what it counts is known"
    assert buffer.find_units("late", key(0)) == 7


def test_a_request_for_units_of_a_void_slot_is_answered() -> None:
    buffer = buffer_of(batches=4)
    buffer.add_request("rank", key(1), only_count=True)
    assert buffer.choose(0) == key(1)
    buffer.put(key(1), answer(1, units=VOID, kind=ResponseKind.VOID, size=0))
    assert buffer.find_units("rank", key(1)) == VOID
    assert buffer.choose_ahead(0) == key(0, epoch=1), "behind the end there is nothing to do"


def test_units_of_given_indices_are_not_recorded_for_the_slot() -> None:
    buffer = buffer_of()
    given = LoaderRequest(RequestKind.GET, 0, 0, b"indices")
    buffer.add_request("rank", given)
    assert buffer.choose(0) == given
    buffer.put(given, answer(0, units=9))
    assert buffer.units(key(0)) is None


def test_requests_of_a_closed_connection_are_not_prepared() -> None:
    buffer = buffer_of()
    for who, slots in (("rank 0", (0, 1)), ("rank 1", (1, 2))):
        for slot in slots:
            buffer.add_request(who, key(slot))
    buffer.cancel_requests("rank 0")
    assert sorted(chosen(buffer)) == [1, 2]


def test_a_batch_of_a_cancelled_request_stays_for_later_requests() -> None:
    buffer = buffer_of()
    buffer.add_request("rank", key(0))
    assert chosen(buffer) == [0]
    buffer.cancel_requests("rank")
    assert buffer.put(key(0), answer(0)) == set()
    buffer.add_request("again", key(0))
    assert chosen(buffer) == []
    assert taken(buffer, "again", key(0)).reply.offset == 0


def test_a_lost_request_is_prepared_again_before_other_requests_of_its_connection() -> None:
    buffer = buffer_of()
    for slot in range(3):
        buffer.add_request("rank", key(slot))
    assert buffer.choose(0) == key(0)
    buffer.requeue(key(0))
    assert chosen(buffer) == [0, 1, 2]


def test_a_lost_batch_that_no_rank_requested_is_prepared_ahead_again() -> None:
    buffer = buffer_of(batches=2)
    assert [buffer.choose_ahead(0) for _ in range(2)] == [key(0), key(1)]
    for slot in (0, 1):
        buffer.requeue(key(slot))
    assert [buffer.choose_ahead(0) for _ in range(3)] == [key(0), key(1), key(0, epoch=1)]


def test_a_lost_batch_can_be_requested_later() -> None:
    buffer = buffer_of(batches=2)
    assert buffer.choose_ahead(0) == key(0)
    buffer.requeue(key(0))
    buffer.add_request("rank", key(0))
    assert chosen(buffer) == [0]
    assert buffer.choose_ahead(0) == key(1)


def test_batches_of_epochs_that_all_ranks_have_finished_are_dropped() -> None:
    buffer, slots, most = buffer_of(), 100, 0
    arenas = []
    for epoch in range(50):
        arenas.append(Arena())
        prepare(buffer, range(slots), epoch, arena=arenas[-1])
        for slot in range(slots // 2):  # the rank leaves its loop in the middle of the epoch
            buffer.add_request("rank", key(slot, epoch))
            taken(buffer, "rank", key(slot, epoch)).release()
        most = max(most, entries(buffer))
    assert most == 2 * (slots // 2 + slots)
    assert [len(arena.frees) for arena in arenas] == [slots] * 48 + [slots // 2] * 2
    assert buffer.oldest_epoch == 48


def test_batches_of_an_old_epoch_are_prepared_again_for_a_slow_rank() -> None:
    buffer = buffer_of()
    prepare(buffer, [0], 0)
    prepare(buffer, [0], 5)
    buffer.add_request("behind", key(0, 0))
    assert buffer.choose(0) == key(0, 0)
    buffer.put(key(0, 0), answer(0))
    assert buffer.pop_ready("behind", key(0, 0)) is not None


def test_only_the_latest_unit_counts_of_a_long_epoch_are_stored() -> None:
    buffer, slots = buffer_of(), 40_000
    for slot in range(slots):
        buffer.add_request("rank", key(slot))
        assert buffer.choose(0) == key(slot)
        buffer.put(key(slot), answer(slot, units=7))
        taken(buffer, "rank", key(slot)).release()
    assert entries(buffer) < slots // 2
    assert buffer.find_units("other rank", key(slots - 1)) == 7


def test_many_small_batches_do_not_exceed_the_memory_limit() -> None:
    buffer = buffer_of(1 << 20, batches=100_000)
    while not buffer.is_full:
        one = buffer.choose_ahead(0)
        assert one is not None
        buffer.put(one, answer(one.slot, size=1))
    assert 100 < buffer.ready_batches < 2000


def test_a_batch_keeps_its_memory_until_it_is_sent_even_if_the_buffer_drops_it() -> None:
    buffer, arena = buffer_of(), Arena()
    prepare(buffer, range(5), arena=arena)
    held = taken(buffer, "rank", key(3))
    let_go(buffer)
    assert sorted(arena.frees) == [0, 1, 2, 4]
    held.release()
    assert sorted(arena.frees) == [0, 1, 2, 3, 4]
    assert (buffer.ready_batches, buffer.ready_bytes) == (0, 0)


RANKS = st.sampled_from(["rank 0", "rank 1", "rank 2"])
SLOTS = st.integers(0, 11)
BUDGET_BATCHES = 3


class BufferMachine(RuleBasedStateMachine):
    """State machine that requests, prepares and receives responses, and ends workers, at random.

    Three ranks use one buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        # The buffer counts 1280 bytes for each response in addition to its body.
        budget_bytes = BUDGET_BATCHES * (BATCH_BYTES + 1280)
        self.buffer = buffer_of(budget_bytes, batches=12, worker_for=by_parity, workers=2)
        self.follows: Callable[[LoaderRequest], bool] | None = None
        self.arena = Arena()
        self.asked: dict[str, list[LoaderRequest]] = {}
        self.doing: list[LoaderRequest] = []
        self.prepared, self.held = 0, list[PreparedResponse]()

    @initialize(has_streams=st.booleans())
    def record_kind(self, has_streams: bool) -> None:
        self.buffer.record_kind(1 if has_streams else None)
        self.follows = (lambda request: True) if has_streams else None

    @rule(who=RANKS, slot=SLOTS)
    def ask(self, who: str, slot: int) -> None:
        asked = self.asked.setdefault(who, [])
        if key(slot) not in asked:
            asked.append(key(slot))
            self.buffer.add_request(who, key(slot))

    @rule(who=RANKS)
    def go(self, who: str) -> None:
        self.asked.pop(who, None)
        self.buffer.cancel_requests(who)

    @precondition(lambda self: any(self.asked.values()))
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(sorted(who for who in self.asked if self.asked[who])))
        answer = self.buffer.pop_ready(who, self.asked[who][0])
        if answer is not None:
            assert answer.reply.number == self.asked[who].pop(0).slot
            self.held.append(answer)

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0, 50))
    def sent(self, at: int) -> None:
        self.held.pop(at % len(self.held)).release()

    @rule(ahead=st.booleans(), worker=st.sampled_from([0, 1]))
    def choose(self, ahead: bool, worker: int) -> None:
        is_full, one = self.buffer.is_full, self.buffer.choose(worker, self.follows)
        if one is not None and self.follows and not is_full:
            queues = self.buffer._queues.get(worker)
            queued = queues.get(_ALL) if queues else None
            assert all(one < later for later in queued or ()), "a stream is prepared in order"
        if one is None and ahead and not self.buffer.is_full:
            one = self.buffer.choose_ahead(worker)
        if one is not None:
            assert one not in self.doing, "it is being prepared already"
            assert one not in ready(self.buffer)
            self.doing.append(one)

    @precondition(lambda self: self.doing)
    @rule(at=st.integers(0, 50))
    def reply(self, at: int) -> None:
        one = self.doing.pop(at % len(self.doing))
        # `offset` counts all responses, so each has another one; `number` is the slot.
        reply = Reply(one.slot, ResponseKind.BATCH, 1, body_bytes=BATCH_BYTES, offset=self.prepared)
        self.prepared += 1
        waiting = {who for who, asked in self.asked.items() if one in asked}
        assert self.buffer.put(one, PreparedResponse(reply, self.arena)) == waiting

    @precondition(lambda self: self.doing)
    @rule(at=st.integers(0, 50))
    def die(self, at: int) -> None:
        self.buffer.requeue(self.doing.pop(at % len(self.doing)))

    @rule()
    def make_room(self) -> None:
        self.buffer.make_room()

    @invariant()
    def nothing_is_freed_twice_or_while_it_is_sent(self) -> None:
        frees = self.arena.frees
        assert len(set(frees)) == len(frees)
        assert not set(frees) & {answer.reply.offset for answer in self.held}

    @invariant()
    def memory_is_that_of_the_batches(self) -> None:
        assert self.buffer.ready_bytes == BATCH_BYTES * self.buffer.ready_batches

    @invariant()
    def what_is_not_ready_and_wanted_is_open_or_being_prepared(self) -> None:
        wanted = {one for asked in self.asked.values() for one in asked}
        missing = wanted - set(ready(self.buffer)) - set(self.doing)
        queues = self.buffer._queues.values()
        is_open = {one for queue in queues for keys in queue.values() for one in keys}
        assert is_open == {one for one, entry in self.buffer._entries.items() if entry.queued}
        assert missing <= is_open <= wanted
        assert not is_open & set(self.doing)

    def teardown(self) -> None:
        """Check that each rank gets all responses that it requested, and that no memory is used."""
        for who in sorted(self.asked):
            while self.asked[who]:
                self.take_now(who)
        for answer in self.held:
            answer.release()
        for one in list(self.doing):
            self.buffer.requeue(one)
        let_go(self.buffer)
        assert sorted(self.arena.frees) == list(range(self.prepared))

    def take_now(self, who: str) -> None:
        first = self.asked[who][0]
        for _ in range(100):
            answer = self.buffer.pop_ready(who, first)
            if answer is not None:
                self.asked[who].pop(0)
                self.held.append(answer)
                return
            self.choose(ahead=False, worker=by_parity(first))
            if self.doing:
                self.reply(0)
        raise AssertionError(f"{who} never gets {first}")


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = hypothesis.settings(max_examples=60, stateful_step_count=40, deadline=None)


@hypothesis.given(
    st.lists(st.sampled_from(["take", "send", "prepare"]), max_size=200), st.integers(1, 4)
)
@hypothesis.settings(deadline=None)
def test_memory_is_bounded_whatever_one_rank_does(does: list[str], workers: int) -> None:
    buffer, next_slot = buffer_of(BUDGET_BATCHES * BATCH_BYTES), 0
    doing, asked = list[LoaderRequest](), list[LoaderRequest]()
    for one in does:
        if one == "take":
            asked.append(key(next_slot))
            buffer.add_request("rank", key(next_slot))
            next_slot += 1
        elif one == "send" and asked and (taken := buffer.pop_ready("rank", asked[0])) is not None:
            taken.release()
            del asked[0]
        elif one == "prepare":
            if len(doing) >= workers:
                done = doing.pop(0)
                buffer.put(done, answer(done.slot))
            elif (got := buffer.choose(0)) is not None:
                doing.append(got)
        # Before the buffer knows the size of a batch, each worker may prepare one. The batch that
        # the connection must send next is prepared even if the memory is full.
        assert buffer.ready_batches <= max(BUDGET_BATCHES, workers) + 1
