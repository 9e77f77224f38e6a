"""Who waits for which answers of a lane, and which of them is prepared next.

Connections take turns, each in the order of its asking. Knows nothing of threads: the shelf's lock
is around every call.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator

from taas_magic.data.stock import Key


class Wanted:
    """Questions that connections wait for.

    Args:
        follows: Whether a batch can be prepared without going back in its stream; None: any can.
    """

    def __init__(self, follows: Callable[[int, int], bool] | None = None) -> None:
        self._follows = follows
        self._waiting: dict[Key, set[Hashable]] = {}
        self._open: OrderedDict[Hashable, dict[Key, None]] = OrderedDict()
        self._asker: dict[Key, Hashable] = {}
        self._due: dict[Hashable, Key] = {}

    def __contains__(self, key: Key) -> bool:
        """Whether anyone waits for this answer."""
        return key in self._waiting

    def __iter__(self) -> Iterator[Key]:
        return iter(self._waiting)

    def __len__(self) -> int:
        """How many answers are waited for."""
        return len(self._waiting)

    @property
    def has_open(self) -> bool:
        """Whether anything is to be prepared."""
        return bool(self._open)

    def add(self, who: Hashable, key: Key, is_here: bool) -> None:
        """`who` waits for `key`, which somebody has to prepare unless it is here or on its way."""
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.add(who)
            return
        self._waiting[key] = {who}
        if not is_here:
            self._open.setdefault(who, {})[key] = None
            self._asker[key] = who

    def leave(self, who: Hashable, key: Key) -> bool:
        """`who` waits for `key` no more; returns whether nobody else does."""
        waiting = self._waiting.get(key)
        if waiting is None:
            return True
        waiting.discard(who)
        if waiting:
            return False
        del self._waiting[key]
        if key in self._asker:
            self._close(key)
        return True

    def forget(self, who: Hashable) -> Iterable[Key]:
        """`who` waits for nothing any more; returns what nobody else waits for."""
        self._due.pop(who, None)
        keys = [key for key, waiting in self._waiting.items() if who in waiting]
        return [key for key in keys if self.leave(who, key)]

    def stand_by(self, who: Hashable, key: Key) -> None:
        """`who` can send nothing before `key`."""
        self._due[who] = key

    def choose(self, only_due: bool) -> Key | None:
        """What to prepare now, which counts as being on its way from here on.

        Args:
            only_due: Only what somebody stands by for.
        """
        keys: Iterator[Key] = (key for keys in self._open.values() for key in keys)
        if only_due:
            keys = (key for key in keys if self._is_due(key))
        chosen = next(keys, None)
        if chosen is not None and self._follows is not None:
            keys = itertools.chain((chosen,), keys)
            keys = (key for key in keys if self._follows(key.epoch, key.slot))
            chosen = next(keys, chosen)
        if chosen is not None:
            self._open.move_to_end(self._asker[chosen])
            self._close(chosen)
        return chosen

    def _is_due(self, key: Key) -> bool:
        return any(self._due.get(who) == key for who in self._waiting[key])

    def _close(self, key: Key) -> None:
        """Nobody has to prepare `key` any more."""
        who = self._asker.pop(key)
        del self._open[who][key]
        if not self._open[who]:
            del self._open[who]
