"""The pool's own process: a Dask scheduler, the controller, and an engine that gets hosts.

Run by a kernel, in a session of its own, so that neither the kernel's interrupt nor its end reaches
it: it decides itself what follows. A kernel finds it by `pool.json` in the pool's folder, as
Jupyter finds a kernel by its connection file: address and key, readable by the user alone.

While it lives it holds a lock on the folder, so a pool has one process, and anybody can see
whether it lives.
"""

import asyncio
import fcntl
import logging
import os
import sys
from pathlib import Path

from msgspec import Struct

from taas_magic.config import PoolConfig
from taas_magic.engines.base import LOG, Engine, find_engine
from taas_magic.engines.keys import SecurityOptions
from taas_magic.messages import pack, unpack
from taas_magic.setup.facts import Kernel, this_kernel

DASK_SETTINGS = {
    "distributed.admin.low-level-log-length": 1,
    "distributed.deploy.lost-worker-timeout": "100ms",
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.worker-ttl": None,  # it goes by the system's clock; see members.watch
}


class PoolWords(Struct):
    """What a kernel tells the pool's process that it starts, by standard input.

    Attributes:
        linger_s: How long it goes on without a kernel.
    """

    folder: str
    pool: PoolConfig
    project: str
    linger_s: float


class PoolPlace(Struct):
    """`pool.json`: by what a kernel connects to the process."""

    address: str
    security: SecurityOptions
    project: str
    made_of: Kernel


def main() -> int:
    """Keep one pool until it is told to end or nobody uses it any more."""
    words = unpack(sys.stdin.buffer.readline(), PoolWords)
    folder = Path(words.folder)
    lock = take_lock(folder)
    if lock is None:
        return 0
    os.ftruncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    os.truncate(folder / LOG, 0)  # it tells of this process; each line is appended
    engine = find_engine(words.pool)
    engine.prepare()
    asyncio.run(_keep(engine, folder, words))
    return 0


def take_lock(folder: Path) -> int | None:
    """Return the lock of a pool's folder, a descriptor; None when a living process holds it."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


async def _keep(engine: Engine, folder: Path, words: PoolWords) -> None:
    import dask

    from taas_magic.engines.keys import Keys
    from taas_magic.host.member import use_steady_clock
    from taas_magic.pool.controller import Controller
    from taas_magic.pool.gate import HeadScheduler

    logging.getLogger("distributed").setLevel(logging.WARNING)
    dask.config.set({**DASK_SETTINGS, "temporary-directory": str(folder)})
    use_steady_clock()
    keys = Keys()
    async with engine.open(HeadScheduler, keys, str(folder)) as cluster:
        controller = Controller(cluster.scheduler, engine, engine.pool, words.linger_s)
        place = PoolPlace(cluster.scheduler_address, keys.kernel(), words.project, this_kernel())
        path, beside = folder / "pool.json", folder / "pool.new"
        beside.touch(0o600)
        try:
            beside.write_bytes(pack(place))
            beside.replace(path)
            await controller.over.wait()
        finally:
            path.unlink(missing_ok=True)
            await engine.end()
