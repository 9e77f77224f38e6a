"""The Dask scheduler of a pool: membership and streams, and nothing else that Dask offers."""

import functools
from collections.abc import Mapping
from typing import Any

from distributed import Scheduler
from distributed.versions import get_versions

from taas_magic.engines.keys import PeerRole
from taas_magic.errors import ProtocolError
from taas_magic.host.spec import AGENT
from taas_magic.pool.gate import Gate, GateComm

HANDLERS = (
    "identity",
    "register-client",
    "register-worker",
    "register_nanny",
    "retire_workers",
    "subscribe_worker_status",
    "get_metadata",
    "set_metadata",
    "terminate",
)
"""Of Dask's calls, those that clients, clusters and workers need; `run_function` is not one."""

STREAM_HANDLERS = (
    "keep-alive",
    "worker-status-change",
    "heartbeat-client",
    "close-client",
    "client-releases-keys",
    "subscribe-topic",
    "unsubscribe-topic",
)

METRICS: Mapping[str, Any] = {
    "bandwidth": {"total": 1e8, "workers": {}, "types": {}},
    "memory": 0,
    "spilled_bytes": {"memory": 0, "disk": 0},
    "digests_total_since_heartbeat": {},
}
"""What Dask is told of every worker's load: it schedules nothing here."""

_versions = functools.cache(get_versions)


class HeadScheduler(Scheduler):
    """A scheduler that runs no tasks and no functions, and has no web pages.

    Those would listen on a port that asks nobody for a key.
    """

    handlers: dict[str, Any]
    stream_handlers: dict[str, Any]

    def __init__(self, **options: Any) -> None:
        super().__init__(extensions={}, **options)
        self.handlers = {name: self.handlers[name] for name in HANDLERS}
        self.handlers["heartbeat_worker"] = self.take_heartbeat
        self.stream_handlers = {name: self.stream_handlers[name] for name in STREAM_HANDLERS}
        self.stream_handlers["log-event"] = lambda **said: None

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Opens no port."""

    @property
    def refused(self) -> int:
        """Connections that the pool's port refused."""
        return sum(listener.refused for listener in self.listeners)

    async def listen(
        self,
        port_or_addr: Any = None,
        allow_offload: bool = True,
        *,
        ssl_context: Any = None,
        handshake_overrides: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Opens the pool's port; see `gate`."""
        gate = Gate(port_or_addr, self.handle_comm, ssl_context, handshake_overrides or {})
        await gate.start()
        self.listeners.append(gate)

    async def add_worker(
        self,
        comm: GateComm,
        *,
        address: str,
        name: str,
        status: str,
        server_id: str,
        stimulus_id: str,
        now: float,
        nanny: str,
        extra: Mapping[str, Any],
        **said: Any,
    ) -> None:
        """Called when an agent or a vehicle joins; `gate` has checked the agent's name.

        What it says of itself besides is replaced: Dask reckons with it when others join.

        Raises:
            ProtocolError: It is a vehicle that says it is an agent.
        """
        is_agent = comm.peer.role is PeerRole.HOST
        if AGENT in extra and not is_agent:
            raise ProtocolError(f"a {comm.peer.role.value} wanted to join as an agent")
        await super().add_worker(
            comm,
            address=address,
            name=name,
            status=status,
            server_id=server_id,
            stimulus_id=stimulus_id,
            now=now,
            nanny=None if is_agent else nanny,
            extra={AGENT: True} if is_agent else {},
            metrics=METRICS,
            versions=_versions(),
            nthreads=1,
            resources={},
            services={},
            memory_limit=0,
            local_directory="",
        )

    def take_heartbeat(self, comm: GateComm, *, address: str, **said: Any) -> dict[str, Any]:
        """Takes that a worker lives, and nothing of what it says of itself.

        Raises:
            ProtocolError: It is another host's worker.
        """
        known = self.workers.get(self.coerce_address(address))
        if known and comm.peer.role is PeerRole.HOST and str(known.name) != comm.peer.name:
            raise ProtocolError(f"{comm.peer} spoke for {known.name}")
        beat: dict[str, Any] = self.heartbeat_worker(address=address, metrics=METRICS)
        return beat
