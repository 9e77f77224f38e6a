"""Frames between a rank and a fetcher's lane: what they look like and how large they may be.

No socket, no pickle and no torch in here: bytes in, `Frame` out, and the other way round. Every
frame is one fixed header, checked by a CRC of its own before any field is believed, and a body
whose size is limited by the kind of the frame. `talk` says who may send which frame when.
"""

import enum
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from taas_magic.errors import ProtocolError

MAGIC = b"TaaS"
VERSION = 2
ALIGN = 64
NONCE_BYTES = 32
MAC_BYTES = 32
MAX_BATCH_BYTES = 16 << 30
CHUNK_BYTES = 1 << 20
"""What a rank receives small frames into; several batches that share a frame do not exceed it."""

_LAYOUT = struct.Struct("<4sBBHIIIIqqQQI")
_CRC = struct.Struct("<I")
HEADER_BYTES = _LAYOUT.size + _CRC.size

_NUMBER_BYTES = 8

_CRC_OF_ALL = 0x2144DF1C
"""The CRC of whatever ends with its own CRC."""


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


_KINDS = {kind.value: kind for kind in Kind}


class Flag:
    """How the body of a BATCH arrives; plain bits, tested for every batch."""

    SUMMED = 1
    """`body_sum` holds the body's checksums."""
    SHARED = 2
    """The body is in shared memory block `block`; no byte of it follows."""
    NEW_BLOCK = 4
    """The descriptor of that block comes with the header."""


_MAX_BODY_BYTES: dict[Kind, int] = {
    Kind.CHALLENGE: NONCE_BYTES,
    Kind.PROOF: NONCE_BYTES + MAC_BYTES,
    Kind.WELCOME: MAC_BYTES + (1 << 16),
    Kind.REFUSED: 1 << 12,
    Kind.OPEN: 0,
    Kind.OPENED: 1 << 12,
    Kind.GET: 1 << 16,
    Kind.BATCH: MAX_BATCH_BYTES,
    Kind.PEEK: 1 << 16,
    Kind.PEEKED: 0,
    Kind.VOID: 0,
    Kind.ERROR: 1 << 24,
    Kind.ALIVE: 0,
    Kind.SAMPLE: 1 << 16,
    Kind.ORDER: 0,
    Kind.VALUE: MAX_BATCH_BYTES,
    Kind.STATE: 1 << 24,
    Kind.GIVEN: 1 << 24,
    Kind.FREE: 1 << 20,
}


class Frame(NamedTuple):
    """The header of one message.

    Attributes:
        kind: What it is.
        epoch: The epoch it is about.
        batch: The batch (its place in the epoch's order) it is about; of GET and PEEK the first,
            the others are the body (`numbers`).
        units: What the batch counts in `--units` (BATCH, PEEKED).
        head_bytes: How many bytes at the body's start are its table of contents (BATCH).
        body_bytes: Size of the body; where it holds several batches, of each of them.
        body_sum: Checksums of the batches in the body, combined, when `flags` has SUMMED.
        flags: How the body arrives.
        block: Which shared memory block holds the body (BATCH).
        order: Hash of the epoch's order as the lane has it; 0 where it did not use its own.
        batches: How many batches the body holds, alike in `units` and sizes: this one and those
            that were asked for after it (BATCH).
    """

    kind: Kind
    epoch: int = 0
    batch: int = 0
    units: int = 0
    head_bytes: int = 0
    body_bytes: int = 0
    body_sum: int = 0
    flags: int = 0
    block: int = 0
    order: int = 0
    batches: int = 1


def pack(frame: Frame) -> bytes:
    """Return the header's bytes."""
    fields = _LAYOUT.pack(
        MAGIC,
        VERSION,
        frame.kind,
        frame.flags,
        frame.block,
        frame.head_bytes,
        frame.units,
        frame.order,
        frame.epoch,
        frame.batch,
        frame.body_bytes,
        frame.body_sum,
        frame.batches,
    )
    return fields + _CRC.pack(zlib.crc32(fields))


def unpack(header: bytes | bytearray | memoryview) -> Frame:
    """Return the frame that a header announces.

    Args:
        header: Exactly `HEADER_BYTES` bytes.

    Raises:
        ProtocolError: Not ours, another version, damaged, or a number out of its bounds.
    """
    fields = _LAYOUT.unpack_from(header)
    magic, version, kind, flags, block, head, units, order, epoch, batch = fields[:10]
    body, body_sum, count = fields[10:]
    if magic != MAGIC:
        raise ProtocolError(f"the peer does not speak this protocol (it began with {magic!r})")
    if zlib.crc32(header) != _CRC_OF_ALL:
        raise ProtocolError("a frame's header is damaged: its checksum does not match")
    if version != VERSION:
        raise ProtocolError(
            f"the peer speaks version {version} of the data protocol, not {VERSION}"
        )
    known = _KINDS.get(kind)
    if known is None:
        raise ProtocolError(f"there is no frame of kind {kind}")
    if epoch < 0 or batch < 0:
        raise ProtocolError(f"{known.name} asks for epoch {epoch}, batch {batch}")
    if body * count > _MAX_BODY_BYTES[known] or head > body:
        raise ProtocolError(
            f"{known.name} announces {body * count} bytes; the limit is {_MAX_BODY_BYTES[known]}"
        )
    if count != 1 and (known is not Kind.BATCH or not count * body or flags & Flag.SHARED):
        raise ProtocolError(f"{known.name} announces {count} batches of {body} bytes")
    return Frame(known, epoch, batch, units, head, body, body_sum, flags, block, order, count)


def parts(frame: Frame, body: memoryview) -> Sequence[memoryview]:
    """The bodies of the batches that a frame brought."""
    if frame.batches == 1:
        return (body,)
    size = frame.body_bytes
    return [body[at : at + size] for at in range(0, frame.batches * size, size)]


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Return the body of a frame that is about several batches, or blocks."""
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
    """Where the buffers of a body lie.

    Returns:
        The offset of each buffer, every one aligned, and the size of the whole body.
    """
    offsets, at = [], aligned(head_bytes)
    for size in sizes:
        offsets.append(at)
        at += aligned(size)
    return offsets, at
