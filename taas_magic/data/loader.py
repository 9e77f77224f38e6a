"""The remote loader: the DataLoader that replaces a registered loader in a rank.

The real dataset and samplers are in the fetchers. A rank has substitutes with the same attributes.
A substitute raises an exception for an operation that only the real object could do, such as an
iteration over the sampler.
"""

import functools
import hashlib
import os
import pickle
import socket
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from taas_magic.capture.changes import ChangeDetector
from taas_magic.data.client import Client, Route
from taas_magic.data.epoch import EpochIterator
from taas_magic.data.order import dump_without_dataset, load_with_dataset
from taas_magic.data.other_ranks import KeyValueStore, OtherRanks
from taas_magic.data.server import RankServers
from taas_magic.data.service import BatchLedger, Directory, machine_id
from taas_magic.data.sharding import (
    EpochPosition,
    FetcherPart,
    Uneven,
    count_steps,
    first_slots_to_keep,
)
from taas_magic.data.worker import ServedLoader
from taas_magic.errors import CaptureError, listed
from taas_magic.leases import FetchLease
from taas_magic.messages import Address, LoaderAddresses, RankCounts

SETTINGS = (
    *("batch_size", "drop_last", "num_workers", "pin_memory", "timeout", "prefetch_factor"),
    *("persistent_workers", "in_order"),
)
"""Names of DataLoader attributes that a remote loader copies from the registered loader."""

_VISIBLE = ("generator", "collate_fn", "worker_init_fn")
_FIXED = {"batch_size", "drop_last", "persistent_workers", "dataset", "sampler", "batch_sampler"}
"""Attributes that a DataLoader refuses to change after its construction (ValueError)."""

_NOT_SET = {*_VISIBLE, *SETTINGS, *_FIXED, "multiprocessing_context"}
"""Attributes that `RemoteLoader` does not let a cell set."""

_OWN_BUFFER_BYTES = 256 << 20
"""Limit in bytes on the prepared batches of each worker of a rank, in a run without fetchers."""

_OF_ITS_OWN = ("shuffle", "seed", "drop_last", "epoch")
"""Attributes that DistributedSampler's constructor sets and `RemoteSampler` removes.

After the removal, a cell that reads such an attribute gets the value of the real sampler.
"""

_OURS = ("_taas_loader", "_taas_path", "_taas_copy")
"""Names of `RemoteDataset`'s own attributes, which do not come from the real dataset."""

_CHANGED_PARTS = (
    'the cell has changed the sampler, generator or collate_fn of loader "{}" only in this rank; '
    "the loader's fetchers do not see the change. Change it in the notebook, before the cell"
)

_CHANGED_DATASET = (
    "the cell has changed {} only in this rank; the loader's fetchers have their own copy of the "
    "dataset, so the batches stay the same. Change the dataset in the notebook, before the cell. "
    "For a change from epoch to epoch, give the dataset a method set_epoch(epoch), which the "
    "fetchers call before each epoch"
)

_MAX_LISTED = 10
"""Maximum number of changed attributes that a warning names."""

_UNCHANGEABLE = (int, float, complex, bool, str, bytes, type(None))
_CODE = (type, FunctionType, MethodType)

_POSITION_DISCARDED = (
    'set_epoch({}) of loader "{}" discards the loaded position, batch {} of epoch {}. To resume '
    "there, do not call set_epoch with an earlier epoch. The loader that Fabric's "
    "setup_dataloaders returns calls set_epoch(0): iterate over the registered loader instead, and "
    "move each batch with fabric.to_device"
)

_SAMPLER_REPLACED = (
    "Lightning tries to replace the sampler of a registered loader, as overfit_batches does, but "
    "fetchers run this sampler. Use limit_train_batches and limit_val_batches instead, with a "
    "loader that was registered with shuffle=False"
)

_route_lock = threading.Lock()


@dataclass(frozen=True)
class LoaderShape:
    """Description of a registered loader without its data, made in the notebook.

    Attributes:
        batches: Number of batches in the first epoch; None if the loader has no length.
        samples: Length of the dataset; None if the dataset has no length.
        settings: Values of the attributes in `SETTINGS`.
        context: multiprocessing's start method of the workers; "" for the default.
        drawn: Number of samples that the sampler draws; None if the sampler has no length.
        varies: Whether the number of batches may change from epoch to epoch.
        has_own_sampler: Whether the sampler or batch sampler is of a type that is not torch's. The
            order of such a sampler may differ between processes.
        uneven: Rule for batches that do not divide evenly among the ranks: `pad`, `drop` or `keep`
            (`sharding.RankPart`).
        seed: The loader's seed; None for the run's seed.
        dataset: Name of the dataset's type.
        attributes: Small attributes of the dataset, by name.
        shown: Pickled samplers, generator and functions that a rank may read
            (`LoaderParts.pickle_visible`).
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
        """Number of workers of the registered loader."""
        return int(self.settings["num_workers"])


class BatchProfiler(Protocol):
    """Profiler that records how long this rank waits for batches (`host/profile.py`)."""

    def batch(self, loader: str) -> AbstractContextManager[None]:
        """Return a context manager to enter while the rank waits for a batch of `loader`."""
        ...


@dataclass
class RankFeed:
    """A rank's access to the run's data service: settings, keys, and addresses of fetchers.

    Attributes:
        payload: Function that returns the pickled loader with a given name.
        directory: Function that returns the addresses of a loader's fetchers; None in a run without
            fetchers, where `own` starts servers for this rank.
        units: Value of `--units`; None for no limit.
        pass_batches: Number of batches after which each pass over a loader ends, in a rehearsal;
            None for no limit.
        tls: Function that returns a TLS client context for fetchers on other hosts; None for plain
            TCP.
        ledger: On-disk count of the batches that this rank received; None to keep no count.
        window_bytes: Total bytes of the batches to request before the rank needs them.
        own: Manager of this rank's servers in a run without fetchers; None if there are fetchers.
        agreement: Key-value store of the ranks; None if there is only one rank.
        folder: Folder with the pickled loaders, for servers that `own` starts.
    """

    rank: int
    world_size: int
    payload: Callable[[str], bytes]
    directory: Directory | None = None
    key: bytes = b""
    units: int | None = None
    pass_batches: int | None = None
    seed: int = 0
    tls: Callable[[], Any] | None = None
    ledger: BatchLedger | None = None
    window_bytes: int = 128 << 20
    lease: FetchLease = FetchLease()  # noqa: RUF009
    own: RankServers | None = None
    agreement: KeyValueStore | None = None
    remote_loaders: "list[weakref.ref[RemoteLoader]]" = field(default_factory=list)
    profiler: BatchProfiler | None = None
    folder: str = ""

    @property
    def loaders(self) -> "list[RemoteLoader]":
        """The remote loaders that exist in this rank."""
        found = (reference() for reference in list(self.remote_loaders))
        return [loader for loader in found if loader is not None]

    def counts(self) -> dict[str, RankCounts]:
        """Return the counts of each loader (batches, waiting time, …), by the loader's name."""
        return {loader.name: loader.current_counts() for loader in self.loaders}


class RemoteLoader(DataLoader[Any]):
    """DataLoader in a rank that yields this rank's batches of a registered loader.

    The first epoch is 0. Each new iterator begins the next epoch, unless `sampler.set_epoch` or
    `load_state_dict` has set another epoch.
    """

    # accelerate shards every loader that lacks this attribute. This loader is already sharded.
    _is_accelerate_prepared = True

    is_made = False

    def __new__(
        cls, shape: LoaderShape | None = None, feed: RankFeed | None = None, **replaced: Any
    ) -> "RemoteLoader":
        """Return the rank's loader that has this `shape` object; if there is none, a new loader.

        Lightning calls this class with all attributes of a loader, to get a copy of the loader with
        another sampler. Only the fetchers run the sampler, so Lightning gets the loader itself.

        Args:
            replaced: Attributes of DataLoader from Lightning.

        Raises:
            TypeError: The copy would have a sampler that is not the loader's.
        """
        for loader in feed.loaders if feed is not None else ():
            if loader.shape is shape:
                if replaced.get("sampler") not in (None, loader.sampler):
                    raise TypeError(_SAMPLER_REPLACED)
                return loader
        return super().__new__(cls)

    def __init__(self, shape: LoaderShape, feed: RankFeed, **_: Any) -> None:
        if self.is_made:
            return
        self.shape, self.feed = shape, feed
        self._seed = feed.seed if shape.seed is None else shape.seed
        self.next_epoch, self._passes = 0, 0
        self._resume, self._resume_order = EpochPosition(), 0
        self._states: dict[int, tuple[int, Any]] = {}
        self._current: EpochIterator | None = None
        self._route: Route | None = None
        self._end_server: Any = None
        self.counts = RankCounts(workers=shape.num_workers)
        self._visible: tuple[Any, ...] | None = None
        self._visible_digest = b""
        self._original: Any = None
        self._shown_values: dict[str, _WatchedValue] = {}
        self._has_reported_dataset = False
        self.readers: set[str] = set()
        """Methods of the dataset that returned a value when the cell called them, such as
        "loader.dataset.describe"."""

        has_fetchers = feed.directory is not None
        self.other_ranks = OtherRanks(shape.name, feed.rank, feed.agreement, has_fetchers)
        settings, own, path = shape.settings, vars(self), f"{shape.name}.dataset"
        if shape.iterable:
            stream = RemoteStream(self, path)
            super().__init__(stream, settings["batch_size"], drop_last=settings["drop_last"])
        else:
            super().__init__(RemoteDataset(self, path), batch_size=None, sampler=())
            sampler = own["sampler"] = RemoteSampler(self)
            batches = RemoteBatchSampler(sampler) if shape.has_batch_sampler else None
            own["batch_sampler"] = batches
        # Set these after DataLoader's constructor, which warns if num_workers exceeds the cores of
        # this host.
        for name in _VISIBLE:
            own.pop(name, None)
        own.update(settings)
        self.multiprocessing_context = shape.context or None
        self.is_made = True

    def __getattr__(self, name: str) -> Any:
        if name in _VISIBLE:
            return self.visible_parts()[_VISIBLE.index(name) + 2]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "worker_init_fn" and _is_lightnings_seeding(value):
            return  # Lightning would seed each worker; the service already seeds each batch
        if name in _NOT_SET and self.is_made:
            is_fixed = name in _FIXED
            error = ValueError if is_fixed else AttributeError
            raise error(
                f'cannot set {name} of loader "{self.name}" in a rank: its fetchers run the loader '
                "and would not see the change. "
                + (
                    f"In the notebook, make a new DataLoader with another {name}, and register it"
                    if is_fixed
                    else "Set it in the notebook, before the cell"
                )
            )
        super().__setattr__(name, value)

    def visible_parts(self) -> tuple[Any, ...]:
        """Return this rank's copies of the loader's parts that a cell may read.

        These are sampler, batch sampler, generator, `collate_fn` and `worker_init_fn`. The first
        call unpickles them.
        """
        if self._visible is None:
            self._visible = load_with_dataset(bytes(self.shape.shown), self.dataset)
            self._visible_digest = self._digest_visible()
        return self._visible

    def _digest_visible(self) -> bytes:
        """Return a digest of `visible_parts()`, for detecting a change of these parts.

        The digest leaves out functions, because they may use large global variables. If the parts
        cannot be pickled any more, return b"".
        """
        parts = [part for part in self._visible or () if not isinstance(part, FunctionType)]
        with suppress(Exception):  # pickling runs the user's code
            return hashlib.blake2b(dump_without_dataset(parts, self.dataset)).digest()
        return b""

    def _warn_of_changed_parts(self) -> None:
        """Warn if the cell has changed a sampler, generator or other part that only fetchers use.

        The cell can change only this rank's copies, so the change has no effect on the batches.
        Each change causes one warning. Do nothing if the cell has not read any of the parts.
        """
        if self._visible is None:
            return
        before, self._visible_digest = self._visible_digest, self._digest_visible()
        if self._visible_digest != before:
            warnings.warn(_CHANGED_PARTS.format(self.name), stacklevel=3)

    def watch(self, name: str, value: Any) -> None:
        """Watch a value of the dataset that the cell has read, and may change in place.

        Do nothing if the value cannot change, or if a value with this name is watched already.

        Args:
            name: Name for the warning, such as "loader.dataset.transform".
        """
        if name not in self._shown_values and not self._has_reported_dataset and _can_change(value):
            self._shown_values[name] = _WatchedValue(value)

    def describe_changes(self) -> str:
        """Return a warning if the cell has changed a watched value of the dataset; otherwise "".

        The cell can change only this rank's copy, so the change has no effect on the batches. There
        is at most one warning for each loader. Later calls return "".
        """
        changed = [name for name, value in self._shown_values.items() if value.has_changed()]
        if not changed:
            return ""
        self._has_reported_dataset, self._shown_values = True, {}
        return _CHANGED_DATASET.format(listed(changed, _MAX_LISTED))

    def stop_watching(self) -> None:
        """Stop watching the values that the cell has read so far; warn if the cell changed them.

        This method is called before the rank runs code of the dataset. That code may change the
        values, too: it may, for example, fill a cache.
        """
        if text := self.describe_changes():
            warnings.warn(text, stacklevel=3)
        self._shown_values = {}

    @property
    def name(self) -> str:
        """Name of the registered loader, unique in the run."""
        return self.shape.name

    def __len__(self) -> int:
        """Return the number of batches that this rank gets in an epoch.

        If this number may change from epoch to epoch, the result is the number for the current
        pass. Without a current pass, this method requests the next epoch's number from the
        fetchers.

        In a rehearsal, the result is the number of batches of the shortened pass. So the rehearsal
        also runs code that a cell runs only at the last batch of an epoch.

        Raises:
            TypeError: The loader has no length.
        """
        batches, current = self.shape.batches, self._current
        if self.shape.varies:
            if current is not None and not current.ended and current.description is not None:
                batches = current.description.batches
            else:
                with closing(self.new_client()) as client:
                    batches = client.request_description(self.next_epoch).batches
        if batches is None:
            raise TypeError(f'loader "{self.shape.name}" does not know its length')
        steps = count_steps(batches, self.feed.rank, self.feed.world_size, self.shape.uneven)
        most = self.feed.pass_batches
        return steps if most is None else min(steps, most)

    def __iter__(self) -> Any:
        """Return an iterator over the next epoch.

        After `load_state_dict`, the iterator begins at the loaded position. Also warn if the cell
        has changed this rank's copy of the dataset, sampler or another part that only fetchers use.
        """
        epoch, start, order = self.next_epoch, self._resume, self._resume_order
        self.next_epoch, self._resume, self._resume_order = epoch + 1, EpochPosition(), 0
        self._passes += 1
        self._warn_of_changed_parts()
        if text := self.describe_changes():
            warnings.warn(text, stacklevel=2)
        self._current = EpochIterator(self, epoch, start, self._passes - 1, order)
        return self._current

    @property
    def has_ended_early(self) -> bool:
        """Whether the latest pass has ended before its epoch's last step, for example by `--units`.

        False before the first pass, while a pass runs, and for an epoch whose number of batches is
        not known. A pass that was closed counts as ended.
        """
        current = self._current
        if current is None or not current.ended or current.description is None:
            return False
        part = self.feed.rank, self.feed.world_size, self.shape.uneven
        done, batches = current.after.position // self.feed.world_size, current.description.batches
        return batches is not None and done < count_steps(batches, *part)

    def current_counts(self) -> RankCounts:
        """Return this loader's counts: batches, waiting times and others.

        This method may be called from any thread.
        """
        return self.counts if self._current is None else self._current.current_counts()

    def begin_cell(self, number: int) -> None:
        """Set the counts of batches and the times to 0, even in the middle of an epoch.

        `workers`, `spent` and `resumed` keep their values (docs/events.md describes the counts).
        A warning about data that differ between ranks may appear once more (`OtherRanks`).

        Args:
            number: Number of the new cell in the session.
        """
        self.other_ranks.begin_cell(number)
        spent, resumed = self.counts.spent, self.counts.resumed
        self.counts = RankCounts(workers=self.counts.workers, spent=spent, resumed=resumed)
        if self._current is not None:
            self._current.reset_times()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iterator.

        If a state has been loaded (`load_state_dict`), and belongs to this epoch, the iterator
        still resumes at the state's position. A state of any other epoch is discarded; a warning
        appears if the state is of a later epoch.
        """
        if epoch < self.next_epoch and self._resume != EpochPosition():
            position = self._resume.position, self.next_epoch
            warnings.warn(_POSITION_DISCARDED.format(epoch, self.name, *position), stacklevel=3)
        if epoch != self.next_epoch:
            self.next_epoch, self._resume, self._states = epoch, EpochPosition(), {}
            self._resume_order = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch (torchdata's protocol).

        If an iterable-style dataset has a `state_dict`, the result also has the dataset's state,
        which this method requests from the fetchers.
        """
        return self.with_states(self.position())

    def position(self) -> dict[str, Any]:
        """Return the position in the epoch after the last yielded batch; send no request.

        Without an active pass, the position is where the next iterator will begin. The result has
        all entries of `state_dict()` except the dataset's own state: the epoch, the position, the
        spent units, the hash of the order, and facts by which `load_state_dict` recognizes the
        loader.
        """
        epoch, position, order = self.next_epoch, self._resume, self._resume_order
        if self._current is not None and not self._current.ended:
            epoch, position, order = self._current.epoch, self._current.after, self._current.order
        return {
            "epoch": epoch,
            "place": list(position),
            "units": self.counts.spent,
            "order": order if position != EpochPosition() else 0,
            **self._identity(),
        }

    def _identity(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "seed": self._seed,
            "dataset": [shape.dataset, shape.samples],
            "streams_of": [shape.num_workers, self.batch_size] if shape.iterable else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iterator resume at the position in `state`.

        Also change the loader's counts: `spent` and `resumed` become the spent units in `state`,
        `units` becomes 0. If a pass of this loader is unfinished, `state_dict` ignores this pass
        from now on, and the counts include its time only after its end.

        The number of fetchers may differ from the number in the run that saved the state. If the
        order of a map-style loader's epoch has changed, the iterator raises `ValueError` at the
        first batch. If the epoch of an iterable-style loader now begins with a different
        batch, the iterator warns.

        Raises:
            ValueError: `state` is not the state of a registered loader. Or the state belongs to a
                loader with a different dataset, seed, number of streams, or batch size of streams.
                Or the number of ranks has changed, and the state's position is now in the middle
                of a step.
        """
        self._raise_if_state_of_other(state)
        position, slot, first_slots = state["place"]
        if position % self.feed.world_size:
            raise ValueError(
                f'load_state_dict of loader "{self.name}": the state is of batch {position} of '
                f"epoch {state['epoch']}, in the middle of a step of {self.feed.world_size} ranks. "
                "Use the number of ranks that saved it"
            )
        self.next_epoch = state["epoch"]
        self.counts.resumed = self.counts.spent = state["units"]
        self.counts.units = 0  # `resumed` may include units of this run
        self._resume = EpochPosition(position, slot, tuple(first_slots))
        self._current, self._resume_order = None, state["order"]
        self._states = state.get("streams", {})

    def _raise_if_state_of_other(self, state: dict[str, Any]) -> None:
        """Raise a ValueError if `state` is not the state of a loader like this one.

        No entry may be missing, except the states of streams. Then these values are compared, in
        this order: the name of the dataset's type and the dataset's length; the seed; and, for an
        iterable-style dataset, the number of workers and the batch size.
        """
        about, mine = f'load_state_dict of loader "{self.name}"', self._identity()
        if missing := [name for name in ("place", "order", *mine) if name not in state]:
            raise ValueError(
                f"{about}: this is not the state of a registered loader: {missing[0]!r} is missing"
            )
        if state["dataset"] != mine["dataset"]:
            theirs, ours = (_dataset_text(*one["dataset"]) for one in (state, mine))
            raise ValueError(f"{about}: the state is of {theirs}, the loader has {ours}")
        if state["seed"] != self._seed:
            raise ValueError(
                f"{about}: the state was saved with seed {state['seed']}, but this run has seed "
                f"{self._seed}, which gives another order. Use taas.register(loader, "
                f"seed={state['seed']}) in the notebook; with a fixed seed from the start, any "
                "kernel can resume"
            )
        if state["streams_of"] != mine["streams_of"]:
            theirs, ours = (_streams_text(one["streams_of"]) for one in (state, mine))
            raise ValueError(f"{about}: the state is of {theirs}, the loader has {ours}")

    def with_states(self, position: dict[str, Any]) -> dict[str, Any]:
        """Add the saved states of the dataset's streams to a position, and return the result.

        Add nothing if the dataset has no `state_dict`, or at the beginning of an epoch. If states
        from `load_state_dict` have not been sent to the workers yet, add these states. Otherwise,
        request the state of each stream from the fetchers, with a new client. The response has the
        latest saved state from which the stream can reach the position (`Client.find_state`).
        Streams without such a state are left out.

        Args:
            position: Result of the method `position`.
        """
        epoch, start = position["epoch"], EpochPosition(*position["place"])
        if not self.shape.has_state or start == EpochPosition():
            return position
        if self._states:
            return {**position, "streams": self._states}
        with closing(self.new_client()) as client:
            streams = client.request_description(epoch).streams or 1
            slots = {slot % streams: slot for slot in range(start.slot, start.slot + streams)}
            found = {stream: client.find_state(slot) for stream, slot in slots.items()}
        return {**position, "streams": {key: value for key, value in found.items() if value}}

    def send_states(self, client: Client, streams: int) -> None:
        """Send the streams' states that `load_state_dict` received, if any, to the workers.

        Each state is sent only once: later calls do nothing until the next `load_state_dict`.

        Args:
            client: Client that has requested the epoch's description.
        """
        states, self._states = self._states, {}
        for stream, (item, state) in states.items():
            client.restore(item * streams + stream, state)

    def load_original(self) -> Any:
        """Return this rank's own copy of the dataset; the first call unpickles the loader."""
        if self._original is None:
            self._original = pickle.loads(self.feed.payload(self.name))
        return self._original.dataset

    def new_client(self) -> Client:
        """Return a new client for one pass over the loader."""
        with _route_lock:
            if self._route is None:
                self._route = self._new_route()
            route = self._route
        return Client(route, 2 * self.feed.window_bytes, self.timeout)

    def forget_route(self) -> None:
        """In a fork of the rank, close the fork's copies of the loader's connections.

        In a run without fetchers, also close the fork's copy of the socket to the rank's server.
        Otherwise, the server would not end when the rank closes this socket. When the fork uses the
        loader, the loader opens new connections or starts a new server.
        """
        if self._route is not None:
            self._route.close_copies()
        if self._end_server is not None:
            self._end_server()
        self._route = self._end_server = None

    def _new_route(self) -> Route:
        """Return a new `Route`: the record of the loader's fetchers and of the connections to them.

        In a run without fetchers, start a data server of this rank, and return a route to this
        server. The server has the loader's number of workers, but at least one. The server ends
        when this loader is deleted.
        """
        feed, name = self.feed, self.shape.name
        if feed.directory is not None:
            tls = feed.tls() if feed.tls else None
            return Route(name, feed.directory, feed.key, tls, feed.lease)
        # Use the loader's number of workers, but at least one, so that the dataset runs under the
        # same conditions as in a fetcher: outside the rank, without the cell's random state.
        assert feed.own is not None
        count = max(1, self.shape.num_workers)
        served = ServedLoader(
            b"",
            name,
            self._seed,
            f"the fetcher of rank {feed.rank} on host {socket.gethostname()}",
            FetcherPart(
                workers=count,
                stride=feed.world_size,
                first=feed.rank,
                units=feed.units,
                keep_first=first_slots_to_keep(feed.world_size, self.shape.uneven),
            ),
            count * _OWN_BUFFER_BYTES,
            self.shape.context or "fork",
            folder=feed.folder,
        )
        unix, life = feed.own.start(served, feed.lease.start_s)
        # End the server with this loader: the next cell of a session may have another version.
        self._end_server = weakref.finalize(self, life.close)
        self._end_server.atexit = False
        address = Address(0, "", 0, unix, machine_id())
        found = LoaderAddresses(fetchers=1, workers=count, addresses={0: address})
        return Route(name, lambda loader: found, feed.key, lease=feed.lease)


def _is_lightnings_seeding(worker_init_fn: Any) -> bool:
    """Return whether Lightning sets this `worker_init_fn` after `seed_everything(workers=True)`."""
    function = getattr(worker_init_fn, "func", None)  # Lightning sets a functools.partial
    return getattr(function, "__name__", "") == "pl_worker_init_function"


def _dataset_text(name: str, samples: int | None) -> str:
    return f"{name} without a length" if samples is None else f"{name} of {samples} samples"


def _streams_text(streams: Sequence[Any] | None) -> str:
    if streams is None:
        return "a map-style dataset"
    return f"an iterable-style one with num_workers={streams[0]} and batch_size={streams[1]}"


_feed: RankFeed | None = None


def _reset_in_fork() -> None:
    """In a fork of the rank, replace the lock `_route_lock` and close the inherited connections.

    A thread that does not exist in the fork may hold the old lock. When the fork uses a loader, the
    loader opens new connections.
    """
    global _route_lock
    _route_lock = threading.Lock()
    for loader in _feed.loaders if _feed is not None else ():
        loader.forget_route()


os.register_at_fork(after_in_child=_reset_in_fork)


def use_feed(feed: RankFeed | None) -> None:
    """Set the data service that this rank's loaders use.

    Call this function before the payload is unpickled, because unpickling creates the loaders.
    """
    global _feed
    _feed = feed


def changes_of_datasets() -> list[str]:
    """Return a warning for each loader in this rank whose dataset the cell has changed in place.

    The result has no warnings that the user already got (`RemoteLoader.describe_changes`).
    """
    loaders = _feed.loaders if _feed is not None else []
    return [text for loader in loaders if (text := loader.describe_changes())]


def make_remote_loader(shape: LoaderShape) -> DataLoader[Any]:
    """Return a new `RemoteLoader` in place of a registered loader.

    A registered loader is pickled as a call of this function. In a process that is not a rank (such
    as a child that a rank spawned), the returned loader raises an exception on any use.
    """
    if _feed is None:
        return _UnusableLoader(shape.name)
    loader = RemoteLoader(shape, _feed)
    _feed.remote_loaders.append(weakref.ref(loader))
    return loader


find_registered: Callable[[str], Any] | None = None
"""Function that takes a name, and returns the kernel's registered loader with this name.

The function returns None if there is no such loader. The variable itself is None in processes other
than the kernel, and until the kernel has sent a registered loader to ranks.
"""


def notebooks_loader(name: str) -> Any:
    """Return the kernel's registered loader with a name.

    If the result of a rank contains a remote loader, the rank pickles the remote loader as a call
    of this function. So the kernel gets its own registered loader.

    Raises:
        CaptureError: This process has no registered loader with this name.
    """
    found = None if find_registered is None else find_registered(name)
    if found is None:
        raise CaptureError(
            f'the result contains the registered loader "{name}", which this kernel does not have; '
            "return a state_dict() or other plain data"
        )
    return found


class _UnusableLoader(DataLoader[Any]):
    """Placeholder for a registered loader in a child that a rank spawned.

    Any use raises RuntimeError: only ranks can receive batches from the fetchers.
    """

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
            f'loader "{self._taas_name}" works only in ranks, and process {os.getpid()} is a child '
            "that a rank started by spawn or forkserver. Use the loader in the rank, or create a "
            "DataLoader in the child"
        )


class _Sampler:
    """Base class of a rank's substitutes for samplers; only fetchers run the real samplers.

    Attributes that a substitute does not define come from the rank's copy of the real sampler. This
    copy is the element of `RemoteLoader.visible_parts()` with the index `_index`.
    """

    _loader: RemoteLoader
    _index: int

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader's next iterator."""
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            f'fetchers run the sampler of loader "{self._loader.name}": iterate the loader instead'
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader.visible_parts()[self._index], name)

    def __setattr__(self, name: str, value: Any) -> None:
        loader: RemoteLoader | None = vars(self).get("_loader")
        if loader is not None and loader.is_made:
            raise AttributeError(
                f'cannot set {name!r} of a sampler of loader "{loader.name}" in a rank: the '
                "loader's fetchers run the sampler and would not see the change. Set it in the "
                "notebook, before the cell; to choose the epoch, call set_epoch"
            )
        super().__setattr__(name, value)


class RemoteSampler(_Sampler, DistributedSampler[Any]):
    """A rank's substitute for the sampler; its length counts only this rank's samples.

    The class is a DistributedSampler, so that Lightning does not shard the loader again.
    """

    _index = 0

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
    """A rank's substitute for the batch sampler; its length counts only this rank's batches.

    Lightning calls this class as it calls torch's BatchSampler. The batch size and `drop_last` stay
    those of the real batch sampler.

    Raises:
        TypeError: `sampler` is not the loader's.
    """

    _index = 1

    def __init__(self, sampler: Any, batch_size: Any = None, drop_last: Any = None) -> None:
        if not isinstance(sampler, RemoteSampler):
            raise TypeError(_SAMPLER_REPLACED)
        loader = sampler._loader
        if loader.shape.settings["batch_size"] is not None:  # None: the user's own batch sampler
            self.sampler = sampler
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)


class RemoteDataset(Dataset[Any]):
    """A rank's substitute for a dataset; only fetchers run the real dataset.

    An item of the loader's dataset comes from a fetcher. The length and small attributes come from
    the loader's description. For any other attribute, the rank unpickles a copy of the dataset.

    An attribute that is itself a dataset is an inner dataset. The rank gets a `RemoteDataset` for
    it, whose items and attributes all come from the rank's copy.

    Args:
        path: Name of the dataset in messages.
        copy: The rank's copy of an inner dataset; None for the loader's dataset.
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
            self._taas_loader.stop_watching()
            return self._taas_copy[index]
        with closing(self._taas_loader.new_client()) as client:
            return client.sample(index)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the dataset.

        Small attributes come from the loader's description. `set_epoch` is the method of the
        loader. Other attributes come from this rank's copy of the dataset, which is unpickled on
        first use. If the attribute is a dataset, return a `RemoteDataset` for it. A method is
        wrapped, to warn if a call changes the copy (`_warning_of_changes`). Any other attribute is
        watched, to warn if the cell changes it in place (`RemoteLoader.watch`).
        """
        if name.startswith("__") or name in _OURS:
            raise AttributeError(name)
        loader, path, dataset = self._taas_loader, self._taas_path, self._taas_copy
        if dataset is None:
            if name == "set_epoch" and loader.shape.has_set_epoch:
                return loader.set_epoch
            if name in loader.shape.attributes:
                value = loader.shape.attributes[name]
                loader.watch(f"{path}.{name}", value)
                return value
            dataset = loader.load_original()
        value = getattr(dataset, name)
        if name == "set_epoch":
            return loader.set_epoch
        if isinstance(value, Dataset):
            return RemoteDataset(loader, f"{path}.{name}", value)
        if isinstance(value, MethodType) and value.__self__ is dataset:
            return _warning_of_changes(loader, path, dataset, value)
        loader.watch(f"{path}.{name}", value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OURS:
            raise AttributeError(
                f"cannot set {name!r} of {self._taas_path} in a rank: the loader's fetchers have "
                "their own copy of the dataset and would not see the change. Set it in the "
                f"notebook, before the cell ({self._taas_path}.{name} = …)"
            )
        super().__setattr__(name, value)


class RemoteStream(RemoteDataset, IterableDataset[Any]):
    """A rank's substitute for an iterable-style dataset; iterating over it raises TypeError."""

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            f"the loader's fetchers read the iterable-style {self._taas_path}: iterate the loader "
            "instead"
        )


def _warning_of_changes(loader: RemoteLoader, path: str, dataset: Any, method: Any) -> Any:
    """Wrap a method of a dataset, to warn if a call changes the dataset.

    `dataset` is this rank's copy, so the fetchers do not see the change. The warning comes after
    the call, and names the first attribute that is new or refers to another object than before. If
    there is no such attribute, the warning names the first attribute whose value was changed in
    place. The removal of an attribute is not noticed. Changes in place are noticed only if the
    method returns None or the dataset itself. A method with another result probably only reads, and
    may change a cache.

    Args:
        path: Name of the dataset in the warning.
    """
    name = f"{path}.{method.__name__}"

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        loader.stop_watching()
        before = dict(vars(dataset))
        is_reader = name in loader.readers
        watched = {} if is_reader else {key: _WatchedValue(it) for key, it in before.items()}
        result = method(*arguments, **named)
        changed = [key for key, value in vars(dataset).items() if before.get(key, ...) is not value]
        if result is None or result is dataset:
            changed += [key for key, value in watched.items() if value.has_changed()]
        else:
            loader.readers.add(name)
        if changed:
            warnings.warn(
                f"{name}() changed {changed[0]!r} only in this rank's copy; the "
                "loader's fetchers do not see the change. Call it in the notebook, before the cell",
                stacklevel=2,
            )
        return result

    return call


class _WatchedValue:
    """A value of a dataset, and a digest of the value's content when this object was made.

    The digest is that of `ChangeDetector`, whose cost has a limit. If the value would exceed the
    limit, or if it cannot change, it never counts as changed. If possible, this object has only a
    weak reference to the value.
    """

    def __init__(self, value: Any) -> None:
        self._value: Callable[[], Any] = lambda: value
        with suppress(TypeError):  # a list or dict, for example, allows no weak reference
            self._value = weakref.ref(value)
        values = {"value": value} if _can_change(value) else {}
        self._detector = ChangeDetector(values, {}, (), ())

    def has_changed(self) -> bool:
        value = self._value()
        return value is not None and bool(self._detector.notes({"value": value}))


def _can_change(value: Any) -> bool:
    """Return whether a value is data that can change in place; code is no data."""
    return not issubclass(type(value), (*_UNCHANGEABLE, *_CODE))
