"""What a registered loader is in a rank: a DataLoader to everyone who asks, fed by fetchers.

`Feed` says what a rank knows of the run's data service; `LoaderShape` is what the notebook says
about a loader when it travels; `RemoteLoader` is what the cell finds under the loader's name.
"""

import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory

from taas_magic.data.blocks import Blocks
from taas_magic.data.lanes import Lanes
from taas_magic.data.ledger import Ledger
from taas_magic.data.pull import Pull
from taas_magic.data.route import Directory, Found, Route, Timing
from taas_magic.data.server import LaneSpec
from taas_magic.data.shard import Handed, Part, Place, Uneven
from taas_magic.data.shard import steps as steps_of
from taas_magic.data.source import Source
from taas_magic.data.stream import Ahead, Step, steps
from taas_magic.data.supply import LocalSupply, Reply, Supply, own_random_state, reraised

_AHEAD_FROM_BYTES = 1 << 20


@dataclass(frozen=True)
class LoaderShape:
    """A loader as the notebook describes it; no part of its data.

    Attributes:
        name: The loader's name in the run.
        batches: Batches of an epoch; None where it does not say.
        samples: Length of its dataset; None where it has none.
        iterable: Whether the dataset is iterable-style.
        batch_size: As the loader has it.
        drop_last: As the loader has it.
        num_workers: As the loader has it.
        pin_memory: Whether batches are to lie in page-locked memory (where there is CUDA).
        timeout_s: How long a rank waits for a batch, 0: as long as it takes.
        uneven: What happens when batches do not divide by the ranks.
        seed: The seed of its randomness; None: the run's.
        attributes: The dataset's small attributes.
    """

    name: str
    batches: int | None
    samples: int | None
    iterable: bool
    batch_size: int | None
    drop_last: bool
    num_workers: int
    pin_memory: bool = False
    timeout_s: float = 0.0
    uneven: Uneven = "pad"
    seed: int | None = None
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Feed:
    """What a rank knows of the run's data service.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        payload: Returns the pickled loader of a name.
        directory: Where the lanes are; None: this rank prepares its batches itself.
        key: The run's key.
        units: The bound of `--units`.
        seed: The run's seed.
        tls: What makes a client context, for fetchers on other hosts.
        ledger: Where it is written what was handed out.
        generation: Which attempt of the run.
        window_bytes: How much a rank asks for ahead.
        timing: How long to wait for what.
        direct: Whether shared memory may be used on one host.
    """

    rank: int
    world_size: int
    payload: Callable[[str], bytes]
    directory: Directory | None = None
    key: bytes = b""
    units: int | None = None
    seed: int = 0
    tls: Callable[[], Any] | None = None
    ledger: Ledger | None = None
    generation: int = 0
    window_bytes: int = 128 << 20
    timing: Timing = Timing()  # noqa: RUF009
    direct: bool = True
    loaders: "list[RemoteLoader]" = field(default_factory=list)

    def counts(self) -> dict[str, dict[str, float]]:
        """What this rank was handed so far, for each loader."""
        return {loader.name: asdict(loader.counts) for loader in self.loaders}


@dataclass
class Counts:
    """What a rank was handed of one loader, and how long it waited for it."""

    batches: int = 0
    units: int = 0
    bytes: int = 0
    waited_s: float = 0.0
    retried: int = 0


class RemoteLoader(DataLoader[Any]):
    """A registered loader in a rank.

    Iterating it gives this rank's share of an epoch. The first epoch is 0; every iterator begins
    the next one, unless `sampler.set_epoch` or `load_state_dict` has said which.

    Args:
        shape: What the notebook says about it.
        feed: What this rank knows of the data service.
    """

    # accelerate shards and wraps what does not carry this mark; here every rank has its share.
    _is_accelerate_prepared = True

    def __init__(self, shape: LoaderShape, feed: Feed) -> None:
        self._shape, self._feed = shape, feed
        self._seed = feed.seed if shape.seed is None else shape.seed
        self._next_epoch, self._turn, self._spent = 0, 0, 0
        self._resume = Place()
        self._current: _Pass | None = None
        self._route: Route | None = None
        self._source: Source | None = None
        self._blocks: list[Blocks] = []
        self.counts = Counts()
        super().__init__(**_arguments(self, shape))
        self.num_workers = shape.num_workers

    @property
    def name(self) -> str:
        """The loader's name in the run."""
        return self._shape.name

    def __len__(self) -> int:
        """How many batches this rank gets of an epoch.

        Raises:
            TypeError: The loader does not know its length.
        """
        if self._shape.batches is None:
            raise TypeError(f"loader {self._shape.name!r} does not know its length")
        return steps_of(
            self._shape.batches, self._feed.rank, self._feed.world_size, self._shape.uneven
        )

    def __iter__(self) -> Any:
        """Begin the next epoch, or go on where `load_state_dict` said."""
        epoch, place = self._next_epoch, self._resume
        self._next_epoch, self._resume = epoch + 1, Place()
        self._turn += 1
        self._current = _Pass(self, epoch, place, self._turn - 1)
        return self._current

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iterator gives."""
        self._next_epoch, self._resume = epoch, Place()

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands after the last batch handed out (torchdata's protocol)."""
        epoch, place = self._next_epoch, self._resume
        if self._current is not None and not self._current.ended:
            epoch, place = self._current.epoch, self._current.after
        return {"epoch": epoch, "place": list(place), "units": self._spent, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, with any number of fetchers.

        Raises:
            ValueError: The state is of another number of ranks and in the middle of a step.
        """
        position, slot, first_slots = state["place"]
        if position % self._feed.world_size:
            raise ValueError(
                f"the state stands at batch {position} of epoch {state['epoch']}, which is in the "
                f"middle of a step of {self._feed.world_size} ranks"
            )
        self._next_epoch, self._spent = state["epoch"], state["units"]
        self._resume = Place(position, slot, tuple(first_slots))
        self._seed, self._current = state["seed"], None

    def close(self) -> None:
        """Close all connections; the loader can still be iterated."""
        if self._route is not None:
            self._route.close()

    def sample(self, index: Any) -> Any:
        """`dataset[index]`, from a fetcher."""
        supply = self._supply()
        try:
            if isinstance(supply, Pull):
                return supply.sample(index)
            with own_random_state(), reraised():
                return self._local_source().sample(index)
        finally:
            supply.close()

    def original(self) -> DataLoader[Any]:
        """The loader itself, unpickled in this rank; loads all of its dataset."""
        return self._local_source().loader

    def _part(self) -> Part:
        feed, units = self._feed, self._feed.units
        left = None if units is None else units - self._spent
        return Part(feed.rank, feed.world_size, self._shape.uneven, left)

    def _supply(self) -> Supply:
        feed, name = self._feed, self._shape.name
        if feed.directory is None and not self._shape.num_workers:
            return LocalSupply(self._local_source(), feed.units is not None)
        if self._route is None:
            directory, key = feed.directory, feed.key
            if directory is None:
                key = os.urandom(32)
                directory = self._own_lanes(key)
            tls = feed.tls() if feed.tls else None
            self._route = Route(name, directory, key, tls, feed.direct, feed.timing)
        blocks = self._blocks.pop() if self._blocks else Blocks(2 * feed.window_bytes)
        return Pull(self._route, blocks, self._shape.timeout_s)

    def _own_lanes(self, key: bytes) -> Directory:
        """Lanes of this rank's own, as many as the loader has workers: no fetchers are there."""
        feed, name, count = self._feed, self._shape.name, self._shape.num_workers
        payload = feed.payload(name)
        specs = [
            LaneSpec(
                payload,
                name,
                self._seed,
                key,
                lane=lane,
                number=lane,
                lanes=count,
                stride=feed.world_size,
                first=feed.rank,
                units=feed.units,
                host=f"{socket.gethostname()}, rank {feed.rank}",
            )
            for lane in range(count)
        ]
        lanes = Lanes(specs)
        weakref.finalize(self, lanes.close)

        def directory(loader: str) -> Found:
            lanes.mend()
            return Found(count, feed.world_size, lanes.addresses)

        return directory

    def _local_source(self) -> Source:
        if self._source is None:
            name, rank = self._shape.name, self._feed.rank
            payload = self._feed.payload(name)
            self._source = Source(payload, name, self._seed, f"rank {rank}")
        return self._source


class _Pass(Iterator[Any]):
    """One iterator: one rank's share of one epoch."""

    def __init__(self, loader: RemoteLoader, epoch: int, place: Place, turn: int) -> None:
        self._loader, self.epoch, self.after, self._turn = loader, epoch, place, turn
        self._supply: Supply | None = None
        self._steps: Iterator[Step] | Ahead | None = None
        self._line = -1
        self._pins = loader._shape.pin_memory and torch.cuda.is_available()
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
                self._loader._blocks.append(self._supply.blocks)

    def __del__(self) -> None:
        self.close()

    def _begin(self) -> Iterator[Step]:
        loader, feed = self._loader, self._loader._feed
        self._supply = loader._supply()
        opened = self._supply.open(self.epoch)
        if feed.ledger is not None:
            first = self.after.position // feed.world_size
            name, place = loader._shape.name, (feed.rank, feed.world_size, first, 0)
            self._line = feed.ledger.begin(
                Handed(feed.generation, name, self._turn, self.epoch, *place)
            )
        part = loader._part()
        return steps(self._supply, opened, part, self.epoch, self.after, feed.window_bytes)

    def _hand_out(self, step: Step) -> Any:
        loader, reply = self._loader, step.reply
        bound = loader._feed.units
        if bound is not None and loader._spent + step.row_units > bound:
            self.close()
            raise StopIteration
        if reply.size >= _AHEAD_FROM_BYTES and not isinstance(self._steps, Ahead):
            assert self._steps is not None
            self._steps = Ahead(self._steps, self._pinned)
            reply = self._pinned(reply)
        elif not isinstance(self._steps, Ahead):
            reply = self._pinned(reply)
        if self._line >= 0 and loader._feed.ledger is not None:
            loader._feed.ledger.hand(self._line)
        self.after = step.after
        loader._spent += step.row_units
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


class RemoteSampler(DistributedSampler[Any]):
    """Stands for the sampler, whose order the fetchers know; `set_epoch` chooses the epoch.

    A DistributedSampler, so that Lightning sees that the loader is sharded already.
    """

    def __init__(self, loader: RemoteLoader, dataset: "RemoteDataset", feed: Feed) -> None:
        super().__init__(dataset, feed.world_size, feed.rank, shuffle=False)
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the loader's next iterator gives."""
        super().set_epoch(epoch)
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a registered loader's order is with its fetchers; iterate the loader")


class RemoteBatchSampler:
    """Stands for a batch sampler of the user's own."""

    def __init__(self, loader: RemoteLoader, sampler: RemoteSampler) -> None:
        self._loader, self.sampler = loader, sampler

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a registered loader's order is with its fetchers; iterate the loader")

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the loader's next iterator gives."""
        self.sampler.set_epoch(epoch)


class RemoteDataset(Dataset[Any]):
    """Stands for a dataset that is with the fetchers: knows its length and small attributes."""

    def __init__(self, loader: RemoteLoader, shape: LoaderShape) -> None:
        self._remote, self._about = loader, shape

    def __len__(self) -> int:
        if self._about.samples is None:
            raise TypeError(f"the dataset of loader {self._about.name!r} has no length")
        return self._about.samples

    def __getitem__(self, index: Any) -> Any:
        return self._remote.sample(index)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_remote", "_about"):
            raise AttributeError(name)
        if name in self._about.attributes:
            return self._about.attributes[name]
        return getattr(self._remote.original().dataset, name)


class RemoteStream(RemoteDataset, IterableDataset[Any]):
    """Stands for an iterable-style dataset."""

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("an iterable-style dataset is with its fetchers; iterate the loader")


def _arguments(loader: RemoteLoader, shape: LoaderShape) -> dict[str, Any]:
    """What makes DataLoader's own attributes say the truth."""
    if shape.iterable:
        stream = RemoteStream(loader, shape)
        return {"dataset": stream, "batch_size": shape.batch_size, "drop_last": shape.drop_last}
    dataset = RemoteDataset(loader, replace(shape, samples=shape.samples or 0))
    sampler = RemoteSampler(loader, dataset, loader._feed)
    return {
        "dataset": dataset,
        "batch_size": shape.batch_size,
        "sampler": sampler,
        "drop_last": shape.drop_last if shape.batch_size is not None else False,
    }


_feed: Feed | None = None


def use_feed(feed: Feed | None) -> None:
    """Say, in a rank and before its payload is read, where its loaders' batches come from."""
    global _feed
    _feed = feed


def arrive(shape: LoaderShape) -> RemoteLoader:
    """What a registered loader is unpickled to.

    Raises:
        RuntimeError: This process is no rank of a run.
    """
    if _feed is None:
        raise RuntimeError(f"loader {shape.name!r} arrived in process {os.getpid()}, no rank")
    loader = RemoteLoader(shape, _feed)
    _feed.loaders.append(loader)
    return loader
