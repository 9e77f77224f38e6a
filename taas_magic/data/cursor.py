"""How far one stream of an iterable-style loader has come in one epoch."""

import pickle
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from taas_magic.data.outcome import Ended

_SNAPSHOT_EVERY = 64
_MOST_SNAPSHOTS = 256


class Snapshots:
    """Where a stream's dataset stood now and then in one epoch, by its own `state_dict`."""

    def __init__(self) -> None:
        self._states: dict[int, bytes] = {}
        self._every = _SNAPSHOT_EVERY

    def pass_by(self, dataset: Any, item: int) -> None:
        """Take note of a dataset before an item, if it has a state and it is time."""
        if item % self._every == 0 and hasattr(dataset, "state_dict"):
            self._states[item] = pickle.dumps(dataset.state_dict())
            self._thin_out()

    def before(self, item: int) -> tuple[int, Any] | None:
        """The last known state before `item`, and the item that it is of."""
        usable = [at for at in self._states if at <= item]
        return (max(usable), pickle.loads(self._states[max(usable)])) if usable else None

    def restore(self, dataset: Any, item: int) -> int:
        """Bring a fresh dataset as near to `item` as is known; returns where it stands."""
        found = self.before(item)
        if found is None or not hasattr(dataset, "load_state_dict"):
            return 0
        at, state = found
        dataset.load_state_dict(state)
        return at

    def _thin_out(self) -> None:
        """Keep half of too many, so that all of a long stream can be gone back to."""
        if len(self._states) > _MOST_SNAPSHOTS:
            self._every *= 2
            self._states = {at: one for at, one in self._states.items() if at % self._every == 0}


class Cursor:
    """How far one stream of one epoch has come."""

    def __init__(
        self,
        loader: DataLoader[Any],
        epoch: int,
        stream: int,
        item: int,
        info: Any,
        snapshots: Snapshots,
    ) -> None:
        self.epoch, self.stream, self.item, self.info = epoch, stream, item, info
        self._loader, self._dataset, self._snapshots = loader, loader.dataset, snapshots
        self._samples: Iterator[Any] | None = None
        self._ended = False

    def next_batch(self) -> Any:
        """The stream's next batch.

        Raises:
            Ended: It has none.
        """
        if self._ended:
            raise Ended
        if self._samples is None:
            self._samples = iter(self._dataset)
        self._snapshots.pass_by(self._dataset, self.item)
        batch = self._loader.collate_fn(self._gather(self._samples))
        self.item += 1
        return batch

    def _gather(self, samples: Iterator[Any]) -> Any:
        if self._loader.batch_size is None:
            return self._take(samples, 1)[0]
        items = self._take(samples, self._loader.batch_size)
        if self._loader.drop_last and len(items) < self._loader.batch_size:
            raise Ended
        return items

    def _take(self, samples: Iterator[Any], count: int) -> list[Any]:
        items: list[Any] = []
        for _ in range(count):
            try:
                items.append(next(samples))
            except StopIteration:
                self._ended = True
                break
        if not items:
            raise Ended
        return items
