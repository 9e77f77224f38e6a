"""Tests of the schedules that assign batches to ranks, compared with a simple model."""

import itertools
import re
from collections.abc import Callable, Sequence

import hypothesis
import hypothesis.strategies as st
import pytest

from taas_magic.data import sharding
from taas_magic.data.sharding import (
    UNHINTED,
    VOID,
    DynamicSchedule,
    EpochPosition,
    NoSlot,
    RankPart,
    StaticSchedule,
    Uneven,
)

worlds = st.integers(1, 5)
rules = st.sampled_from(sharding.UNEVEN)


def rows_of(slots: list[int], world_size: int, uneven: Uneven) -> list[list[int]]:
    """Return the expected rows: for each step, a list with the slot of each rank.

    With `uneven="keep"`, the last row may be shorter.
    """
    rows = [slots[at : at + world_size] for at in range(0, len(slots), world_size)]
    if rows and len(rows[-1]) < world_size:
        if uneven == "drop":
            rows.pop()
        elif uneven == "pad":
            rows[-1] += [slots[k % len(slots)] for k in range(world_size - len(rows[-1]))]
    return rows


def bounded(rows: list[list[int]], units: int | None, counts: Sequence[int]) -> list[list[int]]:
    kept, spent = list[list[int]](), 0
    for row in rows:
        spent += sum(counts[slot] for slot in row)
        if units is not None and spent > units:
            break
        kept.append(row)
    return kept


def walk(
    schedule: StaticSchedule | DynamicSchedule,
    answers: Callable[[int], int],
    ahead: int = 3,
    step: int = 0,
) -> list[int]:
    """Run a rank's schedule to its end, and return the slots of the rank's batches.

    Args:
        schedule: The rank's schedule.
        answers: Returns the number of units of a slot's batch, or VOID if the slot has no batch.
        ahead: Number of further steps whose slots the rank requests before each step.
        step: First step.
    """
    handed: list[int] = []
    while True:
        for ask in schedule.requests(step + ahead):
            if answers(ask.slot) == VOID or isinstance(schedule, DynamicSchedule) or ask.is_own:
                schedule.record_units(ask.slot, answers(ask.slot))
        verdict = schedule.slot_at(step)
        assert verdict is not NoSlot.WAIT
        if verdict is NoSlot.END:
            return handed
        handed.append(verdict)
        step += 1


@hypothesis.given(st.integers(0, 40), worlds, rules, st.none() | st.integers(0, 60))
def test_a_static_schedule_equals_the_model(
    batches: int, world_size: int, uneven: Uneven, units: int | None
) -> None:
    if uneven == "keep" and units is not None:
        rows = rows_of(list(range(min(batches, units))), world_size, uneven)
    else:
        rows = bounded(rows_of(list(range(batches)), world_size, uneven), units, [1] * batches)
    for rank in range(world_size):
        part = RankPart(rank, world_size, uneven, units)
        schedule = StaticSchedule(part, batches)
        want = [row[rank] for row in rows if rank < len(row)]
        assert walk(schedule, lambda slot: 1) == want


@hypothesis.given(
    st.lists(st.integers(0, 12), min_size=1, max_size=4), worlds, rules, st.integers(1, 6)
)
def test_streams_are_scheduled_like_those_of_a_local_loader(
    lengths: list[int], world_size: int, uneven: Uneven, ahead: int
) -> None:
    streams = len(lengths)
    present = [s for s in range(streams * 13) if s // streams < lengths[s % streams]]
    rows = rows_of(present, world_size, uneven)
    for rank in range(world_size):
        schedule = DynamicSchedule(RankPart(rank, world_size, uneven), None, streams)
        handed = walk(schedule, lambda s: 1 if s in present else VOID, ahead)
        assert handed == [row[rank] for row in rows if rank < len(row)]


@hypothesis.given(
    st.lists(st.integers(1, 9), max_size=25),
    worlds,
    rules,
    st.none() | st.integers(0, 80),
    st.integers(1, 6),
)
def test_units_of_hints_end_all_ranks_at_the_same_step(
    counts: list[int], world_size: int, uneven: Uneven, units: int | None, ahead: int
) -> None:
    rows = bounded(rows_of(list(range(len(counts))), world_size, uneven), units, counts)
    for rank in range(world_size):
        schedule = DynamicSchedule(RankPart(rank, world_size, uneven, units), len(counts), 1)
        handed = walk(schedule, counts.__getitem__, ahead)
        assert handed == [row[rank] for row in rows if rank < len(row)]


@hypothesis.given(
    st.lists(st.integers(0, 8), min_size=1, max_size=3), worlds, rules, st.integers(0, 9)
)
def test_a_dynamic_schedule_continues_from_a_saved_step(
    lengths: list[int], world_size: int, uneven: Uneven, stop: int
) -> None:
    streams = len(lengths)
    present = [s for s in range(streams * 9) if s // streams < lengths[s % streams]]

    def answers(slot: int) -> int:
        return 1 if slot in present else VOID

    for rank in range(world_size):
        part = RankPart(rank, world_size, uneven)
        whole = walk(DynamicSchedule(part, None, streams), answers)
        step = min(stop, len(whole))
        schedule = DynamicSchedule(part, None, streams)
        for ask in schedule.requests(step + 1):
            schedule.record_units(ask.slot, answers(ask.slot))
        resumed = DynamicSchedule(part, None, streams, schedule.position_after(step))
        assert walk(resumed, answers, step=step) == whole[step:]


@hypothesis.given(
    st.lists(st.integers(0, 30), min_size=1, max_size=3),
    rules,
    st.lists(worlds, min_size=1, max_size=3),
)
@hypothesis.example([9], "pad", [1, 4])
@hypothesis.example([23], "pad", [2, 4, 5])
def test_a_dynamic_schedule_continues_with_other_numbers_of_ranks(
    lengths: list[int], uneven: Uneven, sizes: list[int]
) -> None:
    streams = len(lengths)
    present = [s for s in range(streams * 31) if s // streams < lengths[s % streams]]

    def answers(slot: int) -> int:
        return 1 if slot in present else VOID

    place = EpochPosition()
    for before, after in itertools.pairwise(sizes):
        step = after * (place.position // (before * after) + 1)  # a step of both numbers of ranks
        if step * before > len(present):
            break
        schedule = DynamicSchedule(RankPart(0, before, uneven), None, streams, place)
        for ask in schedule.requests(step + 1):
            schedule.record_units(ask.slot, answers(ask.slot))
        place = schedule.position_after(step)
    else:
        world_size, step = sizes[-1], place.position // sizes[-1]
        rows = rows_of(present, world_size, uneven)[step:]
        for rank in range(world_size):
            schedule = DynamicSchedule(RankPart(rank, world_size, uneven), None, streams, place)
            assert walk(schedule, answers, step=step) == [r[rank] for r in rows if rank < len(r)]


@hypothesis.given(st.integers(1, 30), worlds, rules, st.integers(0, 9))
def test_a_static_schedule_continues_from_a_saved_position(
    batches: int, world_size: int, uneven: Uneven, stop: int
) -> None:
    for rank in range(world_size):
        schedule = StaticSchedule(RankPart(rank, world_size, uneven), batches)
        whole = walk(schedule, lambda slot: 1)
        step = min(stop, len(whole))
        resumed = StaticSchedule(
            RankPart(rank, world_size, uneven), batches, schedule.position_after(step)
        )
        assert walk(resumed, lambda slot: 1, step=step) == whole[step:]


def test_a_long_dynamic_schedule_drops_past_slots() -> None:
    schedule = DynamicSchedule(RankPart(1, 2), None, 3)
    handed = walk(schedule, lambda slot: 1 if slot < 9000 else VOID)
    assert handed == list(range(1, 9000, 2))
    assert len(schedule._known) < 3000


def test_hints_of_some_batches_only_are_refused() -> None:
    late = 'batch 3 has hints["units"] and batch 0 does not'
    with pytest.raises(ValueError, match=re.escape(late)):
        StaticSchedule(RankPart(0, 1), 10).record_units(3, 5)
    with pytest.raises(ValueError, match=re.escape(late)):
        DynamicSchedule(RankPart(0, 1, units=9), None, 1, has_hints=False).record_units(3, 5)
    with pytest.raises(ValueError, match="batch 3 has no hints and batch 0 does"):
        DynamicSchedule(RankPart(0, 1, units=9), 10, 1, has_hints=True).record_units(3, UNHINTED)
    DynamicSchedule(RankPart(0, 1), None, 1).record_units(3, 5)


def test_a_rank_waits_until_all_units_of_a_row_are_known() -> None:
    schedule = DynamicSchedule(RankPart(0, 2), None, 1)
    list(schedule.requests(2))
    schedule.record_units(0, 1)
    assert schedule.slot_at(0) is NoSlot.WAIT
    schedule.record_units(1, 1)
    assert schedule.slot_at(0) == 0


def test_the_units_of_a_row() -> None:
    schedule = DynamicSchedule(RankPart(0, 2), 4, 1)
    for ask in schedule.requests(2):
        schedule.record_units(ask.slot, ask.slot + 1)
    assert [schedule.row_units(0), schedule.row_units(1)] == [3, 7]
    rows: list[tuple[Uneven, list[int]]]
    rows = [("pad", [2, 2, 0, 0]), ("drop", [2, 0, 0, 0]), ("keep", [2, 1, 0, 0])]
    for uneven, units in rows:
        static = StaticSchedule(RankPart(0, 2, uneven), 3)
        assert [static.row_units(step) for step in range(4)] == units


@hypothesis.given(st.integers(0, 2**63), st.integers(0, 2**40), st.integers(0, 2**40))
def test_seeds_differ_by_batch_and_fit_63_bits(seed: int, epoch: int, batch: int) -> None:
    value = sharding.seed_of(seed, epoch, batch)
    assert 0 <= value < 2**63
    assert value == sharding.seed_of(seed, epoch, batch) != sharding.seed_of(seed, epoch, batch + 1)


def test_seeds_stay_what_they_are() -> None:
    assert sharding.seed_of(0, 0) == 520810605562734633


@hypothesis.given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 5))
def test_each_batch_and_each_stream_always_has_the_same_worker(
    slot: int, fetchers: int, workers: int
) -> None:
    fetcher, worker = sharding.assigned_worker(slot, None, fetchers, workers)
    assert worker == slot % workers
    assert fetcher == slot // workers % fetchers
    assert sharding.assigned_worker(slot, 3, fetchers, workers) == sharding.assigned_worker(
        slot + 3, 3, fetchers, workers
    )


def test_an_epoch_position_can_be_rebuilt_from_its_fields() -> None:
    assert EpochPosition(*EpochPosition(4, 4, (0, 1))) == EpochPosition(4, 4, (0, 1))


def test_after_a_stream_has_ended_each_batch_belongs_to_one_rank() -> None:
    """Stream 1 of 3 has ended. Each of the next batches still belongs to only one of two ranks."""
    requests = list[list[bool]]()
    for rank in range(2):
        schedule = DynamicSchedule(RankPart(rank, 2, "keep"), None, 3)
        for slot in range(6):
            schedule.record_units(slot, VOID if slot in (1, 4) else 1)
        owned = {ask.slot: ask.is_own for ask in schedule.requests(6) if ask.slot > 5}
        requests.append([owned[slot] for slot in (6, 8, 9, 11)])
    assert requests == [[True, False, True, False], [False, True, False, True]]


def test_a_rank_asks_for_nothing_after_the_ends_of_all_streams() -> None:
    """The rank knows the end of each stream before earlier batches have arrived."""
    schedule = DynamicSchedule(RankPart(0, 2), None, 2)
    for slot in (6, 9):
        schedule.record_units(slot, VOID)
    assert [ask.slot for ask in schedule.requests(50)] == list(range(10))


@pytest.mark.parametrize("rank", range(2))
def test_a_rank_does_not_ask_for_batches_after_the_limit_of_units(rank: int) -> None:
    part = RankPart(rank, 2, units=5)
    schedule = DynamicSchedule(part, None, 1, EpochPosition(10, 10), has_hints=False)
    assert [ask.slot for ask in schedule.requests(50)] == list(range(10, 17))
    for slot in range(10, 17):
        schedule.record_units(slot, UNHINTED)
    assert [schedule.slot_at(step) for step in (5, 6, 7)] == [10 + rank, 12 + rank, NoSlot.END]
