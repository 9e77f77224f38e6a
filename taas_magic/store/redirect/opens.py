"""`open` and `os.open`, led by a rank's view."""

import functools
import os
from collections.abc import Callable
from typing import Any

from taas_magic.store.redirect.views import Path, StoreView, call_led, lead, own_file

_Call = Callable[..., Any]

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def open_(view: StoreView, real: _Call) -> _Call:
    """The built-in `open`."""

    @functools.wraps(real)
    def call(
        file: Path,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        rest = (mode, buffering, encoding, errors, newline, closefd, opener)
        if opener is not None or isinstance(file, int):
            return real(file, *rest)  # an opener opens by os.open
        if set(mode) & set("wxa+"):
            target = functools.partial(writable, view, keep=not set(mode) & set("wx"))
            return call_led(real, file, *lead(view, target, file, follow=True), *rest)
        try:
            return real(file, *rest)
        except FileNotFoundError:
            own = own_file(view, file)
            if own is None:
                raise
        return real(own, *rest)

    return call


def os_open(view: StoreView, real: _Call) -> _Call:
    """os.open."""

    @functools.wraps(real)
    def call(path: Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & _WRITE_FLAGS:
            keep = not flags & (os.O_TRUNC | os.O_EXCL)
            target = functools.partial(writable, view, keep=keep)
            led = lead(view, target, path, dir_fd, follow=not flags & os.O_NOFOLLOW)
            return int(call_led(real, path, *led, flags, mode))
        try:
            return int(call_led(real, path, path, dir_fd, flags, mode))
        except FileNotFoundError:
            own = own_file(view, path, dir_fd)
            if own is None:
                raise
        return int(real(own, flags, mode))

    return call


def writable(view: StoreView, place: str, *, keep: bool = False) -> str | None:
    """Where to open a file for writing; a folder cannot be, and the system says so."""
    return None if os.path.isdir(place) else view.target(place, keep=keep)
