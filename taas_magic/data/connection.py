"""A rank's connection to a fetcher: handshake, requests and responses.

On the same host, rank and fetcher use a Unix socket in the abstract namespace, and the rank reads
large batches in shared memory. Between hosts, they use TCP, with TLS if a context is given. In both
cases, each side proves that it knows the run's key.
"""

import itertools
import operator
import os
import socket
import ssl
import struct
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

from taas_magic.data import protocol
from taas_magic.data.encode import SUM_MASK, checksum
from taas_magic.data.memory import BorrowedSpans, ReceiveBlocks
from taas_magic.data.protocol import FromServer, LoaderRequest, ProtocolState, Response, Role
from taas_magic.data.service import machine_id, peer_uid
from taas_magic.errors import ProtocolError
from taas_magic.leases import ALIVE_S
from taas_magic.messages import Address

_CHUNK_BYTES = 1 << 20
_LARGE_BYTES = 512 << 10
"""Maximum bytes of a body that is received into a chunk, the memory for several messages.

A larger body gets a memory block of its own.
"""

_LEAST_ROOM_BYTES = _CHUNK_BYTES // 8
"""Minimum bytes of free space at the end of a chunk (see `Inbox`).

A chunk with less free space is replaced by a new chunk.
"""

_PIECE_BYTES = 992 << 10
"""Bytes in each piece of a large body: a piece is received, then its checksum is computed."""

_FDS_BYTES = socket.CMSG_SPACE(struct.calcsize("i"))
_NOT_THE_CELLS = {__name__.partition(".")[0], *sys.stdlib_module_names}
_ALL_BUT_SLOT = operator.attrgetter("kind", "epoch", "detail")


class PeerSilent(OSError):
    """Exception for a wait of `ALIVE_S` seconds (one tick) in which the peer sent no data.

    The caller counts ticks to measure how long the peer has been silent. If this process itself
    pauses (SIGSTOP, or a wait for the interpreter lock), at most one tick is counted: after the
    pause, the process first reads the data that arrived meanwhile.
    """


def is_raised_by_cell(error: BaseException) -> bool:
    """Return whether `error` comes from a signal handler of the cell, not from the connection.

    A signal handler may raise an exception at any point of the main thread's code. The last frame
    of the traceback then belongs to the cell, not to this package or Python's own modules.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    module = frames.tb_frame.f_globals.get("__name__", "") if frames is not None else __name__
    return module.partition(".")[0] not in _NOT_THE_CELLS


class FetcherLink:
    """A rank's connection to one fetcher, with its pending requests.

    Args:
        tls: TLS context; None for plain TCP. Not used for a fetcher on the same host.
        connect_s: Seconds that the whole handshake may take.
        silence_limit_s: Seconds that the fetcher may pause in the middle of a message.

    Attributes:
        pending: Requests that were sent and have no response yet, in order.
        unsent: Requests that the next call of `send_unsent` will send.
        borrowed: Spans of the fetcher's shared memory that this process reads.

    Raises:
        OSError: The fetcher cannot be reached.
        ProtocolError: The peer is not a fetcher of this run, or the fetcher rejected this rank.
    """

    def __init__(
        self,
        address: Address,
        loader: str,
        key: bytes,
        tls: ssl.SSLContext | None = None,
        connect_s: float = 5.0,
        silence_limit_s: float = 5.0,
    ) -> None:
        self.address = address
        self.pending: deque[LoaderRequest] = deque()
        self.unsent: list[LoaderRequest] = []
        self._unconfirmed_cancels = 0
        self._connect_until = time.monotonic() + connect_s
        self._socket = self._connect(tls, connect_s)
        self._is_tls = isinstance(self._socket, ssl.SSLSocket)
        self.borrowed = BorrowedSpans(self._socket.close)
        self._inbox = Inbox(self._socket, ProtocolState(Role.RANK), silence_limit_s)
        self.close = weakref.finalize(self, self.borrowed.close)
        """Function that closes the connection when this process reads no span of the fetcher.

        While the connection is open, the fetcher does not reuse the spans that this process reads.
        So if such spans are left, the function postpones closing until they are no longer in use.
        """
        try:
            if self._is_tls:
                self._socket.settimeout(ALIVE_S)
            else:  # a timeout in Linux saves a poll for each receive
                self._socket.settimeout(None)
                timeval = struct.pack("ll", int(ALIVE_S), 0)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            self._authenticate(loader, key)
        except BaseException:
            self.close()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, by this process or by the garbage collector.

        The garbage collector calls `close` before `__del__` of the objects that refer to the link.
        """
        return not self.close.alive

    def send(self, messages: Sequence[tuple[protocol.FromRank, bytes]]) -> None:
        """Send messages with their bodies to the fetcher.

        Wait until the operating system has accepted all data; there is no time limit. Before the
        messages, tell the fetcher which spans of its shared memory this rank no longer reads.

        Raises:
            OSError: The connection failed.
        """
        parts = [protocol.encode_header(message, len(body)) + body for message, body in messages]
        if gone := self.borrowed.pop_released():
            parts.insert(0, protocol.encode_header(protocol.FreeSpans(gone)))
        if self._is_tls:
            self._socket.settimeout(None)
        self._socket.sendall(b"".join(parts))
        if self._is_tls:
            self._socket.settimeout(ALIVE_S)

    def send_unsent(self) -> None:
        """Move the requests in `unsent` to `pending`, and send them.

        Consecutive requests that differ only in the slot share a message.

        Raises:
            OSError: The connection failed. The requests are in `pending`.
        """
        requests, self.unsent = self.unsent, []
        self.pending += requests
        messages = []
        for (kind, epoch, detail), alike in itertools.groupby(requests, _ALL_BUT_SLOT):
            slots = tuple([request.slot for request in alike])
            messages.append((protocol.Requests(kind, epoch, slots), detail))
        self.send(messages)

    def cancel(self) -> None:
        """Drop all unsent requests, and cancel all pending requests.

        Return without waiting for the fetcher. `receive` later skips the responses to the cancelled
        requests.
        """
        self.unsent.clear()
        if self.pending:
            self.pending.clear()
            self.send([(protocol.Cancel(), b"")])
            self._unconfirmed_cancels += 1

    def close_copy(self) -> None:
        """In a fork of the rank, close the fork's copy of the socket; the rank's own stays open."""
        self._socket.close()

    def receive(self, blocks: ReceiveBlocks) -> Iterator[tuple[FromServer, memoryview]]:
        """Wait for the next message; yield this message and all messages that arrived with it.

        If a body is in the fetcher's shared memory, map this memory. After a cancellation, messages
        are skipped until the fetcher has confirmed the cancellation (`Cancelled`).

        Yields:
            A message and its body. The body is in `blocks` or in shared memory.

        Raises:
            PeerSilent: No data arrived for `ALIVE_S` seconds; the connection is still usable.
            OSError, ProtocolError: The connection is no longer usable, or a body was damaged in
                transit.
        """
        whole: tuple[FromServer, memoryview] | None = self._inbox.receive(blocks)
        while whole is not None:
            message, body = whole
            if isinstance(message, Response) and (shared := message.shared) is not None:
                if shared.is_new:
                    self.borrowed.add_arena(shared.span.arena, self._inbox.pop_descriptor())
                body = self.borrowed.map_span(shared.span, shared.size)
            if not self._unconfirmed_cancels:
                yield message, body
            elif isinstance(message, protocol.Cancelled):
                self._unconfirmed_cancels -= 1
            whole = self._inbox.next_complete()

    def _connect(self, tls: ssl.SSLContext | None, connect_s: float) -> socket.socket:
        address = self.address
        if address.unix and address.machine == machine_id():
            return _connect_unix(address.unix, connect_s)
        sock = socket.create_connection((address.host, address.port), connect_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock if tls is None else tls.wrap_socket(sock, server_hostname=address.host)

    def _authenticate(self, loader: str, key: bytes) -> None:
        """Do the handshake, in which each side proves that it knows the run's key.

        Receive the fetcher's challenge. Send this rank's proof, the loader's name and a challenge
        for the fetcher. Then receive the fetcher's answer and check the fetcher's proof.

        Raises:
            ProtocolError: The fetcher rejects this rank, or does not know the run's key.
            TimeoutError: The fetcher does not answer in time.
        """
        socket_name, nonce = self.address.unix, os.urandom(protocol.NONCE_BYTES)
        challenge = self._receive_handshake()
        assert isinstance(challenge, protocol.Challenge)
        mac = protocol.make_proof(key, Role.RANK, challenge.nonce, socket_name)
        self.send([(protocol.Proof(nonce, mac, loader), b"")])
        response = self._receive_handshake()
        if isinstance(response, protocol.Rejected):
            raise ProtocolError(f"{self.address} refused: {response.why}")
        assert isinstance(response, protocol.Welcome)
        if not protocol.is_proof(key, Role.SERVER, nonce, socket_name, response.mac):
            raise ProtocolError(f"{self.address} does not know this run's key")

    def _receive_handshake(self) -> FromServer:
        while True:
            try:
                return self._inbox.receive(ReceiveBlocks(0))[0]
            except PeerSilent:
                if time.monotonic() > self._connect_until:
                    raise TimeoutError(f"{self.address} does not answer") from None


class Inbox:
    """Receiving end of a connection: reads frames; a frame is a message with its body.

    One system call receives all small frames that have arrived, into a block of memory that is
    called the chunk. The body of a batch stays in the chunk as long as the batch is in use. A large
    body is received into a block of its own.

    Args:
        silence_limit_s: Seconds that the peer may pause in the middle of a frame.
    """

    def __init__(self, sock: socket.socket, state: ProtocolState, silence_limit_s: float) -> None:
        self._socket, self._state, self._patience_s = sock, state, silence_limit_s
        self._is_unix = sock.family == socket.AF_UNIX
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._chunk = memoryview(b"")
        self._start = self._end = 0
        self._now: protocol.ReceivedFrame | None = None
        self._latest_bytes = 0
        self._silent_s = 0.0
        self._descriptors: deque[int] = deque()

    def receive(self, blocks: ReceiveBlocks) -> tuple[FromServer, memoryview]:
        """Wait for the next message and its body, and return them.

        Raises:
            PeerSilent: No data arrived for `ALIVE_S` seconds; the connection is still usable.
            OSError, ProtocolError: The connection is no longer usable, or a body was damaged in
                transit.
        """
        self._silent_s = 0.0
        while (whole := self.next_complete()) is None:
            if self._now is not None and self._now.body_bytes > _LARGE_BYTES:
                return self._receive_large_body(self._now, blocks)
            self._receive_chunk(blocks)
        return whole

    def next_complete(self) -> tuple[FromServer, memoryview] | None:
        """Return the next message and its body, if both have arrived completely; else None.

        Receive no data: read only the chunk, the block of data that has arrived. A body that does
        not start at an aligned offset is copied.

        Raises:
            ProtocolError: The message is damaged or not allowed, or the body's checksum is wrong.
        """
        now = self._now
        if now is None:
            now = self._now = self._state.decode_message(self._chunk[self._start : self._end])
            if now is None:
                return None
            self._start += now.header_bytes
        message, header_bytes, size = now
        at = self._start
        if self._end - at < size:
            return None
        self._now = None
        self._start, self._latest_bytes = at + size, header_bytes + size
        body = self._chunk[at : at + size]
        if isinstance(message, Response) and message.body_sum is not None:
            _compare_checksum(message, checksum(body))
        return message, memoryview(bytearray(body)) if at % protocol.ALIGN else body

    def pop_descriptor(self) -> int:
        """Remove and return the oldest received file descriptor.

        Descriptors arrive in the order of their messages, so the oldest descriptor belongs to the
        current message.

        Raises:
            ProtocolError: No descriptor was received.
        """
        if not self._descriptors:
            raise ProtocolError("the fetcher announced shared memory, but did not send it")
        return self._descriptors.popleft()

    def _receive_large_body(
        self, now: protocol.ReceivedFrame, blocks: ReceiveBlocks
    ) -> tuple[FromServer, memoryview]:
        """Receive the rest of a large body; return the message and the whole body.

        The beginning of the body has arrived already and is in the chunk. The whole body gets a
        memory block of its own, so this method first copies the beginning to that block.

        Raises:
            ProtocolError: The body's checksum is wrong.
            ConnectionError: The peer paused in the middle of the body for too long.
        """
        self._now = None
        message, _, size = now
        body, begun = blocks.allocate(size), self._end - self._start
        body[:begun] = self._chunk[self._start : self._end]
        self._start = self._end
        is_summed, total = message.body_sum is not None, 0
        for at in range(0, size, _PIECE_BYTES):
            # Compute the checksum piece by piece, while the data is in the processor's cache.
            piece = body[at : at + _PIECE_BYTES]
            self._receive_all(piece[max(0, begun - at) :])
            total += checksum(piece) if is_summed else 0
        if is_summed:
            _compare_checksum(message, total & SUM_MASK)
        return message, body

    def _receive_all(self, memory: memoryview) -> None:
        done, flags = 0, 0 if self._is_tls else socket.MSG_WAITALL
        while done < len(memory):
            try:
                done += self._receive_into(memory[done:], flags)
            except PeerSilent:
                self._count_silence()

    def _receive_chunk(self, blocks: ReceiveBlocks) -> None:
        """Receive data into the chunk, once; wait at most `ALIVE_S` seconds for the data.

        One call may receive only a part of a frame, or no data if the rest of a frame is late. So
        the caller calls this method in a loop. Exception: with TLS, if the current frame's message
        has arrived, one call waits for the whole body of this frame and receives the body.

        If the chunk has too little space left, first replace the chunk, and copy the unread data to
        the new chunk.

        Raises:
            PeerSilent: No data arrived for `ALIVE_S` seconds, and no frame has begun.
            ConnectionError: The peer paused in the middle of a frame for too long.
        """
        now = self._now
        least = max(now.body_bytes if now else self._latest_bytes, _LEAST_ROOM_BYTES)
        if len(self._chunk) - self._start < least:
            # Start a new chunk; the old one lives as long as its bodies are in use.
            rest = bytes(self._chunk[self._start : self._end])
            self._chunk = memoryview(b"")
            self._chunk = blocks.allocate(_CHUNK_BYTES)
            self._chunk[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        if self._is_tls and now:
            # With TLS each call receives one record.
            until = self._start + now.body_bytes
            self._receive_all(self._chunk[self._end : until])
            self._end = until
            return
        try:
            self._end += self._receive_into(self._chunk[self._end : self._receive_limit()])
        except PeerSilent:
            if now is None and self._start == self._end:
                raise
            self._count_silence()

    def _receive_limit(self) -> int:
        """Return the offset in the chunk at which the next system call stops receiving.

        Frames often have equal sizes. So assume that each frame has the size of the latest frame.
        The result is the end of the last frame that fits into the chunk completely. If the call
        received more, this would be the beginning of a further frame, and this beginning would have
        to be copied to the next chunk.

        Exceptions: if no frame has arrived yet, or if the data up to that offset has arrived
        already, the result is the end of the chunk.
        """
        begin = self._start - (self._now.header_bytes if self._now else 0)
        size = self._latest_bytes
        if not size or self._end >= (until := len(self._chunk) - (len(self._chunk) - begin) % size):
            return len(self._chunk)
        return until

    def _receive_into(self, room: memoryview, flags: int = 0) -> int:
        """Receive data into `room`; return the number of bytes. Store received file descriptors.

        If data arrives, also reset the count of silent seconds (`_count_silence`).

        Raises:
            PeerSilent: No data arrived for `ALIVE_S` seconds.
            OSError: The connection failed or the peer closed it. Or a signal handler in the user's
                cell raised an OSError during the call.
        """
        try:
            if self._is_unix:
                flags |= socket.MSG_CMSG_CLOEXEC
                got, ancillary, _, _ = self._socket.recvmsg_into([room], _FDS_BYTES, flags)
                for _, _, data in ancillary:
                    self._descriptors += struct.unpack("i", data[: struct.calcsize("i")])
            else:
                got = self._socket.recv_into(room, flags=flags)
        except (BlockingIOError, ssl.SSLWantReadError):
            raise PeerSilent(f"no data arrived for {ALIVE_S:g} s") from None
        except TimeoutError as error:
            if is_raised_by_cell(error) or not self._is_tls:
                raise
            raise PeerSilent(f"no data arrived for {ALIVE_S:g} s") from None
        if not got:
            raise ConnectionError("the peer closed the connection")
        self._silent_s = 0.0
        return got

    def _count_silence(self) -> None:
        """Count `ALIVE_S` more seconds in which the rest of a frame has not arrived.

        Raises:
            ConnectionError: The peer has sent no data for more than `silence_limit_s` seconds.
        """
        self._silent_s += ALIVE_S
        if self._silent_s > self._patience_s:
            raise ConnectionError(
                f"the peer stopped in the middle of a frame for {self._patience_s} s"
            )


def _compare_checksum(response: Response, total: int) -> None:
    if total != response.body_sum:
        where = f"batch {response.slot} of epoch {response.epoch}"
        raise ProtocolError(f"{where} was damaged in transit")


def _connect_unix(name: str, connect_s: float) -> socket.socket:
    """Connect to a Unix socket in the abstract namespace, and check the server's user.

    Args:
        connect_s: Timeout in seconds of the returned socket, also for connecting.

    Raises:
        OSError: The server cannot be reached.
        ProtocolError: The server belongs to another user.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(connect_s)
        sock.connect("\0" + name)
        if (uid := peer_uid(sock)) != os.geteuid():
            raise ProtocolError(f"the socket {name!r} belongs to another user (uid {uid})")
    except BaseException:
        sock.close()
        raise
    return sock
