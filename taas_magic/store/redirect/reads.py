"""The calls of `os` that look: at the store's file where there is one, else at the rank's own."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from taas_magic.store.redirect.views import Path, StoreView, call_led, own_file

_Call = Callable[..., Any]


def reads(view: StoreView, real: _Call) -> _Call:
    """stat, chdir, getxattr, listxattr."""
    return _of_one_path(view, real, follow=True)


def reads_link(view: StoreView, real: _Call) -> _Call:
    """lstat, readlink."""
    return _of_one_path(view, real, follow=False)


def _of_one_path(view: StoreView, real: _Call, *, follow: bool) -> _Call:
    @functools.wraps(real)
    def call(path: Path, *args: Any, dir_fd: int | None = None, **kw: Any) -> Any:
        try:
            return call_led(real, path, path, dir_fd, *args, **kw)
        except FileNotFoundError:
            own = own_file(view, path, dir_fd, follow=follow)
            if own is None:
                raise
        return call_led(real, path, own, None, *args, **kw)

    return call


def access(view: StoreView, real: _Call) -> _Call:
    """access; that a path can be written is true, if not where the rank thinks."""

    @functools.wraps(real)
    def call(path: Path, mode: int, *, dir_fd: int | None = None, **kw: Any) -> bool:
        if real(path, mode, dir_fd=dir_fd, **kw):
            return True
        if view.busy:
            return False
        with view.plain():
            place = view.locate(path, dir_fd)
            return place is not None and bool(real(view.own(place) or place, mode & ~os.W_OK))

    return call


def listdir(view: StoreView, real: _Call) -> _Call:
    """listdir: the names of both."""

    @functools.wraps(real)
    def call(path: Path = None) -> list[Any]:
        path = "." if path is None else path
        own = own_file(view, path)
        if own is None:
            return list(real(path))
        names = real(path) if _is_folder(view, path) else []
        mine = real(os.fsencode(own) if isinstance(path, bytes) else own)
        return [*names, *(name for name in mine if name not in names)]

    return call


def scandir(view: StoreView, real: _Call) -> _Call:
    """scandir: the entries of both."""

    @functools.wraps(real)
    def call(path: Path = None) -> Any:
        path = "." if path is None else path
        own = own_file(view, path)
        if own is None:
            return real(path)
        entries = list(real(path)) if _is_folder(view, path) else []
        names = {entry.name for entry in entries}
        mine = (_Entry(entry, os.path.join(path, entry.name)) for entry in real(own))
        return _Entries(iter([*entries, *(entry for entry in mine if entry.name not in names)]))

    return call


def _is_folder(view: StoreView, path: Path) -> bool:
    with view.plain():
        return os.path.isdir(path)


class _Entry:
    """An `os.DirEntry` of a rank's own file, under the path that the rank knows."""

    def __init__(self, entry: os.DirEntry[str], path: str) -> None:
        self._entry, self.path = entry, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __fspath__(self) -> str:
        return self.path


class _Entries(contextlib.AbstractContextManager["_Entries"]):
    """What `os.scandir` returns: an iterator that can be closed."""

    def __init__(self, entries: Iterator[Any]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __exit__(self, *_: object) -> None:
        return None

    def close(self) -> None:
        """Does nothing: the folders were read to their ends already."""
