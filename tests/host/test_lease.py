"""The lease of a host: it ends in time, whatever hangs."""

import subprocess
import sys
import threading
import time

import pytest

from taas_magic.errors import RunLost
from taas_magic.host.member import EXPIRED, Lease
from taas_magic.leases import BEATS_PER_LEASE
from tests.engines.test_multi_host import ALL_REDUCE
from tests.harness import Notebook, left_of, processes

pytestmark = pytest.mark.timeout(300)

WITHIN_S = 100.0


class Expiring:
    """A lease and when it expired."""

    def __init__(self, lease_s: float) -> None:
        self.expired = threading.Event()
        self.lease = Lease(lease_s, self.expired.set)
        self.began = time.monotonic()
        self.lease.start()

    def lasted_s(self) -> float:
        assert self.expired.wait(WITHIN_S)
        return time.monotonic() - self.began


def test_a_lease_that_nobody_renews_expires() -> None:
    assert Expiring(0.3).lasted_s() >= 0.3


def test_answers_renew_it_from_the_time_the_beat_was_sent() -> None:
    seen = Expiring(60.0)
    time.sleep(0.01)  # it began before the beat was sent
    beat = time.monotonic()
    time.sleep(0.01)
    seen.lease.heard(beat)
    assert seen.lease._good_until == beat + 60.0
    assert not seen.expired.is_set()


def test_only_answers_to_beats_that_were_sent_count_and_each_once() -> None:
    seen = Expiring(0.5)
    beat = time.monotonic()
    seen.lease.heard(beat)
    until = seen.lease._good_until
    for other in (beat, beat + 60, -1):
        seen.lease.heard(other)
    assert seen.lease._good_until == until
    assert seen.lasted_s() >= 0.5


def test_an_answer_that_is_overtaken_does_not_shorten_it() -> None:
    seen = Expiring(5.0)
    early, late = time.monotonic(), time.monotonic()
    seen.lease.heard(late)
    until = seen.lease._good_until
    seen.lease.heard(early)
    assert seen.lease._good_until == until


def test_beats_are_several_to_a_lease() -> None:
    assert Lease(8.0, lambda: None).beat_s == 8.0 / BEATS_PER_LEASE


def test_a_process_whose_event_loop_hangs_ends() -> None:
    code = """
import asyncio, functools, time
from taas_magic.host.member import Lease, end_agent
async def hang():
    Lease(0.5, functools.partial(end_agent, 0.5)).start()
    time.sleep(600)
asyncio.run(hang())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    assert done.returncode == EXPIRED
    assert "heard nothing of the pool for 0.5 s: the host ends" in done.stderr


def test_a_host_whose_agent_stands_still_is_lost_and_cleared(
    several: Notebook,
) -> None:
    """FAULTS 10 with SIGSTOP: the connection lives, and nobody answers."""
    source = """
import psutil, signal
if rank == 2:
    psutil.Process().parent().parent().send_signal(signal.SIGSTOP)
dist.barrier()
time.sleep(600)
"""
    outcome = several.run(ALL_REDUCE + source, "--pool many", gpus=6)
    assert isinstance(outcome.error, RunLost)
    ended = outcome.of_kind("ended")[0]["first"]
    assert "nothing was heard of it for 9 s" in ended["message"]
    started = {event["host"]: event["pids"] for event in outcome.of_kind("started")}
    assert set(started[ended["host"]]) == {"2", "3"}
    pids = [pid for pids in started.values() for pid in pids.values()]
    assert not left_of(processes(pids))


def test_a_host_that_is_halted_for_less_than_its_lease_goes_on(
    several: Notebook,
) -> None:
    source = """
import psutil, subprocess
if rank == 2:
    agent = psutil.Process().parent().parent().pid
    words = f"kill -STOP {agent}; sleep 2; kill -CONT {agent}"
    subprocess.Popen(["sh", "-c", words])
    time.sleep(4)
dist.barrier()
print("done")
"""
    outcome = several.run(ALL_REDUCE + source, "--pool many", gpus=6)
    assert outcome.error is None
    assert outcome.lines == {rank: ["done"] for rank in range(6)}


def test_a_rank_0_that_nobody_hears_is_gone_before_another_starts(several: Notebook) -> None:
    source = """
import contextlib, os, psutil, signal, time
if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    with open("first", "w") as file:
        file.write(str(os.getpid()))
    psutil.Process(os.getppid()).parent().send_signal(signal.SIGSTOP)
elif os.environ["RANK"] == "0":
    first, lives = int(open("first").read()), False
    with contextlib.suppress(psutil.NoSuchProcess):
        lives = psutil.Process(first).status() != psutil.STATUS_ZOMBIE
    print("the first one lives:", lives)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(600)
"""
    several.run("print('all hosts are there')", "--pool many", gpus=6)
    outcome = several.run(source, "--pool many --max-restarts 1", gpus=2)
    assert outcome.error is None, outcome.shown
    assert outcome.lines[0] == ["the first one lives: False"]
