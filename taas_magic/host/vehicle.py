"""A plain Dask worker as a vehicle: it brings the agent to its host, and holds the host's lease.

Batch systems and clouds start Dask workers of their own kind, through classes that know nothing of
us. Every worker that joins the pool's scheduler is given this plugin. It starts the supervisor; the
agent below joins the pool as a member of its own. When the vehicle ends, in whatever way (wall
time, a cancelled job, a lost connection), the supervisor's standard input closes, and with it
everything on the host ends. A module of its own: such a worker, and the engine, import no agent.
"""

import asyncio
import secrets
from collections.abc import Sequence

from distributed import Worker, WorkerPlugin

from taas_magic.host.system import spawn_command, supervisor_arguments
from taas_magic.leases import HOST_END_S
from taas_magic.messages import AgentSettings, GetAgentKeys, ask, pack

_MARK = "@"


def agent_name(vehicle: object) -> str:
    """Return a name for the agent that a vehicle brings.

    Another one each time: a job that the batch system has started again has the name of the old
    one, whose agent may still be known.
    """
    return f"{vehicle}{_MARK}{secrets.token_hex(4)}"


def vehicle_of(agent: object) -> str:
    """Return the name of the vehicle that brought an agent; "" for what is no such agent."""
    return str(agent).rpartition(_MARK)[0]


class Vehicle(WorkerPlugin):
    """Makes a Dask worker a vehicle; the arguments are settings of its pool."""

    name = "taas-vehicle"

    def __init__(
        self,
        interface: str,
        lease_s: float,
        start_timeout_s: float,
        preload: Sequence[str] = (),
    ) -> None:
        self._interface, self._lease_s = interface, lease_s
        self._start_timeout_s = start_timeout_s
        self._preload = list(preload)
        self._supervisor: asyncio.subprocess.Process | None = None
        self._following: asyncio.Task[None] | None = None

    async def setup(self, worker: Worker) -> None:
        """Start the host; called by Dask when a worker has joined, also an agent: left alone."""
        if vehicle_of(worker.name):
            return
        try:
            await self._start(worker)
        except OSError:
            self._leave(worker, "its supervisor could not be started")
            raise

    async def teardown(self, worker: Worker) -> None:
        """End the host; called by Dask when the worker closes."""
        if self._supervisor is None or self._following is None:
            return
        self._following.cancel()
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.close()
        try:
            await asyncio.wait_for(self._supervisor.wait(), HOST_END_S)
        except asyncio.TimeoutError:
            self._supervisor.kill()

    async def _start(self, worker: Worker) -> None:
        worker.http_server.stop()  # Dask's web pages would ask nobody for a key
        if not worker.nanny:
            for listener in worker.listeners:
                listener.stop()  # all vehicles of a pool have one key
        agent = await ask(worker.scheduler, GetAgentKeys(str(worker.name)))
        self._supervisor = await asyncio.create_subprocess_exec(
            *spawn_command("taas_magic.host.supervisor"),
            *supervisor_arguments(None, self._preload),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert self._supervisor.stdin is not None
        settings = AgentSettings(
            scheduler=worker.scheduler.address,
            security=agent.security,
            name=agent.name,
            interface=self._interface,
            local_directory=worker.local_directory,
            lease_s=self._lease_s,
            start_timeout_s=self._start_timeout_s,
        )
        self._supervisor.stdin.write(pack(settings) + b"\n")
        self._following = asyncio.create_task(self._follow(worker, self._supervisor))

    async def _follow(self, worker: Worker, supervisor: asyncio.subprocess.Process) -> None:
        """End the vehicle with its agent, so that the batch system gets the host back."""
        code = await supervisor.wait()
        self._leave(worker, f"its agent ended with exit code {code}")

    def _leave(self, worker: Worker, why: str) -> None:
        worker.loop.add_callback(worker.close, reason=f"taas-vehicle: {why}")
