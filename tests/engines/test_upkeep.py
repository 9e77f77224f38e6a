"""Tests of the pool meter, which counts the hours of hosts and gives idle hosts back."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from taas_magic.config import PoolConfig
from taas_magic.messages import WaitForHosts
from taas_magic.pool.client import Pool as RealPool
from taas_magic.pool.controller import PoolMeter
from taas_magic.pool.hosts import PoolHost


class Pool:
    """A pool meter with hosts that a test can change, and a clock that a test sets."""

    def __init__(self, idle_timeout_s: float | None = 60.0) -> None:
        self.now = 0.0
        self.hosts = [PoolHost(f"tls://{name}", name=name, gpus=4) for name in "ab"]
        members: Any = SimpleNamespace(all=lambda: self.hosts)
        self.meter = PoolMeter(members, idle_timeout_s, lambda: self.now)
        self.meter.update()

    def pass_s(self, seconds: float) -> bool:
        self.now += seconds
        return self.meter.update()


def test_a_host_is_given_back_once_it_was_idle_for_long_enough() -> None:
    pool = Pool()
    pool.hosts[0].runs.add("run")
    assert not pool.pass_s(59)
    assert pool.pass_s(1)
    assert pool.meter.is_in_use(pool.hosts[0])
    assert not pool.meter.is_in_use(pool.hosts[1])


def test_a_host_that_was_just_acquired_is_not_released() -> None:
    pool = Pool()
    pool.pass_s(29)
    for host in pool.hosts:
        host.idle_since = None
    assert not pool.pass_s(1)
    assert not pool.pass_s(59)
    assert pool.pass_s(1)


def test_a_run_resets_the_idle_time() -> None:
    pool = Pool()
    pool.pass_s(50)
    for host in pool.hosts:
        host.runs.add("run")
    pool.pass_s(50)
    for host in pool.hosts:
        host.runs.clear()
    pool.pass_s(1)
    assert not pool.pass_s(59)
    assert pool.pass_s(1)


def test_without_a_timeout_hosts_stay() -> None:
    pool = Pool(idle_timeout_s=None)
    assert not pool.pass_s(1e9)


def test_gpu_hours_include_hosts_that_have_left() -> None:
    pool = Pool()
    pool.hosts[0].runs.add("run")
    pool.pass_s(1800)
    pool.hosts.pop()
    pool.pass_s(1800)
    host, status = pool.meter.host_status(pool.hosts[0]), pool.meter.pool_status()
    assert (host.allocated_s, host.idle_s, host.gpu_hours) == (3600, None, 4.0)
    assert status.hosts == [host]
    assert status.gpu_hours == pytest.approx(4 + 2)
    assert status.used_gpu_hours == pytest.approx(4)


@pytest.mark.nightly
@pytest.mark.usefixtures("no_leftovers")
def test_an_idle_host_of_a_real_pool_is_released_and_requested_again(tmp_path: Path) -> None:
    pool = RealPool(PoolConfig("thrifty", idle_timeout_s=6.0), tmp_path)
    connection = pool.open()
    try:
        (host,) = connection.status().hosts
        assert not host.runs and host.allocated_s >= 0
        deadline = time.monotonic() + 100
        while connection.status().hosts:
            assert time.monotonic() < deadline
            threading.Event().wait(0.1)
        assert not connection.call(WaitForHosts("test", "", hosts=1)).error
    finally:
        pool.down()
