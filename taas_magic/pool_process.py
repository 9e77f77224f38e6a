"""A pool's own process as a kernel sees it: whether it lives, how it starts, where it is found.

Any kernel of the project may have started it; the lock in the pool's folder says that it lives.
"""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taas_magic.config import PoolConfig
from taas_magic.engines.process import take_lock
from taas_magic.errors import PoolError
from taas_magic.journal import state_dir
from taas_magic.remote.process import spawn_command

LINGER_S = 5.0
"""How long a pool's process waits for a kernel after the last one has gone."""

_POLL_S = 0.02
_LOG_LINES = 15


class PoolProcess:
    """The process of one pool.

    Args:
        config: The pool's settings.
        project: The notebook's folder.
    """

    def __init__(self, config: PoolConfig, project: Path) -> None:
        self._config, self._project = config, project
        self._started: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        """The pool's private folder: its address and key, its lock, its log."""
        mark = f"{sys.prefix}|{self._project}|{self._config}"
        digest = hashlib.sha256(mark.encode()).hexdigest()[:8]
        path = state_dir() / "pools" / f"{self._config.name}-{digest}"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def is_alive(self) -> bool:
        """Whether the pool's process lives, whoever started it."""
        lock = take_lock(self.folder)
        if lock is not None:
            os.close(lock)
        return lock is None

    def begin(self) -> None:
        """Starts the pool's process, unless one lives; first removes what a killed one left."""
        lock = take_lock(self.folder)
        if lock is not None:
            (self.folder / "pool.json").unlink(missing_ok=True)
            os.close(lock)
            if self._started is not None:  # it has let go of the lock, so it is all but gone
                self._started.wait(self._config.start_timeout_s)
            self._started = self._start_process()

    def wait_for_place(self) -> dict[str, Any]:
        """Where the pool's scheduler listens, and how one connects to it; once it says so.

        Raises:
            PoolError: It could not be started; the message ends with the last lines of its log.
        """
        path = self.folder / "pool.json"
        self._wait_until(lambda: path.exists() or self._begin_again(), "did not start")
        place: dict[str, Any] = json.loads(path.read_text())
        return place

    def wait_for_end(self) -> None:
        """Returns when the process has ended.

        Raises:
            PoolError: It does not end.
        """
        self._wait_until(lambda: not self.is_alive(), "did not end")
        if self._started is not None:
            self._started.wait(self._config.start_timeout_s)

    def is_over(self) -> bool:
        """Whether no process that was started here lives."""
        self.forget_ended()
        return self._started is None

    def forget_ended(self) -> None:
        """Forgets the process that was started here, if it has ended."""
        if self._started is not None and self._started.poll() is not None:
            self._started = None

    def _start_process(self) -> subprocess.Popen[bytes]:
        words = {
            "folder": str(self.folder),
            "pool": dataclasses.asdict(self._config),
            "linger_s": LINGER_S,
        }
        with (self.folder / "pool.log").open("ab") as log:
            process = subprocess.Popen(
                spawn_command("taas_magic.engines.process"),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(words).encode() + b"\n")
        process.stdin.close()
        return process

    def _begin_again(self) -> bool:
        """Starts a process if there is none: the one that lived before was about to end."""
        if self._started is None or self._started.poll() == 0:
            self.begin()
        return False

    def _wait_until(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + self._config.start_timeout_s
        while not condition():
            ended = self._started is not None and self._started.poll() not in (None, 0)
            if ended or time.monotonic() > deadline:
                log = self._log_tail()
                raise PoolError(f"pool {self._config.name!r} {otherwise}. Its log:\n{log}")
            time.sleep(_POLL_S)

    def _log_tail(self) -> str:
        path = self.folder / "pool.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join([*lines[-_LOG_LINES:], f"({path})"])
