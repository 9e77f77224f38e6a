"""A rank's feed: where its registered loaders get their batches, and what it says of them."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from taas_magic.data import service
from taas_magic.data.route import Entry, write_entry
from taas_magic.remote.link import Link

REPORT_S = 1.0
"""How often a rank says what it was handed and how long it waited."""


def place(run_dir: Path, number: int, entry: Entry) -> None:
    """Writes down where a fetcher of another host listens, for the ranks of this one."""
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
        tls=served.tls.client if served.tls else None,
        units=served.units,
        seed=served.seed,
        ledger=Ledger(folder / "ledger", attempt, rank),
        generation=attempt,
        window_bytes=served.memory.rank_buffer_bytes // 2,
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
