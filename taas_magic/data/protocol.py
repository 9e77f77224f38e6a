"""Messages between a rank and a fetcher's server, and between the server and its workers.

Each message is a typed struct and is validated when it is decoded. This module uses no sockets, no
pickle and no torch.

A connection between rank and server carries frames: a prefix of fixed size, the packed message, and
an optional body. Prefix and message each have a checksum, which the receiver verifies first. As in
the HTTP library h11, the state of the connection (`ProtocolState`) decides which messages are
allowed, and how large message and body may be. Any other input raises `ProtocolError`.

    server                          rank
    Challenge               ─────►
                            ◄─────  Proof           the rank proves the run's key (HMAC-SHA256)
    Welcome | Rejected      ─────►                  Welcome: the server proves the run's key
                            ◄─────  Requests        may be repeated after a failed connection
    Alive … Response        ─────►                  in the order of the requests; one Response may
                                                    answer several requests
                            ◄─────  FreeSpans       shared memory that the rank no longer reads
                            ◄─────  Cancel          cancels all pending requests
    Cancelled               ─────►                  after the last response to cancelled requests

A server sends `CommandBatch` to a worker, and the worker sends lists of `Reply`.
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
"""CRC of any data followed by its own CRC."""

HEADER_BYTES = 64
"""Minimum size in bytes of a header (prefix, message, and padding that aligns the body)."""

_ZEROS = bytes(ALIGN)

_Count = Annotated[int, Meta(ge=0)]
_Units = Annotated[int, Meta(ge=UNHINTED)]


class RequestKind(enum.IntEnum):
    """Kind of a request; determines what a rank requests.

    OPEN: an epoch's description. GET: a batch. PEEK: the units of a batch. SAMPLE: an item of the
    dataset. ORDER: the indices of one batch or of all batches. STATE: the dataset's own state; but
    if the request itself contains a state, the dataset loads this state.
    """

    OPEN = 1
    GET = 2
    PEEK = 3
    SAMPLE = 4
    ORDER = 5
    STATE = 6


class ResponseKind(enum.IntEnum):
    """Kind of a response; determines the content of the response's body.

    BATCH: a batch. PEEKED: no body; the response has the batch's units. VOID: no body; the slot has
    no batch. OPENED: an `EpochDescription`. VALUE: an encoded object. ERROR: an exception of the
    user's code. LOST: a text for the user; each worker that tried to prepare the batch has ended.
    """

    BATCH = 11
    PEEKED = 12
    VOID = 13
    OPENED = 14
    VALUE = 15
    ERROR = 16
    LOST = 17


class LoaderRequest(Struct, frozen=True, order=True, array_like=True, gc=False):
    """Request about a loader. After a failure, the client sends the request to another fetcher.

    Attributes:
        kind: What the rank requests (see `RequestKind`).
        slot: Number of the batch in the epoch's order.
        detail: GET: the indices of the batch's samples; empty to use the worker's own order.
            SAMPLE: the index. ORDER: empty for the indices of one batch, else of all batches.
            STATE: the state to load into the dataset; empty to request the dataset's state.
    """

    kind: RequestKind
    epoch: int
    slot: int
    detail: bytes = b""


class EpochDescription(Struct, frozen=True, array_like=True):
    """Description of an epoch before its first batch.

    Attributes:
        batches: Number of batches; None if it is not known before the epoch's end.
        streams: Number of streams of an iterable-style loader; None for a map-style one.
        order: Hash of the epoch's order; 0 for an iterable-style loader.
        counted: Whether the first batch has `hints["units"]`; always False without `--units`.
        counter: Name of the attribute in which an iterable-style dataset counts its epochs; "" if
            none is known. Rank 0 warns the user of such a counter: each epoch uses a fresh copy of
            the dataset, so the counter never advances.
        generator: Name of the attribute in which `worker_init_fn` has stored a random generator; ""
            if there is no such attribute.
    """

    batches: int | None
    streams: int | None
    order: int
    counted: bool = False
    counter: str = ""
    generator: str = ""


class Challenge(Struct, frozen=True, array_like=True, tag=1):
    """First message of the server, with a nonce that the rank's `Proof` must use."""

    nonce: bytes


class Proof(Struct, frozen=True, array_like=True, tag=2):
    """Proof that a rank knows the run's key, with the name of the loader that the rank requests."""

    nonce: bytes
    mac: bytes
    loader: str


class Welcome(Struct, frozen=True, array_like=True, tag=3):
    """Proof that the server knows the run's key; ends the handshake."""

    mac: bytes


class Rejected(Struct, frozen=True, array_like=True, tag=4):
    """Message of a server that rejects a rank, with the reason."""

    why: str


class Requests(Struct, frozen=True, array_like=True, tag=5):
    """Requests for one or several slots; the body is the `detail` that all of them share."""

    kind: RequestKind
    epoch: _Count
    slots: tuple[_Count, ...]


class SharedSpan(NamedTuple):
    """Position of a batch in shared memory.

    Attributes:
        arena: Number of the arena, the shared memory of one worker; unique in the server.
        offset: Byte offset in the arena.
    """

    arena: int
    offset: int


class FreeSpans(Struct, frozen=True, array_like=True, tag=6):
    """Message of a rank with the spans of shared memory that the rank no longer reads."""

    spans: list[SharedSpan]


class Cancel(Struct, frozen=True, array_like=True, tag=7):
    """Message of a rank that cancels all its pending requests."""


class Cancelled(Struct, frozen=True, array_like=True, tag=8):
    """Reply to `Cancel`: the responses that follow belong to requests sent after `Cancel`."""


class Alive(Struct, frozen=True, array_like=True, tag=9):
    """Heartbeat of a server to a rank whose next response is not ready yet.

    By this message, the rank knows that the server is not silent, and keeps waiting.
    """


class SharedBody(Struct, frozen=True, array_like=True, gc=False):
    """Position and size of a body in shared memory.

    The server reuses the memory only after the rank has sent `FreeSpans`.

    Attributes:
        is_new: Whether this is the first body from this arena on the connection. If so, the message
            carries the descriptor of the arena's file.
    """

    span: SharedSpan
    size: _Count
    is_new: bool


class Response(Struct, frozen=True, array_like=True, tag=10):
    """Response to one request, or to several consecutive requests.

    The bodies follow the message, unless the body is `shared`. Parentheses name the kinds of
    response that use an attribute. All kinds use the attributes without parentheses.

    Attributes:
        slot: Slot of the first request.
        units: Units of the batch; UNHINTED if the batch has no `hints["units"]` (BATCH, PEEKED).
        order: Hash by which ranks notice that they get different data; 0 for none (BATCH, PEEKED,
            VOID, and VALUE in reply to ORDER). Map-style loader: the hash of the epoch's order that
            the worker computed. Iterable-style loader: the hash of the batch, for batches 0, 1, 2,
            4, 8, … of a stream. For the remaining batches, the hash of batch 0, as the same reading
            of the stream gave it (`BatchSource.first_hash`); 0 if this hash is not known.
        head_bytes: Size of the table of contents at the body's start (BATCH).
        body_sum: Checksum of all bodies, for batches over TCP without TLS; else None.
        shared: The body in shared memory; None if the body follows.
        more: Number of further requests that this message answers. Their responses differ only in
            the slot and in the body's content; all bodies have the same size (BATCH).
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


FromRank = Proof | Requests | FreeSpans | Cancel
FromServer = Challenge | Welcome | Rejected | Response | Alive | Cancelled

_encode = msgspec.msgpack.Encoder().encode


def encode_header(message: FromRank | FromServer, body_bytes: int = 0) -> bytes:
    """Return the header of a message, to be followed by a body of `body_bytes` bytes."""
    packed = _encode(message)
    prefix = _PREFIX.pack(len(packed), body_bytes, zlib.crc32(packed))
    padding = _ZEROS[: -(_BEFORE_MESSAGE + len(packed)) % ALIGN]
    return b"".join((prefix, _CRC.pack(zlib.crc32(prefix)), packed, padding))


def aligned(size: int) -> int:
    """Return `size`, rounded up to a multiple of the alignment of a body's buffers."""
    return -(-size // ALIGN) * ALIGN


def layout(head_bytes: int, sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return the aligned offset of each buffer in a body, and the size of the body."""
    offsets, at = [], aligned(head_bytes)
    for size in sizes:
        offsets.append(at)
        at += aligned(size)
    return offsets, at


class Role(enum.Enum):
    """Side of a connection: the fetcher's server, or the rank."""

    SERVER = "server"
    RANK = "rank"


class _State:
    """State of one side of a connection: the messages that the side may receive, and size limits.

    Args:
        name: Name of the state, for error messages.
        most_bytes: Maximum size of a message without its body.
        most_body: Maximum size of a message's body.
        messages: Type of the allowed messages, or a union of types.
    """

    def __init__(self, name: str, most_bytes: int, most_body: int, messages: Any) -> None:
        self.name, self.most_bytes, self.most_body = name, most_bytes, most_body
        self.names = " or ".join(one.__name__ for one in get_args(messages) or (messages,))
        self.read = msgspec.msgpack.Decoder[Any](messages).decode


_STATES = {
    Role.SERVER: (
        _State("proving", 1 << 11, 0, Proof),
        _State("ready", 1 << 20, MAX_STATE_BYTES, Requests | FreeSpans | Cancel),
    ),
    Role.RANK: (
        _State("greeting", 1 << 11, 0, Challenge),
        _State("proving", 1 << 13, 0, Welcome | Rejected),
        _State("ready", 1 << 13, MAX_BATCH_BYTES, Response | Alive | Cancelled),
    ),
}
"""States of each side of a connection, in order.

Each received message moves the side to its next state. The side stays in the last state.
"""


class ReceivedFrame(NamedTuple):
    """A received message, the size of its header, and the size of the body that follows."""

    message: Any
    header_bytes: int
    body_bytes: int


class ProtocolState:
    """Decoder of the messages that one side of a connection (`role`) receives.

    The decoder tracks the connection's state, and rejects messages that the state does not allow.
    """

    def __init__(self, role: Role) -> None:
        self._role = role
        self._now, *self._later = _STATES[role]

    def decode_message(self, data: memoryview) -> ReceivedFrame | None:
        """Decode the message whose header is at the start of `data`.

        Check the prefix's checksum, the size limits of the current state, the message's checksum,
        and the message itself. A decoded message moves the connection to its next state.

        Returns:
            The message and its sizes; None if the header is not complete.

        Raises:
            ProtocolError: The data is damaged, too large or of another protocol, or the message is
                not allowed in this state. The connection is no longer usable.
        """
        if len(data) < HEADER_BYTES:
            return None
        size, body_bytes, crc = _PREFIX.unpack_from(data)
        if zlib.crc32(data[:_BEFORE_MESSAGE]) != _CRC_OF_ALL:
            raise ProtocolError("a frame's header is damaged: its checksum does not match")
        now = self._now
        if size > now.most_bytes or body_bytes > now.most_body:
            raise ProtocolError(
                f"a message of {size} bytes with a body of {body_bytes} bytes is too long; the "
                f"limits are {now.most_bytes} and {now.most_body}"
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
        return ReceivedFrame(message, header_bytes, body_bytes)

    def _read(self, packed: memoryview) -> Any:
        try:
            return self._now.read(packed)
        except msgspec.DecodeError as error:
            raise ProtocolError(
                f"a {self._role.value} in state {self._now.name} accepts only "
                f"{self._now.names}: {error}"
            ) from None


def _check_size(response: Response, body_bytes: int) -> None:
    """Raise ProtocolError if the sizes that a response announces conflict with each other.

    All bodies of a response must have the same size. Each must be at least as large as its table of
    contents (`head_bytes`).
    """
    bodies, name = 1 + response.more, response.kind.name
    size = body_bytes if response.shared is None else response.shared.size
    if size % bodies:
        raise ProtocolError(f"{name} announces {bodies} bodies of one size in {size} bytes")
    if response.head_bytes > size // bodies:
        raise ProtocolError(
            f"{name} announces {response.head_bytes} bytes of contents in {size // bodies}"
        )


class Assembler:
    """Splitter of a received byte stream into messages with bodies.

    The splitter copies the data, so only servers use this class. The messages that servers receive
    from ranks are small, except the state of a dataset.
    """

    def __init__(self, state: ProtocolState) -> None:
        self._state = state
        self._bytes = bytearray()
        self._received: ReceivedFrame | None = None

    def feed(self, data: bytes) -> Iterable[tuple[Any, bytes]]:
        """Yield every message that `data` completes, with its body.

        The rest of the data is stored, until a later call completes its message or body.

        Raises:
            ProtocolError: A message is not allowed or damaged; the connection is no longer usable.
        """
        self._bytes += data
        while True:
            if self._received is None:
                with memoryview(self._bytes) as view:
                    self._received = self._state.decode_message(view)
                if self._received is None:
                    return
                del self._bytes[: self._received.header_bytes]
            if len(self._bytes) < self._received.body_bytes:
                return
            message, _, size = self._received
            self._received = None
            body = bytes(self._bytes[:size])
            del self._bytes[:size]
            yield message, body


def make_proof(key: bytes, role: Role, nonce: bytes, socket_name: str) -> bytes:
    """Return the MAC that proves that `role` knows the run's key.

    Args:
        role: The side that proves itself.
        nonce: The peer's nonce.
        socket_name: Name of the server's Unix socket, as the proving side knows it. Because the MAC
            includes this name, a proof for one server is not valid for another server.
    """
    signed = b"\0".join((role.value.encode(), socket_name.encode(), nonce))
    return hmac.new(key, signed, hashlib.sha256).digest()


def is_proof(key: bytes, role: Role, nonce: bytes, socket_name: str, mac: bytes) -> bool:
    """Return whether `mac` is the result of `make_proof` for these arguments.

    The comparison takes the same time for every `mac`, so that the time reveals nothing about the
    correct MAC.
    """
    return hmac.compare_digest(make_proof(key, role, nonce, socket_name), mac)


class WorkerChange(Struct, frozen=True, array_like=True):
    """Message between a server and the parent process of the server's workers.

    The server sends this message to request a new worker. The message then carries the new worker's
    end of a socket pair, which connects worker and server. The parent process sends this message to
    report that a worker has ended.

    Attributes:
        number: Number of the worker.
        pid: Process id of the worker that has ended; 0 in a request for a new worker.
        was_stopped: Whether the parent process killed the worker, because the worker had been
            stopped (SIGSTOP) for too long.
    """

    number: int
    pid: int = 0
    exitcode: int = 0
    was_stopped: bool = False


class Command(Struct, frozen=True, array_like=True, gc=False):
    """Command to a worker to answer one request.

    Attributes:
        number: Number of the command; the `Reply` has the same number.
        has_file: Whether the request's detail is in a file, whose descriptor the message carries.
    """

    number: int
    request: LoaderRequest
    has_file: bool = False


class CommandBatch(Struct, frozen=True, array_like=True):
    """Message of a server to a worker, with commands and memory to reuse.

    Attributes:
        commands: Requests to answer, in order.
        frees: Offsets of batches in the worker's arena that are no longer in use.
        oldest_epoch: First epoch that ranks may still request.
    """

    commands: list[Command]
    frees: list[int]
    oldest_epoch: int


class Reply(Struct, frozen=True, array_like=True, gc=False):
    """Worker's reply to a command; the server makes the `Response` to the rank from this reply.

    Fields that are not listed here have the same meaning as in `Response`.

    Attributes:
        number: Number of the command.
        offset: Byte offset of the body in the worker's arena.
        wall_s: Seconds that the preparation took.
        cpu_s: CPU time of the preparation, in seconds.
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


decode_epoch_description = msgspec.msgpack.Decoder(EpochDescription).decode
