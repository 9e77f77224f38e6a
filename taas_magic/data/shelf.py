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
from collections.abc import Callable, Hashable, Iterable, Iterator

from taas_magic.data.bell import Bell
from taas_magic.data.disk import Disk, Item, NoDisk
from taas_magic.data.stock import Key, Stock
from taas_magic.data.wanted import Wanted

_KEEP_EPOCHS = 2
_MOMENT_S = 0.05


class Shelf:
    """The lane's prepared and wanted answers.

    Args:
        budget_bytes: How much prepared data may wait in memory.
        follows: Whether a batch can be prepared without going back in its stream; None: any can.
        is_careful: Whether what is wanted and ready has a moment to be sent before the next is
            prepared: if that one ends the process, nothing else is lost with it.
        on_idle: Called before `next` waits; may take what is ready. Returns for how many seconds to
            wait at most; None: until there is something to prepare.
        disk: Where answers lie that nobody has asked for and that memory has no room for.
    """

    def __init__(
        self,
        budget_bytes: int,
        follows: Callable[[int, int], bool] | None = None,
        is_careful: bool = False,
        on_idle: Callable[[], float | None] = lambda: None,
        disk: Disk | None = None,
    ) -> None:
        self._is_careful, self._on_idle = is_careful, on_idle
        self._disk = disk or NoDisk()
        self._stock, self._wanted = Stock(budget_bytes, self._disk), Wanted(follows)
        # Taken for every batch, and entered in C where a condition is entered in Python.
        self._lock = threading.RLock()
        self._work, self._laid = Bell(self._lock), Bell(self._lock)
        self._sending: set[Hashable] = set()
        self._ahead: Iterator[Key] = iter(())
        self._doing: Key | None = None
        self._closed = False
        self._latest_epoch = 0

    def want(self, who: Hashable, keys: Iterable[Key], only_count: bool = False) -> None:
        """Take note that a connection waits for answers (or only for what they count)."""
        with self._lock:
            for key in keys:
                if not only_count or not self._stock.counts(key):
                    self._want(who, key)

    def gone(self, who: Hashable) -> None:
        """Forget what a connection waited for; what is prepared stays for whoever asks again."""
        with self._lock:
            for key in self._wanted.forget(who):
                self._stock.set_asked(key, False)
            self._sending.discard(who)
            self._work.ring()

    def take(self, who: Hashable, key: Key, timeout_s: float) -> Item | None:
        """Return the answer, and take it from the shelf unless another connection waits for it.

        Whoever takes it says `sent` when it has gone.

        Returns:
            None when it is not there within `timeout_s`.
        """
        with self._lock:
            item = self._stock.get(key)
            if item is None:
                self._await(who, key, lambda: key in self._stock, timeout_s)
                item = self._stock.get(key)
                if item is None:
                    return None
            self._sending.add(who)
            if self._wanted.leave(who, key):
                self._stock.remove(key)
                if self._stock.has_gap:
                    self._work.ring()
            return item

    def sent(self, who: Hashable) -> None:
        """Everything that a connection has taken has gone."""
        with self._lock:
            self._sending.discard(who)
            if self._is_careful:
                self._work.ring()

    def count(self, who: Hashable, key: Key, timeout_s: float) -> int | None:
        """What a batch counts (VOID: there is none), without taking it.

        Returns:
            None when it is not known within `timeout_s`.
        """
        with self._lock:
            if not self._await(who, key, lambda: self._stock.units(key) is not None, timeout_s):
                return None
            if self._wanted.leave(who, key):
                self._stock.set_asked(key, False)
            return self._stock.units(key)

    def work_ahead(self, keys: Iterator[Key]) -> None:
        """Say what to prepare, in this order, when nobody waits for anything."""
        with self._lock:
            self._ahead = keys
            self._work.ring()

    def next(self) -> Key | None:
        """Return what to prepare now; waits until there is something and there is room.

        Returns:
            None when the shelf is closed.
        """
        has_rested, rest_s = False, None
        with self._lock:
            while not self._closed:
                if self._is_careful:
                    # Not for long: what is ready may have to go behind what is not.
                    self._work.wait_for(self._has_gone, _MOMENT_S)
                self._doing = self._choose()
                if self._doing is not None:
                    return self._doing
                if has_rested:
                    self._work.wait(rest_s)
                else:
                    rest_s = self._on_idle()
                has_rested = not has_rested
            return None

    def wants(self, key: Key) -> bool:
        """Whether anyone waits for this answer."""
        return key in self._wanted

    def put(self, key: Key, item: Item) -> None:
        """Lay an answer on the shelf."""
        if key not in self._wanted and not self._stock.holds(item):
            item = self._disk.lay(item) or item
        with self._lock:
            self._doing = None
            self._stock.lay(key, item)
            if key not in self._wanted:
                self._stock.set_asked(key, False)
            self._laid.ring()

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
        with self._lock:
            return len(self._stock) + len(self._wanted)

    def close(self) -> None:
        """Let the preparing thread go."""
        with self._lock:
            self._closed = True
            self._work.ring()

    def _want(self, who: Hashable, key: Key) -> None:
        if key.epoch > self._latest_epoch:
            self._latest_epoch = key.epoch
            self._stock.forget_before(self.oldest_epoch)
        is_here = key in self._stock
        self._wanted.add(who, key, is_here or key == self._doing)
        if is_here:
            self._stock.set_asked(key, True)
        else:
            self._work.ring()

    def _has_gone(self) -> bool:
        """Whether nothing that is ready and wanted has still to be sent."""
        return not self._sending and not any(key in self._stock for key in self._wanted)

    def _await(
        self, who: Hashable, key: Key, is_there: Callable[[], bool], timeout_s: float
    ) -> bool:
        """Wait for what a connection sends next; it may have been there once, and be forgotten."""
        if is_there():
            return True
        self._want(who, key)
        self._wanted.stand_by(who, key)
        if self._stock.is_full:
            self._work.ring()
        return timeout_s > 0 and self._laid.wait_for(is_there, timeout_s)

    def _choose(self) -> Key | None:
        if not self._wanted.has_open:
            return self._first_ahead()
        if self._stock.is_full:
            self._stock.make_room()
        return self._wanted.choose(only_due=self._stock.is_full)

    def _first_ahead(self) -> Key | None:
        if not self._stock.may_grow:
            return None
        for key in self._ahead:
            if key not in self._stock and not self._stock.counts(key):
                return key
        return None
