"""This machine as a member of a Dask SpecCluster."""

import socket
import subprocess
from collections.abc import Mapping
from typing import Any

from distributed.deploy.spec import ProcessInterface

from taas_magic.engines.local import end_supervisor, start_supervisor, tell_agent
from taas_magic.remote.interface import LOOPBACK


class LocalHost(ProcessInterface):
    """A supervisor and its agent on this machine.

    Args:
        scheduler: The scheduler's address; Dask gives it.
        settings: What the agent is told besides.
        started: Supervisors that were started ahead; taken before a new one is started.
        name: The host's name in the pool; Dask gives it.
    """

    def __init__(
        self,
        scheduler: str,
        settings: Mapping[str, Any],
        started: list[subprocess.Popen[bytes]],
        name: object = None,
    ) -> None:
        super().__init__(scheduler=scheduler, name=name)
        self._settings = {
            **settings,
            "scheduler": scheduler,
            "interface": LOOPBACK,
            "is_foreign": False,
            "host_name": f"{socket.gethostname()}-{name}" if settings["several"] else "",
            "name": name,  # as Dask knows it: its type counts
        }
        self._started = started
        self._supervisor: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self._supervisor = self._started.pop() if self._started else start_supervisor()
        tell_agent(self._supervisor, self._settings)
        await super().start()

    async def close(self) -> None:
        if self._supervisor is not None:
            await end_supervisor(self._supervisor)
        await super().close()
