"""Frames and who may say them: what fits comes back, all else is refused before it costs much."""

import os
import struct
import zlib

import hypothesis
import hypothesis.strategies as st
import pytest

from taas_magic.data import protocol
from taas_magic.data.protocol import (
    Assembler,
    Frame,
    FrameFlag,
    Kind,
    ProtocolState,
    Role,
    State,
    prove,
    proven,
)
from taas_magic.errors import ProtocolError

LIMITS = protocol._MAX_BODY_BYTES
ASKED = {Kind.OPEN, Kind.GET, Kind.PEEK, Kind.SAMPLE, Kind.ORDER, Kind.STATE, Kind.GIVEN}
ASKED |= {Kind.FREE, Kind.CANCEL}
ANSWERED = {Kind.OPENED, Kind.BATCH, Kind.PEEKED, Kind.VOID, Kind.ERROR, Kind.ALIVE, Kind.VALUE}
ANSWERED |= {Kind.LOST, Kind.CANCELLED}

WORD, LONG, COUNT = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1)


@st.composite
def frames(draw, kinds=tuple(Kind)):
    kind, flags = draw(st.sampled_from(kinds)), draw(st.integers(0, 7))
    body_bytes = draw(st.integers(0, LIMITS[kind]))
    head_bytes = draw(st.integers(0, min(body_bytes, 2**32 - 1)))
    counts = draw(COUNT), draw(COUNT), draw(LONG)
    frame = Frame(kind, *counts, head_bytes, body_bytes, flags=flags, order=draw(WORD))
    if flags & FrameFlag.SHARED:
        return frame._replace(arena=draw(WORD), offset=draw(LONG))
    return frame._replace(body_sum=draw(LONG))


def forged(**changes):
    """A header whose own checksum is right and whose fields are not."""
    fields = {"magic": protocol.MAGIC, "version": protocol.VERSION, "kind": int(Kind.GET)}
    fields |= {"head": 0, "epoch": 0, "batch": 0, "body": 0, **changes}
    raw = struct.pack(
        "<4sBBHIIIqqQQQ",
        *(fields["magic"], fields["version"], fields["kind"], 0, fields["head"], 0, 0),
        *(fields["epoch"], fields["batch"], fields["body"], 0, 0),
    )
    return raw + struct.pack("<I", zlib.crc32(raw))


@pytest.mark.parametrize("kind", Kind)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=20)
def test_a_header_of_every_kind_comes_back(kind, data):
    frame = data.draw(frames([kind]))
    packed = protocol.pack(frame)
    assert len(packed) == protocol.HEADER_BYTES
    assert protocol.unpack(packed) == frame
    assert protocol.unpack(memoryview(packed)) == frame


@hypothesis.given(frames(), st.integers(0, protocol.HEADER_BYTES * 8 - 1))
def test_a_flipped_bit_is_seen(frame, bit):
    damaged = bytearray(protocol.pack(frame))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        protocol.unpack(damaged)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"magic": b"GET "}, "does not speak"),
        ({"version": 9}, "version 9"),
        ({"kind": 99}, "no frame of kind 99"),
        ({"kind": 0}, "no frame of kind 0"),
        ({"epoch": -1}, "epoch -1"),
        ({"batch": -(2**63)}, "batch -9223372036854775808"),
        ({"body": 2**63}, "9223372036854775808 bytes"),
        ({"body": 2**64 - 1}, "the limit is"),
        ({"kind": int(Kind.BATCH), "body": 64, "head": 65}, "BATCH announces 64 bytes"),
    ],
)
def test_numbers_out_of_bounds_are_refused(changes, says):
    with pytest.raises(ProtocolError, match=says):
        protocol.unpack(forged(**changes))


@pytest.mark.parametrize("kind", Kind)
def test_the_body_of_every_kind_has_a_limit(kind):
    limit = LIMITS[kind]
    assert protocol.unpack(forged(kind=int(kind), body=limit)).body_bytes == limit
    with pytest.raises(ProtocolError, match=f"{kind.name} announces {limit + 1} bytes"):
        protocol.unpack(forged(kind=int(kind), body=limit + 1))


def test_a_stranger_can_announce_little():
    assert LIMITS[Kind.PROOF] < 4096


@hypothesis.given(st.lists(COUNT, max_size=300), st.integers(1, 7))
def test_numbers_come_back_and_cut_ones_are_refused(numbers, cut):
    body = protocol.pack_numbers(numbers)
    assert protocol.numbers(body) == tuple(numbers)
    with pytest.raises(ProtocolError, match="no list of numbers"):
        protocol.numbers(body + bytes(cut))


@hypothesis.given(st.integers(0, 1 << 20), st.lists(st.integers(0, 1 << 20), max_size=20))
def test_buffers_of_a_body_are_aligned_and_do_not_overlap(head_bytes, sizes):
    offsets, size = protocol.layout(head_bytes, sizes)
    assert all(offset % protocol.ALIGN == 0 for offset in offsets)
    ends = [at + length for at, length in zip(offsets, sizes, strict=True)]
    starts = [*offsets, size]
    assert head_bytes <= starts[0]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=True))


def ready(role):
    talk = ProtocolState(role)
    before = [Kind.PROOF] if role is Role.SERVER else [Kind.CHALLENGE, Kind.WELCOME]
    for kind in before:
        talk.hear(kind)
    assert talk.state is State.READY
    return talk


def heard_rank_challenge():
    talk = ProtocolState(Role.RANK)
    talk.hear(Kind.CHALLENGE)
    return talk


@pytest.mark.parametrize(
    ("talk", "may"),
    [
        (lambda: ProtocolState(Role.SERVER), {Kind.PROOF}),
        (lambda: ready(Role.SERVER), ASKED),
        (lambda: ProtocolState(Role.RANK), {Kind.CHALLENGE}),
        (heard_rank_challenge, {Kind.WELCOME, Kind.REFUSED}),
        (lambda: ready(Role.RANK), ANSWERED),
    ],
)
@pytest.mark.parametrize("kind", Kind)
def test_what_the_table_does_not_list_is_refused_and_changes_nothing(talk, may, kind):
    one = talk()
    before = one.state
    if kind in may:
        one.hear(kind)
        return
    with pytest.raises(ProtocolError, match=f"may not hear {kind.name}"):
        one.hear(kind)
    assert one.state is before


@pytest.mark.parametrize("role", Role)
def test_a_connection_that_is_ready_stays_so(role):
    talk = ready(role)
    for kind in ASKED if role is Role.SERVER else ANSWERED:
        talk.hear(kind)
        assert talk.state is State.READY


@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(st.binary(max_size=300), max_size=5), st.data())
def test_a_stream_cut_anywhere_gives_the_same_frames(bodies, data):
    sent = [(Frame(Kind.GET, batch=n, body_bytes=len(body)), body) for n, body in enumerate(bodies)]
    stream = b"".join(protocol.pack(frame) + body for frame, body in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    assembler, heard = Assembler(ready(Role.SERVER)), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        heard += assembler.feed(stream[start:end])
    assert heard == sent


@hypothesis.given(st.binary(min_size=protocol.HEADER_BYTES, max_size=200))
def test_noise_is_refused(noise):
    with pytest.raises(ProtocolError):
        list(Assembler(ready(Role.SERVER)).feed(noise))


def test_a_cut_header_waits_for_the_rest():
    whole = protocol.pack(Frame(Kind.OPEN))
    assembler = Assembler(ready(Role.SERVER))
    assert list(assembler.feed(whole[:-1])) == []
    assert list(assembler.feed(whole[-1:])) == [(Frame(Kind.OPEN), b"")]


def test_what_may_not_be_said_is_refused_before_its_body():
    with pytest.raises(ProtocolError, match="may not hear GET"):
        list(
            Assembler(ProtocolState(Role.SERVER)).feed(protocol.pack(Frame(Kind.GET, body_bytes=8)))
        )


@pytest.mark.parametrize("other", ["key", "role", "nonce", "place"])
def test_a_proof_holds_for_one_key_one_side_one_nonce_and_one_server(other):
    said = {"key": os.urandom(32), "role": Role.RANK, "nonce": os.urandom(32), "place": "taas-1"}
    mac = prove(**said)
    assert proven(**said, mac=mac)
    others = {"key": os.urandom(32), "role": Role.SERVER, "nonce": os.urandom(32)}
    others |= {"place": "taas-2"}
    assert not proven(**said | {other: others[other]}, mac=mac)
    assert not proven(**said, mac=mac[:-1])
    assert not proven(**said, mac=b"")


@hypothesis.given(st.text("a\0", max_size=4), st.text("a\0", max_size=4))
def test_a_name_does_not_run_over_into_the_nonce(one, another):
    key, nonce = b"k" * 32, b"n" * protocol.NONCE_BYTES
    assert (prove(key, Role.RANK, nonce, one) == prove(key, Role.RANK, nonce, another)) is (
        one == another
    )
