"""Digests of simple values; two processes compare their values by these digests."""

import hashlib
from collections.abc import Iterable
from typing import Any

_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_MOST_PARTS = 1000
"""Maximum number of objects in a value, and maximum length of each string or bytes object in it."""


def simple_digest(value: Any) -> str:
    """Return a digest of a simple value; "" for any other value.

    A simple value consists of at most `_MOST_PARTS` numbers, strings, bytes and None, in lists,
    tuples and dicts. If two processes have equal digests other than "", their values are equal.
    """
    if not _is_simple([value], [0]):
        return ""
    return hashlib.sha256(repr(value).encode(errors="backslashreplace")).hexdigest()


def _is_simple(values: Iterable[Any], counted: list[int]) -> bool:
    """Return whether all `values` are simple, and together have at most `_MOST_PARTS` objects.

    The elements of lists and tuples, and the keys and values of dicts, must be simple, too. A
    string or bytes object must not be longer than `_MOST_PARTS`. Instances of subclasses are not
    simple.

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
            if not _is_simple(value, counted):
                return False
        elif kind is dict:
            if not (_is_simple(value, counted) and _is_simple(value.values(), counted)):
                return False
        elif kind not in _ATOMS:
            return False
    return True
