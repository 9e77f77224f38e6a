"""Functions, arguments and results of jobs on their way between the notebook and job processes.

What is small travels inside a job's message. What is large (an array, a payload) is a part of its
own, named by its hash: it goes to each host once, and the jobs there map it.
"""

import hashlib
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taas_magic.capture import payload
from taas_magic.capture.payload import Cell
from taas_magic.capture.pickling import ValuePickler

INLINE_BYTES = 64 << 10
"""What is larger is a part of its own."""

CALLED = "taas_job"
"""The name that a function travels by which is no variable of the notebook under its own."""


class Blob:
    """Bytes in memory that processes of this host map by a path.

    Args:
        data: What is copied there.
    """

    def __init__(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        self._descriptor = os.memfd_create("taas-value")
        while view.nbytes:
            view = view[os.write(self._descriptor, view) :]

    def __del__(self) -> None:
        """Give the memory back; what is mapped stays until that is unmapped."""
        os.close(self._descriptor)

    @property
    def path(self) -> str:
        """Where it is, for as long as this process has it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"


def is_large(part: Any) -> bool:
    """Whether a part travels by itself."""
    return memoryview(part).nbytes > INLINE_BYTES


def digest(part: Any) -> str:
    """A name for a part, by what is in it."""
    return hashlib.blake2b(memoryview(part).cast("B"), digest_size=16).hexdigest()


def opened(part: bytes | str) -> memoryview | bytearray:
    """A part as its job has it, which may write to it: mapped where it is a path."""
    if not isinstance(part, str):
        return bytearray(part)
    with open(part, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


@dataclass(frozen=True)
class Packed:
    """A job's arguments.

    Attributes:
        parts: A pickle of each, one after the other, and the memory that they refer to.
        needs: Names of the notebook that they look up when they run.
        modules: Modules that they refer to.
    """

    parts: tuple[Any, ...]
    needs: tuple[str, ...]
    modules: tuple[str, ...]


def pack_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], namespace: dict[str, Any]
) -> Packed:
    """Pickles a job's arguments; memory of arrays and tensors is referred to, not copied.

    Raises:
        CaptureError: One of them cannot travel; the message has the path to what cannot.
    """
    pickler = ValuePickler(namespace)
    named = {**{f"argument {place}": value for place, value in enumerate(args, 1)}, **kwargs}
    for name, value in named.items():
        pickler.take(name, value)
    pickled = pickler.pickled()
    buffers = (buffer.raw() for buffer in pickled.buffers)
    parts = (pickled.data, *buffers)
    return Packed(parts, tuple(pickler.needs), tuple(sorted(pickler.modules - {"__main__"})))


def pack_function(
    function: Callable[..., Any],
    packed: Packed,
    namespace: dict[str, Any],
    settings: Mapping[str, Any],
    path: Path,
) -> tuple[str, bytes]:
    """Captures a function with all that it, and arguments of it, use of the notebook.

    Args:
        function: Any callable.
        packed: Its arguments.
        namespace: The notebook's own dict.
        settings: What `payload.capture` takes besides.
        path: A file to write it to; it is removed.

    Returns:
        The name that it has there, and the payload.

    Raises:
        CaptureError: Something that it uses cannot travel.
    """
    with _named(function, namespace) as name:
        imports = (f"import {module}" for module in packed.modules)
        cell = Cell("\n".join([name, *packed.needs, *imports]), filename="<a job>", raw="")
        found = payload.capture(cell, namespace, **settings)
    try:
        payload.write(found, path)
        return name, path.read_bytes()
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _named(function: Callable[..., Any], namespace: dict[str, Any]) -> Iterator[str]:
    """A variable of the notebook that is the function; made for the block where there is none."""
    own = getattr(function, "__name__", "")
    if own and namespace.get(own) is function:
        yield own
        return
    before = namespace.get(CALLED)
    namespace[CALLED] = function
    try:
        yield CALLED
    finally:
        namespace.pop(CALLED)
        if before is not None:
            namespace[CALLED] = before
