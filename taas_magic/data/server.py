"""The server of a fetcher: one thread that serves all connections of ranks and runs no user code.

Workers write batches into shared memory and report the offsets. When a rank requests a batch, the
server sends the batch from that memory. A rank on the same host can instead read the batch in the
shared memory.

The server never blocks, so a slow dataset, a slow rank or a peer that never authenticates delays no
other rank. In a run without fetchers, each rank starts its own servers (`RankServers`).
"""

import dataclasses
import errno
import itertools
import logging
import multiprocessing
import os
import pickle
import resource
import secrets
import selectors
import socket
import ssl
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from taas_magic.data import protocol
from taas_magic.data.connection import is_raised_by_cell
from taas_magic.data.encode import SUM_MASK
from taas_magic.data.protocol import (
    Cancel,
    FreeSpans,
    LoaderRequest,
    Proof,
    RequestKind,
    Requests,
    Response,
    ResponseKind,
    Role,
    SharedBody,
    SharedSpan,
)
from taas_magic.data.scheduler import PreparedResponse, Scheduler
from taas_magic.data.service import Tls, peer_uid
from taas_magic.data.sharding import VOID
from taas_magic.data.worker import ServedLoader, begin_process
from taas_magic.errors import ProtocolError, RunLost
from taas_magic.leases import ALIVE_S, PROOF_S
from taas_magic.messages import FetcherCounts

_MOST_UNPROVED = 512
"""Maximum number of connected peers that have not authenticated yet."""

_ACCEPT_AT_ONCE = 64
"""Maximum number of connections to accept in one step of the event loop."""

_SPARE_FILES = 64
"""Number of file descriptors that are reserved for everything except connections to ranks.

When no other descriptors are free, up to half of the reserved descriptors are used to accept peers
and reject them with a message.
"""

_BACKLOG = 4096
"""Number of connections that may wait at a listener until the server accepts them."""

_RECEIVE_BYTES = 64 << 10
"""Maximum number of bytes that one system call receives from a rank."""

_LENT_FROM_BYTES = 32 << 10
"""Minimum bytes of a body that a rank on this host reads in shared memory, not from the socket."""

_LENT_BYTES = 512 << 20
"""Maximum total bytes of the batches that one rank may keep in shared memory.

Above this limit, the server sends batches over the socket.
"""

_OUT_BYTES = 1 << 20
"""Bytes in a connection's output queue at which the server stops adding responses to the queue."""

_COPIED_BYTES = 8 << 10
"""Maximum bytes of a body that is copied, to send it in one part with its header.

For a small body, the copy takes less time than sending separate parts.
"""

_MOST_ALIKE = 64
"""Maximum number of small batches that share one header."""

_PARTS_AT_ONCE = 256
"""Maximum number of parts of a connection's queued output that one system call sends."""

_TLS_JOIN_BYTES = 16 << 10
"""Maximum total bytes of small parts that are joined into one TLS record, which holds 16 KiB."""

_NAME_BYTES = 64
"""Size limit, in bytes, of the message with the name of a server's Unix socket."""

_LOADER_BYTES = 1 << 16
"""Size limit, in bytes, of the message that asks the starter process for a server."""

_END_S = 5.0
"""Seconds to wait for the end of a server's process before killing the process."""

_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

_log = logging.getLogger(__name__)


_Form = tuple[ResponseKind, int, int, int, int]
"""Header fields that responses must have in common to share a header.

These are kind, epoch, units, order and head_bytes (see `Response`).
"""


class RankConnection:
    """Server's end of a connection to a rank, or to a peer that has not authenticated yet.

    Attributes:
        is_greeting: Whether the TLS handshake is still in progress.
        last_sent_at: Monotonic time of the latest data or `Alive` message sent to the rank. Set to
            the current time when a request arrives and no other request is pending.
        loader: Scheduler of the loader that the rank requested; None until the peer has
            authenticated.
        pending: Pending requests in order, each with True if only the batch's units are requested.
        out: Queued output. Each entry has bytes, a `PreparedResponse` to release after sending (or
            None), and a file descriptor to send with the bytes (or -1).
        lent: Batches that the rank reads in shared memory, by their position in the memory.
        arenas: Numbers of the arenas whose file descriptor this rank has received.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.tls = self.is_greeting = isinstance(sock, ssl.SSLSocket)
        self.assembler = protocol.Assembler(protocol.ProtocolState(Role.SERVER))
        self.nonce = os.urandom(protocol.NONCE_BYTES)
        self.began = self.last_sent_at = time.monotonic()
        self.loader: Scheduler | None = None
        self.pending: deque[tuple[LoaderRequest, bool]] = deque()
        self.out: deque[tuple[bytes | memoryview, PreparedResponse | None, int]] = deque()
        self._form: _Form | None = None
        self._slot, self._alike = 0, list[PreparedResponse]()
        self.out_bytes = 0
        self.lent: dict[SharedSpan, PreparedResponse] = {}
        self.lent_bytes = 0
        self.arenas: set[int] = set()
        self.waits_to_send = False
        self.is_unix = sock.family == socket.AF_UNIX

    def add(
        self,
        part: bytes | memoryview,
        prepared: PreparedResponse | None = None,
        descriptor: int = -1,
    ) -> None:
        """Queue bytes for sending.

        Args:
            prepared: Response to release after the bytes are sent; None if there is no response.
            descriptor: File descriptor to send with the bytes; -1 for none.
        """
        self.queue_alike()
        self.out.append((part, prepared, descriptor))
        self.out_bytes += len(part)

    def queue_message(self, message: protocol.FromServer) -> None:
        """Queue a message that has no body."""
        self.add(protocol.encode_header(message))

    def send(self) -> bool:
        """Send queued output until the socket would block; return whether everything was sent."""
        try:
            while self.out:
                self._remove_sent(self._send_tls() if self.tls else self._send_without_tls())
        except _WOULD_BLOCK:
            return False
        return True

    def _send_without_tls(self) -> int:
        """Send the first entries of `out` in one system call; return the number of bytes sent.

        An entry with a file descriptor is sent alone, because the receiver gets the descriptor
        together with all bytes of the same call.
        """
        parts: list[bytes | memoryview] = []
        for part, _, descriptor in itertools.islice(self.out, _PARTS_AT_ONCE):
            if descriptor >= 0:
                if not parts:
                    return socket.send_fds(self.socket, [part], [descriptor])
                break
            parts.append(part)
        assert not isinstance(self.socket, ssl.SSLSocket)
        return self.socket.sendmsg(parts)

    def _send_tls(self) -> int:
        """Send the first entry of `out`, or several small entries; return the number of bytes sent.

        Each call that sends over TLS makes a record of its own. So a small entry is joined with the
        next entries, up to `_TLS_JOIN_BYTES`. A large entry is sent in several records, until the
        socket would block.

        Raises:
            ssl.SSLError, BlockingIOError: The socket would block, and nothing was sent.
        """
        part = memoryview(self.out[0][0])
        if len(part) < _TLS_JOIN_BYTES and len(self.out) > 1:
            joined = bytearray()
            for piece, _, _ in self.out:
                joined += piece[: _TLS_JOIN_BYTES - len(joined)]
                if len(joined) >= _TLS_JOIN_BYTES:
                    break
            return self.socket.send(joined)
        sent = 0
        try:
            while sent < len(part):  # one call sends one record
                sent += self.socket.send(part[sent:])
        except _WOULD_BLOCK:
            if not sent:
                raise
        return sent

    def _remove_sent(self, size: int) -> None:
        """Remove `size` sent bytes from the output queue; release responses that are sent fully.

        If an entry is sent only in part, its rest stays in the queue, without a file descriptor.
        """
        self.out_bytes -= size
        out = self.out
        while out and size >= len(out[0][0]):
            part, prepared, _ = out.popleft()
            size -= len(part)
            if prepared is not None:
                prepared.release()
        if size:
            part, prepared, _ = out[0]
            out[0] = memoryview(part)[size:], prepared, -1

    def release_span(self, span: SharedSpan) -> None:
        """Release a span of shared memory that the rank no longer reads."""
        prepared = self.lent.pop(span, None)
        if prepared is not None:
            self.lent_bytes -= prepared.reply.body_bytes
            prepared.release()

    def respond(self, request: LoaderRequest, prepared: PreparedResponse) -> None:
        """Queue a response; release `prepared` when the rank no longer needs it.

        - If the rank can read the batch in shared memory (`_lend`), queue only a message with the
          batch's position.
        - Collect a small batch that the rank cannot read there in `_alike`, with similar small
          batches. Later, `queue_alike` queues all of them with one header.
        - Queue any other response at once.
        """
        reply = prepared.reply
        is_batch = reply.kind is ResponseKind.BATCH
        head_bytes = reply.head_bytes if is_batch else 0
        form = reply.kind, request.epoch, reply.units, reply.order, head_bytes
        shared, descriptor = self._lend(prepared) if is_batch else (None, -1)
        if shared is not None:
            self.add(_packed(form, request.slot, shared=shared), descriptor=descriptor)
            return
        is_alike = form == self._form and reply.body_bytes == self._alike[0].reply.body_bytes
        if not is_alike or len(self._alike) == _MOST_ALIKE:
            self.queue_alike()
            self._form, self._slot = form, request.slot
        self._alike.append(prepared)
        if not is_batch or reply.body_bytes > _COPIED_BYTES:
            self.queue_alike()

    def queue_alike(self) -> None:
        """Queue the responses collected in `_alike`, with one common header; empty `_alike`.

        `_alike` contains several small responses, or a single large one. Small responses are copied
        into the output and released at once. A large response is not copied, and is released after
        sending. Over TCP without TLS, the header has the checksum of the batches.
        """
        if self._form is None:
            return
        form, slot, alike = self._form, self._slot, self._alike
        self._form, self._alike = None, []
        first, size = alike[0], alike[0].reply.body_bytes
        has_sum = first.reply.kind is ResponseKind.BATCH and not self.tls and not self.is_unix
        body_sum = sum([one.reply.body_sum for one in alike]) & SUM_MASK if has_sum else None
        header = _packed(form, slot, size * len(alike), body_sum, more=len(alike) - 1)
        if size > _COPIED_BYTES:
            self.add(header)
            self.add(first.body(), first)
            return
        self.add(b"".join([header, *[one.body() for one in alike]]))
        for one in alike:
            one.release()

    def release_responses(self) -> None:
        """Release every queued response, because this connection will not send them."""
        for prepared in [*self._alike, *(prepared for _, prepared, _ in self.out)]:
            if prepared is not None:
                prepared.release()
        self._form, self._alike = None, []
        self.out.clear()

    def _lend(self, prepared: PreparedResponse) -> tuple[SharedBody | None, int]:
        """Let the rank read a batch in shared memory, if possible.

        Lending is possible if all of these hold:

        - The rank is on this host.
        - A worker has prepared the batch, and the batch is not small (`_LENT_FROM_BYTES`).
        - With this batch, the rank stays below its limit (`_LENT_BYTES`).
        - No other rank receives the batch. Otherwise, a rank that modifies the memory would change
          the batch of the other rank.

        A lent batch is in `lent` until the rank releases it.

        Returns:
            The position of the batch in shared memory, or None if the batch must be sent; and the
            descriptor of the arena's file, or -1 if the rank already has it.
        """
        worker, size = prepared.worker, prepared.reply.body_bytes
        fits = _LENT_FROM_BYTES <= size <= _LENT_BYTES - self.lent_bytes
        if worker is None or not fits or not self.is_unix or prepared.is_shared:
            return None, -1
        span = SharedSpan(worker.arena, prepared.reply.offset)
        self.lent[span] = prepared
        self.lent_bytes += size
        is_new = worker.arena not in self.arenas
        self.arenas.add(worker.arena)
        return SharedBody(span, size, is_new), worker.memory.descriptor if is_new else -1


def _files_left(connection: RankConnection) -> int:
    """Estimate how many file descriptors this process may still open.

    Linux gives a new descriptor the lowest free number. So all numbers below the descriptor of the
    newest connection are in use.

    Args:
        connection: The newest connection.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most - 1 - connection.socket.fileno()


def _packed(
    form: _Form,
    slot: int,
    body_bytes: int = 0,
    body_sum: int | None = None,
    shared: SharedBody | None = None,
    more: int = 0,
) -> bytes:
    kind, epoch, units, order, head_bytes = form
    about = kind, epoch, slot, units, order, head_bytes
    return protocol.encode_header(Response(*about, body_sum, shared, more), body_bytes)


class Server:
    """Server that sends the batches of one or more loaders to ranks.

    The constructor starts the workers and the listeners, and raises this process's limit of open
    files. Then the process must call `step` in a loop; `step` does all the work.

    Args:
        listen: Address for the TCP listener; "" for no TCP (ranks of this host only).
        tls: Certificate for TCP; None for TCP without encryption, with checksums of batches.

    Attributes:
        addresses: Host and port of the TCP listener ("" and 0 without TCP), and the name of the
            Unix socket.
    """

    def __init__(
        self, key: bytes, loaders: Iterable[ServedLoader], listen: str = "", tls: Tls | None = None
    ) -> None:
        self._key, loaders = key, list(loaders)
        self._where, self._is_full = loaders[0].where, False
        self._began = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._notes: list[str] = []
        self._refused = 0
        self._ready_connections: dict[RankConnection, None] = {}
        self._connections: dict[RankConnection, None] = {}
        self._unproved: dict[RankConnection, None] = {}
        self._checked_at = 0.0
        arenas = itertools.count(1)
        self._loaders = {
            one.name: Scheduler(one, self._selector, arenas, self._mark_ready, self._notes.append)
            for one in loaders
        }
        self._tls = tls.server_context() if tls is not None else None
        # Raise the soft limit to the hard limit, because every connection is an open file.
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        for loader in self._loaders.values():
            loader.start()
        self._listeners = _listen(listen)
        host, port = self._listeners[1].getsockname()[:2] if listen else ("", 0)
        self.addresses = host, port, self._listeners[0].getsockname()[1:].decode()
        for listener in self._listeners:
            self.watch(listener, partial(self._accept, listener))

    def watch(self, readable: Any, called: Callable[[], object]) -> None:
        """Make `step` call `called` whenever `readable` (a socket or pipe) has data or ends."""
        self._selector.register(readable, selectors.EVENT_READ, called)

    def stats(self) -> dict[str, FetcherCounts]:
        """Return the counts of each loader (batches prepared, sent, …), by the loader's name."""
        found = {name: loader.stats() for name, loader in self._loaders.items()}
        for counts in found.values():
            counts.refused, counts.up_s = self._refused, time.monotonic() - self._began
        return found

    def warnings(self) -> list[str]:
        """Return the warnings for the user that no earlier call has returned."""
        notes, self._notes[:] = list(self._notes), []
        return notes

    def step(self, timeout_s: float) -> None:
        """Handle all waiting input, give commands to workers, and send the ready responses.

        If there is no input, wait for input first, but at most `timeout_s` seconds (and at most
        `ALIVE_S`). A connection that fails is closed. A few times per `ALIVE_S`, also run the
        periodic checks.

        Raises:
            RuntimeError: Workers ended too many times, or the parent process of workers ended.
        """
        for key, mask in self._selector.select(min(timeout_s, ALIVE_S)):
            if isinstance(key.data, RankConnection):
                if mask & selectors.EVENT_READ:
                    self._close_on_error(key.data, self._receive_messages)
                if mask & selectors.EVENT_WRITE:
                    self._close_on_error(key.data, self._send_ready_responses)
            else:
                key.data()
        # Sending batches frees memory for workers, and new replies of workers make batches
        # sendable, so alternate until nothing changes.
        while True:
            for loader in self._loaders.values():
                loader.dispatch()
            if not self._ready_connections:
                break
            dirty, self._ready_connections = list(self._ready_connections), {}
            for connection in dirty:
                self._close_on_error(connection, self._send_ready_responses)
        now = time.monotonic()
        if now - self._checked_at > ALIVE_S / 4:
            self._checked_at = now
            self._run_periodic_checks(now)

    def close(self) -> None:
        """Close all connections and listeners, and end all workers."""
        for connection in list(self._connections):
            self._drop(connection, is_gone=True)
        for loader in self._loaders.values():
            loader.close()
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._selector.close()

    def _mark_ready(self, connection: Hashable) -> None:
        """Mark a connection, so that `step` sends the response that has become ready for it."""
        assert isinstance(connection, RankConnection)
        self._ready_connections[connection] = None

    def _accept(self, listener: socket.socket) -> None:
        """Accept waiting connections of a listener (at most `_ACCEPT_AT_ONCE`); begin handshakes.

        If no file descriptor is free, accept none, and close the oldest unauthenticated connection.
        The next step of the event loop then accepts again. If a handshake cannot begin, close the
        new socket.
        """
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._make_room_for_one()
                    return
                if error.errno == errno.ECONNABORTED:
                    continue
                raise
            try:
                self._begin_handshake(sock)
            except OSError as error:
                _log.info("a peer closed its new connection: %s", error)
                sock.close()

    def _make_room_for_one(self) -> bool:
        """Close the oldest unauthenticated connection; return False if there is none."""
        if not self._unproved:
            return False
        self._refuse(next(iter(self._unproved)), "too many connections at once")
        return True

    def _begin_handshake(self, sock: socket.socket) -> None:
        """Begin the handshake with a new peer, unless another user runs the peer.

        If the peer uses the Unix socket and is run by another user, only close the socket, and
        count the peer as refused. Otherwise:

        - Set the socket's options, and watch the socket for input.
        - If more than `_MOST_UNPROVED` peers are unauthenticated, or if few file descriptors are
          left, close the oldest unauthenticated connection, unless it is the only one.
        - Queue the challenge. With TLS, `_continue_handshake` queues it after the TLS handshake.
        """
        sock.setblocking(False)
        is_unix = sock.family == socket.AF_UNIX
        if is_unix and peer_uid(sock) != os.geteuid():
            self._refused += 1
            sock.close()
            return
        if not is_unix:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        connection = RankConnection(sock)
        self._connections[connection] = self._unproved[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)
        is_tight = (
            len(self._unproved) > _MOST_UNPROVED or _files_left(connection) < _SPARE_FILES // 2
        )
        # A single unauthenticated peer stays connected, so that the peer can authenticate. Then
        # `_authenticate` rejects the peer with a message that says why.
        if is_tight and len(self._unproved) > 1:
            self._make_room_for_one()
        if not connection.is_greeting:
            self._challenge(connection)

    def _challenge(self, connection: RankConnection) -> None:
        connection.queue_message(protocol.Challenge(connection.nonce))
        self._ready_connections[connection] = None

    def _close_on_error(
        self, connection: RankConnection, work: Callable[[RankConnection], object]
    ) -> None:
        """Call `work` with a connection, unless the connection is closed.

        If `work` raises OSError or ProtocolError, log the error and close the connection. After a
        ProtocolError or a failed TLS handshake, also count the peer as a refused peer. After any
        other OSError, the peer counts as ended, and its spans of shared memory are released.
        """
        if connection not in self._connections:
            return
        try:
            work(connection)
        except ProtocolError as error:
            self._refuse(connection, str(error))
        except OSError as error:
            if connection.is_greeting and isinstance(error, ssl.SSLError):
                self._refuse(connection, f"it does not have the run's certificate ({error.reason})")
                return
            # Nothing is lost: if the rank still runs, it reconnects and repeats its requests.
            _log.info("a peer is gone: %s", error)
            self._drop(connection, is_gone=True)

    def _receive_messages(self, connection: RankConnection) -> None:
        """Receive and handle all messages that have arrived on a connection.

        If the TLS handshake is in progress, continue it first, and return if it is not complete. If
        the peer has closed the connection, drop the connection. Otherwise, mark the connection, so
        that `step` sends responses that are ready.
        """
        if connection.is_greeting and not self._continue_handshake(connection):
            return
        while True:
            try:
                data = connection.socket.recv(_RECEIVE_BYTES)
            except _WOULD_BLOCK:
                break
            if not data:
                self._drop(connection, is_gone=True)
                return
            for message, body in connection.assembler.feed(data):
                self._handle_message(connection, message, body)
            if not connection.tls and len(data) < _RECEIVE_BYTES:
                break
        self._ready_connections[connection] = None

    def _continue_handshake(self, connection: RankConnection) -> bool:
        """Continue the TLS handshake; return whether it is complete.

        If the socket cannot send now, wait for the moment when it can. After the handshake, queue
        the challenge.
        """
        assert isinstance(connection.socket, ssl.SSLSocket)
        try:
            connection.socket.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self._wait_to_send(connection, True)
            return False
        connection.is_greeting = False
        self._challenge(connection)
        return True

    def _handle_message(
        self,
        connection: RankConnection,
        message: Proof | Requests | FreeSpans | Cancel,
        detail: bytes,
    ) -> None:
        """Authenticate a peer, release spans, or cancel or queue requests, as `message` says.

        After cancelling, also queue the confirmation for the rank (`Cancelled`). A PEEK request is
        stored as a GET request of which the rank needs only the units.
        """
        if isinstance(message, Proof):
            self._authenticate(connection, message)
            return
        loader = connection.loader
        assert loader is not None
        if isinstance(message, FreeSpans):
            for span in message.spans:
                connection.release_span(span)
            return
        if isinstance(message, Cancel):
            # Responses that are already queued are still sent; the rank skips them.
            connection.pending.clear()
            loader.buffer.cancel_requests(connection)
            connection.queue_message(protocol.Cancelled())
            return
        if not connection.pending:
            connection.last_sent_at = time.monotonic()
        add_request, kind = loader.buffer.add_request, message.kind
        if only_count := kind is RequestKind.PEEK:
            kind = RequestKind.GET
        for slot in message.slots:
            request = LoaderRequest(kind, message.epoch, slot, detail)
            connection.pending.append((request, only_count))
            add_request(connection, request, only_count)

    def _authenticate(self, connection: RankConnection, proof: Proof) -> None:
        """Accept a peer that knows the run's key and requests a loader of this server.

        Record the loader, and queue the server's own proof that it knows the key. Reject all other
        peers. If too few file descriptors are left, close the oldest unauthenticated connection; if
        there is none, reject this peer, too.

        Raises:
            ProtocolError: The peer is rejected; a message with the reason was sent to the peer.
        """
        key, socket_name = self._key, self.addresses[2]
        why = ""
        if not protocol.is_proof(key, Role.RANK, connection.nonce, socket_name, proof.mac):
            why = "this peer does not know the run's key"
        elif proof.loader not in self._loaders:
            why = f'loader "{proof.loader}" is not served here'
        else:
            del self._unproved[connection]
            if _files_left(connection) < _SPARE_FILES and not self._make_room_for_one():
                why = self._reason_when_full()
        if why:
            connection.queue_message(protocol.Rejected(why))
            connection.send()
            raise ProtocolError(why)
        connection.loader = self._loaders[proof.loader]
        connection.queue_message(
            protocol.Welcome(protocol.make_proof(key, Role.SERVER, proof.nonce, socket_name))
        )

    def _reason_when_full(self) -> str:
        """Return the message for a rank that is rejected because too many files are open.

        The first call also adds the message to the warnings for the user.
        """
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        why = (
            f"{self._where} cannot accept more connections, because it has reached its limit of "
            f"open files ({most}, ulimit -n): raise that limit where the pool is started, or use "
            "more fetchers (--cpus)"
        )
        if not self._is_full:
            self._notes.append(why)
        self._is_full = True
        return why

    def _send_ready_responses(self, connection: RankConnection) -> None:
        """Send the responses that are ready, until the socket would block.

        Queue the responses in the order of the requests, about `_OUT_BYTES` at a time. If the
        socket would block, the event loop calls this method again when the socket can send. If the
        TLS handshake is still in progress, continue the handshake instead.
        """
        if connection.is_greeting:
            self._receive_messages(connection)
            return
        while True:
            while connection.pending and connection.out_bytes < _OUT_BYTES:
                if not self._queue_next_response(connection):
                    break
            connection.queue_alike()
            if not connection.out:
                break
            if not self._flush(connection):
                return
            if not connection.pending:
                break
        self._wait_to_send(connection, False)

    def _flush(self, connection: RankConnection) -> bool:
        """Send a connection's queued output until the socket would block.

        If anything was sent, update `last_sent_at`. If output is left, the event loop continues
        when the socket can send again. Return whether everything was sent.
        """
        before = connection.out_bytes
        has_gone = connection.send()
        if connection.out_bytes < before:
            connection.last_sent_at = time.monotonic()
        self._wait_to_send(connection, not has_gone)
        return has_gone

    def _wait_to_send(self, connection: RankConnection, waits: bool) -> None:
        """Start or stop watching for the moment when a connection's socket can send again.

        Args:
            waits: Whether output is waiting for this moment.
        """
        if waits is not connection.waits_to_send:
            connection.waits_to_send = waits
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0)
            self._selector.modify(connection.socket, events, connection)

    def _queue_next_response(self, connection: RankConnection) -> bool:
        """Queue the response to a connection's oldest pending request, if the response is ready.

        If the rank needs only the batch's units, queue a message with the units. If the response is
        a batch, count the batch as sent. If the response is not ready, the buffer records that this
        connection must send it next. There must be a pending request.

        Returns:
            Whether the response was ready.
        """
        request, only_count = connection.pending[0]
        loader = connection.loader
        assert loader is not None
        if only_count:
            units = loader.buffer.find_units(connection, request)
            if units is None:
                return False
            kind = ResponseKind.VOID if units == VOID else ResponseKind.PEEKED
            order = loader.buffer.find_order(request)
            connection.queue_message(Response(kind, request.epoch, request.slot, units, order))
        else:
            prepared = loader.buffer.pop_ready(connection, request)
            if prepared is None:
                return False
            if prepared.reply.kind is ResponseKind.BATCH:
                loader.counts.sent += 1
            connection.respond(request, prepared)
        connection.pending.popleft()
        return True

    def _run_periodic_checks(self, now: float) -> None:
        """Kill stopped parents of workers, close peers without proof, and send heartbeats.

        Kill a parent process of workers if it has been stopped (SIGSTOP) for `STOPPED_S` seconds.
        Close a peer's connection if the peer has not authenticated within `PROOF_S` seconds. Send
        an `Alive` message every `ALIVE_S` seconds to each rank that waits for a response, unless
        output for the rank is queued.
        """
        for loader in self._loaders.values():
            loader.kill_stopped_parent()
        for connection in list(self._unproved):
            if now - connection.began < PROOF_S:
                break
            self._refuse(connection, f"it has not shown the run's key within {PROOF_S:g} s")
        for connection in list(self._connections):
            waits = connection.pending and not connection.out
            if waits and now - connection.last_sent_at >= ALIVE_S:
                connection.queue_message(protocol.Alive())
                self._close_on_error(connection, self._flush)
                connection.last_sent_at = now

    def _refuse(self, connection: RankConnection, why: str) -> None:
        self._refused += 1
        _log.warning("a peer was refused: %s", why)
        self._drop(connection, is_gone=False)

    def _drop(self, connection: RankConnection, is_gone: bool) -> None:
        """Close a connection, release its queued responses, and cancel its requests.

        Args:
            is_gone: Whether the peer has ended and no longer reads shared memory. If so, also
                release the spans of shared memory that the peer was reading. If not, these spans
                are never reused, because the peer may still read them.
        """
        for book in (self._connections, self._unproved, self._ready_connections):
            book.pop(connection, None)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.release_responses()
        if connection.loader is not None:
            connection.loader.buffer.cancel_requests(connection)
        if is_gone:
            for span in list(connection.lent):
                connection.release_span(span)


class RankServers:
    """Manager of a rank's own servers, one process for each loader, in a run without fetchers.

    The constructor forks the starter process, which later forks the servers. Call the constructor
    while the rank has one thread and has not run user code. If the rank forked later, another
    thread might hold a lock, such as the lock of torch's random generator, and the child would wait
    for this lock forever.

    `close` ends the starter process and the servers, and waits for them. Without `close`, these
    processes end when the rank's process ends.

    Args:
        load: Function that prepares a server's process and returns the pickled loader. The function
            is called in the server's process.
    """

    def __init__(self, key: bytes, load: Callable[[ServedLoader], bytes]) -> None:
        self._key, self._load = key, load
        self._pid = os.getpid()
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._life, life = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not a multiprocessing.Process, because a cell may end all of those or wait for them.
        self._starter_pid = os.fork()
        if not self._starter_pid:
            try:
                self._control.close()
                self._life.close()
                self._start_servers(control, life)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        control.close()
        life.close()

    def start(self, served: ServedLoader, timeout_s: float) -> tuple[str, socket.socket]:
        """Start a server's process for one loader; wait until the server listens.

        Send the loader's settings and one end of a new socket pair to the starter process. The
        server then sends its name over this socket. Forks of this process may also call this
        method.

        Returns:
            The name of the server's Unix socket, and a socket that is connected to the server. To
            end the server, the caller closes this socket.

        Raises:
            RunLost: The server does not listen within `timeout_s`, or has ended, or the starter
                process has ended.
            TimeoutError: A signal handler in the user's cell raised a TimeoutError during the call.
        """
        answer, theirs = socket.socketpair()
        with ExitStack() as closing:
            closing.enter_context(answer)
            try:
                with theirs:
                    socket.send_fds(self._control, [pickle.dumps(served)], [theirs.fileno()])
                answer.settimeout(timeout_s)
                name = answer.recv(_NAME_BYTES)
                why = "ended before it listened"
            except TimeoutError as error:
                if is_raised_by_cell(error):
                    raise
                name, why = b"", f"did not start within {timeout_s:g} s"
            except ConnectionError as error:
                name, why = b"", f"cannot be started ({error})"
            if not name:
                raise RunLost(f'loader "{served.name}": {served.where} {why}; see the rank\'s log')
            answer.settimeout(None)
            closing.pop_all()  # the caller closes the socket
        return name.decode(), answer

    def close(self) -> None:
        """End all servers and their workers, and wait for their end.

        Do nothing in a fork of the rank.
        """
        if os.getpid() != self._pid:
            return
        # A plain close does not signal the end, because forks of this process share the socket.
        self._life.shutdown(socket.SHUT_RDWR)
        self._life.close()
        with suppress(ChildProcessError):  # the cell may have waited for all child processes
            os.waitpid(self._starter_pid, 0)
        self._control.close()

    def _start_servers(self, control: socket.socket, life: socket.socket) -> None:
        """Run the starter process, which forks a server for each request of the rank.

        When the rank closes `control` or `life`, wait up to `_END_S` seconds for the end of each
        server, then kill the server.

        Args:
            control: Receives a `ServedLoader` for each server to start.
            life: Socket that the rank closes to end all servers.
        """
        begin_process()
        context: Any = multiprocessing.get_context("fork")
        servers: list[Any] = []
        while True:
            ready = wait([control, life, *(server.sentinel for server in servers)])
            servers = [server for server in servers if server.is_alive()]  # reaps ended servers
            if life in ready:
                break
            if control not in ready:
                continue
            loader, descriptors, _, _ = socket.recv_fds(control, _LOADER_BYTES, 1)
            if not loader:
                break
            with socket.socket(fileno=descriptors[0]) as answer:
                arguments = pickle.loads(loader), answer, life
                server = context.Process(target=self._serve, args=arguments)
                server.start()
            servers.append(server)
        for server in servers:
            server.join(_END_S)
            server.kill()  # it may still import modules of the user's loader
            server.join()

    def _serve(self, served: ServedLoader, answer: socket.socket, life: socket.socket) -> None:
        """Run one loader's server in this process until the rank closes `answer` or `life`.

        First, prepare this process and get the pickled loader (`load`). Start the server, and send
        the name of its Unix socket to the rank over `answer`. If the rank's process ends, Linux
        closes the rank's ends of both sockets, so the server ends too. Write warnings to stderr.
        """
        payload = self._load(served)
        server = Server(self._key, [dataclasses.replace(served, payload=payload)])
        answer.send(server.addresses[2].encode())
        over: list[bool] = []
        for closed in (answer, life):
            server.watch(closed, lambda: over.append(True))
        try:
            while not over:
                server.step(ALIVE_S)
                for sentence in server.warnings():
                    sys.stderr.write(f"{sentence}\n")
        finally:
            # Without this call, Python would wait for the workers' parent process before it prints
            # an exception.
            server.close()


def _listen(host: str) -> list[socket.socket]:
    """Open and return a server's listening sockets: a Unix socket and, with `host`, a TCP socket.

    The sockets do not block. The Unix socket has a random abstract name, the TCP socket a free
    port.
    """
    unix = socket.socket(socket.AF_UNIX)
    unix.bind("\0taas-" + secrets.token_hex(12))
    listeners = [unix]
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listeners.append(socket.create_server((host, 0), family=family))
    for listener in listeners:
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    return listeners
