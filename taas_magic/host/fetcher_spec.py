"""What a fetcher is told by the agent that starts it, and takes over from the notebook."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from taas_magic.data.service import Tls
from taas_magic.store.guard import Means, hold
from taas_magic.store.rule import StoreRule


@dataclass(frozen=True)
class Setting:
    """The notebook's folder, environment and modules; and the rule of the project store.

    Attributes:
        cwd: The notebook's folder.
        environ: The kernel's environment.
        sys_path: The kernel's import path.
        payload: The run's payload, which has the project's own modules.
        log: File for what the dataset's code prints.
        who: What the fetcher is called in messages.
        store: The rule of the project store; a fetcher is held to it as a rank that is not 0.
        means: What this host has to hold it.
        scratch: A folder to make on this host, for what it would have written there.
    """

    cwd: str
    environ: dict[str, str]
    sys_path: tuple[str, ...]
    payload: Path
    log: Path
    who: str
    store: StoreRule | None
    means: Means
    scratch: Path

    def take(self) -> None:
        """Makes it this process's, which is freshly forked and has one thread."""
        from taas_magic.capture import payload

        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.cwd)
        sys.path[:] = self.sys_path
        if self.store is not None:
            self._hold_off(self.store)
        payload.read(self.payload).set_state()

    def _hold_off(self, rule: StoreRule) -> None:
        hold(
            rule,
            self.who,
            means=self.means,
            scratch=self.scratch,
            run_folder=str(self.payload.parent),
            note=lambda path: None,  # workers write, and children say nothing: the agent looks
        )


@dataclass(frozen=True)
class Fetched:
    """One registered loader, as a fetcher is told about it.

    Attributes:
        name: Its name.
        payload: File with the pickled loader.
        num_workers: Workers; 0 is one for each of the fetcher's cores.
        context: multiprocessing's start method of the workers, "" for the default.
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
        folder: Where it writes its addresses (`service.FolderDirectory`).
        cores: Processors that it may use.
        host: Its host's name, for messages.
        listen: Address to listen at for TCP; "" for this host's ranks only.
        buffer_bytes: How much prepared data may wait in memory, over all loaders and workers.
        spill: Folder for what memory has no room for; None: the workers wait instead.
        spill_bytes: How much may lie there.
        fill_batches: What all fetchers of the run are to have ready before ranks ask.
        fill_bytes: The same in bytes.
        units: The bound of `--units`.
        tls: The run's certificate; None for plain TCP.
        setting: What it takes over from the notebook; None: nothing.
        stacks: File to which it and its workers write their stacks when asked; None: they do not.
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
    stacks: Path | None = None
