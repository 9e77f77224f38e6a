"""One rank's iterator over its batches of one epoch.

A schedule (`sharding`) decides which batch the rank gets at each step; a client (`client`) requests
the batches from fetchers. The cell's thread runs this code; large batches are received in a second
thread (`ReceiveThread`).
"""

import itertools
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from msgspec import structs
from torch.utils.data._utils.pin_memory import pin_memory

from taas_magic.data.client import Client, SlotResponse
from taas_magic.data.other_ranks import PassComparison
from taas_magic.data.protocol import EpochDescription
from taas_magic.data.sharding import (
    UNHINTED,
    VOID,
    DynamicSchedule,
    EpochPosition,
    NoSlot,
    RankPart,
    SlotRequest,
    StaticSchedule,
)
from taas_magic.errors import ProtocolError
from taas_magic.messages import RankCounts

if TYPE_CHECKING:
    from taas_magic.data.loader import RemoteLoader

_THREAD_FROM_BYTES = 1 << 20
"""Minimum size in bytes of a batch that makes a separate thread receive all later batches."""

_MEASURE_EVERY = 16
"""Number of batches between measurements of the memory for batches (`RankCounts.held_bytes`)."""

_MOST_STEPS = 256
"""Maximum number of steps whose batches are requested ahead."""

_READY_BATCHES = 2
"""Maximum number of received batches that the receive thread keeps for the rank."""

_SAMPLE_EVERY = 16
"""Number of steps between two measurements of the time to receive a batch."""

_MAX_LOOP_GAP_S = 30.0
"""Maximum seconds after the latest batch that count as time in the cell's loop.

`EpochIterator.current_counts` adds these seconds to `RankCounts.span_s`. The time is limited,
because the cell may have left its loop (`break`). If the cell later requests a further batch, the
whole time since the latest batch counts.
"""

_EVERY_EPOCH_ALIKE = (
    'the dataset of loader "{}" counts its epochs in its attribute {!r}, but every epoch starts '
    "with a copy of the registered dataset, so the counter does not advance. Give the dataset a "
    "method set_epoch(epoch), which is called before each epoch"
)

_ANOTHER_ORDER = (
    'loader "{}": the loaded state is from the middle of epoch {}, but the order of this epoch is '
    "different now: the sampler, the generator, batch_size or the dataset has changed. Register "
    "the loader as it was when the state was saved, or start a new epoch (loader.set_epoch)"
)


_OWN_GENERATOR = (
    'worker_init_fn of loader "{}" gives the dataset a random generator of its own ({}). It is not '
    "seeded for each batch, so its numbers depend on --cpus and on where a resumed epoch begins. "
    "Draw from torch, numpy.random or random, which are seeded for each batch"
)


class Step(NamedTuple):
    """One step of a rank: the rank's batch, and the position in the epoch after the step.

    Attributes:
        row_units: Total units of all ranks' batches in this step.
        after: Position in the epoch after the step.
        is_repeated: Whether the batch repeats one of the epoch's first batches (`uneven="pad"`).
    """

    received: SlotResponse
    row_units: int
    after: EpochPosition
    is_repeated: bool


def _with_sampled_times(source: Iterator[Step], counts: RankCounts) -> Iterator[Step]:
    """Yield the steps of `source`, and measure the time to receive every 16th step.

    The wall time and the CPU time of steps 2, 18, 34, … are added to `counts`. Step 1 is not
    measured, because its time includes the start of the fetchers.
    """
    wall_s = cpu_s = 0.0
    # Skip the first batch, whose time includes the start of the fetchers.
    for number, item in enumerate(source, 1):
        if number % _SAMPLE_EVERY == 2:
            counts.receive_s += time.perf_counter() - wall_s
            counts.receive_cpu_s += time.thread_time() - cpu_s
        yield item
        if number % _SAMPLE_EVERY == 1:
            wall_s, cpu_s = time.perf_counter(), time.thread_time()


class EpochIterator(Iterator[Any]):
    """Iterator over one rank's batches of one epoch; one such iteration is called a pass.

    Args:
        pass_number: Number of iterators that the loader has made before this iterator.
        order: Hash of the epoch according to a loaded state; 0 without a loaded state. For a
            map-style loader, this is the hash of the epoch's order; another order raises an error.
            For an iterable-style loader, this is the hash of the epoch's first batch; another first
            batch causes a warning.

    Attributes:
        after: Position in the epoch after the last yielded batch.
        description: The fetchers' description of the epoch; None until the first `next`.
        ended: Whether the pass has ended or was closed.
    """

    def __init__(
        self,
        loader: "RemoteLoader",
        epoch: int,
        start: EpochPosition,
        pass_number: int,
        order: int = 0,
    ) -> None:
        self._loader, self.epoch, self.after = loader, epoch, start
        self._pass_number = pass_number
        self._comparison = PassComparison(loader.other_ranks, epoch, pass_number, order)
        self._client: Client | None = None
        self.description: EpochDescription | None = None
        self._requests: EpochRequests | None = None
        self._steps: Iterator[Step] | None = None
        self._thread: ReceiveThread | None = None
        self._line = -1
        self._pins = loader.pin_memory and torch.cuda.is_available()
        self._began = self._waits_since = self._stopped = 0.0
        self._yielded = 0
        self.ended = False

    @property
    def order(self) -> int:
        """Hash of the epoch, for a state that is saved (`PassComparison.order`)."""
        return self._comparison.order

    def __next__(self) -> Any:
        """Return the next batch, and record the wait for it in the profile, if there is a profiler.

        In a rehearsal, end the pass after `pass_batches` batches.

        Raises:
            StopIteration: The pass has ended or was closed.
            Exception: See `_next_batch`.
        """
        if self._yielded == self._loader.feed.pass_batches:
            self.close()
        if self.ended:
            raise StopIteration
        if (profiler := self._loader.feed.profiler) is None:
            return self._next_batch()
        with profiler.batch(self._loader.name):
            return self._next_batch()

    def _next_batch(self) -> Any:
        """Return the next batch, and add the time of waiting for it to the loader's counts.

        The first call begins the pass. At the epoch's end, or if receiving fails, close the pass,
        then raise StopIteration or the error. If the user's code in a fetcher raised an exception
        instead of returning the batch, raise this exception here; the pass stays open.

        At the epoch's end, also count the units of a last step in which only other ranks have a
        batch. So all ranks have counted the same units. Also warn if other ranks have read another
        epoch.
        """
        self._waits_since = time.perf_counter()
        self._began = self._began or self._waits_since
        try:
            if self._steps is None:
                self._steps = _with_sampled_times(self._begin(), self._loader.counts)
            step = next(self._steps)
        except BaseException as error:
            self._stop_waiting()
            self.close()
            if isinstance(error, StopIteration) and self._requests is not None:
                units = self._requests.units_of_others
                self._loader.counts.spent += 0 if self._would_exceed_units(units) else units
                part = "dataset" if self._loader.shape.iterable else "sampler"
                self._loader.other_ranks.compare_epoch(self.epoch, self.order, part)
            raise
        self._stop_waiting()
        return self._count_batch(step)

    def __len__(self) -> int:
        return len(self._loader)

    def close(self) -> None:
        """End the pass, without waiting for batches that were requested.

        Add the time and the repeated requests of the pass to the loader's counts. If a separate
        thread receives batches, stop the thread, which then closes the client. Otherwise, close the
        client here. Do nothing if the pass has ended already.
        """
        if self.ended:
            return
        self.ended = True
        counts = self._loader.counts
        counts.span_s += self._stopped - self._began
        self._began = self._stopped = 0.0
        if self._client is None:
            return
        counts.retried += self._client.retried
        if self._thread is not None:
            self._thread.stop()
        else:
            self._client.close()

    def __del__(self) -> None:
        self.close()

    def reset_times(self) -> None:
        """Discard the measured time of this pass; the next batch starts a new measurement."""
        self._began = self._stopped = 0.0

    def current_counts(self) -> RankCounts:
        """Return a copy of the loader's counts that includes the time of this pass so far.

        While the rank waits for a batch, the time of this wait is included. Otherwise, at most
        `_MAX_LOOP_GAP_S` seconds since the latest batch count as time in the loop. This method may
        be called from any thread.
        """
        found = structs.replace(self._loader.counts)
        now, began, waits_since = time.perf_counter(), self._began, self._waits_since
        if began:
            waiting_s = now - waits_since if waits_since else 0.0
            found.waited_s += waiting_s
            found.span_s += (
                now if waits_since else min(now, self._stopped + _MAX_LOOP_GAP_S)
            ) - began
            if not found.batches:
                found.first_s += waiting_s
        return found

    def _stop_waiting(self) -> None:
        counts, self._stopped = self._loader.counts, time.perf_counter()
        waited_s, self._waits_since = self._stopped - self._waits_since, 0.0
        counts.waited_s += waited_s
        if not counts.batches:
            counts.first_s += waited_s

    def _begin(self) -> Iterator[Step]:
        """Begin the pass: request the epoch's description, and return an iterator over the steps.

        In between, this method does the following:

        1. Make all ranks use the same order.
        2. For a map-style loader with a loaded state, check that the state has this order.
        3. Send the states of streams that `load_state_dict` received to the workers.
        4. In rank 0, warn if the dataset counts its epochs, because the counter cannot advance.
        5. In rank 0 and the loader's first pass, warn if `worker_init_fn` gives the dataset a
           random generator of its own, because this generator is not seeded.
        6. Add a line for the pass to the ledger.
        7. Compute how many units `--units` leaves for the pass.

        Raises:
            ValueError: The epoch's order is not the one that the loaded state requires.
        """
        loader, feed = self._loader, self._loader.feed
        self._client = loader.new_client()
        description = self._client.request_description(self.epoch, loader.shape.has_own_sampler)
        if description.streams is None:
            if loader.shape.has_own_sampler:
                others = loader.other_ranks
                description = others.adopt_common_order(self._client, self.epoch, description)
            if self.order and self.order != description.order:
                raise ValueError(_ANOTHER_ORDER.format(loader.name, self.epoch))
            self._comparison.order = description.order
        self.description = description
        loader.send_states(self._client, description.streams or 1)
        if description.counter and not feed.rank:
            warnings.warn(_EVERY_EPOCH_ALIKE.format(loader.name, description.counter), stacklevel=4)
        if description.generator and not feed.rank and not self._pass_number:
            warnings.warn(_OWN_GENERATOR.format(loader.name, description.generator), stacklevel=4)
        if feed.ledger is not None:
            step = self.after.position // feed.world_size
            about = loader.name, self._pass_number, self.epoch, feed.world_size, step
            self._line = feed.ledger.begin_pass(*about)
        # A loaded state may be of a run with a larger `--units`.
        left = None if feed.units is None else max(0, feed.units - loader.counts.spent)
        part = RankPart(feed.rank, feed.world_size, loader.shape.uneven, left)
        bounds = self.after, feed.window_bytes
        compare = partial(self._comparison.compare, description.streams or 1)
        self._requests = EpochRequests(self._client, description, part, *bounds, compare)
        return self._requests.steps()

    def _count_batch(self, step: Step) -> Any:
        """Count a received batch in the loader's counts and the ledger, and return the batch.

        The rank may have received an exception of the user's code instead of a batch. Count the
        exception like a batch, and then raise it.

        If the step would exceed `--units`, count nothing, and close the pass instead. Otherwise:

        - Set `after` to the position after the batch.
        - After the first batch of at least `_THREAD_FROM_BYTES`, start a thread that receives all
          later batches.
        - If the loader pins memory, copy the batch to pinned memory, unless that thread has copied
          the batch already.
        - Every `_MEASURE_EVERY` batches, measure the memory that holds batches.

        Raises:
            StopIteration: With this step's batches, the ranks together would exceed `--units`.
            Exception: The exception of the user's code.
        """
        loader, (received, row_units, after, is_repeated) = self._loader, step
        counts = loader.counts
        if self._would_exceed_units(row_units):
            self.close()
            raise StopIteration
        if self._thread is None:
            if received.size >= _THREAD_FROM_BYTES:
                assert self._steps is not None and self._client is not None
                self._steps = self._thread = ReceiveThread(self._steps, self._client, self._pins)
            received = _pinned(received) if self._pins else received
        if self._line >= 0 and loader.feed.ledger is not None:
            loader.feed.ledger.count_batch(self._line)
        self.after = after
        self._yielded += 1
        counts.spent += row_units
        counts.batches += 1
        counts.repeated += is_repeated
        counts.units += 1 if received.units == UNHINTED else received.units
        counts.bytes += received.size
        if counts.batches % _MEASURE_EVERY == 1 and self._client is not None:
            counts.held_bytes = self._client.held_bytes
        if received.failure is not None:
            received.failure.reraise()
        return received.batch

    def _would_exceed_units(self, row_units: int) -> bool:
        """Return whether a step of `row_units` units would exceed `--units`."""
        bound = self._loader.feed.units
        return bound is not None and self._loader.counts.spent + row_units > bound


def _pinned(received: SlotResponse) -> SlotResponse:
    """Copy the batch of a response to pinned memory, and return the response with this copy.

    Transfers from pinned memory to the GPU are fast.
    """
    return received._replace(batch=pin_memory(received.batch))  # type: ignore[no-untyped-call]


class EpochRequests:
    """Request loop of a rank for one epoch: requests batches early and yields the rank's steps.

    Args:
        client: Client that has requested the epoch's description.
        window_bytes: Total bytes of the batches to request before the rank needs them.
        compare: Called with the slot of a stream's batch, its hash, and whether the batch belongs
            to this rank, if the batch has a hash. The function warns if ranks get different data.
            Not called for a map-style loader.

    Attributes:
        units_of_others: After the end of the epoch, the units of a last step in which only other
            ranks have a batch; 0 if there is no such step.
    """

    def __init__(
        self,
        client: Client,
        description: EpochDescription,
        part: RankPart,
        start: EpochPosition,
        window_bytes: int,
        compare: Callable[[int, int, bool], None] = lambda *_: None,
    ) -> None:
        self._compare = compare if description.streams is not None else lambda *_: None
        self._client, self._window_bytes, self._largest_bytes = client, window_bytes, 0
        self._schedule: StaticSchedule | DynamicSchedule
        if description.batches is None or description.counted:
            has_hints = None if part.units is None else description.counted
            about = part, description.batches, description.streams or 1, start, has_hints
            self._schedule = DynamicSchedule(*about)
        else:
            self._schedule = StaticSchedule(part, description.batches, start)
        self._is_dynamic = isinstance(self._schedule, DynamicSchedule)
        self._first = self._request_again_at = start.position // part.world_size
        self._least = 2 * -(-client.workers // part.world_size) + 1  # keeps every worker busy
        self._records_own_units = part.units is not None and not self._is_dynamic
        self.units_of_others = 0
        self._unrecorded: deque[SlotRequest] = deque()
        self._kept: dict[int, SlotResponse] = {}

    def steps(self) -> Iterator[Step]:
        """Yield this rank's steps until the end of the epoch; wait for the batch of each step."""
        for step in itertools.count(self._first):
            received = self._receive_step(step)
            if received is None:
                self.units_of_others = self._schedule.row_units(step)
                return
            yield Step(
                received,
                self._schedule.row_units(step),
                self._schedule.position_after(step + 1),
                self._schedule.is_repeated(step),
            )

    def _receive_step(self, step: int) -> SlotResponse | None:
        """Return this rank's batch of a step; None at the end of the epoch.

        First, request batches of later steps, if enough steps have passed since the last request.
        While the schedule does not know the step's slot, receive the responses for further slots.
        For each of these responses, record the units in the schedule, and pass the hash to
        `compare`. If a response has a batch, keep the batch, because this rank probably needs it in
        a later step.

        Raises:
            ProtocolError: The fetchers announced the batch, but do not have it.
        """
        if step >= self._request_again_at:
            self._request_ahead(step)
        while (slot := self._schedule.slot_at(step)) is NoSlot.WAIT:
            if not self._unrecorded:
                self._request_ahead(step)
            request = self._unrecorded.popleft()
            response = self._client.wait_for_response(request)
            self._schedule.record_units(request.slot, response.units)
            if response.order:
                self._compare(request.slot, response.order, request.is_own)
            if request.is_own and response.units != VOID:
                self._kept[request.slot] = response
        if isinstance(slot, NoSlot):
            return None
        received = self._kept.pop(slot, None) or self._client.wait_for_response(
            SlotRequest(slot, True)
        )
        if received.units == VOID:
            raise ProtocolError(f"the fetchers announced batch {slot}, but do not have it")
        if self._records_own_units:
            self._schedule.record_units(slot, received.units)
        if received.size > self._largest_bytes:
            self._largest_bytes = received.size
        return received

    def _request_ahead(self, step: int) -> None:
        """Request the batches of the next steps, and compute after which step to request again.

        The number of steps is limited by `window_bytes` and `_MOST_STEPS`. Each batch is assumed to
        be as large as the largest batch so far. But request at least `_least` steps; with fewer
        steps, some workers would be idle. The next call is due a quarter of these steps later.

        If the schedule needs the units of all batches, append the requests to the queue
        `_unrecorded`. `_receive_step` receives the responses in the order of this queue.
        """
        ahead = self._least
        if self._largest_bytes:
            ahead = max(ahead, min(self._window_bytes // self._largest_bytes, _MOST_STEPS))
        requests = list(self._schedule.requests(step + ahead))
        self._client.send_requests(requests)
        if self._is_dynamic:
            self._unrecorded += requests
        self._request_again_at = step + max(1, ahead // 4)


class ReceiveThread(Iterator[Step]):
    """Iterator over a rank's steps; a thread receives their batches while the rank computes.

    The thread must not refer to the rank's `EpochIterator`. Otherwise, the `EpochIterator` would
    stay alive after the cell has dropped it, and the pass would not end. The thread itself closes
    the client, so that an interrupt or a `break` in the cell's loop does not wait for the next
    batch.

    Args:
        source: Iterator that receives the steps; only the thread iterates over `source`.
        client: The client that `source` uses; at the end, the thread closes the client.
        pins: Whether to copy batches to pinned memory.
    """

    def __init__(self, source: Iterator[Step], client: Client, pins: bool) -> None:
        self._source, self._client, self._pins = source, client, pins
        self._queue: queue.Queue[Step | BaseException] = queue.Queue(_READY_BATCHES)
        threading.Thread(target=self._run, name="taas-receive", daemon=True).start()

    def __next__(self) -> Step:
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._queue.put(item)
            raise item
        return item

    def stop(self) -> None:
        """Tell the thread to end, without waiting for its end.

        Discard the steps in the queue. Otherwise the thread could wait forever for a free place in
        the queue.
        """
        self._client.must_end = True
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait()

    def _run(self) -> None:
        """Run the thread: receive steps until the epoch ends, `stop` is called or an error occurs.

        Queue each step for the rank; wait while the queue is full. If `pins`, first copy the batch
        to pinned memory. At the end, close the client, and queue an exception, which `__next__`
        raises in the rank. This is the exception that occurred here, or else StopIteration.
        """
        end: BaseException = StopIteration()
        try:
            for step in self._source:
                if self._client.must_end:
                    break
                received = _pinned(step.received) if self._pins else step.received
                self._queue.put(step._replace(received=received))
        except BaseException as error:
            end = error  # raised again in the thread that iterates
        self._client.close()
        self._queue.put(end)
