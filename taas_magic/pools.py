"""The pools that this kernel uses: found by name, waited for, listed, ended."""

import sys
import threading
from pathlib import Path
from typing import Any

from taas_magic import journal
from taas_magic.config import Config
from taas_magic.errors import UsageError
from taas_magic.interrupts import Background, Interrupts
from taas_magic.pool import Pool

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
    if pool.has_hosts(hosts):
        return
    say(f"waiting for pool {pool.name!r} to warm up …")
    try:
        Background(lambda tell: pool.open(hosts, tell)).wait(interrupts, say)
    except KeyboardInterrupt:
        pool.give_up()
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
    record = journal.find(run_id)
    if record.state in journal.ENDED_STATES:
        raise UsageError(f"run {record.run_id} is not running: {record.state}")
    pool = named(record.pool, config)
    pool.connect()
    pool.halt(record.run_id, "interrupt")
    return record.run_id


def rows(config: Config) -> list[dict[str, Any]]:
    """Every pool of taas.toml: name, engine, state, and the hosts that it has."""
    found = []
    for name, settings in config.pools.items():
        pool = named(name, config)
        alive = pool.is_alive()
        status = pool.status() if pool.is_ready else {"hosts": []}
        state = "ready" if pool.is_ready else "starting" if alive else "down"
        found.append({"pool": name, "engine": settings.engine, "state": state, **status})
    return found


def down(name: str, config: Config) -> None:
    """Ends a pool: its runs, its hosts, its process."""
    named(name, config).down()
