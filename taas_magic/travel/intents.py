"""Which folders of a store may hold unfinished files, so that a killed process leaves none there.

A file that arrives is written beside its place, wherever in the store that is. The folder's name is
written down first; whoever opens the store next clears the folders on that list.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from taas_magic.travel import arrival
from taas_magic.travel.ignore import ARRIVING
from taas_magic.travel.tree import Tree


class Intents:
    """The list of one store's folders.

    Args:
        file: The list; each path ends in a NUL.
        tree: The store.
    """

    def __init__(self, file: Path, tree: Tree) -> None:
        self._file, self._tree = file, tree
        self._listed: set[str] = set()

    def add(self, folder: str) -> None:
        """Before anything unfinished is put there."""
        if folder not in self._listed:
            with self._file.open("a", encoding="utf-8", newline="") as lines:
                lines.write(folder + "\0")
            self._listed.add(folder)

    def make_token(self) -> str:
        """Makes an empty file in the store's own folder; returns its name."""
        self.add("")
        name = ARRIVING + secrets.token_hex(8)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with self._tree.folder("") as here:
            os.close(os.open(name, flags, 0o600, dir_fd=here))
        return name

    def clear(self) -> None:
        """Removes what is unfinished, and then the list."""
        folders: list[str] = []
        with suppress(FileNotFoundError):
            folders = self._file.read_text(encoding="utf-8").split("\0")[:-1]
        for folder in folders:
            with suppress(OSError), self._tree.folder(folder) as here:
                arrival.clear(here)
        self._file.unlink(missing_ok=True)
        self._listed.clear()
