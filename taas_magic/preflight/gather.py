"""Asks all hosts of pools what they are like, side by side; blocks, in whatever thread."""

import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from taas_magic.config import PoolConfig
from taas_magic.errors import TaasError
from taas_magic.preflight.judge import ERROR, Finding, Needs, judge
from taas_magic.provision.facts import Facts, Kernel, ask_host, of_this_machine
from taas_magic.provision.prepare import packages_needed
from taas_magic.provision.shell import Shell

MAX_AT_ONCE = 64

Ways = Mapping[str, AbstractContextManager[Shell]]


@dataclass(frozen=True)
class Row:
    """One host of a pool, or why it could not be asked.

    Attributes:
        pool: The pool's name.
        host: The host as the user calls it; "" for a pool none of whose hosts can be asked.
        facts: What it is like; None where it did not say.
        findings: What is not as it should be.
        means: What holds its ranks off the project store, where its agent is up.
    """

    pool: str
    host: str
    facts: Facts | None
    findings: tuple[Finding, ...]
    means: str = ""

    @property
    def is_fit(self) -> bool:
        """Whether a run may use it."""
        return not any(finding.level == ERROR for finding in self.findings)


def needs_of(pool: PoolConfig) -> Needs:
    """What a pool's settings promise of its hosts."""
    return Needs(pool.gpus, pool.interface, packages_needed())


def check(
    pools: Iterable[PoolConfig],
    ways: Callable[[PoolConfig, threading.Event], Ways],
    here: Kernel,
) -> list[Row]:
    """Asks the hosts of pools, all at the same time. May be interrupted at any moment.

    Args:
        pools: The pools.
        ways: From a pool to the ways to its hosts, which are opened here and given up when the
            event is set; none for hosts that are not there until a run takes them.
        here: What hosts must agree with.

    Returns:
        A row for each host, in the order of the pools and their hosts.
    """
    stop = threading.Event()
    executor = ThreadPoolExecutor(MAX_AT_ONCE, "taas-check")
    try:
        asked = [
            executor.submit(work)
            for pool in pools
            for work in _questions(pool, ways(pool, stop), here)
        ]
        return [row.result() for row in asked]
    finally:
        stop.set()
        executor.shutdown(wait=False, cancel_futures=True)


def _questions(pool: PoolConfig, ways: Ways, here: Kernel) -> list[Callable[[], Row]]:
    if pool.engine == "local":
        return [partial(_ask_this_machine, pool, here)]
    return [partial(_ask, pool, here, name, way) for name, way in ways.items()]


def _ask_this_machine(pool: PoolConfig, here: Kernel) -> Row:
    facts = of_this_machine(socket.gethostname(), packages_needed(), mark=here.mark)
    return judged(pool, facts, here)


def _ask(pool: PoolConfig, here: Kernel, host: str, way: AbstractContextManager[Shell]) -> Row:
    try:
        with way as shell:
            facts = ask_host(shell, pool.python, packages_needed(), mark=here.mark)
    except TaasError as error:
        what = str(error).removeprefix(f"host {host}: ")
        return Row(pool.name, host, None, (Finding(ERROR, what),))
    return judged(pool, facts, here)


def judged(pool: PoolConfig, facts: Facts, here: Kernel, means: str = "") -> Row:
    """The row of a host that has said what it is like."""
    found = judge(facts, here, needs_of(pool))
    return Row(pool.name, facts.host, facts, tuple(found), means)
