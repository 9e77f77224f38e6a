"""Sends what is written in a mirror back into the project store, as soon as it is closed.

An event only makes a path worth a look; `sender` goes by what is there then. So a file that is
rewritten a thousand times is sent when there is time for it, as it is by then; a temporary file
that was renamed is not sent; and where events were lost, a look at everything does.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from taas_magic.errors import TaasError
from taas_magic.travel.ask import Ask
from taas_magic.travel.ignore import Ignore
from taas_magic.travel.inotify import Seen, Watch
from taas_magic.travel.mirror import Mirror
from taas_magic.travel.sender import Sender, covers
from taas_magic.travel.tree import Seen as Found

SETTLE_S = 0.05
"""How long a change is left alone: a file that was written beside its place is soon renamed."""

QUIET_S = 0.2
"""How long a file that was just sent is left alone, or as long as sending it took."""


class Outbound:
    """One host's way back, in a thread of its own.

    Args:
        mirror: The host's.
        ask: Asks the desk.
        note: Tells the user what could not be sent.
        shared: Folders, relative, that alone are sent; None sends all, as rank 0's host does.
    """

    def __init__(
        self,
        mirror: Mirror,
        ask: Ask,
        note: Callable[[str], None],
        shared: Sequence[str] | None = None,
    ) -> None:
        self._mirror, self._shared, self._note = mirror, shared, note
        self._sender = Sender(mirror, ask, note)
        self._ignore = Ignore()
        self._watch = Watch(mirror.path, lambda path: self._ignore.leaves_out(path, folder=True))
        self._due: dict[str, float] = {}
        self._quiet_until: dict[str, float] = {}
        self._finishing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="taas-store-out", daemon=True)

    @property
    def written(self) -> dict[str, int]:
        """Bytes of each file that got into the store, by path."""
        return self._sender.written

    @property
    def refused(self) -> dict[str, str]:
        """Why, by path, of what did not."""
        return self._sender.refused

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Returns when all that was written is in the store, or cannot get there."""
        self._finishing.set()
        self._watch.wake()
        self._thread.join()
        self._watch.close()

    def _run(self) -> None:
        try:
            while not self._finishing.is_set():
                self._mark(self._watch.wait(self._next_s()))
                self._send(self._take_due())
            self._mark(self._watch.wait(0))
            self._mark(Seen(all=True))
            self._send(list(self._due))
        except (OSError, TaasError) as error:
            self._note(f"what is written no longer gets into the project store: {error}")

    def _next_s(self) -> float | None:
        return max(0.0, min(self._due.values()) - time.monotonic()) if self._due else None

    def _mark(self, seen: Seen) -> None:
        """Takes down what to look at, and when."""
        now = time.monotonic()
        self._quiet_until = {p: until for p, until in self._quiet_until.items() if until > now}
        for path in (*seen.paths, *(self._differing() if seen.all else ())):
            if covers(path, self._shared) and not self._ignore.leaves_out_within(path):
                self._due.setdefault(path, max(now + SETTLE_S, self._quiet_until.get(path, now)))

    def _take_due(self) -> list[str]:
        now = time.monotonic()
        due = [path for path, when in self._due.items() if when <= now]
        for path in due:
            del self._due[path]
        return due

    def _send(self, paths: Sequence[str]) -> None:
        for path in self._send_small(paths):
            began = time.monotonic()
            self._sender.send_large(path, self._between)
            self._rest(path, time.monotonic() - began)

    def _send_small(self, paths: Sequence[str]) -> list[str]:
        large = self._sender.send_small(paths)
        for path in paths:
            self._rest(path, 0.0)
        return large

    def _between(self) -> None:
        """What became due while a large file is on its way goes before its next part."""
        if not self._finishing.is_set():
            self._mark(self._watch.wait(0))
            for path in self._send_small(self._take_due()):
                self._due[path] = time.monotonic()

    def _rest(self, path: str, took_s: float) -> None:
        self._quiet_until[path] = time.monotonic() + max(QUIET_S, took_s)

    def _differing(self) -> Iterator[str]:
        """Paths at which the mirror is not as the store is known to be."""
        hashes, folders = self._mirror.hashes, self._mirror.folders
        there = set()
        for found in self._mirror.tree.walk(self._travels):
            there.add(found.path)
            if found.is_folder:
                same = found.path in folders
            else:
                same = not found.oddity and hashes.is_same(found.path, found.status)
            if not same:
                yield found.path
        yield from (path for path in (*hashes.paths(), *folders) if path not in there)

    def _travels(self, found: Found) -> bool:
        return not self._ignore.leaves_out(found.path, found.is_folder)
