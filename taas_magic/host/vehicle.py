"""Dask plugin that starts taas-magic's processes on the hosts that a Dask cluster class provides.

Batch systems and clouds start plain Dask workers, through Dask cluster classes that do not know
this package. Such a worker is called a vehicle, because it only brings our agent to the host. Dask
installs the plugin `Vehicle` in every worker that joins the pool's scheduler. The plugin starts the
supervisor, and the supervisor's agent joins the pool as a separate worker. When a vehicle ends for
any reason, the supervisor ends all processes of taas-magic on the host.

Vehicles and engines import this module. They do not need the agent's modules, so this module must
not import the agent's modules.
"""

import asyncio
import os
import secrets
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from distributed import Worker, WorkerPlugin

from taas_magic.host.system import spawn_command, supervisor_arguments
from taas_magic.leases import HOST_END_S
from taas_magic.messages import AgentSettings, GetAgentKeys, send_request, to_json

_MARK = "@"

EXIT_S = 3 * HOST_END_S
"""Seconds that a vehicle's process may continue after its supervisor has ended.

Then a timer ends the process.
"""


def agent_name(vehicle: object) -> str:
    """Return a new name, with a random part, for the agent that a vehicle starts.

    If the batch system restarts a job, the new vehicle has the old vehicle's name. The random part
    distinguishes the new vehicle's agent from the old vehicle's agent, which the pool may still
    know.

    Args:
        vehicle: Dask's name of the vehicle.
    """
    return f"{vehicle}{_MARK}{secrets.token_hex(4)}"


def vehicle_of(agent: object) -> str:
    """Return the name of the vehicle that started an agent.

    Args:
        agent: Dask's name of the agent. For any name that `agent_name` has not made, the result is
            "".
    """
    return str(agent).rpartition(_MARK)[0]


class Vehicle(WorkerPlugin):
    """Dask plugin that starts a supervisor on a vehicle's host.

    When the vehicle ends, the plugin ends the supervisor. When the supervisor ends, the plugin
    closes the vehicle.

    Args:
        interface: The pool's `interface` setting; "" if there is none.
        preload: Modules that the pool's settings add to the forkserver's imports.
    """

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
        """Start the supervisor. Dask calls this method when a worker has joined the scheduler.

        If the supervisor cannot be started, closes the worker and raises OSError. Does nothing in
        an agent, for which Dask also calls this method.
        """
        if vehicle_of(worker.name):
            return
        try:
            await self._start_supervisor(worker)
        except OSError:
            self._close_worker(worker, "its supervisor could not be started")
            raise

    async def teardown(self, worker: Worker) -> None:
        """End the supervisor and all processes that it has started.

        Dask calls this method when the worker closes. If no supervisor was started, do nothing.

        1. Cancel the task of `_follow`. If this process is a `dask` command without a nanny, the
           cancelled task starts a timer that ends this process after `EXIT_S` seconds.
        2. Close the supervisor's standard input, which makes the supervisor end.
        3. Kill the supervisor if it has not ended after `HOST_END_S` seconds.
        """
        if self._supervisor is None or self._following is None:
            return
        # This runs the `finally` of `_follow`, which may start a timer that ends this process.
        self._following.cancel()
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.close()
        try:
            await asyncio.wait_for(self._supervisor.wait(), HOST_END_S)
        except asyncio.TimeoutError:
            self._supervisor.kill()

    async def _start_supervisor(self, worker: Worker) -> None:
        """Get the agent's name and keys from the pool's process, and start the supervisor.

        First stops the worker's web server. If the worker has no nanny, also closes the port at
        which other vehicles could connect to the worker. After the start, sends the agent's
        settings to the supervisor's standard input. Last, starts a task that closes the worker when
        the supervisor ends.
        """
        worker.http_server.stop()  # Dask's web pages have no authentication
        if not worker.nanny:
            for listener in worker.listeners:
                listener.stop()  # all vehicles share one key, so each could connect to the others
        agent = await send_request(worker.scheduler, GetAgentKeys(str(worker.name)))
        self._supervisor = await asyncio.create_subprocess_exec(
            *spawn_command("taas_magic.host.supervisor"),
            *supervisor_arguments(None, self._start_timeout_s, self._preload),
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
        self._supervisor.stdin.write(to_json(settings) + b"\n")
        self._following = asyncio.create_task(self._follow(worker, self._supervisor))

    async def _follow(self, worker: Worker, supervisor: asyncio.subprocess.Process) -> None:
        """Wait for the end of the supervisor; then close the vehicle, which frees the host.

        If this process is a `dask` command without a nanny, this method first starts a timer that
        ends the whole process after `EXIT_S` seconds. The timer also starts when `teardown` cancels
        this task.
        """
        try:
            code = await supervisor.wait()
        finally:
            # A nanny ends its worker itself. If another program runs the worker in its own process,
            # such as a local Dask cluster, the program must go on.
            if not worker.nanny and _is_dask_command():
                _start_exit_timer()
        self._close_worker(worker, f"its agent ended with exit code {code}")

    def _close_worker(self, worker: Worker, why: str) -> None:
        worker.loop.add_callback(worker.close, reason=f"taas-vehicle: {why}")


def _is_dask_command() -> bool:
    spec = sys.modules["__main__"].__spec__
    return "dask" in (spec.name if spec is not None else Path(sys.argv[0]).name)


def _start_exit_timer() -> None:
    """Start a timer that ends the vehicle's process, which runs this code, after `EXIT_S` seconds.

    Without the timer, the vehicle's process might never end. Its event loop may wait forever for a
    heartbeat of Dask, if the pool's process ended before the vehicle's process got SIGTERM. The
    batch system cannot end the vehicle's process: the shell that started the vehicle has ended, and
    without this shell the batch system does not find the vehicle.
    """
    timer = threading.Timer(EXIT_S, os._exit, (1,))
    timer.daemon = True
    timer.start()
