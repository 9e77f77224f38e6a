"""What a lane has prepared and is asked to prepare: bounded in bytes, shared by its threads.

One thread prepares (`next`, `put`), one thread for each connection asks (`want`, `take`). What is
asked for comes first, in the order of asking; when nothing is asked for, the lane works ahead on
its own share. When the memory budget is used up the lane waits, except that a connection with
nothing to send may always have its next batch: so a slow rank never starves another one.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple, Protocol

from taas_magic.data.wire import Kind

_KEEP_COUNTS = 100_000
_MOMENT_S = 0.05


class Key(NamedTuple):
    """A pure question: GET (a batch by the lane's own order), or OPEN, SAMPLE, ORDER.

    `detail` is what else the question says: given indices, or the index of a sample.
    """

    kind: Kind
    epoch: int
    slot: int
    detail: bytes = b""


class Item(Protocol):
    """An answer on the shelf."""

    @property
    def size(self) -> int:
        """Bytes of memory that it holds."""

    @property
    def units(self) -> int:
        """What it counts in `--units`; VOID for a slot without a batch."""


class Shelf:
    """The lane's prepared and wanted answers.

    Args:
        budget_bytes: How much prepared data may wait in memory.
        follows: Whether a batch can be prepared without going back in its stream.
        is_careful: Whether what is wanted and ready has a moment to be sent before the next is
            prepared: if that one ends the process, nothing else is lost with it.
    """

    def __init__(
        self,
        budget_bytes: int,
        follows: Callable[[int, int], bool] = lambda epoch, slot: True,
        is_careful: bool = False,
    ) -> None:
        self._budget_bytes, self._follows, self._is_careful = budget_bytes, follows, is_careful
        self._changed = threading.Condition()
        self._waiting: dict[Key, set[Hashable]] = {}
        self._open: OrderedDict[Key, None] = OrderedDict()
        self._ready: dict[Key, Item] = {}
        self._unasked: dict[Key, None] = {}
        self._to_send: Counter[Hashable] = Counter()
        self._taken: Counter[Hashable] = Counter()
        self._counts: OrderedDict[Key, int] = OrderedDict()
        self._ahead: Iterator[Key] = iter(())
        self._doing: Key | None = None
        self._closed = False
        self.ready_bytes = 0

    @property
    def ready_batches(self) -> int:
        """How many answers are prepared and not sent."""
        return len(self._ready)

    def want(self, who: Hashable, key: Key, only_count: bool = False) -> None:
        """Take note that a connection waits for an answer (or only for what it counts)."""
        with self._changed:
            if only_count and key in self._counts:
                return
            waiting = self._waiting.setdefault(key, set())
            if who in waiting:
                return
            waiting.add(who)
            if key in self._ready:
                self._to_send[who] += 1
                self._unasked.pop(key, None)
            elif len(waiting) == 1 and key != self._doing:
                self._open[key] = None
                self._changed.notify_all()

    def gone(self, who: Hashable) -> None:
        """Forget what a connection waited for; what is prepared stays for whoever asks again."""
        with self._changed:
            for key in [key for key, waiting in self._waiting.items() if who in waiting]:
                self._leave(who, key)
            del self._to_send[who], self._taken[who]
            self._changed.notify_all()

    def take(self, who: Hashable, key: Key, timeout_s: float) -> Item | None:
        """Return the answer, and take it from the shelf unless another connection waits for it.

        Whoever takes it says `sent` when it has gone.

        Returns:
            None when it is not there within `timeout_s`.
        """
        with self._changed:
            if key not in self._ready and timeout_s:
                self._changed.wait_for(lambda: key in self._ready, timeout_s)
            item = self._ready.get(key)
            if item is not None:
                self._leave(who, key)
                self._taken[who] += 1
                if key in self._unasked:
                    self._remove(key)
                    self._changed.notify_all()
            return item

    def sent(self, who: Hashable) -> None:
        """Everything that a connection has taken has gone."""
        self._taken[who] = 0
        if self._is_careful:
            with self._changed:
                self._changed.notify_all()

    def count(self, who: Hashable, key: Key, timeout_s: float) -> int | None:
        """What a batch counts (VOID: there is none), without taking it.

        Returns:
            None when it is not known within `timeout_s`.
        """
        with self._changed:
            if key not in self._counts and timeout_s:
                self._changed.wait_for(lambda: key in self._counts, timeout_s)
            if key in self._counts:
                self._leave(who, key)
            return self._counts.get(key)

    def work_ahead(self, keys: Iterator[Key]) -> None:
        """Say what to prepare, in this order, when nobody waits for anything."""
        with self._changed:
            self._ahead = keys
            self._changed.notify_all()

    def next(self) -> Key | None:
        """Return what to prepare now; waits until there is something and there is room.

        Returns:
            None when the shelf is closed.
        """
        with self._changed:
            while not self._closed:
                if self._is_careful:
                    # Not for long: what is ready may have to go behind what is not.
                    self._changed.wait_for(self._has_gone, _MOMENT_S)
                key = self._choose()
                if key is not None:
                    self._doing = key
                    return key
                self._changed.wait()
            return None

    def wants(self, key: Key) -> bool:
        """Whether anyone waits for this answer."""
        return key in self._waiting

    def put(self, key: Key, item: Item) -> None:
        """Lay an answer on the shelf."""
        with self._changed:
            self._doing = None
            if key.kind is Kind.GET:
                self._counts[key] = item.units
                if len(self._counts) > _KEEP_COUNTS:
                    self._counts.popitem(last=False)
            self._ready[key] = item
            self.ready_bytes += item.size
            waiting = self._waiting.get(key)
            if waiting:
                self._to_send.update(waiting)
            else:
                self._unasked[key] = None
            self._changed.notify_all()

    def close(self) -> None:
        """Let the preparing thread go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _has_gone(self) -> bool:
        return not any((*self._to_send.values(), *self._taken.values()))

    def _leave(self, who: Hashable, key: Key) -> None:
        """`who` waits for `key` no more."""
        waiting = self._waiting.get(key)
        if waiting is None or who not in waiting:
            return
        waiting.remove(who)
        if key in self._ready:
            self._to_send[who] -= 1
        if not waiting:
            del self._waiting[key]
            self._open.pop(key, None)
            if key in self._ready:
                self._unasked[key] = None

    def _remove(self, key: Key) -> None:
        self._unasked.pop(key, None)
        self.ready_bytes -= self._ready.pop(key).size

    def _choose(self) -> Key | None:
        if not self._open:
            return self._first_ahead()
        if self.ready_bytes >= self._budget_bytes:
            self._make_room()
        full = self.ready_bytes >= self._budget_bytes
        chosen = None
        for key in self._open:
            if full and not self._starves(key):
                continue
            if self._follows(key.epoch, key.slot):
                chosen = key
                break
            chosen = chosen or key
        if chosen is not None:
            del self._open[chosen]
        return chosen

    def _starves(self, key: Key) -> bool:
        """Whether someone who waits for `key` has nothing else on the shelf."""
        return any(not self._to_send[who] for who in self._waiting[key])

    def _make_room(self) -> None:
        """Throw away what nobody has asked for, the latest first; it can be prepared again."""
        for key in sorted(self._unasked, reverse=True):
            self._remove(key)
            if self.ready_bytes < self._budget_bytes:
                return

    def _first_ahead(self) -> Key | None:
        if self.ready_bytes >= self._budget_bytes:
            return None
        for key in self._ahead:
            if key not in self._ready and key not in self._counts:
                return key
        return None
