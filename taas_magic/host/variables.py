"""Describe the variables and memory of a session's rank, for example for `%taas vars`.

The kernel runs these functions in all ranks of a session, and compares the results.
"""

import hashlib
import os
import socket
import sys
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import msgspec
import psutil
from msgspec import Struct

from taas_magic.capture.digest import simple_digest
from taas_magic.host.prompt import users_names
from taas_magic.host.results import is_model
from taas_magic.host.spec import HOST

COMPARED_BYTES = 256 << 20
"""Maximum bytes of a value that has a digest, by which the kernel compares the values of ranks."""

_SHELLS_OWN = frozenset({"In", "Out", "exit", "quit", "get_ipython"})
_LEFT_OUT = (ModuleType, FunctionType, BuiltinFunctionType, type)
_MAX_DEPTH = 4
_MOST_PARTS = 10_000


class Variable(Struct, frozen=True):
    """The description of one variable of one rank.

    Attributes:
        kind: Name of the value's type.
        shape: Shape of a tensor or array, number of elements of a container, or number of parameter
            tensors of a model. "" for other values.
        dtype: Element type of a tensor or array, or the element types of a model's parameters.
        device: Device of a tensor, or devices of a model's parameters.
        size_bytes: Size in memory, approximately.
        digest: Digest of the value, by which the kernel compares ranks: equal values have equal
            digests. "" if the value has no digest, for example because it is too large.
    """

    kind: str
    shape: str = ""
    dtype: str = ""
    device: str = ""
    size_bytes: int = 0
    digest: str = ""


class RankMemory(Struct, frozen=True):
    """The memory that one rank uses.

    Attributes:
        rss_bytes: Resident memory of the process.
        gpu_bytes: GPU memory that torch has reserved, over all GPUs; None if the rank uses no GPU.
    """

    host: str
    rss_bytes: int
    gpu_bytes: int | None = None


class _NotComparedError(Exception):
    """Exception for a value that has no digest. The kernel cannot compare such values of ranks.

    The value may also be a container with an element that has no digest.
    """


def describe_variables() -> Any:
    """Return a description of each of the user's variables in this rank.

    Modules, functions, classes, and names that begin with an underscore are left out.

    Returns:
        A dict that maps names to descriptions; each description is a `Variable` as plain data.
    """
    return msgspec.to_builtins(
        {
            name: _described_safely(value)
            for name, value in list(vars(sys.modules["__main__"]).items())
            if not name.startswith("_")
            and name not in _SHELLS_OWN
            and not isinstance(value, _LEFT_OUT)
        }
    )


def list_names() -> Any:
    """Return the names of the variables, functions, classes and modules in a rank's `__main__`.

    A kernel calls this function when it attaches to a session that another kernel has started.

    Returns:
        Two values. First, a dict with the digest (`simple_digest`) of each variable; "" if the
        variable's value is not a simple value. Second, a list with the names of functions, classes
        and modules.
    """
    found = {
        name: value
        for name, value in users_names(vars(sys.modules["__main__"])).items()
        if not name.startswith("__") and name not in _SHELLS_OWN
    }
    code = [name for name, value in found.items() if isinstance(value, _LEFT_OUT)]
    return {name: simple_digest(found[name]) for name in found.keys() - code}, code


def measure_memory() -> Any:
    """Return the `RankMemory` of this process, as plain data.

    The field `gpu_bytes` is None if the process has not used CUDA.
    """
    torch = sys.modules.get("torch")
    gpu_bytes = None
    if torch is not None and torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        gpu_bytes = sum(torch.cuda.memory_reserved(device) for device in devices)
    host = os.environ.get(HOST) or socket.gethostname()
    rss_bytes = psutil.Process().memory_info().rss
    return msgspec.to_builtins(RankMemory(host, rss_bytes, gpu_bytes))


def _described_safely(value: Any) -> Variable:
    """Return the description of a value; only its type if an attribute of the value raises."""
    try:
        return _described(value)
    except Exception:  # attributes of the user's classes may run any code
        return Variable(type(value).__name__)


def _described(value: Any) -> Variable:
    """Return the description of a value: a tensor or array, a model, or any other value.

    For a model, the shape is the number of parameter tensors, and element types and devices are
    those of the parameters. For a list, tuple, dict, set or string, the shape is the length. Any
    other value has no shape.
    """
    kind = type(value).__name__
    if hasattr(value, "dtype") and hasattr(value, "shape"):  # a tensor or an array
        return Variable(
            kind,
            str(tuple(value.shape)),
            str(value.dtype).removeprefix("torch."),
            str(getattr(value, "device", "")),
            _value_bytes(value),
            _digest(value),
        )
    if is_model(value):
        parameters = list(value.parameters())
        return Variable(
            kind,
            f"{len(parameters)} parameters",
            ", ".join(sorted({str(each.dtype).removeprefix("torch.") for each in parameters})),
            ", ".join(sorted({str(each.device) for each in parameters})),
            _value_bytes(value),
            _digest(value),
        )
    shape = f"{len(value)}" if isinstance(value, list | tuple | dict | set | str) else ""
    return Variable(kind, shape, size_bytes=_value_bytes(value), digest=_digest(value))


def _local_tensor(value: Any) -> Any:
    """If `value` is a DTensor, return this rank's part of it as a tensor; else return `value`."""
    return value.to_local() if hasattr(value, "to_local") else value


def _parts(value: Any) -> list[Any] | None:
    """Return the elements of a container, or the tensors of a model; None for other values."""
    if is_model(value):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, list | tuple) else None


def _value_bytes(value: Any, depth: int = 0) -> int:
    """Return the approximate size of a value in memory; 0 if the size cannot be computed.

    The size of a tensor or array is its `nbytes`; other values have the size of `sys.getsizeof`.
    For a DTensor, only this rank's part counts. For a container or model, the sizes of its first
    `_MOST_PARTS` elements are added. Elements that are nested deeper than `_MAX_DEPTH` levels do
    not count.

    Args:
        depth: Number of containers around the value.
    """
    try:
        if hasattr(value, "nbytes"):
            return int(_local_tensor(value).nbytes)
        parts = _parts(value) if depth < _MAX_DEPTH else None
        own = sys.getsizeof(value)
    except Exception:  # attributes of the user's classes may run any code
        return 0
    if parts is None:
        return own
    return own + sum(_value_bytes(part, depth + 1) for part in parts[:_MOST_PARTS])


def _digest(value: Any) -> str:
    """Return a digest of a value, by which the kernel compares the values of ranks.

    The digest of a simple value is its `simple_digest`. The digest of any other value is a SHA-256
    hash. It is "" if the value is larger than `COMPARED_BYTES`, has an element without a digest, or
    raises an exception while it is read.
    """
    if digest := simple_digest(value):
        return digest
    if _value_bytes(value) > COMPARED_BYTES:
        return ""
    found = hashlib.sha256()
    try:
        _update_hash(found, value, 0)
    except Exception:  # attributes of the user's classes may run any code
        return ""
    return found.hexdigest()


def _update_hash(found: Any, value: Any, depth: int) -> None:
    """Add a value to a hash, so that different values give different hashes.

    For an array or tensor, adds the element type, the shape and the bytes. For a DTensor, adds only
    this rank's part. For a container or model, adds its type, its length and each element. For a
    simple value, adds its `simple_digest`.

    Args:
        found: A hash object of hashlib.
        depth: Number of containers around the value.

    Raises:
        _NotComparedError: The value or one of its elements has an unknown type, is nested too deep,
            has too many elements, or is an array of Python objects.
    """
    parts = _parts(value)
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        if value.dtype.hasobject:
            raise _NotComparedError
        found.update(f"{value.dtype}{value.shape}".encode())
        found.update(value.tobytes())
    elif hasattr(value, "dtype") and hasattr(value, "detach"):
        import torch

        plain = _local_tensor(value).detach().cpu().contiguous()
        found.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        found.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    elif parts is not None and depth < _MAX_DEPTH and len(parts) <= _MOST_PARTS:
        found.update(f"{type(value).__name__}{len(parts)}".encode())
        for part in parts:
            _update_hash(found, part, depth + 1)
    elif digest := simple_digest(value):
        found.update(digest.encode())
    else:
        raise _NotComparedError
