"""The pools that this kernel uses: found by name, waited for, listed, ended."""

import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from taas_magic import messages
from taas_magic.config import Config
from taas_magic.errors import PoolError, UsageError
from taas_magic.host.spec import share_id
from taas_magic.journal import folder as journal
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import PoolStatus, RunStacks
from taas_magic.notebook.interrupts import Background, Interrupts
from taas_magic.pool.client import Pool, Wait

_pools: dict[str, Pool] = {}
_retired: list[Pool] = []
_lock = threading.Lock()


def named(name: str, config: Config) -> Pool:
    """This kernel's pool of that name; not opened.

    Raises:
        UsageError: There is none in taas.toml.
    """
    settings = config.pool(name)
    with _lock:
        known = _pools.get(settings.name)
        if known is None or known.config != settings:
            if known is not None:
                _retire(known)
            known = _pools[settings.name] = Pool(settings, Path.cwd())
        return known


def _retire(pool: Pool) -> None:
    """Leaves a pool whose settings are no more those of taas.toml; without kernels it ends."""
    pool.retire()
    _retired[:] = [one for one in (*_retired, pool) if not one.is_over()]


def wait_for(pool: Pool, interrupts: Interrupts, hosts: int = 1) -> None:
    """Returns when a pool has so many hosts; says meanwhile what it waits for.

    Raises:
        PoolError: They could not be had.
        KeyboardInterrupt: The user did not want to wait: hosts that nobody uses are given back.
    """
    if interrupts.attend(lambda: pool.has_hosts(hosts)):
        return
    for versions in pool.of_other_versions():
        say(f'another kernel uses pool "{pool.name}" with {versions}: it is not joined')
    say(f'waiting for pool "{pool.name}" to warm up …')
    wait = Wait()
    try:
        Background(lambda tell: pool.open(hosts, tell, wait)).wait(interrupts, say)
    except KeyboardInterrupt:
        interrupts.attend(lambda: pool.give_up(wait))
        raise


def say(line: str) -> None:
    """Prints a line at once, below the cell that waits."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def warm(config: Config, name: str = "local") -> threading.Thread:
    """Opens a pool in a thread; a failure shows when a cell needs the pool."""
    pool = named(name, config)
    return Background(lambda tell: pool.open(1)).thread


def stop(run_id: str | None, config: Config) -> str:
    """Ends a run, of this kernel or of another one of the user's; says which.

    Raises:
        UsageError: It is not running.
    """
    run, pool = _running(run_id, config)
    pool.halt(run, "interrupt")
    return run


def stacks(run_id: str | None, config: Config) -> RunStacks:
    """Where the ranks of a run stand, and its fetchers; of any kernel of the user's.

    Raises:
        UsageError: It is not running.
    """
    run, pool = _running(run_id, config)
    found = messages.unpack(pool.call("taas_stacks", run_id=run), RunStacks)
    if data := RunFolder(journal.find(run).path).plan().data:
        data_pool = named(data.pool, config)
        data_pool.connect()
        of_data = messages.unpack(data_pool.call("taas_stacks", run_id=share_id(run)), RunStacks)
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
    """Every pool of taas.toml, and how it stands."""
    found = []
    for name, settings in config.pools.items():
        pool = named(name, config)
        alive = pool.is_alive()
        status = _status(pool)
        state = "ready" if pool.is_ready else "starting" if alive else "down"
        state = "silent" if pool.is_silent else state
        found.append(PoolRow(name, settings.engine, state, status))
    return found


def _status(pool: Pool) -> PoolStatus:
    try:
        return pool.status() if pool.is_ready else PoolStatus()
    except PoolError:
        return PoolStatus()


def down(name: str, config: Config) -> None:
    """Ends a pool: its runs, its hosts, its process."""
    named(name, config).down()
