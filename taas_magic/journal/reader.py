"""Reads a run's journal: what was added since, its first and last events, from any process.

A journal may hold 256 MiB, most of it lines that ranks printed. So nothing here decodes an event
that nobody needs: the kind of an event is the beginning of its line.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from taas_magic.messages import Event, RunEnded, StateChanged, event_of

_T = TypeVar("_T", bound=Event)

CHUNK_BYTES = 1 << 18

_TAIL_BYTES = 1 << 16


class JournalReader:
    """Reads one journal from its start on, and then what is added to it.

    Args:
        path: The journal; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at_bytes = 0

    def chunks(self) -> Iterator[bytes]:
        """Yield what was added since the last call, in pieces of whole lines.

        A line that is still being written comes with a later call.
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
        """Return when the run's hosts were there; None before that."""
        return next((event.time for event in self._events_of("state", StateChanged)), None)

    def end(self, whole: bool = False) -> RunEnded | None:
        """Return the run's end, if that is the journal's last event.

        Args:
            whole: Whether to look for an end in all of the journal, which takes longer.
        """
        last = self.last()
        if isinstance(last, RunEnded) or not whole:
            return last if isinstance(last, RunEnded) else None
        return next(reversed(list(self._events_of("ended", RunEnded))), None)

    def last(self) -> Event | None:
        """Return the last event that can be read; None where there is none."""
        for line in self._lines_backwards():
            with contextlib.suppress(msgspec.DecodeError):
                return event_of(line)
        return None

    def _events_of(self, kind: str, wanted: type[_T]) -> Iterator[_T]:
        """Yield the events of a kind, in order; no others are decoded."""
        mark = f'"{kind}"'.encode()
        for chunk in JournalReader(self._path).chunks():
            for line in chunk.splitlines() if mark in chunk else ():
                if mark in line[:40]:
                    with contextlib.suppress(msgspec.DecodeError):
                        if isinstance(event := event_of(line), wanted):
                            yield event

    def _lines_backwards(self) -> Iterator[bytes]:
        """Yield the whole lines from the last one back; reads no more of the file than needed."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            start, step = file.seek(0, os.SEEK_END), _TAIL_BYTES
            rest, is_torn = b"", True  # what follows the last newline is still being written
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
