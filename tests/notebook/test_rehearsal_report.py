"""The text of a rehearsal's report, made from its findings without a run."""

from collections import deque

import pytest

from taas_magic.capture.payload import CapturedVariable
from taas_magic.journal.analysis import LoaderCounts
from taas_magic.messages import FetcherCounts, RankCounts, Rehearsed, WrittenFile
from taas_magic.notebook.rehearsal import RehearsalFindings, estimate, flags_here, report_text
from taas_magic.plan import Flags, HostCapacity, Prefill, make_plan
from taas_magic.setup.facts import ERROR, REMARK, WARNING, HostCheck, HostProblem

FLAGS = Flags(gpus=8, pool="gpu", rehearse=3)


def loader_counts(
    prepared: int = 12, fetch_s: float = 2.0, batches: int = 6, busy_s: float = 3.0
) -> LoaderCounts:
    """Return the counts of a loader with two workers, used by one rank."""
    counts = RankCounts(batches=batches, span_s=busy_s + 1.0, waited_s=1.0)
    return LoaderCounts(
        "train",
        deque(),
        ranks={0: counts},
        fetchers={0: FetcherCounts(prepared=prepared, fetch_s=fetch_s, workers=2)},
    )


@pytest.mark.parametrize(
    ("counts", "ranks", "wanted"),
    [
        (loader_counts(), 1, "a CPU rank uses 2; 1 such rank needs --cpus 1"),
        (
            loader_counts(),
            6,
            "prepares 12 batches/s here, a CPU rank uses 2; 6 such ranks need --cpus 1",
        ),
        (loader_counts(), 7, "7 such ranks need --cpus 2"),
        (loader_counts(batches=0), 2, "prepares 12 batches/s here; no rank used a batch"),
        (loader_counts(busy_s=0.0001), 2, "a rank does too little with a batch to estimate --cpus"),
        (loader_counts(prepared=0, fetch_s=0.0), 2, "no batch was prepared"),
    ],
)
def test_the_report_estimates_the_cpus_for_a_loader(
    counts: LoaderCounts, ranks: int, wanted: str
) -> None:
    assert estimate(counts, ranks).endswith(wanted)


def test_a_whole_report() -> None:
    other = HostProblem(
        ERROR, "module nosuch that the cell needs: not installed there", "Install it"
    )
    found = RehearsalFindings(
        FLAGS,
        plan=make_plan(FLAGS, HostCapacity(gpus=4, cores=8), "run", max_hosts=4),
        problems=["first line\n    second line"],
        host_rows=[
            *(HostCheck("gpu", f"gpu{n}", None, (other,)) for n in range(5)),
            HostCheck("gpu", "gpu9", None, (HostProblem(WARNING, "slow"),)),
            HostCheck("queue", "", None, (HostProblem(REMARK, "no host is up"),)),
        ],
        captured=[CapturedVariable(f"x{n}", n << 20, "", "numpy.ndarray") for n in range(6)],
        travels_bytes=15 << 20,
        loader_bytes={"train": 3 << 20},
        counts_by_loader={"train": loader_counts()},
        reports={
            0: Rehearsed(
                rank=0,
                peak_bytes=300 << 20,
                written=[WrittenFile(f"c{n}.pt", 1024) for n in range(5)],
                outside=[WrittenFile("/tmp/a.pt", 10)],
            ),
        },
        state="SUCCEEDED",
        elapsed_s=4.2,
    )
    assert report_text(found).splitlines() == [
        "rehearsal (3 batches a pass on 2 CPU ranks here): SUCCEEDED in 4.2 s; "
        'for pool "gpu": 8 ranks on 2 hosts',
        "  would fail    first line; second line",
        "  would fail    hosts gpu0, gpu1, gpu2 and 2 more: module nosuch that the cell needs: "
        "not installed there. Install it",
        "  hosts         1 of 6 hosts have a suitable Python, torch, and all modules that the cell "
        "needs",
        '  not checked   the modules of pool "queue", which has no running host '
        "(%taas warm queue starts one)",
        "  sent          15.0 MiB to each host: x5 5.0 MiB (ndarray), x4 4.0 MiB (ndarray), "
        "x3 3.0 MiB (ndarray), 3 more",
        "  loader train  3.0 MiB to each fetcher; one fetcher prepares 12 batches/s here, "
        "a CPU rank uses 2; 8 such ranks need --cpus 2",
        "  memory        at most 300.0 MiB for a rank (rank 0, without its child processes)",
        "  not known     memory and files of rank 1, because it ended before it could report",
        "  would write   5 files, 5.0 KiB: c0.pt (1.0 KiB), c1.pt (1.0 KiB), c2.pt (1.0 KiB) and 2 "
        "more; the project store has not changed",
        "  outside       /tmp/a.pt (10 bytes); not in the project store, so a file stays on "
        "the host of its rank",
    ]


def test_many_problems_are_counted() -> None:
    text = report_text(RehearsalFindings(FLAGS, problems=[f"problem {n}" for n in range(9)]))
    assert "not run; for pool" in text and text.count("would fail") == 6
    assert "4 more reasons" in text and "memory" not in text


def test_the_report_lists_each_file_once() -> None:
    new, old = WrittenFile("new.pt", 1), WrittenFile("old.pt", 1)
    reports = {
        1: Rehearsed(rank=1, peak_bytes=1, written=[new, old], outside=[old]),
        0: Rehearsed(rank=0, peak_bytes=1, written=[new], outside=[new]),
    }
    text = report_text(RehearsalFindings(FLAGS, reports=reports, state="SUCCEEDED"))
    assert "would write    new.pt (1 byte); the project" in text
    assert "outside        old.pt (1 byte), new.pt (1 byte); not in" in text


def test_a_rehearsal_runs_with_few_ranks_on_this_machine() -> None:
    flags = Flags(
        gpus=8,
        pool="gpu",
        data_pool="cpu",
        cpus=4,
        rehearse=3,
        out=("a", "b@1", "c@2", "d@last", "e@all"),
        log_ranks=frozenset({1, 7}),
        env={"A": "1"},
    )
    here = flags_here(flags, loaders=2)
    assert (here.gpus, here.pool, here.data_pool, here.cpus) == (2, "local", "local", 1)
    assert here.prefill == Prefill(12, "batches")
    assert here.out == ("a", "b@1", "d@last", "e@all") and here.log_ranks == frozenset({1})
    assert here.env == {"A": "1", "CUDA_VISIBLE_DEVICES": "", "TAAS_REHEARSE": "3"}
    alone = flags_here(Flags(gpus=1, rehearse=1), loaders=0)
    assert (alone.gpus, alone.cpus, alone.prefill, alone.log_ranks) == (1, 0, None, None)
    plan = make_plan(alone, HostCapacity(gpus=1, cores=2), "run")
    assert plan.notes == () and plan.rehearse == 1  # no note that the rank has no GPU
