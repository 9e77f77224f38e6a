"""Converts the results of a case's script to tuples that a test can compare and print.

The ranks run this code, too. So it imports only torch.
"""

import dataclasses
import enum
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import torch
from torch.utils.data import DataLoader

Loader = DataLoader[Any]
Script = Callable[[Any], object]
Case = Loader | tuple[Loader, Script] | tuple[Loader, Script, dict[str, str]]


def parts(made: Case) -> tuple[Loader, Script, dict[str, str]]:
    """Return the loader, script and options of a case. The default script is `two_epochs`."""
    if isinstance(made, DataLoader):
        return made, two_epochs, {}
    return made[0], made[1], made[2] if len(made) == 3 else {}


def two_epochs(loader: Iterable[object]) -> list[list[object]]:
    """Return the batches of two epochs; the default script."""
    return [list(loader), list(loader)]


def seen_of(script: Script, loader: Iterable[object]) -> tuple[object, ...]:
    """Call a script with a loader; describe the script's result, or the exception it raises."""
    try:
        return described(script(loader))
    except Exception as error:
        return "raised", described(error)


def described(value: object) -> tuple[object, ...]:
    """Describe a value by its type, shape and contents."""
    kind = type(value).__qualname__
    if isinstance(value, (type, enum.Enum)):
        return kind, str(value)
    if isinstance(value, BaseException):
        return "error", kind, last_line(value)
    if isinstance(value, torch.Tensor):
        return kind, *tensor(value)
    if hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "tolist"):
        return kind, str(value.dtype), value.shape, repr(value.tolist())
    if isinstance(value, Mapping):
        return kind, *((key, described(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return kind, *map(described, value), *named(value)
    if isinstance(value, Set):
        return kind, *sorted(map(repr, value))
    if dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        return kind, described(vars(value))
    return kind, repr(value)


def last_line(error: BaseException) -> str:
    """Return the last line of an exception's message, without the class name before it."""
    lines = str(error).strip().splitlines() or [""]
    return re.sub(rf"^([\w.]*\.)?{type(error).__name__}(: |$)", "", lines[-1])


def tensor(value: torch.Tensor) -> tuple[object, ...]:
    """Describe a tensor by its attributes and its numbers."""
    about = str(value.dtype), str(value.layout), value.requires_grad
    if value.is_nested:
        return *about, *(tensor(part) for part in value.unbind())
    if value.layout is torch.sparse_coo:
        value = value.coalesce()
        return *about, tuple(value.shape), tensor(value.indices()), tensor(value.values())
    if value.layout is torch.sparse_csr:
        return *about, tuple(value.shape), tensor(value.crow_indices()), tensor(value.values())
    return *about, tuple(value.shape), tuple(order(value)), entries(value)


def order(value: torch.Tensor) -> list[int]:
    """Return the dimensions of a tensor in the order of their strides, the largest first.

    The strides themselves are no part of the description: a tensor with gaps in its memory may
    arrive without these gaps.
    """
    longer = [dimension for dimension in range(value.dim()) if value.shape[dimension] > 1]
    return sorted(longer, key=value.stride, reverse=True)


def entries(value: torch.Tensor) -> str | int:
    """Return a dense tensor's numbers, or a checksum if it has more than 1000."""
    if value.numel() <= 1000:
        return repr(value.tolist())
    return zlib.crc32(value.detach().contiguous().view(torch.uint8).numpy().tobytes())


def named(value: list[object] | tuple[object, ...]) -> tuple[object, ...]:
    """Return the fields of a named tuple, or the attributes of a list or tuple subclass."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return (value._fields,)
    own = getattr(value, "__dict__", None)
    return (described(own),) if own else ()
