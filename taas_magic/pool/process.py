"""The pool's own process: a Dask scheduler, the controller, and an engine that gets hosts.

A kernel starts the process in a separate session of the operating system. So the process continues
if the kernel is interrupted or ends. Kernels find the process through `pool.json` in the pool's
folder. This file holds the address of the process and the keys. Only the user can read this file.
"""

import asyncio
import contextlib
import gc
import hashlib
import logging
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
from msgspec import Struct

from taas_magic.config import PoolConfig
from taas_magic.engines.base import LOG, Engine, make_engine
from taas_magic.errors import PoolError, signal_name
from taas_magic.host.system import CALM_DASK, spawn_command
from taas_magic.journal.folder import state_dir
from taas_magic.messages import from_json, to_json
from taas_magic.pool.address import PoolAddress, read_address
from taas_magic.setup.facts import this_kernel
from taas_magic.shared_files import is_unlocked, open_and_lock, replace_atomically

DASK_SETTINGS = {
    **CALM_DASK,
    "distributed.admin.low-level-log-length": 1,
    "distributed.deploy.lost-worker-timeout": "100ms",
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.worker-ttl": None,  # depends on the wall clock; see `PoolHosts.watch`
}


class PoolSettings(Struct):
    """Settings that a kernel writes to the standard input of the pool's process at its start.

    Attributes:
        folder: Path of the pool's folder, with the lock, `pool.json` and the log.
        project: Path of the project folder (the notebook's folder).
        linger_s: Seconds for which the process continues without a kernel and without a run.
        lock: Descriptor of the lock file in the pool's folder. The process inherits this
            descriptor, and holds the lock until it ends.
    """

    folder: str
    pool: PoolConfig
    project: str
    linger_s: float
    lock: int


LINGER_S = 5.0
"""Seconds for which a pool's process continues without a kernel and without a run."""

_DIGEST = 8
_KILL_S = 20.0
_POLL_S = 0.02


class PoolProcess:
    """Handle of a pool's process, which this kernel or another kernel started.

    Args:
        process: A `Popen` if this kernel started the process, else a `psutil.Process`.
    """

    def __init__(self, process: subprocess.Popen[bytes] | psutil.Process) -> None:
        self.pid, self._process = process.pid, process

    def is_alive(self) -> bool:
        """Return whether the process is running; a zombie does not count."""
        if isinstance(self._process, subprocess.Popen):
            return self._process.poll() is None
        try:
            is_zombie = self._process.status() == psutil.STATUS_ZOMBIE
            return not is_zombie and self._process.is_running()
        except psutil.NoSuchProcess:
            return False

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process; it is negative if a signal ended the process.

        None while the process runs. Always None if another kernel started the process.
        """
        return self._process.poll() if isinstance(self._process, subprocess.Popen) else None

    def state_text(self) -> str:
        """Return the state of the process in words, such as "was killed by SIGTERM"."""
        if self.is_alive():
            return "is alive"
        code = self.exit_code or 0
        if name := signal_name(code):
            return f"was killed by {name}"
        return f"ended with exit code {code}" if code else "has ended"

    def kill(self) -> None:
        """Send SIGKILL to the process, and wait until the process has ended.

        Raises:
            PoolError: The process has not ended within `_KILL_S` (20 s).
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.kill()
        self.wait_for_end(_KILL_S)

    def wait_for_end(self, limit_s: float) -> None:
        """Wait until the process has ended. Send no signal.

        Raises:
            PoolError: The process did not end within `limit_s` seconds.
        """
        deadline = time.monotonic() + limit_s
        while self.is_alive():
            if time.monotonic() > deadline:
                raise PoolError(f"the pool's process {self.pid} did not end within {limit_s:g} s")
            time.sleep(_POLL_S)


class PoolFolder:
    """The private folder of one pool, with its lock, `pool.json` and log.

    The pool's process holds the lock until it ends. A kernel takes the lock before it starts a
    process, and passes the lock to the process. So a pool has at most one process.
    """

    def __init__(self, config: PoolConfig, project: Path) -> None:
        self._config, self._project = config, project
        self._children: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    @property
    def path(self) -> Path:
        """Path of the pool's folder. The first access creates the folder.

        The name contains a digest of this machine's name, the pool's settings, the project folder,
        and the versions of Python, torch and taas-magic. If any of these differ, the folders
        differ, and therefore the processes of the pool. Machines may share the state folder.
        """
        place = f"{platform.node()}|{sys.prefix}|{self._project}"
        mark = f"{place}|{self._config}|{this_kernel()}"
        digest = hashlib.sha256(os.fsencode(mark)).hexdigest()[:_DIGEST]
        path = state_dir() / "pools" / f"{self._config.name}-{digest}"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    @property
    def log(self) -> Path:
        """Path of the log file of the pool's newest process. Each new process clears the log."""
        return self.path / LOG

    @property
    def is_locked(self) -> bool:
        """Whether a process of the pool is running or being started."""
        return not is_unlocked(self.path / "lock")

    def find_process(self) -> PoolProcess | None:
        """Return the pool's running process; None if no process runs.

        First reap child processes that have ended. The pid is in the lock file. Return None if the
        file is not locked, or if a new process has not yet written its pid. Also return None if the
        pid now belongs to a process that does not have the lock file open.
        """
        self.reap_children()
        path = self.path / "lock"
        written = path.read_text() if self.is_locked else ""
        if not written:
            return None
        pid = int(written)
        for child in self._children:
            if child.pid == pid:
                return PoolProcess(child)
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            # After a restart of the machine, another process may have this pid.
            if any(file.path == os.path.realpath(path) for file in process.open_files()):
                return PoolProcess(process)
        return None

    def start_process(self) -> PoolProcess | None:
        """Start a process of the pool. If one is running or being started, return None instead.

        - Reap child processes that have ended.
        - Take the lock of the pool's folder. Empty the lock file, because the new process writes
          its pid there.
        - Remove `pool.json`, which a killed process may have left.
        - Start the process, which inherits the lock, and send the settings to its standard input.
          The output of the process goes to the log.
        """
        self.reap_children()
        path = self.path / "lock"
        lock = open_and_lock(path)
        if lock is None:
            return None
        try:
            (path.parent / "pool.json").unlink(missing_ok=True)  # left by a killed process
            os.ftruncate(lock, 0)  # the new process writes its pid
            with self.log.open("ab") as log:
                child = subprocess.Popen(
                    spawn_command("taas_magic.pool.process"),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=(lock,),
                )
            with self._lock:
                self._children.append(child)
            project = str(self._project)
            settings = PoolSettings(str(path.parent), self._config, project, LINGER_S, lock)
        finally:
            os.close(lock)
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # already ended; the caller notices this later
            child.stdin.write(to_json(settings) + b"\n")
            child.stdin.close()
        return PoolProcess(child)

    def address_of(self, process: PoolProcess) -> PoolAddress | None:
        """Return the address and keys of a process of the pool, from `pool.json`.

        Return None if the process does not accept connections yet, or has begun to end.

        Raises:
            PoolError: The process has other versions of Python, torch or taas-magic than this
                kernel.
        """
        pool_address = read_address(self.path)
        if pool_address is None or pool_address.pid != process.pid:
            return None
        if pool_address.made_of != this_kernel():
            raise PoolError(
                f'pool "{self._config.name}": Python, torch or taas-magic was changed since this '
                f"kernel started: restart the kernel"
            )
        return pool_address

    def find_other_versions(self) -> list[str]:
        """Find running processes of this pool that have other versions than this kernel.

        The versions are those of Python, torch and taas-magic. The search includes only processes
        for this kernel's project folder.

        Returns:
            The versions of each found process as text, such as "Python 3.11.9, torch 2.4.0".
        """
        found = []
        folders = f"{self._config.name}-{'?' * _DIGEST}"  # does not match a pool `name-more`
        for path in self.path.parent.glob(f"{folders}/pool.json"):
            with contextlib.suppress(OSError, ValueError):  # the process is just ending
                pool_address = from_json(path.read_bytes(), PoolAddress)
                made_of = pool_address.made_of
                is_other = made_of != this_kernel() and pool_address.project == str(self._project)
                if is_other and not is_unlocked(path.with_name("lock")):
                    found.append(f"Python {made_of.python}, torch {made_of.torch}")
        return found

    def reap_children(self) -> bool:
        """Reap the processes of this pool that this kernel started and that have ended.

        Returns:
            Whether such a process still runs.
        """
        with self._lock:
            self._children = [child for child in self._children if child.poll() is None]
            return bool(self._children)


def main() -> int:
    """Run the pool's process until a kernel ends the pool, or no kernel and no run is left.

    Read the settings from standard input, write the pid to the lock file, clear the log, and
    prepare the pool's engine. Then run the scheduler and the controller of the pool.

    Returns:
        The exit code of the process: 0.
    """
    gc.disable()  # garbage collection takes a tenth of the import time, and would free nothing
    settings = from_json(sys.stdin.buffer.readline(), PoolSettings)
    folder = Path(settings.folder)
    os.set_inheritable(settings.lock, False)
    os.write(settings.lock, str(os.getpid()).encode())
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    os.truncate(folder / LOG, 0)  # each process appends, so remove an earlier log
    engine = make_engine(settings.pool)
    engine.prepare()
    asyncio.run(_run_pool(engine, folder, settings))
    return 0


async def _run_pool(engine: Engine, folder: Path, settings: PoolSettings) -> None:
    """Run the pool's Dask scheduler and controller until the pool ends.

    First turn on garbage collection, which `main` has turned off, apply Dask's settings, and create
    the pool's keys. The engine opens the scheduler. When the scheduler listens, write its address
    and the keys for kernels to `pool.json` in `folder`. At the end, remove this file; then the
    engine ends all hosts.
    """
    import dask

    from taas_magic.engines.keys import Keys
    from taas_magic.host.agent_worker import use_steady_clock
    from taas_magic.pool.controller import Controller
    from taas_magic.pool.gate import PoolScheduler

    gc.freeze()
    gc.enable()
    logging.getLogger("distributed").setLevel(logging.WARNING)
    dask.config.set({**DASK_SETTINGS, "temporary-directory": str(folder)})
    use_steady_clock()
    keys = Keys()
    async with engine.open(PoolScheduler, keys, str(folder)) as scheduler:
        controller = Controller(scheduler, engine, engine.pool, settings.linger_s)
        pool_address = PoolAddress(
            scheduler.address,
            keys.kernel(),
            settings.project,
            this_kernel(),
            os.getpid(),
            platform.node(),
        )
        path = folder / "pool.json"
        try:
            with replace_atomically(path) as file:
                file.write(to_json(pool_address))
            await controller.must_end.wait()
        finally:
            path.unlink(missing_ok=True)
