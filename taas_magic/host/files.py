"""Transfer of a run's files to and from a host: the run folder and the project store.

Before ranks and fetchers start, the host gets the files that they read. When they have ended, the
host sends back the files that they wrote: results, logs and ledgers. If a host does not share the
notebook's folders, its agent (`HostFiles`) sends requests for files to the pool's process
(`FileServer`). Files are transferred in small parts, so that they never block a slow link for long:
the run's beats use the same link.
"""

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from taas_magic import probe
from taas_magic.capture.reducers import copy_environ
from taas_magic.data import service
from taas_magic.errors import ProtocolError
from taas_magic.host.spec import EventSink, HostAddress, LocalShare, RunSpec, ShareSpec
from taas_magic.journal import timeline
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import Note, StoreMessage, StoreReceipt, UnsentFile, WrittenFile
from taas_magic.store.manifest import (
    CHUNK_BYTES,
    Ask,
    FileRequest,
    ListRunFiles,
    MakeToken,
    Manifest,
    MessageSizer,
    ReadRunFile,
    WriteRunFile,
)
from taas_magic.store.mirror import Mirror, StoreUpdater, reserve, update_mirror
from taas_magic.store.outbound import Outbound
from taas_magic.store.ownership import RunsFiles
from taas_magic.store.receipt import Ledger
from taas_magic.store.rule import StoreRule, is_below, state_folder
from taas_magic.store.server import StoreServer
from taas_magic.store.tree import shown

_T = TypeVar("_T")

LOG_BYTES = 64 << 20
"""Maximum bytes of a log that are sent back. Of a longer log, only the end is sent."""

_RESULT = re.compile(r"results/(\d+)-(\d+)-\d+", re.ASCII)
_PROFILE = re.compile(r"profile/(\d+)-(\d+)\.json\.gz", re.ASCII)
_OF_RANK = re.compile(r"logs/rank-(\d+)\.log|data/ledger/ledger-\d+-(\d+)", re.ASCII)
_OF_FETCHER = re.compile(r"logs/fetcher-(\d+)\.log", re.ASCII)
_NAMED_AT_MOST = 5


@dataclass(frozen=True)
class OwnedFiles:
    """Files of the run folder that a host may write.

    Attributes:
        numbers: Numbers of the host's ranks, or of its fetchers.
        attempt: The run's current attempt. The host may not write results of earlier attempts.
        senders: Ranks that may send results.
    """

    numbers: Collection[int]
    attempt: int
    senders: Collection[int]

    def has(self, name: str, fetches: bool) -> bool:
        """Return whether the host may write a file of the run folder.

        Args:
            name: Path of the file, relative to the run folder.
            fetches: Whether the share runs fetchers instead of ranks.
        """
        if not fetches and (result := _RESULT.fullmatch(name)) is not None:
            attempt, rank = int(result[1]), int(result[2])
            return attempt == self.attempt and rank in self.numbers and rank in self.senders
        if not fetches and (profile := _PROFILE.fullmatch(name)) is not None:
            return int(profile[1]) == self.attempt and int(profile[2]) in self.numbers
        found = (_OF_FETCHER if fetches else _OF_RANK).fullmatch(name)
        return found is not None and int(next(filter(None, found.groups()))) in self.numbers


class RunFolderCopy:
    """The copy of the run folder on a host that does not share the notebook's run folder.

    Args:
        ask: Sends a request to the pool's process and returns the response.
        cache: Folder in which the copy is created.
    """

    def __init__(self, spec: ShareSpec, ask: Ask, cache: Path) -> None:
        self._ask, self._sizer = ask, MessageSizer()
        self._folder = RunFolder(cache / spec.plan.run_id)
        self._attempt = spec.attempt
        self.close()
        (self._folder.path / "logs").mkdir(mode=0o700, parents=True)
        self._folder.path.chmod(0o700)

    @property
    def path(self) -> Path:
        """Path of this copy."""
        return self._folder.path

    def begin_attempt(self, attempt: int) -> None:
        """Record the current attempt. `send_back` leaves out results of earlier attempts."""
        self._attempt = attempt

    def copy_in(self, is_wanted: Callable[[], bool]) -> bool:
        """Copy the files that ranks and fetchers read to this host.

        Args:
            is_wanted: Called before each part of a file. If it returns False, the transfer stops.

        Returns:
            Whether all files were copied completely.

        Raises:
            PoolError: The pool's process does not respond.
        """
        sizes = self._ask(ListRunFiles())
        return all(self._copy_file(name, size, is_wanted) for name, size in sizes.items())

    def send_back(self) -> None:
        """Send back what ranks and fetchers wrote: logs, ledgers, results and profiles.

        Called when all processes of the run have ended.

        Raises:
            PoolError: The pool's process does not respond.
        """
        base = self._folder.path
        profiles = base / timeline.FOLDER
        folders = (base / "logs", base / "data" / "ledger", self._folder.results, profiles)
        found = [path for path in folders if path.exists()]
        files = [file for folder in found for file in sorted(folder.iterdir()) if file.is_file()]
        for path in files:
            name = path.relative_to(base).as_posix()
            of_attempt = _RESULT.fullmatch(name) or _PROFILE.fullmatch(name)
            is_old = of_attempt is not None and int(of_attempt[1]) != self._attempt
            # A hidden file is one that a killed rank had not finished.
            if not path.name.startswith(".") and not is_old:
                self._send(path, name)

    def close(self) -> None:
        """Remove the copy."""
        shutil.rmtree(self._folder.path, ignore_errors=True)

    def _copy_file(self, name: str, size: int, is_wanted: Callable[[], bool]) -> bool:
        path = self._folder.path / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            while (offset := file.tell()) < size and is_wanted():
                part = ReadRunFile(name, offset, self._sizer.size)
                file.write(self._sizer.send(self._ask, part))
            return offset >= size

    def _send(self, path: Path, name: str) -> None:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            left_out = max(0, size - LOG_BYTES) if name.startswith("logs/") else 0
            file.seek(left_out)
            sent = 0
            data = (
                f"… {left_out:,} bytes before this are not shown …\n".encode() if left_out else b""
            )
            while True:
                data += file.read(self._sizer.size)
                last = file.tell() >= size
                self._sizer.send(self._ask, WriteRunFile(name, sent, data, last))
                if last:
                    return
                sent, data = sent + len(data), b""


def _is_same(run: RunSpec) -> bool:
    """Return whether this host shares the notebook's run folder.

    It does if the folder of that path here contains a plan with the run's random id.
    """
    try:
        return run.folder.plan().run_id == run.plan.run_id
    except (OSError, ValueError):
        return False


class Travelling:
    """The mirror that a share uses on a host that does not share the project store.

    Keeps the mirror and the store in step while the share runs.

    Args:
        ask: Sends a request to the pool's process and returns the response.
        note: Called with messages for the user.
        shares: For a cell in a session: the session's object, whose mirror the cell uses. If None,
            this object has a mirror of its own.

    Raises:
        StoreError: The store cannot be copied to this host.
    """

    def __init__(
        self,
        spec: ShareSpec,
        ask: Ask,
        note: Callable[[str], None],
        shares: "Travelling | None" = None,
    ) -> None:
        store = spec.run.origin.store
        assert spec.plan.store is not None and store is not None
        self._rule, self._ask, self._note = spec.plan.store, ask, note
        self._written: dict[str, int] = {}
        self._refused: dict[str, str] = {}
        self._has_others = spec.n_hosts > 1
        self._news: StoreUpdater | None = None
        self._outbound: Outbound | None = None
        self._is_own = shares is None
        self._mirror: Mirror = (
            reserve(self._rule.path, store.kernel) if shares is None else shares._mirror
        )
        try:
            _report_skipped(update_mirror(self._mirror, ask, fresh=spec.attempt > 0), note)
            if not spec.run.is_session:  # between a session's cells, nothing is transferred
                self._follow(_sends(spec))
        except BaseException:
            self._release()
            raise

    def rule(self) -> StoreRule:
        """Return the rule of the project store with paths in the mirror."""
        shared = tuple(map(self.locate, self._rule.shared))
        return structs.replace(self._rule, path=self._mirror.path, shared=shared)

    def environ(self) -> dict[str, str]:
        """Return the environment variables with which ranks find the mirror."""
        return copy_environ(self._rule.path, self._mirror.path)

    def locate(self, path: str) -> str:
        """Translate a path of the notebook's machine to the mirror, if the path is in the store."""
        if not is_below(path, self._rule.path):
            return path
        below = os.path.relpath(path, self._rule.path)
        return os.path.normpath(os.path.join(self._mirror.path, below))

    def again(self, spec: ShareSpec) -> None:
        """Prepare the mirror for the next attempt, in which rank 0 may run on another host.

        The mirror is updated from the store, so that every rank finds the same last checkpoint. If
        rank 0 was and will be on this host, there is no update: the mirror is current, and may also
        hold files that the store could not accept.

        Raises:
            StoreError: The store cannot be copied to this host any more.
        """
        sends = _sends(spec)
        is_newest = self._sends is None and sends is None
        self._send_rest()
        if not is_newest:
            update_mirror(self._mirror, self._ask, fresh=True)
        self._follow(sends)

    def finish(self) -> tuple[list[WrittenFile], list[UnsentFile]]:
        """Send the remaining files to the store. Called when no process of the run writes any more.

        Returns:
            The files that were sent to the store, and those that the store did not accept.
        """
        self._send_rest()
        self._release()
        written, refused = sorted(self._written.items()), sorted(self._refused.items())
        return (
            [WrittenFile(path, size) for path, size in written if not self._is_shared(path)],
            [UnsentFile(shown(path), why) for path, why in refused],
        )

    def _follow(self, sends: Sequence[str] | None) -> None:
        self._sends = sends
        if sends is None or sends:
            self._outbound = Outbound(self._mirror, self._ask, self._note, sends)
            self._outbound.start()
        if self._has_others:
            self._news = StoreUpdater(self._mirror, self._ask, self._note)
            self._news.start()

    def _send_rest(self) -> None:
        if self._news is not None:
            self._news.finish()
        if self._outbound is not None:
            self._outbound.finish()
            written, refused = self._outbound.written, self._refused | self._outbound.refused
            self._written |= written
            self._refused = {path: why for path, why in refused.items() if path not in written}
        self._outbound = self._news = None

    def _release(self) -> None:
        if self._is_own:
            self._mirror.close()

    def _is_shared(self, path: str) -> bool:
        place = os.path.join(self._rule.path, path)
        return any(is_below(place, folder) for folder in self._rule.shared)


def _report_skipped(manifest: Manifest, note: Callable[[str], None]) -> None:
    if manifest.skipped:
        named = [f"{path} ({why})" for path, why in list(manifest.skipped.items())[:_NAMED_AT_MOST]]
        more = len(manifest.skipped) - len(named)
        more_text = f" and {more:,} more" if more else ""
        note(f"not copied from the project store: {', '.join(named)}{more_text}")


def _sends(spec: ShareSpec) -> Sequence[str] | None:
    """Return the folders of the project store that this host may write.

    Returns:
        Paths relative to the store; None if the host may write the whole store.
    """
    rule = spec.plan.store
    if spec.run.reads_only or spec.fetches:
        return []
    if rule is None or spec.has_rank_0:
        return None
    return [os.path.relpath(folder, rule.path) for folder in rule.shared]


class HostFiles:
    """The files of one share on this host.

    If the host does not share the notebook's folders, transfers the files from and to them. A share
    of fetchers writes no files to the project store.
    """

    def __init__(self, spec: ShareSpec, place: HostAddress, ask: Ask, emit: EventSink) -> None:
        self._spec, self._place, self._ask, self._emit = spec, place, ask, emit
        self._has_rank_0 = spec.has_rank_0
        self._folder: RunFolderCopy | None = None
        self._travelling: Travelling | None = None
        self._ledger: Ledger | None = None
        self._session: HostFiles | None = None

    def share_mirror(self, session: "HostFiles") -> None:
        """Use a session's mirror. Called for a cell in the session, before `copy_in`.

        The session's ranks, which run the cell, have that mirror as their working directory.
        """
        self._session = session

    def copy_in(self, is_wanted: Callable[[], bool]) -> LocalShare | None:
        """Copy all files that the share needs to this host.

        Args:
            is_wanted: Returns False as soon as the share is to end. The transfer then stops.

        Returns:
            The share with this host's paths; None if the transfer was stopped.

        Raises:
            PoolError: The pool's process does not respond.
            StoreError: The store cannot be copied to this host.
        """
        spec = self._spec
        # Ranks and fetchers of one run may be on the same host, so their folders must differ.
        cache = Path(probe.cache_folder()) / ("fetching" if spec.fetches else "runs")
        if not _is_same(spec.run):
            self._folder = RunFolderCopy(spec, self._ask, cache)
            if not self._folder.copy_in(is_wanted):
                return None
        store = spec.run.origin.store if spec.plan.store is not None else None
        if store is not None and not store.is_here(lambda: self._ask(MakeToken())):
            shares = self._session._travelling if self._session is not None else None
            self._travelling = Travelling(spec, self._ask, self._note, shares)
        here = self._local(spec)
        keeps_ledger = not (spec.run.reads_only or spec.fetches or spec.run.is_session)
        if (rule := here.store) and keeps_ledger:
            self._ledger = Ledger(rule.path, rule.shared)
        return here

    def again(self, spec: ShareSpec) -> LocalShare:
        """Prepare the files for the next attempt; return the share `spec` with this host's paths.

        Called when the ranks of the last attempt have ended.

        Raises:
            StoreError: The store cannot be copied to this host any more.
        """
        self._has_rank_0 = self._has_rank_0 or spec.has_rank_0
        if self._travelling is not None:
            self._travelling.again(spec)
        if self._folder is not None:
            self._folder.begin_attempt(spec.attempt)
        return self._local(spec)

    def record(self, rank: int, message: StoreMessage) -> None:
        """Record a rank's message about a file of the project store, for the receipt."""
        if self._ledger is not None:
            self._ledger.record(rank, message)

    def send_back(self) -> None:
        """Send back the files that the run wrote on this host, and its receipt.

        Called when all processes of the run on this host have ended.

        Raises:
            PoolError: The pool's process does not respond.
        """
        try:
            self._close_store()
            if self._folder is not None:
                self._folder.send_back()
        finally:
            if self._folder is not None:
                self._folder.close()

    def _local(self, spec: ShareSpec) -> LocalShare:
        origin, store, cwd = spec.run.origin, spec.plan.store, spec.run.origin.cwd
        environ, sys_path = dict(origin.environ), origin.sys_path
        if self._place.is_foreign:
            environ, sys_path = origin.environ_on(os.environ), origin.sys_path_on(sys.path)
        if (mirror := self._travelling) is not None:
            store, cwd = mirror.rule(), mirror.locate(cwd)
            sys_path = tuple(map(mirror.locate, sys_path))
            environ |= mirror.environ()
        run_dir = str(self._folder.path) if self._folder is not None else spec.run.run_dir
        return LocalShare(spec, run_dir, store, cwd, environ, sys_path)

    def _close_store(self) -> None:
        """Send this host's remaining files to the project store, then the receipt to the pool."""
        receipt = None
        # First remove what killed ranks left unfinished, so that it is not sent.
        if self._ledger is not None:
            is_here = self._travelling is None
            receipt = self._ledger.close(has_rank_0=self._has_rank_0 and is_here)
            if is_here and not self._place.is_foreign:
                self._record(receipt)
        finished = self._travelling.finish() if self._travelling is not None else None
        if receipt is not None:
            if finished is not None:
                receipt.written, receipt.not_sent = finished
            self._emit(receipt)

    def _record(self, receipt: StoreReceipt) -> None:
        """Record in the store's state folder that a run wrote these files of rank 0.

        Called only on the notebook's machine.
        """
        rule = self._spec.plan.store
        assert rule is not None
        with suppress(OSError):  # without the record, hosts store their versions as separate files
            folder = state_folder(rule.path)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            RunsFiles(folder).record_written(rule.path, [it.path for it in receipt.written])

    def _note(self, text: str) -> None:
        self._emit(Note(text=text))


class FileServer:
    """Handler of file requests from the hosts that run a run's ranks, or its fetchers.

    It is part of the pool's process. Requests about the project store run in a separate thread,
    because they wait for the disk.

    Args:
        fetches: Whether the hosts run the run's fetchers instead of its ranks.
    """

    def __init__(self, run: RunSpec, fetches: bool) -> None:
        self._run, self._fetches, self._path = run, fetches, run.folder.path
        self._thread = ThreadPoolExecutor(1, "taas-store")
        self._store_server: StoreServer | None = None
        self._is_closed = False

    async def answer(self, host_rank: int, owned: OwnedFiles, asked: FileRequest[_T]) -> _T:
        """Handle a host's request for files; return the response.

        Args:
            host_rank: Number of the host among those of the run's ranks, or of its fetchers.
            owned: Files of the run folder that the host may write.

        Raises:
            ProtocolError: The request is invalid, or this host may not send it.
            StoreError: The store is too large to be copied.
        """
        if isinstance(asked, ListRunFiles | ReadRunFile | WriteRunFile):
            return await asyncio.to_thread(self.answer_of_folder, host_rank, owned, asked)
        if self._is_closed or self._run.plan.store is None:
            raise ProtocolError("the run has no project store, or has ended")
        loop = asyncio.get_running_loop()
        answer = self._answer_of_store
        return await loop.run_in_executor(self._thread, answer, host_rank, asked)

    async def close(self) -> None:
        """Refuse further requests about the store, and wait for those that have begun."""
        self._is_closed = True
        if self._store_server is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._store_server.close)
        self._thread.shutdown(wait=False)

    def answer_of_folder(self, host_rank: int, owned: OwnedFiles, asked: FileRequest[Any]) -> Any:
        """Handle a request about the run folder. Blocks; any thread may call this.

        Raises:
            ProtocolError: This host may not send the request.
        """
        match asked:
            case ListRunFiles():
                return self._list()
            case ReadRunFile():
                return self._read(asked)
            case WriteRunFile():
                if not owned.has(asked.name, self._fetches):
                    what = f"sent {asked.name!r} for the run's folder"
                    raise ProtocolError(f"host {host_rank} of the run {what}")
                return self._write(host_rank, asked)

    def _list(self) -> dict[str, int]:
        """Return the size in bytes of each file that ranks and fetchers need, by name."""
        names = [] if self._fetches else ["payload"]
        data = service.folder_of(self._path)
        if data.exists():
            names += [f"{data.name}/{file.name}" for file in data.iterdir() if file.is_file()]
        sizes = {name: self._path / name for name in names}
        return {name: path.stat().st_size for name, path in sizes.items() if path.exists()}

    def _read(self, asked: ReadRunFile) -> bytes:
        if asked.name not in self._list():
            raise ProtocolError(f"a host asked for {asked.name!r} of the run's folder")
        with (self._path / asked.name).open("rb") as file:
            file.seek(asked.offset)
            return file.read(min(asked.size, CHUNK_BYTES))

    def _write(self, host_rank: int, asked: WriteRunFile) -> None:
        path = self._path / asked.name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = Path(f"{path}.part-{host_rank}")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            file.truncate(asked.offset)
            file.seek(asked.offset)
            file.write(asked.data)
        if asked.last:
            beside.replace(path)

    def _answer_of_store(self, host_rank: int, asked: FileRequest[_T]) -> _T:
        if self._store_server is None:
            rule = self._run.plan.store
            assert rule is not None
            folder = state_folder(rule.path)
            # While these ranks or fetchers run, other runs may use the store too.
            if self._run.reads_only or self._run.is_session:
                self._store_server = StoreServer(rule, folder / "readers", writer=-1)
            elif self._fetches:
                self._store_server = StoreServer(rule, folder / "fetchers", writer=-1)
            else:
                self._store_server = StoreServer(rule, folder)
        return self._store_server.answer(host_rank, asked)
