"""Read a run's journal in any process: new lines, the event of the start, or the last event.

A journal may have 256 MiB, mostly lines that ranks printed. So this module decodes only the events
that its caller needs.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from taas_magic.messages import Event, RunEnded, StateChanged, decode_event

_T = TypeVar("_T", bound=Event)

CHUNK_BYTES = 1 << 18

_TAIL_BYTES = 1 << 16


def decode_lines(chunk: bytes) -> Iterator[Event]:
    """Yield the events of whole lines of a journal; skip lines that cannot be decoded.

    A line can be incomplete because the disk was full, or the writing process was killed.
    """
    for line in chunk.splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            yield decode_event(line)


class JournalReader:
    """Reader of one journal.

    Each call of `chunks` continues where the last call ended. Each call of another method reads the
    journal from its start or its end.

    Args:
        path: Path of the journal. A missing journal counts as empty.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at_bytes = 0

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes that were added since the last call, in chunks of whole lines.

        The first call yields all bytes. If the last line is still incomplete, a later call yields
        the line.
        """
        rest = b""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._at_bytes)
            while read := file.read(CHUNK_BYTES):
                whole, newline, end = read.rpartition(b"\n")
                if newline:
                    whole, rest = rest + whole + newline, end
                    self._at_bytes += len(whole)
                    yield whole
                else:
                    rest += end

    def started(self) -> float | None:
        """Return the time at which the run's hosts were ready; None if they are not ready yet.

        The unit is seconds since 1970.
        """
        return next((event.time for event in self._events_of("state", StateChanged)), None)

    def end(self, whole: bool = False) -> RunEnded | None:
        """Return the event of the run's end if it is the journal's last event, else None.

        Args:
            whole: Whether to search the whole journal if its last event is another event. If so,
                return the last event of a run's end in the journal. This search takes longer.
        """
        last = self.last()
        if isinstance(last, RunEnded) or not whole:
            return last if isinstance(last, RunEnded) else None
        return next(reversed(list(self._events_of("ended", RunEnded))), None)

    def last(self) -> Event | None:
        """Return the last readable event; None if there is none."""
        for line in self._lines_backwards():
            with contextlib.suppress(msgspec.DecodeError):
                return decode_event(line)
        return None

    def _events_of(self, kind: str, wanted: type[_T]) -> Iterator[_T]:
        """Yield the events of one kind, oldest first; do not decode events of other kinds.

        Decode only lines with the kind in their first 40 bytes. Skip lines that cannot be decoded.

        Args:
            kind: Value of the field `kind` in the JSON of these events.
            wanted: Class of these events.
        """
        mark = f'"{kind}"'.encode()
        for chunk in JournalReader(self._path).chunks():
            for line in chunk.splitlines() if mark in chunk else ():
                if mark in line[:40]:
                    with contextlib.suppress(msgspec.DecodeError):
                        if isinstance(event := decode_event(line), wanted):
                            yield event

    def _lines_backwards(self) -> Iterator[bytes]:
        """Yield the complete lines, newest first; read only as much of the journal as needed.

        Read parts from the end of the file, each twice as large as the part before. Ignore empty
        lines, and an incomplete last line.
        """
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            start, step = file.seek(0, os.SEEK_END), _TAIL_BYTES
            rest, is_torn = b"", True  # the part after the last newline is an incomplete line
            while start:
                end, start = start, max(0, start - step)
                file.seek(start)
                rest, *lines = (file.read(end - start) + rest).split(b"\n")
                if not start:
                    lines.insert(0, rest)
                if is_torn and lines:
                    lines.pop()
                    is_torn = False
                yield from (line for line in reversed(lines) if line)
                step *= 2
