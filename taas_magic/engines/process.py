"""The pool's own process: a Dask scheduler, the keeper, and an engine that gets hosts.

Run by a kernel, in a session of its own, so that neither the kernel's interrupt nor its end reaches
it: it decides itself what follows. A kernel finds it by `pool.json` in the pool's folder, as
Jupyter finds a kernel by its connection file: address and key, readable by the user alone.

While it lives it holds a lock on the folder, so a pool has one process, and anybody can see
whether it lives.
"""

import asyncio
import fcntl
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from taas_magic.config import PoolConfig
from taas_magic.engines.base import Engine, HostSource, find_engine

DASK_SETTINGS = {
    "distributed.admin.low-level-log-length": 1,
    "distributed.deploy.lost-worker-timeout": "100ms",
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.worker-ttl": None,  # it goes by the system's clock; see members.watch
}


def main() -> int:
    """Keeps one pool until it is told to end or nobody uses it any more."""
    words = json.loads(sys.stdin.readline())
    folder, pool = Path(words["folder"]), PoolConfig(**words["pool"])
    lock = take_lock(folder)
    if lock is None:
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    engine = find_engine(pool)
    engine.prepare()
    asyncio.run(_keep(engine, folder, words["linger_s"]))
    return 0


def take_lock(folder: Path) -> int | None:
    """The lock of a pool's folder as a descriptor; None when a living process holds it."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


async def _keep(engine: Engine, folder: Path, linger_s: float) -> None:
    import dask

    from taas_magic.engines.head import HeadScheduler
    from taas_magic.engines.keeper import Keeper
    from taas_magic.engines.keys import make_security
    from taas_magic.remote.clock import use_steady_clock

    logging.getLogger("distributed").setLevel(logging.WARNING)
    dask.config.set(DASK_SETTINGS)
    use_steady_clock()
    security = make_security()
    async with engine.open(HeadScheduler, security, str(folder)) as cluster:
        keeper = Keeper(
            cluster.scheduler,
            HostSource(engine, cluster),
            engine.pool,
            linger_s,
        )
        place = folder / "pool.json"
        try:
            _write_private(
                place,
                {
                    "address": cluster.scheduler_address,
                    "security": security,
                    "pool": engine.pool.name,
                    "pid": os.getpid(),
                },
            )
            await keeper.over.wait()
        finally:
            place.unlink(missing_ok=True)


def _write_private(path: Path, values: dict[str, Any]) -> None:
    beside = path.with_suffix(".new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w") as file:
        json.dump(values, file)
    beside.replace(path)
