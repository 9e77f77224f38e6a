"""Redirect Python's own file calls in a rank, so that only rank 0 writes to the project store.

`install` replaces `open` and the functions of `os`, by which all Python code opens files.
`libraries.py` redirects libraries that open files in C, C++ or Rust. `guard.py` stops writes that
bypass both modules, such as writes by subprocesses.

A `StoreView` decides which path a call really uses. Rank 0 has a plain `StoreView`, which redirects
no call and records each path that rank 0 writes. Another rank has a `DiscardingView` or a
`RefusingView`, as `--store-writes` selects. In a rehearsal, all ranks have a `RehearsalView`.
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

from taas_magic.errors import SaveError
from taas_magic.store import publish
from taas_magic.store.rule import is_below

COPY_LIMIT_BYTES = 1 << 30
"""Maximum size in bytes of a store's file that ranks other than 0 can append to or change.

Such a rank changes a copy of the file. For a larger file, the rank gets PermissionError.
"""

_SHARDS = (".distcp",)
"""Suffixes of shards: every rank writes one shard of a checkpoint, and loading needs all shards.

A shard in a scratch folder would be lost, so the write of a shard raises PermissionError.
"""

Path = Any
"""Path argument of a file call: str, bytes, PathLike or a descriptor."""

_Call = Callable[..., Any]


class StoreView:
    """Object that decides which path a file call of a rank really uses. Base class of all views.

    An instance of this class itself is rank 0's view in a real run: it redirects no call, and only
    reports writes. Subclasses override the methods that redirect. In these methods, `store_path` is
    the absolute path of a file or folder in the store, without symbolic links.

    Args:
        open_folders: Folders in the store that every rank may write: shared folders and caches.
        who: Name of the rank in messages.
        on_write: Function to call with a path in the store and a flag. Called once with False for
            each path that the rank wrote or would have written. Called with True when the rank
            moves its own version of the path away.
    """

    has_own_files = False
    """Whether the rank may have its own versions of the store's files.

    In a rehearsal, the value is always True. In a `DiscardingView`, the value becomes True at the
    first write.
    """

    def __init__(
        self,
        who: str,
        store: str,
        open_folders: Sequence[str],
        on_write: Callable[[str, bool], None],
    ) -> None:
        self.store = store
        self._who, self._open_folders, self._on_write = who, open_folders, on_write
        self._noted = {store}  # never note the store itself: it existed before the run
        self._pid = os.getpid()
        self._redirecting = threading.local()

    def path_to_write(self, store_path: str, *, needs_content: bool = False) -> str | None:
        """Return the path to write instead of `store_path`; None to write `store_path` itself.

        Also report the write (`record_write`).

        Args:
            needs_content: Whether the call appends to the existing content or changes it.

        Raises:
            OSError: The rank may not write `store_path`.
        """
        self.record_write(store_path)
        return None

    def path_to_change(self, store_path: str, *, folder: bool = False) -> str | None:
        """Return the path to change instead of `store_path`; None to change `store_path` itself.

        A change is a removal, or a call such as `os.chmod`. In a real run, rank 0's changes are
        neither redirected nor reported.

        Args:
            folder: Whether the call accepts only folders, as `os.rmdir` does.
        """
        return None

    def path_to_move(self, store_path: str, *, may_link: bool = False) -> str | None:
        """Return the path to move or link instead of `store_path`; None for `store_path` itself.

        Args:
            may_link: Whether the returned path may be a symbolic link to the file of the store.
        """
        return None

    def replace_link(self, store_path: str, *, needs_content: bool) -> None:
        """Do nothing. `DiscardingView` overrides this method to protect the targets of links."""

    def own_path(self, store_path: str) -> str | None:
        """Return the path of this rank's own version of `store_path`; None if there is none.

        The own version is the file that the rank has written to its scratch folder instead.
        """
        return None

    def replacement_path(self, store_path: str) -> str | None:
        """Return the path that replaces `store_path` in a rehearsal; None if there is none."""
        return None

    def common_path(self, store_path: str) -> str:
        """Return the path that a rank reads if it has no own version of `store_path`.

        This is `store_path`, or the path that replaces it in a rehearsal.
        """
        return self.replacement_path(store_path) or store_path

    def path_to_read(self, store_path: str) -> str | None:
        """Return the path to read instead of `store_path`; None to read `store_path` itself.

        If several versions of the file exist, use the first of them in this order: the path that
        replaces `store_path` (only in a rehearsal), `store_path` itself, the rank's own version. If
        no version exists, return None.
        """
        return self.replacement_path(store_path) or (
            None if os.path.exists(store_path) else self.own_path(store_path)
        )

    def record_outside(self, path: Path, folder: int | None = None) -> None:
        """Do nothing. `RehearsalView` overrides this method to record paths outside the store."""

    def to_store_path(self, path: Path) -> Path:
        """Return the path in the store that corresponds to a path in the rank's scratch folder.

        Any other path is returned unchanged.
        """
        return path

    def resolve(
        self,
        map_path: Callable[[str], str | None],
        path: Path,
        folder: int | None = None,
        *,
        follow: bool = True,
    ) -> str | None:
        """Return the path that a file call must use instead of `path`; None for `path` itself.

        A path in the rank's scratch folder counts as the corresponding path in the store. In the
        following cases, the result is None, and `map_path` is not called:

        - The path is any other path outside the store, or is a descriptor.
        - The path is in a folder that every rank may write.
        - This thread is already inside a redirected call.

        Args:
            map_path: Method that maps a path in the store to the path to use, such as
                `path_to_write`. Its errors reach the caller.
            folder: Descriptor of the folder at which a relative path starts (`dir_fd`).
            follow: Whether the call follows a symbolic link, if the last part of the path is one,
                as `open` does and `os.remove` does not.
        """
        if self.is_redirecting:
            return None
        with self.without_redirection():
            store_path = self._locate(path, folder, follow)
            return None if store_path is None else map_path(store_path)

    def _locate(self, path: Path, folder: int | None, follow: bool) -> str | None:
        """Return the absolute path in the store that a file call's argument names.

        Symbolic links are resolved. A path in the rank's scratch folder counts as the corresponding
        path in the store. The result is None for a descriptor, for any other path outside the
        store, and for a path in a folder that every rank may write.

        Args:
            folder: Descriptor of the folder at which a relative path starts; None for the working
                directory.
            follow: Whether to also resolve the last part of the path, if it is a symbolic link.
        """
        if isinstance(path, int):  # a descriptor needs no redirection
            return None
        name = os.fsdecode(path)
        if folder is not None:
            name = os.path.join(_path_of(folder), name)
        name = self.to_store_path(name)
        parent, last = os.path.split(name.rstrip("/"))
        if follow or last in (".", ".."):
            store_path = os.path.realpath(name)
        else:
            store_path = os.path.join(os.path.realpath(parent), last)
        if any(is_below(store_path, shared) for shared in self._open_folders):
            return None
        return store_path if is_below(store_path, self.store) else None

    def record_write(self, store_path: str) -> None:
        """Report a path that the rank wrote, or would have written without redirection.

        Each path is reported only once. Paths in a folder `__pycache__` are not reported. Forked
        children of the rank report nothing, because the channel for reports may have been in use
        during the fork.
        """
        known = store_path in self._noted or "/__pycache__/" in store_path
        if not known and os.getpid() == self._pid:
            self._noted.add(store_path)
            self._on_write(store_path, False)

    def record_move(self, path: Path) -> None:
        """Do nothing. `DiscardingView` overrides this method to report that a file was moved."""

    def begin_run(self) -> None:
        """Forget which paths were reported. Call when another run begins in this process."""
        self._noted = {self.store}

    @property
    def is_redirecting(self) -> bool:
        """Whether this thread is inside a redirected call."""
        return getattr(self._redirecting, "flag", False)

    @contextlib.contextmanager
    def without_redirection(self) -> Iterator[None]:
        """Disable redirection in this thread while the `with` block runs."""
        before, self._redirecting.flag = self.is_redirecting, True
        try:
            yield
        finally:
            self._redirecting.flag = before


class RefusingView(StoreView):
    """View of ranks other than 0 for `--store-writes refuse`: each write raises PermissionError."""

    def path_to_write(self, store_path: str, **how: bool) -> NoReturn:
        """Report the attempt, and raise PermissionError: this rank may not change the store."""
        self.record_write(store_path)
        raise _refusal(self._who, store_path)

    path_to_change = path_to_move = path_to_write


def _refusal(who: str, store_path: str) -> PermissionError:
    rule = "only rank 0 writes to the project store (--store-writes refuse)"
    return PermissionError(errno.EACCES, f"{who} may not: {rule}", store_path)


class DiscardingView(StoreView):
    """View of a rank other than 0 for `--store-writes discard`: writes go to its scratch folder.

    Args:
        scratch: Empty folder outside the store. The caller removes it later.
    """

    def __init__(self, *args: Any, scratch: str) -> None:
        super().__init__(*args)
        self._tree = os.path.join(os.path.realpath(scratch), "store")
        self._trees = [self._tree]
        self._placeholders = os.path.join(scratch, "placeholders")
        os.mkdir(self._tree)
        os.mkdir(self._placeholders)
        self._numbers = itertools.count()

    def to_store_path(self, path: Path) -> Path:
        """Return the path in the store that corresponds to a path in the rank's scratch folder.

        Any other path is returned unchanged, and so is a file descriptor. While the rank has no own
        files, every path is returned unchanged. A relative path starts at the working directory,
        which may be a folder that exists only in the scratch folder.
        """
        if isinstance(path, int) or not self.has_own_files:
            return path
        name = os.path.abspath(os.fsdecode(path))
        tree = next((tree for tree in self._trees if is_below(name, tree)), None)
        if tree is None:
            return path
        store_path = self.store + name[len(tree) :]
        return os.fsencode(store_path) if isinstance(path, bytes) else store_path

    def own_path(self, store_path: str) -> str | None:
        """Return the path of this rank's own version of `store_path`; None if there is none."""
        path = self.redirected_path(store_path)
        return path if os.path.lexists(path) else None

    def is_own(self, path: str) -> bool:
        """Return whether `path` is in the part of the scratch folder that mirrors the store."""
        return is_below(path, self._tree)

    def path_to_write(self, store_path: str, *, needs_content: bool = False) -> str:
        """Return the path in the scratch folder that a call must write instead of `store_path`.

        Make the missing parent folders in the scratch folder, and record the write. From now on,
        calls that read also find the rank's own versions of files.

        Args:
            needs_content: Whether to first copy the existing file to the returned path, if the rank
                has no own version of the file yet.

        Raises:
            PermissionError: The file is a shard of a checkpoint. Or the file must be copied, and is
                larger than `COPY_LIMIT_BYTES`.
            FileNotFoundError: The parent folder does not exist.
        """
        if store_path.endswith(_SHARDS):
            self.refuse_shard(store_path)
        path, parent = self.redirected_path(store_path), os.path.dirname(store_path)
        if not os.path.isdir(self.common_path(parent)) and not self.own_path(parent):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), store_path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if (
            needs_content
            and not os.path.lexists(path)
            and os.path.exists(self.common_path(store_path))
        ):
            self._copy(self.common_path(store_path), path)
        self.has_own_files = True
        self.record_write(store_path)
        return path

    def path_to_change(self, store_path: str, *, folder: bool = False) -> str:
        """Return the path of the rank's own version of `store_path`, or of an empty placeholder.

        The rank has an own version if it has written the file to its scratch folder. A placeholder
        is a new file or folder that no later call sees. The user's call, such as `os.chmod` or
        `os.remove`, acts on the returned path, so the file in the store stays as it is. This method
        also reports the change as a write.
        """
        self.record_write(store_path)
        is_folder = folder or os.path.isdir(self.common_path(store_path))
        return self.own_path(store_path) or self._make_placeholder(is_folder)

    def path_to_move(self, store_path: str, *, may_link: bool = False) -> str:
        """Return the path that a call must move instead of `store_path`, and report a write.

        - If the rank has written the file to its scratch folder, return the path of this file.
        - For any other regular file of the store, make a copy in the scratch folder, and return the
          path of the copy. For a file larger than `COPY_LIMIT_BYTES`, make a symbolic link instead.
        - Otherwise, make an empty placeholder, and return its path.

        Args:
            may_link: Whether the returned path may be a symbolic link to the file of the store.
                Outside the scratch folder, such a link could replace a file of rank 0.

        Raises:
            PermissionError: The file must be copied, and is larger than `COPY_LIMIT_BYTES`.
        """
        path, common_path = self.path_to_change(store_path), self.common_path(store_path)
        if os.path.isfile(common_path) and path != self.own_path(store_path):
            if may_link and os.path.getsize(common_path) > COPY_LIMIT_BYTES:
                os.remove(path)
                os.symlink(common_path, path)
            else:
                self._copy(common_path, path)
        return path

    def replace_link(self, store_path: str, *, needs_content: bool) -> None:
        """If the rank's own version is a link to a file of the store, remove or replace the link.

        Call this method before the own version is opened for writing. Otherwise, the write would go
        to the file of the store.

        Args:
            needs_content: Whether to replace the link by a copy of its target.

        Raises:
            PermissionError: The target must be copied, and is larger than `COPY_LIMIT_BYTES`.
        """
        path = self.redirected_path(store_path)
        if not os.path.islink(path) or not is_below(os.path.realpath(path), self.store):
            return
        if needs_content and os.path.isfile(path):
            copy = self._make_placeholder(folder=False)
            self._copy(os.path.realpath(path), copy)
            os.replace(copy, path)
        else:
            os.remove(path)

    def record_move(self, path: Path) -> None:
        """Report that the rank has moved a file or folder of its scratch folder away.

        Some paths, at `path` or below, may have been reported as written. For each of them, call
        `on_write` with True: the file is gone. If the rank writes to this path again, the path is
        reported again. Do nothing in a forked child of the rank.

        Args:
            path: Path from which the file or folder was moved; ignored outside the scratch folder.
        """
        if os.getpid() != self._pid or not self.is_own(os.fsdecode(path)):
            return
        moved = os.fsdecode(self.to_store_path(path))
        for store_path in [it for it in self._noted if is_below(it, moved)]:
            self._noted.discard(store_path)
            self._on_write(store_path, True)

    def refuse_shard(self, store_path: str) -> None:
        """Raise PermissionError: this rank may not write the checkpoint shard `store_path`."""
        folder = os.path.relpath(os.path.dirname(store_path), self.store)
        text = (
            f"{self._who} writes a shard of a checkpoint into the project store: "
            f"open its folder to all ranks with --shared-writes {folder}"
        )
        raise PermissionError(errno.EACCES, text, store_path)

    def redirected_path(self, store_path: str) -> str:
        """Return the path in the scratch folder that replaces `store_path` for this rank's writes.

        Nothing need exist at the returned path.
        """
        return os.path.join(self._tree, os.path.relpath(store_path, self.store))

    def _make_placeholder(self, folder: bool) -> str:
        path = os.path.join(self._placeholders, str(next(self._numbers)))
        if folder:
            os.mkdir(path)
        else:
            open(path, "xb").close()
        return path

    def _copy(self, store_path: str, path: str) -> None:
        if os.path.getsize(store_path) > COPY_LIMIT_BYTES:
            limit = f"files over {COPY_LIMIT_BYTES >> 20} MiB are not copied for ranks"
            text = f"{self._who} cannot change it: {limit}; open it for reading"
            raise PermissionError(errno.EACCES, text, store_path)
        shutil.copyfile(store_path, path)


class RehearsalView(DiscardingView):
    """View of a rank in a rehearsal (`--rehearse`): no rank writes to the store.

    All ranks see a file in the rehearsal folder in place of the store's file with the same relative
    path. All writes of rank 0, and the other ranks' writes below `shared`, go to the rehearsal
    folder. The other ranks' writes elsewhere go to their private scratch folders.

    Args:
        *args: Arguments of `StoreView`. `open_folders` must not contain the run's shared folders.
        scratch: Empty folder outside the store, for this rank only. The caller removes it later.
        folder: The rehearsal folder.
        shared: Folders in the store that every rank may write (`--shared-writes`).
        is_writer: Whether this rank is rank 0.
        refuses: Whether the run has `--store-writes refuse`.
        ignored: Folders outside the store in which writes are not recorded.
    """

    has_own_files = True

    def __init__(
        self,
        *args: Any,
        scratch: str,
        folder: str,
        shared: Sequence[str],
        is_writer: bool,
        refuses: bool,
        ignored: Sequence[str],
    ) -> None:
        super().__init__(*args, scratch=scratch)
        self._folder, self._shared, self._is_writer = os.path.realpath(folder), shared, is_writer
        self._trees.append(self._folder)
        self._ignored = (self.store, *map(os.path.realpath, ignored))
        self._refuses, self._outside = refuses, set[str]()
        for path in shared:
            os.makedirs(self._rehearsal_path(path), exist_ok=True)

    def path_to_write(self, store_path: str, *, needs_content: bool = False) -> str:
        """Return the path in the rehearsal or scratch folder to write instead of `store_path`.

        Raises:
            PermissionError: With `--store-writes refuse`, this rank could not write `store_path` in
                a real run. Or the file is a shard of a checkpoint, or is too large to be copied.
            FileNotFoundError: The parent folder does not exist.
        """
        if self._refuses and not self._writes_to_rehearsal(store_path):
            raise _refusal(self._who, store_path)
        return super().path_to_write(store_path, needs_content=needs_content)

    def path_to_change(self, store_path: str, *, folder: bool = False) -> str:
        """Return the path of the rank's own version of `store_path`, or of an empty placeholder.

        The rank has an own version if a file is at `redirected_path(store_path)`. A placeholder is
        a new file or folder that no later call sees. This method also reports the change as a
        write.

        Raises:
            PermissionError: With `--store-writes refuse`, this rank could not change `store_path`
                in a real run.
        """
        if self._refuses and not self._writes_to_rehearsal(store_path):
            raise _refusal(self._who, store_path)
        return super().path_to_change(store_path, folder=folder)

    def replacement_path(self, store_path: str) -> str | None:
        """Return the path in the rehearsal folder for `store_path`; None if nothing is there."""
        path = self._rehearsal_path(store_path)
        return path if os.path.lexists(path) else None

    def record_outside(self, path: Path, folder: int | None = None) -> None:
        """Record a path that a call writes or changes, if the path is outside the store.

        Ignore a descriptor, a path from inside a redirected call, and a path in a folder of
        `ignored`, in the scratch folder or in the rehearsal folder.

        A forked child of the rank records paths only in its own memory. So `outside` of the rank
        does not return the paths of its children.
        """
        if self.is_redirecting or isinstance(path, int):
            return
        with self.without_redirection():
            name = os.fsdecode(path)
            start = "" if folder is None else _path_of(folder)
            store_path = os.path.realpath(os.path.join(start, self.to_store_path(name)))
            if not any(is_below(store_path, known) for known in (*self._ignored, *self._trees)):
                self._outside.add(store_path)

    def written(self) -> dict[str, int]:
        """Return the sizes in bytes of all files in the rehearsal folder, by relative path."""
        with self.without_redirection():
            found = pathlib.Path(self._folder).rglob("*")
            return {
                str(path.relative_to(self._folder)): path.stat().st_size
                for path in sorted(found)
                if path.is_file()
            }

    def outside(self) -> dict[str, int]:
        """Return the size in bytes of each file that this rank wrote outside the store, by path.

        Files that no longer exist are left out.
        """
        with self.without_redirection():
            return {
                path: os.path.getsize(path)
                for path in sorted(self._outside)
                if os.path.isfile(path)
            }

    def redirected_path(self, store_path: str) -> str:
        """Return the path in the rehearsal or scratch folder that replaces `store_path`."""
        if self._writes_to_rehearsal(store_path):
            return self._rehearsal_path(store_path)
        return super().redirected_path(store_path)

    def _rehearsal_path(self, store_path: str) -> str:
        return os.path.join(self._folder, os.path.relpath(store_path, self.store))

    def _writes_to_rehearsal(self, store_path: str) -> bool:
        """Return whether this rank's writes to `store_path` go to the rehearsal folder.

        In a real run, these writes would go to the store.
        """
        return self._is_writer or any(is_below(store_path, folder) for folder in self._shared)

    def refuse_shard(self, store_path: str) -> None:
        """Raise PermissionError if this rank could not write a checkpoint's shard in a real run."""
        if not self._writes_to_rehearsal(store_path):
            super().refuse_shard(store_path)


def _path_of(folder: int) -> str:
    return os.readlink(f"/proc/self/fd/{folder}")


_installed: list[StoreView] = []
"""List with this process's `StoreView`; empty before `install`."""


def rehearsal_view() -> RehearsalView | None:
    """Return this process's view if the process is a rank of a rehearsal, else None."""
    return next((view for view in _installed if isinstance(view, RehearsalView)), None)


def begin_run() -> None:
    """Forget which paths this process has reported, so that a new run reports them again."""
    for view in _installed:
        view.begin_run()


def install(view: StoreView) -> None:
    """Permanently replace Python's file functions by ones that use the path from `view`. Call once.

    For every view:

    - Replace `open`, and the functions of `os` that change files. tempfile uses the new `unlink`.
    - Redirect torch's file writer, and the trace files of torch's profiler.

    Only for rank 0 of a real run: make `torch.save` atomic. For every other view: redirect
    `torch.from_file` and `torch.UntypedStorage.from_file`, and `torch.save` to paths that are not
    ASCII.

    Only for a `DiscardingView` or `RehearsalView`, with which a rank reads files that it has
    written to another folder instead of the store:

    - Replace the functions of `os` that only read, and `shutil.rmtree`.
    - Redirect torch's file reader, and numpy's memory maps.
    - Make locks on files in the scratch folder show a warning.
    """
    _installed.append(view)
    for name, redirect in _writing_calls(view).items():
        _replace(name, redirect)
    if isinstance(view, DiscardingView):
        for name, redirect in _reading_calls(view).items():
            _replace(name, redirect)
    _replace_open(_redirected(open, partial(_open, view)))
    _redirect_torch_writer(view)
    _redirect_profiler(view)
    _redirect_temporary_files()
    if isinstance(view, RefusingView | DiscardingView):
        _redirect_torch_maps(view)
        _open_for_torch_save()
    else:
        _save_atomically(view)
    if isinstance(view, DiscardingView):
        _redirect_torch_reader(view)
        _map_privately(view)
        _warn_about_locks(view)
        # Redirect rmtree as a whole, not the calls that it makes. Otherwise, rmtree would fail on
        # an entry that rank 0 removes meanwhile.
        removes = view.without_redirection()(shutil.rmtree)
        rmtree = _redirected(
            removes, partial(_write, view, partial(view.path_to_change, folder=True))
        )
        setattr(shutil, "rmtree", rmtree)  # noqa: B010


def _writing_calls(view: StoreView) -> dict[str, _Call]:
    """Return replacements for the functions of `os` that change files, by name.

    If a function makes a file or folder, or changes the content of a file, its replacement uses
    `view.path_to_write`. If a function removes a file or folder, or changes its attributes, the
    replacement uses `view.path_to_change`. If a function moves or links, its replacement redirects
    both paths. A caller must pass the original function as the first argument of each replacement.
    """
    makes = partial(_write, view, view.path_to_write)
    removes = partial(_write, view, view.path_to_change)
    changes = partial(_write, view, view.path_to_change, follow=True)
    moves = partial(_move, view, shutil.move)
    return {
        "open": partial(_os_open, view),
        "mkdir": makes,
        "mkfifo": makes,
        "mknod": makes,
        "symlink": partial(_symlink, view),
        "remove": removes,
        "unlink": removes,
        "rmdir": partial(_write, view, partial(view.path_to_change, folder=True)),
        "chmod": changes,
        "chown": changes,
        "lchown": removes,  # `lchown`, like `remove`, does not follow links
        "utime": partial(_write, view, partial(_path_to_set_times, view), follow=True),
        "setxattr": changes,
        "removexattr": changes,
        "truncate": partial(
            _write, view, partial(path_to_open, view, needs_content=True), follow=True
        ),
        "rename": moves,
        "replace": moves,
        "link": partial(_move, view, shutil.copyfile),
    }


def _reading_calls(view: StoreView) -> dict[str, _Call]:
    """Return replacements for the functions of `os` that only read, by name.

    Most replacements use the path of an existing version of the file. The replacements of `listdir`
    and `scandir` merge the entries of all versions of the folder. A caller must pass the original
    function as the first argument of each replacement.
    """
    reads = partial(_call_on_existing, view)
    reads_link = partial(_call_on_existing, view, follow=False)
    return {
        "stat": reads,
        "statvfs": reads,
        "lstat": reads_link,
        "readlink": reads_link,
        "getxattr": reads,
        "listxattr": reads,
        "chdir": reads,
        "access": partial(_access, view),
        "listdir": partial(_list, view, _merge_names),
        "scandir": partial(_list, view, _merge_entries),
    }


def _redirected(real: _Call, redirect: _Call) -> _Call:
    @functools.wraps(real)
    def call(*args: Any, **kw: Any) -> Any:
        return redirect(real, *args, **kw)

    return call


def _replace(name: str, redirect: _Call) -> None:
    """Replace the function `name` of `os` and of `posix` by a function that calls `redirect`.

    Both modules are changed, because pickle stores functions of `os` under the module name `posix`.
    Also replace the references in pathlib and glob, and add the new function to sets such as
    `os.supports_dir_fd`. If `os` has no such function, do nothing.
    """
    real = getattr(os, name, None)
    if real is None:
        return
    call = _redirected(real, redirect)
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
"""Modules that keep a reference to the function `open`, each with the name of the reference."""


def _replace_open(call: _Call) -> None:
    """Replace `open` by `call` in pathlib, and in all modules of `_OPENS` that are imported.

    Also replace numpy's own reference to `open`.
    """
    call.__module__ = "io"
    _replace_in_pathlib("open", open, call)
    for module, name in _OPENS:
        if module in sys.modules:
            setattr(sys.modules[module], name, call)
    # numpy.loadtxt and savetxt get `open` from a dict of numpy's object `_file_openers`, in which
    # `open` has the key None.
    numpys = getattr(sys.modules.get("numpy.lib._datasource"), "_file_openers", None)
    getattr(numpys, "_file_openers", {})[None] = call


def _replace_in_pathlib(name: str, real: _Call, call: _Call) -> None:
    """Replace `real` by `call` in the class of pathlib or glob that has a reference to `real`.

    In Python 3.10, this class is in pathlib. In Python 3.13, it is in glob, and pathlib uses it.
    """
    for module, holder in ((pathlib, "_NormalAccessor"), (glob, "_StringGlobber")):
        held_by = getattr(module, holder, None)
        if getattr(held_by, name, None) is real:
            setattr(held_by, name, staticmethod(call))


def _redirect_path(
    view: StoreView,
    map_path: Callable[[str], str | None],
    path: Path,
    folder: int | None = None,
    *,
    follow: bool = False,
) -> tuple[Path, int | None]:
    """Return the path and the `dir_fd` that a function of `os` must use to write `path`.

    If `view` redirects the path, the result is the new path and None. Otherwise, the result is
    `path` and `folder`. In a rehearsal, also record the path if it is outside the store.
    """
    view.record_outside(path, folder)
    redirected = view.resolve(map_path, path, folder, follow=follow)
    return (path, folder) if redirected is None else (redirected, None)


def _own_path(
    view: StoreView, path: Path, folder: int | None = None, *, follow: bool = True
) -> str | None:
    return view.resolve(view.own_path, path, folder, follow=follow) if view.has_own_files else None


def _call_redirected(
    real: _Call, requested: Path, redirected: Path, folder: int | None, *args: Any, **kw: Any
) -> Any:
    """Call a function with a redirected path. An OSError from the call names the caller's path.

    Args:
        requested: The path that the caller passed.
        folder: Descriptor of the folder at which `redirected` starts (`dir_fd`); None to pass none.
    """
    if folder is not None:
        kw["dir_fd"] = folder
    try:
        return real(redirected, *args, **kw)
    except OSError as error:
        if redirected is not requested and error.filename == redirected:
            error.filename = requested
        raise


def _call_on_existing(
    view: StoreView,
    real: _Call,
    path: Path,
    *args: Any,
    dir_fd: int | None = None,
    follow: bool = True,
    **kw: Any,
) -> Any:
    """Call `real`, which reads the file `path`, with the path of an existing version of the file.

    If several versions of the file exist, use the first of them in this order: the file that
    replaces the store's file (only in a rehearsal), the store's file, the rank's own version.
    """
    if isinstance(view, RehearsalView):
        replaced = view.resolve(view.replacement_path, path, dir_fd, follow=follow)
        if replaced is not None:
            return _call_redirected(real, path, replaced, None, *args, **kw)
    first = path if view.is_redirecting or dir_fd is not None else view.to_store_path(path)
    try:
        return _call_redirected(real, path, first, dir_fd, *args, **kw)
    except FileNotFoundError:
        own_path = _own_path(view, path, dir_fd, follow=follow)
        if own_path is None:
            raise
    return _call_redirected(real, path, own_path, None, *args, **kw)


def library_write_path(view: StoreView, map_path: Callable[[str], str | None], path: Path) -> Path:
    """Return the path that a library must write instead of `path`, or `path` itself.

    In a rehearsal, also record the path if it is outside the store.

    Args:
        map_path: Method that maps a path in the store to the path to write, such as
            `StoreView.path_to_write`.
    """
    redirected, _ = _redirect_path(view, map_path, path, follow=True)
    return redirected


def library_read_path(view: StoreView, path: Path) -> Path:
    """Return the path that a library must read instead of `path`, or `path` itself."""
    return view.resolve(view.path_to_read, path) or path


def path_to_open(view: StoreView, store_path: str, *, needs_content: bool = False) -> str | None:
    """Return the path to open for writing instead of `store_path`; None for `store_path` itself.

    The result is None for a folder, so that the caller's `open` fails as usual. It is also None for
    a named pipe and for a device, because a write to them changes no file of the store.
    """
    if os.path.exists(store_path) and not os.path.isfile(store_path):
        return None
    view.replace_link(store_path, needs_content=needs_content)
    return view.path_to_write(store_path, needs_content=needs_content)


def _open(view: StoreView, real: _Call, file: Path, mode: str = "r", *args: Any, **kw: Any) -> Any:
    """Call `open` with the redirected path. Called in place of `open`.

    For a mode that writes, use the path to write; if the mode keeps the old content, the file is
    copied first. For a mode that only reads, use an existing version of the file. A descriptor, or
    a call with an opener, is not redirected.
    """
    if isinstance(file, int) or kw.get("opener") or any(args[5:]):
        return real(file, mode, *args, **kw)  # os.open, which an opener calls, is redirected
    if set(mode) & set("wxa+"):
        target = partial(path_to_open, view, needs_content=not set(mode) & set("wx"))
        return _call_redirected(
            real, file, *_redirect_path(view, target, file, follow=True), mode, *args, **kw
        )
    return _call_on_existing(view, real, file, mode, *args, **kw)


_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _os_open(
    view: StoreView,
    real: _Call,
    path: Path,
    flags: int,
    mode: int = 0o777,
    *,
    dir_fd: int | None = None,
) -> Any:
    if not flags & _WRITE_FLAGS:
        return _call_on_existing(view, real, path, flags, mode, dir_fd=dir_fd)
    target = partial(path_to_open, view, needs_content=not flags & (os.O_TRUNC | os.O_EXCL))
    redirected = _redirect_path(view, target, path, dir_fd, follow=not flags & os.O_NOFOLLOW)
    return _call_redirected(real, path, *redirected, flags, mode)


def _write(
    view: StoreView,
    map_path: Callable[[str], str | None],
    real: _Call,
    path: Path,
    *args: Any,
    dir_fd: int | None = None,
    follow: bool = False,
    **kw: Any,
) -> Any:
    """Call `real` with the redirected path in place of `path`.

    Args:
        map_path: Method that maps a path in the store to the path to use, such as
            `StoreView.path_to_write`.
        follow: Whether `real` follows a symbolic link at the end of `path`.
    """
    to_end = follow and kw.get("follow_symlinks", True)
    redirected = _redirect_path(view, map_path, path, dir_fd, follow=to_end)
    return _call_redirected(real, path, *redirected, *args, **kw)


def _path_to_find(view: StoreView, store_path: str) -> str:
    """Return the path of the file that this rank sees at `store_path`; a file need not exist there.

    The result is the rank's own version, else the path that replaces `store_path` in a rehearsal,
    else `store_path`.
    """
    return view.own_path(store_path) or view.common_path(store_path)


def _is_gone(view: StoreView, path: Path, dir_fd: int | None) -> bool:
    """Return whether `path` is in the store, but this rank sees no file or folder there."""
    found = view.resolve(partial(_path_to_find, view), path, dir_fd)
    return found is not None and not os.path.lexists(found)


def _path_to_set_times(view: StoreView, store_path: str) -> str | None:
    """Return the path of the file whose times `os.utime` must set instead of `store_path`.

    If the rank sees no file at `store_path`, return None, so that `os.utime` fails as usual.
    `Path.touch` then creates the file.
    """
    exists = os.path.exists(_path_to_find(view, store_path))
    return view.path_to_change(store_path) if exists else None


def _move(view: StoreView, across: _Call, real: _Call, src: Path, dst: Path, **kw: Any) -> None:
    """Call `real`, such as `os.rename` or `os.link`, with the redirected source and target paths.

    There are three special cases:

    - The source is redirected, but this rank sees no file there, for example because another rank
      has already moved the file away: move nothing, and raise no error.
    - The file would be moved from a shared folder of the store to the scratch folder: copy the file
      instead, so that the store keeps the file.
    - `real` fails because a redirected path is on another file system: call `across(source,
      target)`.

    After a move (not after a copy), call `view.record_move`.

    Args:
        across: Function that moves or copies between file systems, such as `shutil.move`.
        kw: The caller's keyword arguments: `src_dir_fd` and `dst_dir_fd`.
    """
    is_gone = _is_gone(view, src, kw.get("src_dir_fd"))
    may_link = view.resolve(str, dst, kw.get("dst_dir_fd"), follow=False) is not None
    path_to_move = partial(view.path_to_move, may_link=may_link)
    source, kw["src_dir_fd"] = _redirect_path(view, path_to_move, src, kw.get("src_dir_fd"))
    target, kw["dst_dir_fd"] = _redirect_path(view, view.path_to_write, dst, kw.get("dst_dir_fd"))
    if source is not src and is_gone:
        return
    is_discarded = source is src and target is not dst and across is shutil.move
    if is_discarded and is_below(os.path.realpath(src), view.store):
        with view.without_redirection():
            (shutil.copytree if os.path.isdir(source) else shutil.copy2)(source, target)
        return
    try:
        real(source, target, **kw)
    except OSError as error:
        if error.errno != errno.EXDEV or (source is src and target is dst):
            raise
        with view.without_redirection():
            across(source, target)
    if across is shutil.move:
        view.record_move(source)


def _symlink(view: StoreView, real: _Call, src: Path, dst: Path, *args: Any, **kw: Any) -> None:
    target, kw["dir_fd"] = _redirect_path(view, view.path_to_write, dst, kw.get("dir_fd"))
    if target is not dst:  # the link is in another folder, so resolve a relative target
        src = os.path.join(os.path.dirname(os.path.abspath(dst)), src)
        src = library_read_path(view, src)  # the target may exist only as the rank's own version
    real(src, target, *args, **kw)


def _access(
    view: StoreView, real: _Call, path: Path, mode: int, *, dir_fd: int | None = None, **kw: Any
) -> bool:
    """Return whether a path is accessible, as `os.access` does.

    A readable path in the store also counts as writable, because writes to it are redirected.
    """
    if real(path, mode, dir_fd=dir_fd, **kw):
        return True
    store_path = view.resolve(partial(_path_to_find, view), path, dir_fd)
    return store_path is not None and bool(real(store_path, mode & ~os.W_OK))


def _list(view: StoreView, join: _Call, real: _Call, path: Path = None) -> Any:
    """Return the entries that this rank sees in a folder; called in place of `os.listdir`.

    These are the entries of the folder's versions in the rehearsal folder, in the store, and in the
    scratch folder. If the folder exists only in the store, call `real` with the caller's path.

    Args:
        path: The folder; None for the working directory.
        join: Function that merges the entries of all versions of the folder. If several entries
            have the same name, the result has only the first.
        real: `os.listdir` or `os.scandir`.
    """
    path = "." if path is None else path
    own_path = _own_path(view, path)
    replaced = view.resolve(view.replacement_path, path) if view.has_own_files else None
    if own_path is None and replaced is None:
        return real(path)
    store = view.to_store_path(path)
    with view.without_redirection():
        is_there = os.path.isdir(store)
    versions = [replaced, store if is_there else None, own_path if own_path != replaced else None]
    as_asked = os.fsencode if isinstance(path, bytes) else os.fsdecode
    return join(path, [it for each in versions if each for it in real(as_asked(each))])


def _merge_names(path: Path, found: list[Any]) -> list[Any]:
    return list(dict.fromkeys(found))


def _merge_entries(path: Path, found: list[Any]) -> "_Entries":
    first: dict[Any, Any] = {}
    for entry in found:
        first.setdefault(entry.name, entry)
    return _Entries(_Entry(entry, os.path.join(path, name)) for name, entry in first.items())


class _Entry:
    """An `os.DirEntry` whose path begins with the folder that the caller listed."""

    def __init__(self, entry: os.DirEntry[str], path: str) -> None:
        self._entry, self.path = entry, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __fspath__(self) -> str:
        return self.path


class _Entries(contextlib.ExitStack):
    """Replacement for the iterator that `os.scandir` returns. The method `close` has no effect."""

    def __init__(self, entries: Iterator[Any]) -> None:
        super().__init__()
        self._entries = entries

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)


def _redirect_torch_writer(view: StoreView) -> None:
    """Redirect torch.save's C++ writer, and add the path to the messages of the writer's errors."""
    import torch

    real: Any = torch._C.PyTorchFileWriter

    class PyTorchFileWriter(real):
        def __init__(self, file: Any, *args: Any, **kw: Any) -> None:
            redirected = file
            try:
                if isinstance(file, (str, os.PathLike)):
                    target = partial(path_to_open, view)
                    redirected, _ = _redirect_path(view, target, file, follow=True)
                super().__init__(redirected, *args, **kw)
            except FileNotFoundError as error:  # code that expects torch's type catches this type
                raise SaveError(f"torch cannot write {file}: {error}") from error
            except RuntimeError as error:
                raise RuntimeError(f"torch cannot write {file}: {error}") from error

    setattr(torch._C, "PyTorchFileWriter", PyTorchFileWriter)  # noqa: B010


def _redirect_torch_reader(view: DiscardingView) -> None:
    """Redirect torch's C++ reader, which `torch.export.load` and `torch.package` use."""
    import torch

    real: Any = torch._C.PyTorchFileReader

    class PyTorchFileReader(real):
        def __init__(self, file: Any, *args: Any, **kw: Any) -> None:
            is_path = isinstance(file, (str, os.PathLike))
            super().__init__(library_read_path(view, file) if is_path else file, *args, **kw)

    setattr(torch._C, "PyTorchFileReader", PyTorchFileReader)  # noqa: B010


def _redirect_profiler(view: StoreView) -> None:
    """Redirect the trace files of torch.profiler.

    This function replaces the method `torch.autograd.profiler.profile.export_chrome_trace`. The new
    method calls the original method with the redirected path. Otherwise, torch's C++ code would
    write to the original path, and would report no error if the system refuses the write.
    """
    import torch

    def export(real: _Call, profiled: Any, path: Path, *args: Any, **kw: Any) -> Any:
        redirected, _ = _redirect_path(view, partial(path_to_open, view), path, follow=True)
        return real(profiled, redirected, *args, **kw)

    profile = torch.autograd.profiler.profile
    setattr(profile, "export_chrome_trace", _redirected(profile.export_chrome_trace, export))  # noqa: B010


def _redirect_temporary_files() -> None:
    """Make tempfile use the replaced `unlink`.

    When tempfile was imported, it stored the original `unlink` as the default value of a parameter.
    So the replacement of `os.unlink` alone has no effect in tempfile.
    """
    closer: Any = getattr(tempfile, "_TemporaryFileCloser", None)
    for method in (getattr(closer, name, None) for name in ("close", "cleanup")):
        if method is not None:
            real, defaults = inspect.unwrap(os.unlink), method.__defaults__ or ()
            method.__defaults__ = tuple(os.unlink if it is real else it for it in defaults)


def _save_atomically(view: StoreView) -> None:
    """Make `torch.save` on rank 0, and in its forks, atomic for files in the store.

    In a folder that every rank may write (`--shared-writes`), `torch.save` stays as it is.
    """
    import torch

    def save(real: _Call, obj: object, f: Any, *args: Any, **kw: Any) -> None:
        if isinstance(f, (str, os.PathLike)) and view.resolve(str, f):
            with publish.atomic(f) as unfinished:
                real(obj, unfinished, *args, **kw)
        else:
            real(obj, f, *args, **kw)

    torch.save = torch.serialization.save = _redirected(torch.save, save)


def _open_for_torch_save() -> None:
    """Make `torch.save` write to a path that is not ASCII by `open`, which is redirected.

    Without this, older versions of torch open such a path by `io.FileIO`, which is not redirected.
    """
    import torch

    def save(real: _Call, obj: object, f: Any, *args: Any, **kw: Any) -> None:
        if isinstance(f, (str, os.PathLike)) and not os.fspath(f).isascii():
            with open(f, "wb") as file:
                real(obj, file, *args, **kw)
        else:
            real(obj, f, *args, **kw)

    torch.save = torch.serialization.save = _redirected(torch.save, save)


def _warn_about_locks(view: DiscardingView) -> None:
    """Make `fcntl` warn about locks on the rank's own version of a file.

    Each rank locks its own version of the file, so the lock of one rank excludes no other rank.
    After the warning, the lock is taken as usual. Unlocking gives no warning.
    """

    def lock(real: _Call, file: Any, operation: int, *args: Any) -> Any:
        path = _path_of(file if isinstance(file, int) else file.fileno())
        if view.is_own(path) and not operation & fcntl.LOCK_UN:
            text = (
                f"the lock on {os.path.basename(path)} does not exclude other ranks: only rank 0 "
                "writes to the project store, and other ranks lock their own copies. Lock a file "
                "outside the store, or in a folder of --shared-writes"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        return real(file, operation, *args)

    for name in ("flock", "lockf"):
        setattr(fcntl, name, _redirected(getattr(fcntl, name), lock))


def _is_common_file(view: StoreView, file: Any) -> bool:
    """Return whether `file` is a path in the store at which this rank sees the common version.

    The common version is the file in the store, or the file that replaces it in a rehearsal. The
    result is False if no common version exists, or if the rank has written its own version of the
    file.
    """

    def common_path(store_path: str) -> str | None:
        is_common = os.path.exists(view.common_path(store_path)) and not view.own_path(store_path)
        return store_path if is_common else None

    return isinstance(file, (str, os.PathLike)) and view.resolve(common_path, file) is not None


def _redirect_torch_maps(view: StoreView) -> None:
    """Redirect `torch.from_file` and `torch.UntypedStorage.from_file`, which map files into memory.

    `torch.load` with `mmap=True` calls the second one.

    For a shared map, use the path that `view` selects for writing; for any other map, the path that
    it selects for reading. With a `DiscardingView`, a file of the store is always mapped privately
    if the rank has no own version of the file. Reason: writes to a shared map would change the file
    in the store.
    """
    import torch

    def from_file(
        real: _Call, filename: Any, shared: bool | None = None, *args: Any, **kw: Any
    ) -> Any:
        if isinstance(view, DiscardingView) and _is_common_file(view, filename):
            shared = False
        if shared:
            redirected = library_write_path(
                view, partial(path_to_open, view, needs_content=True), filename
            )
        else:
            redirected = library_read_path(view, filename)
        return real(redirected, bool(shared), *args, **kw)

    torch.from_file = _redirected(torch.from_file, from_file)
    of_storage: Any = staticmethod(_redirected(torch.UntypedStorage.from_file, from_file))
    setattr(torch.UntypedStorage, "from_file", of_storage)  # noqa: B010


def _map_privately(view: StoreView) -> None:
    """Make `numpy.memmap` map a file of the store privately for the mode `r+`, numpy's default.

    With a private map, the file need not be copied, and only this rank sees the rank's changes. If
    the rank has its own version of the file, numpy maps this version as usual. Other modes stay as
    they are. Without numpy, do nothing.
    """
    if importlib.util.find_spec("numpy") is None:  # torch works without numpy
        return
    import numpy

    signature = inspect.signature(numpy.memmap.__new__)

    def new(real: _Call, *args: Any, **kw: Any) -> Any:
        requested = signature.bind(*args, **kw)
        requested.apply_defaults()
        if requested.arguments["mode"] in ("r+", "readwrite"):
            is_common = _is_common_file(view, requested.arguments["filename"])
            requested.arguments["mode"] = "c" if is_common else "r+"
        return real(*requested.args, **requested.kwargs)

    replacement: Any = staticmethod(_redirected(numpy.memmap.__new__, new))
    setattr(numpy.memmap, "__new__", replacement)  # noqa: B010
