"""A host that is reached by SSH as a member of a Dask SpecCluster.

Every connection is opened from here to the host's sshd, or by the host: its agent reaches the
pool's port through the SSH connection (`ssh.tunnel`), so this machine needs no address that hosts
can dial.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from distributed import SpecCluster
from distributed.core import Status
from distributed.deploy.spec import ProcessInterface

import taas_magic
from taas_magic.config import PoolConfig
from taas_magic.engines.ssh import PYTHON
from taas_magic.errors import PoolError
from taas_magic.remote.process import entry_code
from taas_magic.ssh.command import KeptCommand, shell_words
from taas_magic.ssh.connect import Connection, connect
from taas_magic.ssh.target import Target
from taas_magic.ssh.tunnel import open_tunnel
from taas_magic.ssh.way import Stopped

CLOSE_S = 10.0
"""How long a supervisor may take to end all of its host, in seconds."""

BEATS_A_LEASE = 8
_POLL_S = 0.05

_log = logging.getLogger("taas.ssh")
_T = TypeVar("_T")


class Roster:
    """The hosts of a pool: which are taken, and which failed when they were last wanted.

    Args:
        pool: The pool's settings.
        targets: Its hosts.
        security: Keyword arguments of dask's `Security`, for the agents.
    """

    def __init__(
        self, pool: PoolConfig, targets: Iterable[Target], security: Mapping[str, Any]
    ) -> None:
        self.pool, self.security = pool, security
        self._free = list(targets)
        self.stop = threading.Event()
        """Set when the pool ends: nothing that is under way is wanted any more."""
        self.executor = ThreadPoolExecutor(2 * len(self._free), "taas-ssh")
        self.has_joined: Callable[[object], bool] = lambda name: False

    def take(self, besides: Iterable[Target]) -> Target | None:
        """A free host; None when there is none but those."""
        target = next((target for target in self._free if target not in besides), None)
        if target is not None:
            self._free.remove(target)
        return target

    def give_back(self, target: Target) -> None:
        """Makes a host free again; it is taken after the others."""
        self._free.append(target)

    async def in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Runs what blocks. Dask's and asyncio's own threads are too few for all hosts at once."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.executor, work, *arguments)


class SshCluster(SpecCluster):
    """A SpecCluster that tries again with hosts that failed, and ends at once.

    Args:
        roster: The pool's hosts.
    """

    def __init__(self, roster: Roster, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._roster = roster
        roster.has_joined = lambda name: name in self.scheduler.aliases

    async def _correct_state_internal(self) -> None:
        for name in [n for n, host in self.workers.items() if host.status == Status.failed]:
            del self.workers[name]  # Dask would take it for a host that is coming
        await super()._correct_state_internal()

    async def _close(self) -> None:
        self._roster.stop.set()
        await super()._close()
        self._roster.executor.shutdown(wait=False)


class SshHost(ProcessInterface):
    """A supervisor and its agent on a host of the roster.

    Args:
        scheduler: The scheduler's address; Dask gives it.
        roster: The pool's hosts.
        name: The host's name in the pool; Dask gives it.
    """

    def __init__(self, scheduler: str, roster: Roster, name: object = None) -> None:
        super().__init__(scheduler=scheduler, name=name)
        self._scheduler, self._roster, self._name = scheduler, roster, name
        self._target: Target | None = None
        self._connection: Connection | None = None
        self._command: KeptCommand | None = None

    async def start(self) -> None:
        """Brings up a free host of the pool; returns when its agent has joined.

        Raises:
            PoolError: None could be brought up; says why, of each.
        """
        failures: dict[Target, str] = {}
        while (target := self._roster.take(failures)) is not None:
            self._target = target
            try:
                await self._roster.in_thread(self._bring_up, target)
                await self._join(target)
            except (PoolError, Stopped) as error:
                failures[target] = str(error)
                _log.warning("%s", error)
                await self._leave()
            else:
                await super().start()
                return
            if self._roster.stop.is_set():
                break
        self.status = Status.failed
        raise PoolError("\n".join(failures.values()) or "all of its hosts are taken")

    async def close(self) -> None:
        await self._leave()
        await super().close()

    def _bring_up(self, target: Target) -> None:
        pool, stop = self._roster.pool, self._roster.stop
        self._connection = connection = connect(
            target, stop, min(15.0, pool.start_timeout_s), silence_s=pool.lease_s
        )
        address, port = _address_of(self._scheduler)
        settings = {
            "scheduler": f"tls://127.0.0.1:{open_tunnel(connection, address, port)}",
            "security": self._roster.security,
            "name": self._name,  # as Dask knows it: its type counts
            "host_name": target.label,
            "interface": pool.interface or "",
            "local_directory": None,
            "lease_s": pool.lease_s,
        }
        self._command = KeptCommand(
            connection,
            supervisor_command(pool),
            json.dumps(settings).encode() + b"\n",
            pool.lease_s / BEATS_A_LEASE,
            lambda line: _log.warning("[%s] %s", target.label, line),
        )

    async def _join(self, target: Target) -> None:
        """Returns when the agent is a member of the pool."""
        assert self._command is not None
        loop = asyncio.get_running_loop()
        until = loop.time() + self._roster.pool.start_timeout_s
        while not self._roster.has_joined(self._name):
            if self._command.ended.is_set():
                raise PoolError(f"host {target.label}: its agent ended:\n{self._command.tail}")
            if self._roster.stop.is_set():
                raise Stopped
            if loop.time() > until:
                raise PoolError(
                    f"host {target.label}: its agent did not join within "
                    f"{self._roster.pool.start_timeout_s:.0f} s:\n{self._command.tail}"
                )
            await asyncio.sleep(_POLL_S)

    async def _leave(self) -> None:
        """Ends what runs on the host, then the connection; makes the host free."""
        target, self._target = self._target, None
        if target is not None:
            await self._roster.in_thread(self._end)
            self._roster.give_back(target)

    def _end(self) -> None:
        if self._command is not None:
            self._command.close(CLOSE_S)
        if self._connection is not None:
            self._connection.close()
        self._command = self._connection = None


def supervisor_command(pool: PoolConfig) -> str:
    """What starts the supervisor of a host."""
    place = str(Path(taas_magic.__file__).parents[1])
    arguments = ["-c", entry_code("taas_magic.remote.supervisor"), str(pool.lease_s)]
    return shell_words(pool.python or PYTHON, arguments, {"PYTHONPATH": place})


def _address_of(scheduler: str) -> tuple[str, int]:
    host, _, port = scheduler.rpartition("://")[2].rpartition(":")
    return host.strip("[]"), int(port)
