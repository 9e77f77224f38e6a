"""A rank's feed: where its registered loaders get their batches, and what it says of them."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from taas_magic.data import service
from taas_magic.data.accelerated import when_imported
from taas_magic.data.service import Service, write_entry
from taas_magic.host.link import Link
from taas_magic.leases import FetchLease
from taas_magic.messages import LoaderPlaces, RankCounts, RankReport

if TYPE_CHECKING:
    from taas_magic.data.loader import Feed


REPORT_S = 1.0
"""How often a rank says what it was handed and how long it waited."""


class Places:
    """Where the fetchers of other hosts listen, for the ranks of this one; any thread may call it.

    Args:
        known: The entries that are known from the start, by the fetchers' numbers.
    """

    def __init__(self, known: Mapping[int, LoaderPlaces]) -> None:
        self._entries = dict(known)
        self._run_dir: Path | None = None
        self._lock = threading.Lock()

    def put(self, number: int, entry: LoaderPlaces) -> None:
        """Takes down where a fetcher listens, and writes it where ranks look, once that is here."""
        with self._lock:
            self._entries[number] = entry
            if self._run_dir is not None:
                _place(self._run_dir, number, entry)

    def open(self, run_dir: Path) -> None:
        """The run's folder is on this host: all that is known is written there."""
        with self._lock:
            self._run_dir = run_dir
            for number, entry in self._entries.items():
                _place(run_dir, number, entry)


def _place(run_dir: Path, number: int, entry: LoaderPlaces) -> None:
    write_entry(service.folder_of(run_dir) / "fetchers", number, entry)


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
    from taas_magic.data.loader import use_feed

    here = _feed_of(served, run_dir, rank, attempt)
    use_feed(here)
    when_imported("accelerate.accelerator", _teach_accelerate)
    try:
        with _reporting(here, link):
            yield
    finally:
        for loader in here.loaders:
            loader.end()


def _feed_of(served: Service, run_dir: Path, rank: int, attempt: int) -> "Feed":
    from taas_magic.data.loader import Feed
    from taas_magic.data.metrics import BatchLedger
    from taas_magic.host.spec import TORCHRUN_NAMES

    folder = service.folder_of(run_dir)
    return Feed(
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        payload=lambda name: service.payload_file(run_dir, name).read_bytes(),
        directory=service.FolderDirectory(folder / "fetchers") if served.fetchers else None,
        key=served.key,
        tls=served.tls.client if served.tls else None,
        units=served.units,
        seed=served.seed,
        ledger=BatchLedger(folder / "ledger", attempt, rank),
        generation=attempt,
        window_bytes=served.settings.rank_buffer_bytes // 2,
        lease=FetchLease(served.settings.fetch_s),
        rank_variables=TORCHRUN_NAMES,
    )


def _teach_accelerate() -> None:
    from taas_magic.data.accelerated import teach_accelerate

    teach_accelerate()


@contextmanager
def _reporting(feed: "Feed", link: Link) -> Iterator[None]:
    """Says now and then what was handed out, and once more at the end of the block."""
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(REPORT_S):
            _report(feed.counts(), link)

    threading.Thread(target=report, name="taas-feed", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        _report(feed.counts(), link)


def _report(counts: dict[str, RankCounts], link: Link) -> None:
    if counts:
        link.send(RankReport(loaders=counts, cores=len(os.sched_getaffinity(0))))
