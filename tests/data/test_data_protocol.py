"""Tests of the frames between ranks and servers: encoding, order of messages, and size limits."""

import os
import struct
import zlib
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest

from taas_magic.data import protocol
from taas_magic.data.protocol import (
    Alive,
    Assembler,
    Cancel,
    Cancelled,
    Challenge,
    FreeSpans,
    FromRank,
    FromServer,
    ProtocolState,
    ReceivedFrame,
    Rejected,
    RequestKind,
    Requests,
    Response,
    ResponseKind,
    Role,
    SharedBody,
    SharedSpan,
    Welcome,
    is_proof,
    make_proof,
)
from taas_magic.errors import ProtocolError
from tests.data.data_rig import PROOF, ready

COUNT, NONCE = st.integers(0, 2**63 - 1), st.binary(max_size=40)
CANCEL = msgspec.msgpack.encode(Cancel())
RANK, SERVER = lambda: ready(Role.RANK), lambda: ready(Role.SERVER)
NEW_RANK, NEW_SERVER = lambda: ProtocolState(Role.RANK), lambda: ProtocolState(Role.SERVER)


def greeted() -> ProtocolState:
    """Return the protocol state of a rank that has received the server's challenge."""
    state = ProtocolState(Role.RANK)
    heard(state, Challenge(bytes(32)))
    return state


MAY_HEAR: dict[Callable[[], ProtocolState], list[FromRank | FromServer]] = {
    NEW_SERVER: [PROOF],
    SERVER: [Requests(RequestKind.GET, 0, (0,)), FreeSpans([SharedSpan(1, 0)]), Cancel()],
    NEW_RANK: [Challenge(bytes(32))],
    greeted: [Welcome(bytes(32)), Rejected("no")],
    RANK: [Response(ResponseKind.VOID, 0, 0), Alive(), Cancelled()],
}
MESSAGES = [message for messages in MAY_HEAR.values() for message in messages]


def heard(
    state: ProtocolState, message: FromRank | FromServer, body_bytes: int = 0
) -> ReceivedFrame:
    found = state.decode_message(memoryview(protocol.encode_header(message, body_bytes)))
    assert found is not None
    return found


@st.composite
def responses(draw: st.DrawFn) -> Response:
    shared = SharedBody(SharedSpan(draw(COUNT), draw(COUNT)), draw(COUNT), draw(st.booleans()))
    size = draw(st.integers(0, 1 << 62))
    about = draw(COUNT), draw(COUNT), draw(COUNT), draw(st.integers(0, 2**32 - 1))
    head_bytes = draw(st.integers(0, min(size, shared.size)))
    body_sum = draw(st.none() | st.integers(0, 2**64 - 1))
    return Response(draw(st.sampled_from(ResponseKind)), *about, head_bytes, body_sum, shared)


REQUESTS = st.builds(
    Requests,
    st.sampled_from(RequestKind),
    COUNT,
    st.lists(COUNT, max_size=300).map(tuple),
)


def forged(
    packed: bytes = CANCEL,
    size: int | None = None,
    body: int = 0,
) -> memoryview:
    """Return a header with valid checksums, although its fields may be invalid.

    Args:
        packed: Encoded message.
        size: Size of the message that the header claims; by default, the real size.
        body: Size of the body that the header claims.
    """
    size = len(packed) if size is None else size
    raw = struct.pack("<IQI", size, body, zlib.crc32(packed))
    whole = raw + struct.pack("<I", zlib.crc32(raw)) + packed
    return memoryview(whole + bytes(-len(whole) % 64))


@hypothesis.given(responses())
def test_every_response_is_decoded_as_it_was_encoded(response: Response) -> None:
    found = heard(ready(Role.RANK), response)
    assert found.message == response
    assert found.message.kind is response.kind
    assert found.header_bytes % protocol.ALIGN == 0


@hypothesis.given(REQUESTS)
def test_every_request_is_decoded_as_it_was_encoded(requests: Requests) -> None:
    assert heard(ready(Role.SERVER), requests).message == requests


def test_the_header_of_an_ordinary_response_has_the_fixed_size() -> None:
    response = Response(ResponseKind.BATCH, 100, 2**31, 1, 2**32 - 1, 2**12, 2**64 - 1)
    assert len(protocol.encode_header(response, 2**32)) == protocol.HEADER_BYTES


@hypothesis.given(responses(), st.integers(0))
def test_a_flipped_bit_is_detected(response: Response, bit: int) -> None:
    damaged = bytearray(protocol.encode_header(response))
    # Flip no bit of the padding after the message: no checksum covers it.
    size = 20 + len(msgspec.msgpack.encode(response))
    bit %= 8 * size
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        ready(Role.RANK).decode_message(memoryview(damaged))


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (memoryview(b"GET / HTTP/1.1\r\n" + bytes(64)), "its checksum does not match"),
        (forged(size=2**20 + 1), "a message of 1048577 bytes"),
        (forged(size=2**32 - 1), "the limits are"),
        (forged(body=2**30 + 1), "a body of 1073741825 bytes is too long"),
        (forged(body=2**64 - 1), "a body of 18446744073709551615 bytes is too long"),
        (
            forged(b"\x91\x63"),
            "only Requests or FreeSpans or Cancel: Invalid value 99",
        ),
        (forged(b"\xc0"), "only Requests or FreeSpans or Cancel: Expected `array`"),
        (
            forged(b""),
            "only Requests or FreeSpans or Cancel: Input data was truncated",
        ),
        (forged(b"\x94\x05\x02\xff\x90"), "Expected `int` >= 0"),
        (forged(b"\x94\x05\x02\x00\x91\xff"), "Expected `int` >= 0"),
        (forged(b"\x94\x05\x63\x00\x90"), "Invalid enum value 99"),
    ],
)
def test_fields_that_are_out_of_bounds_are_refused(frame: memoryview, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        ready(Role.SERVER).decode_message(frame)


def test_a_table_of_contents_is_no_larger_than_its_body() -> None:
    response = Response(ResponseKind.BATCH, 0, 0, head_bytes=65)
    with pytest.raises(ProtocolError, match="BATCH announces 65 bytes of contents in 64"):
        heard(ready(Role.RANK), response, 64)


def test_bodies_in_one_frame_have_the_same_size() -> None:
    response = Response(ResponseKind.BATCH, 0, 0, head_bytes=64, more=2)
    assert heard(ready(Role.RANK), response, 3 * 64).message.more == 2
    with pytest.raises(ProtocolError, match="BATCH announces 3 bodies of one size in 64 bytes"):
        heard(ready(Role.RANK), response, 64)
    with pytest.raises(ProtocolError, match="BATCH announces 64 bytes of contents in 63"):
        heard(ready(Role.RANK), response, 3 * 63)


@pytest.mark.parametrize(
    ("state_of", "limit"),
    [
        (NEW_SERVER, 0),
        (SERVER, protocol.MAX_STATE_BYTES),
        (NEW_RANK, 0),
        (greeted, 0),
        (RANK, protocol.MAX_BATCH_BYTES),
    ],
)
def test_a_body_has_a_limit(state_of: Callable[[], ProtocolState], limit: int) -> None:
    message = MAY_HEAR[state_of][0]
    assert heard(state_of(), message, limit).body_bytes == limit
    for size in (limit + 1, 2**63):
        with pytest.raises(
            ProtocolError, match=f"a body of {size} bytes is too long; the limits are"
        ):
            heard(state_of(), message, size)


def test_a_peer_can_announce_only_a_small_message_before_the_handshake() -> None:
    proof = msgspec.msgpack.encode(PROOF)
    for frame in (forged(proof, size=1 << 12), forged(proof, body=1)):
        with pytest.raises(ProtocolError, match="the limits are"):
            ProtocolState(Role.SERVER).decode_message(frame)


@hypothesis.given(st.integers(0, 1 << 20), st.lists(st.integers(0, 1 << 20), max_size=20))
def test_buffers_of_a_body_are_aligned_and_do_not_overlap(
    head_bytes: int, sizes: list[int]
) -> None:
    offsets, size = protocol.layout(head_bytes, sizes)
    assert all(offset % protocol.ALIGN == 0 for offset in offsets)
    ends = [at + length for at, length in zip(offsets, sizes, strict=True)]
    starts = [*offsets, size]
    assert head_bytes <= starts[0]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=True))


@pytest.mark.parametrize("state_of", MAY_HEAR)
@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_a_message_that_the_table_does_not_allow_is_refused_and_changes_no_state(
    state_of: Callable[[], ProtocolState], message: FromRank | FromServer
) -> None:
    state = state_of()
    before = state._now
    if message in MAY_HEAR[state_of]:
        assert heard(state, message).message == message
        return
    with pytest.raises(ProtocolError, match="accepts only"):
        heard(state, message)
    assert state._now is before


@pytest.mark.parametrize("state_of", [SERVER, RANK])
def test_no_message_changes_the_state_after_the_handshake(
    state_of: Callable[[], ProtocolState],
) -> None:
    state = state_of()
    for message in MAY_HEAR[state_of]:
        heard(state, message)
        assert not state._later


@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(st.tuples(REQUESTS, st.binary(max_size=300)), max_size=5), st.data())
def test_a_stream_cut_anywhere_gives_the_same_messages(
    requests: list[tuple[Requests, bytes]], data: st.DataObject
) -> None:
    sent = [(Requests(RequestKind.GET, one.epoch, one.slots), body) for one, body in requests]
    stream = b"".join(protocol.encode_header(message, len(body)) + body for message, body in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    assembler, found = Assembler(ready(Role.SERVER)), list[tuple[object, bytes]]()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += assembler.feed(stream[start:end])
    assert found == sent


@hypothesis.given(st.binary(min_size=protocol.HEADER_BYTES, max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(Assembler(ready(Role.SERVER)).feed(noise))


def test_a_cut_header_waits_for_the_rest() -> None:
    message = Requests(RequestKind.GET, 0, tuple(range(200)))
    whole = protocol.encode_header(message)
    assembler = Assembler(ready(Role.SERVER))
    for at in (10, protocol.HEADER_BYTES, len(whole) - 1):
        assert list(assembler.feed(whole[:at])) == []
        assembler = Assembler(ready(Role.SERVER))
    assert list(assembler.feed(whole[:-1])) == []
    assert list(assembler.feed(whole[-1:])) == [(message, b"")]


def test_what_may_not_be_said_is_refused_before_its_body() -> None:
    with pytest.raises(ProtocolError, match="a body of 8 bytes is too long"):
        list(
            Assembler(ProtocolState(Role.SERVER)).feed(
                protocol.encode_header(Requests(RequestKind.GET, 0, (0,)), 8)
            )
        )


def test_a_proof_holds_for_one_key_one_side_one_nonce_and_one_server() -> None:
    key, nonce = os.urandom(32), os.urandom(32)
    mac = make_proof(key, Role.RANK, nonce, "taas-1")
    assert is_proof(key, Role.RANK, nonce, "taas-1", mac)
    assert not is_proof(os.urandom(32), Role.RANK, nonce, "taas-1", mac)
    assert not is_proof(key, Role.SERVER, nonce, "taas-1", mac)
    assert not is_proof(key, Role.RANK, os.urandom(32), "taas-1", mac)
    assert not is_proof(key, Role.RANK, nonce, "taas-2", mac)
    assert not is_proof(key, Role.RANK, nonce, "taas-1", mac[:-1])
    assert not is_proof(key, Role.RANK, nonce, "taas-1", b"")


@hypothesis.given(st.text("a\0", max_size=4), st.text("a\0", max_size=4))
def test_a_proof_distinguishes_server_names_with_a_common_beginning(one: str, another: str) -> None:
    key, nonce = b"k" * 32, b"n" * protocol.NONCE_BYTES
    assert (
        make_proof(key, Role.RANK, nonce, one) == make_proof(key, Role.RANK, nonce, another)
    ) is (one == another)
