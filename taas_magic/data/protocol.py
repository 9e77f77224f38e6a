"""What ranks, a fetcher's server and its workers say to each other: messages, frames, the proof.

Every message is a typed struct, and reading one checks it. Bytes in, messages out, and the other
way round: no socket, no pickle, no torch.

A rank's connection carries frames: a prefix of fixed size, the packed message, and a body of bytes
where the message has one. Prefix and message have checksums, which are compared before anything in
them is believed, and both sizes are limited by what may be said now. What may be said depends on
how far the two have come (`ProtocolState`); everything else is a `ProtocolError` (the idea is
h11's).

    server                          rank
    Challenge               ─────►
                            ◄─────  Proof           (the run's key; HMAC-SHA256)
    Welcome | Rejected      ─────►                  (now both know: same run)
                            ◄─────  Requests        pure, so they may be repeated
    Alive … Response        ─────►                  in their order; it may answer some in a row
                            ◄─────  Free            spans of shared memory that are read no more
                            ◄─────  Cancel          what was requested is not wanted any more
    Cancelled               ─────►

A server and its worker exchange `Orders` and lists of `Reply`.
"""

import enum
import hashlib
import hmac
import struct
import zlib
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple, get_args

import msgspec
from msgspec import Meta, Struct

from taas_magic.data.sharding import UNHINTED
from taas_magic.errors import ProtocolError

ALIGN = 64
NONCE_BYTES = 32
MAX_BATCH_BYTES = 16 << 30
MAX_STATE_BYTES = 1 << 30

_PREFIX = struct.Struct("<IQI")
_CRC = struct.Struct("<I")
_BEFORE_MESSAGE = _PREFIX.size + _CRC.size
_CRC_OF_ALL = 0x2144DF1C
"""The CRC of whatever ends with its own CRC."""

HEADER_BYTES = 64
"""Size of most headers, prefix and message: padded, so that a body lies aligned behind it."""

_ZEROS = bytes(ALIGN)

_Count = Annotated[int, Meta(ge=0)]
_Units = Annotated[int, Meta(ge=UNHINTED)]


class RequestKind(enum.IntEnum):
    """What a request asks for."""

    OPEN = 1
    GET = 2
    PEEK = 3
    SAMPLE = 4
    ORDER = 5
    STATE = 6


class ResponseKind(enum.IntEnum):
    """What a response holds."""

    BATCH = 11
    PEEKED = 12
    VOID = 13
    OPENED = 14
    VALUE = 15
    ERROR = 16
    LOST = 17


class LoaderRequest(Struct, frozen=True, order=True, array_like=True, gc=False):
    """A pure question about a loader: whoever answers it, the answer is the same.

    Attributes:
        kind: OPEN (how long is an epoch), GET (a batch), PEEK (what does it count), SAMPLE (an item
            of the dataset), ORDER (a batch's indices, or those of all batches), STATE (the
            dataset's own state).
        slot: The batch's place in the epoch's order.
        detail: What else the request says: of GET the indices to use, of SAMPLE the index, of ORDER
            that all batches are meant, of STATE a state that the stream is to begin at.
    """

    kind: RequestKind
    epoch: int
    slot: int
    detail: bytes = b""


class Opened(Struct, frozen=True, array_like=True):
    """What is known of an epoch before its first batch.

    Attributes:
        batches: How many there are; None where only the end will show.
        streams: How many streams the loader is cut into; None for a map-style loader.
        order: Hash of the order; 0 where there is none to compare.
        counted: Whether batches carry `hints["units"]`.
        counter: Attribute in which an iterable-style dataset counts its epochs by itself, if an
            earlier epoch has shown one; it finds every epoch as the first.
        generator: Attribute in which `worker_init_fn` has put a random generator; "" for none.
    """

    batches: int | None
    streams: int | None
    order: int
    counted: bool = False
    counter: str = ""
    generator: str = ""


class Challenge(Struct, frozen=True, array_like=True, tag=1):
    """The server's first message."""

    nonce: bytes


class Proof(Struct, frozen=True, array_like=True, tag=2):
    """Shows that a rank knows the run's key, and says which loader it wants."""

    nonce: bytes
    mac: bytes
    loader: str


class Welcome(Struct, frozen=True, array_like=True, tag=3):
    """Shows that the server knows the run's key."""

    mac: bytes


class Rejected(Struct, frozen=True, array_like=True, tag=4):
    """Says why a rank is not let in."""

    why: str


class Requests(Struct, frozen=True, array_like=True, tag=5):
    """One request for each of some slots; the body is their detail."""

    kind: RequestKind
    epoch: _Count
    slots: tuple[_Count, ...]


class SharedPlace(NamedTuple):
    """Where a span of shared memory begins: in which of the server's arenas, at which byte."""

    arena: int
    offset: int


class Free(Struct, frozen=True, array_like=True, tag=6):
    """Spans of shared memory that the rank reads no more."""

    places: list[SharedPlace]


class Cancel(Struct, frozen=True, array_like=True, tag=7):
    """What was requested is not wanted any more."""


class Cancelled(Struct, frozen=True, array_like=True, tag=8):
    """From here on come responses to what was requested after `Cancel`."""


class Alive(Struct, frozen=True, array_like=True, tag=9):
    """The server lives and has no response yet."""


class SharedBody(Struct, frozen=True, array_like=True, gc=False):
    """A body that lies in shared memory, and is lent to the rank.

    Attributes:
        is_new: Whether the descriptor of this arena comes with the message.
    """

    place: SharedPlace
    size: _Count
    is_new: bool


class Response(Struct, frozen=True, array_like=True, tag=10):
    """The response to one request, or to some in a row; the bodies follow, unless it is `shared`.

    Attributes:
        units: Number that the batch counts in `--units`, or UNHINTED (BATCH, PEEKED).
        order: Hash of the epoch's order as the worker has it; 0 where it did not use its own. Of a
            stream, hash of this batch, for some of its first batches; else 0 (BATCH, PEEKED).
        head_bytes: How many bytes at the body's start are its table of contents (BATCH).
        body_sum: The checksum of all that follows; None where TLS or the kernel sees to it.
        more: The response to so many of the next requests is the same but for the slot and for what
            is in its body, which follows, too, and has the same size (BATCH).
    """

    kind: ResponseKind
    epoch: _Count
    slot: _Count
    units: _Units = 1
    order: _Count = 0
    head_bytes: _Count = 0
    body_sum: _Count | None = None
    shared: SharedBody | None = None
    more: _Count = 0


FromRank = Proof | Requests | Free | Cancel
FromServer = Challenge | Welcome | Rejected | Response | Alive | Cancelled

_encode = msgspec.msgpack.Encoder().encode


def pack(message: FromRank | FromServer, body_bytes: int = 0) -> bytes:
    """Return the header of a message whose body, of so many bytes, follows."""
    packed = _encode(message)
    prefix = _PREFIX.pack(len(packed), body_bytes, zlib.crc32(packed))
    padding = _ZEROS[: -(_BEFORE_MESSAGE + len(packed)) % ALIGN]
    return b"".join((prefix, _CRC.pack(zlib.crc32(prefix)), packed, padding))


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


class Role(enum.Enum):
    """Who listens."""

    SERVER = "server"
    RANK = "rank"


class _State:
    """Where one side of a connection stands: which messages it may hear, and of what size."""

    def __init__(self, name: str, most_bytes: int, most_body: int, messages: Any) -> None:
        self.name, self.most_bytes, self.most_body = name, most_bytes, most_body
        self.names = " or ".join(one.__name__ for one in get_args(messages) or (messages,))
        self.read = msgspec.msgpack.Decoder[Any](messages).decode


_STATES = {
    Role.SERVER: (
        _State("proving", 1 << 11, 0, Proof),
        _State("ready", 1 << 20, MAX_STATE_BYTES, Requests | Free | Cancel),
    ),
    Role.RANK: (
        _State("greeting", 1 << 11, 0, Challenge),
        _State("proving", 1 << 13, 0, Welcome | Rejected),
        _State("ready", 1 << 13, MAX_BATCH_BYTES, Response | Alive | Cancelled),
    ),
}
"""Each message leads to the next state; the last one stays."""


class Heard(NamedTuple):
    """A message that has come, the size of its header, and of the body that follows."""

    message: Any
    header_bytes: int
    body_bytes: int


class ProtocolState:
    """One side's view of a connection: reads what it hears, and raises at what may not be said."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._now, *self._later = _STATES[role]

    def hear(self, data: memoryview) -> Heard | None:
        """Read the message whose header begins with `data`; None as long as it is not whole.

        Raises:
            ProtocolError: Not ours, damaged, too large, or not to be said now; the connection is of
                no use any more.
        """
        if len(data) < HEADER_BYTES:
            return None
        size, body_bytes, crc = _PREFIX.unpack_from(data)
        if zlib.crc32(data[:_BEFORE_MESSAGE]) != _CRC_OF_ALL:
            raise ProtocolError("a frame's header is damaged, or is none: it has no valid checksum")
        now = self._now
        if size > now.most_bytes or body_bytes > now.most_body:
            raise ProtocolError(
                f"a message of {size} bytes with a body of {body_bytes} is announced; the limit is "
                f"{now.most_bytes} with {now.most_body}"
            )
        header_bytes = aligned(_BEFORE_MESSAGE + size)
        if len(data) < header_bytes:
            return None
        packed = data[_BEFORE_MESSAGE : _BEFORE_MESSAGE + size]
        if zlib.crc32(packed) != crc:
            raise ProtocolError("a frame's message is damaged: its checksum does not match")
        message = self._read(packed)
        if isinstance(message, Response):
            _check_size(message, body_bytes)
        if self._later:
            self._now = self._later.pop(0)
        return Heard(message, header_bytes, body_bytes)

    def _read(self, packed: memoryview) -> Any:
        try:
            return self._now.read(packed)
        except msgspec.DecodeError as error:
            raise ProtocolError(
                f"a {self._role.value} that is {self._now.name} may not hear this, only "
                f"{self._now.names}: {error}"
            ) from None


def _check_size(response: Response, body_bytes: int) -> None:
    """Refuse bodies and contents that have no room in what is announced."""
    bodies, name = 1 + response.more, response.kind.name
    size = body_bytes if response.shared is None else response.shared.size
    if size % bodies:
        raise ProtocolError(f"{name} announces {bodies} bodies of one size in {size} bytes")
    if response.head_bytes > size // bodies:
        raise ProtocolError(
            f"{name} announces {response.head_bytes} bytes of contents in {size // bodies}"
        )


class Assembler:
    """Turns a stream of bytes, cut anywhere, into messages with bodies; a server hears small ones.

    Args:
        state: What may be said.
    """

    def __init__(self, state: ProtocolState) -> None:
        self._state = state
        self._bytes = bytearray()
        self._heard: Heard | None = None

    def feed(self, data: bytes) -> Iterable[tuple[Any, bytes]]:
        """Yield every message that `data` completes, with its body.

        Raises:
            ProtocolError: Something that may not be said; the connection is of no use any more.
        """
        self._bytes += data
        while True:
            if self._heard is None:
                with memoryview(self._bytes) as view:
                    self._heard = self._state.hear(view)
                if self._heard is None:
                    return
                del self._bytes[: self._heard.header_bytes]
            if len(self._bytes) < self._heard.body_bytes:
                return
            message, _, size = self._heard
            self._heard = None
            body = bytes(self._bytes[:size])
            del self._bytes[:size]
            yield message, body


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


class WorkerChange(Struct, frozen=True, array_like=True):
    """A server has its workers' parent start a worker, or hears that one has ended.

    Attributes:
        pid: Of the one that has ended; 0: it is to start, and its end of its socket comes along.
        was_stopped: Whether it was ended since it had been stopped for too long.
    """

    number: int
    pid: int = 0
    exitcode: int = 0
    was_stopped: bool = False


class Command(Struct, frozen=True, array_like=True, gc=False):
    """One thing for a worker to prepare; the reply has the same number.

    Attributes:
        has_file: The request's detail is in the next of the descriptors that come along.
    """

    number: int
    request: LoaderRequest
    to_disk: bool = False
    has_file: bool = False


class Orders(Struct, frozen=True, array_like=True):
    """What a server tells a worker; `frees` are offsets in its arena that nobody reads any more."""

    commands: list[Command]
    frees: list[int]
    oldest_epoch: int


class Reply(Struct, frozen=True, array_like=True, gc=False):
    """What a worker says of a command, much as `Response` does; the body lies in its arena.

    Attributes:
        on_disk: The body lies on disk instead.
        disk_is_full: It was to go to disk, and there was no room.
    """

    number: int
    kind: ResponseKind
    units: int
    order: int = 0
    head_bytes: int = 0
    body_bytes: int = 0
    offset: int = 0
    body_sum: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    on_disk: bool = False
    disk_is_full: bool = False


read_opened = msgspec.msgpack.Decoder(Opened).decode
