"""What a lane has prepared and is asked to prepare: bounded in bytes, shared by its threads.

One thread prepares (`next`, `put`), one thread for each connection asks (`want`, `take`). What is
asked for comes first, the connections in turn, each in the order of its asking; when nothing is
asked for, the lane works ahead on its own share. When the memory budget is used up the lane lays on
disk what nobody has asked for, or it waits, except that a connection may always have the batch that
it has to send next: so a slow rank never starves another one.

What lies here of epochs that all ranks should be past is forgotten. A rank that is not gets the
same answers, prepared again.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator

from taas_magic.data.disk import Disk, Item, NoDisk
from taas_magic.data.stock import Key, Stock

_KEEP_EPOCHS = 2
_MOMENT_S = 0.05


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
        self._follows, self._is_careful, self._on_idle = follows, is_careful, on_idle
        self._disk = disk or NoDisk()
        self._stock = Stock(budget_bytes, self._disk)
        self._changed = threading.Condition()
        self._waiting: dict[Key, set[Hashable]] = {}
        self._open: OrderedDict[Hashable, dict[Key, None]] = OrderedDict()
        self._asker: dict[Key, Hashable] = {}
        self._due: dict[Hashable, Key] = {}
        self._to_send: Counter[Hashable] = Counter()
        self._taken: Counter[Hashable] = Counter()
        self._ahead: Iterator[Key] = iter(())
        self._doing: Key | None = None
        self._closed = False
        self._latest_epoch = 0

    def want(self, who: Hashable, key: Key, only_count: bool = False) -> None:
        """Take note that a connection waits for an answer (or only for what it counts)."""
        with self._changed:
            if only_count and self._stock.counts(key):
                return
            if key.epoch > self._latest_epoch:
                self._latest_epoch = key.epoch
                self._stock.forget_before(self.oldest_epoch)
            waiting = self._waiting.setdefault(key, set())
            if who in waiting:
                return
            waiting.add(who)
            if key in self._stock:
                self._to_send[who] += 1
                self._stock.set_asked(key, True)
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
            self._due.pop(who, None)
            self._changed.notify_all()

    def take(self, who: Hashable, key: Key, timeout_s: float) -> Item | None:
        """Return the answer, and take it from the shelf unless another connection waits for it.

        Whoever takes it says `sent` when it has gone.

        Returns:
            None when it is not there within `timeout_s`.
        """
        with self._changed:
            self._stand_by(who, key, lambda: key in self._stock, timeout_s)
            item = self._stock.get(key)
            if item is not None:
                self._leave(who, key)
                self._taken[who] += 1
                if self._stock.hand_over(key):
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
            self._stand_by(who, key, lambda: self._stock.units(key) is not None, timeout_s)
            units = self._stock.units(key)
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
        if key not in self._waiting and not self._stock.holds(item):
            item = self._disk.lay(item) or item
        with self._changed:
            self._doing = None
            self._stock.lay(key, item)
            waiting = self._waiting.get(key, ())
            self._to_send.update(waiting)
            self._stock.set_asked(key, bool(waiting))
            self._changed.notify_all()

    @property
    def ready_bytes(self) -> int:
        """Memory of what is ready."""
        return self._stock.ready_bytes

    @property
    def ready_batches(self) -> int:
        """How many batches are ready."""
        return self._stock.ready_batches

    @property
    def oldest_epoch(self) -> int:
        """The first epoch that ranks may still ask for."""
        return max(0, self._latest_epoch - _KEEP_EPOCHS + 1)

    @property
    def entries(self) -> int:
        """How many answers, counts and questions are remembered."""
        with self._changed:
            return len(self._stock) + len(self._waiting)

    def close(self) -> None:
        """Let the preparing thread go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _has_gone(self) -> bool:
        return not any((*self._to_send.values(), *self._taken.values()))

    def _stand_by(
        self, who: Hashable, key: Key, is_there: Callable[[], bool], timeout_s: float
    ) -> None:
        """Wait for what a connection sends next; it may have been there once, and be forgotten."""
        if is_there():
            return
        self.want(who, key)
        self._due[who] = key
        if self._stock.is_full:
            self._changed.notify_all()
        self._changed.wait_for(is_there, timeout_s)

    def _leave(self, who: Hashable, key: Key) -> None:
        """`who` waits for `key` no more."""
        waiting = self._waiting.get(key)
        if waiting is None or who not in waiting:
            return
        waiting.remove(who)
        if key in self._stock:
            self._to_send[who] -= 1
        if not waiting:
            del self._waiting[key]
            self._close(key)
            if key in self._stock:
                self._stock.set_asked(key, False)

    def _close(self, key: Key) -> None:
        """Nobody has to prepare `key` any more."""
        who = self._asker.pop(key, None)
        if who is not None:
            del self._open[who][key]
            if not self._open[who]:
                del self._open[who]

    def _choose(self) -> Key | None:
        if not self._open:
            return self._first_ahead()
        if self._stock.is_full:
            self._stock.make_room()
        full = self._stock.is_full
        chosen = None
        for key in (key for keys in self._open.values() for key in keys):
            if full and not self._is_due(key):
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

    def _is_due(self, key: Key) -> bool:
        """Whether someone can send nothing before this."""
        return any(self._due.get(who) == key for who in self._waiting[key])

    def _first_ahead(self) -> Key | None:
        if not self._stock.may_grow:
            return None
        for key in self._ahead:
            if key not in self._stock and not self._stock.counts(key):
                return key
        return None
