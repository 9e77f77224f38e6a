"""What a lane says on one connection: answers, gathered into as few system calls as may be.

Every call costs a lane more than the bytes of a small batch do. What the kernel has no room for
stays here and goes first the next time.
"""

import socket
import ssl

from taas_magic.data import sockets, wire
from taas_magic.data.answer import Answer, Sent
from taas_magic.data.blocks import WrittenBlocks
from taas_magic.data.sockets import Part, Socket
from taas_magic.data.wire import Flag, Frame, Kind

LIGHT_BYTES = 1 << 20
"""A batch up to here is small: what it costs is the work around it, not its bytes."""

_SHARE_FROM_BYTES = 32 << 10
_GATHER_BYTES = 1 << 20
_GATHER_PARTS = 400


class Outbox:
    """The sending end of one connection, in one thread's hands at a time.

    Args:
        sock: The socket.
        sent: Counts the batches.
        shared_bytes: How much memory may be shared with the rank.

    Attributes:
        sums: Whether batches go with a checksum (nothing else sees to what is on the wire).
        is_light: Whether everything was small so far, and leaves by a plain system call.
    """

    def __init__(self, sock: Socket, sent: Sent, shared_bytes: int) -> None:
        self._socket, self._sent = sock, sent
        self._on_this_host = sock.family == socket.AF_UNIX
        self.is_light = not isinstance(sock, ssl.SSLSocket)
        self.sums = self.is_light and not self._on_this_host
        self._blocks = WrittenBlocks(shared_bytes)
        self._parts: list[Part] = []
        self._bytes = 0

    def __bool__(self) -> bool:
        """Whether something has still to go."""
        return bool(self._parts)

    @property
    def has_room(self) -> bool:
        """Whether one more answer may be gathered."""
        return self._bytes < _GATHER_BYTES and len(self._parts) < _GATHER_PARTS

    def free(self, block: int) -> None:
        """The rank reads this block of shared memory no more."""
        self._blocks.free(block)

    def add(self, asked: Frame, answer: Answer) -> None:
        """Lay an answer ready; one that needs a descriptor goes at once, after what lay here."""
        units, body = max(answer.units, 0), answer.body
        about = answer.kind, asked.epoch, asked.batch, units
        if isinstance(body, bytes):
            self._gather(wire.pack(Frame(*about, 0, len(body), order=answer.order)), body)
            return
        self.is_light &= body.body_bytes <= LIGHT_BYTES
        sizes = len(body.head), body.body_bytes
        self._sent.add(body.body_bytes)
        if self._on_this_host and body.body_bytes >= _SHARE_FROM_BYTES:
            block = self._blocks.write(body.parts(), body.body_bytes)
            if block is not None:
                flags = Flag.SHARED | (Flag.NEW_BLOCK if block.new else 0)
                head = wire.pack(Frame(*about, *sizes, 0, flags, block.number, answer.order))
                self._announce(head, block.descriptor if block.new else None)
                return
        total, flags = (answer.checksum(), Flag.SUMMED) if self.sums else (0, 0)
        head = wire.pack(Frame(*about, *sizes, total, flags, order=answer.order))
        first, *rest = body.parts()
        self._gather(head + first, *rest)

    def add_sign_of_life(self) -> None:
        """Say that the lane is alive, and still prepares."""
        self._gather(wire.pack(Frame(Kind.ALIVE)))

    def send(self) -> None:
        """Send everything; waits for the peer to take it."""
        parts, self._parts, self._bytes = self._parts, [], 0
        sockets.send(self._socket, parts)

    def send_some(self) -> bool:
        """Send what the kernel has room for now (not for TLS); returns whether anything went."""
        assert not isinstance(self._socket, ssl.SSLSocket)
        before = self._bytes
        self._parts = sockets.send_some(self._socket, self._parts)
        self._bytes = sum(map(len, self._parts))
        return self._bytes < before

    def close(self) -> None:
        """Give shared memory back; the rank's mappings stay valid."""
        self._blocks.close()

    def _gather(self, *parts: Part) -> None:
        self._parts += parts
        self._bytes += sum(map(len, parts))

    def _announce(self, head: bytes, descriptor: int | None) -> None:
        if descriptor is None:
            self._gather(head)
            return
        self.send()
        sockets.send(self._socket, [head], [descriptor])
