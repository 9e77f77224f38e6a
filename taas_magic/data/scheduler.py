"""What the workers of one loader do next, and what they have counted.

Runs in a fetcher's server, on its loop: told by the ranks' connections what is wanted (`buffer`),
it tells workers what to prepare (`workers`) and says whose answer has come.
"""

import selectors
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from taas_magic.data.buffer import Ahead, Buffer, FetcherShare
from taas_magic.data.dataset import Opened
from taas_magic.data.memory import largest_file_bytes
from taas_magic.data.protocol import Kind
from taas_magic.data.worker import Key, Reply, WorkerSpec
from taas_magic.data.workers import Answer, Disk, WorkerHandle, Workers
from taas_magic.messages import FetcherCounts

_TRIES = 10
_MAX_LOST = 100


@dataclass(frozen=True)
class ServedLoader:
    """One loader of a server.

    Attributes:
        spec: What its workers are told.
        workers: How many there are.
        share: Which slots are prepared ahead here.
        budget_bytes: How much prepared data may wait in memory.
        spill_bytes: How much may wait on disk.
        fill_batches: Before any rank asks, so many are prepared, of later epochs, too.
        fill_bytes: The same in bytes; 0 of both: of the first epoch, as many as there is room for.
    """

    spec: WorkerSpec
    workers: int
    share: FetcherShare
    budget_bytes: int
    spill_bytes: int = 0
    fill_batches: int = 0
    fill_bytes: int = 0


class Scheduler:
    """One loader of a server: its buffer, its workers, and what they have counted.

    Args:
        served: What it is.
        selector: Of the server's loop.
        arenas: Numbers for the arenas of its workers.
        ready: Called with a connection that an answer is ready for.
        note: Called with a sentence for the user.
    """

    def __init__(
        self,
        served: ServedLoader,
        selector: selectors.BaseSelector,
        arenas: Iterator[int],
        ready: Callable[[Hashable], None],
        note: Callable[[str], None],
    ) -> None:
        self._served, self._ready, self._note = served, ready, note
        self.ahead = Ahead(served.share, self._is_filled)
        # half: spans that ranks still read lie among those that are free again
        fits_bytes = served.workers * (largest_file_bytes() // 2)
        self._budget_bytes = min(served.budget_bytes, fits_bytes)
        self.buffer = Buffer(self._budget_bytes, self.ahead, self._home)
        self._streams: int | None = None
        self._positions: dict[int, tuple[int, int]] = {}
        self._held: dict[int, deque[Key]] = {}
        self._tries: dict[Key, int] = {}
        self._oldest = 0
        self._lost = 0
        folder = served.spec.spill
        self.disk = Disk(folder, served.spill_bytes) if folder is not None else None
        self.prepared = self.sent = self.sent_bytes = 0
        self._wall_s: dict[int, float] = {}
        self._cpu_s = 0.0
        self.workers = Workers(
            *(served.spec, served.workers, selector, arenas, self.disk),
            *(self._replied, self._lose),
        )

    def stats(self) -> FetcherCounts:
        """What it has counted."""
        workers = self.workers.all.values()
        return FetcherCounts(
            prepared=self.prepared,
            sent=self.sent,
            sent_bytes=self.sent_bytes,
            ready=self.buffer.ready_batches,
            ready_bytes=self.buffer.ready_bytes,
            fetch_s=sum(self._wall_s.values()),
            fetch_cpu_s=self._cpu_s,
            fetch_most_s=max(self._wall_s.values(), default=0.0),
            idle=sum(not one.told for one in workers),
            spilled_bytes=self.disk.used_bytes if self.disk else 0,
            spill_refused=bool(self.disk and self.disk.is_full),
            workers=self._served.workers,
            budget_bytes=self._budget_bytes,
        )

    def dispatch(self) -> None:
        """Give every worker that has room something to do."""
        self._forget()
        for one in self.workers.all.values():
            if not one.has_room:
                continue
            for _ in range(one.room):
                key, spill = self._choose(one)
                if key is None:
                    break
                self._note_position(key)
                self.workers.tell(one, key, spill)
            one.send()

    def close(self) -> None:
        """End the workers."""
        self.workers.close()

    def _choose(self, one: WorkerHandle) -> tuple[Key | None, bool]:
        """What a worker does next, and whether that goes to disk."""
        follows = None if self._streams is None else self._follows
        key = self.buffer.choose(one.number, follows)
        if key is not None:
            return key, False
        if self.buffer.has_open and self.buffer.is_full:
            return None, False
        spill = self.buffer.is_full
        if spill and not (self.disk and self.disk.has_room):
            return None, False
        return self._choose_ahead(one), spill

    def _choose_ahead(self, one: WorkerHandle) -> Key | None:
        """The next key of the share; those of another worker's streams are kept for it."""
        held = self._held.get(one.number)
        while held:
            key = held.popleft()
            # A rank may have asked for it since.
            if self.buffer.begin(key):
                return key
        for _ in range(4 * self._served.workers):
            ahead = self.buffer.choose_ahead()
            home = None if ahead is None else self._home(ahead)
            if ahead is None or home is None or home == one.number:
                return ahead
            self.buffer.postpone(ahead)
            self._held.setdefault(home, deque()).append(ahead)
        return None

    def _home(self, key: Key) -> int | None:
        """The worker that has to prepare a key; None: any may."""
        if key.kind in (Kind.OPEN, Kind.ORDER):
            # One alone enumerates: a sampler may give another order each time it is asked.
            return 0
        if key.kind in (Kind.GET, Kind.STATE) and not (key.kind is Kind.GET and key.detail):
            return self._served.share.home(key.slot, self._streams)[1]
        return None

    def _follows(self, key: Key) -> bool:
        """Whether a stream need not go back for a batch."""
        assert self._streams is not None
        epoch, item = self._positions.get(key.slot % self._streams, (-1, 0))
        return epoch != key.epoch or key.slot // self._streams >= item

    def _note_position(self, key: Key) -> None:
        if self._streams is not None and key.kind is Kind.GET:
            stream = key.slot % self._streams
            self._positions[stream] = key.epoch, key.slot // self._streams + 1

    def _is_filled(self) -> bool:
        """Whether there is as much as was asked for before the ranks."""
        served, buffer = self._served, self.buffer
        ready_bytes = buffer.ready_bytes + (self.disk.used_bytes if self.disk else 0)
        return buffer.ready_batches >= served.fill_batches and ready_bytes >= served.fill_bytes

    def _forget(self) -> None:
        oldest = self.buffer.oldest_epoch
        if oldest > self._oldest:
            self._oldest = oldest
            for one in self.workers.all.values():
                if one.is_up:
                    one.forget_before(oldest)

    def _replied(self, one: WorkerHandle, key: Key, answer: Answer) -> None:
        reply = answer.reply
        self.prepared += 1
        self._wall_s[one.number] = self._wall_s.get(one.number, 0.0) + reply.wall_s
        self._cpu_s += reply.cpu_s
        if self._tries:
            self._tries.pop(key, None)
        if key.kind is Kind.OPEN:
            self._learn(key.epoch, answer)
        self._put(key, answer)

    def _learn(self, epoch: int, answer: Answer) -> None:
        opened = None
        if answer.kind is Kind.OPENED:
            opened = msgspec.json.decode(answer.body(), type=Opened)
            self._streams = opened.streams
        self.ahead.opened(epoch, opened)

    def _put(self, key: Key, answer: Answer) -> None:
        for connection in self.buffer.put(key, answer):
            self._ready(connection)

    def _lose(self, keys: Sequence[Key], said: str) -> None:
        """A worker has ended; the first key may be what ended it."""
        self._lost += 1
        if self._lost > _MAX_LOST:
            raise RuntimeError(f"{_MAX_LOST} workers ended, at last: {said}")
        self._note(said)
        self._positions.clear()
        for at, key in enumerate(keys):
            if not at:
                self._tries[key] = self._tries.get(key, 0) + 1
                if self._tries[key] >= _TRIES:
                    self._put(key, _lost(key, said))
                    continue
            self.buffer.lost(key)


def _lost(key: Key, said: str) -> Answer:
    text = (
        f"batch {key.slot} of epoch {key.epoch} was asked for {_TRIES} times, and every time the "
        f"process that prepared it ended, at last: {said}. Its data may crash the process that "
        "reads it, or need more memory than the fetcher's host has"
    ).encode()
    reply = Reply(0, Kind.LOST, 0, 0, 1, 0, 0, len(text), 0, 0, 0.0, 0.0)
    return Answer(reply, text=text)
