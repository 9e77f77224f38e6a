"""Atomic file writes: `taas.save` and its parts.

A file is written beside its destination, forced to the disk, and moved there in one step. So a kill
at any point, or a full disk, leaves either the old file or the new one. rename(2) is atomic. The
folder of a new file must be forced to the disk as well, see fsync(2).
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

from taas_magic.errors import StoreError
from taas_magic.shared_files import lock

SAVES = "TAAS_SAVES"
"""Environment variable with the folder for files that a farm's job saves by `taas.save`."""

_SUFFIX = ".taas-saving"
_TORCH_CANNOT_WRITE = ("inline_container", "write(): fd")
"""Texts by which torch's errors for a full disk are recognized; they name no path and no disk."""


def save(obj: object, f: str | os.PathLike[str] | IO[bytes], *args: Any, **kwargs: Any) -> None:
    """Save an object atomically, with the arguments of `torch.save`.

    In a run, every rank may call it, but only rank 0's call writes; no rank waits for another.
    Outside of a run, every call writes. A job of a farm writes to the job's own folder, at the same
    path as in the project store. The file has the same bytes as one from `torch.save`.

    Args:
        obj: Object to save.
        f: Path of the file. An open file is written as by `torch.save`, by any rank and not
            atomically.
        *args: Further arguments of `torch.save`.
        **kwargs: Further arguments of `torch.save`.

    Raises:
        StoreError: The file could not be written; an old file at the path is unchanged.
    """
    import torch

    write = inspect.unwrap(torch.save)
    if not isinstance(f, (str, os.PathLike)):
        write(obj, f, *args, **kwargs)
    elif os.environ.get("RANK", "0") == "0":
        with atomic(_in_job(f)) as unfinished:
            write(obj, unfinished, *args, **kwargs)


def _in_job(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the path in the job's folder for a path in the project store.

    Returns:
        `path` itself outside of a job, and for a path outside the store.
    """
    folder = os.environ.get(SAVES)
    # Try the path as it is given first. If it is outside the working directory, try the target of
    # its symbolic links.
    below = [os.path.relpath(it) for it in (path, os.path.realpath(path))]
    inside = [it for it in below if not it.startswith(os.pardir + os.sep)]
    if not folder or not inside:
        return path
    place = os.path.join(folder, inside[0])
    os.makedirs(os.path.dirname(place), exist_ok=True)
    return place


@contextlib.contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a temporary path; if the block ends without error, its file replaces `path`.

    A symbolic link is followed, and an old file's permissions are kept.

    Raises:
        StoreError: The file could not be written.
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
            raise StoreError(message) from error


@contextlib.contextmanager
def _folder_beside(destination: str) -> Iterator[str]:
    """Yield a temporary folder beside the destination, and remove leftovers of killed writers.

    The temporary file is in a folder, and not beside the destination under another name, because
    torch writes the file's name into the file. The folder's lock distinguishes the folder of a
    living writer from a leftover.
    """
    parent, name = os.path.split(destination)
    prefix = f".{name}."
    try:
        for other in os.listdir(parent):
            if other.startswith(prefix):
                remove_leftover(Path(parent, other))
        folder = tempfile.mkdtemp(_SUFFIX, prefix, parent)
    except OSError as error:
        raise StoreError(f"{destination} cannot be written: {error.strerror}") from error
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock(descriptor, shared=True, wait=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_leftover(folder: Path) -> bool:
    """Remove the folder of an unfinished save if its writer is dead.

    Returns:
        Whether `folder` is the folder of an unfinished save, by its name.
    """
    if not folder.name.endswith(_SUFFIX):
        return False
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True  # it was removed meanwhile, or belongs to another user
    try:
        if lock(descriptor):  # else its writer is alive
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
    """Clear the local variables of failed calls, so that the system frees the file's disk space.

    One of these variables is torch's writer, which holds the unfinished file open.
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
