"""Which paths below a folder were written, moved or removed: inotify(7), by ctypes.

Where there is no inotify, or the system's limit of watches is reached, it sees nothing and says so:
whoever asks then looks for itself, now and then. (watchdog, the usual package, holds every event
back for half a second and does not tell when the queue has overflowed.)
"""

import ctypes
import os
import select
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

BLIND_S = 0.5
"""How long to wait between two looks where nothing tells of changes."""

_LIBC = ctypes.CDLL(None, use_errno=True)

_CLOSE_WRITE, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x8, 0x40, 0x80, 0x100, 0x200
_Q_OVERFLOW, _IGNORED = 0x4000, 0x8000
_ONLYDIR, _DONT_FOLLOW, _EXCL_UNLINK, _ISDIR = 0x1000000, 0x2000000, 0x4000000, 0x40000000
_WANTED = _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_FLAGS = _WANTED | _ONLYDIR | _DONT_FOLLOW | _EXCL_UNLINK

_EVENT = struct.Struct("iIII")


@dataclass
class Seen:
    """What may have changed.

    Attributes:
        paths: Files and folders that are worth a look.
        all: Everything is: something may have been missed.
    """

    paths: set[str] = field(default_factory=set)
    all: bool = False


class Watch:
    """Watches a folder and all folders in it, also those that come.

    Args:
        root: The folder.
        skips: Whether a folder, by its path from there, need not be watched.
    """

    def __init__(self, root: str, skips: Callable[[str], bool]) -> None:
        self._root, self._skips = root, skips
        self._folders: dict[int, str] = {}
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._inotify = _LIBC.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK) if _has_it() else -1
        self._is_blind = self._inotify < 0
        if self._inotify >= 0:
            self._poll.register(self._inotify, select.POLLIN)
            self._add("")

    def close(self) -> None:
        for descriptor in (self._woken, self._wakes, self._inotify):
            if descriptor >= 0:
                os.close(descriptor)

    def wake(self) -> None:
        """Ends the `wait` of another thread."""
        with suppress(BlockingIOError):
            os.write(self._wakes, b"!")

    def wait(self, timeout_s: float | None) -> Seen:
        """Waits until something has changed, a time has passed, or `wake` is called."""
        if self._is_blind:
            timeout_s = BLIND_S if timeout_s is None else min(timeout_s, BLIND_S)
        self._poll.poll(None if timeout_s is None else timeout_s * 1000)
        with suppress(BlockingIOError):
            os.read(self._woken, 1 << 16)
        seen = Seen(all=self._is_blind)
        for watch, mask, name in self._events():
            self._take(watch, mask, name, seen)
        return seen

    def _events(self) -> Iterator[tuple[int, int, str]]:
        while self._inotify >= 0:
            try:
                data = os.read(self._inotify, 1 << 16)
            except BlockingIOError:
                return
            offset = 0
            while offset < len(data):
                watch, mask, _, length = _EVENT.unpack_from(data, offset)
                offset += _EVENT.size
                name = data[offset : offset + length].rstrip(b"\0")
                offset += length
                yield watch, mask, os.fsdecode(name)

    def _take(self, watch: int, mask: int, name: str, seen: Seen) -> None:
        if mask & _Q_OVERFLOW:
            seen.all = True
            seen.paths.update(self._add(""))
        elif mask & _IGNORED:
            self._folders.pop(watch, None)
        elif watch in self._folders and name:
            folder = self._folders[watch]
            path = f"{folder}/{name}" if folder else name
            seen.paths.add(path)
            if mask & _ISDIR and mask & _MOVED_FROM:
                self._remove(path)
            elif mask & _ISDIR and mask & (_CREATE | _MOVED_TO):
                seen.paths.update(self._add(path))

    def _add(self, path: str) -> list[str]:
        """Watches a folder and those in it; returns all that is there already."""
        if path and self._skips(path):
            return []
        place = os.path.join(self._root, path)
        watch = _LIBC.inotify_add_watch(self._inotify, os.fsencode(place), _FLAGS)
        if watch < 0:
            gone = not os.path.isdir(place) or os.path.islink(place)
            self._is_blind = self._is_blind or not gone
            return []
        self._folders[watch] = path
        found = []
        with suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                below = f"{path}/{entry.name}" if path else entry.name
                found.append(below)
                if entry.is_dir(follow_symlinks=False):
                    found += self._add(below)
        return found

    def _remove(self, path: str) -> None:
        """Watches no more what was moved away: it would be told of by its old path."""
        for watch, folder in list(self._folders.items()):
            if folder == path or folder.startswith(path + "/"):
                _LIBC.inotify_rm_watch(self._inotify, watch)
                self._folders.pop(watch, None)


def _has_it() -> bool:
    return sys.platform == "linux"
