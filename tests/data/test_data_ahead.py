"""Tests of `PrefetchOrder`, the order of batches that are prepared before a rank requests them."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice, takewhile

import pytest

from taas_magic.data.protocol import EpochDescription, LoaderRequest, RequestKind
from taas_magic.data.scheduler import PrefetchOrder
from taas_magic.data.sharding import FetcherPart


def ahead_of(enough: Callable[[], bool] = lambda: True, **share: int) -> PrefetchOrder:
    return PrefetchOrder(FetcherPart(**share), enough)


def keys(
    ahead: PrefetchOrder, batches: int = 4, streams: int | None = None, most: int = 100
) -> Iterator[LoaderRequest]:
    """Yield the next requests of a prefetch order, at most `most`.

    Answer each OPEN request at once: each epoch has `streams` streams, or else `batches` batches.
    """
    opened = EpochDescription(None if streams else batches, streams, 0)
    for key in islice(iter(ahead.next, None), most):
        if key.kind is RequestKind.OPEN:
            ahead.record_epoch(key.epoch, opened)
        yield key


def slots(keys: Iterable[LoaderRequest]) -> list[tuple[int, int]]:
    return [(key.epoch, key.slot) for key in keys if key.kind is RequestKind.GET]


def test_an_epoch_and_two_batches_of_the_next_epoch_are_prepared() -> None:
    assert slots(keys(ahead_of())) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


def test_an_epoch_is_opened_before_its_batches_and_not_twice() -> None:
    ahead = ahead_of()
    assert ahead.next() == LoaderRequest(RequestKind.OPEN, 0, 0)
    assert ahead.next() is None
    ahead.record_epoch(0, EpochDescription(1, None, 0))
    assert ahead.next() == LoaderRequest(RequestKind.GET, 0, 0)
    assert ahead.next() == LoaderRequest(RequestKind.OPEN, 1, 0)
    assert ahead.next() is None


def test_before_the_first_request_batches_are_prepared_until_there_are_enough() -> None:
    prepared: list[tuple[int, int]] = []
    ahead = ahead_of(enough=lambda: len(prepared) >= 11)
    for key in keys(ahead):
        prepared += slots([key])
    assert prepared == [(epoch, slot) for epoch in range(3) for slot in range(4)][:11]


def test_more_batches_are_prepared_when_some_are_used() -> None:
    ready, enough = 0, 12
    ahead = ahead_of(enough=lambda: ready >= enough)
    for used in (0, 3, 1):
        ready -= used
        for key in keys(ahead, batches=10):
            ready += len(slots([key]))
        assert ready == enough


def test_after_the_first_request_only_the_usual_batches_are_prepared() -> None:
    ahead = ahead_of(enough=lambda: False)
    list(keys(ahead, most=20))
    ahead.record_requested(2, 2)
    assert slots(keys(ahead)) == [(2, 3), (3, 0), (3, 1)]


def test_a_request_of_an_earlier_epoch_does_not_change_the_next_batches() -> None:
    ahead = ahead_of()
    ahead.record_requested(1, 2)
    ahead.record_requested(0, 0)
    ahead.record_requested(1, 0)
    assert slots(keys(ahead)) == [(1, 3), (2, 0), (2, 1)]


def test_the_limit_of_units_applies_to_all_epochs_together() -> None:
    assert slots(keys(ahead_of(enough=lambda: False, units=10))) == [
        *((0, slot) for slot in range(4)),
        *((1, slot) for slot in range(4)),
        *((2, slot) for slot in range(2)),
    ]


def test_one_of_three_fetchers_prepares_every_third_batch() -> None:
    assert slots(keys(ahead_of(index=2, fetchers=3), batches=9)) == [
        *((0, slot) for slot in (2, 5, 8)),
        *((1, slot) for slot in (2, 5)),
    ]


def test_a_rank_without_fetchers_prepares_only_its_own_batches() -> None:
    assert slots(keys(ahead_of(stride=3, first=1), batches=8)) == [
        *((0, slot) for slot in (1, 4, 7)),
        *((1, slot) for slot in (1, 4)),
    ]


@pytest.mark.parametrize("share", [{}, {"index": 1, "fetchers": 2}, {"stride": 3, "first": 1}])
@pytest.mark.parametrize("streams", [None, 1, 5])
@pytest.mark.parametrize("first", [0, 1, 17])
def test_the_workers_together_prepare_all_batches_of_a_fetcher(
    share: dict[str, int], streams: int | None, first: int
) -> None:
    one = FetcherPart(workers=3, **share)
    ours = [
        *(slot for slot in range(first, 100) if one.assigned_worker(slot, streams)[0] == one.index),
    ]
    if streams is None:
        ours = [slot for slot in ours if slot % one.stride == one.first]
    found: list[int] = []
    for worker in range(3):
        slots = [*takewhile(lambda slot: slot < 100, one.slots(worker, streams, first))]
        assert all(one.assigned_worker(slot, streams) == (one.index, worker) for slot in slots)
        found += slots
    assert sorted(found) == ours


def test_a_fetcher_without_a_part_of_the_data_ends() -> None:
    assert slots(keys(ahead_of(lambda: False, fetchers=3, index=2), streams=2)) == []
    assert slots(keys(ahead_of(lambda: False), batches=0)) == []


def test_no_batches_after_the_end_of_a_stream_are_prepared() -> None:
    ahead, prepared = ahead_of(), list[tuple[int, int]]()
    for key in keys(ahead, streams=2):
        prepared += slots([key])
        if key.kind is RequestKind.GET and not key.epoch and key.slot in (6, 10):
            ahead.record_end(0, {6: 5, 10: 8}[key.slot])
    assert prepared == [*((0, slot) for slot in (*range(7), 8, 10)), (1, 0), (1, 1)]


def test_a_worker_ends_when_its_own_streams_have_ended() -> None:
    ahead = ahead_of(workers=2)
    assert ahead.next() == LoaderRequest(RequestKind.OPEN, 0, 0)
    ahead.record_epoch(0, EpochDescription(None, 2, 0))
    assert ahead.next(1) == LoaderRequest(RequestKind.GET, 0, 1)
    ahead.record_end(0, 1)
    assert ahead.next(1) is None


def test_nothing_is_prepared_after_an_epoch_whose_sampler_raised() -> None:
    ahead = ahead_of()
    assert ahead.next() == LoaderRequest(RequestKind.OPEN, 0, 0)
    ahead.record_epoch(0, None)
    assert ahead.next() is None
