"""What a rank and a fetcher's server may say to each other: frames, who may send which, the proof.

Bytes in, `Frame` out, and the other way round: no socket, no pickle, no torch. Every frame is one
fixed header, checked by a CRC of its own before any field is believed, and a body whose size is
limited by the kind of the frame. A frame that the table does not list for a state is a
`ProtocolError` (the idea is h11's).

    server                             rank
    CHALLENGE nonce            ─────►
                               ◄─────  PROOF nonce, MAC, loader  (the run's key; HMAC-SHA256)
    WELCOME MAC                ─────►                            (now both know: same run)
                               ◄─────  OPEN epoch                how long is it, in which order
    OPENED                     ─────►
                               ◄─────  GET epoch, batches        a pure question, may be repeated
    ALIVE … BATCH | VOID | ERROR | LOST ─►
                               ◄─────  PEEK epoch, batches       what do they count, are they there
    PEEKED | VOID | ERROR | LOST ─────►
                               ◄─────  FREE spans                of shared memory, not read any more
                               ◄─────  CANCEL                    what was asked is not wanted
    CANCELLED                  ─────►
"""

import enum
import hashlib
import hmac
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from taas_magic.errors import ProtocolError

MAGIC = b"TaaS"
VERSION = 3
ALIGN = 64
NONCE_BYTES = 32
MAC_BYTES = 32
MAX_BATCH_BYTES = 16 << 30
MAX_STATE_BYTES = 1 << 30

_LAYOUT = struct.Struct("<4sBBHIIIqqQQQ")
_CRC = struct.Struct("<I")
HEADER_BYTES = _LAYOUT.size + _CRC.size
_CRC_OF_ALL = 0x2144DF1C
"""The CRC of whatever ends with its own CRC."""

_NUMBER_BYTES = 8
_64_BITS = (1 << 64) - 1


class Kind(enum.IntEnum):
    """What a frame is."""

    CHALLENGE = 1
    PROOF = 2
    WELCOME = 3
    REFUSED = 4
    OPEN = 10
    OPENED = 11
    GET = 12
    BATCH = 13
    PEEK = 14
    PEEKED = 15
    VOID = 16
    ERROR = 17
    ALIVE = 18
    SAMPLE = 19
    ORDER = 20
    VALUE = 21
    STATE = 22
    GIVEN = 23
    FREE = 24
    LOST = 25
    CANCEL = 26
    CANCELLED = 27


KINDS = {kind.value: kind for kind in Kind}
"""A lookup costs less than a call of `Kind`, for every batch."""


class FrameFlag:
    """How the body of a frame arrives; plain bits, tested for every batch."""

    SUMMED = 1
    """`body_sum` is the body's checksum."""
    SHARED = 2
    """The body is in shared memory, in `arena` from `offset` on; no byte of it follows."""
    NEW_ARENA = 4
    """The descriptor of that arena comes with the header."""


_SHARED = FrameFlag.SHARED

_MAX_BODY_BYTES: dict[Kind, int] = dict.fromkeys(Kind, 0) | {
    Kind.CHALLENGE: NONCE_BYTES,
    Kind.PROOF: NONCE_BYTES + MAC_BYTES + (1 << 10),
    Kind.WELCOME: MAC_BYTES,
    Kind.REFUSED: 1 << 12,
    Kind.OPENED: 1 << 12,
    Kind.GET: 1 << 16,
    Kind.BATCH: MAX_BATCH_BYTES,
    Kind.PEEK: 1 << 16,
    Kind.ERROR: MAX_BATCH_BYTES,
    Kind.SAMPLE: 1 << 24,
    Kind.VALUE: MAX_BATCH_BYTES,
    Kind.STATE: MAX_STATE_BYTES,
    Kind.GIVEN: 1 << 24,
    Kind.FREE: 1 << 20,
    Kind.LOST: 1 << 16,
}


class Frame(NamedTuple):
    """The header of one message.

    Attributes:
        batch: The batch (its place in the epoch's order) it is about; of GET and PEEK the first,
            the others are the body (`numbers`).
        units: What the batch counts in `--units` (BATCH, PEEKED).
        head_bytes: How many bytes at the body's start are its table of contents (BATCH).
        body_sum: The body's checksum, when `flags` has SUMMED.
        flags: How the body arrives.
        arena: Which shared memory holds the body, when `flags` has SHARED.
        order: Hash of the epoch's order as the worker has it; 0 where it did not use its own.
    """

    kind: Kind
    epoch: int = 0
    batch: int = 0
    units: int = 0
    head_bytes: int = 0
    body_bytes: int = 0
    body_sum: int = 0
    flags: int = 0
    arena: int = 0
    offset: int = 0
    order: int = 0


def pack(frame: Frame) -> bytes:
    """Return the header's bytes."""
    kind, epoch, batch, units, head, body, body_sum, flags, arena, offset, order = frame
    extra = offset if flags & _SHARED else body_sum
    about = epoch, batch, body, extra, units & _64_BITS
    fields = _LAYOUT.pack(MAGIC, VERSION, kind, flags, head, arena, order, *about)
    return fields + _CRC.pack(zlib.crc32(fields))


def unpack(header: bytes | bytearray | memoryview) -> Frame:
    """Return the frame that a header announces.

    Args:
        header: Exactly `HEADER_BYTES` bytes.

    Raises:
        ProtocolError: Not ours, another version, damaged, or a number out of its bounds.
    """
    fields = _LAYOUT.unpack_from(header)
    magic, version, kind, flags, head, arena, order, epoch, batch, body, extra, units = fields
    if magic != MAGIC:
        raise ProtocolError(f"the peer does not speak this protocol (it began with {magic!r})")
    if zlib.crc32(header) != _CRC_OF_ALL:
        raise ProtocolError("a frame's header is damaged: its checksum does not match")
    if version != VERSION:
        raise ProtocolError(
            f"the peer speaks version {version} of the data protocol, not {VERSION}"
        )
    known = KINDS.get(kind)
    if known is None:
        raise ProtocolError(f"there is no frame of kind {kind}")
    if epoch < 0 or batch < 0:
        raise ProtocolError(f"{known.name} asks for epoch {epoch}, batch {batch}")
    if body > _MAX_BODY_BYTES[known] or head > body:
        raise ProtocolError(
            f"{known.name} announces {body} bytes; the limit is {_MAX_BODY_BYTES[known]}"
        )
    if flags & _SHARED:
        return Frame(known, epoch, batch, units, head, body, 0, flags, arena, extra, order)
    return Frame(known, epoch, batch, units, head, body, extra, flags, 0, 0, order)


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Return the body of a frame that is about several batches, or spans."""
    return struct.pack(f"<{len(numbers)}q", *numbers)


def numbers(body: bytes) -> tuple[int, ...]:
    """Undo `pack_numbers`.

    Raises:
        ProtocolError: It is cut.
    """
    if len(body) % _NUMBER_BYTES:
        raise ProtocolError(f"{len(body)} bytes are no list of numbers")
    return struct.unpack(f"<{len(body) // _NUMBER_BYTES}q", body)


def aligned(size: int) -> int:
    """Round a size up to the alignment of buffers in a body."""
    return -(-size // ALIGN) * ALIGN


def layout(head_bytes: int, sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return the offset of each buffer of a body, every one aligned, and the size of the body."""
    offsets, at = [], aligned(head_bytes)
    for size in sizes:
        offsets.append(at)
        at += aligned(size)
    return offsets, at


class State(enum.Enum):
    """Where one side of a connection stands."""

    GREETING = "greeting"
    PROVING = "proving"
    READY = "ready"


class Role(enum.Enum):
    """Who listens."""

    SERVER = "server"
    RANK = "rank"


_ASKED = (
    *(Kind.OPEN, Kind.GET, Kind.PEEK, Kind.SAMPLE, Kind.ORDER),
    *(Kind.STATE, Kind.GIVEN, Kind.FREE, Kind.CANCEL),
)
_ANSWERED = (
    *(Kind.OPENED, Kind.BATCH, Kind.PEEKED, Kind.VOID, Kind.ERROR),
    *(Kind.ALIVE, Kind.VALUE, Kind.LOST, Kind.CANCELLED),
)
_MAY_HEAR: dict[tuple[Role, State], dict[Kind, State]] = {
    (Role.SERVER, State.PROVING): {Kind.PROOF: State.READY},
    (Role.SERVER, State.READY): dict.fromkeys(_ASKED, State.READY),
    (Role.RANK, State.GREETING): {Kind.CHALLENGE: State.PROVING},
    (Role.RANK, State.PROVING): {Kind.WELCOME: State.READY, Kind.REFUSED: State.GREETING},
    (Role.RANK, State.READY): dict.fromkeys(_ANSWERED, State.READY),
}


class ProtocolState:
    """One side's view of a connection: raises when it hears what may not be said now."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._go_to(State.PROVING if role is Role.SERVER else State.GREETING)

    def hear(self, kind: Kind) -> None:
        """Take note of a frame that came in.

        Raises:
            ProtocolError: The table does not allow it in this state.
        """
        state = self._may_hear.get(kind)
        if state is None:
            raise ProtocolError(
                f"a {self._role.value} that is {self.state.value} may not hear {kind.name}"
            )
        if state is not self.state:
            self._go_to(state)

    def _go_to(self, state: State) -> None:
        # Every frame comes by here, so what may be heard now is at hand.
        self.state, self._may_hear = state, _MAY_HEAR[self._role, state]


class Assembler:
    """Turns a stream of bytes, cut anywhere, into whole frames; a server hears small ones."""

    def __init__(self, talk: ProtocolState) -> None:
        self._talk = talk
        self._bytes = bytearray()
        self._frame: Frame | None = None

    def feed(self, data: bytes) -> Iterable[tuple[Frame, bytes]]:
        """Yield every frame that `data` completes, with its body.

        Raises:
            ProtocolError: Something that may not be said; the connection is of no use any more.
        """
        self._bytes += data
        while True:
            if self._frame is None:
                if len(self._bytes) < HEADER_BYTES:
                    return
                self._frame = unpack(self._bytes[:HEADER_BYTES])
                self._talk.hear(self._frame.kind)
                del self._bytes[:HEADER_BYTES]
            if len(self._bytes) < self._frame.body_bytes:
                return
            frame, self._frame = self._frame, None
            body = bytes(self._bytes[: frame.body_bytes])
            del self._bytes[: frame.body_bytes]
            yield frame, body


def prove(key: bytes, role: Role, nonce: bytes, place: str) -> bytes:
    """Return the MAC by which `role` shows that it knows the run's key.

    Args:
        nonce: The peer's.
        place: The server's name, as the prover knows it: what one server said proves no other.
    """
    said = b"\0".join((role.value.encode(), place.encode(), nonce))
    return hmac.new(key, said, hashlib.sha256).digest()


def proven(key: bytes, role: Role, nonce: bytes, place: str, mac: bytes) -> bool:
    """Return whether `mac` is what `role` would have answered (compared in constant time)."""
    return hmac.compare_digest(prove(key, role, nonce, place), mac)
