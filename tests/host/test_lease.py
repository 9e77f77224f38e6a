"""A host's lease: it expires on time, even if the event loop hangs."""

import subprocess
import sys
import threading
import time

from taas_magic.host.agent_worker import EXPIRED_EXIT_CODE, HostLease
from taas_magic.leases import BEATS_PER_LEASE
from tests.eventually import HUNG_S


class Expiring:
    """A running lease, and an event that is set when the lease expires."""

    def __init__(self, lease_s: float) -> None:
        self.expired = threading.Event()
        self.lease = HostLease(lease_s, self.expired.set)
        self.began = time.monotonic()
        self.lease.start()

    def lasted_s(self) -> float:
        assert self.expired.wait(HUNG_S)
        return time.monotonic() - self.began


def test_a_lease_that_nobody_renews_expires() -> None:
    assert Expiring(0.3).lasted_s() >= 0.3


def test_an_answer_renews_the_lease_from_the_time_the_beat_was_sent() -> None:
    seen = Expiring(60.0)
    time.sleep(0.01)  # the lease must begin before the beat is sent
    beat = time.monotonic()
    time.sleep(0.01)
    seen.lease.renew(beat)
    assert seen.lease._good_until == beat + 60.0
    assert not seen.expired.is_set()


def test_a_repeated_answer_or_one_without_a_beat_does_not_renew_the_lease() -> None:
    seen = Expiring(0.5)
    beat = time.monotonic()
    seen.lease.renew(beat)
    until = seen.lease._good_until
    for other in (beat, beat + 60, -1):
        seen.lease.renew(other)
    assert seen.lease._good_until == until
    assert seen.lasted_s() >= 0.5


def test_a_late_answer_to_an_earlier_beat_does_not_shorten_the_lease() -> None:
    seen = Expiring(5.0)
    early, late = time.monotonic(), time.monotonic()
    seen.lease.renew(late)
    until = seen.lease._good_until
    seen.lease.renew(early)
    assert seen.lease._good_until == until


def test_a_host_sends_several_beats_in_each_lease() -> None:
    assert HostLease(8.0, lambda: None).beat_s == 8.0 / BEATS_PER_LEASE


def test_a_process_whose_event_loop_hangs_ends_when_its_lease_expires() -> None:
    code = """
import asyncio, functools, time
from taas_magic.host.agent_worker import HostLease, end_agent
async def hang():
    HostLease(0.5, functools.partial(end_agent, 0.5)).start()
    time.sleep(600)
asyncio.run(hang())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HUNG_S, check=False
    )
    assert done.returncode == EXPIRED_EXIT_CODE
    assert "no message from the pool for 0.5 s: this host ends" in done.stderr
