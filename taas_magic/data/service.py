"""What a run's data service is, in files of the run folder that only the user reads.

<run folder>/data/            0700
    service.json              0600: the key, the loaders, the flags that concern them
    <name>.loader             a registered loader, pickled
    fetchers/                 where each fetcher's lanes listen (route.FolderDirectory)
    ledger/                   what each rank was handed (ledger.py)
"""

import dataclasses
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Served:
    """A registered loader that a run's cell uses.

    Attributes:
        name: Its name.
        num_workers: Lanes on each fetcher; 0: one for each core.
        context: multiprocessing's start method of the lanes, "" for the default.
        seed: The seed of its randomness.
    """

    name: str
    num_workers: int
    context: str
    seed: int


@dataclass(frozen=True)
class Service:
    """A run's data service.

    Attributes:
        key: The run's key, which every connection has to prove.
        seed: The run's seed.
        fetchers: How many hosts run the loaders; 0: the ranks do it themselves.
        units: The bound of `--units`.
        loaders: What is served.
    """

    key: bytes
    seed: int
    fetchers: int
    units: int | None
    loaders: tuple[Served, ...]


def new_key() -> bytes:
    """A key that nobody can guess."""
    return secrets.token_bytes(32)


def folder_of(run_dir: Path) -> Path:
    """Where a run's data service has its files."""
    return run_dir / "data"


def payload_file(run_dir: Path, name: str) -> Path:
    """The file with a pickled loader; the name may hold anything."""
    return folder_of(run_dir) / f"{name.encode().hex()}.loader"


def write(run_dir: Path, service: Service, payloads: Mapping[str, bytes]) -> None:
    """Write what ranks and fetchers need."""
    folder = folder_of(run_dir)
    folder.mkdir(mode=0o700)
    for name, payload in payloads.items():
        payload_file(run_dir, name).write_bytes(payload)
    values = {**dataclasses.asdict(service), "key": service.key.hex()}
    descriptor = os.open(folder / "service.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(values, file)


def read(run_dir: Path) -> Service | None:
    """The run's data service; None where its cell uses no registered loader."""
    file = folder_of(run_dir) / "service.json"
    if not file.exists():
        return None
    values = json.loads(file.read_text())
    loaders = tuple(Served(**loader) for loader in values["loaders"])
    return Service(**{**values, "key": bytes.fromhex(values["key"]), "loaders": loaders})
