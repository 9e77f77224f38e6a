"""The pool's Dask scheduler and its port: authentication of peers and checks of their messages.

The pool uses Dask's scheduler for two things only: to know which peers are connected, and to
exchange messages with them. Dask's own listener unpickles messages before it checks them. `Gate`
replaces that listener, and enforces three rules:

- A connection must prove its certificate and complete Dask's handshake within `PROVE_S`. A flood of
  silent connections does not prevent others from connecting (`MOST_UNPROVED`).
- A message must be plain data: one frame of msgpack. The gate also refuses pickles that Dask would
  forward to another process without unpickling them.
- A host may send only the operations in `ALLOWED_OPERATIONS`, and only in its own name.
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
from taas_magic.messages import GetAgentKeys, leaf_subclasses
from taas_magic.store.requests import FileRequest

PROVE_S = 10.0
"""Maximum seconds in which the peer of a new connection must complete the handshakes.

These are the TLS handshake, in which the peer proves its certificate, and Dask's handshake.
"""

MOST_UNPROVED = 128
"""Maximum number of connections that are not authenticated yet.

If more arrive, the gate closes the oldest of them.
"""

MOST_BYTES = 1 << 30
"""Maximum size in bytes of one message from a peer. The gate refuses larger messages."""

BACKLOG = 2048
"""Maximum number of connections that wait until the pool's process accepts them."""

_JOINING = frozenset({"register-worker", "heartbeat_worker", "close"})
_OF_DASK = frozenset({"keep-alive", "worker-status-change", "log-event", "close-stream"})
_OF_FILES = {kind.op() for kind in leaf_subclasses(FileRequest)}
ALLOWED_OPERATIONS: Mapping[PeerRole, frozenset[str]] = {
    PeerRole.HOST: _JOINING | _OF_DASK | {ANSWER, EVENT, BEAT} | _OF_FILES,
    PeerRole.VEHICLE: _JOINING | _OF_DASK | {GetAgentKeys.op(), "register_nanny"},
}
"""Names of Dask's and our operations that a peer may send, by the peer's role.

A kernel has no entry: it belongs to the user and may send every operation.
"""

_PRELUDE = struct.Struct("QQQ")
"""Header of a Dask message with one frame: three unsigned 64-bit numbers.

They are the number of bytes after the first number, the number of frames, and the size of the frame
in bytes.
"""

_MARKS = frozenset({"__Pickled__", "__Serialized__", "__Enum__"})
"""Dict keys by which Dask marks values that are not plain data.

The gate refuses messages that contain one of these keys.
"""

logger = logging.getLogger("taas.gate")


class GateComm(TLS):
    """A TLS connection whose peer is authenticated and whose messages are checked.

    Attributes:
        peer: Role and name of the peer, from its certificate.
        gate: The gate that accepted the connection.
    """

    peer: Peer
    gate: "Gate"

    async def read(self, deserializers: Any = None) -> Any:
        """Read one message. Check that the message is plain data, and that this peer may send it.

        If the message is not plain data or is forbidden, close the connection, add 1 to
        `gate.refused`, and log the reason.

        Raises:
            CommClosedError: The connection has ended, or the message broke a rule.
        """
        try:
            message = decode_plain(await self._frame())
            check_message(self.peer, message)
        except ProtocolError as error:
            self.abort()
            self.gate.refused += 1
            logger.warning("%s at %s: %s", self.peer, self.peer_address, error)
            raise CommClosedError(str(error)) from error
        return message

    async def _frame(self) -> memoryview:
        """Read the header and the only frame of a message; return the frame.

        If the connection breaks or the caller's task is cancelled, close the connection.

        Raises:
            CommClosedError: The connection has ended.
            ProtocolError: The message has several frames or is too large.
        """
        if self.stream is None:
            raise CommClosedError("the connection has ended")
        try:
            begin = await self.stream.read_bytes(_PRELUDE.size)
            frame: memoryview = await read_bytes_rw(self.stream, frame_size(begin))
        except (StreamClosedError, ssl.SSLError) as error:
            self.abort()
            raise CommClosedError(str(error)) from error
        except asyncio.CancelledError:
            self.abort()  # part of the message has been read and is lost
            raise
        return frame


def frame_size(begin: bytes) -> int:
    """Return the size in bytes of a message's only frame, which follows the header `begin`.

    Raises:
        ProtocolError: The message is larger than `MOST_BYTES`. Or it has several frames, so it may
            contain a pickle.
    """
    following, frames, size = _PRELUDE.unpack(begin)
    if frames != 1 or following != size + 16:
        raise ProtocolError("it sent more than plain data")
    if size > MOST_BYTES:
        raise ProtocolError(f"it announced a message of {size:,} bytes")
    return int(size)


def decode_plain(frame: Any) -> Any:
    """Decode one msgpack frame, without unpickling anything; return the message.

    Raises:
        ProtocolError: The frame is not msgpack, or contains values that are not plain data.
    """
    try:
        return msgpack.unpackb(frame, object_hook=_refuse_marks, use_list=False, **msgpack_opts)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"it sent something that is not a message: {error}") from error


def _refuse_marks(values: dict[Any, Any]) -> Any:
    if "__Set__" in values:
        return set(values["as-list"])
    if found := _MARKS.intersection(key for key in values if isinstance(key, str)):
        raise ProtocolError(f"it sent more than plain data ({', '.join(sorted(found))})")
    return values


def check_message(peer: Peer, message: Any) -> None:
    """Check that `peer` may send `message`.

    Check every part of the message that names an operation. A kernel may send everything.

    Raises:
        ProtocolError: An operation is not in `ALLOWED_OPERATIONS` for the peer's role. Or a part
            has the field `worker`, by which a peer could use another peer's name. Or a host
            registers under another name than its certificate has.
    """
    may = ALLOWED_OPERATIONS.get(peer.role)
    if may is None:
        return
    for part in message if isinstance(message, tuple) else (message,):
        if not isinstance(part, dict) or "op" not in part:
            continue
        op, name = part["op"], part.get("name")
        if op not in may:
            raise ProtocolError(f"a {peer.role.value} may not ask for {op!r}")
        if "worker" in part:  # Dask would trust this name instead of the stream's own peer
            raise ProtocolError(f"it sent a message in the name of {part['worker']!r}")
        joins = op == "register-worker" and peer.role is PeerRole.HOST
        if joins and str(name) != peer.name:
            raise ProtocolError(f"it tried to join as {name!r}")


class Gate(Listener):
    """Dask listener that authenticates each connection to the pool's port.

    Args:
        admit: Coroutine function that serves one authenticated connection until it ends.
        handshake: Extra fields of Dask's handshake message.
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
        self._server = _Server(self._serve_connection, ssl_options=ssl_context)
        self._unproved: dict[IOStream, None] = {}
        self.refused = 0
        """Number of connections that failed to authenticate, or whose messages broke a rule."""

    async def start(self) -> None:
        """Open the pool's port and listen on it. Called by Dask.

        If the address has port 0, the operating system chooses the port.
        """
        sockets = bind_sockets(self._port, address=self._host, backlog=BACKLOG)
        self._host, self._port = sockets[0].getsockname()[:2]
        self._server.add_sockets(sockets)

    def stop(self) -> None:
        """Close the pool's port, and all connections that are not authenticated yet.

        Called by Dask.
        """
        self._server.stop()
        for stream in list(self._unproved):
            stream.close()

    @property
    def listen_address(self) -> str:
        """The address on which the pool's process listens, as "tls://host:port"."""
        return self.prefix + str(unparse_host_port(self._host, self._port))

    @property
    def contact_address(self) -> str:
        """The address to which peers connect, as "tls://host:port"; equal to `listen_address`."""
        return self.listen_address

    async def _serve_connection(self, stream: IOStream, address: Any) -> None:
        """Authenticate a new connection within `PROVE_S`, then serve it until it ends.

        First, if more than `MOST_UNPROVED` connections are not authenticated yet, close the oldest
        of them. If the authentication fails, close the connection and add 1 to `refused`.
        """
        self._unproved[stream] = None
        if len(self._unproved) > MOST_UNPROVED:
            oldest = next(iter(self._unproved))
            del self._unproved[oldest]
            oldest.close()
        try:
            comm = await asyncio.wait_for(self._authenticate(stream, address), PROVE_S)
        except (OSError, ValueError, TypeError, KeyError, asyncio.TimeoutError) as error:
            self.refused += 1
            logger.info("a connection from %s was not authenticated: %r", address, error)
            stream.close()
            return
        finally:
            self._unproved.pop(stream, None)
        await self._admit(comm)

    async def _authenticate(self, stream: IOStream, address: Any) -> GateComm:
        """Wait for the TLS handshake, then complete Dask's handshake; return the connection.

        The attribute `peer` of the returned connection has the role and name from the peer's
        certificate.
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
    def __init__(
        self, serve_connection: Callable[[IOStream, Any], Awaitable[None]], **options: Any
    ) -> None:
        super().__init__(**options)
        self._serve_connection = serve_connection

    async def handle_stream(self, stream: IOStream, address: Any) -> None:
        await self._serve_connection(stream, address)


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
"""Names of the calls of Dask's scheduler that our clients, clusters and workers need.

`PoolScheduler` removes all other calls, such as `run_function`, so that no peer can use them.
"""

STREAM_HANDLERS = (
    "keep-alive",
    "worker-status-change",
    "heartbeat-client",
    "close-client",
    "client-releases-keys",
    "subscribe-topic",
)
"""Names of Dask's messages without a response that our clients and workers need.

`PoolScheduler` removes the handlers of all other messages, so that no peer can use them.
"""

JOINS_WITH = ("address", "name", "status", "server_id", "stimulus_id", "now")
"""Fields of a worker's registration that `PoolScheduler.add_worker` passes to Dask.

Constants replace all other fields. Otherwise, a hostile worker could affect other workers by its
values of these fields.
"""

METRICS: Mapping[str, Any] = {
    "bandwidth": {"total": 1e8, "workers": {}, "types": {}},
    "memory": 0,
    "spilled_bytes": {"memory": 0, "disk": 0},
    "digests_total_since_heartbeat": {},
}
"""Constants that Dask gets as the metrics of every worker, instead of the worker's own metrics.

These constants have no effect, because the pool's Dask cluster runs no tasks.
"""

_versions = functools.cache(get_versions)


class PoolScheduler(Scheduler):
    """Dask scheduler of a pool: it only connects peers and passes messages between them.

    It runs no tasks and no functions, and opens no port for web pages. Its port is a `Gate`.
    """

    handlers: dict[str, Any]
    stream_handlers: dict[str, Any]

    def __init__(self, **options: Any) -> None:
        super().__init__(extensions={}, **options)
        self.handlers = {name: self.handlers[name] for name in HANDLERS}
        self.handlers["heartbeat_worker"] = self.on_heartbeat
        self.stream_handlers = {name: self.stream_handlers[name] for name in STREAM_HANDLERS}
        self.stream_handlers["log-event"] = lambda **message: None

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Open no port for web pages, because it would have no authentication. Called by Dask."""

    @property
    def refused(self) -> int:
        """Number of connections that failed to authenticate, or whose messages broke a rule."""
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
        """Open the pool's port with a `Gate` as its listener. Called by Dask."""
        gate = Gate(port_or_addr, self.handle_comm, ssl_context, handshake_overrides or {})
        await gate.start()
        self.listeners.append(gate)

    async def add_worker(
        self,
        comm: GateComm,
        *,
        nanny: str,
        extra: Mapping[str, Any],
        **fields: Any,
    ) -> None:
        """Register a host's agent, or the Dask worker of a vehicle. Called by Dask.

        `check_message` has already verified the agent's name. The `add_worker` of Dask's scheduler
        gets these fields:

        - the fields in `JOINS_WITH`
        - for an agent, the mark `AGENT`
        - for a vehicle, its nanny
        - constants in place of all other fields

        The constants are necessary because Dask uses these fields also when the next worker joins.
        So a hostile worker could affect the next worker.

        Raises:
            ProtocolError: A vehicle registers as an agent.
        """
        is_agent = comm.peer.role is PeerRole.HOST
        if AGENT in extra and not is_agent:
            raise ProtocolError(f"a {comm.peer.role.value} tried to join as an agent")
        await super().add_worker(
            comm,
            **{name: fields[name] for name in JOINS_WITH},
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

    def on_heartbeat(self, comm: GateComm, *, address: str, **fields: Any) -> dict[str, Any]:
        """Pass a worker's heartbeat to Dask without the metrics that the worker reports.

        Returns:
            Dask's response to the worker.

        Raises:
            ProtocolError: A host sent a heartbeat in the name of another host.
        """
        known = self.workers.get(self.coerce_address(address))
        if known and comm.peer.role is PeerRole.HOST and str(known.name) != comm.peer.name:
            raise ProtocolError(f"{comm.peer} sent a message in the name of {known.name}")
        beat: dict[str, Any] = self.heartbeat_worker(address=address, metrics=METRICS)
        return beat
