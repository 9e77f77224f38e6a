"""Who delivers batches in benchmarks/data.py, and what they deliver."""

import contextlib
import dataclasses
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from msgspec import structs
from torch.utils.data import DataLoader, Dataset

from taas_magic.config import DataConfig
from taas_magic.data import service as services
from taas_magic.data.loader import Feed, LoaderShape, RemoteLoader
from taas_magic.data.service import Tls
from taas_magic.host.fetcher import fetcher_main
from taas_magic.host.spec import FetcherSpec
from taas_magic.messages import FetcherReport, FetcherStarted, LoaderAddresses, of_fetcher
from taas_magic.plan import FetcherPlan

Take = Callable[[], object]
"""Returns the next batch."""

# Everybody begins as a fork of a process that has torch and nothing else in memory.
FORK = multiprocessing.get_context("fork")
BUFFER_BYTES = 256 << 20


class Ready(Dataset[torch.Tensor]):
    """Hands out batches that are ready: what is measured is delivery.

    Each is a tensor of its own over the same memory: a local worker would move one and the same
    tensor into shared memory once, and then deliver nothing but its name.
    """

    def __init__(self, size: int) -> None:
        self.memory = bytearray(size)

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(self.memory, dtype=torch.uint8)


class Samples(Dataset[torch.Tensor]):
    """64 of these make a batch of 196 KiB; each costs so much waiting and computing."""

    def __init__(self, wait_s: float = 0.0, compute_s: float = 0.0) -> None:
        self.wait_s, self.compute_s = wait_s, compute_s

    def __len__(self) -> int:
        return 64 * 20_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.wait_s:
            time.sleep(self.wait_s)
        end = time.thread_time() + self.compute_s
        while time.thread_time() < end:
            pass
        return torch.full((3, 32, 32), float(index % 7))[:, :16, :16]


def _send(port: int, size: int, tls: Tls | None) -> None:
    data = memoryview(bytearray(size))
    sock = socket.create_connection(("127.0.0.1", port))
    sock = tls.server().wrap_socket(sock, server_side=True) if tls else sock
    with sock, contextlib.suppress(OSError):
        while True:
            sock.sendall(data)


@contextlib.contextmanager
def raw(size: int, tls: Tls | None = None) -> Iterator[Take]:
    """Give batches from a bare TCP or TLS socket into one reused buffer: the ceiling."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = FORK.Process(target=_send, args=(server.getsockname()[1], size, tls))
        sender.start()
        sock, _ = server.accept()
    sock = tls.client().wrap_socket(sock) if tls else sock
    # A TLS socket takes no flags, and returns one record at a time.
    flags = 0 if tls else socket.MSG_WAITALL
    memory = bytearray(size)
    room, tensor = memoryview(memory), torch.frombuffer(memory, dtype=torch.uint8)

    def receive() -> torch.Tensor:
        done = 0
        while done < size:
            got = sock.recv_into(room[done:], flags=flags)
            assert got, "the sender is gone"
            done += got
        return tensor

    try:
        yield receive
    finally:
        sock.close()
        sender.join()


@contextlib.contextmanager
def local(loader: DataLoader[Any]) -> Iterator[Take]:
    """Give batches from a DataLoader in the consumer."""
    batches = iter(loader)
    yield lambda: next(batches)


@dataclasses.dataclass
class Service:
    """Fetchers in processes of their own, and what a rank has to know of them."""

    loader: DataLoader[Any]
    feed: Feed
    controls: list[Connection]

    def remote(self, rank: int = 0, world_size: int = 1) -> RemoteLoader:
        loader, feed = self.loader, dataclasses.replace(self.feed, rank=rank, world_size=world_size)
        settings = {"batch_size": loader.batch_size, "drop_last": False, "num_workers": 0}
        shape = LoaderShape("train", len(loader), None, False, settings)
        return RemoteLoader(shape, feed)

    def wait_until_filled(self) -> None:
        """Wait until each fetcher's buffer grows no more."""
        for control in self.controls:
            before, ready = -1, 0
            while before != ready or not ready:
                said = of_fetcher(control.recv_bytes())
                if isinstance(said, FetcherReport):
                    before, ready = ready, said.loaders["train"].ready


@contextlib.contextmanager
def service(
    loader: DataLoader[Any],
    fetchers: int = 1,
    workers: int = 1,
    direct: bool = False,
    tls: Tls | None = None,
    buffer_bytes: int = BUFFER_BYTES,
) -> Iterator[Service]:
    """Run the data service for the time of the block."""
    folder = Path(tempfile.mkdtemp())
    key, payload = os.urandom(32), cloudpickle.dumps(loader)
    served = services.Service(
        key,
        seed=0,
        fetchers=fetchers,
        units=None,
        loaders=(services.Served("train", workers, "", 0),),
        settings=DataConfig(buffer_bytes=buffer_bytes),
        tls=tls,
    )
    services.write(folder, served, {"train": payload})
    running = []
    for number in range(fetchers):
        spec = FetcherSpec(FetcherPlan(number, number, ("train",), 0), served, folder, workers)
        control, theirs = FORK.Pipe()
        process = FORK.Process(target=fetcher_main, args=(spec, theirs))
        process.start()
        theirs.close()
        running.append((process, control))
    for _, control in running:
        assert isinstance(of_fetcher(control.recv_bytes()), FetcherStarted)
    client = tls.client if tls else None
    near = services.FolderDirectory(services.addresses_folder(folder), range(fetchers))

    def far(name: str) -> LoaderAddresses:
        """Return where fetchers are, as for a rank of another host: batches go by TCP."""
        place = near(name)
        found = {at: address._replace(machine="") for at, address in place.addresses.items()}
        return structs.replace(place, addresses=found)

    feed = Feed(0, 1, lambda name: payload, near if direct else far, key, tls=client)
    try:
        yield Service(loader, feed, [control for _, control in running])
    finally:
        for process, control in running:
            # Closing its pipe says nothing, as forks have copies; "end" is not heard in a full one.
            process.terminate()
            process.join()
            control.close()


@contextlib.contextmanager
def ours(loader: DataLoader[Any], **arguments: object) -> Iterator[Take]:
    """Give batches from the data service, as `service` makes it."""
    with service(loader, **arguments) as running:  # type: ignore[arg-type]
        remote = running.remote()
        batches = iter(remote)
        try:
            yield lambda: next(batches)
        finally:
            batches.close()
