"""Check that memory, threads and descriptors do not grow over a million small batches.

    python benchmarks/soak.py [--batches 1000000] [--tcp | --tls] [--rest 5]

At twenty moments, the script measures the sum over four processes: the rank, its fetcher, the
fetcher's worker and the worker's parent. It prints the slope of each figure over the last three
quarters of the batches, per million batches. With `--rest S`, the rank sleeps S seconds at each
moment. The exit code is 1 if a figure grows by more than its limit.
"""

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from deliverers import service
from torch.utils.data import DataLoader, Dataset

from taas_magic.data.service import new_certificate

MOMENTS = 20
EPOCH = 50_000
# The number of batches in the buffer varies. A small buffer ensures that this does not look like
# growth.
BUFFER_BYTES = 4 << 20
MOST_MIB = 10.0
"""Maximum slope of the memory, in MiB per million batches."""

MOST_HANDLES = 0.5
"""Maximum slope of the threads, and of the descriptors, per million batches."""


class Small(Dataset[torch.Tensor]):
    """Dataset of batches of 64 bytes; each batch contains its index."""

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index)


def memory_kib(pid: int) -> int:
    """Return a process's memory without file-backed pages; shared pages count proportionally."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = {name: int(rest[0]) for name, *rest in map(str.split, lines[1:])}
    return sizes["Pss_Anon:"] + sizes["Pss_Shmem:"]


def counts() -> dict[str, float]:
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return {
        "MiB": sum(memory_kib(process.pid) for process in processes) / 2**10,
        "threads": sum(process.num_threads() for process in processes),
        "descriptors": sum(process.num_fds() for process in processes),
    }


def seen(batches: int, rest_s: float, **way: object) -> Iterator[tuple[int, dict[str, float]]]:
    """Receive batches, and measure the processes at `MOMENTS` moments.

    Args:
        batches: Number of batches to receive.
        rest_s: Seconds to sleep after each measurement.
        way: Further arguments of `service`.

    Yields:
        The number of batches received so far, and the figures of the processes.
    """
    every = batches // MOMENTS
    loader = DataLoader(Small(), batch_size=None)
    with service(loader, buffer_bytes=BUFFER_BYTES, **way) as running:  # type: ignore[arg-type]
        remote = running.remote()
        stream = itertools.chain.from_iterable(itertools.repeat(remote))
        for number, batch in enumerate(itertools.islice(stream, batches), 1):
            assert int(batch[0]) == (number - 1) % EPOCH
            if number % every == 0:
                yield number, counts()
                time.sleep(rest_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=1_000_000)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--tcp", action="store_true", help="not through a Unix socket")
    ways.add_argument("--tls", action="store_true", help="by TCP under TLS")
    parser.add_argument("--rest", type=float, default=0.0, metavar="SECONDS")
    asked = parser.parse_args()
    # The forkserver of ranks and fetchers does this too. Otherwise, each fork would copy the memory
    # of all imported modules in its first full garbage collection, after some 600,000 batches.
    gc.collect()
    gc.freeze()
    started, moments = time.perf_counter(), []
    tls = new_certificate() if asked.tls else None
    for number, held in seen(asked.batches, asked.rest, direct=not (asked.tcp or tls), tls=tls):
        moments.append((number, held))
        text = ", ".join(f"{value:.0f} {name}" for name, value in held.items())
        print(f"{number:>9} batches, {time.perf_counter() - started:6.0f} s: {text}", flush=True)
    late = moments[MOMENTS // 4 :]
    grows = False
    for name in late[0][1]:
        x, y = [number / 1e6 for number, _ in late], [held[name] for _, held in late]
        slope = statistics.linear_regression(x, y).slope
        grows |= slope > (MOST_MIB if name == "MiB" else MOST_HANDLES)
        print(f"slope: {slope:+.2f} {name} per million batches")
    sys.exit(grows)


if __name__ == "__main__":
    main()
