"""A rank's connection to a fetcher: the handshake, questions out, whole answers in.

On one host a fetcher is reached through a Unix socket in the abstract namespace (it leaves no file,
whatever dies), and large batches lie in memory that both map; between hosts through TCP, with TLS
where a context is given. Who may speak is decided by the run's key alone, on every path.
"""

import os
import socket
import ssl
import struct
import time
import weakref
from collections import deque
from collections.abc import Sequence

from taas_magic.data import protocol
from taas_magic.data.encode import SUM_MASK, checksum
from taas_magic.data.memory import Blocks, Lent
from taas_magic.data.protocol import Frame, FrameFlag, Kind, ProtocolState, Role, prove, proven
from taas_magic.data.service import machine, peer_uid
from taas_magic.errors import ProtocolError
from taas_magic.leases import ALIVE_S
from taas_magic.messages import Address

_CHUNK_BYTES = 1 << 20
_LARGE_BYTES = 512 << 10
_LEAST_ROOM_BYTES = _CHUNK_BYTES // 8
_PIECE_BYTES = 992 << 10
_FEW_BYTES = 32 << 10
"""Bodies up to this are copied out: a batch that is kept must not keep a whole chunk."""

_FDS_BYTES = socket.CMSG_SPACE(struct.calcsize("i"))


class Silent(OSError):
    """Nothing came for a tick."""


class Corrupted(ProtocolError):
    """A body's checksum does not match what arrived."""


class FetcherLink:
    """A rank's connection to one fetcher.

    Args:
        tls: Context for TCP; not used on one host, where no wire is.
        direct: Whether a Unix socket and shared memory may be used.
        connect_s: How long the handshake may take, in all.
        patience_s: How long a frame may stand still in the middle.

    Raises:
        OSError: It cannot be reached.
        ProtocolError: It is not a fetcher of this run.
    """

    def __init__(
        self,
        address: Address,
        loader: str,
        key: bytes,
        tls: ssl.SSLContext | None = None,
        direct: bool = True,
        connect_s: float = 5.0,
        patience_s: float = 5.0,
    ) -> None:
        self.address = address
        self._cancelled = 0
        self._connect_until = time.monotonic() + connect_s
        self._socket = self._connect(tls, direct, connect_s)
        self._lent = Lent(self._socket.close)
        self._inbox = Inbox(self._socket, ProtocolState(Role.RANK), patience_s)
        self.close = weakref.finalize(self, self._lent.close)
        """Close the connection, once nobody reads the fetcher's memory any more: as long as it is
        open, the fetcher leaves that memory alone."""
        try:
            _tick(self._socket)
            self._introduce(loader, key)
        except BaseException:
            self.close()
            raise

    def send(self, frames: Sequence[tuple[Frame, bytes]]) -> None:
        """Send questions, and which shared memory is looked at no more."""
        parts = [protocol.pack(frame) + body for frame, body in frames]
        if gone := self._lent.gone():
            body = protocol.pack_numbers(gone)
            parts.insert(0, protocol.pack(Frame(Kind.FREE, body_bytes=len(body))) + body)
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(None)
        self._socket.sendall(b"".join(parts))
        _tick(self._socket, only_tls=True)

    def cancel(self) -> None:
        """Say that what was asked is not wanted; answers on their way are passed over."""
        self.send([(Frame(Kind.CANCEL), b"")])
        self._cancelled += 1

    def receive(self, blocks: Blocks) -> tuple[Frame, memoryview]:
        """Return the next frame and its body, which lies in one of `blocks` or is shared.

        Raises:
            Silent: Nothing came for a tick; the connection is as good as before.
            Corrupted: The body was damaged on its way.
            OSError, ProtocolError: The connection is of no use any more.
        """
        while (whole := self._wanted(*self._inbox.receive(blocks))) is None:
            pass
        return whole

    def here(self) -> tuple[Frame, memoryview] | None:
        """Return what `receive` would return at once, if anything; raises the same."""
        while (found := self._inbox.here()) is not None:
            if (whole := self._wanted(*found)) is not None:
                return whole
        return None

    def _wanted(self, frame: Frame, body: memoryview) -> tuple[Frame, memoryview] | None:
        """Map a body that is shared; None for a frame that belongs to what was cancelled."""
        if frame.flags & FrameFlag.SHARED:
            if frame.flags & FrameFlag.NEW_ARENA:
                self._lent.add(frame.arena, self._inbox.descriptor())
            body = self._lent.look(frame.arena, frame.offset, frame.body_bytes)
        if not self._cancelled:
            return frame, body
        if frame.kind is Kind.CANCELLED:
            self._cancelled -= 1
        return None

    @property
    def shared_bytes(self) -> int:
        """Memory of the fetcher's that this process maps."""
        return self._lent.held_bytes

    def _connect(self, tls: ssl.SSLContext | None, direct: bool, connect_s: float) -> socket.socket:
        address = self.address
        if direct and address.unix and address.machine == machine():
            return _connect_unix(address.unix, connect_s)
        sock = socket.create_connection((address.host, address.port), connect_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock if tls is None else tls.wrap_socket(sock, server_hostname=address.host)

    def _introduce(self, loader: str, key: bytes) -> None:
        """Shake hands: each side shows that it knows the run's key."""
        place, nonce = self.address.unix, os.urandom(protocol.NONCE_BYTES)
        challenge = bytes(self._said()[1])
        body = nonce + prove(key, Role.RANK, challenge, place) + loader.encode()
        self.send([(Frame(Kind.PROOF, body_bytes=len(body)), body)])
        frame, welcome = self._said()
        if frame.kind is Kind.REFUSED:
            raise ProtocolError(f"{self.address} refused: {bytes(welcome).decode()}")
        if not proven(key, Role.SERVER, nonce, place, bytes(welcome)):
            raise ProtocolError(f"{self.address} does not know this run's key")

    def _said(self) -> tuple[Frame, memoryview]:
        while True:
            try:
                return self._inbox.receive(Blocks(0))
            except Silent:
                if time.monotonic() > self._connect_until:
                    raise TimeoutError("it does not answer") from None


class Inbox:
    """The receiving end of a connection.

    One system call brings as many small frames as have come, into one chunk, and they stay there. A
    large body goes straight into a block of its own.

    Args:
        patience_s: How long a frame may stand still in the middle.
    """

    def __init__(self, sock: socket.socket, talk: ProtocolState, patience_s: float) -> None:
        self._socket, self._talk, self._patience_s = sock, talk, patience_s
        self._is_unix = sock.family == socket.AF_UNIX
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._chunk = memoryview(b"")
        self._start = self._end = 0
        self._frame: Frame | None = None
        self._body_bytes = self._latest_bytes = 0
        self._heard = time.monotonic()
        self._descriptors: deque[int] = deque()

    def receive(self, blocks: Blocks) -> tuple[Frame, memoryview]:
        """Return the next frame and its body; waits for them.

        Raises:
            Silent: Nothing came for a tick.
            Corrupted: The body was damaged on its way.
            OSError, ProtocolError: The connection is of no use any more.
        """
        self._heard = time.monotonic()  # the rank may have done something else for an hour
        while (whole := self.here()) is None:
            if self._frame is not None and self._body_bytes > _LARGE_BYTES:
                return self._large(blocks)
            self._fill(blocks)
        return whole

    def here(self) -> tuple[Frame, memoryview] | None:
        """Return the next frame and its body if all of it has come."""
        if self._frame is None:
            after = self._start + protocol.HEADER_BYTES
            if self._end < after:
                return None
            frame = protocol.unpack(self._chunk[self._start : after])
            self._talk.hear(frame.kind)
            self._frame, self._start = frame, after
            self._body_bytes = 0 if frame.flags & FrameFlag.SHARED else frame.body_bytes
        at, size = self._start, self._body_bytes
        if self._end - at < size:
            return None
        frame, self._frame = self._frame, None
        self._start, self._latest_bytes = at + size, protocol.HEADER_BYTES + size
        body = self._chunk[at : at + size]
        if frame.flags & FrameFlag.SUMMED:
            _check(frame, checksum(body))
        if size <= _FEW_BYTES or at % protocol.ALIGN:
            body = memoryview(bytearray(body))
        return frame, body

    def descriptor(self) -> int:
        """Return the oldest descriptor that came along.

        Raises:
            ProtocolError: There is none.
        """
        if not self._descriptors:
            raise ProtocolError("shared memory was announced and did not come")
        return self._descriptors.popleft()

    def _large(self, blocks: Blocks) -> tuple[Frame, memoryview]:
        """Receive a large body, of which the chunk has the beginning."""
        frame, self._frame = self._frame, None
        assert frame is not None
        body, begun = blocks.take(self._body_bytes), self._end - self._start
        body[:begun] = self._chunk[self._start : self._end]
        self._start = self._end
        total = 0
        for at in range(0, self._body_bytes, _PIECE_BYTES):
            # Summed piece by piece, while it is in the processor's cache.
            piece = body[at : at + _PIECE_BYTES]
            self._receive_all(piece[max(0, begun - at) :])
            total += checksum(piece) if frame.flags & FrameFlag.SUMMED else 0
        if frame.flags & FrameFlag.SUMMED:
            _check(frame, total & SUM_MASK)
        return frame, body

    def _receive_all(self, memory: memoryview) -> None:
        done, flags = 0, 0 if self._is_tls else socket.MSG_WAITALL
        while done < len(memory):
            try:
                done += self._receive_into(memory[done:], flags)
            except Silent:
                self._check_patience()

    def _fill(self, blocks: Blocks) -> None:
        """Receive what has come: the rest of a body, or as many frames as there are."""
        needed = self._body_bytes if self._frame else protocol.HEADER_BYTES
        least = max(needed, _LEAST_ROOM_BYTES, 0 if self._frame else self._latest_bytes)
        if len(self._chunk) - self._start < least:
            # In another chunk; bodies in this one stay as long as someone looks at them.
            rest = bytes(self._chunk[self._start : self._end])
            self._chunk = memoryview(b"")
            self._chunk = blocks.take(_CHUNK_BYTES)
            self._chunk[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        if self._is_tls and self._frame:
            # Under TLS each call brings one record.
            until = self._start + self._body_bytes
            self._receive_all(self._chunk[self._end : until])
            self._end = until
            return
        try:
            self._end += self._receive_into(self._chunk[self._end : self._until()])
        except Silent:
            if self._frame is None and self._start == self._end:
                raise
            self._check_patience()

    def _until(self) -> int:
        """Return where the last frame ends that has room in the chunk, if all are alike.

        What is received of another one would be copied into the next chunk.
        """
        begin = self._start - (protocol.HEADER_BYTES if self._frame else 0)
        size = self._latest_bytes
        if not size or self._end >= (until := len(self._chunk) - (len(self._chunk) - begin) % size):
            return len(self._chunk)
        return until

    def _receive_into(self, room: memoryview, flags: int = 0) -> int:
        """Receive into memory; return how many bytes.

        Raises:
            Silent: Nothing came for a tick.
            ConnectionError: The peer closed the connection.
        """
        try:
            if self._is_unix:
                flags |= socket.MSG_CMSG_CLOEXEC
                got, ancillary, _, _ = self._socket.recvmsg_into([room], _FDS_BYTES, flags)
                for _, _, data in ancillary:
                    self._descriptors += struct.unpack("i", data[: struct.calcsize("i")])
            else:
                got = self._socket.recv_into(room, flags=flags)
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
            raise Silent("nothing came") from None
        if not got:
            raise ConnectionError("the peer closed the connection")
        self._heard = time.monotonic()
        return got

    def _check_patience(self) -> None:
        if time.monotonic() - self._heard > self._patience_s:
            raise ConnectionError(
                f"the peer stopped in the middle of a frame for {self._patience_s} s"
            )


def _tick(sock: socket.socket, only_tls: bool = False) -> None:
    """Make every receive give up after a tick, in the kernel where possible."""
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(ALIVE_S)
    elif not only_tls:
        sock.settimeout(None)
        timeval = struct.pack("ll", int(ALIVE_S), 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)


def _check(frame: Frame, total: int) -> None:
    if total != frame.body_sum:
        raise Corrupted(f"batch {frame.batch} of epoch {frame.epoch} was damaged on its way")


def _connect_unix(name: str, connect_s: float) -> socket.socket:
    """Return a Unix socket to a server of the same user.

    Raises:
        OSError: It cannot be reached.
        ProtocolError: It is another user's.
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
