"""A rank's connection to a lane.

On one host a lane is reached through a Unix socket in the abstract namespace (it leaves no file,
whatever dies), and large batches lie in memory that both map; between hosts through TCP, with TLS
where a context is given. Who may speak is decided by the run's key alone, on every path.
"""

import json
import os
import socket
import ssl
import weakref
from collections.abc import Iterable
from pathlib import Path

from taas_magic.data import wire
from taas_magic.data.blocks import Blocks, SharedBlocks
from taas_magic.data.entries import Address
from taas_magic.data.inbox import Inbox
from taas_magic.data.sockets import TICK_S, Socket, keep_watch, send, tick
from taas_magic.data.talk import Role, Talk, prove, proven
from taas_magic.data.wire import Flag, Frame, Kind
from taas_magic.errors import ProtocolError

_CONNECT_S = 3.0


def machine() -> str:
    """Tells hosts, and network namespaces on one host, apart: who can share memory and sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


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
        self._shared = SharedBlocks()
        self._socket = self._connect(tls, direct)
        self._inbox = Inbox(self._socket, Talk(Role.RANK), patience_s)
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
        return self._mapped(*self._inbox.receive(blocks))

    def here(self) -> tuple[Frame, memoryview] | None:
        """What `receive` would return at once, if anything; raises the same."""
        whole = self._inbox.here()
        return None if whole is None else self._mapped(*whole)

    def _mapped(self, frame: Frame, body: memoryview) -> tuple[Frame, memoryview]:
        if frame.flags & Flag.SHARED:
            if frame.flags & Flag.NEW_BLOCK:
                descriptor = self._inbox.descriptor()
                self._shared.add(frame.block, descriptor, os.fstat(descriptor).st_size)
                os.close(descriptor)
            return frame, self._shared.look(frame.block, frame.body_bytes)
        return frame, body

    @property
    def shared_bytes(self) -> int:
        """Memory of the lane's that this process maps."""
        return self._shared.held_bytes

    def free_blocks(self) -> list[int]:
        """Numbers of shared blocks that the lane may write again; whoever asks tells it."""
        return self._shared.free()


def _connect_unix(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(_CONNECT_S)
        sock.connect("\0" + name)
    except BaseException:
        sock.close()
        raise
    return sock
