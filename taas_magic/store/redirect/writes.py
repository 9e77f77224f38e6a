"""The calls of `os` that change a file system, led by a rank's view."""

import errno
import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

from taas_magic.store.redirect.views import Path, StoreView, call_led, lead

_Call = Callable[..., Any]


def makes(view: StoreView, real: _Call) -> _Call:
    """mkdir, mkfifo, mknod."""
    return _of_one_path(view, real, view.target)


def removes(view: StoreView, real: _Call) -> _Call:
    """remove, unlink."""
    return _of_one_path(view, real, view.subject)


def removes_folder(view: StoreView, real: _Call) -> _Call:
    """rmdir, shutil.rmtree."""
    return _of_one_path(view, real, functools.partial(view.subject, folder=True))


def changes(view: StoreView, real: _Call) -> _Call:
    """chmod, chown, utime, setxattr, removexattr."""
    return _of_one_path(view, real, view.subject, follow=True)


def changes_link(view: StoreView, real: _Call) -> _Call:
    """lchown."""
    return _of_one_path(view, real, view.subject)


def truncates(view: StoreView, real: _Call) -> _Call:
    """truncate."""
    return _of_one_path(view, real, functools.partial(view.target, keep=True), follow=True)


def _of_one_path(
    view: StoreView, real: _Call, decide: Callable[[str], str | None], *, follow: bool = False
) -> _Call:
    @functools.wraps(real)
    def call(path: Path, *args: Any, dir_fd: int | None = None, **kw: Any) -> Any:
        to_end = follow and kw.get("follow_symlinks", True)
        led = lead(view, decide, path, dir_fd, follow=to_end)
        return call_led(real, path, *led, *args, **kw)

    return call


def moves(view: StoreView, real: _Call) -> _Call:
    """rename, replace."""
    return _of_two_paths(view, real, shutil.move)


def links(view: StoreView, real: _Call) -> _Call:
    """link."""
    return _of_two_paths(view, real, shutil.copyfile)


def _of_two_paths(view: StoreView, real: _Call, across: _Call) -> _Call:
    """A call of two paths; `across` does the same where a rank's own file is on another disk."""

    @functools.wraps(real)
    def call(
        src: Path,
        dst: Path,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        **kw: Any,
    ) -> None:
        source, src_folder = lead(view, view.source, src, src_dir_fd)
        target, dst_folder = lead(view, view.target, dst, dst_dir_fd)
        try:
            real(source, target, src_dir_fd=src_folder, dst_dir_fd=dst_folder, **kw)
        except OSError as error:
            if error.errno != errno.EXDEV or (source is src and target is dst):
                raise
            with view.plain():
                across(source, target)

    return call


def makes_symlink(view: StoreView, real: _Call) -> _Call:
    """symlink."""

    @functools.wraps(real)
    def call(src: Path, dst: Path, *args: Any, dir_fd: int | None = None, **kw: Any) -> None:
        target, folder = lead(view, view.target, dst, dir_fd)
        if target is not dst:  # what a relative link starts at is another folder now
            src = os.path.join(os.path.dirname(os.path.abspath(dst)), src)
        real(src, target, *args, dir_fd=folder, **kw)

    return call
