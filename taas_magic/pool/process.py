"""The pool's own process: a Dask scheduler, the controller, and an engine that gets hosts.

A kernel starts it (`PoolFolder.start`) in a session of its own, so that neither the kernel's
interrupt nor its end reaches it: it decides itself what follows. A kernel finds it by `pool.json`
in the pool's folder, as Jupyter finds a kernel by its connection file: address and key, readable
by the user alone.

A `PoolProcess` is one process, known by its id and the moment of its start. A process that later
takes its place in the folder is another one.
"""

import asyncio
import contextlib
import gc
import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
from msgspec import Struct

from taas_magic.config import PoolConfig
from taas_magic.engines.base import LOG, Engine, find_engine
from taas_magic.engines.keys import SecurityOptions
from taas_magic.errors import PoolError, signal_name
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
    """What a kernel tells the pool's process that it starts, by standard input.

    Attributes:
        lock: The descriptor by which the process inherits the lock of its folder.
    """

    folder: str
    pool: PoolConfig
    project: str
    linger_s: float
    lock: int


class PoolPlace(Struct):
    """`pool.json`: how a kernel connects to the process.

    Attributes:
        pid: The process that wrote the file.
    """

    address: str
    security: SecurityOptions
    project: str
    made_of: Kernel
    pid: int = 0


def place_in(folder: Path) -> PoolPlace | None:
    """Return what `pool.json` in a pool's folder says; None while there is none."""
    try:
        return unpack((folder / "pool.json").read_bytes(), PoolPlace)
    except FileNotFoundError:
        return None


LINGER_S = 5.0
"""How long a pool's process waits for a kernel after the last one has gone."""

_DIGEST = 8
_KILL_S = 20.0
_POLL_S = 0.02


class PoolProcess:
    """One process of a pool, from its start to its end; this kernel or another one started it.

    Another process in the same folder is another `PoolProcess`.

    Args:
        process: The process; as a `Popen` if it is a child of this kernel.
    """

    def __init__(self, process: subprocess.Popen[bytes] | psutil.Process) -> None:
        self.pid, self._process = process.pid, process

    def is_alive(self) -> bool:
        """Return whether the process lives."""
        if isinstance(self._process, subprocess.Popen):
            return self._process.poll() is None
        try:
            is_zombie = self._process.status() == psutil.STATUS_ZOMBIE
            return not is_zombie and self._process.is_running()
        except psutil.NoSuchProcess:
            return False

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it lives or where nobody can know it."""
        return self._process.poll() if isinstance(self._process, subprocess.Popen) else None

    def state(self) -> str:
        """Return whether the process lives, or how it ended, as far as this kernel can know."""
        if self.is_alive():
            return "is alive"
        code = self.exit_code or 0
        if name := signal_name(code):
            return f"was killed by {name}"
        return f"ended with exit code {code}" if code else "has ended"

    def kill(self) -> None:
        """Kill the process; return when it has ended.

        Raises:
            PoolError: It does not end.
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.kill()
        self.wait_for_end(_KILL_S)

    def wait_for_end(self, limit_s: float) -> None:
        """Return when the process has ended.

        Raises:
            PoolError: It does not end in that time.
        """
        deadline = time.monotonic() + limit_s
        while self.is_alive():
            if time.monotonic() > deadline:
                raise PoolError(f"the pool's process {self.pid} did not end within {limit_s:g} s")
            time.sleep(_POLL_S)


class PoolFolder:
    """The private folder of one pool: its lock, its `pool.json`, its log.

    The process of the pool holds the lock as long as it lives. A kernel that starts a process takes
    the lock first and hands it over, so a pool has one process.
    """

    def __init__(self, config: PoolConfig, project: Path) -> None:
        self._config, self._project = config, project
        self._children: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    @property
    def path(self) -> Path:
        """The folder itself; made on first use."""
        mark = f"{sys.prefix}|{self._project}|{self._config}|{this_kernel()}"
        digest = hashlib.sha256(os.fsencode(mark)).hexdigest()[:_DIGEST]
        path = state_dir() / "pools" / f"{self._config.name}-{digest}"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    @property
    def log(self) -> Path:
        """The log of the pool's newest process."""
        return self.path / LOG

    @property
    def is_locked(self) -> bool:
        """Whether a process of the pool lives, or is just being started."""
        return not is_free(self.path / "lock")

    def find(self) -> PoolProcess | None:
        """Return the process that holds the lock; None if there is none, or it is just starting."""
        self.has_children()
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
            # after a restart of the machine, another process may have that id
            if any(file.path == os.path.realpath(path) for file in process.open_files()):
                return PoolProcess(process)
        return None

    def start(self) -> PoolProcess | None:
        """Start a process of the pool; return None if one lives, or another kernel starts one."""
        self.has_children()
        path = self.path / "lock"
        lock = take_lock(path)
        if lock is None:
            return None
        try:
            (path.parent / "pool.json").unlink(missing_ok=True)  # a process that was killed left it
            os.ftruncate(lock, 0)  # the new process writes its id
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
            words = PoolWords(str(path.parent), self._config, project, LINGER_S, lock)
        finally:
            os.close(lock)
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, which is seen later
            child.stdin.write(pack(words) + b"\n")
            child.stdin.close()
        return PoolProcess(child)

    def place(self, process: PoolProcess) -> PoolPlace | None:
        """Return how to connect to a process; None before it listens, and when it has begun to end.

        Raises:
            PoolError: It is of another version than this kernel.
        """
        place = place_in(self.path)
        if place is None or place.pid != process.pid:
            return None
        if place.made_of != this_kernel():
            raise PoolError(
                f'pool "{self._config.name}": Python, torch or taas-magic was changed since this '
                f"kernel started: restart the kernel"
            )
        return place

    def of_other_versions(self) -> list[str]:
        """Return the living pools that this one would be, but for their versions, a text each."""
        found = []
        folders = f"{self._config.name}-{'?' * _DIGEST}"  # not those of a pool `name-more`
        for path in self.path.parent.glob(f"{folders}/pool.json"):
            with contextlib.suppress(OSError, ValueError):  # it is just ending
                place = unpack(path.read_bytes(), PoolPlace)
                made_of = place.made_of
                is_other = made_of != this_kernel() and place.project == str(self._project)
                if is_other and not is_free(path.with_name("lock")):
                    found.append(f"Python {made_of.python}, torch {made_of.torch}")
        return found

    def has_children(self) -> bool:
        """Return whether a process that was started here lives; forget those that have ended."""
        with self._lock:
            self._children = [child for child in self._children if child.poll() is None]
            return bool(self._children)


def main() -> int:
    """Keep one pool until it is told to end or nobody uses it any more."""
    gc.disable()  # what is imported stays; to look through it again and again takes a tenth
    words = unpack(sys.stdin.buffer.readline(), PoolWords)
    folder = Path(words.folder)
    os.set_inheritable(words.lock, False)
    os.write(words.lock, str(os.getpid()).encode())
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
        made_of, pid = this_kernel(), os.getpid()
        place = PoolPlace(scheduler.address, keys.kernel(), words.project, made_of, pid)
        path = folder / "pool.json"
        try:
            with replacing(path) as file:
                file.write(pack(place))
            await controller.over.wait()
        finally:
            path.unlink(missing_ok=True)
