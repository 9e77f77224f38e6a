"""Frames: what fits comes back, what does not is refused before it costs anything."""

import os
import struct
import zlib

import hypothesis
import hypothesis.strategies as st
import pytest

from taas_magic.data import wire
from taas_magic.errors import ProtocolError

frames = st.builds(
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
)


def ready_lane():
    talk = wire.Talk(wire.Role.LANE)
    talk.hear(wire.Kind.PROOF)
    return wire.Assembler(talk)


def forged(**changes):
    """A header whose own checksum is right and whose fields are not."""
    fields = {"magic": wire.MAGIC, "version": 1, "kind": int(wire.Kind.GET), "epoch": 0}
    fields |= {"batch": 0, "body": 0, **changes}
    raw = struct.pack(
        "<4sBBHIIIIqqQQ",
        *(fields["magic"], fields["version"], fields["kind"], 0, 0, 0, 0, 0),
        *(fields["epoch"], fields["batch"], fields["body"], 0),
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
    ],
)
def test_numbers_out_of_bounds_are_refused(changes, says):
    with pytest.raises(ProtocolError, match=says):
        wire.unpack(forged(**changes))


@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(st.binary(max_size=300), max_size=5), st.data())
def test_a_stream_cut_anywhere_gives_the_same_frames(bodies, data):
    sent = [
        (wire.Frame(wire.Kind.GET, batch=n, body_bytes=len(body)), body)
        for n, body in enumerate(bodies)
    ]
    stream = b"".join(wire.pack(frame) + body for frame, body in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    assembler, heard = ready_lane(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        heard += assembler.feed(stream[start:end])
    assert heard == sent


@hypothesis.given(st.binary(min_size=wire.HEADER_BYTES, max_size=200))
def test_noise_is_refused(noise):
    with pytest.raises(ProtocolError):
        list(ready_lane().feed(noise))


def test_a_cut_header_waits_for_the_rest():
    assert list(ready_lane().feed(wire.pack(wire.Frame(wire.Kind.OPEN))[:-1])) == []


@pytest.mark.parametrize("kind", [kind for kind in wire.Kind if kind is not wire.Kind.PROOF])
def test_nothing_is_heard_before_the_proof(kind):
    with pytest.raises(ProtocolError, match="may not hear"):
        wire.Talk(wire.Role.LANE).hear(kind)


def test_the_whole_conversation():
    lane, rank = wire.Talk(wire.Role.LANE), wire.Talk(wire.Role.RANK)
    for talk, kinds in [
        (rank, [wire.Kind.CHALLENGE, wire.Kind.WELCOME, wire.Kind.OPENED, wire.Kind.BATCH]),
        (lane, [wire.Kind.PROOF, wire.Kind.OPEN, wire.Kind.GET, wire.Kind.PEEK]),
    ]:
        for kind in kinds:
            talk.hear(kind)
    with pytest.raises(ProtocolError):
        rank.hear(wire.Kind.CHALLENGE)
    with pytest.raises(ProtocolError):
        lane.hear(wire.Kind.PROOF)


def test_a_proof_holds_for_one_key_one_nonce_and_one_side():
    key, nonce = os.urandom(32), os.urandom(32)
    mac = wire.prove(key, wire.Role.RANK, nonce)
    assert wire.proven(key, wire.Role.RANK, nonce, mac)
    assert not wire.proven(os.urandom(32), wire.Role.RANK, nonce, mac)
    assert not wire.proven(key, wire.Role.LANE, nonce, mac)
    assert not wire.proven(key, wire.Role.RANK, os.urandom(32), mac)
