"""A TCP proxy between a rank and its fetchers that does what a bad network does."""

import contextlib
import itertools
import select
import socket
import struct
import threading


class Proxy:
    """Forwards connections to fetchers and harms what comes back.

    Attributes:
        harm: Called with the number of the connection and the bytes from the fetcher; returns what
            goes on to the rank, or None to reset the connection.
    """

    def __init__(self, directory, harm):
        self._directory, self.harm = directory, harm
        self._servers, self._addresses = {}, {}
        self._numbers = itertools.count(1)

    def __call__(self, loader):
        found = self._directory(loader)
        through = {n: self._through(n, address) for n, address in found.addresses.items()}
        return found._replace(addresses=through)

    def _through(self, number, address):
        self._addresses[number] = address
        if number not in self._servers:
            server = socket.create_server(("127.0.0.1", 0))
            self._servers[number] = server
            threading.Thread(target=self._accept, args=(server, number), daemon=True).start()
        port = self._servers[number].getsockname()[1]
        return address._replace(port=port)

    def _accept(self, server, number):
        with contextlib.suppress(OSError):
            while True:
                rank, _ = server.accept()
                address = self._addresses[number]
                try:
                    fetcher = socket.create_connection((address.host, address.port))
                except OSError:
                    rank.close()
                    continue
                back = (next(self._numbers), fetcher, rank)
                threading.Thread(target=self._back, args=back, daemon=True).start()
                threading.Thread(target=self._forth, args=(rank, fetcher), daemon=True).start()

    def _forth(self, rank, fetcher):
        # Never blocked in a read: the kernel resets a connection only when nobody is.
        with contextlib.suppress(OSError, ValueError), rank, fetcher:
            while True:
                if not select.select([rank], [], [], 0.05)[0]:
                    continue
                data = rank.recv(1 << 16)
                if not data:
                    fetcher.shutdown(socket.SHUT_RDWR)
                    return
                fetcher.sendall(data)

    def _back(self, number, fetcher, rank):
        with contextlib.suppress(OSError), fetcher:
            for data in _received(fetcher):
                data = self.harm(number, data)
                if data is None:
                    rank.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    rank.close()
                    return
                rank.sendall(data)
            rank.shutdown(socket.SHUT_RDWR)

    def close(self):
        for server in self._servers.values():
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()


def _received(sock):
    """Yield what comes, until the end; that of a fetcher that was killed may be a reset."""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            yield data
