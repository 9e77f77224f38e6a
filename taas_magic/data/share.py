"""What a lane prepares when nobody waits: its own share, from where the ranks are."""

from collections.abc import Callable, Iterator
from itertools import count

from taas_magic.data.lane_spec import LaneSpec
from taas_magic.data.outcome import Opened
from taas_magic.data.shard import home
from taas_magic.data.stock import Key
from taas_magic.data.wire import Kind

_NEXT_EPOCH_BATCHES = 2


class Share(Iterator[Key]):
    """The keys of that share.

    Args:
        spec: Which share.
        opened: Says what is known of an epoch; None when its sampler raised.
        is_filled: Says whether there is as much as is to be ready before ranks ask.
    """

    def __init__(
        self,
        spec: LaneSpec,
        opened: Callable[[int], Opened | None],
        is_filled: Callable[[], bool] = lambda: True,
    ) -> None:
        self._spec, self._opened, self._is_filled = spec, opened, is_filled
        self._is_asked = False
        self._epoch = self._slot = 0
        self._keys: Iterator[Key] | None = None
        self._ends: dict[int, int] = {}

    def __next__(self) -> Key:
        if self._keys is None:
            self._keys = self._share(self._epoch, self._slot)
        return next(self._keys)

    def reached(self, epoch: int, slot: int) -> None:
        """A rank asked for this batch; what the lane works ahead on lies behind it."""
        self._is_asked = True
        if epoch > self._epoch:
            self._ends = {at: end for at, end in self._ends.items() if at >= epoch}
        if epoch > self._epoch or (epoch == self._epoch and slot >= self._slot):
            self._epoch, self._slot = epoch, slot + 1
            self._keys = None

    def ended(self, epoch: int, slot: int) -> None:
        """There is no batch in this slot: not worth going on behind it."""
        self._ends[epoch] = min(slot, self._ends.get(epoch, slot))

    def _share(self, epoch: int, first_slot: int) -> Iterator[Key]:
        left = self._spec.units
        for ahead in count():
            if ahead > 1 and self._is_enough():
                return
            # Enumerating the order takes time: it is work like any other.
            yield Key(Kind.OPEN, epoch + ahead, 0)
            opened = self._opened(epoch + ahead)
            if opened is None:
                return
            slots = self._slots(epoch + ahead, opened, first_slot if not ahead else 0)
            done = 0
            for slot in slots:
                if ahead and done >= _NEXT_EPOCH_BATCHES and self._is_enough():
                    return
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
        """This lane's slots of an epoch, as long as there are any."""
        spec, streams = self._spec, opened.streams
        if streams is not None and spec.number >= streams:
            return
        for slot in count(first_slot):
            at_end = self._ends.get(epoch, opened.batches)
            if at_end is not None and slot >= at_end:
                return
            ours = streams is not None or slot % spec.stride == spec.first
            if ours and home(slot, streams, spec.lanes, spec.stride) == spec.number:
                yield slot
