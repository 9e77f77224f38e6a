"""What a rank wrote, read from its log file: all of it, its end, or the lines with a pattern."""

import os
import re
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from taas_magic.config import size_text
from taas_magic.errors import UsageError
from taas_magic.host.output import LineAssembler
from taas_magic.messages import harmless, harmless_block

READ_BYTES = 4_000_000
"""How much of a log's end is read to show it."""

SHOWN_BYTES = 500_000
"""How much of a log a browser bears in a cell."""

_CHUNK_BYTES = 1 << 20


def log_text(path: Path, tail: int | None = None, grep: str = "") -> str:
    """Return what a rank wrote; "" where there is no file.

    Args:
        tail: How many of the last lines; None returns all.
        grep: A regular expression; lines without it are left out.

    Raises:
        UsageError: `grep` is no regular expression.
    """
    if not path.exists():
        return ""
    if tail is None and not grep:
        return path.read_text(encoding="utf-8", errors="replace")
    wanted = _pattern(grep)
    found = deque((line for line in _lines(path) if wanted.search(line)), maxlen=tail)
    return "".join(f"{line}\n" for line in found)


def end_of_log(path: Path) -> str:
    """Return a log's last lines as a terminal would show them, and how much comes before them."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - READ_BYTES))
        assembler = LineAssembler()
        lines = [*assembler.feed(file.read()), *assembler.flush()]
    lengths = accumulate(len(line) + 1 for line in reversed(lines))
    fit = sum(length <= SHOWN_BYTES for length in lengths)
    text = "\n".join(harmless(line) for line in lines[len(lines) - max(1, fit) :])
    if fit == len(lines) and size <= READ_BYTES:
        return text
    return f"… {size_text(size - len(text))} before this: {path}\n{text}"


def shortened(text: str, path: Path) -> str:
    """Return the end of a text, as far as a cell bears it, without what a terminal obeys."""
    if len(text) > SHOWN_BYTES:
        text = text[-SHOWN_BYTES:].partition("\n")[2]
        return f"… the lines before these: {path}\n{harmless_block(text)}"
    return harmless_block(text).rstrip("\n")


def _lines(path: Path) -> Iterator[str]:
    """Yield a log's lines as a terminal would show them; reads it piece by piece."""
    assembler = LineAssembler()
    with path.open("rb") as file:
        while read := file.read(_CHUNK_BYTES):
            yield from assembler.feed(read)
    yield from assembler.flush()


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f'"{text}" is no regular expression: {error}') from None
