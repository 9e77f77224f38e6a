"""Connect a rank to the data service: the run's fetchers, or the rank's own data servers.

Ranks have data servers only if there are no fetchers. A data server prepares the batches of one
loader, and starts when the rank first uses the loader (`RankServers`).

In a session, a loader stays usable in later cells, and its data server may start in a later cell.
So the ranks keep the pickled loaders of each cell, and the notebook's settings that a data server
needs (`FetcherSettings`).
"""

import gc
import os
import pickle
import secrets
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import cloudpickle

from taas_magic.capture import payload
from taas_magic.capture.payload import FetcherSettings
from taas_magic.data import service
from taas_magic.data.accelerated import patch_accelerate
from taas_magic.data.loader import RankFeed, RemoteLoader, use_feed
from taas_magic.data.server import RankServers
from taas_magic.data.service import DataServiceSettings
from taas_magic.data.worker import ServedLoader
from taas_magic.host import rendezvous
from taas_magic.host.spec import TORCHRUN_NAMES, LocalShare, ProcessSpec
from taas_magic.journal.folder import RunFolder
from taas_magic.late_imports import when_imported
from taas_magic.leases import FetchLease
from taas_magic.messages import RankCounts
from taas_magic.shared_files import locked

_SETTINGS = "settings"


@contextmanager
def run_feed(share: LocalShare, rank: int) -> Iterator[RankFeed | None]:
    """Connect a rank's registered loaders to the data service while the `with` block runs.

    Loaders that are unpickled inside the block use this connection. If the run has no fetchers,
    this function forks a starter process, which later starts the rank's data servers. So enter the
    block before the rank starts a thread or runs code of the user. The end of the block ends the
    data servers.

    If the cell uses registered loaders and imports accelerate, this function patches accelerate, so
    that accelerate works with these loaders (`patch_accelerate`).

    Yields:
        The rank's access to the run's data service; None if the cell uses no registered loader.
    """
    served = service.read_settings(share.folder.path)
    if served is None:
        yield None
        return
    here = _create_feed(served, share, rank)
    use_feed(here)
    when_imported("accelerate.accelerator", patch_accelerate)
    try:
        yield here
    finally:
        if here.own is not None:
            here.own.close()


def _create_feed(served: DataServiceSettings, share: LocalShare, rank: int) -> RankFeed:
    """Create a rank's feed, the object by which its loaders receive batches.

    If the run has no fetchers, also fork the process that later starts the rank's own data servers.
    Otherwise, the feed looks up the fetchers' addresses in the run folder. If the run has several
    ranks, they agree on values such as the order of an epoch by the feed's `LoaderAgreement`. The
    feed records received batches in a ledger in the run folder. In a rehearsal, each pass over a
    loader ends after a few batches.
    """
    folder = service.folder_of(share.folder.path)
    own = agreement = None
    if not served.fetchers:
        own = RankServers(served.key, _load_pickled_loader)
    if share.plan.world_size > 1:
        agreement = rendezvous.LoaderAgreement(os.environ, share.plan.run_id)
    return RankFeed(
        rank=rank,
        world_size=share.plan.world_size,
        payload=_payloads_in(share.folder.path),
        folder=str(share.folder.path),
        directory=_directory(served, share.folder.path),
        key=served.key,
        tls=served.tls.client_context if served.tls else None,
        units=served.units,
        pass_batches=share.plan.rehearse or None,
        seed=served.seed,
        ledger=service.BatchLedger(folder / "ledger", share.spec.attempt, rank),
        window_bytes=served.settings.rank_buffer_bytes // 2,
        lease=FetchLease(served.settings.fetch_s),
        own=own,
        agreement=agreement,
    )


def _directory(served: DataServiceSettings, base: Path) -> service.FolderDirectory | None:
    """Return an object that looks up the addresses of the run's fetchers; None without fetchers.

    Args:
        base: The run folder; for a session, the private folder of the session's ranks on the host.
    """
    if not served.fetchers:
        return None
    return service.FolderDirectory(service.addresses_folder(base), served.numbers)


def _payloads_in(run_dir: Path) -> Callable[[str], bytes]:
    return lambda name: service.payload_file(run_dir, name).read_bytes()


def _load_pickled_loader(served: ServedLoader) -> bytes:
    """Prepare a run's new data server, which is this process; return its pickled loader.

    The preparation makes the project's modules importable, and applies the notebook's process
    state. This data is in the run's payload. `served.folder` is the run folder.
    """
    loaded = payload.read(RunFolder(Path(served.folder)).payload)
    return _apply_settings_and_read([loaded.load_settings()], served)


def _load_in_session(served: ServedLoader) -> bytes:
    """Prepare a session's new data server, which is this process; return its pickled loader.

    The preparation applies the notebook's settings of each cell up to the cell with the loader.
    `served.folder` is the folder in which `_copy_loaders` has stored the loader and these settings.
    """
    return _apply_settings_and_read(
        pickle.loads((Path(served.folder) / _SETTINGS).read_bytes()), served
    )


def _apply_settings_and_read(settings: Sequence[FetcherSettings], served: ServedLoader) -> bytes:
    """Apply the notebook's `settings` to this data server, in order.

    Then read the file with the pickled loader `served`, and return the pickle's bytes.

    First removes the environment variables of torchrun, such as RANK and WORLD_SIZE. A dataset that
    reads these variables might divide the data by rank, although the data service already does so.
    """
    for name in TORCHRUN_NAMES:
        os.environ.pop(name, None)
    for each in settings:
        each.apply()
    return service.payload_file(Path(served.folder), served.name).read_bytes()


class SessionLoaders:
    """The registered loaders of a session's rank, and their connections to the data service.

    Each cell whose payload has loaders has its own connection, a `RankFeed`.

    The constructor forks the process that later starts the rank's data servers. So create this
    object before the rank starts a thread or runs code of the user.
    """

    def __init__(self, spec: ProcessSpec, rank: int) -> None:
        self._share, self._rank, self._base = spec.share, rank, spec.folder
        # A copy: a cell may change the address of the session's rendezvous in `os.environ`.
        self._environ = dict(os.environ)
        self._folder = spec.folder / "loaders"
        self._key = secrets.token_bytes(32)
        self._own = RankServers(self._key, _load_in_session)
        self._settings: list[FetcherSettings] = []
        self._agreements = weakref.WeakSet[rendezvous.LoaderAgreement]()
        self._epochs: rendezvous.LoaderAgreement | None = None
        if spec.share.plan.world_size > 1:
            run = f"{spec.share.plan.run_id}/epochs"
            self._epochs = rendezvous.LoaderAgreement(self._environ, run)
            self._agreements.add(self._epochs)
        self._had_loaders = self._has_loaders = False
        """Whether an earlier cell had loaders, and whether an earlier or the present cell has."""

        self._feed: RankFeed | None = None
        self._fetched: dict[int, RankFeed] = {}
        """The feeds that receive batches from fetchers, by the number of the cell with the feed's
        loaders."""

        when_imported("accelerate.accelerator", patch_accelerate)

    def expect_cell(self, run_dir: Path) -> None:
        """Record whether the cell's payload has loaders. Call this method before work on the cell.

        So all ranks know in which cells there were loaders, even if a rank cannot load the payload.

        Args:
            run_dir: Folder of the cell's run on this host.
        """
        self._had_loaders = self._has_loaders
        self._has_loaders = self._had_loaders or service.read_settings(run_dir) is not None

    def begin_cell(self, number: int, run_dir: Path, settings: FetcherSettings) -> None:
        """Set the batch counts of all loaders to 0, and connect the loaders of the cell's payload.

        Also make each loader continue with the same epoch on all ranks. The ranks' next epochs may
        differ, because an earlier cell has failed on some ranks or was interrupted, or because only
        some ranks ran it (`--ranks`).

        Call this method before the cell's payload is unpickled. In every cell, this method stores
        `settings` for the data servers that start in this cell or later cells. It also makes each
        `LoaderAgreement` reconnect, because an interrupt may have cut the rank's connections.

        If the payload has no loaders, the current feed stays. Otherwise, this method copies the
        loaders to the session's folder, and replaces the current feed by a new `RankFeed`:

        - If the cell has fetchers, the new feed gets batches from these fetchers. Otherwise, the
          new feed gets batches from the rank's own data servers.
        - In a session with several ranks, the new feed has a `LoaderAgreement`, by which the ranks
          agree on values such as the order of an epoch.

        Args:
            number: Number of the cell in the session.
            run_dir: Folder of the cell's run on this host.
            settings: The notebook's settings that have changed since the last cell.
        """
        for earlier in self._agreements:
            earlier.reconnect()
        for loader in self._loaders():
            loader.begin_cell(number)
        self._settings.append(settings)
        if self._epochs is not None and self._had_loaders:
            self._continue_with_latest_epoch(self._epochs, number)
        served = service.read_settings(run_dir)
        if served is None:
            return
        names = [loader.name for loader in served.loaders]
        kept = self._copy_loaders(number, run_dir, names)
        share, agreement, directory = self._share, None, _directory(served, self._base)
        if share.plan.world_size > 1:
            run = f"{share.plan.run_id}/{number}"
            agreement = rendezvous.LoaderAgreement(self._environ, run)
            self._agreements.add(agreement)
        self._feed = RankFeed(
            rank=self._rank,
            world_size=share.plan.world_size,
            payload=_payloads_in(kept),
            folder=str(kept),
            directory=directory,
            key=self._key if directory is None else served.key,
            tls=served.tls.client_context if served.tls else None,
            seed=served.seed,
            window_bytes=served.settings.rank_buffer_bytes // 2,
            lease=FetchLease(served.settings.fetch_s),
            own=self._own if directory is None else None,
            agreement=agreement,
            remote_loaders=[weakref.ref(loader) for loader in self._loaders()],
        )
        use_feed(self._feed)
        if directory is not None:
            self._fetched[number] = self._feed

    def end_cell(self) -> list[int]:
        """Forget the feeds that no loader uses, and return which cells' fetchers are still needed.

        If two loaders have the same name, first run the garbage collector, because one of them may
        be an old loader that nothing uses any more.

        Returns:
            Numbers of the cells whose fetchers this rank still needs. The rank needs a cell's
            fetchers as long as a loader from this cell exists, for example in a variable.
        """
        names = [loader.name for loader in self._loaders()]
        if len(set(names)) < len(names):
            # Two loaders have the same name: the notebook sent the loader again. Collect the old
            # loader now, so that its server or its fetchers end.
            gc.collect()
        used = {id(loader.feed) for loader in self._loaders()}
        self._fetched = {at: feed for at, feed in self._fetched.items() if id(feed) in used}
        return list(self._fetched)

    def _continue_with_latest_epoch(
        self, agreement: rendezvous.LoaderAgreement, number: int
    ) -> None:
        """Set the next epoch of each loader to the loader's latest next epoch on any rank.

        Wait until all ranks have called this method for the cell.

        Args:
            agreement: Access to the ranks' key-value store.
            number: Number of the cell in the session.
        """
        keys = {
            f"{number}/{Path(loader.feed.folder).name}/{loader.name}": loader
            for loader in self._loaders()
        }
        for key, loader in keys.items():
            agreement.store_largest(key, loader.next_epoch)
        agreement.await_all_ranks(f"{number}")
        for key, loader in keys.items():
            latest = agreement.store_largest(key, loader.next_epoch)
            if latest > loader.next_epoch:
                loader.set_epoch(latest)

    def counts(self) -> dict[str, RankCounts]:
        """Return the counts of received batches, by loader name.

        The result has only the loaders that the current cell has used.
        """
        found = {loader.name: loader.current_counts() for loader in self._loaders()}
        return {name: counts for name, counts in found.items() if counts.span_s}

    def close(self) -> None:
        """End the data servers of this rank."""
        self._own.close()

    def _loaders(self) -> list[RemoteLoader]:
        return self._feed.loaders if self._feed is not None else []

    def _copy_loaders(self, number: int, run_dir: Path, names: Iterable[str]) -> Path:
        """Store a cell's pickled loaders and all settings so far in a folder of the session.

        Data servers that start in this cell or in later cells read these files. The loaders' files
        are hard links to the files in `run_dir` if possible. All ranks of a host share the folder:
        the first rank fills the folder, and the other ranks wait.

        Args:
            names: Names of the loaders.

        Returns:
            The folder with the files.
        """
        kept = self._folder / str(number)
        service.folder_of(kept).mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(kept / "lock", wait=True):
            if not (kept / _SETTINGS).exists():
                for name in names:
                    file, copy = (service.payload_file(at, name) for at in (run_dir, kept))
                    _link_or_copy(file, copy)
                (kept / _SETTINGS).write_bytes(cloudpickle.dumps(self._settings))
        return kept


def _link_or_copy(file: Path, copy: Path) -> None:
    try:
        copy.hardlink_to(file)
    except OSError:
        shutil.copyfile(file, copy)
