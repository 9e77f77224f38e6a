"""Read a rank's log file: all of it, its end, or the lines that match a pattern."""

import re
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from taas_magic.config import size_text
from taas_magic.display.tails import lines_at_end
from taas_magic.errors import UsageError
from taas_magic.host.output import LineAssembler
from taas_magic.messages import block_without_controls, without_controls

READ_BYTES = 4_000_000
"""Maximum number of bytes that `end_of_log` reads from the end of a log."""

SHOWN_CHARS = 500_000
"""Maximum number of characters of a log to show in a cell. A longer text makes a browser slow."""

_CHUNK_BYTES = 1 << 20


def log_text(path: Path, tail: int | None = None, grep: str = "") -> str:
    """Return the text of a rank's log file, or only some lines of it; "" if there is no such file.

    With `tail` or `grep`, the lines are as a terminal would show them. Without both, return the
    whole text as it is in the file.

    Args:
        path: Path of the log file.
        tail: Maximum number of lines to return: the last lines that match `grep`. None returns all
            lines that match `grep`.
        grep: Regular expression. Lines without a match are left out. "" keeps all lines.

    Raises:
        UsageError: `tail` is negative, or `grep` is not a valid regular expression.
    """
    if tail is not None and tail < 0:
        raise UsageError(f"tail must be a number of lines, 0 or more; got {tail}")
    if not path.exists():
        return ""
    if tail is None and not grep:
        return path.read_text(encoding="utf-8", errors="replace")
    wanted = _pattern(grep)
    found = deque((line for line in _lines(path) if wanted.search(line)), maxlen=tail)
    return "".join(f"{line}\n" for line in found)


def end_of_log(path: Path) -> str:
    """Return the last lines of a log as a terminal would show them; "" if there is no log file.

    Read at most `READ_BYTES` bytes. Return as many last lines as fit into `SHOWN_CHARS` characters,
    but at least one line, without control sequences. If earlier text is left out, the first line of
    the result gives the size of this text and names the file.
    """
    if not path.exists():
        return ""
    lines, size = lines_at_end(path, READ_BYTES)
    lengths = accumulate(len(line) + 1 for line in reversed(lines))
    fit = sum(length <= SHOWN_CHARS for length in lengths)
    text = "\n".join(without_controls(line) for line in lines[len(lines) - max(1, fit) :])
    if fit == len(lines) and size <= READ_BYTES:
        return text
    return f"… {size_text(size - len(text))} before this: {path}\n{text}"


def end_of_text(text: str, path: Path) -> str:
    """Return the end of a text from a log, without terminal control sequences except colours.

    If the text is longer than `SHOWN_CHARS` characters, return only the last whole lines that fit
    into this limit. A line above them names the log file, which has all lines.

    Args:
        text: Text from a rank's log.
        path: Path of the log file.
    """
    if len(text) > SHOWN_CHARS:
        text = text[-SHOWN_CHARS:].partition("\n")[2]
        return f"… the lines before these: {path}\n{block_without_controls(text)}"
    return block_without_controls(text).rstrip("\n")


def _lines(path: Path) -> Iterator[str]:
    """Yield a log's lines as a terminal would show them. Read the file in chunks."""
    assembler = LineAssembler()
    with path.open("rb") as file:
        while read := file.read(_CHUNK_BYTES):
            yield from assembler.feed(read)
    yield from assembler.flush()


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f'"{text}" is not a valid regular expression: {error}') from None
