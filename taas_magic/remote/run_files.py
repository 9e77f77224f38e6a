"""A run's folder on a host: the notebook's own where the host sees it, else one of its own.

What ranks and fetchers read comes before they start; what they leave (the result, logs, ledgers)
goes back when they have ended. Parts are so small that they never fill a slow link for long: the
run's beats go the same way.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from taas_magic.journal import RunFolder
from taas_magic.remote.spec import HostSpec
from taas_magic.travel.ask import Ask, ask_at_pace
from taas_magic.travel.chunks import Pace

LIST, READ, WRITE = "run_list", "run_read", "run_write"

LOG_BYTES = 64 << 20
"""Of a log, what goes back at most: its end."""


class RunFiles:
    """The files of one run on this host.

    Args:
        spec: The run's share of this host, as the notebook's machine has it.
        ask: Asks the pool's process for what is not on this host.
        cache: Where this host keeps folders of runs; None is the usual place.
    """

    def __init__(self, spec: HostSpec, ask: Ask, cache: Path | None = None) -> None:
        self._ask, self._pace = ask, Pace()
        self._folder = spec.folder
        self.is_shared = _is_same(spec)
        if not self.is_shared:
            self._folder = RunFolder((cache or runs_cache()) / spec.plan.run_id)
            shutil.rmtree(self._folder.path, ignore_errors=True)
            (self._folder.path / "logs").mkdir(mode=0o700, parents=True)
            self._folder.path.chmod(0o700)

    def local(self, spec: HostSpec) -> HostSpec:
        """The share with this host's paths; also that of a later attempt."""
        return dataclasses.replace(spec, run_dir=str(self._folder.path), home_dir=spec.run_dir)

    def bring_in(self, is_wanted: Callable[[], bool]) -> bool:
        """Brings what ranks and fetchers read.

        Args:
            is_wanted: Asked between parts whether the run goes on.

        Returns:
            Whether all is there.

        Raises:
            PoolError: The pool's process does not answer.
        """
        if self.is_shared:
            return True
        sizes: dict[str, int] = self._ask(LIST)
        return all(self._bring(name, size, is_wanted) for name, size in sizes.items())

    def send_back(self) -> None:
        """Sends what the run left here; called when nothing of it runs any more.

        Raises:
            PoolError: The pool's process does not answer.
        """
        if self.is_shared:
            return
        base = self._folder.path
        found = [path for path in (base / "logs", base / "data" / "ledger") if path.exists()]
        files = [file for folder in found for file in sorted(folder.iterdir()) if file.is_file()]
        for path in [*files, *([self._folder.result] if self._folder.result.exists() else [])]:
            self._send(path, path.relative_to(base).as_posix())

    def close(self) -> None:
        """Removes what is only this host's."""
        if not self.is_shared:
            shutil.rmtree(self._folder.path, ignore_errors=True)

    def _bring(self, name: str, size: int, is_wanted: Callable[[], bool]) -> bool:
        path = self._folder.path / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            while (offset := file.tell()) < size and is_wanted():
                part = {"name": name, "offset": offset, "size": self._pace.size}
                file.write(ask_at_pace(self._ask, self._pace, READ, **part))
            return offset >= size

    def _send(self, path: Path, name: str) -> None:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            left_out = max(0, size - LOG_BYTES) if name.startswith("logs/") else 0
            file.seek(left_out)
            sent = 0
            data = (
                f"… {left_out:,} bytes before this are left out …\n".encode() if left_out else b""
            )
            while True:
                data += file.read(self._pace.size)
                last = file.tell() >= size
                part = {"name": name, "offset": sent, "data": data, "last": last}
                ask_at_pace(self._ask, self._pace, WRITE, **part)
                if last:
                    return
                sent, data = sent + len(data), b""


def runs_cache() -> Path:
    """Where a host keeps folders of runs that it does not share: `~/.cache/taas/runs`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "taas" / "runs"


def _is_same(spec: HostSpec) -> bool:
    """Whether the run's folder here is the notebook's: the plan in it has this run's random id."""
    try:
        return bool(spec.folder.plan()["run_id"] == spec.plan.run_id)
    except (OSError, ValueError, KeyError):
        return False
