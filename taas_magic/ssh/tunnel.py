"""A port of the host that leads back here: how a host reaches a pool that it could never dial."""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

from paramiko import Channel, SSHException

from taas_magic.errors import PoolError
from taas_magic.ssh.connect import Connection

LOOPBACK = "127.0.0.1"
_CHUNK = 1 << 16


def open_tunnel(connection: Connection, host: str, port: int) -> int:
    """Forwards a port of the host's own loopback to (`host`, `port`) as seen from here.

    It lasts as long as the connection. What it leads to must ask for a key itself, since everybody
    on the host may use it: the pool's port speaks TLS with certificates on both sides.

    Returns:
        The port on the host.

    Raises:
        PoolError: The host does not forward ports.
    """

    def on_visitor(channel: Channel, origin: Any, server: Any) -> None:
        threading.Thread(
            target=_relay, args=(channel, (host, port)), name="taas-tunnel", daemon=True
        ).start()

    try:
        return connection.transport.request_port_forward(LOOPBACK, 0, on_visitor)
    except SSHException as error:
        raise PoolError(
            f"host {connection.target.label}: its sshd refuses to forward a port ({error}), by "
            "which its ranks would report; its /etc/ssh/sshd_config must have "
            "`AllowTcpForwarding yes` (or `remote`), `DisableForwarding no`, and no `PermitListen` "
            "that leaves out localhost"
        ) from error


def _relay(channel: Channel, address: tuple[str, int]) -> None:
    """Carries bytes both ways until either side is at its end."""
    with channel:
        try:
            sock = socket.create_connection(address)
        except OSError:
            return  # the pool is just ending; the host sees its end of it close
        with sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(
                target=_pump, args=(sock.recv, channel.sendall, channel.close), daemon=True
            )
            back.start()
            _pump(channel.recv, sock.sendall, lambda: sock.shutdown(socket.SHUT_RDWR))
            back.join()


def _pump(
    read: Callable[[int], bytes], write: Callable[[bytes], Any], close: Callable[[], Any]
) -> None:
    with contextlib.suppress(OSError, EOFError):  # either end may go at any time, in any way
        while data := read(_CHUNK):
            write(data)
    with contextlib.suppress(OSError):
        close()
