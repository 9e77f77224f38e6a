"""What a rank hears from a lane: whole frames, their bodies where the kernel has put them.

One system call brings as many small frames as have come, into one chunk, and they stay there. A
large body goes straight into a block of its own.
"""

import socket
import ssl
import struct
import time
from collections import deque

from taas_magic.data import wire
from taas_magic.data.blocks import Blocks
from taas_magic.data.checksum import MASK, checksum, combined
from taas_magic.data.sockets import Socket, receive_into
from taas_magic.data.talk import Talk
from taas_magic.data.wire import Flag, Frame
from taas_magic.errors import ProtocolError

_LARGE_BYTES = wire.CHUNK_BYTES - wire.HEADER_BYTES
_LEAST_ROOM_BYTES = wire.CHUNK_BYTES // 8
_PIECE_BYTES = 992 << 10
_FEW_BYTES = 32 << 10
"""Bodies up to this are copied out: a batch that is kept must not keep a whole chunk."""


class Silent(OSError):
    """Nothing came for a tick."""


class Corrupted(ProtocolError):
    """A body's checksum does not match what arrived."""


class Inbox:
    """The receiving end of one connection.

    Args:
        sock: The socket; its receives give up after a tick.
        talk: What may be heard.
        patience_s: How long a frame may stand still in the middle.
    """

    def __init__(self, sock: Socket, talk: Talk, patience_s: float) -> None:
        self._socket, self._talk, self._patience_s = sock, talk, patience_s
        self._is_unix = sock.family == socket.AF_UNIX
        self._wait_for_all = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
        self._chunk = memoryview(b"")
        self._start = self._end = 0
        self._frame: Frame | None = None
        self._body_bytes = self._latest_bytes = 0
        self._follows_large = False
        self._heard = time.monotonic()
        self._descriptors: deque[int] = deque()

    def receive(self, blocks: Blocks) -> tuple[Frame, memoryview]:
        """Return the next frame and its body; waits for them.

        Raises:
            Silent: Nothing came for a tick.
            Corrupted: The body was damaged on its way.
            OSError, ProtocolError: The connection is of no use any more.
        """
        while (whole := self.here()) is None:
            if self._frame is not None and self._body_bytes > _LARGE_BYTES:
                return self._large(blocks)
            self._fill(blocks)
        return whole

    def here(self) -> tuple[Frame, memoryview] | None:
        """Return the next frame and its body if all of it has come."""
        if self._frame is None:
            after = self._start + wire.HEADER_BYTES
            if self._end < after:
                return None
            frame = wire.unpack(self._chunk[self._start : after])
            self._talk.hear(frame.kind)
            self._frame, self._start = frame, after
            is_shared = frame.flags & Flag.SHARED
            self._body_bytes = 0 if is_shared else frame.batches * frame.body_bytes
        at, size = self._start, self._body_bytes
        if self._end - at < size:
            return None
        frame, self._frame = self._frame, None
        self._start, self._latest_bytes = at + size, wire.HEADER_BYTES + size
        body = self._chunk[at : at + size]
        if frame.flags & Flag.SUMMED:
            _check(frame, [checksum(part) for part in wire.parts(frame, body)])
        if frame.body_bytes <= _FEW_BYTES or at % wire.ALIGN:
            body = memoryview(bytearray(body))
        return frame, body

    def descriptor(self) -> int:
        """The oldest descriptor that came along.

        Raises:
            ProtocolError: There is none.
        """
        if not self._descriptors:
            raise ProtocolError("a block of shared memory was announced and did not come")
        return self._descriptors.popleft()

    def _large(self, blocks: Blocks) -> tuple[Frame, memoryview]:
        """Receive a large body, of which the chunk has the beginning."""
        frame, self._frame = self._frame, None
        assert frame is not None
        body, begun = blocks.take(self._body_bytes), self._end - self._start
        body[:begun] = self._chunk[self._start : self._end]
        self._start, self._follows_large = self._end, True
        total = 0
        for at in range(0, self._body_bytes, _PIECE_BYTES):
            # Summed piece by piece, while it is in the processor's cache.
            piece = body[at : at + _PIECE_BYTES]
            receive_into(self._socket, piece[max(0, begun - at) :], self._patience_s)
            total += checksum(piece) if frame.flags & Flag.SUMMED else 0
        if frame.flags & Flag.SUMMED:
            _check(frame, [total & MASK])
        return frame, body

    def _fill(self, blocks: Blocks) -> None:
        """Receive what has come: the rest of a body, or as many frames as there are."""
        needed = self._body_bytes if self._frame else wire.HEADER_BYTES
        least = max(needed, _LEAST_ROOM_BYTES, 0 if self._frame else self._latest_bytes)
        if len(self._chunk) - self._start < least:
            self._renew(blocks)
        room, flags = self._chunk[self._end :][: self._whole_frames()], 0
        if self._frame or self._follows_large:
            room, flags = self._chunk[self._end : self._start + needed], self._wait_for_all
            self._follows_large = False
        try:
            got = self._receive_into(room, flags)
        except (BlockingIOError, TimeoutError):
            self._check_patience()
            return
        if not got:
            raise ConnectionError("the peer closed the connection")
        self._end, self._heard = self._end + got, time.monotonic()

    def _whole_frames(self) -> int:
        """Up to where to receive: what is cut by the end of a chunk has to be copied to the next.

        Frames that follow each other are mostly alike.
        """
        room = len(self._chunk) - self._start
        return room - room % (self._latest_bytes or 1) - (self._end - self._start)

    def _receive_into(self, room: memoryview, flags: int) -> int:
        if isinstance(self._socket, ssl.SSLSocket) or not self._is_unix:
            return self._socket.recv_into(room, flags=flags)
        space = socket.CMSG_SPACE(struct.calcsize("i"))
        got, ancillary, _, _ = self._socket.recvmsg_into([room], space, flags)
        for _, _, data in ancillary:
            self._descriptors += struct.unpack("i", data[: struct.calcsize("i")])
        return got

    def _check_patience(self) -> None:
        if self._frame is None and self._start == self._end:
            raise Silent("nothing came")
        if time.monotonic() - self._heard > self._patience_s:
            raise ConnectionError(
                f"the peer stopped in the middle of a frame for {self._patience_s} s"
            )

    def _renew(self, blocks: Blocks) -> None:
        """Go on in another chunk; bodies in this one stay as long as someone looks at them."""
        rest = bytes(self._chunk[self._start : self._end])
        self._chunk = memoryview(b"")
        self._chunk = blocks.take(wire.CHUNK_BYTES)
        self._chunk[: len(rest)] = rest
        self._start, self._end = 0, len(rest)


def _check(frame: Frame, checksums: list[int]) -> None:
    if combined(checksums) != frame.body_sum:
        raise Corrupted(f"batch {frame.batch} of epoch {frame.epoch} was damaged on its way")
