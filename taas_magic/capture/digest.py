"""Digests of plain values, to tell whether values in two processes are equal."""

import hashlib
from collections.abc import Iterable
from typing import Any

_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_MOST_PARTS = 1000
"""Maximum number of objects in a value, and maximum length of each string or bytes object in it."""


def plain_digest(value: Any) -> str:
    """Return a digest of a small plain value; "" for any other value.

    A plain value consists of numbers, strings, bytes and None, in lists, tuples and dicts. A value
    above the limit `_MOST_PARTS` is not small. If two processes have equal digests other than "",
    their values are equal.
    """
    if not _is_plain([value], [0]):
        return ""
    return hashlib.sha256(repr(value).encode(errors="backslashreplace")).hexdigest()


def _is_plain(values: Iterable[Any], counted: list[int]) -> bool:
    """Return whether all `values` are plain and together within `_MOST_PARTS`.

    Args:
        counted: List with one element, the number of objects counted so far. This function updates
            it.
    """
    for value in values:
        counted[0] += 1
        kind = type(value)
        if counted[0] > _MOST_PARTS:
            return False
        if kind in (str, bytes):
            if len(value) > _MOST_PARTS:
                return False
        elif kind in (list, tuple):
            if not _is_plain(value, counted):
                return False
        elif kind is dict:
            if not (_is_plain(value, counted) and _is_plain(value.values(), counted)):
                return False
        elif kind not in _ATOMS:
            return False
    return True
