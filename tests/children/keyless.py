"""Connect to the ports of this host's sshd and farm nodes over TLS, without a client certificate.

For each port, print its address, its program, and the number of bytes received.
"""

import socket
import ssl

import psutil


def name_of(pid: int | None) -> str:
    """Return "node" for a farm's node; for other programs, the start of the command line."""
    words = " ".join(psutil.Process(pid).cmdline())
    return "node" if "farms.node" in words else words[:4]


def received(address: str, port: int) -> bytes:
    """Send a text to a port; return the bytes received."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    found = b""
    try:
        plain = socket.create_connection((address, port), 30)
        with plain, context.wrap_socket(plain) as stranger:
            stranger.sendall(b"hello")
            found = stranger.recv(100)
    except OSError:
        return found
    return found


def main() -> None:
    """Connect to each port; print a line for it."""
    for seen in psutil.net_connections("tcp4"):
        if seen.status != "LISTEN":
            continue
        try:
            name = name_of(seen.pid)
        except psutil.Error:  # the process has just ended
            continue
        address, port = seen.laddr  # type: ignore[misc]
        if name in ("node", "sshd") and port != 22:
            print(address, name, len(received(address, port)))


if __name__ == "__main__":
    main()
