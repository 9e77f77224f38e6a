"""`pool.runs.decide_outcome`: the outcome of an attempt from the reports of its hosts."""

import pytest

from taas_magic.host.watch import LEFT_GRACE_S
from taas_magic.messages import Failure
from taas_magic.pool.hosts import PoolHost
from taas_magic.pool.runs import (
    FURTHER_REPORTS_S,
    LATE_REPORT_S,
    AttemptOutcome,
    HostReport,
    ShareHost,
    decide_outcome,
)


def failure(rank: int, consequence: bool = False) -> Failure:
    return Failure(rank=rank, consequence=consequence)


def host(last_message_at: float, report: HostReport | None = None) -> ShareHost:
    return ShareHost(PoolHost("tls://host:1", last_message_at=last_message_at), 0, report)


def good(at: float = 0.0, *left: Failure) -> ShareHost:
    return host(at, HostReport("SUCCEEDED", "", at, left))


def bad(at: float, *failures: Failure, state: str = "FAILED", cause: str = "rank") -> ShareHost:
    return host(at, HostReport(state, cause, at, failures))


def running(last_message_at: float) -> ShareHost:
    return host(last_message_at)


def test_an_attempt_succeeds_only_if_all_hosts_report_success() -> None:
    assert decide_outcome([good(), running(9.0)], now=10.0) is None
    assert decide_outcome([good(), good()], now=10.0) == AttemptOutcome("SUCCEEDED")


def test_a_failure_is_final_only_after_a_moment_for_further_reports() -> None:
    hosts = [bad(5.0, failure(0)), running(5.0)]
    assert decide_outcome(hosts, now=5.0 + FURTHER_REPORTS_S / 2) is None
    assert decide_outcome(hosts, now=5.0 + FURTHER_REPORTS_S) == AttemptOutcome(
        "FAILED", (failure(0),), may_retry=True
    )


def test_a_failure_is_final_once_all_hosts_have_reported() -> None:
    assert decide_outcome([bad(5.0, failure(0)), good()], now=5.0) is not None


def test_a_consequence_is_final_only_after_later_messages_of_all_other_hosts() -> None:
    follows = bad(5.0, failure(0, consequence=True))
    assert decide_outcome([follows, running(5.0 + LATE_REPORT_S - 0.1)], now=100.0) is None
    outcome = decide_outcome([follows, running(5.0 + LATE_REPORT_S)], now=7.0)
    assert outcome == AttemptOutcome("FAILED", (failure(0, consequence=True),), may_retry=True)


def test_a_cause_is_listed_before_consequences_that_were_reported_earlier() -> None:
    hosts = [bad(5.0, failure(0, consequence=True)), bad(6.0, failure(3)), running(5.0)]
    outcome = decide_outcome(hosts, now=6.0 + FURTHER_REPORTS_S)
    assert outcome is not None
    assert [seen.rank for seen in outcome.failures] == [3, 0]


def test_of_two_causes_the_one_that_was_reported_earlier_is_listed_first() -> None:
    outcome = decide_outcome([bad(6.0, failure(0)), bad(5.0, failure(3))], now=6.0)
    assert outcome is not None
    assert [seen.rank for seen in outcome.failures] == [3, 0]


def test_a_lost_host_makes_the_attempt_lost() -> None:
    lost = bad(5.0, failure(2), state="LOST", cause="lost")
    outcome = decide_outcome([bad(4.0, failure(0, consequence=True)), lost], now=5.0)
    assert outcome is not None
    assert (outcome.state, outcome.failures[0].rank, outcome.may_retry) == ("LOST", 2, True)


@pytest.mark.parametrize("cause", ["timeout", "host", "interrupt"])
def test_a_timeout_an_interrupt_or_an_error_of_the_host_allows_no_restart(cause: str) -> None:
    outcome = decide_outcome([bad(5.0, failure(0), cause=cause)], now=5.0)
    assert outcome is not None and not outcome.may_retry


def test_an_interrupt_waits_for_all_hosts_and_blames_none() -> None:
    stopped = bad(5.0, failure(0), state="INTERRUPTED", cause="interrupt")
    assert decide_outcome([stopped, running(50.0)], now=60.0) is None
    assert decide_outcome([stopped, good(6.0)], now=6.0) == AttemptOutcome("INTERRUPTED")


def test_ranks_that_left_early_are_the_cause_if_others_continue_or_fail_as_a_consequence() -> None:
    left = good(5.0, failure(1))
    assert decide_outcome([left, running(5.0)], now=5.0 + LEFT_GRACE_S - 0.1) is None
    over = decide_outcome([left, running(5.0)], now=5.0 + LEFT_GRACE_S)
    assert over == AttemptOutcome("FAILED", (failure(1),), may_retry=True)
    follows = decide_outcome([left, bad(6.0, failure(0, consequence=True))], now=6.0)
    assert follows is not None and follows.failures[0].rank == 1
    assert decide_outcome([left, good(6.0, failure(0))], now=60.0) == AttemptOutcome("SUCCEEDED")
