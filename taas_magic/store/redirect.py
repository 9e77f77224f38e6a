"""Put a rank's view of the project store before Python's own file calls.

What Python code of any library does goes through `open` and `os`: pathlib, shutil, tempfile,
numpy and, but for its C++ writers, torch. `install` replaces these in the rank, before user code
runs. `libraries.py` leads other libraries' C, C++ and Rust writers. What goes around all of them
(subprocesses, ctypes) meets `guard.py`.

A view decides about paths only: `Watched` is rank 0's, which writes, and what it writes is noted;
`Discarded` and `Refused` are the other ranks' (`--store-writes`).
"""

import contextlib
import errno
import fcntl
import functools
import glob
import importlib.util
import inspect
import itertools
import os
import pathlib
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from taas_magic.store import publish
from taas_magic.store.rule import is_below

COPY_LIMIT_BYTES = 1 << 30
"""The largest file of the store that a rank's own copy is made of, to append to or to change."""

_SHARDS = (".distcp",)
"""Files of which every rank's is needed: to discard one would leave a broken checkpoint."""

Path = Any
"""What a file call takes: str, bytes, PathLike or a descriptor."""

_Call = Callable[..., Any]


class Watched:
    """Rank 0's view of the store: every call does what it says. The other views derive from it.

    Args:
        who: What the process is called in messages.
        store: Absolute, without symbolic links.
        open_folders: Folders in it that every rank may write: shared ones, caches.
        note: Called once for each path that the rank wrote, or would have written.
    """

    used = False
    """Whether the rank has files of its own by now."""

    def __init__(
        self, who: str, store: str, open_folders: Sequence[str], note: Callable[[str], None]
    ) -> None:
        self.store = store
        self._who, self._open_folders, self._note = who, open_folders, note
        self._noted = {store}  # that it is there is nobody's doing
        self._pid = os.getpid()
        self._busy = threading.local()

    def target(self, place: str, *, keep: bool = False) -> str | None:
        """Return where to make or write what the rank calls `place`; None is there itself.

        Args:
            place: A path in the store, from `locate`.
            keep: What is there already is needed: it is appended to, or changed.

        Raises:
            OSError: The rank may not.
        """
        self.note(place)
        return None

    def subject(self, place: str, *, folder: bool = False) -> str | None:
        """Return what to change the attributes of, or to remove; None is `place` itself.

        Args:
            place: A path in the store.
            folder: The call is for a folder alone.
        """
        return None

    def source(self, place: str) -> str | None:
        """Return what to move or link to elsewhere instead of `place`; None is itself."""
        return None

    def own(self, place: str) -> str | None:
        """Return the rank's own file or folder of that place, if it has one."""
        return None

    def asked(self, path: Path) -> Path:
        """Return the path in the store where one leads into what the rank has of its own."""
        return path

    def ask(
        self,
        decide: Callable[[str], str | None],
        path: Path,
        folder: int | None = None,
        *,
        follow: bool = True,
    ) -> str | None:
        """Return what `decide` says of the place in the store that a path leads to.

        Args:
            path: What Python's calls take.
            folder: The descriptor that a relative path starts at (`dir_fd`).
            follow: Whether the call follows a symbolic link at the path's end.

        Returns:
            None, too, for a path outside or open to all, and inside a call that was led already.
        """
        if self.busy:
            return None
        with self.plain():
            place = self._locate(path, folder, follow)
            return None if place is None else decide(place)

    def _locate(self, path: Path, folder: int | None, follow: bool) -> str | None:
        if isinstance(path, int):  # a descriptor
            return None
        name = os.fsdecode(path)
        if folder is not None:
            name = os.path.join(_path_of(folder), name)
        name = self.asked(name)
        parent, last = os.path.split(name.rstrip("/"))
        if follow or last in (".", ".."):
            place = os.path.realpath(name)
        else:
            place = os.path.join(os.path.realpath(parent), last)
        if not is_below(place, self.store):
            return None
        return None if any(is_below(place, shared) for shared in self._open_folders) else place

    def note(self, place: str) -> None:
        """Take down, once, that the rank wrote there or would have; bytecode is not its doing.

        Its children say nothing: what `note` writes to may have been in use when they were forked.
        """
        known = place in self._noted or "/__pycache__/" in place
        if not known and os.getpid() == self._pid:
            self._noted.add(place)
            self._note(place)

    def begin_run(self) -> None:
        """Note each path again: another run begins in this process."""
        self._noted = {self.store}

    @property
    def busy(self) -> bool:
        """Whether this thread is inside a diverted call: what that calls is not diverted."""
        return getattr(self._busy, "flag", False)

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Leave Python's own calls as they are for the block."""
        before, self._busy.flag = self.busy, True
        try:
            yield
        finally:
            self._busy.flag = before


class Refused(Watched):
    """`--store-writes refuse`: PermissionError, at the line that tries."""

    def target(self, place: str, **how: bool) -> NoReturn:
        """Raise PermissionError: the rank may write, change and move nothing there."""
        self.note(place)
        rule = "only rank 0 writes to the project store (--store-writes refuse)"
        raise PermissionError(errno.EACCES, f"{self._who} may not: {rule}", place)

    subject = source = target


class Discarded(Watched):
    """`--store-writes discard`: the rank writes into a scratch folder of its own.

    Whether such a call succeeds is decided by the scratch folder alone, so that a call that every
    rank makes cannot fail on one because rank 0 was faster: all may `mkdir` one folder, all may
    remove one file. Whether it was right is seen where it counts, on rank 0.

    Args:
        scratch: An empty folder outside the store; whoever made it removes it.
    """

    def __init__(self, *args: Any, scratch: str) -> None:
        super().__init__(*args)
        self._tree = os.path.join(os.path.realpath(scratch), "store")
        self._stand_ins = os.path.join(scratch, "stand-ins")
        os.mkdir(self._tree)
        os.mkdir(self._stand_ins)
        self._numbers = itertools.count()

    def asked(self, path: Path) -> Path:
        """See `Watched.asked`: its working directory may be one that rank 0 had not made yet."""
        if isinstance(path, int) or not self.used:
            return path
        name = os.path.abspath(os.fsdecode(path))
        if not is_below(name, self._tree):
            return path
        place = self.store + name[len(self._tree) :]
        return os.fsencode(place) if isinstance(path, bytes) else place

    def own(self, place: str) -> str | None:
        """See `Watched.own`: what lies at that place in the scratch folder."""
        path = self._counterpart(place)
        return path if os.path.lexists(path) else None

    def is_own(self, path: str) -> bool:
        """Return whether a path is that of the rank's own file, where its calls were led to."""
        return is_below(path, self._tree)

    def target(self, place: str, *, keep: bool = False) -> str | None:
        """See `Watched.target`: the place in the scratch folder; a shard of a checkpoint raises."""
        if place.endswith(_SHARDS):
            folder = os.path.relpath(os.path.dirname(place), self.store)
            text = (
                f"{self._who} writes a shard of a checkpoint into the project store: "
                f"open its folder to all ranks with --shared-writes {folder}"
            )
            raise PermissionError(errno.EACCES, text, place)
        path, parent = self._counterpart(place), os.path.dirname(place)
        if not os.path.isdir(parent) and not self.own(parent):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if keep and not os.path.lexists(path) and os.path.exists(place):
            self._copy(place, path)
        self.used = True
        self.note(place)
        return path

    def subject(self, place: str, *, folder: bool = False) -> str:
        """See `Watched.subject`: the rank's own, or what stands in for rank 0's."""
        self.note(place)
        return self.own(place) or self._stand_in(folder or os.path.isdir(place))

    def source(self, place: str) -> str:
        """See `Watched.source`: the rank's own, or a copy of the store's file."""
        path = self.subject(place)
        if os.path.isfile(place) and path != self.own(place):
            self._copy(place, path)
        return path

    def _counterpart(self, place: str) -> str:
        return os.path.join(self._tree, os.path.relpath(place, self.store))

    def _stand_in(self, folder: bool) -> str:
        """Make an empty file or folder that takes what was meant for something of rank 0's."""
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


def _path_of(folder: int) -> str:
    return os.readlink(f"/proc/self/fd/{folder}")


_installed: list[Watched] = []
"""This process's view, once it has one."""


def begin_run() -> None:
    """Note each path again that this process writes: another run begins in it."""
    for view in _installed:
        view.begin_run()


def install(view: Watched) -> None:
    """Replace Python's file calls in this process, for good; called once in a rank.

    Calls that only read are replaced where a rank may have files of its own to show. Imports torch
    and numpy, which a rank has in memory.
    """
    _installed.append(view)
    for name, leads in _writing_calls(view).items():
        _replace(name, leads)
    if isinstance(view, Discarded):
        for name, leads in _reading_calls(view).items():
            _replace(name, leads)
    _replace_open(_led(open, partial(_open, view)))
    _lead_torch_writer(view)
    _lead_profiler(view)
    _lead_temporary_files()
    if isinstance(view, Refused | Discarded):
        _lead_torch_maps(view)
    else:
        _save_atomically(view)
    if isinstance(view, Discarded):
        _lead_torch_reader(view)
        _map_privately(view)
        _tell_of_locks(view)
        # Entry by entry, it would stumble over what rank 0 removes at the same time.
        removes = view.plain()(shutil.rmtree)  # led as a whole, and not in what it calls itself
        rmtree = _led(removes, partial(_write, view, partial(view.subject, folder=True)))
        setattr(shutil, "rmtree", rmtree)  # noqa: B010


def _writing_calls(view: Watched) -> dict[str, _Call]:
    """Return, for each call of `os` that changes a file system, what leads it."""
    makes = partial(_write, view, view.target)
    removes = partial(_write, view, view.subject)
    changes = partial(_write, view, view.subject, follow=True)
    moves = partial(_move, view, shutil.move)
    return {
        "open": partial(_os_open, view),
        "mkdir": makes,
        "mkfifo": makes,
        "mknod": makes,
        "symlink": partial(_symlink, view),
        "remove": removes,
        "unlink": removes,
        "rmdir": partial(_write, view, partial(view.subject, folder=True)),
        "chmod": changes,
        "chown": changes,
        "lchown": removes,  # of a link itself
        "utime": changes,
        "setxattr": changes,
        "removexattr": changes,
        "truncate": partial(_write, view, partial(view.target, keep=True), follow=True),
        "rename": moves,
        "replace": moves,
        "link": partial(_move, view, shutil.copyfile),
    }


def _reading_calls(view: Watched) -> dict[str, _Call]:
    """Return, for each call of `os` that looks at a file system, what leads it."""
    reads = partial(_look, view)
    reads_link = partial(_look, view, follow=False)
    return {
        "stat": reads,
        "lstat": reads_link,
        "readlink": reads_link,
        "getxattr": reads,
        "listxattr": reads,
        "chdir": reads,
        "access": partial(_access, view),
        "listdir": partial(_list, view, _names),
        "scandir": partial(_list, view, _entries),
    }


def _led(real: _Call, leads: _Call) -> _Call:
    """Return what to put in a call's place: `leads` makes it, and gets the call itself first."""

    @functools.wraps(real)
    def call(*args: Any, **kw: Any) -> Any:
        return leads(real, *args, **kw)

    return call


def _replace(name: str, leads: _Call) -> None:
    """Replace a call of `os`, where this system has it.

    What a notebook imported by `from os import listdir` arrives here as posix.listdir.
    """
    real = getattr(os, name, None)
    if real is None:
        return
    call = _led(real, leads)
    call.__module__ = "os"
    for module in (os, sys.modules["posix"]):
        setattr(module, name, call)
    for supporting in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if real in supporting:
            supporting.add(call)
    _replace_in_pathlib(name, real, call)


_OPENS = (
    ("builtins", "open"),
    ("io", "open"),
    ("_io", "open"),
    ("bz2", "_builtin_open"),
    ("lzma", "_builtin_open"),
    ("tarfile", "bltn_open"),
    ("numpy.lib._datasource", "_open"),
)
"""Where `open` is found: all but the first three took it when they were imported."""


def _replace_open(call: _Call) -> None:
    call.__module__ = "io"
    _replace_in_pathlib("open", open, call)
    for module, name in _OPENS:
        if module in sys.modules:
            setattr(sys.modules[module], name, call)
    # what numpy.loadtxt and savetxt open by; a class holds the table
    numpys = getattr(sys.modules.get("numpy.lib._datasource"), "_file_openers", None)
    getattr(numpys, "_file_openers", {})[None] = call


def _replace_in_pathlib(name: str, real: _Call, call: _Call) -> None:
    """Replace a call that pathlib of Python 3.10 (`open` is io's) or 3.13 took when imported."""
    for module, holder in ((pathlib, "_NormalAccessor"), (glob, "_StringGlobber")):
        held_by = getattr(module, holder, None)
        if getattr(held_by, name, None) is real:
            setattr(held_by, name, staticmethod(call))


def _lead(
    view: Watched,
    decide: Callable[[str], str | None],
    path: Path,
    folder: int | None = None,
    *,
    follow: bool = False,
) -> tuple[Path, int | None]:
    """Return the path, and the descriptor that it starts at, to call with; see `Watched.ask`."""
    led = view.ask(decide, path, folder, follow=follow)
    return (path, folder) if led is None else (led, None)


def _own_file(
    view: Watched, path: Path, folder: int | None = None, *, follow: bool = True
) -> str | None:
    """Return the rank's own file of that path, if it has one."""
    return view.ask(view.own, path, folder, follow=follow) if view.used else None


def _call_led(
    real: _Call, asked: Path, led: Path, folder: int | None, *args: Any, **kw: Any
) -> Any:
    """Call with the path that `asked` was led to; an error names the one that was asked for."""
    if folder is not None:
        kw["dir_fd"] = folder
    try:
        return real(led, *args, **kw)
    except OSError as error:
        if led is not asked and error.filename == led:
            error.filename = asked
        raise


def _look(
    view: Watched,
    real: _Call,
    path: Path,
    *args: Any,
    dir_fd: int | None = None,
    follow: bool = True,
    **kw: Any,
) -> Any:
    """Call with the store's file where there is one, else with the rank's own."""
    first = path if view.busy or dir_fd is not None else view.asked(path)
    try:
        return _call_led(real, path, first, dir_fd, *args, **kw)
    except FileNotFoundError:
        own = _own_file(view, path, dir_fd, follow=follow)
        if own is None:
            raise
    return _call_led(real, path, own, None, *args, **kw)


def led_path(view: Watched, decide: Callable[[str], str | None], path: Path) -> Path:
    """Return the path that a call of a library is led to, or the path itself."""
    led, _ = _lead(view, decide, path, follow=True)
    return led


def writable(view: Watched, place: str, *, keep: bool = False) -> str | None:
    """Return where to open a file for writing; a folder cannot be, and the system says so."""
    return None if os.path.isdir(place) else view.target(place, keep=keep)


def _open(view: Watched, real: _Call, file: Path, mode: str = "r", *args: Any, **kw: Any) -> Any:
    if isinstance(file, int) or kw.get("opener") or any(args[5:]):
        return real(file, mode, *args, **kw)  # an opener opens by os.open
    if set(mode) & set("wxa+"):
        target = partial(writable, view, keep=not set(mode) & set("wx"))
        return _call_led(real, file, *_lead(view, target, file, follow=True), mode, *args, **kw)
    return _look(view, real, file, mode, *args, **kw)


_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _os_open(
    view: Watched,
    real: _Call,
    path: Path,
    flags: int,
    mode: int = 0o777,
    *,
    dir_fd: int | None = None,
) -> Any:
    if not flags & _WRITE_FLAGS:
        return _look(view, real, path, flags, mode, dir_fd=dir_fd)
    target = partial(writable, view, keep=not flags & (os.O_TRUNC | os.O_EXCL))
    led = _lead(view, target, path, dir_fd, follow=not flags & os.O_NOFOLLOW)
    return _call_led(real, path, *led, flags, mode)


def _write(
    view: Watched,
    decide: Callable[[str], str | None],
    real: _Call,
    path: Path,
    *args: Any,
    dir_fd: int | None = None,
    follow: bool = False,
    **kw: Any,
) -> Any:
    """Change what is at one path."""
    to_end = follow and kw.get("follow_symlinks", True)
    led = _lead(view, decide, path, dir_fd, follow=to_end)
    return _call_led(real, path, *led, *args, **kw)


def _move(view: Watched, across: _Call, real: _Call, src: Path, dst: Path, **kw: Any) -> None:
    """Make a call of two paths; `across` does it where a rank's own file is on another disk."""
    source, kw["src_dir_fd"] = _lead(view, view.source, src, kw.get("src_dir_fd"))
    target, kw["dst_dir_fd"] = _lead(view, view.target, dst, kw.get("dst_dir_fd"))
    try:
        real(source, target, **kw)
    except OSError as error:
        if error.errno != errno.EXDEV or (source is src and target is dst):
            raise
        with view.plain():
            across(source, target)


def _symlink(view: Watched, real: _Call, src: Path, dst: Path, *args: Any, **kw: Any) -> None:
    target, kw["dir_fd"] = _lead(view, view.target, dst, kw.get("dir_fd"))
    if target is not dst:  # what a relative link starts at is another folder now
        src = os.path.join(os.path.dirname(os.path.abspath(dst)), src)
    real(src, target, *args, **kw)


def _access(
    view: Watched, real: _Call, path: Path, mode: int, *, dir_fd: int | None = None, **kw: Any
) -> bool:
    """Tell whether a path can be used; to be written it can, if not where the rank thinks."""
    if real(path, mode, dir_fd=dir_fd, **kw):
        return True
    place = view.ask(lambda place: view.own(place) or place, path, dir_fd)
    return place is not None and bool(real(place, mode & ~os.W_OK))


def _list(view: Watched, join: _Call, real: _Call, path: Path = None) -> Any:
    """List a folder; `join` makes one answer of the store's and the rank's."""
    path = "." if path is None else path
    own = _own_file(view, path)
    if own is None:
        return real(path)
    store = view.asked(path)
    with view.plain():
        is_there = os.path.isdir(store)
    mine = real(os.fsencode(own) if isinstance(path, bytes) else own)
    return join(path, list(real(store)) if is_there else [], mine)


def _names(path: Path, theirs: list[Any], mine: list[Any]) -> list[Any]:
    return [*theirs, *(name for name in mine if name not in theirs)]


def _entries(path: Path, theirs: list[Any], mine: Iterator[Any]) -> "_Entries":
    names = {entry.name for entry in theirs}
    found = [*theirs, *(entry for entry in mine if entry.name not in names)]
    return _Entries(_Entry(entry, os.path.join(path, entry.name)) for entry in found)


class _Entry:
    """An `os.DirEntry` of a rank's own file, under the path that the rank knows."""

    def __init__(self, entry: os.DirEntry[str], path: str) -> None:
        self._entry, self.path = entry, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __fspath__(self) -> str:
        return self.path


class _Entries(contextlib.ExitStack):
    """What `os.scandir` returns: an iterator that can be closed, which changes nothing here."""

    def __init__(self, entries: Iterator[Any]) -> None:
        super().__init__()
        self._entries = entries

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)


def _lead_torch_writer(view: Watched) -> None:
    """Lead torch.save's C++ writer, whose errors do not name the path."""
    import torch

    real: Any = torch._C.PyTorchFileWriter

    class PyTorchFileWriter(real):
        def __init__(self, file: Any, *args: Any, **kw: Any) -> None:
            led = file
            if isinstance(file, (str, os.PathLike)):
                led, _ = _lead(view, partial(writable, view), file, follow=True)
            try:
                super().__init__(led, *args, **kw)
            except RuntimeError as error:
                raise RuntimeError(f"torch cannot write {file}: {error}") from error

    setattr(torch._C, "PyTorchFileWriter", PyTorchFileWriter)  # noqa: B010


def _lead_torch_reader(view: Discarded) -> None:
    """Lead the C++ reader of `torch.export.load` and `torch.package` to the rank's own files."""
    import torch

    real: Any = torch._C.PyTorchFileReader

    def shown(place: str) -> str | None:
        return None if os.path.exists(place) else view.own(place)

    class PyTorchFileReader(real):
        def __init__(self, file: Any, *args: Any, **kw: Any) -> None:
            is_path = isinstance(file, (str, os.PathLike))
            super().__init__(led_path(view, shown, file) if is_path else file, *args, **kw)

    setattr(torch._C, "PyTorchFileReader", PyTorchFileReader)  # noqa: B010


def _lead_profiler(view: Watched) -> None:
    """Lead torch.profiler's C++ writer of traces, which fails without an error."""
    import torch

    def export(real: _Call, profiled: Any, path: Path, *args: Any, **kw: Any) -> Any:
        led, _ = _lead(view, partial(writable, view), path, follow=True)
        return real(profiled, led, *args, **kw)

    profile = torch.autograd.profiler.profile
    setattr(profile, "export_chrome_trace", _led(profile.export_chrome_trace, export))  # noqa: B010


def _lead_temporary_files() -> None:
    """Lead tempfile, which took `unlink` when it was imported, as the default of a parameter."""
    closer: Any = getattr(tempfile, "_TemporaryFileCloser", None)
    for method in (getattr(closer, name, None) for name in ("close", "cleanup")):
        if method is not None:
            real, defaults = inspect.unwrap(os.unlink), method.__defaults__ or ()
            method.__defaults__ = tuple(os.unlink if it is real else it for it in defaults)


def _save_atomically(view: Watched) -> None:
    """Make rank 0's `torch.save` into the store `taas.save`: no kill leaves half a checkpoint."""
    import torch

    def save(real: _Call, obj: object, f: Any, *args: Any, **kw: Any) -> None:
        is_path = isinstance(f, (str, os.PathLike))
        write: Callable[..., None] = publish.save if is_path and view.ask(str, f) else real
        write(obj, f, *args, **kw)

    torch.save = torch.serialization.save = _led(torch.save, save)


def _tell_of_locks(view: Discarded) -> None:
    """Have `fcntl`'s locks say that a lock on a file of the rank's own keeps no other rank out."""

    def lock(real: _Call, file: Any, operation: int, *args: Any) -> Any:
        path = _path_of(file if isinstance(file, int) else file.fileno())
        if view.is_own(path) and not operation & fcntl.LOCK_UN:
            said = (
                f"the lock on {os.path.basename(path)} keeps no other rank out: only rank 0 "
                "writes to the project store, and this rank locks a file of its own. Lock a "
                "file outside the store, or of a folder of --shared-writes"
            )
            warnings.warn(said, RuntimeWarning, stacklevel=3)
        return real(file, operation, *args)

    for name in ("flock", "lockf"):
        setattr(fcntl, name, _led(getattr(fcntl, name), lock))


def _is_the_stores(view: Watched, file: Any) -> bool:
    """Return whether a file to map is one of the store, of which the rank has none of its own."""

    def theirs(place: str) -> str | None:
        return place if os.path.exists(place) and not view.own(place) else None

    return isinstance(file, (str, os.PathLike)) and view.ask(theirs, file) is not None


def _lead_torch_maps(view: Watched) -> None:
    """Lead `torch.from_file`, by which tensordict maps all that it reads to change it.

    As `_map_privately` does, it maps a file of the store privately.
    """
    import torch

    def shown(place: str) -> str | None:
        return None if os.path.exists(place) else view.own(place)

    def from_file(
        real: _Call, filename: Any, shared: bool | None = None, *args: Any, **kw: Any
    ) -> Any:
        if isinstance(view, Discarded) and _is_the_stores(view, filename):
            shared = False
        decide = partial(writable, view, keep=True) if shared else shown
        led, _ = _lead(view, decide, filename, follow=True)
        return real(led, shared, *args, **kw)

    torch.from_file = _led(torch.from_file, from_file)


def _map_privately(view: Watched) -> None:
    """Map a file of the store that a rank maps to change it (numpy's default) privately.

    What is changed in a private map is seen by this rank alone, and nothing is copied for it.
    """
    if importlib.util.find_spec("numpy") is None:  # torch does without
        return
    import numpy

    signature = inspect.signature(numpy.memmap.__new__)

    def new(real: _Call, *args: Any, **kw: Any) -> Any:
        asked = signature.bind(*args, **kw)
        asked.apply_defaults()
        if asked.arguments["mode"] in ("r+", "readwrite"):
            is_the_stores = _is_the_stores(view, asked.arguments["filename"])
            asked.arguments["mode"] = "c" if is_the_stores else "r+"
        return real(*asked.args, **asked.kwargs)

    led: Any = staticmethod(_led(numpy.memmap.__new__, new))
    setattr(numpy.memmap, "__new__", led)  # noqa: B010
