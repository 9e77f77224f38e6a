"""A lane's side of one connection: hear questions, answer them in order.

Each connection has a thread of its own. It gathers all answers that are ready into one system call,
because every call gives the interpreter lock away and has to win it back from the thread that runs
the dataset.
"""

import socket
import ssl
import time
from collections import deque
from collections.abc import MutableSequence

from taas_magic.data import encode, sockets, wire
from taas_magic.data.blocks import WrittenBlocks
from taas_magic.data.shard import VOID
from taas_magic.data.shelf import Shelf
from taas_magic.data.sockets import TICK_S, Part, Socket
from taas_magic.data.stock import Key
from taas_magic.data.talk import Assembler, Talk
from taas_magic.data.wire import Flag, Frame, Kind

_SHARE_FROM_BYTES = 32 << 10
_GATHER_BYTES = 1 << 20
_GATHER_PARTS = 400
_HEAR_BYTES = 64 << 10
_GATHER_S = 0.0005
"""How long small answers gather before the next are sent: each call costs the lane more."""


class Answer:
    """What is sent for a question: a header's fields and a body (see `wire.Frame`)."""

    def __init__(
        self, kind: Kind, body: encode.Encoded | bytes = b"", units: int = 1, order: int = 0
    ) -> None:
        self.kind, self.body, self.units, self.order = kind, body, units, order
        self.size = body.body_bytes if isinstance(body, encode.Encoded) else len(body)
        self._sum: int | None = None

    def checksum(self) -> int:
        """The body's checksum, taken once."""
        if self._sum is None:
            assert isinstance(self.body, encode.Encoded)
            self._sum = self.body.checksum()
        return self._sum


class Sent:
    """What a lane has sent, counted by its connections."""

    def __init__(self, stats: MutableSequence[float], batches_at: int, bytes_at: int) -> None:
        self._stats, self._batches_at, self._bytes_at = stats, batches_at, bytes_at

    def add(self, size: int) -> None:
        """One batch of `size` bytes more."""
        self._stats[self._batches_at] += 1
        self._stats[self._bytes_at] += size


class Connection:
    """One rank's connection, in a thread of its own.

    Args:
        sock: The socket, after the handshake.
        talk: What was said so far.
        shelf: Where the answers come from.
        sent: Counts them.
        shared_bytes: How much memory may be shared with the rank.
    """

    def __init__(
        self, sock: Socket, talk: Talk, shelf: Shelf, sent: Sent, shared_bytes: int
    ) -> None:
        self._socket, self._shelf, self._sent = sock, shelf, sent
        self._assembler = Assembler(talk)
        self._asked: deque[tuple[Frame, Key]] = deque()
        self._on_this_host = sock.family == socket.AF_UNIX
        self.sums = not self._on_this_host and not isinstance(sock, ssl.SSLSocket)
        self._blocks = WrittenBlocks(shared_bytes)

    def run(self) -> None:
        """Hear and answer until the peer closes."""
        try:
            while self._hear():
                if self._asked:
                    self._speak()
        finally:
            self._shelf.gone(self)
            self._blocks.close()

    def _hear(self) -> bool:
        """Read what has come; waits only when there is nothing to answer."""
        try:
            data = self._receive()
        except (BlockingIOError, TimeoutError):
            return True
        for frame, body in self._assembler.feed(data):
            if frame.block:
                self._blocks.free(frame.block)
            key = _key_of(frame, body)
            self._asked.append((frame, key))
            self._shelf.want(self, key, only_count=frame.kind is Kind.PEEK)
        return bool(data)

    def _receive(self) -> bytes:
        if not isinstance(self._socket, ssl.SSLSocket):
            return self._socket.recv(_HEAR_BYTES, socket.MSG_DONTWAIT if self._asked else 0)
        sockets.tick(self._socket, 0.0 if self._asked else TICK_S)
        try:
            return self._socket.recv(_HEAR_BYTES)
        except ssl.SSLWantReadError:
            raise BlockingIOError from None
        finally:
            sockets.tick(self._socket, TICK_S)

    def _speak(self) -> None:
        """Answer the first question, and with it all that follow and are ready."""
        parts: list[Part] = []
        size, patience_s = 0, TICK_S
        while self._asked and size < _GATHER_BYTES and len(parts) < _GATHER_PARTS:
            frame, key = self._asked[0]
            answer = self._look_up(frame, key, patience_s)
            if answer is None:
                break
            self._asked.popleft()
            patience_s = 0.0
            head, body, descriptors = self._pack(frame, answer)
            if descriptors:
                sockets.send(self._socket, parts)
                sockets.send(self._socket, [head], descriptors)
                parts = []
                continue
            parts += [head, *body]
            size += answer.size if body else 0
        if not parts and patience_s:
            parts = [wire.pack(Frame(Kind.ALIVE))]
        sockets.send(self._socket, parts)
        self._shelf.sent(self)
        if 0 < size < _GATHER_BYTES and self._asked:
            time.sleep(_GATHER_S)

    def _look_up(self, frame: Frame, key: Key, patience_s: float) -> Answer | None:
        if frame.kind is not Kind.PEEK:
            item = self._shelf.take(self, key, patience_s)
            assert item is None or isinstance(item, Answer)
            return item
        units = self._shelf.count(self, key, patience_s)
        if units is None:
            return None
        return Answer(Kind.PEEKED, units=units) if units != VOID else Answer(Kind.VOID, units=0)

    def _pack(self, asked: Frame, answer: Answer) -> tuple[bytes, list[Part], list[int]]:
        units, body = max(answer.units, 0), answer.body
        about = answer.kind, asked.epoch, asked.batch, units
        if isinstance(body, bytes):
            return wire.pack(Frame(*about, 0, len(body), order=answer.order)), [body], []
        sizes = len(body.head), body.body_bytes
        self._sent.add(body.body_bytes)
        if self._on_this_host and body.body_bytes >= _SHARE_FROM_BYTES:
            block = self._blocks.write(body.parts(), body.body_bytes)
            if block is not None:
                flags = Flag.SHARED | (Flag.NEW_BLOCK if block.new else 0)
                head = wire.pack(Frame(*about, *sizes, 0, flags, block.number, answer.order))
                return head, [], [block.descriptor] if block.new else []
        total, flags = (answer.checksum(), Flag.SUMMED) if self.sums else (0, 0)
        head = wire.pack(Frame(*about, *sizes, total, flags, order=answer.order))
        return head, body.parts(), []


def _key_of(frame: Frame, body: bytes) -> Key:
    kind = Kind.GET if frame.kind is Kind.PEEK else frame.kind
    return Key(kind, frame.epoch, frame.batch, body)
