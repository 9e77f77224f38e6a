"""Tests that all hosts are asked for facts at the same time, so that none delays the others."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from taas_magic.config import PoolConfig
from taas_magic.errors import PoolError
from taas_magic.setup.facts import Shell, Shells, check_hosts, this_kernel
from taas_magic.setup.install import packages_needed
from tests.eventually import HUNG_S
from tests.rig.subshell import SubShell

POOL = PoolConfig("p", engine="ssh", hosts=("a", "b", "c"), python=sys.executable)


@contextmanager
def reaching(shell: Shell, together: threading.Barrier) -> Iterator[Shell]:
    together.wait(HUNG_S)  # breaks unless all hosts are asked at the same time
    yield shell


@contextmanager
def refusing(together: threading.Barrier) -> Iterator[Shell]:
    together.wait(HUNG_S)
    raise PoolError("host b: no route")
    yield


@pytest.mark.parametrize("pools", [[POOL], [PoolConfig("local"), POOL]])
def test_hosts_are_asked_at_the_same_time(pools: list[PoolConfig], tmp_path: Path) -> None:
    together = threading.Barrier(3)

    def shells(pool: PoolConfig, stop: threading.Event) -> Shells:
        if pool.engine == "local":
            return {}
        shells = {name: SubShell(tmp_path / name, name) for name in ("a", "c")}
        for shell in shells.values():
            shell.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        return {
            "a": reaching(shells["a"], together),
            "b": refusing(together),
            "c": reaching(shells["c"], together),
        }

    here = this_kernel()
    rows = check_hosts(pools, shells, here, packages_needed(), str(tmp_path))[-3:]
    assert [(row.host, row.is_fit) for row in rows] == [("a", True), ("b", False), ("c", True)]
    assert rows[1].facts is None and rows[1].problems[0].what == "no route"
    assert rows[0].facts is not None and rows[0].facts.sees_store
    if len(pools) > 1:
        (local,) = check_hosts(pools[:1], shells, here, packages_needed())
        assert local.is_fit and local.facts and local.facts.taas_digest == here.taas_digest


def test_an_interrupt_stops_all_connections(tmp_path: Path) -> None:
    """docs/faults.md 35: an interrupt stops the open connections and does not wait for them."""
    stopped: list[threading.Event] = []

    def shells(pool: PoolConfig, stop: threading.Event) -> Shells:
        stopped.append(stop)
        return {"a": interrupted()}

    @contextmanager
    def interrupted() -> Iterator[Shell]:
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        check_hosts([POOL], shells, this_kernel(), {})
    assert stopped[0].is_set()
