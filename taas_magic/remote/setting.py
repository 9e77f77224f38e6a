"""What a fetcher takes over from the notebook, so that loaders unpickle and run as in a rank."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from taas_magic.remote.guard import Means
from taas_magic.remote.hold import hold_off
from taas_magic.store import StoreRule


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
        from taas_magic.capture import modules, payload

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
        modules.install(payload.read(self.payload).modules)

    def _hold_off(self, rule: StoreRule) -> None:
        hold_off(
            rule,
            self.who,
            means=self.means,
            scratch=self.scratch,
            run_folder=str(self.payload.parent),
            note=lambda path: None,  # lanes write, and children say nothing: the agent looks
        )
