"""Files that other hosts of the run sent back, brought into this host's mirror while ranks run."""

import threading
from collections.abc import Callable

from taas_magic.errors import TaasError
from taas_magic.travel.ask import Ask
from taas_magic.travel.inbound import fetch
from taas_magic.travel.manifest import Entry
from taas_magic.travel.mirror import Mirror
from taas_magic.travel.names import why_unsafe

ASK_S = 0.25
"""How often the desk is asked for news."""


class News:
    """Follows the other hosts, in a thread of its own.

    Args:
        mirror: This host's.
        ask: Asks the desk.
        note: Tells the user why it cannot go on.
    """

    def __init__(self, mirror: Mirror, ask: Ask, note: Callable[[str], None]) -> None:
        self._mirror, self._ask, self._note = mirror, ask, note
        self._number = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="taas-store-news", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        self._over.set()
        self._thread.join()

    def catch_up(self) -> None:
        """Takes over what is new by now; a file that changes again meanwhile is news once more."""
        told = self._ask("news", since=self._number)
        changes = [change for change in told["changes"] if not why_unsafe(change["path"])]
        for change in changes:
            if change["is_folder"]:
                self._mirror.folders.add(change["path"])
                self._mirror.tree.make_folder(change["path"])
            elif change["entry"] is None:
                self._remove(change["path"])
        entries = [Entry(*change["entry"]) for change in changes if change["entry"]]
        known = self._mirror.hashes.is_content
        new = [entry for entry in entries if not known(entry.path, entry.sha256)]
        fetch(self._mirror, new, self._ask)
        self._number = told["number"]

    def _remove(self, path: str) -> None:
        tree, status = self._mirror.tree, self._mirror.tree.status(path)
        self._mirror.hashes.forget(path)
        if path in self._mirror.folders:
            self._mirror.folders.discard(path)
            tree.remove_folder(path)
        elif status is not None:
            tree.remove(path)

    def _follow(self) -> None:
        try:
            while not self._over.wait(ASK_S):
                self.catch_up()
        except (OSError, TaasError) as error:
            self._note(f"what other hosts write to the project store no longer comes here: {error}")
