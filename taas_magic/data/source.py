"""What a loader yields, prepared slot by slot: the one place where the user's dataset runs.

A fetcher's lane uses it, and a rank itself when there are no fetchers, so that the stream is the
same. A slot's batch depends on (seed, epoch, slot) and on nothing that was prepared before: map-
style loaders by indexing, iterable-style ones by replaying their stream (or from the dataset's own
`state_dict`, where it has one).
"""

import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from taas_magic.data.cursor import Cursor, Snapshots
from taas_magic.data.order import Order
from taas_magic.data.outcome import Ended, Failed, Opened
from taas_magic.data.randomness import seed_all
from taas_magic.data.shard import seed_of


class Source:
    """Prepares the batches of one loader.

    Args:
        payload: The pickled loader.
        name: Its name, for messages.
        seed: The run's seed.
        where: Who prepares ("fetcher 1 on host a"), for messages.
        worker_id: What `get_worker_info().id` is for a map-style dataset; None: no worker info.
        loader: The loader, if it was unpickled before.
    """

    def __init__(
        self,
        payload: bytes,
        name: str,
        seed: int,
        where: str,
        worker_id: int | None = None,
        loader: DataLoader[Any] | None = None,
    ) -> None:
        self._payload = payload
        self.loader: DataLoader[Any] = pickle.loads(payload) if loader is None else loader
        self._name, self._seed, self._where = name, seed, where
        self.streams = streams_of(self.loader)
        self._order = Order(self.loader, seed) if self.streams is None else None
        self._cursors: dict[int, Cursor] = {}
        self._snapshots: dict[tuple[int, int], Snapshots] = {}
        self._given: dict[int, tuple[int, int, Any]] = {}
        self._at = ""
        self._info: Any = None
        if self._order and worker_id is not None:
            self._info = self._start_worker(self.loader, worker_id, seed_of(seed))

    def open(self, epoch: int) -> Opened:
        """Say how long an epoch is. Enumerates its order.

        Raises:
            Failed: The sampler raised.
        """
        if self._order is None:
            return Opened(None, self.streams, 0)
        self._at = f"epoch {epoch}, its order"
        order = self._guarded(self._order.epoch, epoch)
        return Opened(order.batches, None, order.digest)

    def digest(self, epoch: int) -> int:
        """Hash of an epoch's order; 0 where there is none.

        Raises:
            Failed: The sampler raised.
        """
        if self._order is None:
            return 0
        known = self._order.known(epoch)
        return self.open(epoch).order if known is None else known.digest

    def indices(self, epoch: int, slot: int) -> Any:
        """The indices of a batch of a map-style loader."""
        return self._require_order().epoch(epoch).indices[slot]

    def prepare(self, epoch: int, slot: int, indices: Any = None) -> Any:
        """Return the batch in a slot.

        Args:
            epoch: The epoch.
            slot: The slot.
            indices: What to use instead of this process's own order.

        Raises:
            Ended: There is none.
            Failed: The dataset, its sampler or collate_fn raised.
        """
        self._at = f"epoch {epoch}, batch {slot}"
        if self.streams is not None:
            return self._guarded(self._next_of, epoch, slot)
        return self._guarded(self._fetch, epoch, slot, indices)

    def sample(self, index: Any) -> Any:
        """Return `dataset[index]`.

        Raises:
            Failed: It raised.
        """
        self._at = f"dataset[{index!r}]"
        dataset: Any = self.loader.dataset
        return self._guarded(dataset.__getitem__, index)

    def state(self, epoch: int, slot: int) -> tuple[int, Any] | None:
        """Where the dataset of a slot's stream stood, by its own `state_dict`.

        Returns:
            How many items the stream had given then, not more than there are before `slot`, and the
            state; None where it is not known.
        """
        if self.streams is None:
            return None
        item, stream = divmod(slot, self.streams)
        snapshots = self._snapshots.get((epoch, stream))
        return None if snapshots is None else snapshots.before(item)

    def restore(self, epoch: int, slot: int, state: Any) -> None:
        """Have the stream of a slot begin there, in a dataset that has loaded this state."""
        assert self.streams is not None
        item, stream = divmod(slot, self.streams)
        self._given[stream] = epoch, item, state

    def forget_before(self, epoch: int) -> None:
        """Nobody asks for earlier epochs any more."""
        for key in [key for key in self._snapshots if key[0] < epoch]:
            del self._snapshots[key]

    def follows(self, epoch: int, slot: int) -> bool:
        """Whether a slot is not behind what its stream has already given."""
        if self.streams is None:
            return True
        cursor = self._cursors.get(slot % self.streams)
        return cursor is None or cursor.epoch != epoch or slot // self.streams >= cursor.item

    def _require_order(self) -> Order:
        if self._order is None:
            raise TypeError(f"loader {self._name!r} is iterable-style: its batches have no indices")
        return self._order

    def _guarded(self, work: Callable[..., Any], *arguments: Any) -> Any:
        before, torch_worker._worker_info = torch_worker._worker_info, self._info
        try:
            return work(*arguments)
        except (Ended, Failed):
            raise
        except Exception:
            where = f"in {self._where} (loader {self._name!r}, {self._at})"
            raise Failed(ExceptionWrapper(where=where)) from None  # type: ignore[no-untyped-call]
        finally:
            torch_worker._worker_info = before

    def _fetch(self, epoch: int, slot: int, indices: Any) -> Any:
        if indices is None:
            try:
                indices = self.indices(epoch, slot)
            except IndexError:
                raise Ended from None
        seed_all(seed_of(self._seed, epoch, slot))
        dataset: Any = self.loader.dataset
        if self.loader.batch_sampler is None:
            return self.loader.collate_fn(self._item(dataset, indices))
        if getattr(dataset, "__getitems__", None):
            self._at += f", indices {indices}"
            return self.loader.collate_fn(dataset.__getitems__(indices))
        before = self._at
        items = [self._item(dataset, index) for index in indices]
        self._at = before
        return self.loader.collate_fn(items)

    def _item(self, dataset: Any, index: Any) -> Any:
        try:
            return dataset[index]
        except Exception:
            self._at += f", index {index}"
            raise

    def _next_of(self, epoch: int, slot: int) -> Any:
        assert self.streams is not None
        item, stream = divmod(slot, self.streams)
        cursor = self._cursors.get(stream)
        goes_on = cursor is not None and cursor.epoch == epoch and cursor.item <= item
        if not goes_on or cursor is None or cursor.item < self._given_item(epoch, slot) <= item:
            cursor = self._cursors[stream] = self._new_cursor(epoch, stream, item)
        while cursor.item < item:
            self._advance(cursor)
        return self._advance(cursor)

    def _given_item(self, epoch: int, slot: int) -> int:
        """Where the stream of a slot may begin in a state that was loaded; -1 without one."""
        assert self.streams is not None
        given_epoch, item, _ = self._given.get(slot % self.streams, (-1, -1, None))
        return item if given_epoch == epoch else -1

    def _advance(self, cursor: Cursor) -> Any:
        assert self.streams is not None
        slot = cursor.item * self.streams + cursor.stream
        torch_worker._worker_info = cursor.info
        seed_all(seed_of(self._seed, cursor.epoch, slot))
        return cursor.next_batch()

    def _new_cursor(self, epoch: int, stream: int, item: int) -> Cursor:
        loader: DataLoader[Any] = pickle.loads(self._payload)
        with suppress(AttributeError):
            loader.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
        seed = seed_of(self._seed, epoch)
        info = self._start_worker(loader, stream, seed) if loader.num_workers else None
        seed_all(seed + stream)
        snapshots = self._snapshots.setdefault((epoch, stream), Snapshots())
        start = snapshots.restore(loader.dataset, item)
        given_item = self._given_item(epoch, stream)
        if start < given_item <= item:
            state = self._given[stream][2]
            self._guarded(lambda: loader.dataset.load_state_dict(state))  # type: ignore[attr-defined]
            start = given_item
        return Cursor(loader, epoch, stream, start, info, snapshots)

    def _start_worker(self, loader: DataLoader[Any], worker_id: int, seed: int) -> Any:
        """What a local worker does first; returns what `get_worker_info()` shall answer."""
        workers = max(1, loader.num_workers)
        info = torch_worker.WorkerInfo(
            id=worker_id % workers,
            num_workers=workers,
            seed=seed + worker_id % workers,
            dataset=loader.dataset,
        )
        init = loader.worker_init_fn
        if init is not None:
            self._info, self._at = info, "worker_init_fn"
            seed_all(info.seed)
            self._guarded(init, info.id)
            self._info = None
        return info


def streams_of(loader: DataLoader[Any]) -> int | None:
    """How many streams an iterable-style loader is cut into; None for a map-style one."""
    if isinstance(loader.dataset, IterableDataset):
        return max(1, loader.num_workers)
    return None
