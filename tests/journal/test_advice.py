"""Tests of the advice on data loading: what limited it, and which flag would help."""

from dataclasses import replace

import pytest

from taas_magic.journal.analysis import LoaderUse, RunCounts, advice_for_loader, advice_for_run
from tests.events import event

STORAGE = LoaderUse(
    "train", 0.62, ranks=2, fetchers=1, workers=2, working=2, cpu_fraction=0.05, cores_fraction=0.02
)
CPU = replace(STORAGE, cpu_fraction=0.95, cores_fraction=0.25)
IDLE = replace(STORAGE, busy_fraction=0.3, mb_per_s=110)
ALONE = LoaderUse("train", 0.62, ranks=2, fetchers=0, workers=0)

CASES = {
    "little": (replace(STORAGE, waited=0.1), ""),
    "nothing known of the workers": (replace(STORAGE, workers=0), ""),
    "storage": (STORAGE, "its storage is slow; --cpus 3 instead of 1 would make it about 2.6x as"),
    "storage, many": (
        replace(STORAGE, fetchers=4, workers=4, working=4, waited=0.4),
        "--cpus 7 instead of 4 would make it about 1.7x as fast",
    ),
    "storage, hopeless": (
        replace(STORAGE, waited=0.99),
        "--cpus 8 instead of 1 would make it about 8.0x as fast",
    ),
    "storage, workers idle now and then": (
        replace(STORAGE, busy_fraction=0.8, waited=0.5),
        "--cpus 2 instead of 1 would make it about 2.0x as fast",
    ),
    "cpu, others' host": (CPU, "CPU time; --cpus 3 instead of 1 would make it about 2.6x as fast"),
    "cpu, half its cores": (
        replace(CPU, cores_fraction=0.5),
        "--cpus 2 instead of 1 would make it about 2",
    ),
    "cpu, no core left": (
        replace(CPU, cores_fraction=0.95),
        "(--data-pool) would make it up to 2.6x",
    ),
    "cpu, hosts of their own": (
        replace(CPU, cores_fraction=0.95, own_hosts=True),
        "CPU time; --cpus 3 instead of 1 would make it about 2.6x as fast",
    ),
    "storage, but no core left": (
        replace(STORAGE, cores_fraction=0.95),
        "preparing it takes CPU time",
    ),
    "storage, cores for one more": (
        replace(STORAGE, max_fetchers=2),
        "its storage is slow; --cpus 3 instead of 1 would make it about 2.6x as",
    ),
    "storage, no core for one more": (
        replace(STORAGE, max_fetchers=1),
        "its storage is slow; --cpus 3 instead of 1 would make it about 2.6x as",
    ),
    "cpu, no core for one more": (
        replace(CPU, max_fetchers=1),
        "this host already has a worker for each core; fetchers on hosts of their own",
    ),
    "one stream": (
        replace(STORAGE, workers=4, working=1.05),
        "kept only 1.1 of 4 workers busy; num_workers=4 in the DataLoader would divide it into 4",
    ),
    "two streams of different lengths": (
        replace(STORAGE, workers=4, working=1.4),
        "kept only 1.4 of 4 workers busy; num_workers=4",
    ),
    "network": (IDLE, "limits it to 110 MB/s, and its workers are not busy; --cpus 3"),
    "network, no core for one more": (
        replace(IDLE, max_fetchers=1),
        "110 MB/s, and its workers are not busy",
    ),
    "one host": (
        replace(IDLE, crosses=False),
        "no network limits it; a larger buffer lets them work",
    ),
    "receiving": (
        replace(IDLE, receive_cpu_fraction=0.9),
        "the ranks cannot receive more than 110 MB/s",
    ),
    "first batch": (
        replace(STORAGE, waited=0.3, waited_first=0.28),
        "most of it for the first batch; --prefill 2 would start",
    ),
    "first batch, not the network": (
        replace(IDLE, waited_first=0.4),
        "most of it for the first batch; --prefill 2 would start",
    ),
    "first batch, no fetchers": (
        replace(ALONE, waited_first=0.6),
        "--cpus 1 would prepare it while",
    ),
    "in the ranks": (
        ALONE,
        "the run has no fetchers; --cpus 4 would make it about 2.6x as fast",
    ),
    "in the ranks, on their cores": (
        replace(ALONE, receive_cpu_fraction=0.9),
        "--cpus 4, with cores of their own, would make it about 2.6x",
    ),
    "in the ranks, on a host of two cores": (
        replace(ALONE, max_fetchers=2),
        "the run has no fetchers; --cpus 2 would make it about 1.6x as fast",
    ),
    "in many ranks": (
        replace(ALONE, ranks=64, waited=0.95),
        "--cpus 128 would make it about 2.1x as fast",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_case_has_its_advice(name: str) -> None:
    load, words = CASES[name]
    said = advice_for_loader(load)
    assert words in said
    assert bool(said) == bool(words)


def test_the_advice_begins_with_the_waiting_ranks_and_the_loader() -> None:
    assert advice_for_loader(STORAGE).startswith("ranks waited 62% for 'train': ")
    assert advice_for_loader(replace(STORAGE, ranks=1)).startswith(
        "the rank waited 62% for 'train': "
    )


@pytest.mark.parametrize("waited", [0.11, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("fetchers", [0, 1, 3, 10])
@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_more_fetchers_are_never_slower(waited: float, fetchers: int, ranks: int) -> None:
    load = replace(STORAGE, waited=waited, fetchers=fetchers, ranks=ranks)
    words = advice_for_loader(load).split()
    wanted = int(words[words.index("--cpus") + 1])
    faster = float(next(word for word in words if word.endswith("x")).rstrip("x"))
    assert wanted > fetchers
    assert 1.0 < faster <= round(1 / (1 - waited), 1)


def run_of(waited_s: float, cpu_s: float, host: str = "cpu1", **counts: float) -> RunCounts:
    """Return the counts of a run of 10 s with one fetcher, whose worker was always busy.

    Args:
        waited_s: Seconds for which the rank waited for batches.
        cpu_s: CPU seconds that the worker used.
        host: Host of the fetcher.
        counts: Further counts of the rank.
    """
    rank = {"batches": 9, "units": 9, "bytes": 1e6, "span_s": 10.0, "waited_s": waited_s} | counts
    worker = {
        "fetch_s": 10.0,
        "fetch_most_s": 10.0,
        "fetch_cpu_s": cpu_s,
        "up_s": 10.0,
        "workers": 1,
    }
    run_counts = RunCounts()
    for seen in (
        event("fetcher", host, number=0, cores=4, workers={"train": 1}),
        event("fetched", host, number=0, loaders={"train": worker}),
        event("data", rank=0, loaders={"train": rank}),
    ):
        run_counts.apply(seen, 100.0)
    return run_counts


def test_the_advice_for_a_run_depends_on_its_sums() -> None:
    assert "its storage is slow" in advice_for_run(run_of(waited_s=6.0, cpu_s=0.5))
    assert "takes CPU time" in advice_for_run(run_of(waited_s=6.0, cpu_s=9.5))
    assert "first batch" in advice_for_run(run_of(waited_s=6.0, cpu_s=0.5, first_s=5.9))
    assert advice_for_run(run_of(waited_s=0.5, cpu_s=0.5)) == ""
    assert advice_for_run(RunCounts()) == ""
    assert advice_for_run(run_of(waited_s=0.6, cpu_s=0.5, span_s=0.7)) == "", "too short to say"


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
def test_never_more_workers_than_cores_are_advised(cores: int) -> None:
    """The limit applies with and without fetchers, unless slow storage limits the loading."""
    run_counts = run_of(waited_s=9.9, cpu_s=9.5, host="gpu1")
    run_counts.fetchers[0].cores = cores
    alone = RunCounts()
    counts = {"batches": 9.0, "span_s": 10.0, "waited_s": 9.9, "workers": 1.0}
    alone.apply(event("data", rank=0, cores=cores, loaders={"train": counts}), 100.0)
    for said in (advice_for_run(run_counts), advice_for_run(alone)):
        words = said.split()
        if cores == 1 and "--cpus" not in words:
            assert "fetchers on hosts of their own" in said
        else:
            assert int(words[words.index("--cpus") + 1]) == min(cores, 8)
    slow = run_of(waited_s=9.9, cpu_s=0.5, host="gpu1")
    slow.fetchers[0].cores = cores
    assert "its storage is slow; --cpus 8 instead of 1" in advice_for_run(slow)
