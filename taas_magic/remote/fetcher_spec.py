"""What a fetcher is told by the agent that starts it."""

from dataclasses import dataclass
from pathlib import Path

from taas_magic.data.tls import Tls
from taas_magic.remote.setting import Setting


@dataclass(frozen=True)
class Fetched:
    """One registered loader, as a fetcher is told about it.

    Attributes:
        name: Its name.
        payload: File with the pickled loader.
        num_workers: Lanes; 0 is one for each of the fetcher's cores.
        context: multiprocessing's start method of the lanes, "" for the default.
        seed: The seed of its randomness.
    """

    name: str
    payload: Path
    num_workers: int = 0
    context: str = ""
    seed: int = 0


@dataclass(frozen=True)
class FetcherSpec:
    """What a fetcher is to do.

    Attributes:
        number: Its number in the run, from 0.
        index: Its place among the fetchers of its loaders, from 0.
        fetchers: How many of these there are.
        loaders: What it runs.
        key: The run's key.
        folder: Where it writes its addresses (`route.FolderDirectory`).
        cores: Processors that it may use.
        host: Its host's name, for messages.
        listen: Address to listen at for TCP; "" for this host's ranks only.
        buffer_bytes: How much prepared data may wait in memory, over all loaders and lanes.
        spill: Folder for what memory has no room for; None: the lanes wait instead.
        spill_bytes: How much may lie there.
        fill_batches: What all fetchers of the run are to have ready before ranks ask.
        fill_bytes: The same in bytes.
        units: The bound of `--units`.
        tls: The run's certificate; None for plain TCP.
        setting: What it takes over from the notebook; None: nothing.
    """

    number: int
    index: int
    fetchers: int
    loaders: tuple[Fetched, ...]
    key: bytes
    folder: Path
    cores: int
    host: str = ""
    listen: str = "127.0.0.1"
    buffer_bytes: int = 1 << 30
    spill: Path | None = None
    spill_bytes: int = 16 << 30
    fill_batches: int = 0
    fill_bytes: int = 0
    units: int | None = None
    tls: Tls | None = None
    setting: Setting | None = None
