"""A TCP proxy between a rank and its fetchers that simulates faults of a network."""

import contextlib
import itertools
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator

from msgspec import structs

from taas_magic.data.service import Directory
from taas_magic.messages import Address, LoaderAddresses


class Proxy:
    """Directory of fetchers whose addresses lead to TCP proxies, one proxy for each fetcher.

    A proxy passes the rank's data on unchanged, and lets `harm` change the fetcher's data.

    Attributes:
        harm: Function that receives the number of a connection (from 1 on) and a piece of data
            from the fetcher. Returns the bytes to send to the rank, or None to reset the
            connection.
        said: Pieces of data that ranks sent, in order.
    """

    def __init__(self, directory: Directory, harm: Callable[[int, bytes], bytes | None]) -> None:
        self._directory, self.harm = directory, harm
        self.said: list[bytes] = []
        self._servers: dict[int, socket.socket] = {}
        self._addresses: dict[int, Address] = {}
        self._numbers = itertools.count(1)

    def __call__(self, loader: str) -> LoaderAddresses:
        found = self._directory(loader)
        through = {n: self._through(n, address) for n, address in found.addresses.items()}
        return structs.replace(found, addresses=through)

    def _through(self, number: int, address: Address) -> Address:
        self._addresses[number] = address
        if number not in self._servers:
            server = socket.create_server(("127.0.0.1", 0))
            self._servers[number] = server
            threading.Thread(target=self._accept, args=(server, number), daemon=True).start()
        port = self._servers[number].getsockname()[1]
        return address._replace(port=port)

    def _accept(self, server: socket.socket, number: int) -> None:
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

    def _forth(self, rank: socket.socket, fetcher: socket.socket) -> None:
        # Wait in select, not in recv: a blocked recv would delay the reset that `_back` causes.
        with contextlib.suppress(OSError, ValueError), rank, fetcher:
            while True:
                if not select.select([rank], [], [], 0.05)[0]:
                    continue
                data = rank.recv(1 << 16)
                if not data:
                    fetcher.shutdown(socket.SHUT_RDWR)
                    return
                self.said.append(data)
                fetcher.sendall(data)

    def _back(self, number: int, fetcher: socket.socket, rank: socket.socket) -> None:
        with contextlib.suppress(OSError), fetcher:
            for piece in _received(fetcher):
                data = self.harm(number, piece)
                if data is None:
                    rank.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    rank.close()
                    return
                rank.sendall(data)
            rank.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for server in self._servers.values():
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()


def _received(sock: socket.socket) -> Iterator[bytes]:
    """Yield received data until the peer closes or resets the connection."""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            yield data
