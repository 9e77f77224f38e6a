"""What a registered loader is in a rank: a DataLoader to everyone who asks, fed by fetchers.

`RemoteLoader` is what the cell finds under the loader's name. Its dataset and samplers are with the
fetchers; what stands for them here has the attributes of the registered loader's own, and raises
where something would have no effect.
"""

import functools
import os
import pickle
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from taas_magic.data.client import Client, Route
from taas_magic.data.epoch import EpochIterator
from taas_magic.data.order import load_beside
from taas_magic.data.server import OwnServers
from taas_magic.data.service import BatchLedger, Directory, machine
from taas_magic.data.sharding import EpochPlace, FetcherShare, Uneven
from taas_magic.data.sharding import steps as steps_of
from taas_magic.data.worker import ServedLoader
from taas_magic.leases import FetchLease
from taas_magic.messages import Address, LoaderPlace, RankCounts

SETTINGS = (
    *("batch_size", "drop_last", "num_workers", "pin_memory", "timeout", "prefetch_factor"),
    *("persistent_workers", "in_order"),
)
"""Attributes of a DataLoader that a rank shows as they are."""

_SHOWN = ("generator", "collate_fn", "worker_init_fn")
_NOT_SET = {*_SHOWN, *SETTINGS, "multiprocessing_context"} - {
    *("batch_size", "drop_last", "persistent_workers")
}
"""What a cell cannot set; of the others DataLoader itself refuses it."""

_OWN_BUFFER_BYTES = 256 << 20
"""What one worker of a rank's own may have ready."""

_OF_ITS_OWN = ("shuffle", "seed", "drop_last", "epoch")
"""What DistributedSampler says of itself and not of the sampler that this one stands for."""

_OURS = ("_taas_loader", "_taas_path", "_taas_copy")
"""What stand-ins for datasets have themselves, by names that no dataset has."""

_one_route = threading.Lock()


@dataclass(frozen=True)
class LoaderShape:
    """A loader as the notebook describes it; no part of its data.

    Attributes:
        batches: Of the first epoch; None where it does not say.
        context: multiprocessing's start method of its workers, "" for the default.
        drawn: How many samples its sampler draws; None where that does not say.
        varies: The number of batches may change from epoch to epoch.
        has_own_sampler: A sampler is not torch's: its order may differ from process to process.
        seed: None: the run's.
        has_state: An iterable-style dataset has a `state_dict` of its own.
        shown: What else a rank may look at (`LoaderParts.shown`).
    """

    name: str
    batches: int | None
    samples: int | None
    iterable: bool
    settings: dict[str, Any]
    context: str = ""
    has_batch_sampler: bool = False
    drawn: int | None = None
    varies: bool = False
    has_own_sampler: bool = False
    uneven: Uneven = "pad"
    seed: int | None = None
    dataset: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    has_set_epoch: bool = False
    has_state: bool = False
    shown: Any = field(default=b"", repr=False)

    @property
    def num_workers(self) -> int:
        """How many workers a local DataLoader would have."""
        return int(self.settings["num_workers"])


class Agreement(Protocol):
    """Values that the ranks of an attempt share."""

    def first(self, key: str, value: bytes) -> bytes:
        """Return the value that the first rank gave for a key, which may be this one."""

    def publish(self, key: str, value: bytes, replaced: str) -> None:
        """Store a value for the other ranks; remove the one of another key."""

    def read(self, key: str) -> bytes:
        """Return a value that another rank publishes; wait for it."""


@dataclass
class Feed:
    """What a rank knows of the run's data service.

    Attributes:
        payload: Returns the pickled loader of a name.
        directory: None: this rank has servers of its own, which `own` starts.
        agreement: What the ranks agree on where each has servers of its own; None for one rank.
        tls: Makes a client context, for fetchers on other hosts.
        window_bytes: How much a rank asks for ahead.
    """

    rank: int
    world_size: int
    payload: Callable[[str], bytes]
    directory: Directory | None = None
    key: bytes = b""
    units: int | None = None
    seed: int = 0
    tls: Callable[[], Any] | None = None
    ledger: BatchLedger | None = None
    window_bytes: int = 128 << 20
    lease: FetchLease = FetchLease()  # noqa: RUF009
    own: OwnServers | None = None
    agreement: "Agreement | None" = None
    loaders: "list[RemoteLoader]" = field(default_factory=list)

    def counts(self) -> dict[str, RankCounts]:
        """Return what this rank was handed so far, for each loader."""
        return {loader.name: loader.counted() for loader in self.loaders}


class RemoteLoader(DataLoader[Any]):
    """A registered loader in a rank.

    Iterating it gives this rank's share of an epoch. The first epoch is 0; every iterator begins
    the next one, unless `sampler.set_epoch` or `load_state_dict` has said which.
    """

    # accelerate shards what does not carry this mark; here every rank has its share.
    _is_accelerate_prepared = True

    def __init__(self, shape: LoaderShape, feed: Feed) -> None:
        self.shape, self.feed = shape, feed
        self._seed = feed.seed if shape.seed is None else shape.seed
        self.next_epoch, self._turn = 0, 0
        self._resume, self._resume_order = EpochPlace(), 0
        self._states: dict[int, tuple[int, Any]] = {}
        self._current: EpochIterator | None = None
        self._route: Route | None = None
        self.counts = RankCounts(workers=shape.num_workers)
        self._shown: tuple[Any, ...] | None = None
        self._original: Any = None
        self._is_made = self.has_warned = False
        settings, own, path = shape.settings, vars(self), f"{shape.name}.dataset"
        if shape.iterable:
            stream = RemoteStream(self, path)
            super().__init__(stream, settings["batch_size"], drop_last=settings["drop_last"])
        else:
            super().__init__(RemoteDataset(self, path), batch_size=None, sampler=())
            sampler = own["sampler"] = RemoteSampler(self)
            batches = RemoteBatchSampler(self, sampler) if shape.has_batch_sampler else None
            own["batch_sampler"] = batches
        # DataLoader's constructor would warn of workers that are not this host's.
        for name in _SHOWN:
            own.pop(name, None)
        own.update(settings)
        self.multiprocessing_context = shape.context or None
        self._is_made = True

    def __getattr__(self, name: str) -> Any:
        if name in _SHOWN:
            return self.shown()[_SHOWN.index(name) + 2]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _NOT_SET and getattr(self, "_is_made", False):
            raise AttributeError(
                f'cannot set {name} of loader "{self.name}" in a rank: its fetchers run the loader '
                "and would not see the change. Set it in the notebook, before the cell"
            )
        super().__setattr__(name, value)

    def shown(self) -> tuple[Any, ...]:
        """Return its own sampler, batch sampler, generator, `collate_fn` and `worker_init_fn`."""
        if self._shown is None:
            self._shown = load_beside(bytes(self.shape.shown), self.dataset)
        return self._shown

    @property
    def name(self) -> str:
        """The loader's name in the run."""
        return self.shape.name

    def __len__(self) -> int:
        """Return how many batches this rank gets of an epoch.

        Raises:
            TypeError: The loader does not know its length.
        """
        batches, current = self.shape.batches, self._current
        if self.shape.varies:
            if current is not None and not current.ended and current.opened is not None:
                batches = current.opened.batches
            else:
                with closing(self.client()) as client:
                    batches = client.open(self.next_epoch).batches
        if batches is None:
            raise TypeError(f'loader "{self.shape.name}" does not know its length')
        return steps_of(batches, self.feed.rank, self.feed.world_size, self.shape.uneven)

    def __iter__(self) -> Any:
        """Begin the next epoch, or go on where `load_state_dict` said."""
        epoch, place, order = self.next_epoch, self._resume, self._resume_order
        self.next_epoch, self._resume, self._resume_order = epoch + 1, EpochPlace(), 0
        self._turn += 1
        self._current = EpochIterator(self, epoch, place, self._turn - 1, order)
        return self._current

    def counted(self) -> RankCounts:
        """Return what this rank was handed so far; any thread may ask."""
        return self.counts if self._current is None else self._current.counted()

    def set_epoch(self, epoch: int) -> None:
        """Set which epoch the next iterator gives; it still begins where a loaded state stands."""
        if epoch != self.next_epoch:
            self.next_epoch, self._resume, self._states = epoch, EpochPlace(), {}
            self._resume_order = 0

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands after the last batch handed out (torchdata's protocol).

        With the state of an iterable-style dataset that has one, which fetchers are asked for.
        """
        return self.with_states(self.position())

    def position(self) -> dict[str, Any]:
        """Return the same without a dataset's own state."""
        epoch, place, order = self.next_epoch, self._resume, self._resume_order
        if self._current is not None and not self._current.ended:
            epoch, place, order = self._current.epoch, self._current.after, self._current.order
        return {
            "epoch": epoch,
            "place": list(place),
            "units": self.counts.spent,
            "order": order if place != EpochPlace() else 0,
            **self._identity(),
        }

    def _identity(self) -> dict[str, Any]:
        """Return what a state is of."""
        shape = self.shape
        return {
            "seed": self._seed,
            "dataset": [shape.dataset, shape.samples],
            "streams_of": [shape.num_workers, self.batch_size] if shape.iterable else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, with any number of fetchers.

        That it is of another order shows when the epoch begins, and is raised there.

        Raises:
            ValueError: The state is of another loader: another dataset, seed or number of streams;
                or of another number of ranks and in the middle of a step.
        """
        self._check(state)
        position, slot, first_slots = state["place"]
        if position % self.feed.world_size:
            raise ValueError(
                f'load_state_dict of loader "{self.name}": the state is of batch {position} of '
                f"epoch {state['epoch']}, in the middle of a step of {self.feed.world_size} ranks. "
                "Go on with the number of ranks that saved it"
            )
        self.next_epoch = state["epoch"]
        self.counts.resumed = self.counts.spent = state["units"]
        self._resume = EpochPlace(position, slot, tuple(first_slots))
        self._current, self._resume_order = None, state["order"]
        self._states = state.get("streams", {})

    def _check(self, state: dict[str, Any]) -> None:
        about, mine = f'load_state_dict of loader "{self.name}"', self._identity()
        if missing := [name for name in ("place", "order", *mine) if name not in state]:
            raise ValueError(
                f"{about}: this is not the state of a registered loader: {missing[0]!r} is missing"
            )
        if state["dataset"] != mine["dataset"]:
            theirs, ours = (_dataset_text(*one["dataset"]) for one in (state, mine))
            raise ValueError(f"{about}: the state is of a dataset {theirs}, the loader's is {ours}")
        if state["seed"] != self._seed:
            raise ValueError(
                f"{about}: the state is of seed {state['seed']}, and this run's is {self._seed}, "
                "under which the samples have another order. Go on with "
                f"taas.register(loader, seed={state['seed']}) in the notebook; "
                "a seed that is given from the start lets any kernel go on"
            )
        if state["streams_of"] != mine["streams_of"]:
            theirs, ours = (_streams_text(one["streams_of"]) for one in (state, mine))
            raise ValueError(f"{about}: the state is of {theirs}, the loader has {ours}")

    def with_states(self, position: dict[str, Any]) -> dict[str, Any]:
        """Add to a position where the streams of the dataset stood there, or a little before."""
        epoch, place = position["epoch"], EpochPlace(*position["place"])
        if not self.shape.has_state or place == EpochPlace():
            return position
        if self._states:
            return {**position, "streams": self._states}
        with closing(self.client()) as client:
            streams = client.open(epoch).streams or 1
            slots = {slot % streams: slot for slot in range(place.slot, place.slot + streams)}
            found = {stream: client.state(slot) for stream, slot in slots.items()}
        return {**position, "streams": {key: value for key, value in found.items() if value}}

    def give_states(self, client: Client, streams: int) -> None:
        """Tell those who prepare the epoch where its streams stood, if that was loaded."""
        states, self._states = self._states, {}
        for stream, (item, state) in states.items():
            client.restore(item * streams + stream, state)

    def original(self) -> Any:
        """Return the dataset itself, unpickled in this rank."""
        if self._original is None:
            self._original = pickle.loads(self.feed.payload(self.name))
        return self._original.dataset

    def client(self) -> Client:
        """Make the client that the batches of one pass come from."""
        with _one_route:
            if self._route is None:
                self._route = self._new_route()
            route = self._route
        return Client(route, 2 * self.feed.window_bytes, self.timeout)

    def forget_route(self) -> None:
        """Leave this process's connections to the process that it was forked from."""
        if self._route is not None:
            self._route.leave()
        self._route = None

    def _new_route(self) -> Route:
        feed, name = self.feed, self.shape.name
        if feed.directory is not None:
            tls = feed.tls() if feed.tls else None
            return Route(name, feed.directory, feed.key, tls, feed.lease)
        # With as many workers as the loader has: one at least, so that the dataset sees what it
        # would see in a fetcher: no rank, no random numbers of the cell.
        assert feed.own is not None
        count = max(1, self.shape.num_workers)
        served = ServedLoader(
            b"",
            name,
            self._seed,
            f"the fetcher of rank {feed.rank} on host {socket.gethostname()}",
            FetcherShare(0, 1, count, feed.world_size, feed.rank, feed.units),
            count * _OWN_BUFFER_BYTES,
            self.shape.context or "fork",
        )
        unix = feed.own.start(served, feed.lease.start_s)
        address = Address(0, "", 0, unix, machine())
        found = LoaderPlace(fetchers=1, workers=count, addresses={0: address})
        return Route(name, lambda loader: found, feed.key, lease=feed.lease)


def _dataset_text(name: str, samples: int | None) -> str:
    return f"{name} without a length" if samples is None else f"{name} of {samples} samples"


def _streams_text(streams: Sequence[Any] | None) -> str:
    if streams is None:
        return "a map-style dataset"
    return f"an iterable-style one with num_workers={streams[0]} and batch_size={streams[1]}"


_feed: Feed | None = None


def _part_from_rank() -> None:
    """Give a fork of the rank connections and a lock of its own."""
    global _one_route
    _one_route = threading.Lock()
    for loader in _feed.loaders if _feed is not None else ():
        loader.forget_route()


os.register_at_fork(after_in_child=_part_from_rank)


def use_feed(feed: Feed | None) -> None:
    """Set, in a rank and before its payload is read, where its loaders' batches come from."""
    global _feed
    _feed = feed


def arrive(shape: LoaderShape) -> DataLoader[Any]:
    """Make a registered loader's `RemoteLoader`: what it is unpickled to.

    In a process that is no rank, one that a rank spawned, it is what only says so when it is used.
    """
    if _feed is None:
        return _LoaderOfRanks(shape.name)
    loader = RemoteLoader(shape, _feed)
    _feed.loaders.append(loader)
    return loader


class _LoaderOfRanks(DataLoader[Any]):
    """A registered loader where there is none: in a child that a rank started by spawn."""

    def __init__(self, name: str) -> None:
        self._taas_name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_taas_name":
            raise AttributeError(name)
        raise self._refusal()

    def __iter__(self) -> Any:
        raise self._refusal()

    def __len__(self) -> int:
        raise self._refusal()

    def _refusal(self) -> RuntimeError:
        return RuntimeError(
            f'loader "{self._taas_name}" feeds ranks, and process {os.getpid()} is none: a child '
            "that a rank starts by spawn or forkserver cannot use it. Use it in the rank, or make "
            "a DataLoader in the child"
        )


class _Sampler:
    """Mixed into what stands for a sampler, whose order the fetchers know.

    `set_epoch` chooses the epoch of the loader's next iterator; other attributes are those of the
    registered loader's own, at `_place` of what it shows.
    """

    _loader: RemoteLoader
    _place: int

    def set_epoch(self, epoch: int) -> None:
        """Set which epoch the loader's next iterator gives."""
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            f'the sampler of loader "{self._loader.name}" is run by its fetchers: iterate the '
            "loader instead"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader.shown()[self._place], name)


class RemoteSampler(_Sampler, DistributedSampler[Any]):
    """Stands for the sampler; its length is this rank's share.

    A DistributedSampler, so that Lightning sees that the loader is sharded already.
    """

    _place = 0

    def __init__(self, loader: RemoteLoader) -> None:
        samples: Any = range(loader.shape.drawn or 0)
        feed = loader.feed
        DistributedSampler.__init__(self, samples, feed.world_size, feed.rank, shuffle=False)
        self._loader = loader
        self.dataset = loader.dataset
        for name in _OF_ITS_OWN:
            delattr(self, name)

    def __len__(self) -> int:
        if self._loader.shape.drawn is None:
            raise TypeError(f'the sampler of loader "{self._loader.name}" has no length')
        return super().__len__()


class RemoteBatchSampler(_Sampler, Sampler[Any]):
    """Stands for the batch sampler; its length is this rank's share."""

    _place = 1

    def __init__(self, loader: RemoteLoader, sampler: RemoteSampler) -> None:
        self._loader = loader
        if loader.shape.settings["batch_size"] is not None:  # else it is the user's own
            self.sampler = sampler

    def __len__(self) -> int:
        return len(self._loader)


class RemoteDataset(Dataset[Any]):
    """Stands for a dataset that is with the fetchers, or for one inside of it.

    Args:
        path: What the dataset is called in messages.
        copy: This rank's copy of a dataset inside of the loader's; None for the loader's own, of
            which the length and the small attributes are known without one.
    """

    def __init__(self, loader: RemoteLoader, path: str, copy: Any = None) -> None:
        self._taas_loader, self._taas_path, self._taas_copy = loader, path, copy

    def __len__(self) -> int:
        if self._taas_copy is not None:
            return len(self._taas_copy)
        shape = self._taas_loader.shape
        if shape.samples is None:
            raise TypeError(f'the dataset of loader "{shape.name}" has no length')
        return shape.samples

    def __getitem__(self, index: Any) -> Any:
        if self._taas_copy is not None:
            return self._taas_copy[index]
        with closing(self._taas_loader.client()) as client:
            return client.sample(index)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _OURS:
            raise AttributeError(name)
        loader, path, dataset = self._taas_loader, self._taas_path, self._taas_copy
        if dataset is None:
            if name == "set_epoch" and loader.shape.has_set_epoch:
                return loader.set_epoch
            if name in loader.shape.attributes:
                return loader.shape.attributes[name]
            dataset = loader.original()
        value = getattr(dataset, name)
        if name == "set_epoch":
            return loader.set_epoch
        if isinstance(value, Dataset):
            return RemoteDataset(loader, f"{path}.{name}", value)
        is_method = isinstance(value, MethodType) and value.__self__ is dataset
        return _warning_of_changes(path, dataset, value) if is_method else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OURS:
            raise AttributeError(
                f"cannot set {name!r} of {self._taas_path} in a rank: the loader's fetchers have "
                "the dataset and would not see the change. Set it in the notebook, before the "
                f"cell ({self._taas_path}.{name} = …)"
            )
        super().__setattr__(name, value)


class RemoteStream(RemoteDataset, IterableDataset[Any]):
    """Stands for an iterable-style dataset."""

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            f"{self._taas_path} is iterable-style and is read by the loader's fetchers: iterate "
            "the loader instead"
        )


def _warning_of_changes(path: str, dataset: Any, method: Any) -> Any:
    """Return the same method, which says when it changed what only this rank sees."""

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        before = dict(vars(dataset))
        result = method(*arguments, **named)
        changed = [key for key, value in vars(dataset).items() if before.get(key, ...) is not value]
        if changed:
            warnings.warn(
                f"{path}.{method.__name__}() changed {changed[0]!r} of this rank's copy only; the "
                "loader's fetchers do not see the change. Call it in the notebook, before the cell",
                stacklevel=2,
            )
        return result

    return call
