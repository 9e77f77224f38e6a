"""The bytes' way to a host: a socket of our own, or a program that leads there (ProxyCommand)."""

import errno
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

from taas_magic.errors import PoolError
from taas_magic.ssh.target import Target

_TICK_S = 0.1
_PROBE_S = 2


class Stopped(Exception):
    """Whoever asked for it does not want it any more."""


class Patience:
    """How long to go on: until a time, or until somebody says stop.

    Args:
        timeout_s: Seconds from now.
        stop: Set by whoever wants an end to it, in any thread.
    """

    def __init__(self, timeout_s: float, stop: threading.Event) -> None:
        self.timeout_s = timeout_s
        self._until, self._stop = time.monotonic() + timeout_s, stop

    @property
    def left_s(self) -> float:
        return max(_TICK_S, self._until - time.monotonic())

    def ticks(self, target: Target, doing: str) -> Iterator[float]:
        """How many seconds to wait at a time, for as long as there is patience.

        Raises:
            Stopped: It was said.
            PoolError: The time is over; names the host and what it was asked.
        """
        while not self._stop.is_set():
            if time.monotonic() > self._until:
                raise PoolError(
                    f"host {target.label}: no answer from {target.hostname}:{target.port} within "
                    f"{self.timeout_s:.0f} s ({doing}); is it up, and is this the way to it?"
                )
            yield _TICK_S
        raise Stopped

    def wait(self, event: threading.Event, target: Target, doing: str) -> None:
        """Waits for an event; raises as `ticks` does."""
        for tick_s in self.ticks(target, doing):
            if event.wait(tick_s):
                return


def open_way(
    target: Target, patience: Patience, silence_s: float, undo: ExitStack
) -> socket.socket:
    """A socket that leads to a host's sshd.

    Args:
        target: The host.
        patience: How long it may take.
        silence_s: After how long without an answer the connection counts as cut.
        undo: Is given what closes it.

    Raises:
        PoolError: The host cannot be reached.
        Stopped: It is not wanted any more.
    """
    if target.proxy_command:
        return _program(target.proxy_command, undo)
    refusals: list[str] = []
    for family, address in _addresses(target):
        sock = socket.socket(family, socket.SOCK_STREAM)
        undo.callback(sock.close)
        code = _connect(sock, address, target, patience)
        if code == 0:
            _notice_silence(sock, silence_s)
            return sock
        refusals.append(f"{address[0]}: {os.strerror(code)}")
    raise PoolError(
        f"host {target.label}: {target.hostname}:{target.port} cannot be reached "
        f"({'; '.join(refusals)}); is sshd running there?"
    )


def _addresses(target: Target) -> list[tuple[int, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(target.hostname, target.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PoolError(
            f"host {target.label}: its name {target.hostname!r} has no address: {error.strerror}"
        ) from error
    return [(family, address) for family, _, _, _, address in found]  # type: ignore[misc]


def _connect(
    sock: socket.socket, address: tuple[str, int], target: Target, patience: Patience
) -> int:
    """Connects; returns an error number, 0 for none. A blocking connect could not be stopped."""
    sock.setblocking(False)
    code = sock.connect_ex(address)
    if code == errno.EINPROGRESS:
        for tick_s in patience.ticks(target, "TCP connection"):
            if select.select([], [sock], [], tick_s)[1]:
                break
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    sock.setblocking(True)
    return code


def _notice_silence(sock: socket.socket, silence_s: float) -> None:
    """Has the system close a connection whose other end does not answer.

    ssh's own keepalive only sends; that nothing is acknowledged is known to TCP alone.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(silence_s * 1000))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)


def _program(command: str, undo: ExitStack) -> socket.socket:
    """Starts a ProxyCommand with one end of a socket pair as its standard input and output."""
    ours, its = socket.socketpair()
    undo.callback(ours.close)
    with its:
        program = subprocess.Popen(
            f"exec {command}",
            shell=True,
            stdin=its.fileno(),
            stdout=its.fileno(),
            start_new_session=True,
        )
    undo.callback(program.wait)
    undo.callback(program.terminate)
    return ours
