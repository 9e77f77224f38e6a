"""Whether a host sees the very folder that the notebook calls its project store.

On one running kernel, a folder is known by its file system and inode. Between machines neither says
anything (two clones of one disk agree in both), so there a file of random name, which is in the
store for as long as the run is, must be seen.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """A folder, as the machine that it was looked at on knows it.

    Attributes:
        path: The folder.
        kernel: The running kernel's own number.
        device: Of its file system.
        inode: Its own.
    """

    path: str
    kernel: str
    device: int
    inode: int

    @classmethod
    def of(cls, path: str) -> "Identity":
        """
        Raises:
            OSError: It is not there.
        """
        status = os.stat(path)
        return cls(path, _kernel(), status.st_dev, status.st_ino)

    def is_here(self, token: Callable[[], str]) -> bool:
        """Whether the folder is the same on this host.

        Args:
            token: Has a file made in the folder, where the notebook is, and gives its name.
        """
        try:
            here = Identity.of(self.path)
        except OSError:
            return False
        if here.kernel and here.kernel == self.kernel:
            return here == self
        return os.path.exists(os.path.join(self.path, token()))


def _kernel() -> str:
    """Drawn at boot, so that it tells this running kernel from all others; "" where unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
