"""What a fetcher has ready of one loader, who waits for what, and which worker prepares what next.

Runs in a fetcher's server, on its loop, and never waits: told by the ranks' connections what is
wanted, it tells workers what to prepare (`worker`) and says whose answer has come.

What is prepared is bounded in bytes. What ranks wait for comes first, the connections in turn, each
in the order of its asking; when nobody waits, the fetcher works ahead on its own share. When memory
is used up, it writes what nobody has asked for to disk, or waits, except that a connection may
always have the batch that it has to send next: so a slow rank never starves another one.

What lies here of epochs that all ranks should be past is forgotten. A rank that is not gets the
same answers, prepared again.
"""

import itertools
import mmap
import multiprocessing
import selectors
import socket
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, KeysView
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from taas_magic.data import protocol, worker
from taas_magic.data.dataset import OPEN_EPOCHS
from taas_magic.data.memory import largest_file_bytes
from taas_magic.data.protocol import LoaderRequest, Opened, Reply, RequestKind, ResponseKind
from taas_magic.data.sharding import VOID, FetcherShare
from taas_magic.data.worker import CONTROL_BYTES, ServedLoader, WorkerHandle, spilled_file
from taas_magic.errors import signal_name
from taas_magic.leases import STOPPED_S
from taas_magic.messages import FetcherCounts

_TRIES = 10
_MAX_LOST = 100
_NEXT_EPOCH_BATCHES = 2
_KEEP_EPOCHS = 2
_KEEP_COUNTS = 1 << 14
_ANSWER_BYTES = 1280
"""What a prepared answer in memory takes beside its data: of small batches, most."""


@dataclass
class Disk:
    """Where batches lie that memory has no room for, until a worker finds no room there either."""

    folder: Path
    limit_bytes: int
    used_bytes: int = 0
    is_full: bool = False

    @property
    def has_room(self) -> bool:
        """Whether more may be written."""
        return not self.is_full and self.used_bytes < self.limit_bytes


class Prepared:
    """What a worker prepared: a batch, a value, a failure, or that there is nothing.

    Its body lies on `disk`, else in the arena of `worker`, else it is `text`.
    """

    __slots__ = ("_disk", "_holders", "_text", "_worker", "memory_bytes", "reply")

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
        assert self._disk is not None
        return spilled_file(self._disk.folder, self.reply.number)

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


class Ahead:
    """The order in which a fetcher's workers work ahead, each on what it has to prepare.

    Args:
        is_filled: Says whether there is as much as is to be ready before ranks ask.
    """

    def __init__(self, share: FetcherShare, is_filled: Callable[[], bool] = lambda: True) -> None:
        self._share, self._is_filled = share, is_filled
        self._is_asked = False
        self._opened: dict[int, Opened | None] = {}
        self._ends: dict[int, int] = {}
        self._epoch = self._slot = 0
        self._walks: dict[int, Iterator[LoaderRequest | None]] = {}

    def next(self, worker: int = 0) -> LoaderRequest | None:
        """Return what a worker is to prepare; None: nothing, for now."""
        if worker not in self._walks:
            self._walks[worker] = self._walk(worker, self._epoch, self._slot)
        return next(self._walks[worker], None)

    def restart(self) -> None:
        """Go through it again: something that was being prepared is lost."""
        self._walks.clear()

    def reached(self, epoch: int, slot: int) -> None:
        """Take note that a rank had to ask for a batch: what is worth preparing lies behind it."""
        self._is_asked = True
        if epoch > self._epoch:
            self._ends = {at: end for at, end in self._ends.items() if at >= epoch}
            self._opened = {at: opened for at, opened in self._opened.items() if at >= epoch}
        if epoch > self._epoch or (epoch == self._epoch and slot >= self._slot):
            self._epoch, self._slot = epoch, slot + 1
            self.restart()

    def opened(self, epoch: int, opened: Opened | None) -> None:
        """Take note of an epoch's length; None: its sampler raised."""
        self._opened[epoch] = opened

    def ended(self, epoch: int, slot: int) -> None:
        """Take note that there is no batch in a slot: not worth going on behind it."""
        self._ends[epoch] = min(slot, self._ends.get(epoch, slot))

    def _walk(self, worker: int, epoch: int, first_slot: int) -> Iterator[LoaderRequest | None]:
        left = self._share.units
        for ahead in itertools.count():
            while ahead > 1 and self._is_enough():
                yield None
            if epoch + ahead not in self._opened and not worker:
                yield LoaderRequest(RequestKind.OPEN, epoch + ahead, 0)
            while epoch + ahead not in self._opened:
                yield None
            opened = self._opened[epoch + ahead]
            if opened is None:
                return
            done = 0
            for slot in self._slots(worker, epoch + ahead, opened, 0 if ahead else first_slot):
                while ahead and done >= _NEXT_EPOCH_BATCHES and self._is_enough():
                    yield None
                if left is not None and slot >= left:
                    return
                yield LoaderRequest(RequestKind.GET, epoch + ahead, slot)
                done += 1
            if ahead and not done:
                return
            end = self._ends.get(epoch + ahead, opened.batches)
            left = left if left is None or end is None else left - end

    def _is_enough(self) -> bool:
        return self._is_asked or self._is_filled()

    def _slots(self, worker: int, epoch: int, opened: Opened, first_slot: int) -> Iterator[int]:
        """Yield a worker's slots of an epoch, as long as there are any."""
        for slot in self._share.slots(worker, opened.streams, first_slot):
            at_end = self._ends.get(epoch, opened.batches)
            if at_end is not None and slot >= at_end:
                return
            yield slot


class _Entry:
    """How it stands with one request: queued, being prepared, or prepared; and who waits for it.

    Attributes:
        queued: The worker and the connection in whose queue it is, until a worker prepares it.
    """

    __slots__ = ("prepared", "queued", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[Hashable, None] = {}
        self.queued: tuple[int | None, Hashable] | None = None
        self.prepared: Prepared | None = None


class Buffer:
    """Answers that are ready or wanted.

    Args:
        budget_bytes: How much memory they may take.
        ahead: What is prepared when nobody waits.
        home: The worker that has to prepare a request; None: any may.

    Attributes:
        ready_batches: How many of the answers are batches.
        ready_bytes: The memory of all of them.
    """

    def __init__(
        self,
        budget_bytes: int,
        ahead: Ahead,
        home: Callable[[LoaderRequest], int | None] = lambda request: None,
    ) -> None:
        self._budget_bytes, self.ahead, self._home = budget_bytes, ahead, home
        self._entries: dict[LoaderRequest, _Entry] = {}
        self._unasked: dict[LoaderRequest, None] = {}
        self._counts: OrderedDict[LoaderRequest, int] = OrderedDict()
        # By worker, so that one with nothing to do need not look through what others have.
        self._queues: dict[int | None, OrderedDict[Hashable, dict[LoaderRequest, None]]] = {}
        self._due: dict[Hashable, LoaderRequest] = {}
        self._doing = self._latest_epoch = self._batch_bytes = 0
        self.ready_batches = self.ready_bytes = self._memory_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether memory is used up, by what is being prepared, too: each like the latest batch."""
        return self._memory_bytes + self._doing * self._batch_bytes >= self._budget_bytes

    @property
    def oldest_epoch(self) -> int:
        """The first epoch that ranks may still ask for."""
        return max(0, self._latest_epoch - _KEEP_EPOCHS + 1)

    @property
    def has_open(self) -> bool:
        """Whether anything that is wanted has not been given to a worker."""
        return bool(self._queues)

    def want(self, who: Hashable, request: LoaderRequest, only_count: bool = False) -> None:
        """Take note that `who` waits for what is requested, or only for what it counts."""
        if only_count and self.units(request) is not None:
            return
        if request.epoch > self._latest_epoch:
            self._latest_epoch = request.epoch
            oldest = self.oldest_epoch
            for old in [old for old in self._unasked if old.epoch < oldest]:
                self._remove(old)
            for old in [old for old in self._counts if old.epoch < oldest]:
                del self._counts[old]
        entry = self._entries.get(request)
        if entry is None:
            entry = self._entries[request] = _Entry()
            self._queue(who, request, entry)
        elif not entry.waiting:
            self._unasked.pop(request, None)
        entry.waiting[who] = None

    def forget(self, who: Hashable) -> None:
        """Let `who` wait for nothing; what is prepared stays for whoever asks again."""
        self._due.pop(who, None)
        for request in [one for one, entry in self._entries.items() if who in entry.waiting]:
            self._leave(who, request)

    def take(self, who: Hashable, request: LoaderRequest) -> Prepared | None:
        """Return what `who` sends next; it is held for the caller, who releases it.

        Returns:
            None as long as it is not ready.
        """
        entry = self._entries.get(request)
        if entry is None or entry.prepared is None:
            self._stand_by(who, request)
            return None
        prepared = entry.prepared
        prepared.hold()
        self._leave(who, request)
        if not entry.waiting:
            self._remove(request)
        return prepared

    def count(self, who: Hashable, request: LoaderRequest) -> int | None:
        """Return what the batch that `who` asks for next counts (VOID: none); None: not known."""
        units = self.units(request)
        if units is None:
            self._stand_by(who, request)
        else:
            self._leave(who, request)
        return units

    def units(self, request: LoaderRequest) -> int | None:
        """Return what a batch counts, also of one that lies here no more; None: not known."""
        entry = self._entries.get(request)
        if entry is None or entry.prepared is None:
            return self._counts.get(request)
        return entry.prepared.reply.units

    def order(self, request: LoaderRequest) -> int:
        """Return the hash that came with a batch (`Response.order`); 0 if it is not here."""
        entry = self._entries.get(request)
        return 0 if entry is None or entry.prepared is None else entry.prepared.reply.order

    def choose(
        self, worker: int, follows: Callable[[LoaderRequest], bool] | None = None
    ) -> LoaderRequest | None:
        """Return what a worker is to prepare now; it counts as being done from here on.

        Args:
            follows: Whether it can without going back in a stream; None: it always can.
        """
        if not self._queues:
            return None
        if self.is_full:
            self.make_room()
        request = self._due_of(worker) if self.is_full else self._wanted_of(worker, follows)
        if request is not None:
            self._unqueue(request, self._entries[request])
            if request.kind is RequestKind.GET:
                self.ahead.reached(request.epoch, request.slot)
            self._doing += 1
        return request

    def choose_ahead(self, worker: int) -> LoaderRequest | None:
        """Return what a worker prepares when nobody waits; it counts as being done from here on."""
        while (request := self.ahead.next(worker)) is not None:
            if request not in self._entries and request not in self._counts:
                self._entries[request] = _Entry()
                self._doing += 1
                return request
        return None

    def put(self, request: LoaderRequest, prepared: Prepared) -> KeysView[Hashable]:
        """Lay what was prepared ready; return who waits for it."""
        entry = self._entries[request]
        self._doing -= 1
        if request.kind is RequestKind.GET:
            if not request.detail:
                self._take_count(request, prepared.reply.units)
            self._batch_bytes = prepared.memory_bytes or self._batch_bytes
        entry.prepared = prepared
        self._tally(request, prepared, 1)
        if not entry.waiting:
            self._unasked[request] = None
        return entry.waiting.keys()

    def lost(self, request: LoaderRequest) -> None:
        """Take note that who was preparing a request is gone."""
        entry = self._entries[request]
        self._doing -= 1
        if entry.waiting:
            self._queue(next(iter(entry.waiting)), request, entry, at_once=True)
        else:
            del self._entries[request]
            self.ahead.restart()

    def make_room(self) -> None:
        """Throw away what nobody has asked for, the latest first: it can be prepared again."""
        for request in sorted(self._unasked, reverse=True):
            if not self.is_full:
                return
            prepared = self._entries[request].prepared
            if prepared is not None and prepared.memory_bytes:
                self._counts.pop(request, None)
                self._remove(request)

    def _take_count(self, request: LoaderRequest, units: int) -> None:
        self._counts[request] = units
        if len(self._counts) > _KEEP_COUNTS:
            self._counts.popitem(last=False)
        if units == VOID:
            self.ahead.ended(request.epoch, request.slot)

    def _stand_by(self, who: Hashable, request: LoaderRequest) -> None:
        """Note that `who` can send nothing before this, which may have been here and forgotten."""
        self.want(who, request)
        self._due[who] = request

    def _wanted_of(
        self, worker: int, follows: Callable[[LoaderRequest], bool] | None
    ) -> LoaderRequest | None:
        """Return what ranks want of a worker, the connections in turn."""
        homes = [home for home in (worker, None) if home in self._queues]
        if not homes:
            return None
        chosen = next(iter(next(iter(self._queues[homes[0]].values()))))
        if follows is not None and chosen.kind is RequestKind.GET:
            queues = [queue for home in homes for queue in self._queues[home].values()]
            # An epoch is finished first: a rank that is behind has little more to ask of it.
            epoch = min(next(iter(queue)).epoch for queue in queues)
            chosen = next(one for queue in queues for one in queue if one.epoch == epoch)
            asked = (one for queue in queues for one in queue if one.epoch == epoch)
            chosen = next(filter(follows, asked), chosen)
        queued = self._entries[chosen].queued
        assert queued is not None
        self._queues[queued[0]].move_to_end(queued[1])
        return chosen

    def _due_of(self, worker: int) -> LoaderRequest | None:
        """Return what a connection waits for before all else."""
        for request in self._due.values():
            entry = self._entries.get(request)
            if entry is not None and entry.queued and entry.queued[0] in (worker, None):
                return request
        return None

    def _queue(
        self, who: Hashable, request: LoaderRequest, entry: _Entry, at_once: bool = False
    ) -> None:
        """Have a worker prepare a request, when it is the turn of `who`."""
        home = self._home(request)
        queues = self._queues.setdefault(home, OrderedDict())
        asked = queues.get(who)
        if asked is None or at_once:
            queues[who] = {request: None, **(asked or {})}
        else:
            asked[request] = None
        entry.queued = home, who

    def _unqueue(self, request: LoaderRequest, entry: _Entry) -> None:
        """Take a request out of its queue, if it is in one."""
        if entry.queued is None:
            return
        home, who = entry.queued
        entry.queued = None
        queues = self._queues[home]
        del queues[who][request]
        if not queues[who]:
            del queues[who]
        if not queues:
            del self._queues[home]

    def _leave(self, who: Hashable, request: LoaderRequest) -> None:
        """Let `who` wait for a request no more, and nobody prepare it where nobody else does."""
        entry = self._entries.get(request)
        if entry is None or who not in entry.waiting:
            return
        del entry.waiting[who]
        if self._due and self._due.get(who) == request:
            del self._due[who]
        if entry.queued is not None and (not entry.waiting or entry.queued[1] == who):
            self._unqueue(request, entry)
            if entry.waiting:
                self._queue(next(iter(entry.waiting)), request, entry)
            else:
                del self._entries[request]
        elif entry.prepared is not None and not entry.waiting:
            self._unasked[request] = None

    def _remove(self, request: LoaderRequest) -> None:
        self._unasked.pop(request, None)
        prepared = self._entries.pop(request).prepared
        assert prepared is not None
        self._tally(request, prepared, -1)
        prepared.release()

    def _tally(self, request: LoaderRequest, prepared: Prepared, sign: int) -> None:
        size = prepared.memory_bytes
        self.ready_bytes += sign * size
        self._memory_bytes += sign * (size + _ANSWER_BYTES if size else 0)
        self.ready_batches += sign * (request.kind is RequestKind.GET)


class Scheduler:
    """One loader of a server: its buffer, its workers, and what they have counted.

    Args:
        selector: Of the server's loop.
        arenas: Numbers for the arenas of its workers.
        ready: Called with a connection that an answer is ready for.
        note: Called with a sentence for the user.

    Attributes:
        counts: What is counted; what ranks were sent is counted by the server.
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
        self._selector, self._arenas = selector, arenas
        # half: spans that ranks still read lie among those that are free again
        fits_bytes = served.share.workers * (largest_file_bytes() // 2)
        budget_bytes = min(served.budget_bytes, fits_bytes)
        self.buffer = Buffer(budget_bytes, Ahead(served.share, self._is_filled), self._home)
        folder = served.spill
        self._disk = Disk(folder, served.spill_bytes) if folder is not None else None
        self._streams: int | None = None
        self._positions: dict[int, dict[int, int]] = {}
        self._tries: dict[LoaderRequest, int] = {}
        self._lost, self._numbers = 0, itertools.count()
        self._wall_s: dict[int, float] = {}
        self.counts = FetcherCounts(workers=served.share.workers, budget_bytes=budget_bytes)
        self._workers: dict[int, WorkerHandle] = {}
        self._suspects: set[int] = set()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Forked before there is any connection that a child could keep open.
        context: Any = multiprocessing.get_context("fork")
        arguments = (served, theirs, self._control)
        self._parent = context.Process(target=worker.parent_main, args=arguments)
        self._parent.start()
        self._stopped = worker.StoppedChildren()
        theirs.close()
        selector.register(self._control, selectors.EVENT_READ, self._hear_parent)

    def start(self) -> None:
        """Start the workers; once the parents of all loaders' workers are forked."""
        for number in range(self._served.share.workers):
            self._start(number)

    def stats(self) -> FetcherCounts:
        """Return what it has counted."""
        disk = self._disk
        return structs.replace(
            self.counts,
            ready=self.buffer.ready_batches,
            ready_bytes=self.buffer.ready_bytes,
            fetch_s=sum(self._wall_s.values()),
            fetch_most_s=max(self._wall_s.values(), default=0.0),
            idle=sum(not one.told for one in self._workers.values()),
            spilled_bytes=disk.used_bytes if disk else 0,
            spill_refused=bool(disk and disk.is_full),
        )

    def dispatch(self) -> None:
        """Give every worker that has room something to do.

        Raises:
            RuntimeError: Workers end again and again.
        """
        for one in self._workers.values():
            if not (room := one.room):
                continue
            for _ in range(room):
                request, to_disk = self._choose(one)
                if request is None:
                    break
                if self._streams is not None and request.kind is RequestKind.GET:
                    item, stream = divmod(request.slot, self._streams)
                    self._advance(stream, request.epoch, item + 1)
                one.tell(next(self._numbers), request, to_disk)
            one.send(self.buffer.oldest_epoch)

    def look(self) -> None:
        """End the workers' parent if it is stopped; then all of this server ends."""
        self._stopped.end([self._parent.pid])

    def close(self) -> None:
        """End all workers."""
        self._selector.unregister(self._control)
        # Closing it would say nothing: the parents of other loaders' workers have it, too.
        self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        for one in self._workers.values():
            self._hang_up(one)
        self._parent.join()

    def _choose(self, one: WorkerHandle) -> tuple[LoaderRequest | None, bool]:
        """Return what a worker does next, and whether that goes to disk."""
        follows = None if self._streams is None else self._follows
        request = self.buffer.choose(one.number, follows)
        if request is not None:
            return request, False
        is_full = self.buffer.is_full
        if is_full and (self.buffer.has_open or not (self._disk and self._disk.has_room)):
            return None, False
        return self.buffer.choose_ahead(one.number), is_full

    def _home(self, request: LoaderRequest) -> int | None:
        """Return the worker that has to prepare what is requested; None: any may."""
        kind = request.kind
        if kind in (RequestKind.OPEN, RequestKind.ORDER):
            # One alone enumerates: a sampler may give another order each time it is asked.
            return 0
        has_indices = kind is RequestKind.GET and request.detail
        if kind is RequestKind.SAMPLE or has_indices:
            return None
        return self._served.share.home(request.slot, self._streams)[1]

    def _follows(self, request: LoaderRequest) -> bool:
        """Return whether a stream need not go back for a batch."""
        assert self._streams is not None
        item, stream = divmod(request.slot, self._streams)
        return item >= self._positions.get(stream, {}).get(request.epoch, 0)

    def _advance(self, stream: int, epoch: int, item: int) -> None:
        """Record how far a worker reads a stream in an epoch; it keeps the last two epochs open."""
        epochs = self._positions.setdefault(stream, {})
        epochs.pop(epoch, None)
        epochs[epoch] = item
        if len(epochs) > OPEN_EPOCHS:
            del epochs[next(iter(epochs))]

    def _is_filled(self) -> bool:
        """Return whether there is as much as was asked for before the ranks."""
        served, buffer = self._served, self.buffer
        ready_bytes = buffer.ready_bytes + (self._disk.used_bytes if self._disk else 0)
        return buffer.ready_batches >= served.fill_batches and ready_bytes >= served.fill_bytes

    def _start(self, number: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one = WorkerHandle(number, next(self._arenas), ours, number in self._suspects)
        change = msgspec.msgpack.encode(protocol.WorkerChange(number))
        with theirs:
            socket.send_fds(self._control, [change], [theirs.fileno()])
        self._workers[number] = one
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._hear(one))

    def _hear_parent(self) -> None:
        said = self._control.recv(CONTROL_BYTES)
        if not said:
            raise RuntimeError(
                f'the process that starts the workers of loader "{self._served.name}" has ended'
            )
        self._lose(msgspec.msgpack.decode(said, type=protocol.WorkerChange))

    def _hear(self, one: WorkerHandle) -> None:
        if one.is_gone:
            return  # its parent has said so in the same moment
        try:
            for reply in one.hear():
                self._take(one, one.told.pop(reply.number), reply)
        except EOFError:
            # Its parent says how it ended; until then nothing is to be heard here.
            self._hang_up(one)

    def _take(self, one: WorkerHandle, request: LoaderRequest, reply: Reply) -> None:
        self.counts.prepared += 1
        self._wall_s[one.number] = self._wall_s.get(one.number, 0.0) + reply.wall_s
        self.counts.fetch_cpu_s += reply.cpu_s
        if self._disk is not None and reply.disk_is_full:
            self._disk.is_full = True
        prepared = Prepared(reply, one, disk=self._disk if reply.on_disk else None)
        if self._tries:
            self._tries.pop(request, None)
        if request.kind is RequestKind.OPEN:
            opened = None
            if reply.kind is ResponseKind.OPENED:
                opened = protocol.read_opened(prepared.body())
                self._streams = opened.streams
            self.buffer.ahead.opened(request.epoch, opened)
        self._put(request, prepared)

    def _put(self, request: LoaderRequest, prepared: Prepared) -> None:
        for connection in self.buffer.put(request, prepared):
            self._ready(connection)

    def _hang_up(self, one: WorkerHandle) -> None:
        if not one.is_gone:
            self._selector.unregister(one.socket)
            one.close()

    def _lose(self, ended: protocol.WorkerChange) -> None:
        """Start a worker that has ended again; the first of its requests may be what ended it."""
        number, exitcode = ended.number, ended.exitcode
        one = self._workers.pop(number)
        self._hear(one)  # what it said before it ended
        self._hang_up(one)
        self._suspects.add(number)
        self._start(number)
        how = f"left with exit code {exitcode}"
        if exitcode < 0:
            how = f"was killed by {signal_name(exitcode)}"
        if ended.was_stopped:
            how = f"was stopped (SIGSTOP) for {STOPPED_S:.0f} s and killed"
        said = (
            f'worker {number} of {self._served.where} (loader "{self._served.name}", '
            f"pid {ended.pid}) {how}; it was started again"
        )
        self._lost += 1
        if self._lost > _MAX_LOST:
            raise RuntimeError(f"{self._lost} workers have ended. The last time, {said}")
        self._note(said)
        self._positions.clear()
        for at, request in enumerate(one.told.values()):
            if not at:
                self._tries[request] = self._tries.get(request, 0) + 1
                if self._tries[request] >= _TRIES:
                    self._put(request, _given_up(request, said))
                    continue
            self.buffer.lost(request)


def _given_up(request: LoaderRequest, said: str) -> Prepared:
    text = (
        f"batch {request.slot} of epoch {request.epoch} was asked for {_TRIES} times, and each "
        f"time the worker that prepared it ended. The last time, {said}. Its data may crash the "
        "process that reads it, or need more memory than the fetcher's host has"
    ).encode()
    return Prepared(Reply(0, ResponseKind.LOST, 1, body_bytes=len(text)), text=text)
