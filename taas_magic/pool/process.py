"""The pool's own process: a Dask scheduler, the controller, and an engine that gets hosts.

Run by a kernel (`PoolProcess`), in a session of its own, so that neither the kernel's interrupt nor
its end reaches it: it decides itself what follows. A kernel finds it by `pool.json` in the pool's
folder, as Jupyter finds a kernel by its connection file: address and key, readable by the user
alone.

While it lives it holds a lock on the folder, so a pool has one process, and anybody can see
whether it lives.
"""

import asyncio
import contextlib
import gc
import hashlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
from msgspec import Struct

from taas_magic.config import PoolConfig
from taas_magic.engines.base import LOG, Engine, find_engine, log_tail
from taas_magic.engines.keys import SecurityOptions
from taas_magic.errors import PoolError
from taas_magic.host.system import CALM_DASK, spawn_command
from taas_magic.journal.folder import state_dir
from taas_magic.messages import pack, unpack
from taas_magic.setup.facts import Kernel, this_kernel
from taas_magic.shared_files import is_free, replacing, take_lock

DASK_SETTINGS = {
    **CALM_DASK,
    "distributed.admin.low-level-log-length": 1,
    "distributed.deploy.lost-worker-timeout": "100ms",
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.worker-ttl": None,  # it goes by the system's clock; see members.watch
}


class PoolWords(Struct):
    """What a kernel tells the pool's process that it starts, by standard input."""

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


LINGER_S = 5.0
"""How long a pool's process waits for a kernel after the last one has gone."""

_DIGEST = 8
_KILL_S = 20.0
_POLL_S = 0.02


class PoolProcess:
    """The process of one pool, which lives while somebody holds the lock of its folder."""

    def __init__(self, config: PoolConfig, project: Path) -> None:
        self._config, self._project = config, project
        self._started: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        """The pool's private folder: its address and key, its lock, its log."""
        mark = f"{sys.prefix}|{self._project}|{self._config}|{this_kernel()}"
        digest = hashlib.sha256(os.fsencode(mark)).hexdigest()[:_DIGEST]
        path = state_dir() / "pools" / f"{self._config.name}-{digest}"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def is_alive(self) -> bool:
        """Return whether the pool's process lives, whoever started it."""
        return not is_free(self.folder / "lock")

    def is_ending(self) -> bool:
        """Return whether the pool's process, if it lives, has begun to end."""
        return not (self.folder / "pool.json").exists()

    def begin(self) -> None:
        """Start the pool's process, unless one lives; first remove what a killed one left."""
        lock = take_lock(self.folder / "lock")
        if lock is None:
            return
        (self.folder / "pool.json").unlink(missing_ok=True)
        os.close(lock)
        if self._started is not None:  # it has let go of the lock, so it is all but gone
            self._started.wait(self._config.start_timeout_s)
        with (self.folder / LOG).open("ab") as log:
            self._started = subprocess.Popen(
                spawn_command("taas_magic.pool.process"),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        words = PoolWords(str(self.folder), self._config, str(self._project), LINGER_S)
        assert self._started.stdin is not None
        self._started.stdin.write(pack(words) + b"\n")
        self._started.stdin.close()

    def wait_for_place(self) -> PoolPlace:
        """Return where the pool's scheduler listens, and how one connects to it, once it says so.

        Raises:
            PoolError: It could not be started, and is ended, if it is stopped or hangs; the message
                ends with the last lines of its log. Or it is of another version than this kernel.
        """
        deadline = time.monotonic() + self._config.start_timeout_s
        while (place := self._place()) is None:
            code = self._started.poll() if self._started is not None else 0
            if code == 0:  # the process that lived before was about to end
                self.begin()
            if code or time.monotonic() > deadline:
                error = self._error("did not start")
                self.kill()
                raise error
            time.sleep(_POLL_S)
        if place.made_of != this_kernel():
            raise PoolError(
                f'pool "{self._config.name}": Python, torch or taas-magic was changed since this '
                f"kernel started: restart the kernel"
            )
        return place

    def _place(self) -> PoolPlace | None:
        """Return what `pool.json` says; None while there is none."""
        try:
            return unpack((self.folder / "pool.json").read_bytes(), PoolPlace)
        except FileNotFoundError:
            return None

    def of_other_versions(self) -> list[str]:
        """Return the living pools that this one would be, but for their versions, a text each."""
        found = []
        folders = f"{self._config.name}-{'?' * _DIGEST}"  # not those of a pool `name-more`
        for path in self.folder.parent.glob(f"{folders}/pool.json"):
            with contextlib.suppress(OSError, ValueError):  # it is just ending
                place = unpack(path.read_bytes(), PoolPlace)
                made_of = place.made_of
                is_other = made_of != this_kernel() and place.project == str(self._project)
                if is_other and not is_free(path.with_name("lock")):
                    found.append(f"Python {made_of.python}, torch {made_of.torch}")
        return found

    def wait_for_end(self, limit_s: float, address: str = "") -> None:
        """Return when the process has ended.

        Args:
            address: Where it listened; one that another kernel has started since is not waited for.

        Raises:
            PoolError: It does not end in that time.
        """
        deadline = time.monotonic() + limit_s
        while self.is_alive() or not self.is_over():
            if address and (place := self._place()) and place.address != address:
                return
            if time.monotonic() > deadline:
                raise self._error("did not end")
            time.sleep(_POLL_S)

    def pid(self) -> int | None:
        """Return the process that holds, or last held, the folder's lock; None where none did."""
        path = self.folder / "lock"
        written = path.read_text() if path.exists() else ""
        return int(written) if written else None

    def kill(self) -> None:
        """End a process that does not answer; returns when it has let go of its lock.

        Raises:
            PoolError: It cannot be ended.
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            if (pid := self.pid()) is not None:
                process = psutil.Process(pid)  # its id may be another process's by now
                if any("taas_magic.pool.process" in word for word in process.cmdline()):
                    process.kill()
        if self._started is not None:
            self._started.kill()
        self.wait_for_end(_KILL_S)

    def is_over(self) -> bool:
        """Return whether no process that was started here lives; forgets one that has ended."""
        if self._started is not None and self._started.poll() is not None:
            self._started = None
        return self._started is None

    def _error(self, what: str) -> PoolError:
        tail = log_tail(self.folder / LOG)
        return PoolError(f'pool "{self._config.name}" {what}. Its log:\n{tail}')


def main() -> int:
    """Keep one pool until it is told to end or nobody uses it any more."""
    gc.disable()  # what is imported stays; to look through it again and again takes a tenth
    words = unpack(sys.stdin.buffer.readline(), PoolWords)
    folder = Path(words.folder)
    lock = take_lock(folder / "lock")
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


async def _keep(engine: Engine, folder: Path, words: PoolWords) -> None:
    import dask

    from taas_magic.engines.keys import Keys
    from taas_magic.host.member import use_steady_clock
    from taas_magic.pool.controller import Controller
    from taas_magic.pool.gate import HeadScheduler

    gc.freeze()
    gc.enable()
    logging.getLogger("distributed").setLevel(logging.WARNING)
    dask.config.set({**DASK_SETTINGS, "temporary-directory": str(folder)})
    use_steady_clock()
    keys = Keys()
    async with engine.open(HeadScheduler, keys, str(folder)) as scheduler:
        controller = Controller(scheduler, engine, engine.pool, words.linger_s)
        place = PoolPlace(scheduler.address, keys.kernel(), words.project, this_kernel())
        path = folder / "pool.json"
        try:
            with replacing(path) as file:
                file.write(pack(place))
            await controller.over.wait()
        finally:
            path.unlink(missing_ok=True)
