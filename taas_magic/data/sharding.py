"""Which rank gets which batch: pure arithmetic over (loader, epoch, batch).

Needs neither torch nor sockets.

A *slot* is a batch's place in the order of its epoch. For a map-style loader the slots are the
batches of its batch sampler. An iterable-style loader is cut into *streams*, one for each value of
`get_worker_info().id`; slot s is item s // streams of stream s % streams, which is the order of a
local DataLoader with as many workers, and slots of streams that have ended are *void*.

The slots that are not void, in order, have *positions* 0, 1, 2, …; position p is for rank
p mod world_size, in step p // world_size. A `Course` is one rank's way through one epoch: which
slots to ask for ahead, and what to hand out at each step. It depends on nothing but its arguments
and on what it has learnt of the slots, so all ranks end at the same step without a word between
them.
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

VOID = -1
"""What is learnt of a slot that holds no batch."""

UNHINTED = -2
"""What is learnt of a batch without `hints["units"]`, which counts one unit."""


def seed_of(seed: int, *place: int) -> int:
    """Return the seed of one place (epoch, or epoch and batch) under a run's seed; 63 bits."""
    numbers = struct.pack(f"<{1 + len(place)}Q", seed & _64_BITS, *place)
    return int.from_bytes(hashlib.blake2b(numbers, digest_size=8).digest(), "little") >> 1


def home(
    slot: int, streams: int | None, fetchers: int, workers: int, stride: int = 1
) -> tuple[int, int]:
    """Return the fetcher, and its worker, that prepare a slot as long as nothing is broken.

    A map-style batch's worker has the number that it has in a local DataLoader with as many, for
    any number of fetchers.

    Args:
        streams: How many there are; None for a map-style loader.
        workers: How many each of them has.
        stride: Distance of the slots that these are asked for (a rank that prepares its own batches
            asks for every world_size-th).
    """
    if streams is not None:
        stream = slot % streams
        return stream % fetchers, stream // fetchers % workers
    return divmod(slot // stride % (fetchers * workers), workers)


@dataclass(frozen=True)
class FetcherShare:
    """Which slots of a loader are a fetcher's as long as nothing is broken (see `home`)."""

    index: int = 0
    fetchers: int = 1
    workers: int = 1
    stride: int = 1
    first: int = 0
    units: int | None = None

    def home(self, slot: int, streams: int | None) -> tuple[int, int]:
        """Return the fetcher, and its worker, that prepare a slot."""
        return home(slot, streams, self.fetchers, self.workers, self.stride)

    def slots(self, worker: int, streams: int | None, first_slot: int) -> Iterator[int]:
        """Yield the slots from `first_slot` on that a worker of the fetcher prepares, endlessly."""
        if streams is None:
            step = self.stride * self.fetchers * self.workers
            begin = self.first + self.stride * (self.index * self.workers + worker)
            return itertools.count(begin + step * max(0, -(-(first_slot - begin) // step)), step)
        mine = [one for one in range(streams) if self.home(one, streams) == (self.index, worker)]
        items = itertools.count(first_slot // streams) if mine else ()
        slots = (item * streams + stream for item in items for stream in mine)
        return (slot for slot in slots if slot >= first_slot)


def steps(batches: int, rank: int, world_size: int, uneven: Uneven) -> int:
    """Return how many batches a rank gets of an epoch of `batches`."""
    whole, rest = divmod(batches, world_size)
    if uneven == "pad":
        return whole + (rest > 0)
    return whole + (uneven == "keep" and rank < rest)


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a loader one rank gets, and of how much.

    Attributes:
        uneven: What happens when the batches do not divide evenly: `pad` begins again with the
            epoch's first ones (as DistributedSampler does), `drop` leaves the rest out, `keep`
            gives some ranks one batch less.
        units: What may still be handed out, over all ranks; None for no bound.
    """

    rank: int
    world_size: int
    uneven: Uneven = "pad"
    units: int | None = None


class NoSlot(Enum):
    """What a course says of a step when it names no slot."""

    WAIT = "wait"
    END = "end"


class SlotRequest(NamedTuple):
    """A question to a fetcher: a batch that is to be handed out, or only what it counts."""

    slot: int
    mine: bool


class EpochPlace(NamedTuple):
    """Where an epoch goes on: so many positions handed out, the next slot, the first slots."""

    position: int = 0
    slot: int = 0
    first_slots: tuple[int, ...] = ()


class Course:
    """A rank's way through an epoch whose length is known and whose batches count one unit each."""

    def __init__(self, part: Part, batches: int, place: EpochPlace = EpochPlace()) -> None:  # noqa: B008
        self._part, self._batches = part, batches
        self._rank, self._world_size = part.rank, part.world_size
        self._asked = self._first = place.position // part.world_size
        self._steps = steps(batches, part.rank, part.world_size, part.uneven)
        if part.units is not None:
            left = part.units // part.world_size
            if part.uneven == "keep":
                left = steps(part.units, part.rank, part.world_size, "keep")
            self._steps = min(self._steps, self._first + left)

    def asks(self, until_step: int) -> Iterator[SlotRequest]:
        """Yield what is to be asked for so that steps before `until_step` can be taken."""
        while self._asked < min(until_step, self._steps):
            yield SlotRequest((self._asked * self._world_size + self._rank) % self._batches, True)
            self._asked += 1

    def learn(self, slot: int, units: int) -> None:
        """Take note of what a slot counts, or that it is VOID."""
        if units not in (UNHINTED, 1):
            raise _mixed_hints(slot, has_hints=True)

    def at(self, step: int) -> int | NoSlot:
        """Return the slot to hand out at a step."""
        if step >= self._steps:
            return NoSlot.END
        return (step * self._world_size + self._rank) % self._batches

    def row_units(self, step: int) -> int:
        """Return what the batches of a step count, over all ranks."""
        if self._part.uneven == "keep":
            return min(self._batches - step * self._world_size, self._world_size)
        return self._world_size

    def place(self, step: int) -> EpochPlace:
        """Return where the epoch goes on after `step` steps."""
        position = step * self._world_size
        return EpochPlace(position, position)


def _mixed_hints(slot: int, has_hints: bool) -> ValueError:
    has, other = ('has hints["units"]', "does not") if has_hints else ("has no hints", "does")
    return ValueError(f"batch {slot} {has} and batch 0 {other}; give every batch hints, or none")


class ScoutedCourse:
    """A rank's way through an epoch that has to be looked at ahead.

    That is one of streams, whose ends show only when they are reached, or one whose batches carry
    `hints["units"]`. Each slot is asked for by the rank that seems to get it and peeked at by the
    others, so that every rank knows each row before it takes its part of it.

    Args:
        has_hints: Whether the epoch's first batch carries `hints["units"]`; None if `--units` does
            not bound the run and nobody looked.
    """

    def __init__(
        self,
        part: Part,
        batches: int | None,
        streams: int,
        place: EpochPlace = EpochPlace(),  # noqa: B008
        has_hints: bool | None = None,
    ) -> None:
        self._part, self._batches, self._streams = part, batches, streams
        self._has_hints = has_hints
        self._known: dict[int, int] = {}
        self._place = place
        self._walked = self._asked = place.slot
        self._order: list[int] = []
        self._base = place.position
        self._voids = 0
        self._summed_steps = self._summed_units = 0

    def asks(self, until_step: int) -> Iterator[SlotRequest]:
        """Yield what is to be asked for so that steps before `until_step` can be taken."""
        world_size = self._part.world_size
        for slot in self._place.first_slots if self._asked == self._place.slot else ():
            if slot < self._place.slot:
                yield SlotRequest(slot, mine=False)
        while not self._ended and self._guess(self._asked) < until_step * world_size:
            slot = self._asked
            if self._batches is not None and slot >= self._batches:
                return
            self._asked += 1
            yield SlotRequest(slot, mine=self._guess(slot) % world_size == self._part.rank)

    def learn(self, slot: int, units: int) -> None:
        """Record what a slot counts, or that it is VOID.

        Raises:
            ValueError: The batch has hints and the first one has none, or the reverse.
        """
        is_mixed = units not in (VOID, 1) and self._has_hints is (units == UNHINTED)
        if is_mixed:
            raise _mixed_hints(slot, has_hints=units != UNHINTED)
        self._known[slot] = 1 if units == UNHINTED else units
        while not self._ended and self._walked in self._known:
            if self._known[self._walked] == VOID:
                self._voids += 1
            else:
                self._order.append(self._walked)
                self._voids = 0
            self._walked += 1

    def at(self, step: int) -> int | NoSlot:
        """Return the slot to hand out at a step; WAIT as long as its row is not known."""
        self._forget(step - 1)
        row = self._row(step)
        if row is None:
            return NoSlot.WAIT
        if self._part.rank >= len(row) or self._is_too_much(step):
            return NoSlot.END
        return row[self._part.rank]

    def row_units(self, step: int) -> int:
        """Return what the batches of a step count, over all ranks."""
        return sum(self._known[slot] for slot in self._row(step) or ())

    def place(self, step: int) -> EpochPlace:
        """Return where the epoch goes on after `step` steps."""
        position = step * self._part.world_size
        taken = position - self._base
        slot = self._order[taken] if taken < len(self._order) else self._walked
        return EpochPlace(position, slot, self._first_slots())

    @property
    def _ended(self) -> bool:
        return self._voids >= self._streams or self._walked == self._batches

    def _guess(self, slot: int) -> int:
        """Return the position of a slot if no more voids come."""
        return self._base + len(self._order) + max(0, slot - self._walked)

    def _first_slots(self) -> tuple[int, ...]:
        if self._base == 0:
            return tuple(self._order[: self._part.world_size])
        return self._place.first_slots

    def _forget(self, step: int) -> None:
        """Let go of what is known of the rows before `step`, a thousand slots at a time."""
        done = step * self._part.world_size - self._base
        if done < _FORGET_SLOTS:
            return
        self._place = self._place._replace(first_slots=self._first_slots())
        self._base += done
        del self._order[:done]
        gone = self._order[0] if self._order else self._walked
        for slot in [slot for slot in self._known if slot < gone]:
            if slot not in self._place.first_slots:
                del self._known[slot]

    def _row(self, step: int) -> list[int] | None:
        """Return the slots of a step, a rank each; fewer, or none, at the end; None: not known."""
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
        first = self._first_slots()
        return row + [first[k % len(first)] for k in range(world_size - len(row))]

    def _is_too_much(self, step: int) -> bool:
        """Return whether the units are used up before the end of a step."""
        if self._part.units is None:
            return False
        if step >= self._summed_steps:
            self._summed_steps = step + 1
            self._summed_units += self.row_units(step)
        return self._summed_units > self._part.units
