"""Delivery and preparation of batches: the data service against a raw socket and local loaders.

    python benchmarks/data.py [--rounds 3] [--seconds 2] [--only delivery|collate|slow|cpu]

Every row is measured in rounds that take turns, so that a slow moment of the machine hits all of
them; printed are medians and the spread. One consumer touches every batch (reads one value of each
4 KiB page). Figures move from machine to machine: compare rows of one run only.
"""

import argparse
import contextlib
import multiprocessing
import os
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import torch
from torch.utils.data import DataLoader, Dataset

from taas_magic.data.feed import Feed, LoaderShape
from taas_magic.data.lanes import Tls
from taas_magic.data.loader import RemoteLoader
from taas_magic.data.route import FolderDirectory
from taas_magic.remote import fetcher

SIZES = {"196 KiB": 196 << 10, "36.75 MiB": 37632 << 10}
ENDLESS = 1 << 30
CONTEXT = multiprocessing.get_context("forkserver")


class Ready(Dataset):
    """Hands out batches that are ready: what is measured is delivery."""

    def __init__(self, size: int) -> None:
        self.batch = torch.zeros(size, dtype=torch.uint8)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batch


class Samples(Dataset):
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


def touch(batch: torch.Tensor) -> float:
    return float(batch.reshape(-1).view(torch.uint8)[::4096].sum())


def raw_sender(port: int, size: int) -> None:
    data = memoryview(bytearray(size))
    with socket.create_connection(("127.0.0.1", port)) as sock, contextlib.suppress(OSError):
        while True:
            sock.sendall(data)


@contextlib.contextmanager
def raw(size: int) -> Iterator[Callable[[], torch.Tensor]]:
    """A plain TCP socket into one reused buffer: the ceiling."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = CONTEXT.Process(target=raw_sender, args=(server.getsockname()[1], size))
        sender.start()
        sock, _ = server.accept()
    memory = bytearray(size)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)

    def receive() -> torch.Tensor:
        done = sock.recv_into(memory, flags=socket.MSG_WAITALL)
        assert done == size
        return tensor

    try:
        yield receive
    finally:
        sock.close()
        sender.join()


@contextlib.contextmanager
def ours(
    loader: DataLoader,
    fetchers: int = 1,
    lanes: int = 1,
    direct: bool = False,
    tls: Tls | None = None,
) -> Iterator[Callable[[], object]]:
    """The data service, fetchers in processes of their own."""
    folder = Path(tempfile.mkdtemp())
    key, payload = os.urandom(32), cloudpickle.dumps(loader)
    (folder / "train.pkl").write_bytes(payload)
    running = []
    for number in range(fetchers):
        fetched = (fetcher.Fetched("train", folder / "train.pkl", lanes),)
        spec = fetcher.FetcherSpec(
            number,
            fetchers,
            fetched,
            key,
            folder / "fetchers",
            lanes,
            tls=tls,
            buffer_bytes=256 << 20,
        )
        running.append(fetcher.start(spec, CONTEXT))
    for _, control in running:
        control.recv()
    feed = Feed(
        0,
        1,
        lambda name: payload,
        FolderDirectory(folder / "fetchers"),
        key,
        tls=tls.client if tls else None,
        direct=direct,
    )
    shape = LoaderShape("train", len(loader), None, False, loader.batch_size, False, 0)
    remote = RemoteLoader(shape, feed)
    batches = iter(remote)
    try:
        yield lambda: next(batches)
    finally:
        batches.close()
        remote.close()
        for process, control in running:
            control.close()
            process.join()


@contextlib.contextmanager
def local(loader: DataLoader) -> Iterator[Callable[[], object]]:
    batches = iter(loader)
    yield lambda: next(batches)


def certificate() -> Tls:
    from taas_magic.engines.keys import make_security

    made, folder = make_security(), Path(tempfile.mkdtemp())
    for name in ("tls_ca_file", "tls_worker_cert", "tls_worker_key"):
        (folder / name).write_text(str(made[name]))
    return Tls(
        *(str(folder / name) for name in ("tls_worker_cert", "tls_worker_key", "tls_ca_file"))
    )


def measure(take: Callable[[], object], seconds: float) -> tuple[float, float, float]:
    """Batches/s, bytes/s and CPU seconds of this process per GB."""
    for _ in range(3):
        touch(first(take()))
    batches = size = 0
    started, cpu = time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - started) < seconds:
        batch = first(take())
        touch(batch)
        batches, size = batches + 1, size + batch.nbytes
    return batches / elapsed, size / elapsed, (time.process_time() - cpu) / (size / 1e9)


def first(batch: object) -> torch.Tensor:
    return batch if isinstance(batch, torch.Tensor) else batch[0]  # type: ignore[index]


def compare(title: str, rows: dict[str, Callable], rounds: int, seconds: float) -> None:
    figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, make in rows.items():
            with make() as take:
                figures[name].append(measure(take, seconds))
    print(f"\n{title}")
    print(f"{'':34}{'batches/s':>12}{'spread':>10}{'MB/s':>10}{'CPU s/GB':>10}{'of raw':>8}")
    ceiling = None
    for name, results in figures.items():
        rates = [result[0] for result in results]
        rate = statistics.median(rates)
        ceiling = ceiling or rate
        spread = (max(rates) - min(rates)) / rate
        mega = statistics.median(result[1] for result in results) / 1e6
        cpu = statistics.median(result[2] for result in results)
        print(f"{name:34}{rate:12.1f}{spread:10.0%}{mega:10.0f}{cpu:10.2f}{rate / ceiling:8.0%}")


def delivery(rounds: int, seconds: float) -> None:
    tls = certificate()
    for name, size in SIZES.items():
        loader = DataLoader(Ready(size), batch_size=None)
        rows = {
            "raw TCP socket, reused buffer": lambda size=size: raw(size),
            "ours, TCP": lambda loader=loader: ours(loader),
            "ours, TCP + TLS": lambda loader=loader: ours(loader, tls=tls),
            "ours, shared memory": lambda loader=loader: ours(loader, direct=True),
        }
        for workers in (0, 1, 2):
            made = DataLoader(Ready(size), batch_size=None, num_workers=workers)
            rows[f"local DataLoader, {workers} workers"] = lambda made=made: local(made)
        compare(f"Delivery of ready batches of {name}", rows, rounds, seconds)


def prepared(title: str, dataset: Dataset, rounds: int, seconds: float) -> None:
    def loader(workers: int) -> DataLoader:
        return DataLoader(dataset, 64, num_workers=workers)

    rows = {}
    for workers in (1, 2):
        made = loader(workers)
        rows[f"local DataLoader, {workers} workers"] = lambda made=made: local(made)
        rows[f"ours, {workers} lanes"] = lambda n=workers: ours(loader(0), lanes=n, direct=True)
    compare(title, rows, rounds, seconds)


def storage(rounds: int, seconds: float) -> None:
    dataset = Samples(wait_s=0.005)
    rows = {
        f"ours, M = {m}": lambda m=m: ours(DataLoader(dataset, 64), fetchers=m, direct=True)
        for m in (1, 2, 4, 8)
    }
    compare("Slow storage, 5 ms wait a sample (last column: times M = 1)", rows, rounds, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", choices=["delivery", "collate", "slow", "cpu"])
    asked = parser.parse_args()
    CONTEXT.set_forkserver_preload(["taas_magic.remote.fetcher", "benchmarks.data"])
    rounds, seconds = asked.rounds, asked.seconds
    if asked.only in (None, "delivery"):
        delivery(rounds, seconds)
    if asked.only in (None, "collate"):
        prepared("Collation of 64 samples", Samples(), rounds, seconds)
    if asked.only in (None, "slow"):
        storage(rounds, 2 * seconds)
    if asked.only in (None, "cpu"):
        prepared("2 ms of CPU a sample", Samples(compute_s=0.002), rounds, 2 * seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\npeak memory of the consumer: {peak:.0f} MiB")


if __name__ == "__main__":
    main()
