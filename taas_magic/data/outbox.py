"""What a lane says on one connection: answers, gathered into as few system calls as may be.

Every call costs a lane more than the bytes of a small batch do. What the kernel has no room for
stays here and goes first the next time.
"""

import socket
import ssl
from collections.abc import Iterable, Sequence

from taas_magic.data import sockets, wire
from taas_magic.data.answer import Answer, Sent
from taas_magic.data.blocks import WrittenBlocks
from taas_magic.data.checksum import MASK
from taas_magic.data.sockets import Part, Socket
from taas_magic.data.stock import Key
from taas_magic.data.wire import Flag, Frame, Kind

LIGHT_BYTES = 1 << 20
"""A batch up to here is small: what it costs is the work around it, not its bytes."""

_SHARE_FROM_BYTES = 32 << 10
_GATHER_BYTES = wire.CHUNK_BYTES * 15 // 16
_GATHER_PARTS = 400
_GROUP_BYTES = wire.CHUNK_BYTES - wire.HEADER_BYTES
_GROUP_BATCHES = 16
"""A small batch that is kept keeps its whole group in memory."""


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
        self._group: _Group | None = None
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
        units, body = max(answer.units, 0), answer.body
        about = answer.kind, asked.epoch, asked.slot, units
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
        first = Frame(*about, *sizes, total, flags, order=answer.order)
        if self._group is None or not self._group.takes(first):
            self._seal()
            self._group = _Group(first)
        self._group.add(total, body.parts())
        self._bytes += body.body_bytes

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
            self._group = None

    def _gather(self, *parts: Part) -> None:
        self._seal()
        self._parts += parts
        self._bytes += sum(map(len, parts))

    def _announce(self, head: bytes, descriptor: int | None) -> None:
        if descriptor is None:
            self._gather(head)
            return
        self.send()
        sockets.send(self._socket, [head], [descriptor])


class _Group:
    """Batches that were asked for one after the other and go with one header, as they are alike.

    Args:
        first: The header of the first.
    """

    def __init__(self, first: Frame) -> None:
        self._first, self._alike = first, _alike(first)
        self._count = self._sum = 0
        self._parts: list[Part] = []

    def takes(self, frame: Frame) -> bool:
        """Whether one more has room, and would have the same header."""
        has_room = (self._count + 1) * frame.body_bytes <= _GROUP_BYTES
        return has_room and self._count < _GROUP_BATCHES and _alike(frame) == self._alike

    def add(self, total: int, parts: Sequence[Part]) -> None:
        """Put one more in; `total` is its checksum, and a sum's terms come in any order."""
        self._count += 1
        self._sum += total
        self._parts += parts

    def sealed(self) -> list[Part]:
        """All of them behind their header."""
        frame = self._first._replace(batches=self._count, body_sum=self._sum & MASK)
        return [wire.pack(frame), *self._parts]


def _alike(frame: Frame) -> tuple[int, ...]:
    return frame.units, frame.head_bytes, frame.body_bytes, frame.epoch, frame.order
