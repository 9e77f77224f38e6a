"""What a loader yields, prepared slot by slot: the one place where the user's dataset runs.

Every worker uses it, a fetcher's and, where there are no fetchers, a rank's own. A slot's batch
depends on (seed, epoch, slot) and on nothing that was prepared before: map-style loaders by
indexing, iterable-style ones by replaying their stream (or from the dataset's own `state_dict`,
where it has one).
"""

import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data._utils import worker as torch_worker

from taas_magic.data.generators import own_generators
from taas_magic.data.order import Epoch, Order, dump_beside, load_beside, seed_all, tell_epoch
from taas_magic.data.protocol import Opened
from taas_magic.data.sharding import seed_of

OPEN_EPOCHS = 2
"""In how many epochs a stream is open at once, where its ranks are not in the same one. With a
single cursor each change between the epochs would be a replay of the stream."""

_SNAPSHOT_EVERY = 64
_MOST_SNAPSHOTS = 256
_LOOKS_AT_INTS = 2
_OURS = str(Path(__file__).parent)


class Ended(Exception):
    """There is no batch in this slot."""


def own_units(batch: object) -> int | None:
    """Return what a batch itself says that it counts in `--units` (`hints["units"]`), else None."""
    hints = getattr(batch, "hints", None)
    if not isinstance(hints, dict) or "units" not in hints:
        return None
    return max(0, int(hints["units"]))


@dataclass
class LoaderParts:
    """A DataLoader's parts, by its own names; no iterator that it keeps, and none of its methods.

    An iterable-style loader has no `sampler`, and only some map-style ones a `batch_sampler`.
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

    def shown(self) -> bytes:
        """Pickle what ranks may look at, without the dataset."""
        order = self.sampler, self.batch_sampler, self.generator
        return dump_beside((*order, self.collate_fn, self.worker_init_fn), self.dataset)


class Plain(IterableDataset[Any]):
    """A registered iterable that is no DataLoader: what it yields are the batches."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)


def as_it_is(batch: Any) -> Any:
    """Return a batch as it is (collate_fn of a loader whose samples are batches)."""
    return batch


def as_data_loader(loader: Any) -> DataLoader[Any]:
    """Return a DataLoader that yields what a loader of any kind yields."""
    if isinstance(loader, DataLoader):
        return loader
    return DataLoader(Plain(loader), batch_size=None, collate_fn=as_it_is)


def order_start(loader: Any) -> bytes:
    """Return where a loader's sampler and generator stand: its order can begin there later."""
    loader = as_data_loader(loader)
    return dump_beside(_order_of(loader), loader.dataset)


def _order_of(loader: DataLoader[Any]) -> tuple[Any, Any, Any]:
    """Return a loader's sampler, batch sampler and generator."""
    if isinstance(loader.dataset, IterableDataset):
        return None, None, loader.generator
    return loader.sampler, loader.batch_sampler, loader.generator


def parts_of(loader: Any, start: bytes | None = None) -> LoaderParts:
    """Return a loader's parts, its sampler and generator as at `start`; None: as they are."""
    loader = as_data_loader(loader)
    order = _order_of(loader) if start is None else load_beside(start, loader.dataset)
    rest = [getattr(loader, it.name) for it in fields(LoaderParts)[4:]]
    return LoaderParts(loader.dataset, *order, *rest)


class Source:
    """Prepares the batches of one loader.

    Args:
        payload: The pickled loader, or its parts (`LoaderParts`).
        worker_id: What `get_worker_info().id` is for a map-style dataset of a loader with workers.
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
        self.loader: Any = _with_own_memory(pickle.loads(payload) if loader is None else loader)
        self._name, self._seed, self._where = name, seed, where
        self.streams = streams_of(self.loader)
        self._order = Order(self.loader, seed) if self.streams is None else None
        self._cursors: dict[tuple[int, int], Cursor] = {}
        self._snapshots: dict[tuple[int, int], Snapshots] = {}
        self._at = ""
        self._info: Any = None
        self._entered = -1
        self._generator = ""
        if self._order and self.loader.num_workers:
            before = set(own_generators(self.loader.dataset))
            self._info = self._start_worker(self.loader, worker_id, seed_of(seed))
            after = own_generators(self.loader.dataset)
            self._generator = next((path for path in after if path not in before), "")

    def open(self, epoch: int) -> Opened:
        """Return how long an epoch is; enumerate its order.

        Raises:
            Failed: The sampler raised.
        """
        if self._order is not None:
            self._at = f"epoch {epoch}, its order"
            order = self._guarded(self._enter, epoch)
            return Opened(order.batches, None, order.digest, generator=self._generator)
        counter = ""
        if goes_on(self.loader) and not hasattr(self.loader.dataset, "set_epoch"):
            # The dataset counts epochs that it begins afresh here, and would not locally.
            counters = (cursor.counter for cursor in self._cursors.values())
            counter = next(filter(None, counters), "")
        return Opened(None, self.streams, 0, counter=counter)

    def digest(self, epoch: int) -> int:
        """Return the hash of the order of an epoch that was begun; 0 where there is none."""
        return 0 if self._order is None else self._order.epoch(epoch).digest

    def indices(self, epoch: int, slot: int) -> Any:
        """Return the indices of a batch of a map-style loader."""
        return self._enter(epoch).indices[slot]

    def all_indices(self, epoch: int) -> Any:
        """Return the indices of all batches of a map-style loader whose sampler has a length."""
        return self._enter(epoch).indices

    def prepare(self, epoch: int, slot: int, indices: Any = None) -> Any:
        """Return the batch in a slot.

        Args:
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
        """Return where the dataset of a slot's stream stood, by its own `state_dict`.

        Returns:
            How many items the stream had given then, not more than there are before `slot`, and the
            state; None: not known.
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
        for key in [key for key in self._snapshots if key[1] == stream]:
            del self._snapshots[key]
        self._snapshots_of(epoch, stream).begin_at(item, state)

    def forget_before(self, epoch: int) -> None:
        """Forget earlier epochs, which nobody asks for any more."""
        for key in [key for key in self._snapshots if key[0] < epoch]:
            del self._snapshots[key]

    def _enter(self, epoch: int) -> Epoch:
        """Return the order of an epoch, of which a map-style dataset has been told."""
        if self._order is None:
            raise TypeError(f'loader "{self._name}" is iterable-style: its batches have no indices')
        if epoch != self._entered:
            tell_epoch(self.loader.dataset, epoch, "dataset")
            self._entered = epoch
        return self._order.epoch(epoch)

    def _guarded(self, work: Callable[..., Any], *arguments: Any) -> Any:
        before, torch_worker._worker_info = torch_worker._worker_info, self._info
        try:
            return work(*arguments)
        except (Ended, Failed, KeyboardInterrupt):
            raise
        except BaseException as error:  # sys.exit, too: it would end a worker without a word
            where = f'in {self._where} (loader "{self._name}", {self._at})'
            raise Failed(error, where) from None
        finally:
            torch_worker._worker_info = before

    def _fetch(self, epoch: int, slot: int, indices: Any) -> Any:
        order = self._enter(epoch)
        if indices is None:
            try:
                indices = order.indices[slot]
            except IndexError:
                raise Ended from None
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
        try:
            return dataset[index]
        except BaseException:
            self._at += f", index {index}"
            raise

    def _next_of(self, epoch: int, slot: int) -> Any:
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
        self._cursors[epoch, stream] = cursor  # behind those that were used before it
        while cursor.item < item:
            try:
                self._advance(cursor)
            except Ended:
                raise
            except Exception:
                continue  # what it raises is the answer to another question
        return self._advance(cursor)

    def _snapshots_of(self, epoch: int, stream: int) -> "Snapshots":
        return self._snapshots.setdefault((epoch, stream), Snapshots())

    def _advance(self, cursor: "Cursor") -> Any:
        assert self.streams is not None
        slot = cursor.item * self.streams + cursor.stream
        torch_worker._worker_info = cursor.info
        seed_all(seed_of(self._seed, cursor.epoch, slot))
        return cursor.next_batch()

    def _new_cursor(self, epoch: int, stream: int, item: int) -> "Cursor":
        loader: Any = _with_own_memory(pickle.loads(self._payload))
        tell_epoch(loader.dataset, epoch, "dataset")
        seed = seed_of(self._seed, epoch)
        info = self._start_worker(loader, stream, seed) if loader.num_workers else None
        seed_all(seed + stream)
        snapshots = self._snapshots_of(epoch, stream)
        start = snapshots.restore(loader.dataset, item)
        return Cursor(loader, epoch, stream, start, info, snapshots)

    def _start_worker(self, loader: Any, worker_id: int, seed: int) -> Any:
        """Do what a local worker does first; return what `get_worker_info()` shall answer."""
        workers = max(1, loader.num_workers)
        number = worker_id % workers
        info = torch_worker.WorkerInfo(
            id=number, num_workers=workers, seed=seed + number, dataset=loader.dataset
        )
        if loader.worker_init_fn is not None:
            self._info, self._at = info, "worker_init_fn"
            seed_all(info.seed)
            self._guarded(loader.worker_init_fn, number)
            self._info = None
        return info


def goes_on(loader: Any) -> bool:
    """Return whether a local DataLoader iterates one and the same dataset in every epoch."""
    return not loader.num_workers or bool(loader.persistent_workers)


def _with_own_memory(loader: Any) -> Any:
    """Keep a loader's batches out of /dev/shm, which has 64 MB in a container.

    Where `get_worker_info()` answers, torch's default_collate makes batches there, for a process
    that is to map them; here they are copied once into a worker's arena.
    """
    if loader.collate_fn is default_collate:
        loader.collate_fn = _collate
    return loader


def _collate(samples: Any) -> Any:
    before, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        return default_collate(samples)
    finally:
        torch_worker._worker_info = before


def streams_of(loader: Any) -> int | None:
    """Return how many streams an iterable-style loader is cut into; None for a map-style one."""
    workers: int = max(1, loader.num_workers)
    return workers if isinstance(loader.dataset, IterableDataset) else None


@dataclass
class Cursor:
    """One stream of one epoch, and how far it has been read.

    Attributes:
        counter: Attribute in which the dataset counts its epochs, known at the stream's end; ""
            for none. It has grown by one, and did not change from one batch to the next.
    """

    loader: Any
    epoch: int
    stream: int
    item: int
    info: Any
    snapshots: "Snapshots"
    counter: str = ""
    _samples: Iterator[Any] | None = None
    _ended: bool = False
    _ints: list[dict[str, int]] = field(default_factory=list)

    def next_batch(self) -> Any:
        """Return the stream's next batch.

        Raises:
            Ended: It has none.
        """
        if self._ended:
            self.loader = self.info = self._samples = None  # ranks may still ask for the end
            raise Ended
        if self.item <= _LOOKS_AT_INTS:
            self._ints.append(_ints_of(self.loader.dataset))
        at = self.item
        self.item += 1  # what raises has had its turn: a local loader goes on behind it, too
        if self._samples is None:
            self._samples = iter(self.loader.dataset)
        else:
            self.snapshots.pass_by(self.loader.dataset, at)
        return self.loader.collate_fn(self._gather(self._samples))

    def _counted(self) -> str:
        if len(self._ints) <= _LOOKS_AT_INTS:
            return ""
        before, first, second = self._ints
        after = _ints_of(self.loader.dataset)
        counted = (n for n in before if after.get(n) == before[n] + 1 and first[n] == second[n])
        return next(counted, "")

    def _gather(self, samples: Iterator[Any]) -> Any:
        count, items = self.loader.batch_size, list[Any]()
        while len(items) < (count or 1):
            try:
                items.append(next(samples))
            except StopIteration:
                self._ended, self.counter = True, self._counted()
                break
        is_short = count is not None and self.loader.drop_last and len(items) < count
        if not items or is_short:
            raise Ended
        return items[0] if count is None else items


class Snapshots:
    """Where a stream's dataset stood now and then in one epoch, by its own `state_dict`.

    Taken only behind items that the dataset has given: one that has loaded a state, or whose
    `__iter__` is a generator, does not say where it is to begin before it has begun.
    """

    def __init__(self) -> None:
        self._states: dict[int, bytes] = {}
        self._every = _SNAPSHOT_EVERY

    def pass_by(self, dataset: Any, item: int) -> None:
        """Take note of a dataset before an item, if it has a state and it is time."""
        if item % self._every or not hasattr(dataset, "state_dict"):
            return
        self._states[item] = cloudpickle.dumps(dataset.state_dict(), protocol=5)
        if len(self._states) > _MOST_SNAPSHOTS:
            # Half of them are kept, so that all of a long stream can be gone back to.
            self._every *= 2
            first = min(self._states)
            kept = {at: one for at, one in self._states.items() if at % self._every == 0}
            self._states = {first: self._states[first], **kept}

    def begin_at(self, item: int, state: Any) -> None:
        """Take a state that was loaded: what is known of the stream begins there."""
        self._states = {item: cloudpickle.dumps(state, protocol=5)}

    def item_before(self, item: int) -> int:
        """Return the latest item, not behind `item`, where the stream can begin; 0 is one."""
        return max((at for at in self._states if at <= item), default=0)

    def before(self, item: int) -> tuple[int, Any] | None:
        """Return the last known state before `item`, and the item that it is of."""
        at = self.item_before(item)
        return (at, pickle.loads(self._states[at])) if at in self._states else None

    def restore(self, dataset: Any, item: int) -> int:
        """Bring a fresh dataset as near to `item` as is known; return where it stands."""
        found = self.before(item)
        if found is None or not hasattr(dataset, "load_state_dict"):
            return 0
        at, state = found
        dataset.load_state_dict(state)
        return at


def _ints_of(dataset: Any) -> dict[str, int]:
    attributes = getattr(dataset, "__dict__", {})
    return {name: value for name, value in attributes.items() if type(value) is int}


class Failed(Exception):
    """The user's code raised; `raised` raises it again wherever it is sent."""

    def __init__(self, error: BaseException, where: str) -> None:
        self.raised = Raised.of(error, where)
        super().__init__(self.raised.text)


@dataclass(frozen=True)
class Raised:
    """What the user's code raised, in a form that can be sent; raised again as DataLoader does.

    Attributes:
        kind: Its type; RuntimeError where that cannot be sent.
        text: It and its traceback, as Python prints them.
    """

    kind: type[BaseException]
    text: str
    where: str
    parts: tuple["Raised", ...] = ()

    @classmethod
    def of(cls, error: BaseException, where: str) -> "Raised":
        """Take an exception that was caught."""
        # A group (PEP 654) has come with Python 3.11 only.
        is_group = any(base.__name__ == "BaseExceptionGroup" for base in type(error).__mro__)
        parts = getattr(error, "exceptions", ()) if is_group else ()
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS):
            frames = frames.tb_next
        frames = frames or error.__traceback__
        text = "".join(traceback.format_exception(type(error), error, frames))
        return cls(type(error), text, where, tuple(cls.of(part, where) for part in parts))

    def plain(self) -> "Raised":
        """Return the same as a RuntimeError, which can be sent in any case."""
        return replace(self, kind=RuntimeError, parts=())

    def reraise(self) -> NoReturn:
        """Raise it here, with the first traceback in its message.

        Raises:
            Exception: Of the same type where one can be made of a message alone.
            RuntimeError: Else, as for an exception that would end the process (`sys.exit`) or the
                loop (`StopIteration`).
        """
        raise self._made() from None

    def _made(self) -> Exception:
        text = f"Caught {self.kind.__name__} {self.where}.\nOriginal {self.text}"
        if not issubclass(self.kind, Exception):
            return RuntimeError(f"{text}\nA dataset must not end its process; raise an exception.")
        if issubclass(self.kind, StopIteration):
            return RuntimeError(f"{text}\nIt would have ended the epoch of this rank alone.")
        make: Callable[..., Exception] = self.kind
        try:
            if self.parts:
                made = make(text, [part._made() for part in self.parts])
            elif getattr(self.kind, "message", None):
                made = make(message=text)
            else:
                made = make(_AsItIs(text) if self.kind is KeyError else text)
        except Exception:  # a constructor that takes something else: torch says so, too
            return RuntimeError(text)
        if text not in str(made) and hasattr(made, "add_note"):
            made.add_note(text)
        return made


class _AsItIs(str):
    """A KeyError shows the repr of its argument: of this one, the text with its lines."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
