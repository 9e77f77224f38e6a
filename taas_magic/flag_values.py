"""Readers of the values of `%%taas`'s flags: text in, value out, ValueError for what is none."""

import keyword
import math
import re
from collections.abc import Callable

from taas_magic.plan import Prefill
from taas_magic.taas_toml import parse_size

MAX_RANKS = 1_000_000
"""More than any pool has; the bound of the pool itself is the plan's to check."""

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)", re.IGNORECASE | re.ASCII)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)", re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def whole(least: int, most: int = MAX_RANKS) -> Callable[[str], int]:
    """A reader of whole numbers between two bounds."""

    def read(text: str) -> int:
        if not re.fullmatch(r"\d+", text, re.ASCII) or not least <= int(text) <= most:
            raise ValueError(text)
        return int(text)

    return read


def count(text: str) -> int:
    """`20480000`, `20_480_000`, `20M` or `1.5G` (K, M, G, T are powers of 1000)."""
    match = _COUNT.fullmatch(re.sub(r"(?<=\d)_(?=\d)", "", text))
    if match is None:
        raise ValueError(text)
    number = float(match[1]) * 1000.0 ** " KMGT".index(match[2].upper() or " ")
    if number != int(number) or number < 1:
        raise ValueError(text)
    return int(match[1]) if not match[2] and match[1].isdigit() else int(number)


def world_sizes(text: str) -> tuple[int, int]:
    """`8`, or `8:16`: how many ranks a run starts with, and how many it may grow to."""
    least, colon, most = text.partition(":")
    bounds = whole(1)(least), whole(1)(most if colon else least)
    if bounds[0] > bounds[1]:
        raise ValueError(text)
    return bounds


def prefill(text: str) -> Prefill:
    """`all`, a size with a `B` such as `500MB`, or a count of batches such as `200` or `2K`."""
    if text == "all":
        return Prefill(0, "all")
    if text.upper().endswith("B"):
        return Prefill(parse_size(text), "bytes")
    return Prefill(count(text), "batches")


def duration_s(text: str) -> float:
    """`90`, `90s`, `5m`, `2h` or `1d` in seconds."""
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(text)
    return seconds


def names(text: str) -> tuple[str, ...]:
    """`a,b` as names of variables, each once."""
    listed = [name.strip() for name in text.split(",")]
    if not all(name.isidentifier() and not keyword.iskeyword(name) for name in listed):
        raise ValueError(text)
    return tuple(dict.fromkeys(listed))


def ranks(text: str) -> frozenset[int] | None:
    """`0,2-5` as ranks; `all` as None."""
    if text == "all":
        return None
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        bounds = whole(0)(first), whole(0)(last if dash else first)
        if bounds[0] > bounds[1]:
            raise ValueError(text)
        found.update(range(bounds[0], bounds[1] + 1))
    return frozenset(found)


def variable(text: str) -> tuple[str, str]:
    """`KEY=VALUE`."""
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", key, re.ASCII) or "\0" in value:
        raise ValueError(text)
    return key, value


def one_of(*possible: str) -> Callable[[str], str]:
    """A reader of one of a few words."""

    def read(text: str) -> str:
        if text not in possible:
            raise ValueError(text)
        return text

    return read
