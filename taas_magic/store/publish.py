"""Files that appear whole or not at all: `taas.save`, and what it is made of.

A file is written beside its destination, forced to the disk, and moved there in one step, so that a
kill at any point and a full disk leave the old file or the new one. (rename(2) is atomic; that a
new file needs its folder forced to the disk as well is in fsync(2).)
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
"""The environment variable that names where a job's `taas.save` writes, in place of the store."""

_SUFFIX = ".taas-saving"
_TORCH_CANNOT_WRITE = ("inline_container", "write(): fd")
"""What torch's RuntimeErrors say when the disk is full; they name neither the path nor the disk."""


def save(obj: object, f: str | os.PathLike[str] | IO[bytes], *args: Any, **kwargs: Any) -> None:
    """Save like `torch.save`, whose arguments it takes, but so that the file appears atomically.

    Any rank may call it, and none waits for another: in a run only rank 0's call writes. Outside of
    a run it writes. In a job of a farm it writes to the job's folder, at the same path as in the
    project store. The file is byte for byte the one that `torch.save` makes.

    Args:
        f: The file's path; an open file is written as `torch.save` does, by any rank.

    Raises:
        StoreError: It could not be written; what was there before is still there.
    """
    import torch

    write = inspect.unwrap(torch.save)
    if not isinstance(f, (str, os.PathLike)):
        write(obj, f, *args, **kwargs)
    elif os.environ.get("RANK", "0") == "0":
        with atomic(_in_job(f)) as unfinished:
            write(obj, unfinished, *args, **kwargs)


def _in_job(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return where a job saves what is meant for the project store; elsewhere the path itself."""
    folder = os.environ.get(SAVES)
    # by its own name where that lies here, else over a link that leads here
    below = [os.path.relpath(it) for it in (path, os.path.realpath(path))]
    inside = [it for it in below if not it.startswith(os.pardir + os.sep)]
    if not folder or not inside:
        return path
    place = os.path.join(folder, inside[0])
    os.makedirs(os.path.dirname(place), exist_ok=True)
    return place


@contextlib.contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield where to write the file that takes `path`'s place when the block ends without error.

    A symbolic link is followed, and the old file's permissions are kept.

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
    """Yield a folder on the destination's file system, gone at the end; clear what a kill has left.

    A folder, not a file of another name, because torch writes a file's name into it. Its lock tells
    a living writer's folder from a dead one's.
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
    """Remove an unfinished save whose writer is dead; say whether `folder` is one at all."""
    if not folder.name.endswith(_SUFFIX):
        return False
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True  # it is gone, or another user's
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
    """Drop what the failed calls held: torch's writer, and with it the given-up file's space."""
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
