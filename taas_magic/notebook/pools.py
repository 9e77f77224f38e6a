"""The pools that this kernel uses: found by name, waited for, listed, checked, ended."""

import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from taas_magic.config import Config
from taas_magic.engines.base import find_engine
from taas_magic.errors import PoolError, StoreError, UsageError
from taas_magic.host.spec import share_id
from taas_magic.journal import folder as journal
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import GetFacts, GetStacks, PoolStatus, RunStacks
from taas_magic.notebook.run import Background, Interrupts
from taas_magic.pool.client import Pool, Wait
from taas_magic.setup.facts import this_kernel

_pools: dict[str, Pool] = {}
_retired: list[Pool] = []
_lock = threading.Lock()


def named(name: str, config: Config) -> Pool:
    """Return this kernel's pool of that name; not opened.

    Raises:
        UsageError: There is none in taas.toml.
    """
    settings = config.pool(name)
    with _lock:
        known = _pools.get(settings.name)
        if known is None or known.config != settings:
            if known is not None:  # its settings have changed; without kernels it ends
                known.retire()
                _retired[:] = [one for one in (*_retired, known) if not one.is_over()]
            known = _pools[settings.name] = Pool(settings, Path.cwd())
        return known


def wait_for(pool: Pool, interrupts: Interrupts, hosts: int = 1) -> None:
    """Return when a pool has so many hosts; say meanwhile what it waits for.

    Raises:
        PoolError: They could not be had.
        KeyboardInterrupt: The user did not want to wait: hosts that nobody uses are given back.
    """
    if interrupts.attend(lambda: pool.has_hosts(hosts)):
        return
    for versions in pool.process.of_other_versions():
        say(f'another kernel uses pool "{pool.name}" with {versions}: it is not joined')
    say(f'waiting for pool "{pool.name}" to warm up …')
    wait = Wait()
    try:
        Background(lambda tell: pool.open(hosts, tell, wait)).wait(interrupts, say)
    except KeyboardInterrupt:
        interrupts.attend(lambda: pool.give_up(wait))
        raise


def say(line: str) -> None:
    """Print a line at once, below the cell that waits."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def warm(config: Config, name: str = "local") -> threading.Thread:
    """Open a pool in a thread; a failure shows when a cell needs the pool."""
    pool = named(name, config)
    return Background(lambda tell: pool.open(1, has_run=False)).thread


def stop(run_id: str | None, config: Config) -> str:
    """End a run, of this kernel or of another one of the user's; return its id.

    Raises:
        UsageError: It is not running.
    """
    run, pool = _running(run_id, config)
    pool.halt(run, "interrupt")
    return run


def stacks(run_id: str | None, config: Config) -> RunStacks:
    """Return where the ranks of a run stand, and its fetchers; of any kernel of the user's.

    Raises:
        UsageError: It is not running.
    """
    run, pool = _running(run_id, config)
    found = pool.call(GetStacks(run))
    if data := RunFolder(journal.find(run).path).plan().data:
        data_pool = named(data.pool, config)
        data_pool.connect()
        of_data = data_pool.call(GetStacks(share_id(run)))
        found.fetchers, found.silent = of_data.fetchers, [*found.silent, *of_data.silent]
    return found


def _running(run_id: str | None, config: Config) -> tuple[str, Pool]:
    """Return the id of a run that goes on, and its pool, connected."""
    record = journal.find(run_id)
    if record.state in journal.ENDED_STATES:
        raise UsageError(f"run {record.run_id} is not running: {record.state}")
    pool = named(record.pool, config)
    pool.connect()
    return record.run_id, pool


@dataclass(frozen=True)
class PoolRow:
    """A pool of taas.toml, and what it says of itself; nothing where it does not answer."""

    name: str
    engine: str
    state: str
    status: PoolStatus


def rows(config: Config) -> list[PoolRow]:
    """Return every pool of taas.toml, and how it stands."""
    found = []
    for name, settings in config.pools.items():
        pool = named(name, config)
        alive, status = pool.is_alive(), PoolStatus()
        with suppress(PoolError):
            if pool.is_ready:
                status = pool.status()
        state = "ready" if pool.is_ready else "starting" if alive else "down"
        state = "silent" if pool.is_silent else state
        found.append(PoolRow(name, settings.engine, state, status))
    return found


@dataclass(frozen=True)
class CheckReport:
    """What a notebook shows, in the forms that it may choose from."""

    text: str
    html: str


def check(config: Config, names: Sequence[str] = ()) -> CheckReport:
    """Ask the hosts of the pools of those names, or of all pools, what they are like; take none.

    Raises:
        UsageError: There is no such pool.
        StoreError: The project store cannot be written.
        PoolError: A pool that is up does not answer.
        KeyboardInterrupt: The user did not want to wait.
    """
    # What only this needs, and imports: the first cell does not pay for it.
    from taas_magic.display import hosts as table
    from taas_magic.setup.facts import REMARK, Finding, Row, judged
    from taas_magic.setup.facts import check as ask
    from taas_magic.setup.install import packages_needed

    asked, packages = [config.pool(name) for name in names or config.pools], packages_needed()
    with _mark(config.store.path or os.getcwd()) as mark:
        here = this_kernel(mark)
        up = {row.name: row.status.hosts for row in rows(config)}
        means = {(name, host.host): host.means for name, hosts in up.items() for host in hosts}
        found = [
            replace(row, means=means.get((row.pool, row.host), ""))
            for row in ask(asked, lambda pool, stop: find_engine(pool).ways(stop), here, packages)
        ]
        known = {row.pool for row in found}
        for pool in asked:
            if pool.name in known:
                continue
            if up[pool.name]:  # its hosts are there only while they are taken: their agents say
                asked_of = GetFacts(packages=list(packages), mark=mark)
                agents = named(pool.name, config).call(asked_of)
                found += [
                    judged(pool, facts, here, packages, means.get((pool.name, facts.host), ""))
                    for facts in agents
                ]
            else:
                todo = "They are checked when a run takes them; "
                todo += f"%taas warm {pool.name} takes one now"
                found.append(Row(pool.name, "", None, (Finding(REMARK, "no host is up", todo),)))
    return CheckReport(table.text(found, here), table.html(found, here))


@contextmanager
def _mark(store: str) -> Iterator[str]:
    """Make a file of random name in the project store: who sees it shares the store."""
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


def down(name: str, config: Config) -> None:
    """End a pool: its runs, its hosts, its process."""
    named(name, config).down()
