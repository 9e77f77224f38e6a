"""What a lane has prepared and is asked to prepare: bounded in bytes, shared by its threads.

One thread prepares (`next`, `put`), one thread for each connection asks (`want`, `take`). What is
asked for comes first, the connections in turn, each in the order of its asking; when nothing is
asked for, the lane works ahead on its own share. When the memory budget is used up the lane lays on
disk what nobody has asked for, or it waits, except that a connection with nothing to send may
always have its next batch: so a slow rank never starves another one.

What lies here of epochs that all ranks should be past is forgotten. A rank that is not gets the
same answers, prepared again.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from taas_magic.data.disk import Disk, Item, NoDisk
from taas_magic.data.wire import Kind

_KEEP_COUNTS = 1 << 14
_KEEP_EPOCHS = 2
_ITEM_BYTES = 1280
"""What an answer in memory takes beside its data: of small batches, most."""
_MOMENT_S = 0.05


class Key(NamedTuple):
    """A pure question: GET (a batch by the lane's own order), or OPEN, SAMPLE, ORDER, STATE.

    `detail` is what else the question says: given indices, the index of a sample, a state.
    """

    kind: Kind
    epoch: int
    slot: int
    detail: bytes = b""


class Shelf:
    """The lane's prepared and wanted answers.

    Args:
        budget_bytes: How much prepared data may wait in memory.
        follows: Whether a batch can be prepared without going back in its stream.
        is_careful: Whether what is wanted and ready has a moment to be sent before the next is
            prepared: if that one ends the process, nothing else is lost with it.
        on_idle: Called before `next` waits.
        disk: Where answers lie that nobody has asked for and that memory has no room for.
    """

    def __init__(
        self,
        budget_bytes: int,
        follows: Callable[[int, int], bool] = lambda epoch, slot: True,
        is_careful: bool = False,
        on_idle: Callable[[], None] = lambda: None,
        disk: Disk | None = None,
    ) -> None:
        self._budget_bytes, self._follows, self._is_careful = budget_bytes, follows, is_careful
        self._on_idle, self._disk = on_idle, disk or NoDisk()
        self._changed = threading.Condition()
        self._waiting: dict[Key, set[Hashable]] = {}
        self._open: OrderedDict[Hashable, dict[Key, None]] = OrderedDict()
        self._asker: dict[Key, Hashable] = {}
        self._ready: dict[Key, Item] = {}
        self._unasked: dict[Key, None] = {}
        self._to_send: Counter[Hashable] = Counter()
        self._taken: Counter[Hashable] = Counter()
        self._counts: OrderedDict[Key, int] = OrderedDict()
        self._ahead: Iterator[Key] = iter(())
        self._doing: Key | None = None
        self._closed = False
        self._latest_epoch = self._memory_bytes = 0
        self.ready_bytes = self.ready_batches = 0

    def want(self, who: Hashable, key: Key, only_count: bool = False) -> None:
        """Take note that a connection waits for an answer (or only for what it counts)."""
        with self._changed:
            if only_count and key in self._counts:
                return
            if key.epoch > self._latest_epoch:
                self._latest_epoch = key.epoch
                self._forget_before(key.epoch - _KEEP_EPOCHS + 1)
            waiting = self._waiting.setdefault(key, set())
            if who in waiting:
                return
            waiting.add(who)
            if key in self._ready:
                self._to_send[who] += 1
                self._unasked.pop(key, None)
            elif len(waiting) == 1 and key != self._doing:
                self._open.setdefault(who, {})[key] = None
                self._asker[key] = who
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
                item = self._disk.fetch(item)
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
            # It may have been known when it was asked for, and be forgotten since.
            self.want(who, key, only_count=True)
            if timeout_s:
                self._changed.wait_for(lambda: self._units(key) is not None, timeout_s)
            units = self._units(key)
            if units is not None:
                self._leave(who, key)
            return units

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
                self._on_idle()
                self._changed.wait()
            return None

    def wants(self, key: Key) -> bool:
        """Whether anyone waits for this answer."""
        return key in self._waiting

    def put(self, key: Key, item: Item) -> None:
        """Lay an answer on the shelf."""
        is_over = self._memory_bytes + _memory_of(item) > self._budget_bytes
        if is_over and key not in self._waiting:
            item = self._disk.lay(item) or item
        with self._changed:
            self._doing = None
            if key.kind is Kind.GET:
                self._counts[key] = item.units
                if len(self._counts) > _KEEP_COUNTS:
                    self._counts.popitem(last=False)
            self._lay(key, item)
            waiting = self._waiting.get(key)
            if waiting:
                self._to_send.update(waiting)
            else:
                self._unasked[key] = None
            self._changed.notify_all()

    @property
    def entries(self) -> int:
        """How many answers, counts and questions are remembered."""
        with self._changed:
            return len(self._ready) + len(self._counts) + len(self._waiting)

    def close(self) -> None:
        """Let the preparing thread go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _has_gone(self) -> bool:
        return not any((*self._to_send.values(), *self._taken.values()))

    def _units(self, key: Key) -> int | None:
        item = self._ready.get(key)
        return self._counts.get(key) if item is None else item.units

    def _forget_before(self, epoch: int) -> None:
        for key in [key for key in self._unasked if key.epoch < epoch]:
            self._remove(key)
        for key in [key for key in self._counts if key.epoch < epoch]:
            del self._counts[key]

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
            self._close(key)
            if key in self._ready:
                self._unasked[key] = None

    def _close(self, key: Key) -> None:
        """Nobody has to prepare `key` any more."""
        who = self._asker.pop(key, None)
        if who is not None:
            del self._open[who][key]
            if not self._open[who]:
                del self._open[who]

    def _lay(self, key: Key, item: Item) -> None:
        self._ready[key] = item
        self._memory_bytes += _memory_of(item)
        self.ready_bytes += item.size
        self.ready_batches += key.kind is Kind.GET

    def _remove(self, key: Key) -> None:
        self._unasked.pop(key, None)
        item = self._ready.pop(key)
        self._disk.drop(item)
        self._memory_bytes -= _memory_of(item)
        self.ready_bytes -= item.size
        self.ready_batches -= key.kind is Kind.GET

    def _choose(self) -> Key | None:
        if not self._open:
            return self._first_ahead()
        if self._is_full():
            self._make_room()
        full = self._is_full()
        chosen = None
        for key in (key for keys in self._open.values() for key in keys):
            if full and not self._starves(key):
                continue
            if self._follows(key.epoch, key.slot):
                chosen = key
                break
            chosen = chosen or key
        if chosen is not None:
            who = self._asker[chosen]
            self._open.move_to_end(who)
            self._close(chosen)
        return chosen

    def _is_full(self) -> bool:
        return self._memory_bytes >= self._budget_bytes

    def _starves(self, key: Key) -> bool:
        """Whether someone who waits for `key` has nothing else on the shelf."""
        return any(not self._to_send[who] for who in self._waiting[key])

    def _make_room(self) -> None:
        """Lay on disk what nobody has asked for, the latest first, or throw it away.

        It can be prepared again.
        """
        for key in sorted(self._unasked, reverse=True):
            if not self._ready[key].size:
                continue
            laid = self._disk.lay(self._ready[key])
            self._remove(key)
            if laid is not None:
                self._lay(key, laid)
                self._unasked[key] = None
            if not self._is_full():
                return

    def _first_ahead(self) -> Key | None:
        if self._is_full() and not self._disk.has_room:
            return None
        for key in self._ahead:
            if key not in self._ready and key not in self._counts:
                return key
        return None


def _memory_of(item: Item) -> int:
    """What an item takes; on disk, none that is worth counting."""
    return item.size + _ITEM_BYTES if item.size else 0
