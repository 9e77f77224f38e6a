"""`host.watch`: the verdict on a host's ranks, and the failure that came first."""

import os
from pathlib import Path
from typing import Any

import pytest

from taas_magic.host import watch
from taas_magic.host.watch import (
    FURTHER_FAILURES_S,
    INTERRUPT_GRACE_S,
    LEFT_GRACE_S,
    Deadline,
    RankState,
    Verdict,
    decide_verdict,
    describe_failure,
    failed_ranks,
    first_failure,
    is_consequence,
)
from taas_magic.leases import STOPPED_S
from taas_magic.messages import Failure, Note, RankTakesInterrupts


def ranks(**of_rank_1: Any) -> list[RankState]:
    """Return the states of ranks 0 and 1, which run; `of_rank_1` has changed fields of rank 1."""
    return [RankState(0, 10), RankState(1, 11, **of_rank_1)]


def test_running_ranks_give_no_verdict() -> None:
    assert decide_verdict(ranks(), now=1000.0) is None


def test_a_host_succeeds_only_if_all_its_ranks_have_ended() -> None:
    assert decide_verdict(ranks(finished=True, exitcode=0), now=1.0) is None
    done = [
        RankState(0, 10, finished=True, exitcode=0),
        RankState(1, 11, finished=True, exitcode=0),
    ]
    assert decide_verdict(done, now=1.0) == Verdict("SUCCEEDED")


def test_a_failure_is_final_only_after_a_moment_for_further_failures() -> None:
    failed = ranks(failed_at=5.0)
    assert decide_verdict(failed, now=5.0 + FURTHER_FAILURES_S / 2) is None
    assert decide_verdict(failed, now=5.0 + FURTHER_FAILURES_S) == Verdict("FAILED", "rank")


def test_a_failure_is_final_at_once_if_all_ranks_have_ended() -> None:
    gone = [
        RankState(0, 10, finished=True, exitcode=0),
        RankState(1, 11, failed_at=5.0, exitcode=1),
    ]
    assert decide_verdict(gone, now=5.0) == Verdict("FAILED", "rank")


@pytest.mark.parametrize(
    ("field", "grace_s", "cause"),
    [("left_at", LEFT_GRACE_S, "left"), ("stopped_at", STOPPED_S, "stopped")],
)
def test_a_rank_that_left_or_is_stopped_fails_the_run_only_after_a_grace_period(
    field: str, grace_s: float, cause: str
) -> None:
    state = ranks(**{field: 10.0})
    assert decide_verdict(state, now=10.0 + grace_s - 0.1) is None
    assert decide_verdict(state, now=10.0 + grace_s) == Verdict("FAILED", cause)


def test_the_deadline_ends_a_run() -> None:
    assert decide_verdict(ranks(), now=9.9, deadline=10.0) is None
    assert decide_verdict(ranks(), now=10.0, deadline=10.0) == Verdict("FAILED", "timeout")


def test_the_deadline_moves_while_a_rank_waits_for_the_user() -> None:
    deadline = Deadline(10.0)
    deadline.resume(now=1.0)
    assert deadline.at == 10.0
    deadline.pause(now=2.0)
    deadline.pause(now=5.0)  # another rank asks for input too
    assert deadline.at is None
    deadline.resume(now=32.0)
    assert deadline.at == 40.0
    endless = Deadline(None)
    endless.pause(now=0.0)
    endless.resume(now=9.0)
    assert endless.at is None


def test_an_interrupted_run_ends_with_its_ranks_or_after_a_grace_period() -> None:
    assert decide_verdict(ranks(failed_at=1.0), now=2.0, interrupted_at=1.0) is None
    over = 1.0 + INTERRUPT_GRACE_S
    assert decide_verdict(ranks(), now=over, interrupted_at=1.0) == Verdict(
        "INTERRUPTED", "interrupt"
    )
    gone = [RankState(0, 10, exitcode=1), RankState(1, 11, exitcode=-2)]
    assert decide_verdict(gone, now=1.1, interrupted_at=1.0) == Verdict("INTERRUPTED", "interrupt")


def test_a_cause_is_listed_before_an_earlier_consequence() -> None:
    states = [
        RankState(0, 10, failed_at=1.0, etype="RuntimeError", message="Connection closed by peer"),
        RankState(1, 11, failed_at=1.2, exitcode=-9),
    ]
    assert [state.rank for state in failed_ranks(states, "rank")] == [1, 0]


def test_of_several_causes_the_earliest_is_listed_first() -> None:
    states = [
        RankState(0, 10, failed_at=2.0, etype="ValueError"),
        RankState(1, 11, failed_at=1.0, etype="KeyError"),
    ]
    assert [state.rank for state in failed_ranks(states, "rank")] == [1, 0]


def test_a_rank_that_left_early_is_the_cause_of_broken_connections() -> None:
    states = [
        RankState(0, 10, failed_at=1.5, etype="RuntimeError", message="Connection reset by peer"),
        RankState(1, 11, left_at=1.0, finished=True, exitcode=0),
    ]
    assert [state.rank for state in failed_ranks(states, "rank")] == [1, 0]


def test_a_timeout_names_only_the_ranks_that_were_running() -> None:
    assert [state.rank for state in failed_ranks(ranks(finished=True, exitcode=0), "timeout")] == [
        0
    ]


@pytest.mark.parametrize(
    ("etype", "message", "expected"),
    [
        ("RuntimeError", "[gloo/pair.cc:553] Connection closed by peer [127.0.0.1]", True),
        (
            "DistBackendError",
            "NCCL error: remote process exited or there was a network error",
            True,
        ),
        (
            "DistBackendError",
            "ncclInternalError: Internal check failed.\nLast error:\n"
            "Net : Connection closed by remote peer gpu2<50260>",
            True,
        ),
        (
            "DistNetworkError",
            "Failed to recv, got 0 bytes. Connection was likely closed. "
            "Did the remote server shutdown or crash?",
            True,
        ),
        ("RuntimeError", "The size of tensor a (2) must match", False),
        ("RuntimeError", "CUDA error: peer access is not supported between these devices", False),
        ("RuntimeError", "DataLoader worker (pid 8) is killed by signal: Terminated.", False),
        ("ValueError", "Connection closed by peer", False),
    ],
)
def test_errors_of_broken_connections_count_as_consequences(
    etype: str, message: str, expected: bool
) -> None:
    assert is_consequence(etype, message) is expected


@pytest.mark.parametrize(("exitcode", "where"), [(-9, "dmesg"), (-7, "/dev/shm")])
def test_the_advice_after_a_signal_says_where_to_look(exitcode: int, where: str) -> None:
    died = RankState(0, 10, failed_at=1.0, exitcode=exitcode)
    assert (
        where in describe_failure(died, Verdict("FAILED", "rank"), "gpu1", "rank-0.log", []).advice
    )


def test_the_first_failure_is_the_first_that_is_no_consequence() -> None:
    echo, own = Failure(rank=0, consequence=True), Failure(rank=5)
    assert first_failure([echo, own]) == own
    assert first_failure([echo]) == echo
    assert first_failure([]) is None


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (b"3,9,5000000,-;Memory cgroup out of memory: Killed process 7 (python) vm", "cgroup"),
        (b"3,9,5000000,-;Out of memory: Killed process 7 (python) vm", "machine"),
        (
            b"3,9,5000000,-;Out of memory (oom_kill_allocating_task): Killed process 7",
            "machine",
        ),
        (b"3,9,5000000,-;Memory cgroup out of memory: Killed process 77 (python) vm", ""),
        (b"3,9,1000000,-;Out of memory: Killed process 7 (python), which had its number", ""),
        (b"6,9,5000000,-;tasks state: Killed process 7", ""),
    ],
)
def test_the_kernels_log_says_which_process_it_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: bytes, found: str
) -> None:
    (log := tmp_path / "kmsg").write_bytes(record)
    namespace = os.readlink("/proc/self/ns/pid")
    monkeypatch.setattr(watch, "_FIRST_PID_NAMESPACE", namespace)
    assert watch._logged_kill(7, 4.0, log) == found
    assert watch._logged_kill(7, 4.0, tmp_path / "none") is None
    monkeypatch.setattr(watch, "_FIRST_PID_NAMESPACE", "another")
    assert watch._logged_kill(7, 4.0, log) is None


def test_without_the_kernels_log_an_out_of_memory_kill_is_found_in_the_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (events := tmp_path / "memory.events").write_text("oom 3\noom_kill 3\n")
    before = {str(events): 2}
    monkeypatch.setattr(watch, "_logged_kill", lambda pid, started_at: None)
    assert watch.out_of_memory_text(7, 0.0, before) == (
        f"probably killed by the memory limit of its cgroup ({tmp_path})"
    )
    assert watch.out_of_memory_text(7, 0.0, {str(events): 3}) == ""
    monkeypatch.setattr(watch, "_logged_kill", lambda pid, started_at: "")
    assert watch.out_of_memory_text(7, 0.0, before) == ""


def test_a_note_of_a_rank_does_not_count_as_progress() -> None:
    ranks = watch.Ranks([0])
    [state] = ranks.states()
    ranks.record_message(0, Note(text="waits where nobody listens"))
    assert state.progress_at == 0.0
    ranks.record_message(0, RankTakesInterrupts())
    assert state.progress_at > 0.0
