"""Tests of the lines about loaders in a run's status header."""

from taas_magic.display.head import loader_lines, prefill_text
from taas_magic.journal.analysis import RunCounts
from taas_magic.messages import Event
from tests.events import event

COUNTS = {"batches": 600, "units": 600, "bytes": 6e7, "waited_s": 3.0, "span_s": 10.0}
STATS = {"ready": 12, "ready_bytes": 1.2e6, "budget_bytes": 1e9}


def run_counts_of(*events: Event) -> RunCounts:
    run_counts = RunCounts()
    for number, seen in enumerate(events):
        run_counts.apply(seen, 10.0 + number)
    return run_counts


def data(rank: int, **counts: float) -> Event:
    return event("data", rank=rank, loaders={"train": COUNTS | counts})


def fetched(**stats: float) -> Event:
    return event("fetched", number=0, loaders={"train": STATS | stats})


def facts(
    run_counts: RunCounts, units: int | None = None, has_ended: bool = False
) -> dict[str, str]:
    ((name, found),) = loader_lines(run_counts, units, has_ended)
    assert name == "train"
    return dict(found)


def test_a_running_run_shows_current_rates_and_the_buffer() -> None:
    run_counts = run_counts_of(
        fetched(), data(0, batches=0, bytes=0), data(1), data(0, waited_s=5.0)
    )
    assert facts(run_counts, units=20_000) == {
        "batches": "1,200 of 20,000",
        "per second": "100 · 10 MB/s",
        "ready": "12 (1.2 MB of 1.0 GB)",
        "waited": "40% (rank 0 50%, rank 1 30%)",
    }


def test_an_ended_run_shows_mean_rates_and_no_buffer() -> None:
    shown = facts(run_counts_of(fetched(), data(0), data(1)), has_ended=True)
    assert shown == {
        "batches": "1,200",
        "per second": "120 · 12 MB/s",
        "waited": "30% (rank 0 30%, rank 1 30%)",
    }


def test_units_are_shown_next_to_batches_if_they_differ() -> None:
    assert (
        facts(run_counts_of(data(0, units=2400)), units=9000)["batches"]
        == "600 · 2,400 of 9,000 units"
    )


def test_repeated_batches_of_all_ranks_are_shown() -> None:
    run_counts = run_counts_of(data(0), data(1, repeated=1), data(2, repeated=2))
    said = '(3 repeated: uneven="pad")'
    assert facts(run_counts)["batches"] == f"1,800 {said}"
    assert facts(run_counts, 2000, has_ended=True)["batches"] == f"1,800 of 2,000 {said}"


def test_the_memory_of_ranks_is_shown() -> None:
    assert facts(run_counts_of(fetched(), data(0, held_bytes=3e6)))["in ranks"] == "3.0 MB"


def test_many_ranks_are_shown_by_their_extremes() -> None:
    run_counts = run_counts_of(*(data(rank, waited_s=rank / 10) for rank in range(100)))
    assert facts(run_counts)["waited"] == "50% (rank 0 0% to rank 99 99%)"


def test_only_some_of_many_loaders_are_shown() -> None:
    loaders = {f"loader{number:02}": COUNTS for number in range(20)}
    run_counts = run_counts_of(event("data", rank=0, loaders=loaders))
    assert loader_lines(run_counts, None, False)[-1] == ("… and 12 more loaders", [])


def test_a_run_without_loaders_shows_none() -> None:
    assert loader_lines(RunCounts(), None, True) == []


def test_the_progress_of_prefill_is_shown_until_the_ranks_start() -> None:
    in_bytes = event("filling", done=31e6, wanted=5e8, unit="bytes")
    assert prefill_text(run_counts_of(in_bytes)) == "31.0 MB of 500.0 MB"
    batches = event("filling", done=31, wanted=200, unit="batches")
    assert prefill_text(run_counts_of(batches)) == "31 of 200 batches"
    assert prefill_text(run_counts_of(in_bytes, event("started", pids={}))) == ""
