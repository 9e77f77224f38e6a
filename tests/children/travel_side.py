"""The store server (`desk`) or a host with a mirror (`host`), as a process that a test can kill.

python -m tests.children.travel_side desk SOCKET STORE STATE
python -m tests.children.travel_side host SOCKET STORE CACHE
"""

import itertools
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from taas_magic.errors import PoolError
from taas_magic.store.mirror import reserve, update_mirror
from taas_magic.store.outbound import MirrorSender
from taas_magic.store.receipt import ReceiptBuilder
from taas_magic.store.requests import FileRequest, SendRequest
from taas_magic.store.rule import StoreRule
from taas_magic.store.server import StoreServer

SIZES = {"small": 10_000, "out/middle": 300_000, "out/large": 3_000_000}
"""Files that the host rewrites repeatedly, with their sizes in bytes. Each repeats one digit."""


def received(connection: Connection) -> Any:
    """Return the next message.

    Raises:
        EOFError: The other process has ended, perhaps in the middle of a message.
    """
    try:
        return connection.recv()
    except OSError as error:
        raise EOFError from error


def serve(store_server: StoreServer, listener: Listener) -> None:
    """Accept one connection, and answer the requests of its host until the connection ends."""
    with listener.accept() as host, suppress(EOFError):
        while True:
            answer = store_server.answer(0, received(host))
            with suppress(ConnectionError):  # the next receive raises EOFError
                host.send(answer)


def asking(store_server: Connection) -> SendRequest:
    """Return a function that sends a request over the connection and returns the answer."""
    lock = threading.Lock()

    def ask(request: FileRequest[Any]) -> Any:
        with lock:
            try:
                store_server.send(request)
                return received(store_server)
            except (EOFError, ConnectionError) as error:
                raise PoolError("the store server is gone") from error

    return ask


def write_all(mirror: Path, number: int) -> None:
    for name, size in SIZES.items():
        (mirror / name).parent.mkdir(exist_ok=True)
        beside = mirror / f"{name}.new"
        beside.write_bytes(b"%d" % (number % 10) * size)
        beside.rename(mirror / name)


def be_host(socket: str, store: str, cache: str) -> None:
    ask = asking(Client(socket))
    mirror = reserve(store, "me", Path(cache))
    update_mirror(mirror, ask)
    outbound = MirrorSender(mirror, ask, print, ReceiptBuilder(mirror.path, ()))
    outbound.start()
    print("ready", flush=True)
    for number in itertools.count():
        write_all(Path(mirror.path), number)


if __name__ == "__main__":
    role, socket, store, folder = sys.argv[1:]
    if role == "host":
        be_host(socket, store, folder)
    else:
        with Listener(socket) as listener:
            print("ready", flush=True)
            serve(StoreServer(StoreRule(store), Path(folder)), listener)
