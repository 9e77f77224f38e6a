"""Atomic file writes: `taas.save` and its parts.

A file is written beside its destination, forced to the disk, and moved to the destination by
rename(2). So a kill at any point, or a full disk, leaves either the old file or the new file.
"""

import contextlib
import inspect
import os
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from taas_magic.errors import SaveError
from taas_magic.shared_files import lock

SAVES_FOLDER_VARIABLE = "TAAS_SAVES"
"""Name of the environment variable with the folder for files that a farm's job saves."""

_SUFFIX = ".taas-saving"
_PREFIX_BYTES = 200
_TORCH_CANNOT_WRITE = ("inline_container", "write(): fd")
"""Parts of the text of the RuntimeError that torch raises if the disk is full."""


def save(obj: object, f: str | os.PathLike[str] | IO[bytes], *args: Any, **kwargs: Any) -> None:
    """Save an object atomically, with the arguments of `torch.save`.

    In a run, every rank may call this function, but only rank 0's call writes. Ranks do not wait
    for each other here. Outside of a run, every call writes, unless the environment variable `RANK`
    has another value than 0, for example in a program that torchrun started. In a job of a farm,
    the file goes to the job's own folder, at the same relative path as in the project store. The
    file has the same bytes as a file from `torch.save`.

    Args:
        obj: Object to save.
        f: Path of the file, or an open file. If it is an open file, every rank writes to it, as
            `torch.save` does, and this write is not atomic.
        *args: Further arguments of `torch.save`.
        **kwargs: Further arguments of `torch.save`.

    Raises:
        SaveError: The file could not be written; an old file at the path is unchanged.
    """
    import torch

    write = inspect.unwrap(torch.save)
    if not isinstance(f, (str, os.PathLike)):
        write(obj, f, *args, **kwargs)
    elif os.environ.get("RANK", "0") == "0":
        with atomic(_path_in_job(f)) as unfinished:
            write(obj, unfinished, *args, **kwargs)


def _path_in_job(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the path at which a farm's job saves a file instead of `path` in the project store.

    The result is in the job's own folder. Make the missing parent folders of the result.

    If this process runs no job, return `path` unchanged, and make no folder. Do the same if both
    `path` and the target of its symbolic links are outside the working directory.
    """
    folder = os.environ.get(SAVES_FOLDER_VARIABLE)
    if not folder:  # the paths below need a working directory, which may have been removed
        return path
    # First try the path as given. If the path is outside the working directory, follow its symbolic
    # links, and try the result.
    below = [os.path.relpath(it) for it in (path, os.path.realpath(path))]
    inside = [it for it in below if not it.startswith(os.pardir + os.sep)]
    if not inside:
        return path
    place = os.path.join(folder, inside[0])
    os.makedirs(os.path.dirname(place), exist_ok=True)
    return place


@contextlib.contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a temporary path for the `with` block to write a file; then move the file to `path`.

    The file is forced to the disk before the move. It gets the permissions of the old file at
    `path`. If `path` is a symbolic link, the link's target is replaced. If the block fails, the old
    file stays, and the temporary file is removed.

    Before this function raises SaveError, it clears the local variables in the traceback, so that
    the system frees the disk space of the temporary file.

    Raises:
        SaveError: The block or the move raised OSError, or torch's RuntimeError for a full disk.
            Other errors of the block are raised as they are.
    """
    destination = os.path.realpath(path)
    with _folder_beside(destination) as folder:
        unfinished = os.path.join(folder, os.path.basename(destination))
        try:
            yield unfinished
            _force_to_disk(unfinished)
            if os.path.exists(destination):
                shutil.copymode(destination, unfinished)
            os.replace(unfinished, destination)
            _force_to_disk(os.path.dirname(destination))
        except (OSError, RuntimeError) as error:
            is_torchs = any(words in str(error) for words in _TORCH_CANNOT_WRITE)
            if isinstance(error, RuntimeError) and not is_torchs:
                raise
            message = _cannot_write(destination, unfinished, error)
            _release_frames(error)
            raise SaveError(message) from error


@contextlib.contextmanager
def _folder_beside(destination: str) -> Iterator[str]:
    """Yield a new temporary folder beside the destination.

    First remove the temporary folders in which killed writers have left unfinished versions of the
    same file. While the `with` block runs, this process holds a lock on the new folder. So other
    processes know that the folder is in use. At the end, remove the new folder with all its files.

    Reason for a folder: torch writes the file's name into the file, so the temporary file must have
    the same name as the destination.

    Raises:
        SaveError: The folder cannot be made.
    """
    parent, name = os.path.split(destination)
    # The name of the folder is longer than `name`, which may already have the maximum length.
    begin = name.encode(errors="ignore")[:_PREFIX_BYTES].decode(errors="ignore")
    prefix = f".{begin}."
    try:
        for other in os.listdir(parent):
            if other.startswith(prefix):
                remove_leftover(Path(parent, other))
        folder = tempfile.mkdtemp(_SUFFIX, prefix, parent)
    except OSError as error:
        raise SaveError(f"{destination} cannot be written: {error.strerror}") from error
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # without locks, `remove_leftover` removes no folder
            lock(descriptor, shared=True, wait=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_leftover(folder: Path) -> bool:
    """Remove the temporary folder of an unfinished save if its writer has ended.

    The name of such a folder ends with `.taas-saving`; do nothing to a folder with another name. A
    writer holds a lock on its folder. If the lock is free, the writer has ended. If the file system
    has no locks, the folder stays.

    Returns:
        Whether `folder` has such a name, even if the folder stays because its writer lives.
    """
    if not folder.name.endswith(_SUFFIX):
        return False
    # The folder may be gone, or belong to another user, or its file system may have no locks.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if lock(descriptor):  # the lock is free only if the writer is dead
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
    return True


def _force_to_disk(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _release_frames(error: BaseException | None) -> None:
    """Clear the local variables in the traceback, so that the system frees the file's disk space.

    Otherwise, one of these variables refers to torch's writer, which keeps the removed file open.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _cannot_write(destination: str, unfinished: str, error: Exception) -> str:
    written = os.path.getsize(unfinished) if os.path.exists(unfinished) else 0
    free = shutil.disk_usage(os.path.dirname(destination)).free
    kept = "the old file is unchanged" if os.path.exists(destination) else "no file was made"
    return (
        f"{destination} cannot be written: {getattr(error, 'strerror', None) or error} "
        f"({written:,} bytes were written, {free:,} are free on its disk); {kept}"
    )
