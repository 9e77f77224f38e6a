"""What lies ready on a lane's shelf, in memory and on disk, and what is known of what lay there.

Knows nothing of who asks and of threads: the shelf's lock is around every call.
"""

from collections import OrderedDict
from typing import NamedTuple

from taas_magic.data.disk import Disk, Item
from taas_magic.data.wire import Kind

_KEEP_COUNTS = 1 << 14
_GAP = 7 / 8
_ITEM_BYTES = 1280
"""What an answer in memory takes beside its data: of small batches, most."""


class Key(NamedTuple):
    """A pure question: GET (a batch by the lane's own order), or OPEN, SAMPLE, ORDER, STATE.

    `detail` is what else the question says: given indices, the index of a sample, a state.
    """

    kind: Kind
    epoch: int
    slot: int
    detail: bytes = b""


class Stock:
    """Answers that are ready.

    Args:
        budget_bytes: How much of them may lie in memory.
        disk: Where answers lie that nobody has asked for and that memory has no room for.

    Attributes:
        ready_bytes: Their memory.
        ready_batches: How many of them are batches.
    """

    def __init__(self, budget_bytes: int, disk: Disk) -> None:
        self._budget_bytes, self._disk = budget_bytes, disk
        self._ready: dict[Key, Item] = {}
        self._unasked: dict[Key, None] = {}
        self._counts: OrderedDict[Key, int] = OrderedDict()
        self._memory_bytes = self.ready_bytes = self.ready_batches = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._ready

    def __len__(self) -> int:
        """How many answers and counts are remembered."""
        return len(self._ready) + len(self._counts)

    @property
    def is_full(self) -> bool:
        """Whether memory is used up."""
        return self._memory_bytes >= self._budget_bytes

    @property
    def has_gap(self) -> bool:
        """Whether there is room that is worth waking up for."""
        return self._memory_bytes <= self._budget_bytes * _GAP

    @property
    def may_grow(self) -> bool:
        """Whether there is room for what nobody has asked for."""
        return not self.is_full or self._disk.has_room

    def holds(self, item: Item) -> bool:
        """Whether memory has room for one more."""
        return self._memory_bytes + _memory_of(item) <= self._budget_bytes

    def get(self, key: Key) -> Item | None:
        """The answer, wherever it lies; it stays there."""
        item = self._ready.get(key)
        return None if item is None else self._disk.fetch(item)

    def counts(self, key: Key) -> bool:
        """Whether it is remembered what a batch counts, which may lie here no more."""
        return key in self._counts

    def units(self, key: Key) -> int | None:
        """What a batch counts; None where that is not known (any more)."""
        item = self._ready.get(key)
        return self._counts.get(key) if item is None else item.units

    def lay(self, key: Key, item: Item) -> None:
        """Lay an answer here."""
        if key.kind is Kind.GET:
            self._counts[key] = item.units
            if len(self._counts) > _KEEP_COUNTS:
                self._counts.popitem(last=False)
        self._ready[key] = item
        self._tally(key, item, 1)

    def set_asked(self, key: Key, asked: bool) -> None:
        """Say whether anyone waits for an answer; one that nobody waits for may make room."""
        if asked:
            self._unasked.pop(key, None)
        elif key in self._ready:
            self._unasked[key] = None

    def forget_before(self, epoch: int) -> None:
        """Forget what nobody has asked for, and all counts, of earlier epochs."""
        for key in [key for key in self._unasked if key.epoch < epoch]:
            self.remove(key)
        for key in [key for key in self._counts if key.epoch < epoch]:
            del self._counts[key]

    def make_room(self) -> None:
        """Lay on disk what nobody has asked for, the latest first, or throw it away.

        It can be prepared again.
        """
        for key in sorted(self._unasked, reverse=True):
            if not self._ready[key].size:
                continue
            laid = self._disk.lay(self._ready[key])
            self.remove(key)
            if laid is not None:
                self.lay(key, laid)
                self._unasked[key] = None
            if not self.is_full:
                return

    def remove(self, key: Key) -> None:
        """Take an answer away."""
        self._unasked.pop(key, None)
        item = self._ready.pop(key)
        self._disk.drop(item)
        self._tally(key, item, -1)

    def _tally(self, key: Key, item: Item, sign: int) -> None:
        self._memory_bytes += sign * _memory_of(item)
        self.ready_bytes += sign * item.size
        self.ready_batches += sign * (key.kind is Kind.GET)


def _memory_of(item: Item) -> int:
    """What an item takes; on disk, none that is worth counting."""
    return item.size + _ITEM_BYTES if item.size else 0
