"""Frames: what fits comes back, what does not is refused before it costs anything."""

import struct
import zlib

import hypothesis
import hypothesis.strategies as st
import pytest

from taas_magic.data import wire
from taas_magic.errors import ProtocolError

ALONE = st.builds(
    wire.Frame,
    kind=st.sampled_from([wire.Kind.BATCH, wire.Kind.VALUE]),
    epoch=st.integers(0, 2**63 - 1),
    batch=st.integers(0, 2**63 - 1),
    units=st.integers(0, 2**32 - 1),
    head_bytes=st.just(0),
    body_bytes=st.integers(0, wire.MAX_BATCH_BYTES),
    body_sum=st.integers(0, 2**64 - 1),
    flags=st.integers(0, 7),
    block=st.integers(0, 2**32 - 1),
    order=st.integers(0, 2**32 - 1),
    batches=st.just(1),
)
GROUPS = st.builds(
    wire.Frame._replace,
    ALONE,
    kind=st.just(wire.Kind.BATCH),
    body_bytes=st.integers(1, 1 << 20),
    flags=st.integers(0, 1),
    batches=st.integers(2, 1 << 14),
)
frames = ALONE | GROUPS


def forged(**changes):
    """A header whose own checksum is right and whose fields are not."""
    fields = {"magic": wire.MAGIC, "version": wire.VERSION, "kind": int(wire.Kind.GET), "epoch": 0}
    fields |= {"batch": 0, "body": 0, "batches": 1, **changes}
    raw = struct.pack(
        "<4sBBHIIIIqqQQI",
        *(fields["magic"], fields["version"], fields["kind"], 0, 0, 0, 0, 0),
        *(fields["epoch"], fields["batch"], fields["body"], 0, fields["batches"]),
    )
    return raw + struct.pack("<I", zlib.crc32(raw))


@hypothesis.given(frames)
def test_a_header_comes_back(frame):
    packed = wire.pack(frame)
    assert len(packed) == wire.HEADER_BYTES
    assert wire.unpack(packed) == frame


@hypothesis.given(frames, st.integers(0, wire.HEADER_BYTES * 8 - 1))
def test_a_flipped_bit_is_seen(frame, bit):
    damaged = bytearray(wire.pack(frame))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        wire.unpack(damaged)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"magic": b"GET "}, "does not speak"),
        ({"version": 9}, "version 9"),
        ({"kind": 99}, "no frame of kind 99"),
        ({"epoch": -1}, "epoch -1"),
        ({"batch": -(2**63)}, "batch -9223372036854775808"),
        ({"body": 2**63}, "9223372036854775808 bytes"),
        ({"body": 2**64 - 1}, "the limit is"),
        ({"kind": int(wire.Kind.BATCH), "body": 8 << 30, "batches": 3}, "25769803776 bytes"),
        ({"kind": int(wire.Kind.BATCH), "body": 64, "batches": 0}, "BATCH announces 0 batches"),
        ({"kind": int(wire.Kind.BATCH), "batches": 2}, "2 batches of 0 bytes"),
        ({"batches": 2}, "GET announces 2 batches"),
    ],
)
def test_numbers_out_of_bounds_are_refused(changes, says):
    with pytest.raises(ProtocolError, match=says):
        wire.unpack(forged(**changes))


@hypothesis.given(st.lists(st.integers(0, 2**63 - 1), max_size=300))
def test_numbers_come_back_and_cut_ones_are_refused(numbers):
    body = wire.pack_numbers(numbers)
    assert wire.numbers(body) == tuple(numbers)
    with pytest.raises(ProtocolError, match="no list of numbers"):
        wire.numbers(body + b"\0")
