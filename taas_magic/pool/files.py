"""The pool's side of file transfer: handles hosts' requests to list, read and write files of a run.

`host/files.py` sends these requests from the hosts. `store/server.py` handles those requests that
concern the project store.
"""

import asyncio
import os
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from taas_magic.data import service
from taas_magic.errors import ProtocolError
from taas_magic.host.files import PROFILE, RESULT
from taas_magic.host.spec import RunSpec
from taas_magic.store.manifest import Manifest, ManifestEntry
from taas_magic.store.requests import (
    FilePiece,
    FileRequest,
    FileRoot,
    ListFiles,
    ReadFiles,
    WriteFiles,
)
from taas_magic.store.rule import store_state_folder
from taas_magic.store.server import StoreServer

_T = TypeVar("_T")

_OF_RANK = re.compile(r"logs/rank-(\d+)\.log|data/ledger/ledger-\d+-(\d+)", re.ASCII)
_OF_FETCHER = re.compile(r"logs/fetcher-(\d+)\.log", re.ASCII)


@dataclass(frozen=True)
class OwnedFiles:
    """Facts about a host and its run that decide which files the host may write.

    Attributes:
        numbers: Numbers of the host's ranks, or of its fetchers.
        attempt: The run's current attempt. The host may not write results of earlier attempts.
        senders: All ranks of the run that may send results: rank 0 and the ranks named in `--out`.
            These ranks may be on different hosts.
    """

    numbers: Collection[int]
    attempt: int
    senders: Collection[int]

    def may_write(self, name: str, is_fetchers: bool) -> bool:
        """Return whether the host may write a file of the run folder.

        A host with ranks may write only these files:

        - logs and ledgers of the host's ranks
        - profiles of the host's ranks in the current attempt
        - results of the host's ranks in the current attempt, if `senders` contains the rank

        A host with fetchers may write only the logs of its fetchers.

        Args:
            name: Path of the file, relative to the run folder.
            is_fetchers: Whether the host runs fetchers of the run instead of ranks.
        """
        if not is_fetchers and (result := RESULT.fullmatch(name)) is not None:
            attempt, rank = int(result[1]), int(result[2])
            return attempt == self.attempt and rank in self.numbers and rank in self.senders
        if not is_fetchers and (profile := PROFILE.fullmatch(name)) is not None:
            return int(profile[1]) == self.attempt and int(profile[2]) in self.numbers
        found = (_OF_FETCHER if is_fetchers else _OF_RANK).fullmatch(name)
        return found is not None and int(next(filter(None, found.groups()))) in self.numbers


class FileServer:
    """Handler of file requests from the hosts of one run.

    Requests about the project store run in a thread of this object, because they wait for the disk.

    Args:
        is_fetchers: Whether the hosts run the run's fetchers instead of its ranks.
    """

    def __init__(self, run: RunSpec, is_fetchers: bool) -> None:
        self._run, self._is_fetchers, self._path = run, is_fetchers, run.folder.path
        self._thread = ThreadPoolExecutor(1, "taas-store")
        self._store_server: StoreServer | None = None
        self._is_closed = False

    async def answer(self, host_rank: int, owned: OwnedFiles, asked: FileRequest[_T]) -> _T:
        """Handle a host's request for files in a thread; return the response.

        Several requests about the run folder may run at the same time. Requests about the project
        store run one after the other.

        Args:
            host_rank: Number of the requesting host among the hosts of the ranks or fetchers.
            owned: The files of the run folder that this host may write.

        Raises:
            ProtocolError: The request is invalid, or this host may not send it. Or it is about the
                project store, and the run has no store or has ended.
            StoreError: The store is too large to be copied.
        """
        if asked.root is FileRoot.RUN:
            return await asyncio.to_thread(self.answer_folder_request, host_rank, owned, asked)
        if self._is_closed or self._run.plan.store is None:
            raise ProtocolError("the run has no project store, or has ended")
        loop = asyncio.get_running_loop()
        answer = self._answer_store_request
        return await loop.run_in_executor(self._thread, answer, host_rank, asked)

    async def close(self) -> None:
        """Refuse further requests about the project store, and wait until earlier ones are done."""
        self._is_closed = True
        if self._store_server is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._store_server.close)
        self._thread.shutdown(wait=False)

    def answer_folder_request(
        self, host_rank: int, owned: OwnedFiles, asked: FileRequest[Any]
    ) -> Any:
        """Handle a request to list, read or write files of the run folder; return the response.

        This method waits for the disk. Any thread may call it.

        Raises:
            ProtocolError: The request is not a request to list, read or write files. Or it is too
                large, or the host may not send it.
        """
        asked.check_size()
        match asked:
            case ListFiles():
                return self._list()
            case ReadFiles():
                return self._read(asked)
            case WriteFiles():
                return self._write(host_rank, owned, asked)
        raise ProtocolError(f"host {host_rank}: {asked.op()}: not for the run folder")

    def _list(self) -> Manifest:
        """Return names and sizes of the files in the run folder that a host needs and may read.

        These are the files of the data service and, for hosts with ranks, the payload. Files that
        do not exist are left out.
        """
        names = [] if self._is_fetchers else ["payload"]
        data = service.folder_of(self._path)
        if data.exists():
            names += [f"{data.name}/{file.name}" for file in data.iterdir() if file.is_file()]
        paths = {name: self._path / name for name in names}
        entries = [
            ManifestEntry(name, path.stat().st_size, "")
            for name, path in paths.items()
            if path.exists()
        ]
        return Manifest(entries, {})

    def _read(self, asked: ReadFiles) -> list[bytes | None]:
        """Return the requested parts of files of the run folder.

        If a file ends before the end of the requested part, the returned part is shorter.

        Raises:
            ProtocolError: The host may not read a file, because `_list` does not return it. Or an
                offset or size is negative.
        """
        listed = {entry.path for entry in self._list().entries}
        parts: list[bytes | None] = []
        for name, offset, size in asked.parts:
            if name not in listed or offset < 0 or size < 0:
                raise ProtocolError(f"a host asked for {name!r} of the run's folder")
            with (self._path / name).open("rb") as file:
                file.seek(offset)
                parts.append(file.read(size))
        return parts

    def _write(self, host_rank: int, owned: OwnedFiles, asked: WriteFiles) -> dict[str, str]:
        """Write pieces of files to the run folder.

        Returns:
            The refused paths, with reasons. The dict is always empty, because this method raises an
            exception if it refuses a path.

        Raises:
            ProtocolError: The host may not write one of the files. Or the request creates a folder
                or removes a path. In all these cases, no file is written.
        """
        entries = [piece.entry for piece in asked.pieces]
        foreign = [it.path for it in entries if not owned.may_write(it.path, self._is_fetchers)]
        folders = [it.path for it in entries if it.is_folder]
        if refused := [*foreign, *folders, *asked.removed]:
            what = f"sent {refused[0]!r} for the run's folder"
            raise ProtocolError(f"host {host_rank} of the run {what}")
        for piece in asked.pieces:
            self._write_piece(host_rank, piece)
        return {}

    def _write_piece(self, host_rank: int, piece: FilePiece) -> None:
        """Write a piece of a file to a temporary file. After the last piece, replace the real file.

        If several hosts write the same file, each host has its own temporary file. An earlier try
        may have left bytes in the temporary file. So this method first removes all bytes from the
        start of the piece to the end of the file.
        """
        path = self._path / piece.entry.path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = Path(f"{path}.part-{host_rank}")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            file.truncate(piece.offset)
            file.seek(piece.offset)
            file.write(piece.data)
        if piece.end == piece.entry.size:
            beside.replace(path)

    def _answer_store_request(self, host_rank: int, asked: FileRequest[_T]) -> _T:
        """Pass a request about the project store to a `StoreServer`; return the response.

        The first call creates the server. The server's rights depend on the kind of run:

        - For the ranks of a run that owns the store, the host of rank 0 may write anywhere in the
          store; other hosts may write only below shared folders. The server uses the store's state
          folder.
        - For fetchers, sessions and runs that only read, each host may write only below shared
          folders. The server uses a subfolder of the state folder, because several such servers may
          exist at the same time.

        Only the thread of this object calls this method.
        """
        if self._store_server is None:
            rule = self._run.plan.store
            assert rule is not None
            folder = store_state_folder(rule.path)
            # Only the ranks of a run that owns the store use the state folder itself, and have a
            # writer. Other shares may be active at the same time. So they use subfolders.
            if self._run.reads_only or self._run.is_session:
                self._store_server = StoreServer(rule, folder / "readers", writer=-1)
            elif self._is_fetchers:
                self._store_server = StoreServer(rule, folder / "fetchers", writer=-1)
            else:
                self._store_server = StoreServer(rule, folder)
        return self._store_server.answer(host_rank, asked)
