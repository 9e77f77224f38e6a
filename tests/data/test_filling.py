"""Tests of `--prefill`: the reports of fetchers after which ranks may start."""

import pytest
from msgspec import structs

from taas_magic.config import PoolConfig
from taas_magic.host.host_run import prefill_minimums
from taas_magic.journal.analysis import RunCounts
from taas_magic.messages import Event
from taas_magic.notebook.run import PrefillProgress
from taas_magic.plan import Flags, HostCapacity, Prefill, make_plan, place_fetchers
from tests.events import event

BATCHES = Prefill(100, "batches")
BYTES = Prefill(1000, "bytes")
ALL = Prefill(0, "all")


def fetched(
    number: int = 0,
    ready: int = 0,
    ready_bytes: int = 0,
    idle: int = 0,
) -> Event:
    stats = {"ready": ready, "ready_bytes": ready_bytes, "idle": idle, "workers": 2}
    return event("fetched", number=number, loaders={"train": stats})


def filling(
    prefill: Prefill, *events: Event, fetchers: int = 1, loaders: int = 1, units: int | None = None
) -> PrefillProgress:
    names = tuple(f"loader{number}" for number in range(loaders))
    plan = make_plan(Flags(gpus=1, units=units, prefill=prefill), HostCapacity(0, 1), "r1")
    data, _ = place_fetchers(names, fetchers, PoolConfig("local", max_hosts=fetchers), cores=1)
    run_counts = RunCounts()
    for seen in events:
        run_counts.apply(seen, 0.0)
    return PrefillProgress(structs.replace(plan, data=data), run_counts)


@pytest.mark.parametrize(
    ("prefill", "events", "is_enough"),
    [
        (BATCHES, [], False),
        (BATCHES, [fetched(ready=99)], False),
        (BATCHES, [fetched(ready=100)], True),
        (BATCHES, [fetched(0, ready=50), fetched(1, ready=50)], True),
        (BATCHES, [fetched(0, ready=60), fetched(0, ready=70)], False),
        (BYTES, [fetched(ready_bytes=600)], False),
        (BYTES, [fetched(ready_bytes=1000)], True),
        (ALL, [fetched(ready=30, idle=1)], False),
    ],
)
def test_enough_is_what_was_asked_for(
    prefill: Prefill, events: list[Event], is_enough: bool
) -> None:
    assert filling(prefill, *events, fetchers=2, units=40).is_enough is is_enough


def test_workers_that_can_prepare_no_more_are_enough() -> None:
    full = fetched(0, ready=3, idle=2)
    assert filling(BATCHES, full).is_enough
    assert not filling(BATCHES, full, fetchers=2).is_enough, "the other has said nothing yet"
    assert not filling(BATCHES, full, fetched(1, idle=1), fetchers=2).is_enough
    assert filling(BATCHES, full, fetched(1, idle=2), fetchers=2).is_enough


def test_ranks_start_when_all_fetchers_have_ended() -> None:
    ended = [event("fetcher_ended", number=number) for number in (0, 1)]
    assert not filling(BATCHES, ended[0], fetchers=2).is_enough
    assert filling(BATCHES, *ended, fetchers=2).is_enough
    assert filling(BATCHES, ended[0], fetched(1, ready=9, idle=2), fetchers=2).is_enough


def test_the_progress_event_has_the_prepared_and_the_wanted_amount() -> None:
    said = filling(BYTES, fetched(ready_bytes=600)).event("cpu1")
    assert (said.host, said.done, said.wanted, said.unit) == ("cpu1", 600, 1000, "bytes")
    said = filling(ALL, loaders=2, units=40).event("")
    assert (said.done, said.wanted, said.unit) == (0, 80, "batches")


def test_prefill_determines_the_least_that_workers_prepare() -> None:
    assert prefill_minimums(None) == (0, 0)
    assert prefill_minimums(BATCHES) == (100, 0)
    assert prefill_minimums(BYTES) == (0, 1000)
    assert prefill_minimums(ALL)[0] > 1e15
