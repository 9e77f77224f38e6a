"""Measure delivery and preparation of batches: data service, sockets, DataLoaders, other services.

    python benchmarks/data.py [--rounds 5] [--seconds 2] [--only delivery|ranks|first|step|collate|
                                        slow|cpu] [--row "ours, TCP"]…

Each round measures every row of a table once, each in a new process. The consumer touches every
batch: it reads one byte of each 4 KiB page.

The tables show medians over the rounds. "spread" is the difference between the fastest and the
slowest round, relative to the median. "memory" is the peak growth of the consumer's resident memory
since its first batch; it includes shared memory that the consumer reads. "all CPU" is the CPU time
of the consumer and of every process below it, so it includes the fetchers. For Ray Data, it
includes only the consumer. Ratios compare figures of the same round.

Compare only rows of one run, and only if the machine did nothing else: the last line of the output
says whether it was quiet. The rows of the tf.data service and of Ray Data need `pip install
'.[bench]'`.
"""

import argparse
import multiprocessing
import os
import resource
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import peers
import psutil
import torch
from deliverers import FORK, Ready, Samples, Service, Take, local, ours, raw, service
from torch.utils.data import DataLoader, Dataset

from taas_magic.data.service import new_certificate

SIZES = {"4 KiB": 4 << 10, "196 KiB": 196 << 10, "36.75 MiB": 37632 << 10}
FIRST_BATCHES = 9
STEPS, STEP_S = 3, 5.0
RANKS = 8
QUIET_LOAD, QUIET_CORES, QUIET_SHARE = 0.5, 0.1, 0.9
"""Limits of a quiet machine.

They are the load average before the run, the cores used by others in a quiet sample, and the share
of quiet samples.
"""

SAMPLE_S = 0.3
"""Seconds that one sample of the other processes takes."""

SETTLE_S = 1.0
"""Seconds for the system to free the resources of the last row's processes."""

PARTS = ("delivery", "ranks", "first", "step", "collate", "slow", "cpu")
RAW, RAW_TLS = "bare TCP socket, reused buffer", "bare TLS socket, reused buffer"
COMPARED_WITH = {"ours, TCP + TLS": RAW_TLS}
"""Exceptions from the comparison with the first row: for a row's name, that of the other row."""

CONTEXT = multiprocessing.get_context("forkserver")

Takes = Callable[[], AbstractContextManager[Take]]
Services = Callable[[], AbstractContextManager[Service]]

cores_used_by_others: list[float] = []
"""Samples of the number of cores that other processes use, taken between the measurements."""


def sample_other_processes() -> None:
    """Record how many cores other processes use.

    Call this when this script runs no other process.
    """
    time.sleep(SETTLE_S)
    before = busy_s()
    time.sleep(SAMPLE_S)
    cores_used_by_others.append((busy_s() - before) / SAMPLE_S)


def busy_s() -> float:
    """Return the sum over all processors of their busy seconds since boot, with steal time."""
    times = psutil.cpu_times()
    return sum((times.user, times.nice, times.system, times.irq, times.softirq, times.steal))


def verdict(load: float) -> str:
    """Return a line that says whether the machine was quiet: before the run, and in most samples.

    Args:
        load: Load average before the run.
    """
    quiet = sum(cores <= QUIET_CORES for cores in cores_used_by_others) / len(cores_used_by_others)
    others = f"others used {statistics.median(cores_used_by_others):.2f} cores in the median"
    is_quiet = load <= QUIET_LOAD and quiet >= QUIET_SHARE
    said = "a quiet machine" if is_quiet else "NOT a quiet machine, the figures say nothing"
    return (
        f"{others}, at most {max(cores_used_by_others):.2f}; {quiet:.0%} of samples quiet: {said}"
    )


class Figures(NamedTuple):
    """Result of one measurement of one row of a table.

    Attributes:
        size: Bytes of the received batches.
        cpu_s: CPU time of the consumer, or of all ranks.
        all_cpu_s: CPU time of all processes.
        memory_mib: Peak growth of the consumer's resident memory.
    """

    batches: int
    size: int
    elapsed_s: float
    cpu_s: float
    all_cpu_s: float
    memory_mib: float

    @property
    def rate(self) -> float:
        return self.batches / self.elapsed_s

    @property
    def cpu_us(self) -> float:
        """CPU time of the consumer per batch, in microseconds."""
        return self.cpu_s / self.batches * 1e6

    @property
    def all_cpu_us(self) -> float:
        """CPU time of all processes per batch, in microseconds."""
        return self.all_cpu_s / self.batches * 1e6


def touch(batch: object) -> torch.Tensor:
    """Read one byte of each 4 KiB page of a batch, and return the tensor of the batch."""
    tensor = batch if isinstance(batch, torch.Tensor) else batch[0]  # type: ignore[index]
    assert tensor.reshape(-1).view(torch.uint8)[::4096].sum() >= 0
    return tensor


def cpu_of_all_s() -> float:
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def measured(take: Take, seconds: float, before: int) -> Figures:
    """Receive batches for `seconds` seconds, and return the figures.

    Args:
        before: Resident memory before the first batch, in bytes.
    """
    batches = size = 0
    all_cpu = cpu_of_all_s()
    started, cpu = time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - started) < seconds:
        size += touch(take()).nbytes
        batches += 1
    cpu = time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    memory = (peak - before) / 2**20
    return Figures(batches, size, elapsed, cpu, cpu_of_all_s() - all_cpu, memory)


def memory_from_here() -> int:
    """Return the resident memory in bytes, and reset the peak of this process's memory."""
    Path("/proc/self/clear_refs").write_text("5")
    return int(psutil.Process().memory_info().rss)


def consume(make: Takes, seconds: float, results: Connection) -> None:
    """Measure a row in this process, after three batches to warm up, and send the figures."""
    torch.set_num_threads(1)
    with make() as take:
        before = memory_from_here()
        for _ in range(3):
            touch(take())
        # Send inside the block: at its end, some services leave the process unable to send.
        results.send(measured(take, seconds, before))


def consume_by_ranks(ranks: int, make: Services, seconds: float, results: Connection) -> None:
    """Measure several ranks, each in its own process, and send figures for all of them together.

    The figures are sums over the ranks, but the elapsed time and the memory are maxima.
    """
    torch.set_num_threads(1)
    with make() as running:
        turns, (ours, theirs) = FORK.Barrier(ranks + 1), FORK.Pipe()
        arguments = (ranks, seconds, turns, theirs)
        children = [
            FORK.Process(target=one_rank, args=(running, rank, *arguments)) for rank in range(ranks)
        ]
        for child in children:
            child.start()
        turns.wait()
        all_cpu = cpu_of_all_s()
        turns.wait()
        all_cpu = cpu_of_all_s() - all_cpu
        batches, size, elapsed, cpu, _, memory = zip(*[ours.recv() for _ in children], strict=True)
        for child in children:
            child.join()
    sums = Figures(sum(batches), sum(size), max(elapsed), sum(cpu), all_cpu, max(memory))
    results.send(sums)


def one_rank(
    running: Service, rank: int, ranks: int, seconds: float, turns: Barrier, results: Connection
) -> None:
    """Measure one rank in this process, after three batches to warm up, and send the figures.

    Args:
        turns: Barrier at which all ranks and their parent meet before and after the measurement.
    """
    remote = running.remote(rank, ranks)
    batches = iter(remote)
    before = memory_from_here()
    for _ in range(3):
        touch(next(batches))
    turns.wait()
    figures = measured(lambda: next(batches), seconds, before)
    turns.wait()
    results.send(figures)
    batches.close()


def first_batches(make: Services, results: Connection) -> None:
    """Measure the time from `iter(loader)` to the first batch `FIRST_BATCHES` times; send the list.

    The times are in milliseconds. Before, wait until the prefetch buffers are full.
    """
    with make() as running:
        running.wait_until_filled()
        times = []
        for _ in range(FIRST_BATCHES):
            remote = running.remote()
            started = time.perf_counter()
            touch(next(batches := iter(remote)))
            times.append((time.perf_counter() - started) * 1e3)
            batches.close()
    results.send(times)


def after_steps(make: Takes, results: Connection) -> None:
    """After each of `STEPS` steps, measure the time to the next batch; send the list.

    A step is a sleep of `STEP_S` seconds. The times are in milliseconds.
    """
    times = []
    with make() as take:
        touch(take())
        for _ in range(STEPS):
            time.sleep(STEP_S)
            started = time.perf_counter()
            touch(take())
            times.append((time.perf_counter() - started) * 1e3)
        results.send(times)


def in_a_process(target: Callable[..., None], *arguments: object) -> Any:
    """Call `target` in a new process with a pipe as last argument; return what `target` sends."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=target, args=(*arguments, theirs))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    return result


def compare(
    title: str,
    rows: Mapping[str, Takes | Services],
    rounds: int,
    seconds: float,
    by: Callable[..., None] = consume,
) -> None:
    """Measure rows in turn, and print a table with the ratio of each row to another row.

    The other row is the first row, unless `COMPARED_WITH` names another one. Each measurement runs
    in a new process. Before each round, sample the cores that other processes use.

    Args:
        rows: For each row, a function that makes its source of batches.
        by: Function that measures a row in a process of its own.
    """
    figures: dict[str, list[Figures]] = {name: [] for name in rows}
    for _ in range(rounds):
        sample_other_processes()
        for name, make in rows.items():
            figures[name].append(in_a_process(by, make, seconds))
    head = (
        f"{'batches/s':>12}{'spread':>8}{'MB/s':>8}{'CPU s/GB':>10}{'CPU µs':>10}{'all CPU µs':>12}"
    )
    print(f"\n{title} (CPU µs: a batch)\n{'':32}{head}{'memory':>10}{'rate x':>9}{'CPU x':>8}")
    first = next(iter(figures))
    for name, results in figures.items():
        print_row(name, results, figures.get(COMPARED_WITH.get(name, first), figures[first]))


def print_row(name: str, results: list[Figures], others: list[Figures]) -> None:
    """Print a row, with its ratios to the results `others` of the same rounds."""
    rates = [one.rate for one in results]
    rate = statistics.median(rates)
    spread = (max(rates) - min(rates)) / rate
    per_s = statistics.median(one.size / one.elapsed_s for one in results) / 1e6
    per_gb = statistics.median(one.cpu_s / one.size * 1e9 for one in results)
    cpu_us = statistics.median(one.cpu_us for one in results)
    all_cpu_us = statistics.median(one.all_cpu_us for one in results)
    memory = statistics.median(one.memory_mib for one in results)
    pairs = list(zip(results, others, strict=True))
    ratio = statistics.median(one.rate / other.rate for one, other in pairs)
    cpu_ratio = statistics.median(one.cpu_us / other.cpu_us for one, other in pairs)
    print(
        f"{name:32}{rate:12.1f}{spread:8.0%}{per_s:8.0f}{per_gb:10.2f}{cpu_us:10.1f}"
        f"{all_cpu_us:12.1f}{memory:6.0f} MiB{ratio:9.2f}{cpu_ratio:8.2f}",
        flush=True,
    )


def delivery(rounds: int, seconds: float, wanted: list[str]) -> None:
    """Compare the delivery of ready batches by sockets, local loaders, this package and peers.

    Args:
        wanted: Names of the rows to measure; empty for all rows.
    """
    tls, others = new_certificate(), peers.installed()
    for name, size in SIZES.items():
        loader = DataLoader(Ready(size), batch_size=None)
        rows: dict[str, Takes] = {
            RAW: partial(raw, size),
            RAW_TLS: partial(raw, size, tls),
            "ours, TCP": partial(ours, loader),
            "ours, TCP + TLS": partial(ours, loader, tls=tls),
            "ours, shared memory": partial(ours, loader, direct=True),
        }
        for workers in (0, 1, 2):
            made = DataLoader(Ready(size), batch_size=None, num_workers=workers)
            rows[f"local DataLoader, {workers} workers"] = partial(local, made)
        rows |= {peer: partial(make, size) for peer, make in others.items()}
        rows = {name: make for name, make in rows.items() if not wanted or name in wanted}
        if rows:
            compare(f"Delivery of ready batches of {name}", rows, rounds, seconds)


def several(rounds: int, seconds: float) -> None:
    """Compare one and two fetchers, for one and several ranks, by TCP and by shared memory."""
    loader = DataLoader(Ready(SIZES["196 KiB"]), batch_size=None)
    for way, direct in (("TCP", False), ("shared memory", True)):
        make = partial(service, loader, direct=direct)
        for ranks in (1, RANKS):
            rows = {
                f"ours, {fetchers} fetcher{'s' * (fetchers > 1)}": partial(make, fetchers=fetchers)
                for fetchers in (1, 2)
            }
            title = f"{ranks} rank{'s' * (ranks > 1)}, batches of 196 KiB by {way}"
            compare(title, rows, rounds, seconds, partial(consume_by_ranks, ranks))


def first(rounds: int) -> None:
    """Print the time to a rank's first batch by TCP, under TLS and by shared memory."""
    tls = new_certificate()
    print("\nTime to a rank's first batch of 196 KiB, the fetcher's buffer filled, in ms")
    loader = DataLoader(Ready(SIZES["196 KiB"]), batch_size=None)
    rows: dict[str, dict[str, Any]] = {
        "TCP": {},
        "TCP + TLS": {"tls": tls},
        "shared memory": {"direct": True},
    }
    for name, arguments in rows.items():
        make = partial(service, loader, **arguments)
        print_times(f"ours, {name}", first_batches, make, rounds)


def step(rounds: int) -> None:
    """Print the time to the next batch after a step, of the data service and a local loader."""
    print(f"\nTime to the next batch of 196 KiB after a step of {STEP_S:g} s, in ms")
    loader = DataLoader(Ready(SIZES["196 KiB"]), batch_size=None)
    local_loader = DataLoader(Ready(SIZES["196 KiB"]), batch_size=None, num_workers=1)
    rows = {
        "ours, TCP": partial(ours, loader),
        "ours, TCP + TLS": partial(ours, loader, tls=new_certificate()),
        "ours, shared memory": partial(ours, loader, direct=True),
        "local DataLoader, 1 workers": partial(local, local_loader),
    }
    for name, make in rows.items():
        print_times(name, after_steps, make, rounds)


def print_times(
    name: str, target: Callable[..., None], make: Takes | Services, rounds: int
) -> None:
    """Print the median and the maximum of the times that `target` measures, in ms."""
    sample_other_processes()
    times = [ms for _ in range(rounds) for ms in in_a_process(target, make)]
    print(f"{name:32}{statistics.median(times):8.2f}, at most {max(times):.2f}", flush=True)


def prepared(title: str, dataset: Dataset[Any], rounds: int, seconds: float) -> None:
    """Compare a local DataLoader and the data service with one and with two workers."""
    for workers in (1, 2):
        rows = {
            f"local DataLoader, {workers} workers": partial(
                local, DataLoader(dataset, 64, num_workers=workers)
            ),
            f"ours, {workers} workers": partial(
                ours, DataLoader(dataset, 64), workers=workers, direct=True
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


def end_with_children(number: int, frame: FrameType | None) -> None:
    """End this process and all its descendants. The function is the handler of SIGTERM."""
    for process in psutil.Process().children(recursive=True):
        process.terminate()
    raise SystemExit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--row", action="append", default=[], help="of delivery, only these")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, end_with_children)
    CONTEXT.set_forkserver_preload(["torch", "taas_magic.host.fetcher", "deliverers"])
    rounds, seconds = asked.rounds, asked.seconds
    parts = {
        "delivery": partial(delivery, rounds, seconds, asked.row),
        "ranks": partial(several, rounds, seconds),
        "first": partial(first, rounds),
        "step": partial(step, rounds),
        "collate": partial(prepared, "Collation of 64 samples", Samples(), rounds, seconds),
        "slow": partial(storage, rounds, 3 * seconds),
        "cpu": partial(
            prepared, "2 ms of CPU a sample", Samples(compute_s=0.002), rounds, 2 * seconds
        ),
    }
    load = os.getloadavg()[0]
    print(f"load average before: {load:.2f}", flush=True)
    for part in (asked.only,) if asked.only else PARTS:
        parts[part]()
    sample_other_processes()
    after = os.getloadavg()[0]
    print(f"\nload average before: {load:.2f}, after: {after:.2f} (its own work in it)")
    print(verdict(load))


if __name__ == "__main__":
    main()
