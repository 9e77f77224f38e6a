"""Puts a rank's view of the project store before Python's own file calls.

What Python code of any library does goes through `open` and `os`: pathlib, shutil, tempfile,
numpy and, but for its C++ writer, torch. These are replaced in the rank, before user code runs.
What goes around them (subprocesses, C++ writers, ctypes) meets `guard`.

    views.py      the rules: rank 0 is watched, the others' writes are discarded or refused
    lead.py       from the path that a call was given to the one that it is called with
    writes.py  reads.py  opens.py     the calls of `os`, and `open`
    libraries.py  torch and numpy, where they have ways of their own
"""

import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from taas_magic.store.redirect import libraries, opens, reads, writes
from taas_magic.store.redirect.views import Discarded, Refused, StoreView, Watched

__all__ = ["Discarded", "Refused", "StoreView", "Watched", "install"]

_Wrap = Callable[[StoreView, Callable[..., Any]], Callable[..., Any]]

_WRITES: dict[str, _Wrap] = {
    "open": opens.os_open,
    "mkdir": writes.makes,
    "mkfifo": writes.makes,
    "mknod": writes.makes,
    "symlink": writes.makes_symlink,
    "remove": writes.removes,
    "unlink": writes.removes,
    "rmdir": writes.removes_folder,
    "chmod": writes.changes,
    "chown": writes.changes,
    "lchown": writes.changes_link,
    "utime": writes.changes,
    "setxattr": writes.changes,
    "removexattr": writes.changes,
    "truncate": writes.truncates,
    "rename": writes.moves,
    "replace": writes.moves,
    "link": writes.links,
}

_READS: dict[str, _Wrap] = {
    "stat": reads.reads,
    "lstat": reads.reads_link,
    "readlink": reads.reads_link,
    "getxattr": reads.reads,
    "listxattr": reads.reads,
    "chdir": reads.reads,
    "access": reads.access,
    "listdir": reads.listdir,
    "scandir": reads.scandir,
}

_OPENS = (
    ("builtins", "open"),
    ("io", "open"),
    ("_io", "open"),
    ("bz2", "_builtin_open"),
    ("lzma", "_builtin_open"),
    ("tarfile", "bltn_open"),
    ("numpy.lib._datasource", "_open"),
    ("IPython.core.interactiveshell", "io_open"),
)
"""Where `open` is found: all but the first three took it when they were imported."""


def install(view: StoreView) -> None:
    """Replaces Python's file calls in this process, for good; called once in a rank.

    Calls that only read are replaced where a rank may have files of its own to show.
    """
    for name, wrap in _WRITES.items():
        # What a notebook imported by `from os import mkdir` arrives here as posix.mkdir.
        _replace(name, wrap, view, (os, sys.modules["posix"]))
    if view.diverts:
        for name, wrap in _READS.items():
            _replace(name, wrap, view, (os,))
    _replace_open(opens.open_(view, open))
    libraries.install(view)


def _replace(name: str, wrap: _Wrap, view: StoreView, modules: Sequence[ModuleType]) -> None:
    """Replaces a call of `os`, where this system has it."""
    real = getattr(os, name, None)
    if real is None:
        return
    call = wrap(view, real)
    call.__module__ = "os"
    for module in modules:
        setattr(module, name, call)
    for supporting in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if real in supporting:
            supporting.add(call)
    _replace_in_pathlib(name, real, call)


def _replace_open(call: Callable[..., Any]) -> None:
    call.__module__ = "io"
    _replace_in_pathlib("open", open, call)
    for module, name in _OPENS:
        if module in sys.modules:
            setattr(sys.modules[module], name, call)


def _replace_in_pathlib(name: str, real: Callable[..., Any], call: Callable[..., Any]) -> None:
    """Replaces a call that Python 3.10's pathlib took when it was imported; its `open` is io's."""
    accessor = getattr(pathlib, "_NormalAccessor", None)
    if getattr(accessor, name, None) is real:
        setattr(accessor, name, staticmethod(call))
