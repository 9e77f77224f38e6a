"""One iterator of a registered loader: one rank's share of one epoch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from taas_magic.data.audit import Handed
from taas_magic.data.gauge import Watch, sampled
from taas_magic.data.pull import Pull
from taas_magic.data.shard import Place
from taas_magic.data.stream import Ahead, Step, steps
from taas_magic.data.supply import Reply, Supply

if TYPE_CHECKING:
    from taas_magic.data.loader import RemoteLoader

_AHEAD_FROM_BYTES = 1 << 20
_LOOK_EVERY = 16


class Pass(Iterator[Any]):
    """One iterator: one rank's share of one epoch."""

    def __init__(self, loader: "RemoteLoader", epoch: int, place: Place, turn: int) -> None:
        self._loader, self.epoch, self.after, self._turn = loader, epoch, place, turn
        self._supply: Supply | None = None
        self._steps: Iterator[Step] | Ahead | None = None
        self._line = -1
        self._pins = loader.shape.pin_memory and torch.cuda.is_available()
        self.watch = Watch(loader.counts)
        self.ended = False

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        self.watch.start()
        try:
            if self._steps is None:
                self._steps = sampled(self._begin(), self._loader.counts)
            step = next(self._steps)
        except BaseException:
            self.watch.stop()
            self.close()
            raise
        self.watch.stop()
        return self._hand_out(step)

    def __len__(self) -> int:
        return len(self._loader)

    def close(self) -> None:
        """End the pass; its connections are closed or kept for the next one."""
        if self.ended:
            return
        self.ended = True
        self.watch.end()
        if isinstance(self._steps, Ahead):
            self._steps.close()
        if self._supply is not None:
            self._supply.close()
            if isinstance(self._supply, Pull):
                self._loader.counts.retried += self._supply.retried
                self._loader.keep(self._supply.blocks)

    def __del__(self) -> None:
        self.close()

    def _begin(self) -> Iterator[Step]:
        loader, feed = self._loader, self._loader.feed
        self._supply = loader.supply()
        opened = self._supply.open(self.epoch)
        loader.give_states(self._supply, opened.streams or 1)
        if feed.ledger is not None:
            first = self.after.position // feed.world_size
            name, place = loader.shape.name, (feed.rank, feed.world_size, first, 0)
            self._line = feed.ledger.begin(
                Handed(feed.generation, name, self._turn, self.epoch, *place)
            )
        part = loader.part()
        return steps(self._supply, opened, part, self.after, feed.window_bytes)

    def _hand_out(self, step: Step) -> Any:
        loader, (reply, row_units, after) = self._loader, step
        counts, bound = loader.counts, loader.feed.units
        if bound is not None and counts.spent + row_units > bound:
            self.close()
            raise StopIteration
        if not isinstance(self._steps, Ahead):
            if reply.size >= _AHEAD_FROM_BYTES:
                assert self._steps is not None
                self._steps = Ahead(self._steps, self._pinned)
            reply = self._pinned(reply) if self._pins else reply
        if self._line >= 0 and loader.feed.ledger is not None:
            loader.feed.ledger.hand(self._line)
        self.after = after
        counts.spent += row_units
        counts.batches += 1
        counts.units += max(reply.units, 0)
        counts.bytes += reply.size
        if counts.batches % _LOOK_EVERY == 1 and isinstance(self._supply, Pull):
            counts.held_bytes = self._supply.held_bytes
        if reply.failure is not None:
            reply.failure.reraise()
        return reply.batch

    def _pinned(self, reply: Reply) -> Reply:
        if not self._pins:
            return reply
        return reply._replace(batch=pin_memory(reply.batch))  # type: ignore[no-untyped-call]
