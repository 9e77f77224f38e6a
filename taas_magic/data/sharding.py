"""Assignment of batches to ranks, fetchers and workers: pure arithmetic, without torch or sockets.

A *slot* is the number of a batch in the order of its epoch: 0, 1, 2, … over all ranks. For a
map-style loader, slot s is the s-th batch of its batch sampler. An iterable-style loader is cut
into *streams*, one for each value of `get_worker_info().id`. Slot s is item s // streams of stream
s % streams. A local DataLoader with the same number of workers yields the batches in the same
order. A slot after the end of its stream has no batch and is called *void*.

The slots that are not void have the *positions* 0, 1, 2, … in order. In step p // world_size, rank
p % world_size gets the batch at position p. A *schedule* of one rank and one epoch decides which
batches the rank requests, and which batch the rank gets in each step. Schedules depend only on
their arguments and on the recorded units of the slots. So all ranks end at the same step without
communication.
"""

import hashlib
import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, get_args

Uneven = Literal["pad", "drop", "keep"]
UNEVEN: tuple[str, ...] = get_args(Uneven)

_64_BITS = (1 << 64) - 1

_FORGET_SLOTS = 1024
"""Minimum number of finished slots that `DynamicSchedule` drops together."""

_KEPT_FIRST_SLOTS = 256
"""Maximum number of an epoch's first slots in an `EpochPosition`, or the world size if larger.

A run may continue from the position with up to this number of ranks.
"""

VOID = -1
"""Value in place of a number of units, for a slot without a batch."""

UNHINTED = -2
"""Value in place of a number of units, for a batch without `hints["units"]`.

Such a batch counts as 1 unit.
"""


def is_compared(item: int) -> bool:
    """Return whether ranks compare the hash of item number `item` of a stream.

    Ranks compare only item 0 and items 1, 2, 4, 8, …, because hashing each batch would be slow.
    """
    return item & (item - 1) == 0


def seed_of(seed: int, *numbers: int) -> int:
    """Return the 63-bit seed of a loader, of one of its epochs, or of one of its batches.

    Args:
        seed: The loader's seed.
        numbers: Empty for the loader's seed; `epoch` for the seed of an epoch; `epoch, slot` for
            the seed of a batch.
    """
    packed = struct.pack(f"<{1 + len(numbers)}Q", seed & _64_BITS, *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def assigned_worker(
    slot: int, streams: int | None, fetchers: int, workers: int, stride: int = 1
) -> tuple[int, int]:
    """Return the fetcher to which a batch is assigned, and the fetcher's worker that prepares it.

    The assignment holds while all fetchers run.

    For a map-style loader and a stride of 1, the worker has the same number as in a local
    DataLoader with `workers` workers.

    Args:
        streams: Number of streams; None for a map-style loader.
        workers: Number of workers of each fetcher.
        stride: Distance between consecutive slots that these fetchers prepare. 1 if they prepare
            all slots; the world size in a run without fetchers, where each rank prepares only its
            own batches. Used only for a map-style loader.

    Returns:
        The index of the fetcher, and the number of its worker.
    """
    if streams is not None:
        stream = slot % streams
        return stream % fetchers, stream // fetchers % workers
    return divmod(slot // stride % (fetchers * workers), workers)


@dataclass(frozen=True)
class FetcherPart:
    """Rule for which of a loader's batches one fetcher prepares, until another fetcher fails.

    In a run without fetchers, each rank's data server counts as the only fetcher, and prepares only
    the batches of this rank. `first` is then the number of the rank, and `stride` is the world
    size.

    Attributes:
        workers: Number of workers of each fetcher.
        stride: Distance between consecutive slots that the fetchers prepare; 1 for all slots.
        first: First slot that the fetchers prepare.
        units: Value of `--units`; None for no limit.
        keep_first: Number of first batches of each epoch that the fetcher keeps until the epoch is
            over, because ranks may repeat them (`uneven="pad"`). Used only for streams, in which a
            worker cannot go back.
        ranks: Number of ranks that request batches from this fetcher; 1 for a rank's own server.
    """

    index: int = 0
    fetchers: int = 1
    workers: int = 1
    stride: int = 1
    first: int = 0
    units: int | None = None
    keep_first: int = 0
    ranks: int = 1

    def assigned_worker(self, slot: int, streams: int | None) -> tuple[int, int]:
        """Return the number of the fetcher that prepares a batch, and the number of its worker."""
        return assigned_worker(slot, streams, self.fetchers, self.workers, self.stride)

    def slots(self, worker: int, streams: int | None, first_slot: int) -> Iterator[int]:
        """Yield the slots whose batches a worker of this fetcher prepares, in ascending order.

        The iterator never ends, because this method does not know the length of the epoch. But if
        no stream is assigned to the worker, yield nothing.

        Args:
            streams: Number of streams; None for a map-style loader.
            first_slot: Smallest slot to yield.
        """
        if streams is None:
            step = self.stride * self.fetchers * self.workers
            begin = self.first + self.stride * (self.index * self.workers + worker)
            return itertools.count(begin + step * max(0, -(-(first_slot - begin) // step)), step)
        mine = [
            one
            for one in range(streams)
            if self.assigned_worker(one, streams) == (self.index, worker)
        ]
        items = itertools.count(first_slot // streams) if mine else ()
        slots = (item * streams + stream for item in items for stream in mine)
        return (slot for slot in slots if slot >= first_slot)


def first_slots_to_keep(world_size: int, uneven: Uneven) -> int:
    """Return how many first batches of each epoch a fetcher keeps (`FetcherPart.keep_first`).

    With the rule "pad", ranks may repeat the batches of the epoch's first step at the end of the
    epoch. So fetchers keep these batches.

    Args:
        uneven: Rule for batches that do not divide evenly among the ranks (`RankPart`).

    Returns:
        The world size for "pad" with several ranks; else 0.
    """
    return world_size if uneven == "pad" and world_size > 1 else 0


def count_steps(batches: int, rank: int, world_size: int, uneven: Uneven) -> int:
    """Return the number of batches that a rank gets in an epoch of `batches` batches.

    Args:
        uneven: Rule for batches that do not divide evenly among the ranks. `pad` repeats batches,
            `drop` omits the remaining batches, `keep` gives some ranks one batch less.
    """
    whole, rest = divmod(batches, world_size)
    if uneven == "pad":
        return whole + (rest > 0)
    return whole + (uneven == "keep" and rank < rest)


@dataclass(frozen=True, slots=True)
class RankPart:
    """Rule for which of a loader's batches one rank gets.

    Attributes:
        uneven: Rule for batches that do not divide evenly among the ranks. `pad` repeats the
            epoch's first batches (as DistributedSampler does), `drop` omits the remaining batches,
            `keep` gives some ranks one batch less.
        units: Total units that all ranks together may receive in this pass; None for no limit.
    """

    rank: int
    world_size: int
    uneven: Uneven = "pad"
    units: int | None = None


class NoSlot(Enum):
    """Reason why a schedule's method `slot_at` returns no slot for a step.

    WAIT: the units of more slots must be recorded first. END: the epoch has ended for this rank.
    """

    WAIT = "wait"
    END = "end"


class SlotRequest(NamedTuple):
    """Slot to request from a fetcher.

    Attributes:
        is_own: Whether this rank needs the batch. False requests only the batch's units.
    """

    slot: int
    is_own: bool


class EpochPosition(NamedTuple):
    """Position between two steps of an epoch, from which a pass can begin or resume.

    Attributes:
        position: Number of batches that all ranks together have received in the epoch.
        slot: First slot whose batch no rank has received.
        first_slots: Slots of the epoch's first batches, which `uneven="pad"` repeats at the end.
            A run with more ranks that continues from this position may need several steps' slots.
    """

    position: int = 0
    slot: int = 0
    first_slots: tuple[int, ...] = ()


class StaticSchedule:
    """One rank's schedule for an epoch of known length whose batches count one unit each."""

    def __init__(
        self,
        part: RankPart,
        batches: int,
        start: EpochPosition = EpochPosition(),  # noqa: B008
    ) -> None:
        self._part, self._batches = part, batches
        self._rank, self._world_size = part.rank, part.world_size
        self._next = self._first = start.position // part.world_size
        self._steps = count_steps(batches, part.rank, part.world_size, part.uneven)
        if part.units is not None:
            left = part.units // part.world_size
            if part.uneven == "keep":
                left = count_steps(part.units, part.rank, part.world_size, "keep")
            self._steps = min(self._steps, self._first + left)

    def requests(self, until_step: int) -> Iterator[SlotRequest]:
        """Yield the requests for all steps before `until_step` that no earlier call has yielded.

        Stop at the end of the epoch, and when all ranks together have requested `--units` units.
        """
        while self._next < min(until_step, self._steps):
            yield SlotRequest((self._next * self._world_size + self._rank) % self._batches, True)
            self._next += 1

    def record_units(self, slot: int, units: int) -> None:
        """Check that a batch has no `hints["units"]`; record nothing.

        This schedule is used only if the epoch's first batch has no hints. Then no batch may have
        hints.

        Args:
            units: Units of the batch. Allowed are `UNHINTED`, and 1, because a batch without hints
                counts as one unit.

        Raises:
            ValueError: The batch has hints.
        """
        if units not in (UNHINTED, 1):
            raise _mixed_hints(slot, has_hints=True)

    def slot_at(self, step: int) -> int | NoSlot:
        """Return the slot of this rank's batch in a step.

        Return `NoSlot.END` at the end of the epoch, or when `--units` is used up.
        """
        if step >= self._steps:
            return NoSlot.END
        return (step * self._world_size + self._rank) % self._batches

    def row_units(self, step: int) -> int:
        """Return the total units of all ranks' batches in a step.

        Each batch is one unit, so the result is the number of ranks that get a batch in the step.
        After the end of the epoch, the result is 0.
        """
        left = max(0, self._batches - step * self._world_size)
        if not left or left >= self._world_size:
            return min(left, self._world_size)
        return {"pad": self._world_size, "drop": 0, "keep": left}[self._part.uneven]

    def is_repeated(self, step: int) -> bool:
        """Return whether this rank's batch in a step repeats one of the epoch's first batches."""
        return step * self._world_size + self._rank >= self._batches

    def position_after(self, step: int) -> EpochPosition:
        """Return the position in the epoch after `step` steps."""
        position = step * self._world_size
        return EpochPosition(position, position)


def _mixed_hints(slot: int, has_hints: bool) -> ValueError:
    has, other = ('has hints["units"]', "does not") if has_hints else ("has no hints", "does")
    return ValueError(f"batch {slot} {has} and batch 0 {other}; give every batch hints, or none")


class DynamicSchedule:
    """One rank's schedule for an epoch whose length or units are not known in advance.

    Examples are streams, whose end is known only when a worker reaches it, and batches with
    `hints["units"]`. The schedule guesses which rank will get each batch. That rank requests the
    batch, and the other ranks request only the batch's units. So every rank knows all slots of a
    step (the step's *row*) and their units before the rank yields its own batch.

    Args:
        batches: Number of batches; None if not known.
        streams: Number of streams; 1 for a map-style loader.
        has_hints: Whether the epoch's first batch has `hints["units"]`. None without `--units`,
            because the fetchers then do not check the first batch.
    """

    def __init__(
        self,
        part: RankPart,
        batches: int | None,
        streams: int,
        start: EpochPosition = EpochPosition(),  # noqa: B008
        has_hints: bool | None = None,
    ) -> None:
        self._part, self._batches, self._streams = part, batches, streams
        self._has_hints = has_hints
        self._known: dict[int, int] = {}
        self._start = start
        self._first = list(start.first_slots)
        repeated = self._first[: part.world_size]
        self._first_to_request = [slot for slot in repeated if slot < start.slot]
        self._walked = self._next = start.slot
        self._ends: dict[int, int] = {}
        self._order: list[int] = []
        self._base = start.position
        self._voids = 0
        self._summed_steps = self._summed_units = 0

    def requests(self, until_step: int) -> Iterator[SlotRequest]:
        """Yield the requests for all steps before `until_step` that no earlier call has yielded.

        Every rank requests every slot, because it must know which slots have a batch, and how many
        units each batch has. From this, all ranks find the same last step without communication. If
        this rank probably gets the slot's batch (`_guess`), it requests the batch. Otherwise, it
        requests only the number of the batch's units (`is_own=False`).

        After a resume, the first call also requests the units of the batches in the epoch's first
        step, because the last step may repeat these batches.

        The iterator stops at the end of the epoch, if this end is known. If each batch is one unit,
        the iterator also stops after the first step that exceeds `--units`.
        """
        world_size = self._part.world_size
        until = until_step * world_size
        if self._has_hints is False and self._part.units is not None:
            # Each batch is one unit. The first step that exceeds the limit must be known.
            until = min(until, self._start.position + self._part.units + world_size)
        while self._first_to_request:
            yield SlotRequest(self._first_to_request.pop(0), is_own=False)
        while not self._ended and self._guess(self._next) < until:
            slot = self._next
            if self._batches is not None and slot >= self._batches:
                return
            all_end = len(self._ends) == self._streams
            if all_end and slot // self._streams > max(self._ends.values()):
                return
            self._next += 1
            yield SlotRequest(slot, is_own=self._guess(slot) % world_size == self._part.rank)

    def record_units(self, slot: int, units: int) -> None:
        """Record the units of a slot's batch, or VOID if the slot has no batch.

        VOID also means that the slot's stream has ended. The schedule knows the order of batches up
        to the first slot without recorded units. So this call may extend the known order by several
        slots.

        Raises:
            ValueError: The batch has hints and the epoch's first batch has none, or the reverse. A
                hint of 1 unit is always allowed.
        """
        is_mixed = units not in (VOID, 1) and self._has_hints is (units == UNHINTED)
        if is_mixed:
            raise _mixed_hints(slot, has_hints=units != UNHINTED)
        self._known[slot] = 1 if units == UNHINTED else units
        if units == VOID:
            item, stream = divmod(slot, self._streams)
            self._ends[stream] = min(item, self._ends.get(stream, item))
        while not self._ended and self._walked in self._known:
            if self._known[self._walked] == VOID:
                self._voids += 1
            else:
                is_next = len(self._first) == self._base + len(self._order)
                if is_next and len(self._first) < max(self._part.world_size, _KEPT_FIRST_SLOTS):
                    self._first.append(self._walked)
                self._order.append(self._walked)
                self._voids = 0
            self._walked += 1

    def slot_at(self, step: int) -> int | NoSlot:
        """Return the slot of this rank's batch in a step.

        The call may also free the memory of earlier steps (`_forget`).

        Returns:
            The slot; `NoSlot.WAIT` if the step's slots are not known yet; `NoSlot.END` at the end
            of the epoch, or if the step would exceed the `--units` limit.
        """
        self._forget(step - 1)
        row = self._row(step)
        if row is None:
            return NoSlot.WAIT
        if self._part.rank >= len(row) or self._exceeds_units(step):
            return NoSlot.END
        return row[self._part.rank]

    def row_units(self, step: int) -> int:
        """Return the total units of all ranks' batches in a step; all of them must be known."""
        return sum(self._known[slot] for slot in self._row(step) or ())

    def is_repeated(self, step: int) -> bool:
        """Return whether this rank's batch in a step repeats one of the epoch's first batches.

        The slots of the step must be known.
        """
        position = step * self._part.world_size + self._part.rank
        return position >= self._base + len(self._order)

    def position_after(self, step: int) -> EpochPosition:
        """Return the position in the epoch after `step` steps."""
        position = step * self._part.world_size
        taken = position - self._base
        slot = self._order[taken] if taken < len(self._order) else self._walked
        return EpochPosition(position, slot, tuple(self._first[:position]))

    @property
    def _ended(self) -> bool:
        """Whether all streams have ended, or the units of all batches are recorded."""
        return self._voids >= self._streams or self._walked == self._batches

    def _guess(self, slot: int) -> int:
        """Guess the position of a slot: the number of slots before it that have a batch.

        A slot has no batch if its stream has ended earlier. The guess uses the known ends of
        streams, and assumes that no further stream ends before the slot.
        """
        ahead = max(0, slot - self._walked)
        for stream, end in self._ends.items():
            first = max(end * self._streams + stream, self._walked)
            first += (stream - first) % self._streams
            ahead -= len(range(first, slot, self._streams))
        return self._base + len(self._order) + ahead

    def _forget(self, step: int) -> None:
        """Free the memory of all steps before `step`, if they have at least `_FORGET_SLOTS` slots.

        The slots of the epoch's first step stay, because the last step may repeat them.
        """
        done = step * self._part.world_size - self._base
        if done < _FORGET_SLOTS:
            return
        self._base += done
        del self._order[:done]
        gone = self._order[0] if self._order else self._walked
        repeated = self._first[: self._part.world_size]
        for slot in [slot for slot in self._known if slot < gone]:
            if slot not in repeated:
                del self._known[slot]

    def _row(self, step: int) -> list[int] | None:
        """Return the slots of a step, one for each rank; None if they are not known yet.

        At the end of the epoch, the list may be empty. For an incomplete last step, `uneven`
        decides: "pad" adds the epoch's first slots, "drop" gives an empty list, and "keep" gives
        fewer slots than there are ranks.
        """
        world_size = self._part.world_size
        start = step * world_size - self._base
        row = self._order[start : start + world_size]
        if len(row) == world_size:
            return row
        if not self._ended:
            return None
        if self._part.uneven == "keep" or not row:
            return row
        if self._part.uneven == "drop":
            return []
        first = self._first
        return row + [first[k % len(first)] for k in range(world_size - len(row))]

    def _exceeds_units(self, step: int) -> bool:
        """Return whether the total units of this step and all earlier steps exceed `--units`.

        Without `--units`, return False. The total is stored, and each call adds only a step that is
        new. So the caller must pass the steps in order.
        """
        if self._part.units is None:
            return False
        if step >= self._summed_steps:
            self._summed_steps = step + 1
            self._summed_units += self.row_units(step)
        return self._summed_units > self._part.units
