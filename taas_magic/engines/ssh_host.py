"""A host that is reached by SSH as a member of a Dask SpecCluster.

Every connection is opened from here to the host's sshd, or by the host: its agent reaches the
pool's port through the SSH connection (`ssh.tunnel`), so this machine needs no address that hosts
can dial.
"""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Sequence

from distributed.core import Status
from distributed.deploy.spec import ProcessInterface

from taas_magic.config import PoolConfig
from taas_magic.engines.ssh import PYTHON
from taas_magic.engines.ssh_cluster import Roster
from taas_magic.errors import PoolError
from taas_magic.provision.prepare import prepare
from taas_magic.remote.interface import LOOPBACK
from taas_magic.remote.process import entry_code
from taas_magic.ssh.command import KeptCommand, shell_words
from taas_magic.ssh.connect import CONNECT_TIMEOUT_S, Connection, connect
from taas_magic.ssh.target import Target
from taas_magic.ssh.tunnel import open_tunnel
from taas_magic.ssh.way import Stopped

CLOSE_S = 10.0
"""How long a supervisor may take to end all of its host, in seconds."""

BEATS_A_LEASE = 8
_SHARE = 0.9
"""Of the time that the keeper waits for a host, so that it hears why there is none."""

_SLOW_S = 10.0
"""After how long something that a host is doing is worth a line to the user."""

_POLL_S = 0.05
_END_S = 1.0

_log = logging.getLogger("taas.ssh")


class SshHost(ProcessInterface):
    """A supervisor and its agent on a host of the roster.

    Args:
        scheduler: The scheduler's address; Dask gives it.
        roster: The pool's hosts.
        name: The host's name in the pool; Dask gives it.
    """

    def __init__(self, scheduler: str, roster: Roster, name: object = None) -> None:
        super().__init__(scheduler=scheduler, name=name)
        self.name = name
        self._scheduler, self._roster = scheduler, roster
        self._target: Target | None = None
        self._connection: Connection | None = None
        self._command: KeptCommand | None = None
        self._stop = threading.Event()
        self._doing, self._since = "", time.monotonic()

    async def start(self) -> None:
        """Brings up a free host of the pool; returns when its agent has joined.

        Raises:
            PoolError: None could be brought up, or it was given up.
        """
        until = time.monotonic() + _SHARE * self._roster.pool.start_timeout_s
        failures: dict[Target, str] = {}
        while (target := self._roster.take(failures)) is not None:
            self._target, joined = target, False
            try:
                await self._roster.in_thread(self._bring_up, target)
                await self._join(target, until)
                await super().start()
                joined = True
                return
            except Stopped:
                break
            except PoolError as error:
                if self._stop.is_set():
                    break
                failures[target] = str(error)
                _log.warning("%s", error)
            finally:
                self._do("")
                if not joined:
                    await self._leave()
        self.status = Status.failed
        if self._stop.is_set():
            raise PoolError("nobody waits for it any more")
        refusal = "\n".join(failures.values()) or "all of its hosts are taken"
        self._roster.refusals.append(refusal)
        raise PoolError(refusal)

    async def close(self) -> None:
        await self._leave()
        await super().close()

    def give_up(self) -> None:
        """Ends the attempt to bring a host up, wherever it stands; returns at once."""
        if self.status == Status.created:
            self._stop.set()
            if self._connection is not None:
                self._connection.transport.close()

    def news(self) -> str:
        """What it has been doing for long; "" when it is not."""
        slow = self._doing and time.monotonic() - self._since > _SLOW_S
        return f"host {self._target.label}: {self._doing}" if slow and self._target else ""

    def why_lost(self) -> str:
        """What is known of its end, from the end of its connection; blocks for a moment."""
        command, connection = self._command, self._connection
        if command is None or connection is None or not command.ended.wait(_END_S):
            return ""
        if not connection.is_open:
            error = connection.transport.get_exception()
            return f"its SSH connection broke ({error or 'closed by the host'})"
        last = command.tail.rpartition("\n")[2]
        return f"its agent ended: {last}" if last else "its agent ended"

    def _do(self, doing: str) -> None:
        self._doing, self._since = doing, time.monotonic()

    def _bring_up(self, target: Target) -> None:
        pool = self._roster.pool
        self._do(f"still connecting to {target.hostname}:{target.port}")
        limit_s = min(CONNECT_TIMEOUT_S, pool.start_timeout_s)
        self._connection = connection = connect(target, self._stop, limit_s, pool.lease_s)
        self._do("still putting packages into its cache, as on every first use")
        prepared = prepare(connection, pool)
        address, port = _address_of(self._scheduler)
        settings = {
            "scheduler": f"tls://{LOOPBACK}:{open_tunnel(connection, address, port)}",
            "security": self._roster.security,
            "name": self.name,  # as Dask knows it: its type counts
            "host_name": target.label,
            "interface": pool.interface or "",
            "local_directory": None,
            "lease_s": pool.lease_s,
        }
        self._do("its agent is still starting: torch is being imported")
        self._command = KeptCommand(
            connection,
            supervisor_command(pool, prepared.path_entries),
            json.dumps(settings).encode() + b"\n",
            pool.lease_s / BEATS_A_LEASE,
            lambda line: _log.warning("[%s] %s", target.label, line),
        )

    async def _join(self, target: Target, until: float) -> None:
        """Returns when the agent is a member of the pool."""
        assert self._command is not None
        while not self._roster.has_joined(self.name):
            if self._stop.is_set():
                raise Stopped
            if self._command.ended.is_set():
                raise PoolError(f"host {target.label}: its agent ended:\n{self._command.tail}")
            if time.monotonic() > until:
                raise PoolError(
                    f"host {target.label}: its agent did not join within "
                    f"start_timeout_s = {self._roster.pool.start_timeout_s:g}:\n"
                    f"{self._command.tail}"
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


def supervisor_command(pool: PoolConfig, path_entries: Sequence[str]) -> str:
    """What starts the supervisor of a host.

    Args:
        pool: The pool's settings.
        path_entries: Where the host's Python finds us; nothing where it does by itself.
    """
    environ = {"PYTHONPATH": ":".join(path_entries)} if path_entries else {}
    arguments = ["-c", entry_code("taas_magic.remote.supervisor"), str(pool.lease_s)]
    return shell_words(pool.python or PYTHON, arguments, environ)


def _address_of(scheduler: str) -> tuple[str, int]:
    host, _, port = scheduler.rpartition("://")[2].rpartition(":")
    return host.strip("[]"), int(port)
