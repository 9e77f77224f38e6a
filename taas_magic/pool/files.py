"""A run's folder and project store for its hosts that do not see them: the pool's side."""

import asyncio
import os
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from taas_magic.data import service
from taas_magic.errors import ProtocolError
from taas_magic.host.files import LIST, READ, WRITE
from taas_magic.journal.folder import RunFolder
from taas_magic.store.desk import Desk
from taas_magic.store.manifest import CHUNK_BYTES
from taas_magic.store.rule import StoreRule, state_folder

QUESTIONS = frozenset({LIST, READ, WRITE})

_OF_RANK = re.compile(r"results/\d+-(\d+)-\d+|logs/rank-(\d+)\.log|data/ledger/ledger-\d+-(\d+)")
_OF_FETCHER = re.compile(r"logs/fetcher-(\d+)\.log")


class RunDesk:
    """Answers the hosts of one run; any thread may call it.

    Args:
        folder: The run's.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.path

    def answer(
        self,
        host_rank: int,
        what: str,
        arguments: Mapping[str, Any],
        *,
        ranks: Collection[int] = (),
        fetchers: Collection[int] = (),
    ) -> Any:
        """What a host asked.

        Args:
            host_rank: The host.
            what: Which question.
            arguments: Its arguments.
            ranks: The host's ranks, whose results, logs and ledgers it may bring.
            fetchers: The host's fetchers, whose logs it may bring.

        Raises:
            ProtocolError: It may not.
        """
        if what == LIST:
            return self.list()
        if what == READ:
            return self.read(**arguments)
        name = arguments["name"]
        if not (_is_of(_OF_RANK, name, ranks) or _is_of(_OF_FETCHER, name, fetchers)):
            raise ProtocolError(f"host {host_rank} of the run brought {name!r} for its folder")
        return self.write(host_rank, **arguments)

    def list(self) -> dict[str, int]:
        """The bytes of each file that a host needs for its ranks and fetchers, by its name."""
        names = ["payload"]
        data = service.folder_of(self._path)
        if data.exists():
            names += [f"{data.name}/{file.name}" for file in data.iterdir() if file.is_file()]
        sizes = {name: self._path / name for name in names}
        return {name: path.stat().st_size for name, path in sizes.items() if path.exists()}

    def read(self, name: str, offset: int, size: int) -> bytes:
        """A part of one of these files."""
        if name not in self.list():
            raise ProtocolError(f"a host asked for {name!r} of the run's folder")
        with (self._path / name).open("rb") as file:
            file.seek(offset)
            return file.read(min(size, CHUNK_BYTES))

    def write(self, host_rank: int, name: str, offset: int, data: bytes, last: bool) -> None:
        """Takes a part of a result, a log or a ledger; with the last part the file is there."""
        path = self._path / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = Path(f"{path}.part-{host_rank}")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            file.truncate(offset)
            file.seek(offset)
            file.write(data)
        if last:
            beside.replace(path)


def _is_of(pattern: re.Pattern[str], name: str, numbers: Collection[int]) -> bool:
    """Whether a file is of one of these ranks or fetchers."""
    match = pattern.fullmatch(name)
    return match is not None and int(next(filter(None, match.groups()))) in numbers


class StoreDoor:
    """One run's; what takes a disk's time is done in a thread of its own.

    Args:
        rule: The run's store; None where it has none.
        writes: Whether the hosts' ranks write; a desk for fetchers alone has files of its own.
        is_owner: Whether the run owns the store; others may use it at the same time if not.
    """

    def __init__(self, rule: StoreRule | None, writes: bool = True, is_owner: bool = True) -> None:
        self._rule, self._writes, self._is_owner = rule, writes, is_owner
        self._thread = ThreadPoolExecutor(1, "taas-store")
        self._desk: Desk | None = None
        self._is_closed = False

    async def answer(self, host_rank: int, what: str, arguments: Mapping[str, Any]) -> Any:
        """What a host asked of the desk.

        Raises:
            ProtocolError: It cannot be asked.
            StoreError: The store is too much to travel.
        """
        if self._is_closed or self._rule is None:
            raise ProtocolError("the run has no project store (any more)")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._answer, host_rank, what, arguments)

    async def close(self) -> None:
        """Returns when nothing of what was on its way is left."""
        self._is_closed = True
        if self._desk is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._desk.close)
        self._thread.shutdown(wait=False)

    def _answer(self, host_rank: int, what: str, arguments: Mapping[str, Any]) -> Any:
        if self._desk is None:
            assert self._rule is not None
            folder = state_folder(self._rule.path)
            if not self._is_owner:
                self._desk = Desk(self._rule, folder / "readers", writer=-1, is_alone=False)
            elif self._writes:
                self._desk = Desk(self._rule, folder)
            else:
                self._desk = Desk(self._rule, folder / "fetchers", writer=-1)
        return self._desk.answer(host_rank, what, arguments)
