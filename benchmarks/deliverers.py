"""Sources of batches for benchmarks/data.py (socket, DataLoader, data service), and datasets."""

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
from taas_magic.data.loader import LoaderShape, RankFeed, RemoteLoader
from taas_magic.data.service import Tls
from taas_magic.host.fetcher import fetcher_main
from taas_magic.host.spec import FetcherSpec
from taas_magic.messages import (
    FetcherReport,
    FetcherStarted,
    LoaderAddresses,
    decode_fetcher_message,
)
from taas_magic.plan import FetcherPlan

Take = Callable[[], object]
"""Function that returns the next batch."""

# Senders, fetchers and ranks are forks of a process that has already imported torch.
FORK = multiprocessing.get_context("fork")
BUFFER_BYTES = 256 << 20


class Ready(Dataset[torch.Tensor]):
    """Dataset of batches that need no preparation, to measure delivery alone.

    Each batch is a new tensor over the same memory. If all batches were the same tensor, a local
    worker would move the tensor into shared memory once, and would then deliver only its name.
    """

    def __init__(self, size: int) -> None:
        self.memory = bytearray(size)

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(self.memory, dtype=torch.uint8)


class Samples(Dataset[torch.Tensor]):
    """Dataset of samples of 3 KiB; 64 of them make a batch of 192 KiB.

    Args:
        wait_s: Seconds to sleep for each sample.
        compute_s: CPU seconds to use for each sample.
    """

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
    sock = tls.server_context().wrap_socket(sock, server_side=True) if tls else sock
    with sock, contextlib.suppress(OSError):
        while True:
            sock.sendall(data)


@contextlib.contextmanager
def raw(size: int, tls: Tls | None = None) -> Iterator[Take]:
    """Yield a function that receives batches from a bare TCP or TLS socket into one reused buffer.

    The rate of such a socket is the upper limit for delivery by TCP.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = FORK.Process(target=_send, args=(server.getsockname()[1], size, tls))
        sender.start()
        sock, _ = server.accept()
    sock = tls.client_context().wrap_socket(sock) if tls else sock
    # A TLS socket accepts no flags, and returns at most one record per call.
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
    """Yield a function that returns batches of a DataLoader in the consumer's process."""
    batches = iter(loader)
    yield lambda: next(batches)


@dataclasses.dataclass
class Service:
    """Running fetchers, and the settings with which a rank connects to them.

    Attributes:
        feed: Connection settings, for rank 0 of 1.
        controls: Pipes from the fetchers, which send their reports.
    """

    loader: DataLoader[Any]
    feed: RankFeed
    controls: list[Connection]

    def remote(self, rank: int = 0, world_size: int = 1) -> RemoteLoader:
        loader, feed = self.loader, dataclasses.replace(self.feed, rank=rank, world_size=world_size)
        settings = {"batch_size": loader.batch_size, "drop_last": False, "num_workers": 0}
        shape = LoaderShape("train", len(loader), None, False, settings)
        return RemoteLoader(shape, feed)

    def wait_until_filled(self) -> None:
        """Wait until each fetcher's prefetch buffer has stopped growing."""
        for control in self.controls:
            before, ready = -1, 0
            while before != ready or not ready:
                said = decode_fetcher_message(control.recv_bytes())
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
    """Run the data service while the block runs.

    Args:
        loader: Loader to register.
        fetchers: Number of fetchers; each is a process.
        workers: Number of workers of each fetcher.
        direct: Whether ranks get batches through shared memory; else by TCP.
        tls: Certificate for TLS; None for none.
        buffer_bytes: Size of each fetcher's prefetch buffer.
    """
    folder = Path(tempfile.mkdtemp())
    key, payload = os.urandom(32), cloudpickle.dumps(loader)
    served = services.DataServiceSettings(
        key,
        seed=0,
        fetchers=fetchers,
        units=None,
        loaders=(services.LoaderSettings("train", workers, "", 0),),
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
        assert isinstance(decode_fetcher_message(control.recv_bytes()), FetcherStarted)
    client = tls.client_context if tls else None
    near = services.FolderDirectory(services.addresses_folder(folder), range(fetchers))

    def far(name: str) -> LoaderAddresses:
        """Return the fetchers' addresses with an empty `machine`, so that ranks connect by TCP."""
        place = near(name)
        found = {at: address._replace(machine="") for at, address in place.addresses.items()}
        return structs.replace(place, addresses=found)

    feed = RankFeed(0, 1, lambda name: payload, near if direct else far, key, tls=client)
    try:
        yield Service(loader, feed, [control for _, control in running])
    finally:
        for process, control in running:
            # Closing the pipe would not end the fetcher: other forks have copies of our end.
            process.terminate()
            process.join()
            control.close()


@contextlib.contextmanager
def ours(loader: DataLoader[Any], **arguments: object) -> Iterator[Take]:
    """Yield a function that returns batches of the data service."""
    with service(loader, **arguments) as running:  # type: ignore[arg-type]
        remote = running.remote()
        batches = iter(remote)
        try:
            yield lambda: next(batches)
        finally:
            batches.close()
