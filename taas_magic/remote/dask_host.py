"""The agent as a member of a Dask cluster: what it answers to, and how its events leave.

Dask gives membership, heartbeats, TLS and the event stream. Runs do not come as Dask tasks but as
calls of the keeper, which alone knows whether all hosts of a run are there (docs/decisions.md).
"""

import gc
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from distributed import Security, Worker

from taas_magic.journal import Event
from taas_magic.remote import guard
from taas_magic.remote.host_run import HostRun
from taas_magic.remote.spec import HostSpec
from taas_magic.remote.topics import CALL_HELLO, CALL_START, CALL_STOP, topic


class AgentWorker(Worker):
    """The agent; one a host. It takes no Dask tasks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, nthreads=1, memory_limit=0, **kwargs)
        self.handlers[CALL_HELLO] = self.hello
        self.handlers[CALL_START] = self.start_run
        self.handlers[CALL_STOP] = self.stop_run
        self._host_name: str = socket.gethostname()
        self._runs: dict[str, HostRun] = {}

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Opens no port for Dask's web pages: they would ask nobody for a key."""

    async def hello(self) -> dict[str, str]:
        """The host's name, as the notebook shows it, and what holds its ranks off the store."""
        return {"host": self._host_name, "means": guard.strongest().value}

    async def start_run(self, spec: dict[str, Any]) -> str:
        """Starts this host's share of a run, in a thread of its own.

        Args:
            spec: A `HostSpec` as plain values.
        """
        parsed = HostSpec.from_json(spec)
        run_id = parsed.plan.run_id
        run = HostRun(parsed, self._host_name, self._sender(run_id), self._is_alone)
        self._runs[run_id] = run
        thread = threading.Thread(target=self._carry_out, args=(run_id, run), name=f"run-{run_id}")
        thread.start()
        return "started"

    async def stop_run(self, run_id: str, how: str) -> str:
        """Interrupts or kills a run; one that is not here has ended already."""
        run = self._runs.get(run_id)
        if run is not None:
            run.stop(how)
        return "stopping" if run else "not here"

    def _carry_out(self, run_id: str, run: HostRun) -> None:
        try:
            run.run()
        finally:
            del self._runs[run_id]

    def _sender(self, run_id: str) -> Callable[[Event], None]:
        return lambda event: self.log_event(topic(run_id), event)

    def _is_alone(self) -> bool:
        return len(self._runs) == 1


async def serve(settings: Mapping[str, Any], warm: Callable[[], None]) -> None:
    """Joins the pool when this host is warm; returns when the pool has closed or lost it.

    Args:
        settings: `scheduler` (address), `security` (keyword arguments of dask's Security), `name`,
            `interface_address` (what to listen on), `local_directory`.
        warm: Blocks until ranks can start.
    """
    logging.getLogger("distributed").setLevel(logging.WARNING)
    guard.strongest()  # found while the forkserver imports
    warm()
    gc.collect()
    gc.freeze()  # what was imported never goes, so collections after runs need not look at it
    agent = AgentWorker(
        settings["scheduler"],
        name=settings["name"],
        security=Security(**settings["security"]),
        host=settings["interface_address"],
        local_directory=settings["local_directory"],
        death_timeout=30,
    )
    async with agent:
        await agent.finished()
