"""One iterator of a registered loader: one rank's share of one epoch."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from taas_magic.data.audit import Handed
from taas_magic.data.pull import Pull
from taas_magic.data.shard import Place
from taas_magic.data.stream import Ahead, Step, steps
from taas_magic.data.supply import Reply, Supply

if TYPE_CHECKING:
    from taas_magic.data.loader import RemoteLoader

_AHEAD_FROM_BYTES = 1 << 20


class Pass(Iterator[Any]):
    """One iterator: one rank's share of one epoch."""

    def __init__(self, loader: "RemoteLoader", epoch: int, place: Place, turn: int) -> None:
        self._loader, self.epoch, self.after, self._turn = loader, epoch, place, turn
        self._supply: Supply | None = None
        self._steps: Iterator[Step] | Ahead | None = None
        self._line = -1
        self._pins = loader.shape.pin_memory and torch.cuda.is_available()
        self.ended = False

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        started = time.perf_counter()
        try:
            if self._steps is None:
                self._steps = self._begin()
            step = next(self._steps)
        except BaseException:
            self.close()
            raise
        finally:
            self._loader.counts.waited_s += time.perf_counter() - started
        return self._hand_out(step)

    def __len__(self) -> int:
        return len(self._loader)

    def close(self) -> None:
        """End the pass; its connections are closed or kept for the next one."""
        if self.ended:
            return
        self.ended = True
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
        if feed.ledger is not None:
            first = self.after.position // feed.world_size
            name, place = loader.shape.name, (feed.rank, feed.world_size, first, 0)
            self._line = feed.ledger.begin(
                Handed(feed.generation, name, self._turn, self.epoch, *place)
            )
        part = loader.part()
        return steps(self._supply, opened, part, self.epoch, self.after, feed.window_bytes)

    def _hand_out(self, step: Step) -> Any:
        loader, reply = self._loader, step.reply
        bound = loader.feed.units
        if bound is not None and loader.spent + step.row_units > bound:
            self.close()
            raise StopIteration
        if reply.size >= _AHEAD_FROM_BYTES and not isinstance(self._steps, Ahead):
            assert self._steps is not None
            self._steps = Ahead(self._steps, self._pinned)
            reply = self._pinned(reply)
        elif not isinstance(self._steps, Ahead):
            reply = self._pinned(reply)
        if self._line >= 0 and loader.feed.ledger is not None:
            loader.feed.ledger.hand(self._line)
        self.after = step.after
        loader.spent += step.row_units
        counts = loader.counts
        counts.batches += 1
        counts.units += max(reply.units, 0)
        counts.bytes += reply.size
        if reply.failure is not None:
            reply.failure.reraise()
        return reply.batch

    def _pinned(self, reply: Reply) -> Reply:
        if not self._pins:
            return reply
        return reply._replace(batch=pin_memory(reply.batch))  # type: ignore[no-untyped-call]
