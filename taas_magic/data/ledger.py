"""What this rank was handed, on disk as it happens: the proof that nothing came twice.

One file for each rank and generation, mapped into memory; a line of it is one pass over a loader,
and its counter is raised in place before the cell sees a batch. That costs no system call, and what
was counted survives whatever ends the process.
"""

import json
import mmap
import os
import struct
from pathlib import Path

from taas_magic.data.audit import Handed

_LINE_BYTES = 512
_COUNT = struct.Struct("<QI")
_GROW_LINES = 64


class Ledger:
    """One rank's ledger of one generation; writes. Several passes may be under way at once.

    Args:
        folder: The run's folder of ledgers.
        generation: Which attempt of the run.
        rank: The rank.
    """

    def __init__(self, folder: Path, generation: int, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = (folder / f"ledger-{generation}-{rank}").open("w+b")
        self._lines = 0
        self._grow()

    def begin(self, line: Handed) -> int:
        """Begin a pass; returns the number of its line."""
        if (self._lines + 1) * _LINE_BYTES > len(self._map):
            self._grow()
        text = json.dumps(line[:-1]).encode()
        at = self._lines * _LINE_BYTES
        self._map[at + _COUNT.size : at + _COUNT.size + len(text)] = text
        _COUNT.pack_into(self._map, at, line.batches, len(text))
        self._lines += 1
        return self._lines - 1

    def hand(self, line: int) -> None:
        """One batch more was handed out in this pass."""
        at = line * _LINE_BYTES
        count, size = _COUNT.unpack_from(self._map, at)
        _COUNT.pack_into(self._map, at, count + 1, size)

    def close(self) -> None:
        """Close the file."""
        self._map.close()
        self._file.close()

    def _grow(self) -> None:
        lines = self._lines + _GROW_LINES
        os.ftruncate(self._file.fileno(), lines * _LINE_BYTES)
        self._map = mmap.mmap(self._file.fileno(), lines * _LINE_BYTES)


def read(folder: Path) -> list[Handed]:
    """Return the lines of all ranks and generations of a run, for `audit.audit`."""
    handed = []
    for file in sorted(folder.glob("ledger-*")):
        data = file.read_bytes()
        for at in range(0, len(data), _LINE_BYTES):
            count, size = _COUNT.unpack_from(data, at)
            if size:
                text = data[at + _COUNT.size : at + _COUNT.size + size]
                handed.append(Handed._make([*json.loads(text), count]))
    return handed
