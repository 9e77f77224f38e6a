"""Real fetchers and remote loaders for the tests of the data service."""

import contextlib
import dataclasses
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypedDict

import cloudpickle
import psutil
import torch
from msgspec import structs
from torch.utils.data import DataLoader, Dataset, IterableDataset
from typing_extensions import Unpack

from taas_magic.config import DataConfig
from taas_magic.data import service as about
from taas_magic.data.connection import FetcherLink, PeerSilent
from taas_magic.data.loader import RankFeed, RemoteLoader
from taas_magic.data.memory import ReceiveBlocks
from taas_magic.data.other_ranks import KeyValueStore
from taas_magic.data.protocol import (
    Alive,
    Challenge,
    FromRank,
    FromServer,
    Proof,
    ProtocolState,
    Response,
    Role,
    Welcome,
    encode_header,
)
from taas_magic.data.server import RankServers
from taas_magic.data.service import Directory, FolderDirectory, Tls
from taas_magic.data.sharding import Uneven
from taas_magic.host.fetcher import fetcher_main
from taas_magic.host.spec import FetcherSpec
from taas_magic.leases import FetchLease
from taas_magic.messages import Address, FetcherStarted, LoaderAddresses, decode_fetcher_message
from taas_magic.plan import FetcherPlan
from taas_magic.registry import RegisteredLoader
from tests.data.ledger import Handed, read_ledgers
from tests.eventually import HUNG_S
from tests.rig.main_module import CONTEXT, plain_main

MOST_RANKS = 4
"""Maximum world size for which fetchers keep the batches that padding repeats."""

SEED = 7


class Rows(Dataset[object]):
    """Dataset whose row n is a pair: a tensor filled with n, and n itself."""

    def __init__(self, size: int, width: int = 8) -> None:
        self.size, self.width = size, width
        self.classes = ["a", "b"]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> object:
        return torch.full((self.width,), float(index)), index


class Noise(Rows):
    """Rows of random numbers from torch's generator."""

    def __getitem__(self, index: int) -> object:
        return torch.rand(self.width), index


class Lines(IterableDataset[torch.Tensor]):
    """Iterable-style dataset of `size` numbers from 0 on; each worker yields a part of them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, self.size, step):
            yield torch.tensor([number])


class Remembering(IterableDataset[torch.Tensor]):
    """Iterable-style dataset with a state, of pairs: a number, and a count.

    The count says how many numbers this object has yielded. The state does not contain the count.
    """

    def __init__(self, size: int) -> None:
        self.size, self.at, self.counted = size, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.size:
            self.at += 1
            self.counted += 1
            yield torch.tensor([self.at - 1, self.counted])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class ShapeChanges(TypedDict, total=False):
    """Fields that a test replaces in the shape of a registered loader."""

    settings: dict[str, object]
    attributes: dict[str, object]
    uneven: Uneven


class FetcherChanges(TypedDict, total=False):
    """Optional settings of the fetchers."""

    buffer_bytes: int
    tls: Tls | None
    units: int


class FeedChanges(TypedDict, total=False):
    """Fields of a rank's `RankFeed` that a test replaces."""

    directory: Directory
    units: int
    tls: Callable[[], ssl.SSLContext] | None
    ledger: about.BatchLedger
    window_bytes: int
    lease: FetchLease
    agreement: KeyValueStore | None
    direct: bool


def from_afar(directory: Directory) -> Directory:
    """Return a copy of a directory of fetchers in which no fetcher is on the rank's machine.

    A rank that uses the copy receives its batches over TCP, as a rank on another host does.
    """

    def found(loader: str) -> LoaderAddresses:
        place = directory(loader)
        far = {at: address._replace(machine="") for at, address in place.addresses.items()}
        return structs.replace(place, addresses=far)

    return found


class Service:
    """Running fetchers, each in its own process, and a factory of remote loaders for ranks."""

    def __init__(
        self,
        folder: Path,
        loaders: Mapping[str, DataLoader[object]],
        fetchers: int = 1,
        workers: int = 1,
        **changes: Unpack[FetcherChanges],
    ) -> None:
        self.folder, self.loaders, self.key = folder, loaders, os.urandom(32)
        self.directory = FolderDirectory(about.addresses_folder(folder), range(fetchers))
        self.processes: list[tuple[ForkServerProcess, Connection]] = []
        self.own: list[RankServers] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.payloads = {name: cloudpickle.dumps(loader) for name, loader in loaders.items()}
        about.folder_of(folder).mkdir(exist_ok=True)
        for name, payload in self.payloads.items():
            about.payload_file(folder, name).write_bytes(payload)
        self.fetchers, self.workers, self.changes = fetchers, workers, changes
        for number in range(fetchers):
            self.start(number)

    def spec(self, number: int) -> FetcherSpec:
        served = about.DataServiceSettings(
            self.key,
            SEED,
            self.fetchers,
            units=self.changes.get("units"),
            loaders=tuple(
                about.LoaderSettings(
                    name, loader.num_workers or self.workers, "", SEED, MOST_RANKS, MOST_RANKS
                )
                for name, loader in self.loaders.items()
            ),
            settings=DataConfig(buffer_bytes=self.changes.get("buffer_bytes", 1 << 30)),
            tls=self.changes.get("tls"),
        )
        plan = FetcherPlan(number, number, tuple(self.loaders), host=0)
        return FetcherSpec(plan, served, self.folder, 1)

    def start(self, number: int) -> None:
        self.processes.append(self.restart(number))

    def restart(self, number: int) -> tuple[ForkServerProcess, Connection]:
        """Start a fetcher, wait until it has started, and return its process and pipe.

        If `processes` has an entry with this number, the new fetcher replaces the entry. The
        process of the old entry is not ended.
        """
        with plain_main():  # another test's shell may be the main module
            control, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=fetcher_main, args=(self.spec(number), theirs))
            process.start()
            theirs.close()
        started = process, control
        assert isinstance(decode_fetcher_message(control.recv_bytes()), FetcherStarted)
        if number < len(self.processes):
            self.processes[number] = started
        return started

    def loader(
        self,
        name: str = "train",
        rank: int = 0,
        world_size: int = 1,
        shape: ShapeChanges | None = None,
        local: bool = False,
        **changes: Unpack[FeedChanges],
    ) -> RemoteLoader:
        made = RegisteredLoader(name, lambda: self.loaders[name]).pack().shape
        changed: ShapeChanges = {**shape} if shape else {}
        changed["settings"] = made.settings | changed.get("settings", {})
        own = RankServers(self.key, lambda served: self.payloads[served.name]) if local else None
        if own is not None:
            self.own.append(own)
        feed = RankFeed(
            rank,
            world_size,
            self.payloads.__getitem__,
            None if local else self.directory,
            key=self.key,
            seed=SEED,
            lease=FetchLease(fetch_s=HUNG_S, start_s=HUNG_S),
            own=own,
        )
        if not changes.pop("direct", True) and feed.directory is not None:
            feed.directory = from_afar(changes.pop("directory", feed.directory))
        feed = dataclasses.replace(feed, **changes)  # type: ignore[misc]
        return RemoteLoader(dataclasses.replace(made, **changed), feed)

    def ledger(self, rank: int = 0, attempt: int = 0) -> about.BatchLedger:
        return about.BatchLedger(self.folder / "ledger", attempt, rank)

    def handed(self) -> list[Handed]:
        return read_ledgers(self.folder / "ledger")

    def close(self) -> None:
        for own in self.own:
            own.close()
        for process, control in self.processes:
            with contextlib.suppress(OSError):
                control.send("end")  # workers of local loaders keep the pipe open after close()
            control.close()
            process.join(HUNG_S)
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def service(
    folder: Path,
    loaders: DataLoader[object] | Mapping[str, DataLoader[object]],
    fetchers: int = 1,
    workers: int = 1,
    **changes: Unpack[FetcherChanges],
) -> Iterator[Service]:
    if isinstance(loaders, DataLoader):
        loaders = {"train": loaders}
    running = Service(folder, loaders, fetchers, workers, **changes)
    try:
        yield running
    finally:
        running.close()


def workers_of(running: Service, number: int = 0, count: int = 1) -> list[psutil.Process]:
    """Wait until a fetcher has `count` workers, and return the processes of the workers.

    The workers are children of the fetcher's only child process.
    """
    while True:
        (parent,) = psutil.Process(running.processes[number][0].pid).children()
        if len(workers := parent.children()) == count:
            return workers
        time.sleep(0.01)


def everybody_of(running: Service, number: int = 0, count: int = 1) -> list[psutil.Process]:
    """Wait until a fetcher has `count` workers; return the fetcher and its descendants."""
    server = psutil.Process(running.processes[number][0].pid)
    return [server, *server.children(), *workers_of(running, number, count)]


def address_of(running: Service) -> Address:
    return running.directory("train").addresses[0]


def over_tcp(running: Service) -> socket.socket:
    """Open a TCP connection to the first fetcher without a handshake, as a stranger would."""
    address = address_of(running)
    return socket.create_connection((address.host, address.port), HUNG_S)


def is_dropped(sock: socket.socket) -> bool:
    """Read until the server closes or resets the connection, and return True.

    If the server keeps the connection open, the function does not return.
    """
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True


def linked(
    running: Service,
    tls: ssl.SSLContext | None = None,
    direct: bool = True,
    key: bytes = b"",
    address: Address | None = None,
) -> FetcherLink:
    """Connect to a fetcher, and return the link. Its time limits suit a busy machine.

    Args:
        running: Fetchers; the link is for their loader "train".
        tls: Settings for TLS; None for a connection without TLS.
        direct: Whether a fetcher on the same machine may send batches through shared memory.
        key: The run's key; by default, the right one.
        address: Address of the fetcher; by default, that of the first fetcher.
    """
    address = address or address_of(running)
    whom = address if direct else address._replace(machine=""), "train", key or running.key
    return FetcherLink(*whom, tls, connect_s=HUNG_S, silence_limit_s=HUNG_S)


def heard(link: FetcherLink) -> tuple[FromServer, memoryview]:
    """Wait for the next frame from a fetcher, without a time limit; return message and body."""
    while True:
        with contextlib.suppress(PeerSilent):
            for whole in link.receive(ReceiveBlocks(0)):
                return whole


def received(link: FetcherLink) -> tuple[Response, memoryview]:
    """Return the next response and its body; skip `Alive` messages."""
    while isinstance((whole := heard(link))[0], Alive):
        pass
    message, body = whole
    assert isinstance(message, Response)
    return message, body


PROOF = Proof(bytes(32), bytes(32), "train")


def ready(role: Role) -> ProtocolState:
    """Return the protocol state of one side, `role`, after a completed handshake."""
    state = ProtocolState(role)
    before: list[FromRank | FromServer] = [PROOF]
    if role is Role.RANK:
        before = [Challenge(bytes(32)), Welcome(bytes(32))]
    for message in before:
        found = state.decode_message(memoryview(encode_header(message)))
        assert found is not None and found.message == message
    assert not state._later
    return state


def stream(running: Service, local: bool = False, **changes: Unpack[FeedChanges]) -> list[object]:
    """Iterate one epoch of a new remote loader, and return the batches as lists and numbers."""
    return [plain(batch) for batch in running.loader(local=local, **changes)]


def plain(batch: object) -> Any:
    """Return a batch with tensors and tuples converted to lists."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [plain(part) for part in batch] if isinstance(batch, (list, tuple)) else batch
