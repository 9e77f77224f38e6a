"""A run's fetchers in the agent, and its feed in the ranks."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from taas_magic.data import service
from taas_magic.data.service import Service
from taas_magic.journal import Event, event
from taas_magic.remote import fetcher
from taas_magic.remote.fetcher import Fetched, FetcherSpec, Setting
from taas_magic.remote.link import Link
from taas_magic.remote.spec import HostSpec

REPORT_S = 1.0
"""How often a rank says what it was handed and how long it waited."""

_END_S = 5.0


@contextmanager
def fetchers(spec: HostSpec, host: str, emit: Callable[[Event], None]) -> Iterator[None]:
    """Fetchers of a run beside its ranks, as long as the block runs; none if it needs none.

    Args:
        spec: The run's share of this host; the first host has the fetchers.
        host: This host's name.
        emit: Sends an event to the pool's process; any thread may call it.
    """
    served = service.read(spec.folder.path)
    if served is None or not served.fetchers or spec.host_rank:
        yield
        return
    running = [fetcher.start(one) for one in _specs(served, spec, host)]
    controls = [control for _, control in running]
    listener = threading.Thread(target=_listen, args=(controls, host, emit), daemon=True)
    listener.start()
    try:
        yield
    finally:
        for control in controls:
            control.send("end")
        for process, _ in running:
            process.join(_END_S)
            process.kill()
            process.join()
        listener.join()


def _specs(served: Service, spec: HostSpec, host: str) -> Iterator[FetcherSpec]:
    run_dir = spec.folder.path
    origin = spec.origin
    cores = max(1, len(os.sched_getaffinity(0)) // served.fetchers)
    loaders = tuple(
        Fetched(
            one.name,
            service.payload_file(run_dir, one.name),
            one.num_workers,
            one.context,
            one.seed,
        )
        for one in served.loaders
    )
    for number in range(served.fetchers):
        log = run_dir / "logs" / f"fetcher-{number}.log"
        setting = Setting(
            origin.cwd, dict(origin.environ), origin.sys_path, spec.folder.payload, log
        )
        yield FetcherSpec(
            number=number,
            fetchers=served.fetchers,
            loaders=loaders,
            key=served.key,
            folder=service.folder_of(run_dir) / "fetchers",
            cores=cores,
            host=host,
            units=served.units,
            setting=setting,
        )


def _listen(controls: list[Connection], host: str, emit: Callable[[Event], None]) -> None:
    """Turn what fetchers say into events, until all have ended."""
    left = list(controls)
    while left:
        for control in wait(left):
            assert isinstance(control, Connection)
            try:
                said: dict[str, Any] = control.recv()
            except (EOFError, OSError):
                number = controls.index(control)
                emit(event("fetcher_ended", host, number=number))
                control.close()
                left.remove(control)
                continue
            emit(event(said.pop("kind"), host, **said))


@contextmanager
def feed(run_dir: Path, rank: int, attempt: int, link: Link) -> Iterator[None]:
    """Registered loaders that this rank unpickles inside the block are fed by the run's fetchers.

    Args:
        run_dir: The run's folder.
        rank: This rank.
        attempt: Which start of the ranks this is.
        link: Where the rank says what it was handed.
    """
    served = service.read(run_dir)
    if served is None:
        yield
        return
    from taas_magic.data.feed import Feed
    from taas_magic.data.ledger import Ledger
    from taas_magic.data.loader import use_feed
    from taas_magic.data.route import FolderDirectory

    folder = service.folder_of(run_dir)
    here = Feed(
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        payload=lambda name: service.payload_file(run_dir, name).read_bytes(),
        directory=FolderDirectory(folder / "fetchers") if served.fetchers else None,
        key=served.key,
        units=served.units,
        seed=served.seed,
        ledger=Ledger(folder / "ledger", attempt, rank),
        generation=attempt,
    )
    use_feed(here)
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(REPORT_S):
            _report(here.counts(), link)

    reporter = threading.Thread(target=report, name="taas-feed", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        _report(here.counts(), link)


def _report(counts: dict[str, dict[str, float]], link: Link) -> None:
    if counts:
        link.send("data", loaders=counts)
