"""Who gets which batch: pure arithmetic over (loader, epoch, batch), without torch or sockets.

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
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, get_args

Uneven = Literal["pad", "drop", "keep"]
UNEVEN: tuple[str, ...] = get_args(Uneven)

_64_BITS = (1 << 64) - 1

VOID = -1
"""What is learnt of a slot that holds no batch."""


def seed_of(seed: int, *place: int) -> int:
    """The seed of one place (epoch, or epoch and batch) under a run's seed; 63 bits."""
    numbers = struct.pack(f"<{1 + len(place)}Q", seed & _64_BITS, *place)
    return int.from_bytes(hashlib.blake2b(numbers, digest_size=8).digest(), "little") >> 1


def home(slot: int, streams: int | None, lanes: int, stride: int = 1) -> int:
    """The lane that prepares a slot as long as nothing is broken.

    Args:
        slot: The slot.
        streams: How many streams there are; None for a map-style loader.
        lanes: How many lanes there are.
        stride: Distance of the slots that these lanes are asked for (a rank that prepares its own
            batches asks for every world_size-th).
    """
    return (slot // stride if streams is None else slot % streams) % lanes


def steps(batches: int, rank: int, world_size: int, uneven: Uneven) -> int:
    """How many batches a rank gets of an epoch of `batches`."""
    whole, rest = divmod(batches, world_size)
    if uneven == "pad":
        return whole + (rest > 0)
    return whole + (uneven == "keep" and rank < rest)


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a loader one rank gets, and of how much.

    Attributes:
        rank: The rank.
        world_size: Number of ranks.
        uneven: What happens when the batches do not divide evenly: `pad` begins again with the
            epoch's first ones (as DistributedSampler does), `drop` leaves the rest out, `keep`
            gives some ranks one batch less.
        units: What may still be handed out, over all ranks; None for no bound.
    """

    rank: int
    world_size: int
    uneven: Uneven = "pad"
    units: int | None = None


class Verdict(Enum):
    """What a course says of a step when it names no slot."""

    WAIT = "wait"
    END = "end"


class Ask(NamedTuple):
    """A question to a lane: a batch that is to be handed out, or only what it counts."""

    slot: int
    mine: bool


class Place(NamedTuple):
    """Where an epoch goes on: so many positions handed out, the next slot, the first slots."""

    position: int = 0
    slot: int = 0
    first_slots: tuple[int, ...] = ()


class Course:
    """A rank's way through an epoch whose length is known and whose batches count one unit each."""

    def __init__(self, part: Part, batches: int, place: Place = Place()) -> None:  # noqa: B008
        self._part, self._batches = part, batches
        self._rank, self._world_size = part.rank, part.world_size
        self._asked = self._first = place.position // part.world_size
        self._steps = steps(batches, part.rank, part.world_size, part.uneven)
        if part.units is not None:
            left = part.units // part.world_size
            if part.uneven == "keep":
                left = steps(part.units, part.rank, part.world_size, "keep")
            self._steps = min(self._steps, self._first + left)

    def __len__(self) -> int:
        return self._steps

    def asks(self, until_step: int) -> Iterator[Ask]:
        """Yield what is to be asked for so that steps before `until_step` can be taken."""
        while self._asked < min(until_step, self._steps):
            yield Ask((self._asked * self._world_size + self._rank) % self._batches, True)
            self._asked += 1

    def learn(self, slot: int, units: int) -> None:
        """Take note of what a slot counts, or that it is VOID."""
        if units != 1:
            raise ValueError(
                f"batch {slot} counts {units} units and batch 0 has no hints; "
                "give every batch hints, or none"
            )

    def at(self, step: int) -> int | Verdict:
        """The slot to hand out at a step."""
        if step >= self._steps:
            return Verdict.END
        return (step * self._world_size + self._rank) % self._batches

    def row_units(self, step: int) -> int:
        """What the batches of a step count, over all ranks."""
        if self._part.uneven == "keep":
            return min(self._batches - step * self._world_size, self._world_size)
        return self._world_size

    def place(self, step: int) -> Place:
        """Where the epoch goes on after `step` steps."""
        position = step * self._world_size
        return Place(position, position)
