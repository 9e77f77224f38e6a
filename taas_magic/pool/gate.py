"""The pool's Dask scheduler and its port: who may come in, what may be said there, by whom.

The scheduler has membership and streams, and nothing else that Dask offers. Dask's own listener
unpickles what it receives before anybody has looked at it, and knows no bound on connections that
have not proved a certificate. `Gate` listens in its place (`Server.listen` and `Server.listeners`
are Dask's own extension points). It holds three rules:

- A connection proves its certificate and says hello within `PROVE_S`; of those that have not, the
  newest `MOST_UNPROVED` are kept, so that a crowd that says nothing keeps nobody out.
- A message is plain data, one frame of msgpack. Pickles, and what Dask passes on to be unpickled
  elsewhere, are refused, whoever sends them.
- A host says only what `MAY` lists, and only of itself.
"""

import asyncio
import functools
import logging
import ssl
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgpack
from distributed import Scheduler
from distributed.comm import CommClosedError, parse_host_port, unparse_host_port
from distributed.comm.core import Listener
from distributed.comm.tcp import TLS, read_bytes_rw
from distributed.protocol.utils import msgpack_opts
from distributed.versions import get_versions
from tornado.iostream import IOStream, SSLIOStream, StreamClosedError
from tornado.netutil import bind_sockets
from tornado.tcpserver import TCPServer

from taas_magic.engines.keys import Peer, PeerRole
from taas_magic.errors import ProtocolError
from taas_magic.host.spec import AGENT, ANSWER, BEAT, EVENT
from taas_magic.messages import GetAgentKeys, leaves
from taas_magic.store.manifest import FileRequest

PROVE_S = 10.0
"""How long a new connection may take to prove who it is, all in all."""

MOST_UNPROVED = 128
"""Connections that have not proved yet; one more ends the oldest."""

MOST_BYTES = 1 << 30
"""Of one message."""

BACKLOG = 2048

_JOINING = frozenset({"register-worker", "heartbeat_worker", "close"})
_OF_DASK = frozenset({"keep-alive", "worker-status-change", "log-event", "close-stream"})
_OF_FILES = {kind.op() for kind in leaves(FileRequest)}
MAY: Mapping[PeerRole, frozenset[str]] = {
    PeerRole.HOST: _JOINING | _OF_DASK | {ANSWER, EVENT, BEAT} | _OF_FILES,
    PeerRole.VEHICLE: _JOINING | _OF_DASK | {GetAgentKeys.op(), "register_nanny"},
}
"""What each may ask for or say; a kernel is the user's own and may ask for all that there is."""

_PRELUDE = struct.Struct("QQQ")
"""How a message of one frame begins: bytes that follow, frames, bytes of the first frame."""

_MARKS = frozenset({"__Pickled__", "__Serialized__", "__Enum__"})
"""How Dask marks what is more than plain data."""

logger = logging.getLogger("taas.gate")


class GateComm(TLS):
    """A connection whose peer is known; messages that break a rule end it."""

    peer: Peer
    gate: "Gate"

    async def read(self, deserializers: Any = None) -> Any:
        """Read a message that is plain data, and that this peer may send.

        Raises:
            CommClosedError: The connection has ended, or the message broke a rule.
        """
        try:
            message = plain(await self._frame())
            check(self.peer, message)
        except ProtocolError as error:
            self.abort()
            self.gate.refused += 1
            logger.warning("%s at %s: %s", self.peer, self.peer_address, error)
            raise CommClosedError(str(error)) from error
        return message

    async def _frame(self) -> memoryview:
        if self.stream is None:
            raise CommClosedError("the connection has ended")
        try:
            begin = await self.stream.read_bytes(_PRELUDE.size)
            frame: memoryview = await read_bytes_rw(self.stream, size_of(begin))
        except (StreamClosedError, ssl.SSLError) as error:
            self.abort()
            raise CommClosedError(str(error)) from error
        except asyncio.CancelledError:
            self.abort()  # what was read of the message is lost
            raise
        return frame


def size_of(begin: bytes) -> int:
    """Read how long a message is.

    Raises:
        ProtocolError: It has more than one frame, as pickles have, or is too large.
    """
    following, frames, size = _PRELUDE.unpack(begin)
    if frames != 1 or following != size + 16:
        raise ProtocolError("it sent more than plain data")
    if size > MOST_BYTES:
        raise ProtocolError(f"it announced a message of {size:,} bytes")
    return int(size)


def plain(frame: Any) -> Any:
    """Decode a message of plain data.

    Raises:
        ProtocolError: It is none.
    """
    try:
        return msgpack.unpackb(frame, object_hook=_refuse_marks, use_list=False, **msgpack_opts)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"it sent what is no message: {error}") from error


def _refuse_marks(values: dict[Any, Any]) -> Any:
    if "__Set__" in values:
        return set(values["as-list"])
    if found := _MARKS.intersection(key for key in values if isinstance(key, str)):
        raise ProtocolError(f"it sent more than plain data ({', '.join(sorted(found))})")
    return values


def check(peer: Peer, message: Any) -> None:
    """Make sure that a peer may send a message.

    Raises:
        ProtocolError: It may not.
    """
    may = MAY.get(peer.role)
    if may is None:
        return
    for part in message if isinstance(message, tuple) else (message,):
        if not isinstance(part, dict) or "op" not in part:
            continue
        op, name = part["op"], part.get("name")
        if op not in may:
            raise ProtocolError(f"a {peer.role.value} may not ask for {op!r}")
        if "worker" in part:  # Dask would believe it more than whose stream it is
            raise ProtocolError(f"it spoke for {part['worker']!r}")
        joins = op == "register-worker" and peer.role is PeerRole.HOST
        if joins and str(name) != peer.name:
            raise ProtocolError(f"it wanted to join as {name!r}")


class Gate(Listener):
    """Listens on the pool's port.

    Args:
        admit: Called with each connection that has come in.
        handshake: What Dask's hello says besides.
    """

    prefix = "tls://"

    def __init__(
        self,
        address: str,
        admit: Callable[[GateComm], Awaitable[None]],
        ssl_context: ssl.SSLContext,
        handshake: Mapping[str, Any],
    ) -> None:
        self._host, self._port = parse_host_port(address.removeprefix(self.prefix), 0)
        self._admit, self._handshake = admit, handshake
        self._server = _Server(self._come, ssl_options=ssl_context)
        self._unproved: dict[IOStream, None] = {}
        self.refused = 0
        """Connections that did not prove who they are, or whose messages broke a rule."""

    async def start(self) -> None:
        """Listen; the system chooses the port where the address has 0. Called by Dask."""
        sockets = bind_sockets(self._port, address=self._host, backlog=BACKLOG)
        self._host, self._port = sockets[0].getsockname()[:2]
        self._server.add_sockets(sockets)

    def stop(self) -> None:
        """Listen no more, and end the connections that have not proved who they are."""
        self._server.stop()
        for stream in list(self._unproved):
            stream.close()

    @property
    def listen_address(self) -> str:
        """Where it listens, as "tls://host:port"."""
        return self.prefix + str(unparse_host_port(self._host, self._port))

    @property
    def contact_address(self) -> str:
        """The same: others reach it where it listens."""
        return self.listen_address

    async def _come(self, stream: IOStream, address: Any) -> None:
        """Take a new connection, from its first byte to its end."""
        self._unproved[stream] = None
        if len(self._unproved) > MOST_UNPROVED:
            oldest = next(iter(self._unproved))
            del self._unproved[oldest]
            oldest.close()
        try:
            comm = await asyncio.wait_for(self._prove(stream, address), PROVE_S)
        except (OSError, ValueError, TypeError, KeyError, asyncio.TimeoutError) as error:
            self.refused += 1
            logger.info("a connection from %s proved nothing: %r", address, error)
            stream.close()
            return
        finally:
            self._unproved.pop(stream, None)
        await self._admit(comm)

    async def _prove(self, stream: IOStream, address: Any) -> GateComm:
        """Return the connection once its certificate is proved and hello is said.

        Raises:
            OSError: It went wrong, or the connection was ended.
            ValueError: Its certificate, or its hello, does not say what it should.
        """
        assert isinstance(stream, SSLIOStream)
        await stream.wait_for_handshake()
        ours, theirs = self.listen_address, self.prefix + unparse_host_port(*address[:2])
        comm = GateComm(stream, ours, theirs, deserialize=False)
        comm.gate, comm.peer = self, Peer.of(comm.extra_info["peercert"])
        comm.allow_offload = False
        await self.on_connection(comm, handshake_overrides=dict(self._handshake))
        return comm


class _Server(TCPServer):
    """Hands connections to a coroutine."""

    def __init__(self, come: Callable[[IOStream, Any], Awaitable[None]], **options: Any) -> None:
        super().__init__(**options)
        self._come = come

    async def handle_stream(self, stream: IOStream, address: Any) -> None:
        await self._come(stream, address)


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
)

JOINS_WITH = ("address", "name", "status", "server_id", "stimulus_id", "now")
"""What a worker may say of itself when it joins."""

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
        """Open no port."""

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
        """Open the pool's port, as Dask asks for it."""
        gate = Gate(port_or_addr, self.handle_comm, ssl_context, handshake_overrides or {})
        await gate.start()
        self.listeners.append(gate)

    async def add_worker(
        self,
        comm: GateComm,
        *,
        nanny: str,
        extra: Mapping[str, Any],
        **said: Any,
    ) -> None:
        """Let an agent or a vehicle join; `check` has seen to the agent's name.

        What it says of itself besides is replaced: Dask reckons with it when others join.

        Raises:
            ProtocolError: It is a vehicle that says it is an agent.
        """
        is_agent = comm.peer.role is PeerRole.HOST
        if AGENT in extra and not is_agent:
            raise ProtocolError(f"a {comm.peer.role.value} wanted to join as an agent")
        await super().add_worker(
            comm,
            **{name: said[name] for name in JOINS_WITH},
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
        """Take that a worker lives, and nothing of what it says of itself.

        Raises:
            ProtocolError: It is another host's worker.
        """
        known = self.workers.get(self.coerce_address(address))
        if known and comm.peer.role is PeerRole.HOST and str(known.name) != comm.peer.name:
            raise ProtocolError(f"{comm.peer} spoke for {known.name}")
        beat: dict[str, Any] = self.heartbeat_worker(address=address, metrics=METRICS)
        return beat
