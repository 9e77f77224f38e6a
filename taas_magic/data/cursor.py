"""How far one stream of an iterable-style loader has come in one epoch."""

import pickle
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from taas_magic.data.outcome import Ended

_SNAPSHOT_EVERY = 64
_MOST_SNAPSHOTS = 256


class Cursor:
    """How far one stream of one epoch has come."""

    def __init__(
        self, loader: DataLoader[Any], epoch: int, stream: int, item: int, info: Any
    ) -> None:
        self.epoch, self.stream, self.item, self.info = epoch, stream, item, info
        self._loader, self._dataset = loader, loader.dataset
        self._samples: Iterator[Any] | None = None
        self._snapshots: dict[int, bytes] = {}
        self._every = _SNAPSHOT_EVERY
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
        if self.item % self._every == 0 and hasattr(self._dataset, "state_dict"):
            self._snapshots[self.item] = pickle.dumps(self._dataset.state_dict())
            self._thin_out()
        batch = self._loader.collate_fn(self._gather(self._samples))
        self.item += 1
        return batch

    def _thin_out(self) -> None:
        """Keep half of too many snapshots, so that all of a long stream can be gone back to."""
        if len(self._snapshots) > _MOST_SNAPSHOTS:
            self._every *= 2
            kept = {at: state for at, state in self._snapshots.items() if at % self._every == 0}
            self._snapshots = kept

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

    def state(self, item: int) -> tuple[int, Any] | None:
        """The dataset's last known state before `item`, and the item that it is of."""
        usable = [at for at in self._snapshots if at <= item]
        return (max(usable), pickle.loads(self._snapshots[max(usable)])) if usable else None

    def restore(self, dataset: Any, item: int) -> int:
        """Bring a fresh dataset as near to `item` as snapshots allow; returns where it stands."""
        usable = [at for at in self._snapshots if at <= item]
        if not usable or not hasattr(dataset, "load_state_dict"):
            return 0
        dataset.load_state_dict(pickle.loads(self._snapshots[max(usable)]))
        return max(usable)
