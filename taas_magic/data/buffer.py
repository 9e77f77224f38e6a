"""What a fetcher has ready of one loader, who waits for what, and what is prepared next.

Bounded in bytes. What ranks wait for comes first, the connections in turn, each in the order of its
asking; when nobody waits, the fetcher works ahead on its own share. When memory is used up, it
writes what nobody has asked for to disk, or waits, except that a connection may always have the
batch that it has to send next: so a slow rank never starves another one.

What lies here of epochs that all ranks should be past is forgotten. A rank that is not gets the
same answers, prepared again.
"""

import itertools
import mmap
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from taas_magic.data import sharding
from taas_magic.data.dataset import Opened
from taas_magic.data.protocol import KINDS, Kind
from taas_magic.data.sharding import VOID
from taas_magic.data.worker import Key, Reply, WorkerHandle, spilled_file

_NEXT_EPOCH_BATCHES = 2
_KEEP_EPOCHS = 2
_KEEP_COUNTS = 1 << 14
_ANSWER_BYTES = 1280
"""What an answer in memory takes beside its data: of small batches, most."""


@dataclass
class Disk:
    """Where batches lie that memory has no room for.

    Attributes:
        is_full: Whether a worker found no room; nothing more is written then.
    """

    folder: Path
    limit_bytes: int
    used_bytes: int = 0
    is_full: bool = False

    @property
    def has_room(self) -> bool:
        """Whether more may be written."""
        return not self.is_full and self.used_bytes < self.limit_bytes


class Answer:
    """What a worker prepared: a batch, a value, a failure, or that there is nothing.

    Args:
        worker: Who prepared it; None: nobody, `text` is the body.
        text: A body that lies in no arena.
        disk: Where the body lies; None: in the worker's arena.

    Attributes:
        memory_bytes: What its body takes of memory.
    """

    __slots__ = ("_disk", "_holders", "_text", "_worker", "kind", "memory_bytes", "reply", "units")

    def __init__(
        self,
        reply: Reply,
        worker: WorkerHandle | None = None,
        text: bytes = b"",
        disk: Disk | None = None,
    ) -> None:
        self.reply, self._worker, self._text, self._disk = reply, worker, text, disk
        self.memory_bytes = reply.body_bytes
        if disk is not None:
            disk.used_bytes += reply.body_bytes
            self.memory_bytes = 0
        self.kind, self.units = KINDS[reply.kind], reply.units
        self._holders = 1

    @property
    def arena(self) -> WorkerHandle | None:
        """Whose memory it lies in, if a rank of this host may map that."""
        return self._worker if self._disk is None else None

    def body(self) -> memoryview:
        """Return its bytes."""
        if self._disk is not None:
            with self._file.open("rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if self._worker is None or not self.reply.body_bytes:
            return memoryview(self._text)
        return self._worker.memory.view(self.reply.offset, self.reply.body_bytes)

    @property
    def _file(self) -> Path:
        assert self._disk is not None and self._worker is not None
        return spilled_file(self._disk.folder, self._worker.pid, self.reply.number)

    @property
    def is_shared(self) -> bool:
        """Whether anybody else waits for it or is being sent it: then no rank may change it."""
        return self._holders > 1

    def hold(self) -> None:
        """Count one more who holds it."""
        self._holders += 1

    def release(self) -> None:
        """Count one less who holds it; the last one's release frees its memory."""
        self._holders -= 1
        if self._holders:
            return
        if self._disk is not None:
            self._file.unlink(missing_ok=True)
            self._disk.used_bytes -= self.reply.body_bytes
        elif self._worker is not None and self.reply.body_bytes:
            self._worker.frees.append(self.reply.offset)


@dataclass(frozen=True)
class FetcherShare:
    """Which slots of a loader are a fetcher's as long as nothing is broken.

    Attributes:
        index: The fetcher's place among the fetchers of the loader.
        stride: Distance of the slots that they are asked for (see `sharding.home`).
    """

    index: int = 0
    fetchers: int = 1
    workers: int = 1
    stride: int = 1
    first: int = 0
    units: int | None = None

    def has(self, slot: int, streams: int | None) -> bool:
        """Return whether a slot is the fetcher's."""
        ours = streams is not None or slot % self.stride == self.first
        return ours and self.home(slot, streams)[0] == self.index

    def home(self, slot: int, streams: int | None) -> tuple[int, int]:
        """Return the fetcher, and its worker, that prepare a slot."""
        return sharding.home(slot, streams, self.fetchers, self.workers, self.stride)


class Ahead:
    """The order in which a fetcher works ahead.

    Args:
        is_filled: Says whether there is as much as is to be ready before ranks ask.
    """

    def __init__(self, share: FetcherShare, is_filled: Callable[[], bool] = lambda: True) -> None:
        self._share, self._is_filled = share, is_filled
        self._is_asked = False
        self._opened: dict[int, Opened | None] = {}
        self._ends: dict[int, int] = {}
        self._epoch = self._slot = 0
        self._keys: Iterator[Key | None] | None = None

    def next(self) -> Key | None:
        """Return what to prepare; None: nothing, for now."""
        if self._keys is None:
            self._keys = self._walk(self._epoch, self._slot)
        return next(self._keys, None)

    def reached(self, epoch: int, slot: int) -> None:
        """Take note that a rank had to ask for a batch: what is worth preparing lies behind it."""
        self._is_asked = True
        if epoch > self._epoch:
            self._ends = {at: end for at, end in self._ends.items() if at >= epoch}
            self._opened = {at: opened for at, opened in self._opened.items() if at >= epoch}
        if epoch > self._epoch or (epoch == self._epoch and slot >= self._slot):
            self._epoch, self._slot, self._keys = epoch, slot + 1, None

    def opened(self, epoch: int, opened: Opened | None) -> None:
        """Take note of an epoch's length; None: its sampler raised."""
        self._opened[epoch] = opened

    def ended(self, epoch: int, slot: int) -> None:
        """Take note that there is no batch in a slot: not worth going on behind it."""
        self._ends[epoch] = min(slot, self._ends.get(epoch, slot))

    def _walk(self, epoch: int, first_slot: int) -> Iterator[Key | None]:
        left = self._share.units
        for ahead in itertools.count():
            while ahead > 1 and self._is_enough():
                yield None
            if epoch + ahead not in self._opened:
                yield Key(Kind.OPEN, epoch + ahead, 0)
            while epoch + ahead not in self._opened:
                yield None
            opened = self._opened[epoch + ahead]
            if opened is None:
                return
            done = 0
            for slot in self._slots(epoch + ahead, opened, 0 if ahead else first_slot):
                while ahead and done >= _NEXT_EPOCH_BATCHES and self._is_enough():
                    yield None
                if left is not None and slot >= left:
                    return
                yield Key(Kind.GET, epoch + ahead, slot)
                done += 1
            if ahead and not done:
                return
            end = self._ends.get(epoch + ahead, opened.batches)
            left = left if left is None or end is None else left - end

    def _is_enough(self) -> bool:
        return self._is_asked or self._is_filled()

    def _slots(self, epoch: int, opened: Opened, first_slot: int) -> Iterator[int]:
        """Yield the fetcher's slots of an epoch, as long as there are any."""
        share, streams = self._share, opened.streams
        if streams is not None and share.index >= streams:
            return
        for slot in itertools.count(first_slot):
            at_end = self._ends.get(epoch, opened.batches)
            if at_end is not None and slot >= at_end:
                return
            if share.has(slot, streams):
                yield slot


class Buffer:
    """Answers that are ready or wanted.

    Args:
        budget_bytes: How much memory they may take.
        home: The worker that has to prepare a key; None: any may.

    Attributes:
        ready_batches: How many of the answers are batches.
        ready_bytes: The memory of all of them.
    """

    def __init__(
        self,
        budget_bytes: int,
        ahead: Ahead,
        home: Callable[[Key], int | None] = lambda key: None,
    ) -> None:
        self._budget_bytes, self.ahead, self._home = budget_bytes, ahead, home
        self._ready: dict[Key, Answer] = {}
        self._unasked: dict[Key, None] = {}
        self._counts: OrderedDict[Key, int] = OrderedDict()
        self._waiting: dict[Key, set[Hashable]] = {}
        # By worker, so that one with nothing to do need not look through what others have.
        self._open: dict[int | None, OrderedDict[Hashable, dict[Key, None]]] = {}
        self._asker: dict[Key, tuple[int | None, Hashable]] = {}
        self._due: dict[Hashable, Key] = {}
        self._questions: dict[Key, None] = {}
        self._doing: set[Key] = set()
        self._again: deque[Key] = deque()
        self._latest_epoch = self._batch_bytes = 0
        self.ready_batches = self.ready_bytes = self._memory_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether memory is used up, by what is being prepared, too: each like the latest batch."""
        doing_bytes = len(self._doing) * self._batch_bytes
        return self._memory_bytes + doing_bytes >= self._budget_bytes

    @property
    def oldest_epoch(self) -> int:
        """The first epoch that ranks may still ask for."""
        return max(0, self._latest_epoch - _KEEP_EPOCHS + 1)

    @property
    def has_open(self) -> bool:
        """Whether anything that is wanted has not been given to a worker."""
        return bool(self._asker)

    def want(self, who: Hashable, key: Key, only_count: bool = False) -> None:
        """Take note that `who` waits for an answer, or only for what it counts."""
        if only_count and self.units(key) is not None:
            return
        if key.epoch > self._latest_epoch:
            self._latest_epoch = key.epoch
            oldest = self.oldest_epoch
            for old in [old for old in self._unasked if old.epoch < oldest]:
                self._remove(old)
            for old in [old for old in self._counts if old.epoch < oldest]:
                del self._counts[old]
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.add(who)
            return
        self._waiting[key] = {who}
        if key in self._ready:
            self._unasked.pop(key, None)
        elif key not in self._doing:
            self._reopen(who, key)

    def forget(self, who: Hashable) -> None:
        """Let `who` wait for nothing; what is prepared stays for whoever asks again."""
        self._due.pop(who, None)
        for key in [key for key, waiting in self._waiting.items() if who in waiting]:
            if self._leave(who, key) and key in self._ready:
                self._unasked[key] = None

    def take(self, who: Hashable, key: Key) -> Answer | None:
        """Return the answer that `who` sends next; it is held for the caller, who releases it.

        Returns:
            None as long as it is not ready.
        """
        answer = self._ready.get(key)
        if answer is None:
            self._stand_by(who, key)
            return None
        answer.hold()
        if self._leave(who, key):
            self._remove(key)
        return answer

    def count(self, who: Hashable, key: Key) -> int | None:
        """Return what the batch that `who` asks for next counts (VOID: none); None: not known."""
        units = self.units(key)
        if units is None:
            self._stand_by(who, key)
            return None
        if self._leave(who, key) and key in self._ready:
            self._unasked[key] = None
        return units

    def units(self, key: Key) -> int | None:
        """Return what a batch counts, also of one that lies here no more; None: not known."""
        answer = self._ready.get(key)
        return self._counts.get(key) if answer is None else answer.units

    def choose(self, worker: int, follows: Callable[[Key], bool] | None = None) -> Key | None:
        """Return what a worker is to prepare now; it counts as being done from here on.

        Args:
            follows: Whether it can without going back in a stream; None: it always can.
        """
        if not self._asker:
            return None
        if is_full := self.is_full:
            self.make_room()
            is_full = self.is_full
        key = self._due_of(worker) if is_full else self._wanted_of(worker, follows)
        if key is not None:
            self._close_key(key)
            if key.kind is Kind.GET:
                self.ahead.reached(key.epoch, key.slot)
            self._doing.add(key)
        return key

    def choose_ahead(self) -> Key | None:
        """Return what to prepare when nobody waits; it counts as being done from here on."""
        while (key := self._again.popleft() if self._again else self.ahead.next()) is not None:
            if self.begin(key):
                return key
        return None

    def begin(self, key: Key) -> bool:
        """Have a worker prepare a key that nobody asked it for; return False if it need not."""
        if key in self._ready or key in self._doing or key in self._counts or key in self._asker:
            return False
        self._doing.add(key)
        return True

    def postpone(self, key: Key) -> None:
        """Let a chosen key wait for its own worker, which has to `begin` it."""
        self._doing.discard(key)

    def put(self, key: Key, answer: Answer) -> set[Hashable]:
        """Lay an answer ready; return who waits for it."""
        self._doing.discard(key)
        if key.kind is Kind.GET and not key.detail:
            self._counts[key] = answer.units
            if len(self._counts) > _KEEP_COUNTS:
                self._counts.popitem(last=False)
            if answer.units == VOID:
                self.ahead.ended(key.epoch, key.slot)
        if key.kind is Kind.GET:
            self._batch_bytes = answer.memory_bytes or self._batch_bytes
        self._ready[key] = answer
        self._tally(key, answer, 1)
        waiting = self._waiting.get(key)
        if waiting is None:
            self._unasked[key] = None
            return set()
        return waiting

    def lost(self, key: Key) -> None:
        """Take note that who was preparing a key is gone."""
        self._doing.discard(key)
        waiting = self._waiting.get(key)
        if waiting:
            self._reopen(next(iter(waiting)), key, at_once=True)
        elif key.kind is Kind.GET:
            self._again.append(key)

    def make_room(self) -> None:
        """Throw away what nobody has asked for, the latest first: it can be prepared again."""
        for key in sorted(self._unasked, reverse=True):
            if not self.is_full:
                return
            if self._ready[key].memory_bytes:
                self._counts.pop(key, None)
                self._remove(key)

    def _stand_by(self, who: Hashable, key: Key) -> None:
        """Note that `who` can send nothing before `key`, which may have been here and forgotten."""
        self.want(who, key)
        self._due[who] = key

    def _wanted_of(self, worker: int, follows: Callable[[Key], bool] | None) -> Key | None:
        """Return what ranks want of a worker, the connections in turn."""
        queues = [self._open[home] for home in (worker, None) if home in self._open]
        if not queues:
            return None
        chosen = next(iter(next(iter(queues[0].values()))))
        if follows is not None and chosen.kind is Kind.GET:
            keys = (key for queue in queues for asked in queue.values() for key in asked)
            chosen = next(filter(follows, keys), chosen)
        home, who = self._asker[chosen]
        self._open[home].move_to_end(who)
        return chosen

    def _due_of(self, worker: int) -> Key | None:
        """Return what needs no room, or a connection waits for before all else."""
        for key in itertools.chain(self._due.values(), self._questions):
            if key in self._asker and self._asker[key][0] in (worker, None):
                return key
        return None

    def _reopen(self, who: Hashable, key: Key, at_once: bool = False) -> None:
        home = self._home(key)
        queue = self._open.get(home)
        if queue is None:
            queue = self._open[home] = OrderedDict()
        asked = queue.get(who)
        if asked is None or at_once:
            queue[who] = {key: None, **(asked or {})}
        else:
            asked[key] = None
        self._asker[key] = home, who
        if key.kind is not Kind.GET:
            self._questions[key] = None

    def _leave(self, who: Hashable, key: Key) -> bool:
        """Let `who` wait for `key` no more; return whether nobody else does."""
        waiting = self._waiting.get(key)
        if waiting is None:
            return True
        waiting.discard(who)
        if self._due and self._due.get(who) == key:
            del self._due[who]
        if waiting:
            if key in self._asker and self._asker[key][1] == who:
                self._close_key(key)
                self._reopen(next(iter(waiting)), key)
            return False
        del self._waiting[key]
        if key in self._asker:
            self._close_key(key)
        return True

    def _close_key(self, key: Key) -> None:
        """Take a key out of what has to be prepared: nobody waits any more, or somebody does it."""
        home, who = self._asker.pop(key)
        self._questions.pop(key, None)
        queue = self._open[home]
        del queue[who][key]
        if not queue[who]:
            del queue[who]
        if not queue:
            del self._open[home]

    def _remove(self, key: Key) -> None:
        self._unasked.pop(key, None)
        answer = self._ready.pop(key)
        self._tally(key, answer, -1)
        answer.release()

    def _tally(self, key: Key, answer: Answer, sign: int) -> None:
        size = answer.memory_bytes
        self.ready_bytes += sign * size
        self._memory_bytes += sign * (size + _ANSWER_BYTES if size else 0)
        self.ready_batches += sign * (key.kind is Kind.GET)


def keys_of(kind: Kind, epoch: int, slots: Iterable[int], detail: bytes = b"") -> list[Key]:
    """Return the keys that a frame of a rank asks for."""
    pure = Kind.GET if kind in (Kind.PEEK, Kind.GIVEN) else kind
    return [Key(pure, epoch, slot, detail) for slot in slots]
