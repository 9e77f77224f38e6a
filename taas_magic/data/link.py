"""Sockets under the wire: how a rank reaches a lane, and how each side sends and receives.

On one host a lane is reached through a Unix socket in the abstract namespace (it leaves no file,
whatever dies), and large batches lie in memory that both map; between hosts through TCP, with TLS
where a context is given. Who may speak is decided by the run's key alone, on every path.
"""

import json
import os
import socket
import ssl
import struct
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from taas_magic.data import wire
from taas_magic.data.blocks import Blocks, SharedBlocks
from taas_magic.data.checksum import checksum
from taas_magic.data.talk import Role, Talk, prove, proven
from taas_magic.data.wire import Flag, Frame, Kind
from taas_magic.errors import ProtocolError

Part = bytes | memoryview
Socket = socket.socket | ssl.SSLSocket

TICK_S = 1.0
"""How often someone who waits looks up; a lane that prepares says ALIVE as often."""

_CONNECT_S = 3.0
_MAX_PARTS = 500
_PEER_GONE_S = 10


class Address(NamedTuple):
    """Where a lane listens.

    Attributes:
        fetcher: Number of its fetcher.
        lane: Its number in the fetcher.
        host: Name or IP address for TCP.
        port: TCP port.
        unix: Name in the abstract namespace, "" for none.
        machine: `machine()` of its host.
    """

    fetcher: int
    lane: int
    host: str
    port: int
    unix: str
    machine: str

    def __str__(self) -> str:
        return f"fetcher {self.fetcher}, lane {self.lane} at {self.host}:{self.port}"


def machine() -> str:
    """Tells hosts, and network namespaces on one host, apart: who can share memory and sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


class Corrupted(ProtocolError):
    """A batch's checksum does not match what arrived."""


class Silent(OSError):
    """Nothing came for a tick."""


def keep_watch(sock: socket.socket) -> None:
    """Let the kernel notice a peer that is gone, and send small frames at once."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _PEER_GONE_S * 1000)


def tick(sock: Socket, seconds: float) -> None:
    """Make every receive give up after `seconds` (as OSError), in the kernel where possible."""
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(seconds)
        return
    sock.settimeout(None)
    whole = int(seconds)
    timeval = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)


def send(sock: Socket, parts: Sequence[Part], descriptors: Sequence[int] = ()) -> None:
    """Send all parts, gathered by the kernel; `descriptors` go along with the first byte."""
    if isinstance(sock, ssl.SSLSocket):
        for part in parts:
            sock.sendall(part)
        return
    ancillary = [
        (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))
    ]
    for start in range(0, len(parts), _MAX_PARTS):
        group = parts[start : start + _MAX_PARTS]
        sent = sock.sendmsg(group, ancillary if descriptors else ())
        descriptors = ()
        for part in unsent(group, sent):
            sock.sendall(part)


def unsent(parts: Iterable[Part], sent: int) -> Iterable[Part]:
    """What is left of parts after `sent` bytes of them have gone."""
    for part in parts:
        if sent < len(part):
            yield memoryview(part)[sent:]
        sent = max(0, sent - len(part))


def receive_into(sock: Socket, memory: memoryview, patience_s: float) -> None:
    """Fill `memory`.

    Raises:
        ConnectionError: The peer closed, or sent nothing for `patience_s`.
    """
    flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
    done, heard, size = 0, time.monotonic(), len(memory)
    while done < size:
        try:
            got = sock.recv_into(memory[done:], flags=flags)
        except (BlockingIOError, TimeoutError):
            got = -1
        if got == 0:
            raise ConnectionError("the peer closed the connection")
        if got > 0:
            done, heard = done + got, time.monotonic()
        elif time.monotonic() - heard > patience_s:
            raise ConnectionError(f"the peer stopped in the middle of a frame for {patience_s} s")


class Link:
    """A rank's connection to one lane.

    Args:
        address: The lane.
        key: The run's key.
        tls: Context for TCP; not used on one host, where no wire is.
        direct: Whether a Unix socket and shared memory may be used.
        patience_s: How long a frame may stand still in the middle.

    Raises:
        OSError: It cannot be reached.
        ProtocolError: It is not a lane of this run.
    """

    def __init__(
        self,
        address: Address,
        key: bytes,
        tls: ssl.SSLContext | None = None,
        direct: bool = True,
        patience_s: float = 5.0,
    ) -> None:
        self.address = address
        self._patience_s = patience_s
        self._talk = Talk(Role.RANK)
        self._shared = SharedBlocks()
        self._header = bytearray(wire.HEADER_BYTES)
        self._sum = True
        self._socket = self._connect(tls, direct)
        self.close = weakref.finalize(self, self._socket.close)
        """Close the connection; memory that batches look at stays."""
        try:
            tick(self._socket, _CONNECT_S)
            self.about = self._introduce(key)
            tick(self._socket, TICK_S)
        except BaseException:
            self.close()
            raise

    def _connect(self, tls: ssl.SSLContext | None, direct: bool) -> Socket:
        address = self.address
        if direct and address.unix and address.machine == machine():
            return _connect_unix(address.unix)
        sock = socket.create_connection((address.host, address.port), _CONNECT_S)
        keep_watch(sock)
        return sock if tls is None else tls.wrap_socket(sock, server_hostname=address.host)

    def _introduce(self, key: bytes) -> dict[str, object]:
        """The handshake: each side shows that it knows the run's key."""
        nonce = os.urandom(wire.NONCE_BYTES)
        challenge = bytes(self.receive(Blocks(0))[1])
        body = nonce + prove(key, Role.RANK, challenge)
        self.send([(Frame(Kind.PROOF, body_bytes=len(body)), body)])
        frame, welcome = self.receive(Blocks(0))
        if frame.kind is Kind.REFUSED:
            raise ProtocolError(f"{self.address} refused: {bytes(welcome).decode()}")
        if not proven(key, Role.LANE, nonce, bytes(welcome[: wire.MAC_BYTES])):
            raise ProtocolError(f"{self.address} does not know this run's key")
        about: dict[str, object] = json.loads(bytes(welcome[wire.MAC_BYTES :]))
        return about

    def send(self, frames: Iterable[tuple[Frame, bytes]]) -> None:
        """Send questions."""
        send(self._socket, [wire.pack(frame) + body for frame, body in frames])

    def receive(self, blocks: Blocks) -> tuple[Frame, memoryview]:
        """Return the next frame and its body, which lies in one of `blocks` or is shared.

        Raises:
            Silent: Nothing came for a tick; the connection is as good as before.
            Corrupted: The body was damaged on its way.
            OSError, ProtocolError: The connection is of no use any more.
        """
        frame = self._receive_header()
        if frame.flags & Flag.SHARED:
            return frame, self._shared.look(frame.block, frame.body_bytes)
        body = blocks.take(frame.body_bytes) if frame.body_bytes else memoryview(b"")
        receive_into(self._socket, body, self._patience_s)
        if frame.flags & Flag.SUMMED and checksum(body) != frame.body_sum:
            raise Corrupted(
                f"batch {frame.batch} of epoch {frame.epoch} from {self.address} is damaged"
            )
        return frame, body

    def _receive_header(self) -> Frame:
        header = memoryview(self._header)
        try:
            if self._socket.family == socket.AF_UNIX:
                got, ancillary, _, _ = self._socket.recvmsg_into([header], socket.CMSG_SPACE(4))
            else:
                got, ancillary = self._socket.recv_into(header), []
        except (BlockingIOError, TimeoutError):
            raise Silent(f"{self.address} is silent") from None
        if got == 0:
            raise ConnectionError(f"{self.address} closed the connection")
        if got < len(header):
            receive_into(self._socket, header[got:], self._patience_s)
        frame = wire.unpack(header)
        self._talk.hear(frame.kind)
        for _, _, data in ancillary:
            (descriptor,) = struct.unpack("i", data[:4])
            self._shared.add(frame.block, descriptor, os.fstat(descriptor).st_size)
            os.close(descriptor)
        return frame

    def freed(self) -> list[int]:
        """Numbers of the shared blocks that nobody looks at any more."""
        return self._shared.freed()


def _connect_unix(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(_CONNECT_S)
        sock.connect("\0" + name)
    except BaseException:
        sock.close()
        raise
    return sock
