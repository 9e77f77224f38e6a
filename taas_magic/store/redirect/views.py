"""What becomes of a rank's writes to the project store: three rules behind one contract.

`Watched` is rank 0's: it writes, and what it writes is noted. `Discarded` and `Refused` are the
other ranks' (`--store-writes`). A view decides about paths only; the package puts it before
Python's own calls.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from taas_magic.store.rule import is_below

COPY_LIMIT_BYTES = 1 << 30
"""The largest file of the store that a rank's own copy is made of, to append to or to change."""

_SHARDS = (".distcp",)
"""Files of which every rank's is needed: to discard one would leave a broken checkpoint."""


class StoreView(ABC):
    """A rank's view of the store.

    Args:
        store: Absolute, without symbolic links.
        open_folders: Folders in it that every rank may write: shared ones, caches.
        note: Called once for each path that the rank wrote, or would have written.
    """

    diverts = False
    """Whether paths lead elsewhere than they say."""

    used = False
    """Whether the rank has files of its own by now."""

    def __init__(
        self, store: str, open_folders: Sequence[str], note: Callable[[str], None]
    ) -> None:
        self.store, self._open_folders, self._note = store, open_folders, note
        self._noted: set[str] = set()
        self._pid = os.getpid()
        self._busy = threading.local()

    @abstractmethod
    def target(self, place: str, *, keep: bool = False) -> str | None:
        """Where to make or write what the rank calls `place`; None is there itself.

        Args:
            place: A path in the store, from `locate`.
            keep: What is there already is needed: it is appended to, or changed.

        Raises:
            OSError: The rank may not.
        """

    @abstractmethod
    def subject(self, place: str, *, folder: bool = False) -> str | None:
        """What to change the attributes of, or to remove, instead of `place`; None is itself.

        Args:
            place: A path in the store.
            folder: The call is for a folder alone.
        """

    @abstractmethod
    def source(self, place: str) -> str | None:
        """What to move or link to elsewhere instead of `place`; None is itself."""

    def own(self, place: str) -> str | None:
        """The rank's own file or folder of that place, if it has one."""
        return None

    def locate(self, path: Any, folder: int | None = None, *, follow: bool = True) -> str | None:
        """Where a path leads: an absolute path in the store; None if it is outside or open to all.

        Args:
            path: What Python's calls take; a descriptor is None.
            folder: The descriptor that a relative path starts at (`dir_fd`).
            follow: Whether the call follows a symbolic link at the path's end.
        """
        if isinstance(path, int):
            return None
        name = os.fsdecode(path)
        if folder is not None:
            name = os.path.join(_path_of(folder), name)
        if follow:
            place = os.path.realpath(name)
        else:
            parent, last = os.path.split(name.rstrip("/"))
            place = os.path.join(os.path.realpath(parent), last)
        if not is_below(place, self.store):
            return None
        return None if any(is_below(place, shared) for shared in self._open_folders) else place

    def note(self, place: str) -> None:
        """Takes down, once, that the rank wrote there or would have; bytecode is not its doing.

        Its children say nothing: what `note` writes to may have been in use when they were forked.
        """
        known = place in self._noted or "/__pycache__/" in place
        if not known and os.getpid() == self._pid:
            self._noted.add(place)
            self._note(place)

    @property
    def busy(self) -> bool:
        """Whether this thread is inside a diverted call: what that calls is not diverted."""
        return getattr(self._busy, "flag", False)

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Python's own calls, as they are, for the block."""
        before, self._busy.flag = self.busy, True
        try:
            yield
        finally:
            self._busy.flag = before


class Watched(StoreView):
    """Rank 0: every call does what it says."""

    def target(self, place: str, *, keep: bool = False) -> str | None:
        self.note(place)
        return None

    def subject(self, place: str, *, folder: bool = False) -> str | None:
        return None

    def source(self, place: str) -> str | None:
        return None


class Refused(StoreView):
    """`--store-writes refuse`: PermissionError, at the line that tries."""

    def __init__(self, who: str, *args: Any) -> None:
        super().__init__(*args)
        self._who = who

    def target(self, place: str, *, keep: bool = False) -> str | None:
        self._refuse(place)

    def subject(self, place: str, *, folder: bool = False) -> str | None:
        self._refuse(place)

    def source(self, place: str) -> str | None:
        self._refuse(place)

    def _refuse(self, place: str) -> NoReturn:
        self.note(place)
        rule = "only rank 0 writes to the project store (--store-writes refuse)"
        raise PermissionError(errno.EACCES, f"{self._who} may not: {rule}", place)


class Discarded(StoreView):
    """`--store-writes discard`: the rank writes into a scratch folder of its own.

    Whether such a call succeeds is decided by the scratch folder alone, so that a call that every
    rank makes cannot fail on one because rank 0 was faster: all may `mkdir` one folder, all may
    remove one file. Whether it was right is seen where it counts, on rank 0.

    Args:
        who: What the process is called in messages.
        scratch: An empty folder outside the store; whoever made it removes it.
        args: As for `StoreView`.
    """

    diverts = True

    def __init__(self, who: str, scratch: str, *args: Any) -> None:
        super().__init__(*args)
        self._who = who
        self._tree = os.path.join(scratch, "store")
        self._stand_ins = os.path.join(scratch, "stand-ins")
        os.mkdir(self._tree)
        os.mkdir(self._stand_ins)
        self._numbers = itertools.count()

    def own(self, place: str) -> str | None:
        path = self._counterpart(place)
        return path if os.path.lexists(path) else None

    def target(self, place: str, *, keep: bool = False) -> str | None:
        if place.endswith(_SHARDS):
            raise PermissionError(errno.EACCES, self._needs_sharing(place), place)
        path, parent = self._counterpart(place), os.path.dirname(place)
        if not os.path.isdir(parent) and not self.own(parent):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if keep and not os.path.lexists(path) and os.path.exists(place):
            self._copy(place, path)
        self.used = True
        self.note(place)
        return path

    def subject(self, place: str, *, folder: bool = False) -> str | None:
        self.note(place)
        return self.own(place) or self._stand_in(folder or os.path.isdir(place))

    def source(self, place: str) -> str | None:
        self.note(place)
        if own := self.own(place):
            return own
        stand_in = self._stand_in(os.path.isdir(place))
        if os.path.isfile(place):
            self._copy(place, stand_in)
        return stand_in

    def _counterpart(self, place: str) -> str:
        return os.path.join(self._tree, os.path.relpath(place, self.store))

    def _stand_in(self, folder: bool) -> str:
        """An empty file or folder that takes what was meant for something of rank 0's."""
        path = os.path.join(self._stand_ins, str(next(self._numbers)))
        if folder:
            os.mkdir(path)
        else:
            open(path, "xb").close()
        return path

    def _copy(self, place: str, path: str) -> None:
        if os.path.getsize(place) > COPY_LIMIT_BYTES:
            limit = f"over {COPY_LIMIT_BYTES >> 20} MiB is not copied for it: open it for reading"
            text = f"{self._who} may not change it: {limit}"
            raise PermissionError(errno.EACCES, text, place)
        shutil.copyfile(place, path)

    def _needs_sharing(self, place: str) -> str:
        folder = os.path.relpath(os.path.dirname(place), self.store)
        return (
            f"{self._who} writes a shard of a checkpoint into the project store: "
            f"open its folder to all ranks with --shared-writes {folder}"
        )


def _path_of(folder: int) -> str:
    if sys.platform == "darwin":
        return os.fsdecode(fcntl.fcntl(folder, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
    return os.readlink(f"/proc/self/fd/{folder}")


Path = Any
"""What a file call takes: str, bytes, PathLike or a descriptor."""


def lead(
    view: StoreView,
    decide: Callable[[str], str | None],
    path: Path,
    folder: int | None = None,
    *,
    follow: bool = False,
) -> tuple[Path, int | None]:
    """The path, and the descriptor that it starts at, to call with.

    Args:
        view: The rank's view.
        decide: What the view says of a path in the store: another path, or None for that itself.
        path: As the call was given it.
        folder: The call's `dir_fd`.
        follow: Whether the call follows a symbolic link at the path's end.
    """
    if view.busy:
        return path, folder
    with view.plain():
        place = view.locate(path, folder, follow=follow)
        led = None if place is None else decide(place)
    return (path, folder) if led is None else (led, None)


def own_file(
    view: StoreView, path: Path, folder: int | None = None, *, follow: bool = True
) -> str | None:
    """The rank's own file of that path, if it has one."""
    if view.busy or not view.used:
        return None
    with view.plain():
        place = view.locate(path, folder, follow=follow)
        return None if place is None else view.own(place)


def call_led(
    real: Callable[..., Any],
    asked: Path,
    led: Path,
    folder: int | None,
    *args: Any,
    **kw: Any,
) -> Any:
    """Calls with the path that `asked` was led to; an error names the one that was asked for."""
    if folder is not None:
        kw["dir_fd"] = folder
    try:
        return real(led, *args, **kw)
    except OSError as error:
        if led is not asked and error.filename == led:
            error.filename = asked
        raise
