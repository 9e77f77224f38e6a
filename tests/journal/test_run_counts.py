"""Tests of `RunCounts`, the sums of what ranks and fetchers report about loaders."""

from taas_magic.journal.analysis import RunCounts
from taas_magic.messages import Event
from tests.events import event

RANK = {"batches": 10, "units": 10, "bytes": 1e6, "waited_s": 1.0, "span_s": 4.0}


def data(rank: int, **counts: float) -> Event:
    return event("data", rank=rank, loaders={"train": RANK | counts})


def fetched(number: int, **stats: float) -> Event:
    return event("fetched", "cpu1", number=number, loaders={"train": stats})


def run_counts_of(*events: Event) -> RunCounts:
    """Return a `RunCounts` that has received the events, one each second from 10 s on."""
    run_counts = RunCounts()
    for number, seen in enumerate(events):
        run_counts.apply(seen, 10.0 + number)
    return run_counts


def test_ranks_are_added_up() -> None:
    train = run_counts_of(data(0), data(1, batches=30, waited_s=3.0)).loaders["train"]
    assert (train.rank_total("batches"), train.rank_total("bytes")) == (40, 2e6)
    assert train.waited_fractions == {0: 0.25, 1: 0.75}
    assert train.sums(0.0).waited_fraction == 0.5
    assert train.mean.rate(train.mean.batches) == 10.0


def test_a_report_replaces_the_ranks_previous_report() -> None:
    train = run_counts_of(data(0), data(0, batches=12)).loaders["train"]
    assert train.rank_total("batches") == 12


def test_rates_cover_only_the_last_seconds() -> None:
    run_counts = run_counts_of(*(data(0, batches=5 * number, bytes=0) for number in range(20)))
    recent = run_counts.loaders["train"].recent
    assert recent.rate(recent.batches) == 5.0
    run_counts.apply(data(0, batches=95), 60.0)
    recent = run_counts.loaders["train"].recent
    assert recent.rate(recent.batches) < 1.0


def test_units_of_a_state_that_all_ranks_loaded_count_once() -> None:
    train = run_counts_of(data(0, resumed=100), data(1, resumed=100)).loaders["train"]
    assert train.units == 120


def test_after_a_restart_counts_begin_again() -> None:
    run_counts = run_counts_of(data(0), data(1), event("restart", attempt=1), data(0, batches=1))
    train = run_counts.loaders["train"]
    assert train.rank_total("batches") == 1
    assert train.recent.batches == 1


def test_ready_batches_are_those_of_the_last_reports() -> None:
    train = run_counts_of(fetched(0, ready=3), fetched(1, ready=5), fetched(0, ready=1)).loaders[
        "train"
    ]
    assert train.fetcher_total("ready") == 6


def test_counts_of_workers_are_noted_at_the_first_and_the_last_batch() -> None:
    run_counts = run_counts_of(
        *(fetched(0, fetch_s=1.0), data(0, batches=1), fetched(0, fetch_s=2.0)),
        *(data(0, batches=2), fetched(0, fetch_s=9.0), data(0, batches=2)),
    )
    train = run_counts.loaders["train"]
    assert (train.counts_at_first_batch[0].fetch_s, train.counts_at_last_batch[0].fetch_s) == (
        1.0,
        2.0,
    )


def test_a_run_without_loaders_has_none() -> None:
    run_counts = run_counts_of(event("started", pids={}), event("note", text="new"))
    assert not run_counts.loaders
