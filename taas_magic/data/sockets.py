"""Sockets under the wire: what both ends of a connection set, send and receive."""

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Sequence

Part = bytes | memoryview
Socket = socket.socket | ssl.SSLSocket

TICK_S = 1.0
"""How often someone who waits looks up; a lane that prepares says ALIVE as often."""

_MAX_PARTS = 500
_PEER_GONE_S = 10
_RECORD_BYTES = 16 << 10


def keep_watch(sock: socket.socket) -> None:
    """Let the kernel notice a peer that is gone, and send small frames at once."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _PEER_GONE_S * 1000)


def tick(sock: Socket, seconds: float) -> None:
    """Make every receive give up after `seconds` (as OSError), in the kernel where possible."""
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(seconds)
        return
    sock.settimeout(None)
    whole = int(seconds)
    timeval = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)


def await_data(sock: Socket) -> None:
    """Wait for a tick at most until something can be received (not for TLS: it may be here)."""
    if not isinstance(sock, ssl.SSLSocket):
        with contextlib.suppress(BlockingIOError):
            sock.recv(1, socket.MSG_PEEK)


def receive(sock: Socket, most_bytes: int, patience_s: float) -> bytes:
    """Return what has come.

    Raises:
        BlockingIOError, TimeoutError: Nothing has; only TLS waits for it.
    """
    if not isinstance(sock, ssl.SSLSocket):
        return sock.recv(most_bytes, socket.MSG_DONTWAIT)
    tick(sock, patience_s)
    try:
        return sock.recv(most_bytes)
    except ssl.SSLWantReadError:
        raise BlockingIOError from None
    finally:
        tick(sock, TICK_S)


def send(sock: Socket, parts: Sequence[Part], descriptors: Sequence[int] = ()) -> None:
    """Send all parts, gathered by the kernel; `descriptors` go along with the first byte."""
    if isinstance(sock, ssl.SSLSocket):
        for piece in _joined(parts):
            sock.sendall(piece)
        return
    ancillary = [
        (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))
    ]
    for start in range(0, len(parts), _MAX_PARTS):
        group = parts[start : start + _MAX_PARTS]
        sent = sock.sendmsg(group, ancillary if descriptors else ())
        descriptors = ()
        for part in unsent(group, sent):
            sock.sendall(part)


def send_some(sock: socket.socket, parts: Sequence[Part]) -> list[Part]:
    """Send what the kernel has room for; returns what is left."""
    if not parts:
        return []
    try:
        sent = sock.sendmsg(parts[:_MAX_PARTS], (), socket.MSG_DONTWAIT)
    except BlockingIOError:
        return list(parts)
    return list(unsent(parts, sent))


def _joined(parts: Iterable[Part]) -> Iterable[Part]:
    """The same bytes, small parts put together: TLS makes a record of each piece at least."""
    small = bytearray()
    for part in parts:
        if len(small) + len(part) <= _RECORD_BYTES:
            small += part
            continue
        if small:
            yield bytes(small)
            small = bytearray()
        if len(part) <= _RECORD_BYTES:
            small += part
        else:
            yield part
    if small:
        yield bytes(small)


def unsent(parts: Sequence[Part], sent: int) -> Iterable[Part]:
    """What is left of parts after `sent` bytes of them have gone."""
    for at, part in enumerate(parts):
        if sent < len(part):
            yield memoryview(part)[sent:]
            yield from parts[at + 1 :]
            return
        sent -= len(part)


def receive_into(sock: Socket, memory: memoryview, patience_s: float) -> None:
    """Fill `memory`.

    Raises:
        ConnectionError: The peer closed, or sent nothing for `patience_s`.
    """
    flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
    done, heard, size = 0, time.monotonic(), len(memory)
    while done < size:
        try:
            got = sock.recv_into(memory[done:], flags=flags)
        except (BlockingIOError, TimeoutError):
            got = -1
        if got == 0:
            raise ConnectionError("the peer closed the connection")
        if got > 0:
            done, heard = done + got, time.monotonic()
        elif time.monotonic() - heard > patience_s:
            raise ConnectionError(f"the peer stopped in the middle of a frame for {patience_s} s")
