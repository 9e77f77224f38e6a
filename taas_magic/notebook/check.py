"""`%taas pools --check`: what the hosts of pools are like, and whether a run may use them."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Event

from taas_magic.config import Config, PoolConfig
from taas_magic.display import hosts as table
from taas_magic.engines.base import find_engine
from taas_magic.errors import StoreError
from taas_magic.messages import PoolStatus
from taas_magic.setup.facts import REMARK, Finding, Kernel, Row, Ways, check, judged, this_kernel
from taas_magic.setup.install import packages_needed


@dataclass(frozen=True)
class CheckReport:
    """What a notebook shows, in the forms that it may choose from."""

    text: str
    html: str


def hosts(settings: Config, names: Sequence[str] = ()) -> CheckReport:
    """Asks the hosts of the pools of those names, or of all pools; takes none.

    Raises:
        UsageError: There is no such pool.
        StoreError: The project store cannot be written.
        PoolError: A pool that is up does not answer.
        KeyboardInterrupt: The user did not want to wait.
    """
    asked = [settings.pool(name) for name in names or settings.pools]
    with _mark(settings.store.path or os.getcwd()) as mark:
        return _report(asked, settings, this_kernel(mark))


@contextmanager
def _mark(store: str) -> Iterator[str]:
    """A file of random name in the project store: who sees it shares the store."""
    try:
        descriptor, mark = tempfile.mkstemp(prefix=".taas-", dir=store)
    except OSError as error:
        raise StoreError(
            f"project store {store}: it cannot be written: {error.strerror}"
        ) from error
    os.close(descriptor)
    try:
        yield mark
    finally:
        os.unlink(mark)


def _report(asked: Sequence[PoolConfig], settings: Config, here: Kernel) -> CheckReport:
    from taas_magic.notebook import pools

    up = {row.name: row.status for row in pools.rows(settings)}
    rows = check(asked, _ways, here, packages_needed())
    rows = [replace(row, means=_means(row, up[row.pool])) for row in rows]
    known = {row.pool for row in rows}
    for pool in asked:
        if pool.name not in known:
            rows += _asked_of_agents(pool, settings, here, up[pool.name])
    return CheckReport(table.text(rows, here), table.html(rows, here))


def _ways(pool: PoolConfig, stop: Event) -> Ways:
    return find_engine(pool).ways(stop)


def _means(row: Row, up: PoolStatus) -> str:
    """What holds the ranks of a host off the store; "" where its agent is not up."""
    return next((host.means for host in up.hosts if host.host == row.host), "")


def _asked_of_agents(pool: PoolConfig, settings: Config, here: Kernel, up: PoolStatus) -> list[Row]:
    """The rows of a pool whose hosts are there only while they are taken."""
    from taas_magic.notebook import pools

    if not up.hosts:
        todo = f"They are checked when a run takes them; %taas warm {pool.name} takes one now"
        return [Row(pool.name, "", None, (Finding(REMARK, "no host is up", todo),))]
    packages = packages_needed()
    found = pools.named(pool.name, settings).facts(packages, here.mark)
    return [judged(pool, one.facts, here, packages, one.means) for one in found]
