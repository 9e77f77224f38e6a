"""Scheduling for one loader of a fetcher: the prefetch buffer, pending requests, and workers.

The scheduler runs in the event loop of the fetcher's server and never blocks.

Requests of ranks come first: the connections take turns, and each connection's requests keep their
order. Batches of a stream are different: they are prepared in the stream's order, because a worker
must restart a stream to go back. If no rank waits, workers *prepare ahead*: they prepare batches of
this fetcher's part (`FetcherPart`) that no rank has requested yet.

When the memory of prepared batches reaches its limit, workers prepare only batches that a
connection must send next. So a slow rank, whose batches fill the memory, cannot starve the
remaining ranks.

If the fetcher serves only one rank, and this rank begins an epoch of a stream again, the scheduler
drops what is prepared of the stream, because the second reading may give other data.

When a rank begins a new epoch, the scheduler keeps the unrequested batches of the previous epoch,
and drops the batches of all earlier epochs. If a rank still requests a dropped batch, a worker
prepares the batch again.
"""

import itertools
import multiprocessing
import selectors
import socket
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, KeysView
from typing import Any

import msgspec
from msgspec import structs

from taas_magic.data import protocol, worker
from taas_magic.data.dataset import OPEN_EPOCHS
from taas_magic.data.memory import largest_file_bytes
from taas_magic.data.protocol import (
    EpochDescription,
    LoaderRequest,
    Reply,
    RequestKind,
    ResponseKind,
)
from taas_magic.data.sharding import VOID, FetcherPart
from taas_magic.data.watchdog import STOPPED, StoppedProcessWatchdog
from taas_magic.data.worker import CONTROL_BYTES, ServedLoader, WorkerHandle
from taas_magic.errors import signal_name
from taas_magic.messages import FetcherCounts

_MAX_LOST_PER_REQUEST = 10
"""Number of times that a worker may end while it prepares the same request.

After that, the request gets a LOST response, and the rank fails.
"""

_MAX_LOST_WORKERS = 100
"""Number of workers of one loader that may end. When one more worker ends, the fetcher fails."""

_NEXT_EPOCH_BATCHES = 2
"""Number of batches of the next epoch that each worker prepares ahead.

Before the first request of a rank, workers may prepare more, to reach the `--prefill` minimum.
"""

_KEEP_EPOCHS = 2
"""Number of latest epochs whose unrequested batches are kept."""

_KEEP_COUNTS = 1 << 14
"""Maximum number of batches whose units the buffer remembers after it has removed the batches."""

_ANSWER_BYTES = 1280
"""Bytes of memory that a prepared response needs in addition to its body."""


LATER = -1
"""Value in place of a worker's number, while the loader's kind (map or iterable) is not known.

Requests with this value wait for the first reply to OPEN, which tells the kind.
"""

_ALL = "all"
"""Key of a worker's queue for batches of streams; all connections share this queue."""


class PreparedResponse:
    """Reference-counted response to a rank's request: a batch, a value or an error.

    The body is in the arena of the worker, where ranks on this host can read it without a copy, or
    in `text`. First the prefetch buffer holds the response, later also each connection that sends
    it. The last holder to call `release` frees the body's memory.

    Args:
        reply: The worker's description of the response.
        worker: The worker that prepared the response; None if `text` is the body.
        text: The body, if no worker has prepared the response.
    """

    __slots__ = ("_holders", "_text", "reply", "worker")

    def __init__(self, reply: Reply, worker: WorkerHandle | None = None, text: bytes = b"") -> None:
        self.reply, self.worker, self._text = reply, worker, text
        self._holders = 1

    def body(self) -> memoryview:
        """Return the response's body, for example the encoded batch, as bytes to send."""
        if self.worker is None or not self.reply.body_bytes:
            return memoryview(self._text)
        return self.worker.memory.view(self.reply.offset, self.reply.body_bytes)

    @property
    def is_shared(self) -> bool:
        """Whether the response has several holders.

        If so, each rank must get a copy of the batch, because a rank may modify its batch.
        """
        return self._holders > 1

    def add_holder(self) -> None:
        """Count one more holder of this response; each holder must later call `release`."""
        self._holders += 1

    def release(self) -> None:
        """End one holder's use of this response; the last such call frees the body's memory."""
        self._holders -= 1
        if not self._holders and self.worker is not None and self.reply.body_bytes:
            self.worker.frees.append(self.reply.offset)


class PrefetchOrder:
    """Order in which a fetcher's workers prepare batches that no rank has requested yet.

    First, each worker prepares its remaining batches of the current epoch, then
    `_NEXT_EPOCH_BATCHES` batches of the next epoch. Before the first request of a rank, workers
    continue with further batches and epochs until the minimum of `--prefill` is ready.

    Args:
        is_filled: Function that returns whether the minimum of `--prefill` is ready.
    """

    def __init__(self, part: FetcherPart, is_filled: Callable[[], bool] = lambda: True) -> None:
        self._part, self._is_filled = part, is_filled
        self._has_rank_requests = False
        self._descriptions: dict[int, EpochDescription | None] = {}
        self._ends: dict[int, dict[int, int]] = {}
        self._streams = 1
        self._epoch = self._slot = 0
        self._ahead: dict[int, Iterator[LoaderRequest | None]] = {}

    def next(self, worker: int = 0) -> LoaderRequest | None:
        """Return the request for the next batch that `worker` prepares ahead.

        Before the first batch of a new epoch, the result may be a request for the description of
        the epoch (OPEN).

        Returns:
            The request; None if there is nothing to prepare ahead now.
        """
        if worker not in self._ahead:
            self._ahead[worker] = self._ahead_requests(worker, self._epoch, self._slot)
        return next(self._ahead[worker], None)

    def restart(self) -> None:
        """Restart preparing ahead: every worker begins again at the current slot.

        The current slot is the slot after the latest batch that a rank has requested. Batches that
        are in the buffer are not prepared again (`PrefetchBuffer.choose_ahead`).
        """
        self._ahead.clear()

    def begin_again(self, epoch: int) -> None:
        """Restart preparing ahead at the beginning of an epoch, because a rank begins it again."""
        self._epoch, self._slot = epoch, 0
        self._ends.pop(epoch, None)
        self.restart()

    def record_requested(self, epoch: int, slot: int) -> None:
        """Record that a worker starts to prepare a batch because a rank has requested it.

        If the batch is later than the batches of all earlier calls, workers continue to prepare
        ahead from the next slot. If the batch is the first one from a later epoch, drop the
        descriptions of earlier epochs and the ends of streams in these epochs. From the first call
        on, workers no longer prepare batches for `--prefill`.
        """
        self._has_rank_requests = True
        if epoch > self._epoch:
            self._ends = {at: ends for at, ends in self._ends.items() if at >= epoch}
            self._descriptions = {
                at: found for at, found in self._descriptions.items() if at >= epoch
            }
        if epoch > self._epoch or (epoch == self._epoch and slot >= self._slot):
            self._epoch, self._slot = epoch, slot + 1
            self.restart()

    def record_epoch(self, epoch: int, description: EpochDescription | None) -> None:
        """Record an epoch's description, which tells how many batches to prepare ahead.

        Args:
            description: The description; None if the loader's sampler raised an exception.
        """
        self._descriptions[epoch] = description
        self._streams = (description and description.streams) or 1

    def record_end(self, epoch: int, slot: int) -> None:
        """Record that `slot` has no batch, so that workers prepare no later slot of its stream."""
        stream = slot % self._streams
        ends = self._ends.setdefault(epoch, {})
        ends[stream] = min(slot, ends.get(stream, slot))

    def knows_end(self, epoch: int, before_slot: int) -> bool:
        """Return whether a slot before `before_slot` is known to have no batch."""
        return any(end < before_slot for end in self._ends.get(epoch, {}).values())

    def _ahead_requests(
        self, worker: int, epoch: int, first_slot: int
    ) -> Iterator[LoaderRequest | None]:
        """Yield the requests that a worker prepares ahead, from `first_slot` of `epoch` on.

        Yield None instead of a request if no batch can be prepared now; the caller must try again
        later.

        - If the description of an epoch is not recorded yet, worker 0 first gets a request for it.
          The other workers get None until the description is recorded.
        - Of the epoch after `epoch`, yield only the first `_NEXT_EPOCH_BATCHES` batches, or as many
          as `--prefill` needs. Later epochs follow only if `--prefill` needs more.
        - The iterator ends at the `--units` limit. It also ends at an epoch that cannot be
          described, and at an epoch after `epoch` in which the worker has no batch.
        """
        left = self._part.units
        for ahead in itertools.count():
            while ahead > 1 and self._is_enough():
                yield None
            if epoch + ahead not in self._descriptions and not worker:
                yield LoaderRequest(RequestKind.OPEN, epoch + ahead, 0)
            while epoch + ahead not in self._descriptions:
                yield None
            description = self._descriptions[epoch + ahead]
            if description is None:
                return
            done = 0
            for slot in self._slots(worker, epoch + ahead, description, 0 if ahead else first_slot):
                while ahead and done >= _NEXT_EPOCH_BATCHES and self._is_enough():
                    yield None
                if left is not None and slot >= left:
                    return
                yield LoaderRequest(RequestKind.GET, epoch + ahead, slot)
                done += 1
            if ahead and not done:
                return
            ends = self._ends.get(epoch + ahead, {})
            end = description.batches
            if len(ends) == self._streams:
                end = sum(slot // self._streams for slot in ends.values())
            left = left if left is None or end is None else left - end

    def _is_enough(self) -> bool:
        return self._has_rank_requests or self._is_filled()

    def _slots(
        self, worker: int, epoch: int, description: EpochDescription, first_slot: int
    ) -> Iterator[int]:
        """Yield the slots of an epoch that a worker prepares, in ascending order.

        Skip the slots after the known end of a stream. Stop at the end of the epoch, if it is
        known, or when all streams of this worker have ended.
        """
        n_skipped = 0
        for slot in self._part.slots(worker, description.streams, first_slot):
            if description.batches is not None and slot >= description.batches:
                return
            end = self._ends.get(epoch, {}).get(slot % self._streams)
            if end is None or slot < end:
                n_skipped = 0
                yield slot
                continue
            n_skipped += 1
            if n_skipped == self._streams:  # all streams of this worker have ended
                return


class _RequestState:
    """State of one request in the buffer: queued for a worker, being prepared, or prepared.

    Attributes:
        waiting: The connections that wait for the response, in order (a dict used as a set).
        queued: The queue that contains the request, as a pair of keys in `PrefetchBuffer._queues`;
            None if the request is in no queue. The first key is the number of the worker that must
            answer the request; None for any worker, LATER while the loader's kind is not known. The
            second key is a connection, or `_ALL`.
        prepared: The response; None until a worker has prepared it.
    """

    __slots__ = ("prepared", "queued", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[Hashable, None] = {}
        self.queued: tuple[int | None, Hashable] | None = None
        self.prepared: PreparedResponse | None = None


class PrefetchBuffer:
    """The prefetch buffer: prepared responses, and requests without a response.

    In all methods, `who` is the connection to the rank that waits for a response.

    Args:
        budget_bytes: Limit in bytes on the memory of all prepared responses.
        ahead: Order of the batches to prepare when no connection waits.
        worker_for: Function that returns the number of the worker that must answer a request. It
            returns None if any worker can, and LATER if the loader's kind must be known first.
        restart_streams: Called with an epoch whose streams workers must read again.

    Attributes:
        ready_batches: Number of prepared batches.
        ready_bytes: Size of the bodies of all prepared responses.
    """

    def __init__(
        self,
        budget_bytes: int,
        ahead: PrefetchOrder,
        worker_for: Callable[[LoaderRequest], int | None] = lambda request: None,
        part: FetcherPart = FetcherPart(),  # noqa: B008
        restart_streams: Callable[[int], None] = lambda epoch: None,
    ) -> None:
        self._budget_bytes, self.ahead = budget_bytes, ahead
        self._worker_for, self._part = worker_for, part
        self._restart_streams = restart_streams
        self._begun: set[int] = set()
        self._outdated = Counter[LoaderRequest]()
        self._entries: dict[LoaderRequest, _RequestState] = {}
        self._unrequested: dict[LoaderRequest, None] = {}
        self._counts: OrderedDict[LoaderRequest, int] = OrderedDict()
        # One queue for each worker, so that an idle worker need not search the others' requests.
        self._queues: dict[int | None, OrderedDict[Hashable, dict[LoaderRequest, None]]] = {}
        self._due: dict[Hashable, LoaderRequest] = {}
        self._sent: OrderedDict[LoaderRequest, PreparedResponse] = OrderedDict()
        self._streams = self._sent_bytes = 0  # no streams: map-style, or not known yet
        self._doing = self._latest_epoch = self._batch_bytes = 0
        self.ready_batches = self.ready_bytes = self._memory_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether prepared batches and batches in preparation reach the memory limit.

        The memory of a batch in preparation is estimated by the size of the latest batch.
        """
        return self._memory_bytes + self._doing * self._batch_bytes >= self._budget_bytes

    @property
    def oldest_epoch(self) -> int:
        """First epoch whose unrequested batches are kept; older unrequested batches are dropped."""
        return max(0, self._latest_epoch - _KEEP_EPOCHS + 1)

    def record_kind(self, streams: int | None) -> None:
        """Record the loader's kind, and queue the requests that have waited for it (LATER).

        Args:
            streams: Number of streams of an iterable-style loader; None for a map-style one.
        """
        self._streams = streams or 0
        for who, requests in self._queues.pop(LATER, {}).items():
            for request in requests:
                self._queue(who, request, self._entries[request])

    def add_request(self, who: Hashable, request: LoaderRequest, only_count: bool = False) -> None:
        """Record that connection `who` waits for a response, and queue the request if it is new.

        If the buffer already has the request, only add `who` to the connections that wait. If the
        batch was sent before and is still kept (`_keep_sent`), this batch is the response, so the
        request is not queued.

        The first request of a new epoch also drops the data of old epochs (`_drop_before`). If the
        fetcher serves only one rank, and this rank begins an epoch again, also drop what is
        prepared of the epoch's streams (`_drop_streams`).

        Args:
            only_count: Whether `who` needs only the batch's units. If True, and if the units are
                known already, this method does nothing.
        """
        if only_count and self.units(request) is not None:
            return
        if request.epoch > self._latest_epoch:
            self._latest_epoch = request.epoch
            self._drop_before(self.oldest_epoch)
        if request.kind is RequestKind.GET:
            self._begun.add(request.epoch)
        elif request.kind is RequestKind.OPEN and request.epoch in self._begun:
            self._drop_streams(request.epoch)
        entry = self._entries.get(request)
        if entry is None:
            entry = self._entries[request] = _RequestState()
            if request in self._sent:
                entry.prepared = self._drop_sent(request)
                self._update_totals(request, entry.prepared, 1)
            else:
                self._queue(who, request, entry)
        elif not entry.waiting:
            self._unrequested.pop(request, None)
        entry.waiting[who] = None

    def _drop_streams(self, epoch: int) -> None:
        """Drop the batches of streams that are prepared or in preparation in an epoch.

        Do so only if the fetcher serves a single rank. This rank begins the epoch again, so the
        workers read the streams again. The second reading may give other data than the first, so
        the rank would get a mixture of both.
        """
        self._begun.discard(epoch)
        if not self._streams or self._part.ranks > 1:
            return
        for request in [one for one in self._counts if one.epoch == epoch]:
            del self._counts[request]
        for request, entry in list(self._entries.items()):
            if request.kind is not RequestKind.GET or request.epoch != epoch or entry.queued:
                continue
            if entry.prepared is None:
                self._outdated[request] += 1
                del self._entries[request]
            else:
                self._remove(request)
            if entry.waiting:  # another pass of the rank
                entry.prepared = None
                self._entries[request] = entry
                self._queue(next(iter(entry.waiting)), request, entry)
        self.ahead.begin_again(epoch)
        self._restart_streams(epoch)

    def _drop_before(self, oldest: int) -> None:
        """Drop the data of epochs before `oldest`, except batches that ranks have requested.

        Dropped are batches that no rank has requested, batches that were kept after sending, and
        the recorded units of batches.
        """
        for old in [old for old in self._unrequested if old.epoch < oldest]:
            self._remove(old)
        for old in [old for old in self._counts if old.epoch < oldest]:
            del self._counts[old]
        for old in [old for old in self._sent if old.epoch < oldest]:
            self._drop_sent(old).release()

    def cancel_requests(self, who: Hashable) -> None:
        """Cancel all requests of a connection; prepared responses stay for later requests."""
        self._due.pop(who, None)
        for request in [one for one, entry in self._entries.items() if who in entry.waiting]:
            self._remove_waiter(who, request)

    def pop_ready(self, who: Hashable, request: LoaderRequest) -> PreparedResponse | None:
        """Return a prepared response for connection `who`; the caller must release the response.

        If the response is not ready, return None, and record that `who` must send it next. Workers
        then prepare the response even if the buffer is full.

        If the response is ready, it stays in the buffer while other connections wait for it, or if
        its batch is needed until the epoch is over (`_is_kept`). In all other cases, remove the
        response from the buffer. If another rank may still request the removed batch, keep the
        batch separately (`_keep_sent`).
        """
        entry = self._entries.get(request)
        if entry is None or entry.prepared is None:
            self._record_next_response(who, request)
            return None
        prepared = entry.prepared
        prepared.add_holder()
        self._remove_waiter(who, request)
        if not entry.waiting and not self._is_kept(request, prepared):
            if self._may_be_misrequested(request):
                self._keep_sent(request, prepared)
            self._remove(request)
        return prepared

    def find_units(self, who: Hashable, request: LoaderRequest) -> int | None:
        """Return the units of a batch for connection `who`, whose rank needs only the units.

        Returns:
            The units; VOID if the slot has no batch; None if the units are not known yet. If None,
            this method records that `who` must send this response next.
        """
        units = self.units(request)
        if units is None:
            self._record_next_response(who, request)
        else:
            self._remove_waiter(who, request)
        return units

    def units(self, request: LoaderRequest) -> int | None:
        """Return the units of a batch that is or was in the buffer; None if they are not known."""
        entry = self._entries.get(request)
        if entry is None or entry.prepared is None:
            return self._counts.get(request)
        return entry.prepared.reply.units

    def find_order(self, request: LoaderRequest) -> int:
        """Return a batch's hash (`Response.order`); 0 if the batch is not in the buffer."""
        entry = self._entries.get(request)
        return 0 if entry is None or entry.prepared is None else entry.prepared.reply.order

    def choose(
        self, worker: int, follows: Callable[[LoaderRequest], bool] | None = None
    ) -> LoaderRequest | None:
        """Return the queued request that a worker prepares next; None if the worker has none.

        The chosen request leaves its queue and counts as being prepared. If it is a GET request,
        its slot is also recorded, for preparing ahead (`record_requested`).

        If the buffer is full, first drop responses for which no connection waits. For an
        iterable-style loader, drop only batches that no rank can need any more (`_first_needed`):
        to prepare a dropped batch again, a worker would restart a stream. If the buffer is then
        still full, choose only a request whose response a connection must send next.

        Args:
            follows: Function that returns whether the worker can prepare a batch without restarting
                the batch's stream; None for a map-style loader, which has no streams.
        """
        if not self._queues:
            return None
        if self.is_full:
            # To prepare a dropped batch of a stream again, a worker would restart the stream.
            self.make_room(before=None if follows is None else self._first_needed())
        if self.is_full:
            request = self._due_request(worker, follows)
        else:
            request = self._next_request_for(worker, follows)
        if request is not None:
            self._unqueue(request, self._entries[request])
            if request.kind is RequestKind.GET:
                self.ahead.record_requested(request.epoch, request.slot)
            self._doing += 1
        return request

    def choose_ahead(self, worker: int) -> LoaderRequest | None:
        """Return the request for the next batch that a worker prepares ahead.

        Skip requests that are in the buffer, and batches whose units are recorded. The returned
        request counts as being prepared.

        Returns:
            The request; None if there is nothing to prepare ahead now.
        """
        while (request := self.ahead.next(worker)) is not None:
            if request not in self._entries and request not in self._counts:
                self._entries[request] = _RequestState()
                self._doing += 1
                return request
        return None

    def put(self, request: LoaderRequest, prepared: PreparedResponse) -> KeysView[Hashable]:
        """Store a prepared response; return the connections that wait for it.

        The request no longer counts as being prepared. If it is a GET without given indices, also
        record the units of the batch. But if the rank has begun the epoch again since then, drop
        the response instead (`_drop_streams`). If memory is short, drop batches that were kept
        after sending (`_limit_sent`). If no connection waits for the response, `make_room` may drop
        it later.
        """
        self._doing -= 1
        if self._is_outdated(request):
            prepared.release()
            return dict[Hashable, None]().keys()
        entry = self._entries[request]
        if request.kind is RequestKind.GET:
            if not request.detail:
                self._record_units(request, prepared.reply.units)
            self._batch_bytes = prepared.reply.body_bytes or self._batch_bytes
        entry.prepared = prepared
        self._update_totals(request, prepared, 1)
        self._limit_sent()
        if not entry.waiting:
            self._unrequested[request] = None
        return entry.waiting.keys()

    def requeue(self, request: LoaderRequest) -> None:
        """Queue or remove a request whose worker has ended without a response.

        If a connection waits for the response, queue the request again, before the connection's
        remaining requests. But if the batch belongs to a stream, the slot decides the place in the
        queue.

        If no connection waits, remove the request from the buffer. Then preparing ahead starts
        again at the current slot, so that a worker may prepare the batch again.
        """
        self._doing -= 1
        if self._is_outdated(request):
            return
        entry = self._entries[request]
        if entry.waiting:
            self._queue(next(iter(entry.waiting)), request, entry, at_once=True)
        else:
            del self._entries[request]
            self.ahead.restart()

    def _is_outdated(self, request: LoaderRequest) -> bool:
        """Return whether the request's next response belongs to an earlier reading of its stream.

        If so, count this response as received. A worker answers its requests in order, so outdated
        responses arrive first.
        """
        if request not in self._outdated:
            return False
        self._outdated[request] -= 1
        if not self._outdated[request]:
            del self._outdated[request]
        return True

    def make_room(self, before: tuple[int, int] | None = None) -> None:
        """Drop responses for which no connection waits, until memory is below the limit.

        Responses of later epochs are dropped before those of earlier epochs; within an epoch, those
        of later slots are dropped first. The recorded units of a dropped batch are also dropped, so
        that a worker may prepare the batch again.

        These responses always stay: responses without a body, and batches that are kept until the
        epoch's end (`_is_kept`). So memory may still be at the limit when this method returns.

        Args:
            before: Drop only responses before this epoch and slot; None to drop any.
        """
        for request in sorted(self._unrequested, reverse=True):
            if not self.is_full:
                return
            if before is not None and (request.epoch, request.slot) >= before:
                continue
            prepared = self._entries[request].prepared
            if prepared is None or self._is_kept(request, prepared):
                continue
            if prepared.reply.body_bytes:
                self._counts.pop(request, None)
                self._remove(request)

    def _first_needed(self) -> tuple[int, int]:
        """Return the epoch and slot of the first batch that a rank may still need.

        Used only for an iterable-style loader. Batches before the result may be dropped. The result
        depends on the first batch that a connection must send next:

        - There is no such batch: the result is (0, 0).
        - The fetcher serves one rank (`FetcherPart.ranks`): the result is this batch.
        - The fetcher serves several ranks: the result is slot 0 of this batch's epoch, because a
          slower rank may need any batch of the epoch.
        """
        due = min(
            ((one.epoch, one.slot) for one in self._due.values() if one.kind is RequestKind.GET),
            default=(0, 0),
        )
        return due if self._part.ranks == 1 else (due[0], 0)

    def _is_kept(self, request: LoaderRequest, prepared: PreparedResponse) -> bool:
        """Return whether a batch stays in the buffer until its epoch is over.

        The batch stays if all of these hold:

        - The loader is iterable-style, and the batch is one of the first `keep_first` batches of
          its epoch (`FetcherPart.keep_first`). Slots without a batch do not count.
        - The epoch is `oldest_epoch` or a later one.
        - `keep_first` batches of this batch's size need at most a quarter of `budget_bytes`.
        """
        keep_first = self._part.keep_first
        return (
            request.kind is RequestKind.GET
            and request.slot < keep_first * self._streams
            and request.epoch >= self.oldest_epoch
            and keep_first * prepared.reply.body_bytes <= self._budget_bytes // 4
            and self._batches_before(request) < keep_first
        )

    def _batches_before(self, request: LoaderRequest) -> int:
        before = (structs.replace(request, slot=slot) for slot in range(request.slot))
        return sum(self._counts.get(one, VOID) != VOID for one in before)

    def _may_be_misrequested(self, request: LoaderRequest) -> bool:
        """Return whether a rank may have requested a batch that belongs to another rank.

        This is possible if the epoch has several streams, and a stream has ended before the batch.
        A fetcher knows only the ends of its own streams. So if there are several fetchers, assume
        that a stream of another fetcher may have ended.
        """
        if self._streams < 2 or self._part.ranks < 2 or request.kind is not RequestKind.GET:
            return False
        return self._part.fetchers > 1 or self.ahead.knows_end(request.epoch, request.slot)

    def _keep_sent(self, request: LoaderRequest, prepared: PreparedResponse) -> None:
        """Keep a batch that a rank has received, because another rank may still need it.

        While the end of a stream is not known, a rank guesses which batches are its own
        (`sharding.DynamicSchedule`). After a wrong guess, the right rank requests the batch, too.
        To prepare the batch a second time, a worker would have to restart the stream.
        """
        prepared.add_holder()
        self._sent[request] = prepared
        self._sent_bytes += prepared.reply.body_bytes + _ANSWER_BYTES
        self._limit_sent()

    def _limit_sent(self) -> None:
        """Limit the memory of batches that are kept after sending: drop the oldest ones.

        The kept batches may use a quarter of the memory limit. If the prepared batches leave less
        than a quarter free, the kept batches may use only the free part.
        """
        left_bytes = min(self._budget_bytes // 4, self._budget_bytes - self._memory_bytes)
        while self._sent and self._sent_bytes > left_bytes:
            self._drop_sent(next(iter(self._sent))).release()

    def _drop_sent(self, request: LoaderRequest) -> PreparedResponse:
        """Stop keeping a batch that was sent; return it, for the caller to release or to use."""
        prepared = self._sent.pop(request)
        self._sent_bytes -= prepared.reply.body_bytes + _ANSWER_BYTES
        return prepared

    def _record_units(self, request: LoaderRequest, units: int) -> None:
        """Store a batch's units, or VOID; the units stay known after the buffer drops the batch."""
        self._counts[request] = units
        if len(self._counts) > _KEEP_COUNTS:
            self._counts.popitem(last=False)
        if units == VOID:
            self.ahead.record_end(request.epoch, request.slot)

    def _record_next_response(self, who: Hashable, request: LoaderRequest) -> None:
        """Record that `who` must send the response to `request` next.

        Workers prepare this response even if the buffer is full. If the buffer has dropped the
        response, queue the request again.
        """
        self.add_request(who, request)
        self._due[who] = request

    def _next_request_for(
        self, worker: int, follows: Callable[[LoaderRequest], bool] | None
    ) -> LoaderRequest | None:
        """Return the next queued request that a worker may prepare; the connections take turns.

        The worker's own queues come before the queues that all workers share. After this call, the
        connection of the returned request has the last turn.

        If the next request is for a batch for which the worker would have to restart a stream,
        prefer a later request of the same epoch that needs no restart (`follows`).
        """
        owners = [it for it in (worker, None) if it in self._queues]
        if not owners:
            return None
        queue = next(iter(self._queues[owners[0]].values()))
        first = chosen = next(iter(queue))
        if follows is not None and first.kind is RequestKind.GET:
            same_epoch = itertools.takewhile(lambda one: one.epoch == first.epoch, queue)
            chosen = next(filter(follows, same_epoch), first)
        queued = self._entries[chosen].queued
        assert queued is not None
        self._queues[queued[0]].move_to_end(queued[1])
        return chosen

    def _due_request(
        self, worker: int, follows: Callable[[LoaderRequest], bool] | None
    ) -> LoaderRequest | None:
        """Return a queued request for `worker` whose response a connection must send next.

        There may be several such requests, one for each connection. For a map-style loader, return
        the request of the connection that has waited longest. For an iterable-style loader, return
        the request for the earliest batch for which the worker need not restart a stream
        (`follows`). If each batch needs a restart, return the request for the earliest batch.

        Returns:
            The request; None if there is no such request.
        """
        due = []
        for request in self._due.values():
            entry = self._entries.get(request)
            if entry is not None and entry.queued and entry.queued[0] in (worker, None):
                due.append(request)
        if follows is None:
            return next(iter(due), None)
        due.sort()
        return next(filter(follows, due), next(iter(due), None))

    def _queue(
        self, who: Hashable, request: LoaderRequest, entry: _RequestState, at_once: bool = False
    ) -> None:
        """Put a request into one of the queues of the worker that must answer the request.

        A request for a batch of a stream goes to the queue `_ALL`, which is sorted by epoch and
        slot. Any other request goes to the queue of the connection `who`. The request's state,
        `entry`, records the queue, so that `_unqueue` finds the request.

        Args:
            at_once: Whether to put the request first in the connection's queue; no effect for a
                batch of a stream.
        """
        worker = self._worker_for(request)
        is_ordered = bool(self._streams) and request.kind is RequestKind.GET
        if is_ordered:
            who, at_once = _ALL, False
        queues = self._queues.setdefault(worker, OrderedDict())
        queue = queues.setdefault(who, {})
        if is_ordered and queue and request < next(reversed(queue)):
            queues[who] = dict.fromkeys(sorted([*queue, request]))
        elif at_once:
            queues[who] = {request: None, **queue}
        else:
            queue[request] = None
        entry.queued = worker, who

    def _unqueue(self, request: LoaderRequest, entry: _RequestState) -> None:
        """Remove a request from its queue, if it is queued; delete queues that are then empty."""
        if entry.queued is None:
            return
        worker, who = entry.queued
        entry.queued = None
        queues = self._queues[worker]
        del queues[who][request]
        if not queues[who]:
            del queues[who]
        if not queues:
            del self._queues[worker]

    def _remove_waiter(self, who: Hashable, request: LoaderRequest) -> None:
        """Record that a connection no longer waits for a request.

        Do nothing if the connection does not wait for the request. If a further connection waits,
        and the request is still queued, move the request to the queue of this connection. If no
        connection waits any more, drop a queued request, or mark a prepared response as
        unrequested.
        """
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
            self._unrequested[request] = None

    def _remove(self, request: LoaderRequest) -> None:
        self._unrequested.pop(request, None)
        prepared = self._entries.pop(request).prepared
        assert prepared is not None
        self._update_totals(request, prepared, -1)
        prepared.release()

    def _update_totals(self, request: LoaderRequest, prepared: PreparedResponse, sign: int) -> None:
        size = prepared.reply.body_bytes
        self.ready_bytes += sign * size
        self._memory_bytes += sign * (size + _ANSWER_BYTES if size else 0)
        self.ready_batches += sign * (request.kind is RequestKind.GET)


class Scheduler:
    """Scheduler of one loader in a fetcher: owns the loader's prefetch buffer, workers and counts.

    Args:
        selector: The selector of the server's event loop.
        arenas: Iterator over numbers for the workers' arenas; it yields each number once.
        ready: Called with a connection when a response for the connection is ready.
        note: Called with a message for the user.

    Attributes:
        counts: The loader's counts; the server updates `counts.sent`.
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
        # Use half of the file size, because spans that ranks still read leave holes in the arena.
        fits_bytes = served.part.workers * (largest_file_bytes() // 2)
        budget_bytes = min(served.budget_bytes, fits_bytes)
        self.buffer = PrefetchBuffer(
            budget_bytes,
            PrefetchOrder(served.part, self._is_filled),
            self._worker_for,
            served.part,
            self._restart_streams,
        )
        self._streams: int | None = None
        self._knows_kind = False
        self._positions: dict[int, dict[int, int]] = {}
        self._lost_by_request: dict[LoaderRequest, int] = {}
        self._lost_workers, self._numbers = 0, itertools.count()
        self._wall_s: dict[int, float] = {}
        self.counts = FetcherCounts(workers=served.part.workers, budget_bytes=budget_bytes)
        self._workers: dict[int, WorkerHandle] = {}
        self._suspects: set[int] = set()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Fork before any connection exists, because a child would keep copies of the connections.
        context: Any = multiprocessing.get_context("fork")
        arguments = (served, theirs, self._control)
        self._parent = context.Process(target=worker.parent_main, args=arguments)
        self._parent.start()
        self._watchdog = StoppedProcessWatchdog()
        theirs.close()
        selector.register(self._control, selectors.EVENT_READ, self._on_worker_ended)

    def start(self) -> None:
        """Start the workers.

        Call this method only after the constructors of all loaders' schedulers: each constructor
        forks this process, and the fork would keep copies of the workers' sockets.
        """
        for number in range(self._served.part.workers):
            self._start(number)

    def stats(self) -> FetcherCounts:
        """Return the loader's current counts, which the run's status header shows."""
        return structs.replace(
            self.counts,
            ready=self.buffer.ready_batches,
            ready_bytes=self.buffer.ready_bytes,
            fetch_s=sum(self._wall_s.values()),
            fetch_most_s=max(self._wall_s.values(), default=0.0),
            idle=sum(not one.unanswered for one in self._workers.values()),
        )

    def dispatch(self) -> None:
        """Send the next commands to every worker whose queue has room.

        A command answers a request of a rank. If there is no such request and the buffer is not
        full, a command prepares a batch ahead. If the batch belongs to a stream, also record which
        batch of the stream comes next (`_record_next_item`).
        """
        for one in self._workers.values():
            if not (room := one.room):
                continue
            for _ in range(room):
                request = self._choose(one)
                if request is None:
                    break
                if self._streams is not None and request.kind is RequestKind.GET:
                    item, stream = divmod(request.slot, self._streams)
                    self._record_next_item(stream, request.epoch, item + 1)
                one.queue_command(next(self._numbers), request)
            one.send(self.buffer.oldest_epoch)

    def kill_stopped_parent(self) -> None:
        """Kill the parent process of the workers if it has been stopped (SIGSTOP) for too long.

        The limit is `STOPPED_S` seconds. A stopped parent process cannot restart a worker that
        ends. After the kill, the fetcher fails with an error, and the ranks use other fetchers.
        """
        self._watchdog.kill_stopped([self._parent.pid])

    def close(self) -> None:
        """End all workers and their parent process, and wait for the end of the parent process.

        When the socket to the parent process is shut down, the parent process kills the workers.
        """
        self._selector.unregister(self._control)
        # A plain close does not signal the end: other loaders' parent processes share the socket.
        self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        for one in self._workers.values():
            self._close_socket(one)
        self._parent.join()

    def _choose(self, one: WorkerHandle) -> LoaderRequest | None:
        follows = None if self._streams is None else self._continues_stream
        request = self.buffer.choose(one.number, follows)
        if request is None and not self.buffer.is_full:
            request = self.buffer.choose_ahead(one.number)
        return request

    def _worker_for(self, request: LoaderRequest) -> int | None:
        """Return the number of the worker that must answer a request; None for any worker.

        Worker 0 describes epochs and computes orders. Any worker can prepare a sample, or a batch
        with given indices. All other requests go to the worker to which the slot is assigned. This
        worker depends on the loader's kind. So the result is LATER while this fetcher does not know
        the kind. Such requests can arrive, because ranks may know the kind from another fetcher.
        """
        kind = request.kind
        if kind in (RequestKind.OPEN, RequestKind.ORDER):
            # A sampler may give a different order in each process, so only worker 0 answers.
            return 0
        has_indices = kind is RequestKind.GET and request.detail
        if kind is RequestKind.SAMPLE or has_indices:
            return None
        if not self._knows_kind:
            return LATER
        return self._served.part.assigned_worker(request.slot, self._streams)[1]

    def _continues_stream(self, request: LoaderRequest) -> bool:
        """Return whether a worker can prepare a batch without restarting the batch's stream."""
        assert self._streams is not None
        item, stream = divmod(request.slot, self._streams)
        return item >= self._positions.get(stream, {}).get(request.epoch, 0)

    def _record_next_item(self, stream: int, epoch: int, item: int) -> None:
        """Record which batch of a stream the worker's iterator yields next (`_continues_stream`).

        The record has only the latest `OPEN_EPOCHS` epochs, because a worker keeps its iterators
        over the stream only for these epochs.
        """
        epochs = self._positions.setdefault(stream, {})
        epochs.pop(epoch, None)
        epochs[epoch] = item
        if len(epochs) > OPEN_EPOCHS:
            del epochs[next(iter(epochs))]

    def _restart_streams(self, epoch: int) -> None:
        """Record that every batch of an epoch needs a restart of its stream."""
        for epochs in self._positions.values():
            if epoch in epochs:
                epochs[epoch] = sys.maxsize

    def _is_filled(self) -> bool:
        """Return whether enough batches are prepared for ranks to start (`--prefill`)."""
        served, buffer = self._served, self.buffer
        has_batches = buffer.ready_batches >= served.fill_batches
        return has_batches and buffer.ready_bytes >= served.fill_bytes

    def _start(self, number: int) -> None:
        """Ask the workers' parent process to start worker `number`.

        First make a handle and a socket pair for the worker. This process watches one socket of the
        pair for replies. The parent process gets the second socket, for the worker.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one = WorkerHandle(number, next(self._arenas), ours, number in self._suspects)
        change = msgspec.msgpack.encode(protocol.WorkerChange(number))
        with theirs:
            socket.send_fds(self._control, [change], [theirs.fileno()])
        self._workers[number] = one
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._receive_replies(one))

    def _on_worker_ended(self) -> None:
        """Receive the parent process's message that a worker has ended, and replace this worker.

        Raises:
            RuntimeError: The parent process itself has ended.
        """
        data = self._control.recv(CONTROL_BYTES)
        if not data:
            raise RuntimeError(
                f'the process that starts the workers of loader "{self._served.name}" has ended'
            )
        self._replace_worker(msgspec.msgpack.decode(data, type=protocol.WorkerChange))

    def _receive_replies(self, one: WorkerHandle) -> None:
        """Store the replies of worker `one`; if the worker has ended, close the socket to it.

        Do nothing if this socket is closed already. The worker is replaced later, when the parent
        process reports its end (`_on_worker_ended`).
        """
        if one.is_gone:
            return  # the worker's parent has reported the end in the same step
        try:
            for reply in one.receive_replies():
                self._store_reply(one, one.unanswered.pop(reply.number), reply)
        except EOFError:
            # The parent's message, which says how the worker ended, is still to come.
            self._close_socket(one)

    def _store_reply(self, one: WorkerHandle, request: LoaderRequest, reply: Reply) -> None:
        """Store a worker's reply in the buffer as the response to `request`, and count it.

        Also forget the failed attempts to prepare this response. From a reply to OPEN, record the
        loader's kind and the epoch's description. Last, call `ready` for each connection that waits
        for the response.
        """
        self.counts.prepared += 1
        self._wall_s[one.number] = self._wall_s.get(one.number, 0.0) + reply.wall_s
        self.counts.fetch_cpu_s += reply.cpu_s
        prepared = PreparedResponse(reply, one)
        if self._lost_by_request:
            self._lost_by_request.pop(request, None)
        if request.kind is RequestKind.OPEN:
            description = None
            if reply.kind is ResponseKind.OPENED:
                description = protocol.decode_epoch_description(prepared.body())
                self._streams = description.streams
            self._record_kind()
            self.buffer.ahead.record_epoch(request.epoch, description)
        self._put(request, prepared)

    def _record_kind(self) -> None:
        """In the first call, tell the buffer whether the loader is map-style or iterable-style.

        If no worker could describe an epoch, the loader counts as map-style.
        """
        if not self._knows_kind:
            self._knows_kind = True
            self.buffer.record_kind(self._streams)

    def _put(self, request: LoaderRequest, prepared: PreparedResponse) -> None:
        for connection in self.buffer.put(request, prepared):
            self._ready(connection)

    def _close_socket(self, one: WorkerHandle) -> None:
        if not one.is_gone:
            self._selector.unregister(one.socket)
            one.close()

    def _replace_worker(self, ended: protocol.WorkerChange) -> None:
        """Restart a worker that has ended, and queue its pending requests again.

        First, store the replies that the ended worker has sent. Then start the new worker, which
        gets only one command at a time. Also pass a message for the user to `note`.

        The first pending request may be the reason why the worker ended. If workers have ended
        `_MAX_LOST_PER_REQUEST` times with the same first request, do not queue this request again:
        it gets a LOST response, and the rank that receives this response fails.

        Raises:
            RuntimeError: More than `_MAX_LOST_WORKERS` workers have ended.
        """
        number, exitcode = ended.number, ended.exitcode
        one = self._workers.pop(number)
        self._receive_replies(one)  # handle the replies that the worker sent before it ended
        self._close_socket(one)
        self._suspects.add(number)
        self._start(number)
        how = f"ended with exit code {exitcode}"
        if exitcode < 0:
            how = f"was killed by {signal_name(exitcode)}"
        if ended.was_stopped:
            how = STOPPED
        how_ended = (
            f'worker {number} of {self._served.where} (loader "{self._served.name}", '
            f"pid {ended.pid}) {how}; it was started again"
        )
        self._lost_workers += 1
        if self._lost_workers > _MAX_LOST_WORKERS:
            raise RuntimeError(
                f"{self._lost_workers} workers have ended. The last time, {how_ended}"
            )
        self._note(how_ended)
        self._positions.clear()
        for at, request in enumerate(one.unanswered.values()):
            if not at:
                self._lost_by_request[request] = self._lost_by_request.get(request, 0) + 1
                if self._lost_by_request[request] >= _MAX_LOST_PER_REQUEST:
                    if request.kind is RequestKind.OPEN:
                        self._record_kind()
                    self._put(request, _lost_response(request, how_ended))
                    continue
            self.buffer.requeue(request)


def _lost_response(request: LoaderRequest, how_ended: str) -> PreparedResponse:
    """Return the LOST response to a request, after `_MAX_LOST_PER_REQUEST` workers have ended."""
    text = (
        f"batch {request.slot} of epoch {request.epoch}: in each of {_MAX_LOST_PER_REQUEST} "
        f"attempts, the worker that prepared it ended. The last time, {how_ended}. Its data may "
        "crash the process that reads them, or need more memory than the fetcher's host has"
    ).encode()
    return PreparedResponse(Reply(0, ResponseKind.LOST, 1, body_bytes=len(text)), text=text)
