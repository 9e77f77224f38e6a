"""Real fetchers and remote loaders for the tests of the data service."""

import contextlib
import dataclasses
import gc
import multiprocessing
import os
import time
from multiprocessing import forkserver

import cloudpickle
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from taas_magic.data import metrics
from taas_magic.data.connection import FetcherLink
from taas_magic.data.loader import Feed, RemoteLoader
from taas_magic.data.own_servers import OwnServers
from taas_magic.data.protocol import Challenge, Proof, ProtocolState, Role, State, Welcome, pack
from taas_magic.data.service import FolderDirectory
from taas_magic.host.fetcher import fetcher_main
from taas_magic.host.spec import Fetched, FetcherSpec
from taas_magic.leases import FetchLease
from taas_magic.messages import FetcherStarted, of_fetcher
from taas_magic.registry import Registered
from tests.rig.main_module import plain_main

SEED = 7
WAIT_S = 100.0
"""For what comes at once on an idle machine."""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["taas_magic.host.fetcher", "tests.data.data_rig"])


@pytest.fixture(scope="module", autouse=True)
def forkserver_for_this_module():
    """End the fetchers' forkserver with the module: other tests count the processes they see."""
    yield
    gc.collect()  # a rank's own server has the forkserver's pipe open, until its loader is gone
    forkserver._forkserver._stop()


class Rows(Dataset):
    """Row n is [n, n + 0.5, …]; deterministic."""

    def __init__(self, size, width=8):
        self.size, self.width = size, width
        self.classes = ["a", "b"]

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.full((self.width,), float(index)), index


class Noise(Rows):
    """Random augmentation, by torch."""

    def __getitem__(self, index):
        return torch.rand(self.width), index


class Lines(IterableDataset):
    """Numbers, split over workers."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, self.size, step):
            yield torch.tensor([number])


class Remembering(IterableDataset):
    """Numbers, and how many of them this very object has counted; it has a state of its own."""

    def __init__(self, size):
        self.size, self.at, self.counted = size, 0, 0

    def __iter__(self):
        while self.at < self.size:
            self.at += 1
            self.counted += 1
            yield torch.tensor([self.at - 1, self.counted])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def shape_of(loader, name="train", settings=None, **changes):
    shape = Registered(name, loader).packed().shape
    return dataclasses.replace(shape, settings={**shape.settings, **(settings or {})}, **changes)


class Service:
    """Fetchers for some loaders, in processes of their own; and ranks' loaders."""

    def __init__(self, folder, loaders, fetchers=1, workers=1, **changes):
        self.folder, self.loaders, self.key = folder, loaders, os.urandom(32)
        self.processes, self.own = [], []
        folder.mkdir(parents=True, exist_ok=True)
        self.payloads = {name: cloudpickle.dumps(loader) for name, loader in loaders.items()}
        for name, payload in self.payloads.items():
            (folder / f"{name}.pkl").write_bytes(payload)
        self.fetchers, self.workers, self.changes = fetchers, workers, changes
        for number in range(fetchers):
            self.start(number)

    def spec(self, number):
        fetched = tuple(
            Fetched(
                name,
                self.folder / f"{name}.pkl",
                num_workers=loader.num_workers or self.workers,
                seed=SEED,
            )
            for name, loader in self.loaders.items()
        )
        folder = self.folder / "fetchers"
        return FetcherSpec(
            number, number, self.fetchers, fetched, self.key, folder, 1, **self.changes
        )

    def start(self, number):
        self.processes.append(self.restart(number))

    def restart(self, number):
        """Start a fetcher, perhaps in the place of one that is gone."""
        with plain_main():  # a shell of another test may stand for the main module
            control, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=fetcher_main, args=(self.spec(number), theirs))
            process.start()
            theirs.close()
        started = process, control
        assert isinstance(of_fetcher(control.recv_bytes()), FetcherStarted)
        if number < len(self.processes):
            self.processes[number] = started
        return started

    def feed(self, rank=0, world_size=1, local=False, **changes):
        own = OwnServers(self.key, self.payloads.__getitem__, int) if local else None
        if own is not None:
            self.own.append(own)
        arguments = {
            "own": own,
            "payload": self.payloads.__getitem__,
            "directory": None if local else FolderDirectory(self.folder / "fetchers"),
            "key": self.key,
            "seed": SEED,
            "lease": FetchLease(fetch_s=WAIT_S, start_s=WAIT_S),
        }
        return Feed(rank, world_size, **arguments | changes)

    def loader(self, name="train", rank=0, world_size=1, shape=None, **changes):
        shape = shape_of(self.loaders[name], name, **(shape or {}))
        return RemoteLoader(shape, self.feed(rank, world_size, **changes))

    def ledger(self, rank=0, generation=0):
        return metrics.BatchLedger(self.folder / "ledger", generation, rank)

    def handed(self):
        return metrics.read_ledgers(self.folder / "ledger")

    def close(self):
        for own in self.own:
            own.close()
        for process, control in self.processes:
            with contextlib.suppress(OSError):
                control.send("end")  # workers of this process's ranks have the pipe open, too
            control.close()
            process.join(WAIT_S)
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def service(folder, loaders, **arguments):
    if isinstance(loaders, DataLoader):
        loaders = {"train": loaders}
    running = Service(folder, loaders, **arguments)
    try:
        yield running
    finally:
        running.close()


def workers_of(running, number=0, count=1):
    """Return a fetcher's workers, once there are so many: children of the one that starts them."""
    while True:
        (parent,) = psutil.Process(running.processes[number][0].pid).children()
        if len(workers := parent.children()) == count:
            return workers
        time.sleep(0.01)


def everybody_of(running, number=0, count=1):
    """All processes of a fetcher, once it has so many workers."""
    server = psutil.Process(running.processes[number][0].pid)
    return [server, *server.children(), *workers_of(running, number, count)]


def address_of(running):
    return running.feed().directory("train").addresses[0]


def linked(running, *arguments, key=None, address=None, **changes):
    """Connect to the first fetcher, with patience for a busy machine."""
    patience = {"connect_s": WAIT_S, "patience_s": WAIT_S}
    whom = address or address_of(running), "train", key or running.key
    return FetcherLink(*whom, *arguments, **patience | changes)


PROOF = Proof(bytes(32), bytes(32), "train")


def ready(role):
    """Return the protocol's state behind the handshake."""
    state = ProtocolState(role)
    before = [PROOF] if role is Role.SERVER else [Challenge(bytes(32)), Welcome(bytes(32))]
    for message in before:
        assert state.hear(memoryview(pack(message))).message == message
    assert state.state is State.READY
    return state


def plain(batch):
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [plain(part) for part in batch] if isinstance(batch, (list, tuple)) else batch
