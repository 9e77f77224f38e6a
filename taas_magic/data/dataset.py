"""Preparation of a loader's batches, one by one; the only module that runs the user's dataset.

The workers of fetchers run this module. In a run without fetchers, the workers of the ranks' data
servers run this module. A batch depends only on (seed, epoch, slot), not on the batches prepared
before. A map-style dataset is indexed. An iterable-style dataset is replayed from the start of the
stream, or from a saved state if the dataset has a `state_dict`.
"""

import io
import pickle
import reprlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import cloudpickle
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    IterDataPipe,
    default_collate,
    graph_settings,
)
from torch.utils.data._utils import worker as torch_worker

from taas_magic.data import encode
from taas_magic.data.definitions import Definitions
from taas_magic.data.generators import find_generators
from taas_magic.data.order import (
    EpochOrder,
    EpochOrders,
    GeneratorStates,
    call_set_epoch,
    dump_without_dataset,
    pickle_generators,
    seed_all,
)
from taas_magic.data.protocol import EpochDescription
from taas_magic.data.sharding import seed_of

OPEN_EPOCHS = 2
"""Maximum number of iterators (`Cursor`) over one stream that a worker keeps, one for each epoch.

Ranks may be in different epochs. With a single iterator, each change of the epoch would replay the
stream from its beginning.
"""

_SNAPSHOT_EVERY = 64
"""Initial number of items between snapshots of a dataset's state."""

_MOST_SNAPSHOTS = 256
"""Maximum number of snapshots of a stream.

Above this number, every second snapshot is dropped, and the interval between snapshots is doubled.
"""

_LAST_INTS_ITEM = 2
"""Index of the last item before which a `Cursor` records the int attributes of its dataset.

A cursor records these attributes before items 0, 1 and 2. By comparing the records, the cursor
finds an attribute in which the dataset counts its epochs.
"""

_MAX_DICT_INTS = 100
"""Maximum length of a dataset's dict in which a `Cursor` looks for a counter of epochs."""

_MOST_HINTED = 1000
"""Maximum number of epochs of which a worker remembers whether the first batch has hints."""

_OURS = str(Path(__file__).parent)


class NoBatch(Exception):
    """Exception for a slot without a batch: the epoch or the stream has ended."""


def hinted_units(batch: object) -> int | None:
    """Return `hints["units"]` of a batch; None if the batch has no such hint.

    A negative hint counts as 0.
    """
    hints = getattr(batch, "hints", None)
    if not isinstance(hints, dict) or "units" not in hints:
        return None
    return max(0, int(hints["units"]))


@dataclass
class LoaderParts:
    """The attributes of a DataLoader that a worker needs; DataLoader uses the same names.

    For an iterable-style loader, `sampler` and `batch_sampler` are None. A map-style loader with
    `batch_size=None` has no `batch_sampler` either.
    """

    dataset: Any
    sampler: Any
    batch_sampler: Any
    generator: Any
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], None] | None
    batch_size: int | None
    drop_last: bool
    num_workers: int
    persistent_workers: bool = False

    def pickle_visible(self, generators: GeneratorStates | None) -> bytes:
        """Pickle the samplers, the generator and the functions of the loader, without the dataset.

        Ranks unpickle the result, so that cells can read these attributes.

        Args:
            generators: Generators that the pickle contains with other states than their current
                ones.
        """
        order = self.sampler, self.batch_sampler, self.generator
        visible = *order, self.collate_fn, self.worker_init_fn
        return dump_without_dataset(visible, self.dataset, generators)


class IterableAsDataset(IterableDataset[Any]):
    """Dataset for a registered iterable that is not a DataLoader; its items are the batches.

    `len()` and the attributes, such as `set_epoch`, come from the iterable.
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)

    def __len__(self) -> int:
        return len(self.iterable)  # type: ignore[arg-type]  # TypeError if it has no length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "iterable":
            raise AttributeError(name)
        return getattr(self.iterable, name)


def unchanged_batch(batch: Any) -> Any:
    """Return `batch` unchanged: the `collate_fn` of a loader whose samples are already batches."""
    return batch


def as_data_loader(loader: Any) -> DataLoader[Any]:
    """Return `loader` if it is a DataLoader, else a DataLoader over this iterable of batches."""
    if isinstance(loader, DataLoader):
        return loader
    return DataLoader(IterableAsDataset(loader), batch_size=None, collate_fn=unchanged_batch)


def generators_of(loader: Any) -> GeneratorStates:
    """Return the random generators of a loader and its samplers, in their current state.

    Called at registration: in each run, these generators start in this state.
    """
    loader = as_data_loader(loader)
    return pickle_generators(_order_of(loader), loader.dataset)


def _order_of(loader: DataLoader[Any]) -> tuple[Any, Any, Any]:
    if isinstance(loader.dataset, IterableDataset):
        return None, None, loader.generator
    return loader.sampler, loader.batch_sampler, loader.generator


def parts_of(loader: Any) -> LoaderParts:
    """Return the attributes of a DataLoader, or other iterable of batches, that a worker needs."""
    loader = as_data_loader(loader)
    rest = [getattr(loader, it.name) for it in fields(LoaderParts)[4:]]
    return LoaderParts(loader.dataset, *_order_of(loader), *rest)


class LoadedLoader(NamedTuple):
    """Result of `load`: an unpickled loader (or its `LoaderParts`), and its definitions.

    Attributes:
        definitions: The notebook's functions and classes that the loader uses.
    """

    loader: Any
    definitions: Definitions


def load(payload: bytes) -> LoadedLoader:
    """Unpickle a loader or its `LoaderParts`.

    The loader may use functions and classes that the notebook defines. Also add these to this
    process's `__main__`, so that pickle finds them there.
    """
    unpickler = pickle.Unpickler(io.BytesIO(payload))
    loader = unpickler.load()
    found = unpickler.load() if isinstance(loader, LoaderParts) else {}
    return LoadedLoader(loader, Definitions(found))


class BatchSource:
    """The user's loader in a worker; prepares any batch of the loader on request.

    Args:
        payload: The pickled loader, or its pickled `LoaderParts`.
        where: The fetcher and its host, for messages.
        worker_id: Number of the worker. For a map-style loader with workers, the dataset's
            `get_worker_info().id` is this number modulo `num_workers`.
        loader: The loader, if the parent process has unpickled it; else None.

    Attributes:
        streams: Number of streams of an iterable-style loader; None for a map-style one.

    Raises:
        UserCodeFailed: `worker_init_fn` raised an exception.
    """

    def __init__(
        self,
        payload: bytes,
        name: str,
        seed: int,
        where: str,
        worker_id: int = 0,
        loader: Any = None,
    ) -> None:
        self._payload = payload
        self.loader: Any = _with_own_memory(load(payload).loader if loader is None else loader)
        self._name, self._seed, self._where = name, seed, where
        self.streams = count_streams(self.loader)
        self._order = EpochOrders(self.loader, seed) if self.streams is None else None
        self._cursors: dict[tuple[int, int], Cursor] = {}
        self._snapshots: dict[tuple[int, int], Snapshots] = {}
        self._hinted: dict[int, bool] = {}
        self._at = ""
        self._info: Any = None
        self._entered = -1
        self._generator = ""
        if self._order and self.loader.num_workers:
            before = set(find_generators(self.loader.dataset))
            self._info = self._start_worker(self.loader, worker_id, seed_of(seed))
            after = find_generators(self.loader.dataset)
            self._generator = next((path for path in after if path not in before), "")

    def describe_epoch(self, epoch: int) -> EpochDescription:
        """Return an epoch's description; for a map-style loader, run the sampler to find the order.

        For an iterable-style loader, run no user code. The description then has the number of
        streams. It also has the name of the attribute in which the dataset counts its epochs, if
        all of these hold:

        - An earlier epoch has shown that there is such an attribute.
        - The dataset has no `set_epoch`.
        - A local DataLoader would use the same dataset object in every epoch (`keeps_dataset`).

        Raises:
            UserCodeFailed: The sampler raised an exception.
        """
        if self._order is not None:
            self._at = f"epoch {epoch}, its order"
            order = self._run_user_code(self._start_epoch, epoch)
            return EpochDescription(order.batches, None, order.digest, generator=self._generator)
        counter = ""
        if keeps_dataset(self.loader) and not hasattr(self.loader.dataset, "set_epoch"):
            # In a local DataLoader, the dataset would count its epochs. Here each epoch starts with
            # a fresh copy of the dataset, so the counter does not advance.
            counters = (cursor.counter for cursor in self._cursors.values())
            counter = next(filter(None, counters), "")
        return EpochDescription(None, self.streams, 0, counter=counter)

    def has_hints(self, epoch: int) -> bool:
        """Return whether the epoch's first batch has `hints["units"]`; False if preparing it fails.

        The first call for an epoch prepares this batch. Later calls return the stored result,
        because preparing the first batch again would restart the stream of an iterable-style
        loader. The results of the latest `_MOST_HINTED` epochs are stored.
        """
        if epoch not in self._hinted:
            for earliest in list(self._hinted)[: 1 - _MOST_HINTED]:
                del self._hinted[earliest]
            self._hinted[epoch] = False
            # An exception here is raised again when a rank requests the batch.
            with suppress(NoBatch, UserCodeFailed):
                self._hinted[epoch] = hinted_units(self.prepare(epoch, 0)) is not None
        return self._hinted[epoch]

    def digest(self, epoch: int) -> int:
        """Return a hash of this worker's order of an epoch; 0 for an iterable-style loader.

        By comparing such hashes, a rank notices that the samplers of two workers gave different
        orders.
        """
        return 0 if self._order is None else self._order.epoch(epoch).digest

    def first_hash(self, epoch: int, slot: int) -> int:
        """Return the hash of item 0 of a stream, for the reading that gave the latest batch.

        A worker must sometimes read a stream again from the beginning. By this hash, a rank notices
        that the second reading gives different data than the first.

        Args:
            slot: Slot of the batch that was prepared last.

        Returns:
            The hash; 0 if it is not known, for example because the worker began at a saved state.
        """
        assert self.streams is not None
        return self._cursors[epoch, slot % self.streams].first_hash

    def record_first_hash(self, epoch: int, stream: int, found: int) -> None:
        """Record the hash of item 0 of a stream, which this worker has just prepared."""
        self._cursors[epoch, stream].first_hash = found

    def indices(self, epoch: int, slot: int) -> Any:
        """Return the indices of a batch of a map-style loader.

        Raises:
            TypeError: The loader is iterable-style.
            NoBatch: The slot is after the end of the epoch.
        """
        order = self._start_epoch(epoch)
        try:
            return order.indices[slot]
        except IndexError:
            raise NoBatch from None

    def all_indices(self, epoch: int) -> Any:
        """Return the indices of all batches of a map-style loader whose sampler has a length.

        Raises:
            TypeError: The loader is iterable-style.
        """
        return self._start_epoch(epoch).indices

    def prepare(self, epoch: int, slot: int, indices: Any = None) -> Any:
        """Prepare and return the batch of a slot.

        Args:
            indices: Indices of the batch's samples; None to read them from this worker's own order.

        Raises:
            NoBatch: The slot has no batch.
            UserCodeFailed: The dataset, the sampler or `collate_fn` raised an exception.
        """
        self._at = f"epoch {epoch}, batch {slot}"
        if self.streams is not None:
            return self._run_user_code(self._batch_of_stream, epoch, slot)
        return self._run_user_code(self._fetch, epoch, slot, indices)

    def sample(self, index: Any) -> Any:
        """Return `dataset[index]`.

        Raises:
            UserCodeFailed: The dataset raised an exception.
        """
        self._at = f"dataset[{index!r}]"
        dataset: Any = self.loader.dataset
        return self._run_user_code(dataset.__getitem__, index)

    def find_state(self, epoch: int, slot: int) -> tuple[int, Any] | None:
        """Return a saved state of the dataset from which the slot's stream can resume.

        The result is the latest state that was saved before the stream went beyond `slot`.

        Returns:
            The number of batches that the stream had yielded when the state was saved, and the
            result of the dataset's `state_dict`. None if there is no such state, or if the loader
            is map-style.
        """
        if self.streams is None:
            return None
        item, stream = divmod(slot, self.streams)
        snapshots = self._snapshots.get((epoch, stream))
        return None if snapshots is None else snapshots.latest_state(item)

    def restore(self, epoch: int, slot: int, state: Any) -> None:
        """Make the slot's stream resume at the slot, with a fresh dataset that loads `state`.

        Drop all other saved states of the stream.
        """
        assert self.streams is not None
        item, stream = divmod(slot, self.streams)
        for key in [key for key in self._snapshots if key[1] == stream]:
            del self._snapshots[key]
        self._snapshots_of(epoch, stream).reset_to(item, state)

    def forget_before(self, epoch: int) -> None:
        """Drop the dataset's saved states of epochs before `epoch`; ranks no longer need them.

        Keep the states of a stream for which `restore` was called, because a rank is about to
        resume in this epoch, even if other ranks are in later epochs.
        """
        for key, snapshots in list(self._snapshots.items()):
            if key[0] < epoch and not snapshots.is_restored:
                del self._snapshots[key]

    def _start_epoch(self, epoch: int) -> EpochOrder:
        """Return a map-style loader's order of an epoch.

        If the latest call was for a different epoch, also call the dataset's `set_epoch`.

        Raises:
            TypeError: The loader is iterable-style.
        """
        if self._order is None:
            raise TypeError(f'loader "{self._name}" is iterable-style: its batches have no indices')
        if epoch != self._entered:
            call_set_epoch(self.loader.dataset, epoch, "dataset")
            self._entered = epoch
        return self._order.epoch(epoch)

    def _run_user_code(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Call `work`, which runs user code, and return its result.

        During the call, torch's `get_worker_info()` returns the information about this worker. For
        an iterable-style loader, `_advance` makes it return the stream's information instead.
        After the call, `get_worker_info()` returns the same value as before the call.

        Raises:
            NoBatch: `work` raised NoBatch.
            UserCodeFailed: `work` raised any other exception, except KeyboardInterrupt.
        """
        before, torch_worker._worker_info = torch_worker._worker_info, self._info
        try:
            return work(*arguments)
        except (NoBatch, UserCodeFailed, KeyboardInterrupt):
            raise
        except BaseException as error:  # includes sys.exit, which would end the worker silently
            where = f'in {self._where} (loader "{self._name}", {self._at})'
            raise UserCodeFailed(error, where) from None
        finally:
            torch_worker._worker_info = before

    def _fetch(self, epoch: int, slot: int, indices: Any) -> Any:
        """Seed the random generators for a batch of a map-style loader, and return the batch.

        Read the items by the dataset's `__getitems__` if it exists, else one by one, and call
        `collate_fn`. Without a batch sampler, `indices` is a single index, and the batch has only
        this item. If reading an item raises an exception, add the item's index to the attribute
        `_at`, from which the caller makes the error message.

        Args:
            indices: Indices of the batch's samples; None to read them from this worker's own order.

        Raises:
            NoBatch: The slot is after the end of the epoch.
        """
        self._start_epoch(epoch)
        if indices is None:
            indices = self.indices(epoch, slot)
        dataset: Any = self.loader.dataset
        seed_all(seed_of(self._seed, epoch, slot))
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
        """Return `dataset[index]`; if the dataset raises, add `index` to the error message."""
        try:
            return dataset[index]
        except BaseException:
            self._at += f", index {index}"
            raise

    def _batch_of_stream(self, epoch: int, slot: int) -> Any:
        """Return a batch of an iterable-style loader.

        A cursor is an iterator over a stream. If the stream's cursor is before the batch, read and
        discard the batches in between, and ignore their errors. If the cursor thereby discards item
        0, record the hash of this item (`first_hash`).

        Make a new cursor in each of these cases:

        - The stream has no cursor in this epoch.
        - The cursor is past the batch.
        - A saved state of the dataset is nearer to the batch.

        A new cursor replaces the stream's cursor in this epoch. Of the stream's cursors in other
        epochs, only the most recently used one stays.

        Raises:
            NoBatch: The stream has ended before the batch.
        """
        assert self.streams is not None
        item, stream = divmod(slot, self.streams)
        cursor = self._cursors.pop((epoch, stream), None)
        if cursor is None or cursor.item != item:
            start = self._snapshots_of(epoch, stream).item_before(item)
            if cursor is None or not start <= cursor.item <= item:
                others = [key for key in self._cursors if key[1] == stream]
                for key in others[: 1 - OPEN_EPOCHS]:
                    del self._cursors[key]
                cursor = self._new_cursor(epoch, stream, item)
        self._cursors[epoch, stream] = cursor  # last, because the dict is in order of use
        while cursor.item < item:
            try:
                batch = self._advance(cursor)
                if cursor.item == 1:
                    cursor.first_hash = encode.fingerprint(encode.encode(batch))
            except NoBatch:
                raise
            except Exception:
                continue  # the error belongs to an earlier slot
        return self._advance(cursor)

    def _snapshots_of(self, epoch: int, stream: int) -> "Snapshots":
        return self._snapshots.setdefault((epoch, stream), Snapshots())

    def _advance(self, cursor: "Cursor") -> Any:
        """Seed the random generators for the next batch of a stream, and return the batch.

        First make `get_worker_info()` return the value for this stream. `_run_user_code`, in which
        this method runs, later restores the old value.
        """
        assert self.streams is not None
        slot = cursor.item * self.streams + cursor.stream
        torch_worker._worker_info = cursor.info
        seed_all(seed_of(self._seed, cursor.epoch, slot))
        return cursor.next_batch()

    def _new_cursor(self, epoch: int, stream: int, item: int) -> "Cursor":
        """Return a new cursor (iterator) over a stream, with a fresh copy of the dataset.

        Unpickle the loader again for this copy, and call the dataset's `set_epoch`. Seed and divide
        a DataPipe (`_prepare_data_pipe`). If the loader has workers, also call `worker_init_fn`.
        Then seed the random generators. The cursor begins at the latest saved state that is not
        beyond `item`; without such a state, the cursor begins at item 0.
        """
        loader, definitions = load(self._payload)
        loader = _with_own_memory(loader)
        call_set_epoch(loader.dataset, epoch, "dataset")
        seed = seed_of(self._seed, epoch)
        if isinstance(loader.dataset, IterDataPipe):
            _prepare_data_pipe(loader, epoch, stream, seed)
        info = self._start_worker(loader, stream, seed) if loader.num_workers else None
        seed_all(seed + stream)
        snapshots = self._snapshots_of(epoch, stream)
        start = snapshots.load_latest(loader.dataset, item)
        return Cursor(loader, definitions, epoch, stream, start, info, snapshots)

    def _start_worker(self, loader: Any, worker_id: int, seed: int) -> Any:
        """Run `worker_init_fn` as a worker of a local DataLoader does; return the `WorkerInfo`.

        The worker's number is `worker_id` modulo the loader's number of workers. If the loader has
        a `worker_init_fn`, first seed the random generators with the worker's seed. Only during the
        call of `worker_init_fn`, `get_worker_info()` returns the new `WorkerInfo`. The caller makes
        `get_worker_info()` return it again whenever the dataset runs.

        Args:
            seed: Base seed; the worker's own seed is the base seed plus the worker's number.

        Raises:
            UserCodeFailed: `worker_init_fn` raised an exception.
        """
        workers = max(1, loader.num_workers)
        number = worker_id % workers
        info = torch_worker.WorkerInfo(
            id=number, num_workers=workers, seed=seed + number, dataset=loader.dataset
        )
        if loader.worker_init_fn is not None:
            self._info, self._at = info, "worker_init_fn"
            seed_all(info.seed)
            self._run_user_code(loader.worker_init_fn, number)
            self._info = None
        return info


def keeps_dataset(loader: Any) -> bool:
    """Return whether a local DataLoader would iterate the same dataset object in every epoch.

    This is the case for a loader without workers, or with persistent workers.
    """
    return not loader.num_workers or bool(loader.persistent_workers)


def _prepare_data_pipe(loader: Any, epoch: int, stream: int, seed: int) -> None:
    """Prepare a DataPipe as a local DataLoader does: seed its shuffles, and select a stream's part.

    A local DataLoader draws the seed of all shuffles from its generator. Without a generator, it
    draws this seed from torch's global generator, which this function seeds with `seed`. If the
    loader has a generator, this function first repeats the draws of the earlier epochs. In each of
    them, a local DataLoader draws 3 numbers with workers, and 2 numbers without. With persistent
    workers, it draws only 1 number in each epoch after epoch 0.

    In a distributed program, a local DataLoader also divides the DataPipe among the ranks. Here,
    ranks get different batches of the same streams instead.
    """

    def draw() -> int:
        return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))

    seed_all(seed)
    if loader.generator is not None:
        first = 3 if loader.num_workers else 2
        later = 1 if loader.persistent_workers else first
        for _ in range(first + later * (epoch - 1) if epoch else 0):
            draw()
    shared = torch.Generator().manual_seed(draw())
    graph_settings.apply_random_seed(loader.dataset, shared)
    graph_settings.apply_sharding(loader.dataset, max(1, loader.num_workers), stream)


def _with_own_memory(loader: Any) -> Any:
    """Set `collate_fn` to `_collate` if it is torch's `default_collate`; return the loader.

    In a worker (`get_worker_info()` is not None), `default_collate` allocates batches in /dev/shm,
    which in a container may have only 64 MB. `_collate` allocates them in normal memory. This is
    sufficient, because our workers then copy the batches into their arena.
    """
    if loader.collate_fn is default_collate:
        loader.collate_fn = _collate
    return loader


def _collate(samples: Any) -> Any:
    """Call `default_collate` so that it allocates the batch in normal memory, not in /dev/shm.

    During the call, `get_worker_info()` returns None, as in a process that is not a worker.
    """
    before, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        return default_collate(samples)
    finally:
        torch_worker._worker_info = before


def count_streams(loader: Any) -> int | None:
    """Return the number of streams of an iterable-style loader; None for a map-style one.

    Each worker of the loader reads one stream. A loader without workers has one stream.
    """
    workers: int = max(1, loader.num_workers)
    return workers if isinstance(loader.dataset, IterableDataset) else None


@dataclass
class Cursor:
    """Iterator over the batches of one stream in one epoch, with its own copy of the dataset.

    Attributes:
        item: Index of the next batch in the stream.
        info: Value of `get_worker_info()` for the dataset; None if the loader has no workers.
        snapshots: Saved states of the dataset; this cursor adds to them.
        counter: Path of the attribute in which the dataset counts its epochs, such as `epoch` or
            `state['epoch']`; "" if there is none, or if the stream has not ended yet. An attribute
            counts epochs if its value is an int that grows by one from the stream's beginning to
            its end, but not by reading item 1.
        first_hash: Hash of item 0; 0 if it is not known.
    """

    loader: Any
    definitions: Definitions | None
    epoch: int
    stream: int
    item: int
    info: Any
    snapshots: "Snapshots"
    counter: str = ""
    first_hash: int = 0
    _samples: Iterator[Any] | None = None
    _ended: bool = False
    _ints: list[dict[str, int]] = field(default_factory=list)

    def next_batch(self) -> Any:
        """Read and return the stream's next batch, and advance the cursor by one batch.

        Before the first batches, record the dataset's int attributes, to find a counter of epochs.
        If a snapshot is due, save the dataset's state before reading the batch. No state is saved
        before the cursor's first batch. If the user's code raises an exception, the cursor still
        advances.

        Raises:
            NoBatch: The stream has ended. If an earlier call has reached the end, this call also
                frees the cursor's copy of the dataset.
        """
        if self._ended:
            # Free the dataset, but keep the cursor: ranks may request more slots at the end.
            self.loader = self.definitions = self.info = self._samples = None
            raise NoBatch
        if self.item <= _LAST_INTS_ITEM:
            self._ints.append(_int_attributes(self.loader.dataset))
        at = self.item
        self.item += 1  # even if the batch raises: a local loader also continues with the next one
        if self._samples is None:
            self._samples = iter(self.loader.dataset)
        else:
            self.snapshots.save_if_due(self.loader.dataset, at)
        return self.loader.collate_fn(self._next_samples(self._samples))

    def _epoch_counter_name(self) -> str:
        if len(self._ints) <= _LAST_INTS_ITEM:
            return ""
        before, first, second = self._ints
        after = _int_attributes(self.loader.dataset)
        is_same = {path: first.get(path) == second.get(path) for path in before}
        counted = (n for n in before if is_same[n] and after.get(n) == before[n] + 1)
        return next(counted, "")

    def _next_samples(self, samples: Iterator[Any]) -> Any:
        """Return the samples of the next batch, or one sample if `batch_size` is None.

        When the samples end, look for the attribute in which the dataset counts its epochs, and
        store the name in `counter`. With `drop_last`, drop an incomplete last batch.

        Raises:
            NoBatch: The stream has no further batch.
        """
        count, items = self.loader.batch_size, list[Any]()
        while len(items) < (count or 1):
            try:
                items.append(next(samples))
            except StopIteration:
                self._ended, self.counter = True, self._epoch_counter_name()
                break
        is_short = count is not None and self.loader.drop_last and len(items) < count
        if not items or is_short:
            raise NoBatch
        return items[0] if count is None else items


class Snapshots:
    """Saved states (`state_dict`) of a stream's dataset in one epoch.

    An item is a batch of the stream. Each state is stored with the index of the first item that the
    dataset yields after it has loaded this state.

    No state is saved before the stream has yielded an item, because `state_dict` might still report
    a wrong position. For example, a dataset whose `__iter__` is a generator may apply a loaded
    state only when the first sample is requested.

    Attributes:
        is_restored: Whether `reset_to` has replaced the states.
    """

    def __init__(self) -> None:
        self._states: dict[int, bytes] = {}
        self._every = _SNAPSHOT_EVERY
        self.is_restored = False

    def save_if_due(self, dataset: Any, item: int) -> None:
        """Save the dataset's state, if it has a `state_dict` and a snapshot is due.

        If there are then more than `_MOST_SNAPSHOTS` states, double the interval between snapshots.
        Of the saved states, keep only the first one and those at multiples of the new interval.

        Args:
            item: Index of the next item; a snapshot is due at multiples of the current interval.
        """
        if item % self._every or not hasattr(dataset, "state_dict"):
            return
        self._states[item] = cloudpickle.dumps(dataset.state_dict(), protocol=5)
        if len(self._states) > _MOST_SNAPSHOTS:
            # Keep every second snapshot, so that the snapshots still cover all of a long stream.
            self._every *= 2
            first = min(self._states)
            kept = {at: one for at, one in self._states.items() if at % self._every == 0}
            self._states = {first: self._states[first], **kept}

    def reset_to(self, item: int, state: Any) -> None:
        """Replace all saved states by `state`.

        Args:
            item: The first item that a dataset yields after it has loaded `state`.
        """
        self._states = {item: cloudpickle.dumps(state, protocol=5)}
        self.is_restored = True

    def item_before(self, item: int) -> int:
        """Return the last item up to `item` that has a saved state; 0 if there is none."""
        return max((at for at in self._states if at <= item), default=0)

    def latest_state(self, item: int) -> tuple[int, Any] | None:
        """Return the latest saved state from which a dataset can reach `item`.

        Returns:
            The first item that the dataset yields after loading the state (at most `item`), and the
            state. None if there is no such state.
        """
        at = self.item_before(item)
        return (at, pickle.loads(self._states[at])) if at in self._states else None

    def load_latest(self, dataset: Any, item: int) -> int:
        """Load a saved state into a fresh dataset: the latest state from which it can reach `item`.

        Returns:
            The first item that the dataset yields now; 0 if no state was loaded.
        """
        found = self.latest_state(item)
        if found is None or not hasattr(dataset, "load_state_dict"):
            return 0
        at, state = found
        dataset.load_state_dict(state)
        return at


def _int_attributes(dataset: Any) -> dict[str, int]:
    """Return the dataset's int attributes, and the ints in its small dicts, by their paths."""
    counted = dataset.iterable if isinstance(dataset, IterableAsDataset) else dataset
    found = dict(getattr(counted, "__dict__", {}))
    for name, value in list(found.items()):
        if type(value) is dict and len(value) <= _MAX_DICT_INTS:
            found |= {f"{name}[{reprlib.repr(key)}]": one for key, one in list(value.items())}
    return {path: value for path, value in found.items() if type(value) is int}


class UserCodeFailed(Exception):
    """Exception that a worker raises if the user's code raised an exception.

    The attribute `raised` describes the user's exception. A rank raises the exception again from
    this description.
    """

    def __init__(self, error: BaseException, where: str) -> None:
        self.raised = UserErrorReport.of(error, where)
        super().__init__(self.raised.text)


@dataclass(frozen=True)
class UserErrorReport:
    """Description of an exception of the user's code, from which a rank raises the exception again.

    Attributes:
        kind: Type of the exception; RuntimeError if the type cannot be sent.
        text: The exception and its traceback, as Python prints them.
        where: The process and the batch in which the exception occurred.
        parts: Descriptions of the exceptions in an exception group; empty for any other exception.
    """

    kind: type[BaseException]
    text: str
    where: str
    parts: tuple["UserErrorReport", ...] = ()

    @classmethod
    def of(cls, error: BaseException, where: str) -> "UserErrorReport":
        """Return the description of a caught exception.

        The text leaves out the traceback's first frames, which belong to this package, unless there
        are no other frames. For an exception group, also describe each of its exceptions (`parts`).
        """
        # Python 3.10 has no exception groups (PEP 654).
        is_group = any(base.__name__ == "BaseExceptionGroup" for base in type(error).__mro__)
        parts = getattr(error, "exceptions", ()) if is_group else ()
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS):
            frames = frames.tb_next
        frames = frames or error.__traceback__
        text = "".join(traceback.format_exception(type(error), error, frames))
        return cls(type(error), text, where, tuple(cls.of(part, where) for part in parts))

    def as_runtime_error(self) -> "UserErrorReport":
        """Return a copy with type RuntimeError, for an exception whose type cannot be pickled."""
        return replace(self, kind=RuntimeError, parts=())

    def reraise(self) -> NoReturn:
        """In the rank, raise the user's exception again; its message has the original traceback.

        Raises:
            Exception: An exception of the original type, if this type's constructor accepts a
                message.
            RuntimeError: Otherwise; also for an exception that would end the process (`sys.exit`)
                or the loop (`StopIteration`).
        """
        raise self._exception() from None

    def _exception(self) -> Exception:
        """Return the exception that `reraise` raises, with the original traceback in its message.

        The result has the type of the user's exception, except in two cases. The result is a
        RuntimeError if the user's exception would end the process (`sys.exit`) or the loop
        (`StopIteration`). The result is also a RuntimeError if the type's constructor does not
        accept a message.

        If the user's exception is an exception group, the result is a group of exceptions that are
        made in the same way from `parts`. If the type drops the message that its constructor gets,
        the traceback is added by `add_note` (from Python 3.11 on).
        """
        text = f"Caught {self.kind.__name__} {self.where}.\nOriginal {self.text}"
        if not issubclass(self.kind, Exception):
            return RuntimeError(f"{text}\nA dataset must not end its process; raise an exception.")
        if issubclass(self.kind, StopIteration):
            return RuntimeError(
                f"{text}\nIt would end the epoch of this rank only, without an error."
            )
        make: Callable[..., Exception] = self.kind
        try:
            if self.parts:
                made = make(text, [part._exception() for part in self.parts])
            elif getattr(self.kind, "message", None):
                made = make(message=text)
            else:
                made = make(_UnquotedText(text) if self.kind is KeyError else text)
        except Exception:  # the constructor needs other arguments; torch does the same
            return RuntimeError(text)
        if text not in str(made) and hasattr(made, "add_note"):
            made.add_note(text)
        return made


class _UnquotedText(str):
    """String whose repr is the string itself, for the message of a KeyError.

    A KeyError shows the repr of its argument. For a plain str, this repr has quotes, and escape
    sequences for line breaks, so that a traceback in the message would be unreadable.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
