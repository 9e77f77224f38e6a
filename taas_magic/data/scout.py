"""A rank's way through an epoch whose length or counts show only as it goes on."""

from collections.abc import Iterator

from taas_magic.data.shard import VOID, Ask, Part, Place, Verdict

_FORGET_SLOTS = 1024


class ScoutedCourse:
    """A rank's way through an epoch that has to be looked at ahead.

    That is one of streams, whose ends show only when they are reached, or one whose batches carry
    `hints["units"]`. Each slot is asked for by the rank that seems to get it and peeked at by the
    others, so that every rank knows each row before it takes its part of it.
    """

    def __init__(
        self,
        part: Part,
        batches: int | None,
        streams: int,
        place: Place = Place(),  # noqa: B008
    ) -> None:
        self._part, self._batches, self._streams = part, batches, streams
        self._known: dict[int, int] = {}
        self._place = place
        self._walked = self._asked = place.slot
        self._order: list[int] = []
        self._base = place.position
        self._voids = 0
        self._summed_steps = self._summed_units = 0

    def asks(self, until_step: int) -> Iterator[Ask]:
        """Yield what is to be asked for so that steps before `until_step` can be taken."""
        world_size = self._part.world_size
        for slot in self._place.first_slots if self._asked == self._place.slot else ():
            if slot < self._place.slot:
                yield Ask(slot, mine=False)
        while not self._ended and self._guess(self._asked) < until_step * world_size:
            slot = self._asked
            if self._batches is not None and slot >= self._batches:
                return
            self._asked += 1
            yield Ask(slot, mine=self._guess(slot) % world_size == self._part.rank)

    def learn(self, slot: int, units: int) -> None:
        """Take note of what a slot counts, or that it is VOID."""
        self._known[slot] = units
        while not self._ended and self._walked in self._known:
            if self._known[self._walked] == VOID:
                self._voids += 1
            else:
                self._order.append(self._walked)
                self._voids = 0
            self._walked += 1

    def at(self, step: int) -> int | Verdict:
        """The slot to hand out at a step; WAIT as long as its row is not known."""
        self._forget(step - 1)
        row = self._row(step)
        if row is None:
            return Verdict.WAIT
        if self._part.rank >= len(row) or self._too_much(step):
            return Verdict.END
        return row[self._part.rank]

    def row_units(self, step: int) -> int:
        """What the batches of a step count, over all ranks."""
        return sum(self._known[slot] for slot in self._row(step) or ())

    def place(self, step: int) -> Place:
        """Where the epoch goes on after `step` steps."""
        position = step * self._part.world_size
        taken = position - self._base
        slot = self._order[taken] if taken < len(self._order) else self._walked
        return Place(position, slot, self._first_slots())

    @property
    def _ended(self) -> bool:
        return self._voids >= self._streams or self._walked == self._batches

    def _guess(self, slot: int) -> int:
        """The position of a slot if no more voids come."""
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
        """The slots of a step, one for each rank; fewer, or none, at the end; None: not known."""
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
        return [*row, *self._padding(world_size - len(row))]

    def _padding(self, count: int) -> list[int]:
        first = self._first_slots()
        return [first[k % len(first)] for k in range(count)]

    def _too_much(self, step: int) -> bool:
        if self._part.units is None:
            return False
        if step >= self._summed_steps:
            self._summed_steps = step + 1
            self._summed_units += self.row_units(step)
        return self._summed_units > self._part.units
