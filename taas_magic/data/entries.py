"""Where lanes listen: fetchers write it down, ranks look it up.

Light: the notebook's kernel and the agents know these forms, too.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Address(NamedTuple):
    """Where a lane listens.

    Attributes:
        fetcher: Number of its fetcher.
        lane: Its number in the fetcher.
        host: Name or IP address for TCP.
        port: TCP port.
        unix: Name in the abstract namespace, "" for none.
        machine: `machine()` of its host.
    """

    fetcher: int
    lane: int
    host: str
    port: int
    unix: str
    machine: str

    def __str__(self) -> str:
        return f"fetcher {self.fetcher}, lane {self.lane} at {self.host}:{self.port}"


class Found(NamedTuple):
    """The lanes of a loader, as far as they are known.

    Attributes:
        lanes: How many there are in all.
        stride: Distance of the slots that they are asked for (see `shard.home`).
        addresses: Where those listen whose fetcher has started, by number.
        failed: Why none will ever start; "" while one may.
    """

    lanes: int
    stride: int
    addresses: dict[int, Address]
    failed: str = ""


class Directory(Protocol):
    """Says where the lanes of a loader are; asked again whenever one does not answer."""

    def __call__(self, loader: str) -> Found: ...


Entry = Mapping[str, Mapping[str, Any]]
"""Where a fetcher's lanes listen, by loader: `lanes` in all, and `addresses` by number. Or, of one
that could not start, `failed`, why, and `fetchers`, how many were to run the loader."""


def write_entry(folder: Path, number: int, entry: Entry) -> Path:
    """Write where the lanes of fetcher `number` listen; a rank sees the whole file or none."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file, text = folder / f"fetcher-{number}.json", json.dumps(entry)
    if file.exists() and file.read_text() == text:
        return file  # the folder is shared, and the fetcher has written it itself
    draft = folder / f"{number}-{os.getpid()}.draft"
    draft.write_text(text)
    os.replace(draft, file)
    return file


class FolderDirectory:
    """The addresses that fetchers have written into a folder, one file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, loader: str) -> Found:
        """Read what is there."""
        files = sorted(self._folder.glob("fetcher-*.json"))
        entries = [entry for file in files if (entry := json.loads(file.read_text()).get(loader))]
        failed = [entry for entry in entries if "failed" in entry]
        if failed and len(failed) == failed[0]["fetchers"]:
            return Found(0, 1, {}, failed[0]["failed"])
        started = [entry for entry in entries if "failed" not in entry]
        addresses = {
            int(number): Address(*address)
            for entry in started
            for number, address in entry["addresses"].items()
        }
        return Found(started[0]["lanes"] if started else 0, 1, addresses)
