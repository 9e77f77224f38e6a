"""Small batches that were asked for one after the other and are alike: they share a header."""

from collections.abc import Sequence
from typing import NamedTuple

from taas_magic.data import wire
from taas_magic.data.checksum import combined
from taas_magic.data.sockets import Part
from taas_magic.data.wire import Flag, Frame, Kind

_MOST_BYTES = wire.CHUNK_BYTES - wire.HEADER_BYTES
_MOST_BATCHES = 16
"""A small batch that is kept keeps its whole group in memory."""


class Alike(NamedTuple):
    """What the header of a batch says besides its place, see `wire.Frame`."""

    epoch: int
    units: int
    head_bytes: int
    body_bytes: int
    order: int

    def frame(self, slot: int) -> Frame:
        """The header of the batch in a slot."""
        sizes = self.head_bytes, self.body_bytes
        return Frame(Kind.BATCH, self.epoch, slot, self.units, *sizes, order=self.order)


class Group:
    """Batches on their way into one frame.

    Args:
        slot: The first.
        alike: What all of them have in common.
        is_summed: Whether their checksums are to go along.
    """

    def __init__(self, slot: int, alike: Alike, is_summed: bool) -> None:
        self._slot, self._alike, self._flags = slot, alike, Flag.SUMMED if is_summed else 0
        self._most = min(_MOST_BATCHES, _MOST_BYTES // max(alike.body_bytes, 1))
        self._checksums: list[int] = []
        self._parts: list[Part] = []

    def takes(self, alike: Alike) -> bool:
        """Whether there is room for one more, which has this header."""
        return len(self._checksums) < self._most and alike == self._alike

    def add(self, parts: Sequence[Part], checksum: int) -> None:
        """Put in the next one: its body and the checksum of that."""
        self._checksums.append(checksum)
        self._parts += parts

    def sealed(self) -> list[Part]:
        """All of them behind their header."""
        frame, batches = self._alike.frame(self._slot), len(self._checksums)
        total = combined(self._checksums) if self._flags else 0
        frame = frame._replace(flags=self._flags, body_sum=total, batches=batches)
        return [wire.pack(frame), *self._parts]
