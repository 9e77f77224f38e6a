"""What a lane says on one connection: answers, gathered into as few system calls as may be.

Every call costs a lane more than the bytes of a small batch do. What the kernel has no room for
stays here and goes first the next time.
"""

import socket
import ssl
from collections.abc import Iterable

from taas_magic.data import sockets, wire
from taas_magic.data.answer import Answer, Sent
from taas_magic.data.blocks import WrittenBlocks
from taas_magic.data.encode import Encoded
from taas_magic.data.group import Alike, Group
from taas_magic.data.sockets import Part, Socket
from taas_magic.data.stock import Key
from taas_magic.data.wire import Flag, Frame, Kind

LIGHT_BYTES = 1 << 20
"""A batch up to here is small: what it costs is the work around it, not its bytes."""

_SHARE_FROM_BYTES = 32 << 10
_GATHER_BYTES = wire.CHUNK_BYTES * 15 // 16
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
        self._group: Group | None = None
        self._bytes = 0

    def __bool__(self) -> bool:
        """Whether something has still to go."""
        return bool(self._parts) or self._group is not None

    @property
    def has_room(self) -> bool:
        """Whether one more answer may be gathered."""
        return self._bytes < _GATHER_BYTES and len(self._parts) < _GATHER_PARTS

    def free(self, blocks: Iterable[int]) -> None:
        """The rank reads these blocks of shared memory no more."""
        for block in blocks:
            self._blocks.free(block)

    def add(self, asked: Key, answer: Answer) -> None:
        """Lay an answer ready; one that needs a descriptor goes at once, after what lay here."""
        body = answer.body
        if isinstance(body, bytes):
            units = max(answer.units, 0)
            frame = Frame(answer.kind, asked.epoch, asked.slot, units, 0, len(body))
            self._gather(wire.pack(frame._replace(order=answer.order)), body)
            return
        size = body.body_bytes
        if size > LIGHT_BYTES:
            self.is_light = False
        self._sent.add(size)
        alike = Alike(asked.epoch, answer.units, len(body.head), size, answer.order)
        if self._on_this_host and size >= _SHARE_FROM_BYTES and self._share(asked, body, alike):
            return
        if self._group is None or not self._group.takes(alike):
            self._seal()
            self._group = Group(asked.slot, alike, self.sums)
        self._group.add(body.parts(), answer.checksum() if self.sums else 0)
        self._bytes += size

    def add_sign_of_life(self) -> None:
        """Say that the lane is alive, and still prepares."""
        self._gather(wire.pack(Frame(Kind.ALIVE)))

    def send(self) -> None:
        """Send everything; waits for the peer to take it."""
        self._seal()
        parts, self._parts, self._bytes = self._parts, [], 0
        sockets.send(self._socket, parts)

    def send_some(self) -> bool:
        """Send what the kernel has room for now (not for TLS); returns whether anything went."""
        assert not isinstance(self._socket, ssl.SSLSocket)
        self._seal()
        before = self._bytes
        self._parts = sockets.send_some(self._socket, self._parts)
        self._bytes = sum(map(len, self._parts))
        return self._bytes < before

    def close(self) -> None:
        """Give shared memory back; the rank's mappings stay valid."""
        self._blocks.close()

    def _seal(self) -> None:
        """No more batches come into the group."""
        if self._group is not None:
            self._parts += self._group.sealed()
            self._bytes += wire.HEADER_BYTES
            self._group = None

    def _gather(self, *parts: Part) -> None:
        self._seal()
        self._parts += parts
        self._bytes += sum(map(len, parts))

    def _share(self, asked: Key, body: Encoded, alike: Alike) -> bool:
        """Write a batch into memory that the rank maps; returns whether there was room."""
        block = self._blocks.write(body.parts(), body.body_bytes)
        if block is None:
            return False
        flags = Flag.SHARED | (Flag.NEW_BLOCK if block.new else 0)
        head = wire.pack(alike.frame(asked.slot)._replace(flags=flags, block=block.number))
        if not block.new:
            self._gather(head)
            return True
        self.send()
        sockets.send(self._socket, [head], [block.descriptor])
        return True
