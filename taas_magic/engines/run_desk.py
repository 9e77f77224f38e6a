"""A run's folder for its hosts that do not see it: what they may read, and what they may bring."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taas_magic.data import service
from taas_magic.errors import ProtocolError
from taas_magic.journal import RunFolder
from taas_magic.remote.run_files import LIST, READ, WRITE
from taas_magic.travel.chunks import CHUNK_BYTES

QUESTIONS = frozenset({LIST, READ, WRITE})

_BROUGHT = re.compile(r"result|logs/(rank|fetcher)-\d+\.log|data/ledger/ledger-\d+-\d+")


class RunDesk:
    """Answers the hosts of one run; any thread may call it.

    Args:
        folder: The run's.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.path

    def answer(self, host_rank: int, what: str, arguments: Mapping[str, Any]) -> Any:
        """What a host asked.

        Raises:
            ProtocolError: It may not.
        """
        if what == LIST:
            return self.list()
        if what == READ:
            return self.read(**arguments)
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
        if not _BROUGHT.fullmatch(name) or (name == "result" and host_rank):
            raise ProtocolError(f"host {host_rank} of the run brought {name!r} for its folder")
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
