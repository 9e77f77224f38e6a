"""Delivery and preparation of batches: the data service, a raw socket, local loaders, its peers.

    python benchmarks/data.py [--rounds 5] [--seconds 2] [--only delivery|first|collate|slow|cpu]
                                        [--row "ours, TCP"]…

Every row is measured in rounds that take turns, so that a slow moment of the machine hits all of
them, and each time in a fresh process; printed are medians and the spread. The consumer touches
every batch (reads one value of each 4 KiB page). "memory" is the peak of the consumer's resident
memory, shared memory that it looks at included, over what it had before the first batch. Ratios are
taken within a round. Figures move from machine to machine: compare rows of one run only. The
tf.data service and Ray Data have rows where they are installed (`pip install '.[bench]'`).
"""

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import peers
import psutil
import torch
from deliverers import Ready, Samples, local, ours, raw, service
from torch.utils.data import DataLoader, Dataset

from taas_magic.data.service import new_certificate

SIZES = {"196 KiB": 196 << 10, "36.75 MiB": 37632 << 10}
FIRST_BATCHES = 9
CONTEXT = multiprocessing.get_context("forkserver")


class Figures(NamedTuple):
    """What one measurement of one row gives."""

    batches_s: float
    bytes_s: float
    cpu_s_per_gb: float
    memory_mib: float


def touch(batch: object) -> torch.Tensor:
    tensor = batch if isinstance(batch, torch.Tensor) else batch[0]  # type: ignore[index]
    assert tensor.reshape(-1).view(torch.uint8)[::4096].sum() >= 0
    return tensor


def consume(make: Callable, seconds: float, results: Connection) -> None:
    """The consumer's process."""
    torch.set_num_threads(1)
    with make() as take:
        before = psutil.Process().memory_info().rss
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of imports
        for _ in range(3):
            touch(take())
        batches = size = 0
        started, cpu = time.perf_counter(), time.process_time()
        while (elapsed := time.perf_counter() - started) < seconds:
            size += touch(take()).nbytes
            batches += 1
        cpu = time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        memory = (peak - before) / 2**20
        # Not every peer leaves the process in a state to send anything afterwards.
        results.send(Figures(batches / elapsed, size / elapsed, cpu / (size / 1e9), memory))


def first_batches(make: Callable, results: Connection) -> None:
    """Milliseconds from the question to the first batch, each time by a rank that is new."""
    with make() as running:
        running.wait_until_filled()
        times = []
        for _ in range(FIRST_BATCHES):
            remote = running.remote()
            started = time.perf_counter()
            touch(next(batches := iter(remote)))
            times.append((time.perf_counter() - started) * 1e3)
            batches.close()
            remote.close()
    results.send(times)


def in_a_process(target: Callable, *arguments: object) -> object:
    """What a target sends from a process of its own."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=target, args=(*arguments, theirs))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    return result


def compare(title: str, rows: dict[str, Callable], rounds: int, seconds: float) -> None:
    """Measure rows in turn; the first is what the others are compared with."""
    figures: dict[str, list[Figures]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, make in rows.items():
            figures[name].append(in_a_process(consume, make, seconds))
    head = f"{'batches/s':>12}{'spread':>8}{'MB/s':>8}{'CPU s/GB':>10}{'memory':>10}"
    print(f"\n{title}\n{'':30}{head}{'rate x':>9}{'CPU x':>8}")
    first = next(iter(figures.values()))
    for name, results in figures.items():
        rates, sizes, cpus, memory = zip(*results, strict=True)
        rate = statistics.median(rates)
        pairs = list(zip(results, first, strict=True))
        ratio = statistics.median(one.batches_s / other.batches_s for one, other in pairs)
        cpu_ratio = statistics.median(one.cpu_s_per_gb / other.cpu_s_per_gb for one, other in pairs)
        print(
            f"{name:30}{rate:12.1f}{(max(rates) - min(rates)) / rate:8.0%}"
            f"{statistics.median(sizes) / 1e6:8.0f}{statistics.median(cpus):10.2f}"
            f"{statistics.median(memory):6.0f} MiB{ratio:9.2f}{cpu_ratio:8.2f}",
            flush=True,
        )


def delivery(rounds: int, seconds: float, wanted: list[str]) -> None:
    tls, others = new_certificate(), peers.installed()
    for name, size in SIZES.items():
        loader = DataLoader(Ready(size), batch_size=None)
        rows = {
            "raw TCP socket, reused buffer": partial(raw, size),
            "ours, TCP": partial(ours, loader),
            "ours, TCP + TLS": partial(ours, loader, tls=tls),
            "ours, shared memory": partial(ours, loader, direct=True),
        }
        for workers in (0, 1, 2):
            made = DataLoader(Ready(size), batch_size=None, num_workers=workers)
            rows[f"local DataLoader, {workers} workers"] = partial(local, made)
        rows |= {peer: partial(make, size) for peer, make in others.items()}
        rows = {name: make for name, make in rows.items() if not wanted or name in wanted}
        compare(f"Delivery of ready batches of {name}", rows, rounds, seconds)


def first(rounds: int) -> None:
    tls = new_certificate()
    print("\nTime to a rank's first batch of 196 KiB, the fetcher's buffer filled, in ms")
    loader = DataLoader(Ready(SIZES["196 KiB"]), batch_size=None)
    rows = {"TCP": {}, "TCP + TLS": {"tls": tls}, "shared memory": {"direct": True}}
    for name, arguments in rows.items():
        make = partial(service, loader, **arguments)
        times = [ms for _ in range(rounds) for ms in in_a_process(first_batches, make)]
        print(f"{'ours, ' + name:30}{statistics.median(times):8.1f}, at most {max(times):.1f}")


def prepared(title: str, dataset: Dataset, rounds: int, seconds: float) -> None:
    for workers in (1, 2):
        rows = {
            f"local DataLoader, {workers} workers": partial(
                local, DataLoader(dataset, 64, num_workers=workers)
            ),
            f"ours, {workers} lanes": partial(
                ours, DataLoader(dataset, 64), lanes=workers, direct=True
            ),
        }
        compare(title, rows, rounds, seconds)


def storage(rounds: int, seconds: float) -> None:
    loader = DataLoader(Samples(wait_s=0.005), 64)
    rows = {
        f"ours, M = {hosts}": partial(ours, loader, fetchers=hosts, direct=True)
        for hosts in (1, 2, 4, 8)
    }
    compare("Slow storage, 5 ms wait a sample", rows, rounds, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", choices=["delivery", "first", "collate", "slow", "cpu"])
    parser.add_argument("--row", action="append", default=[], help="of delivery, only these")
    asked = parser.parse_args()
    CONTEXT.set_forkserver_preload(["torch", "taas_magic.remote.fetcher", "deliverers"])
    rounds, seconds = asked.rounds, asked.seconds
    if asked.only in (None, "delivery"):
        delivery(rounds, seconds, asked.row)
    if asked.only in (None, "first"):
        first(rounds)
    if asked.only in (None, "collate"):
        prepared("Collation of 64 samples", Samples(), rounds, seconds)
    if asked.only in (None, "slow"):
        storage(rounds, 3 * seconds)
    if asked.only in (None, "cpu"):
        prepared("2 ms of CPU a sample", Samples(compute_s=0.002), rounds, 2 * seconds)


if __name__ == "__main__":
    main()
