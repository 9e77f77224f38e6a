"""What a registered loader is in a rank: a DataLoader to everyone who asks, fed by fetchers.

`RemoteLoader` is what the cell finds under the loader's name; `feed` has what it is told.
"""

import os
import socket
import weakref
from typing import Any

from torch.utils.data import DataLoader

from taas_magic.data import randomness, standins
from taas_magic.data.blocks import Blocks
from taas_magic.data.entries import Directory, Found
from taas_magic.data.feed import Feed, LoaderShape
from taas_magic.data.gauge import Counts
from taas_magic.data.import_hook import when_imported
from taas_magic.data.lane_spec import LaneSpec
from taas_magic.data.lanes import Lanes
from taas_magic.data.one_pass import Pass
from taas_magic.data.pull import Pull
from taas_magic.data.route import Route
from taas_magic.data.shard import Part, Place
from taas_magic.data.shard import steps as steps_of
from taas_magic.data.source import Source
from taas_magic.data.supply import LocalSupply, Supply, reraised


class RemoteLoader(DataLoader[Any]):
    """A registered loader in a rank.

    Iterating it gives this rank's share of an epoch. The first epoch is 0; every iterator begins
    the next one, unless `sampler.set_epoch` or `load_state_dict` has said which.

    Args:
        shape: What the notebook says about it.
        feed: What this rank knows of the data service.
    """

    # accelerate shards what does not carry this mark; here every rank has its share.
    _is_accelerate_prepared = True

    def __init__(self, shape: LoaderShape, feed: Feed) -> None:
        self.shape, self.feed = shape, feed
        self._seed = feed.seed if shape.seed is None else shape.seed
        self.next_epoch, self._turn = 0, 0
        self._resume = Place()
        self._states: dict[int, tuple[int, Any]] = {}
        self._current: Pass | None = None
        self._route: Route | None = None
        self._source: Source | None = None
        self._blocks: list[Blocks] = []
        self.counts = Counts()
        super().__init__(**standins.arguments(self, shape))
        self.num_workers = shape.num_workers

    @property
    def name(self) -> str:
        """The loader's name in the run."""
        return self.shape.name

    def __len__(self) -> int:
        """How many batches this rank gets of an epoch.

        Raises:
            TypeError: The loader does not know its length.
        """
        if self.shape.batches is None:
            raise TypeError(f"loader {self.shape.name!r} does not know its length")
        return steps_of(self.shape.batches, self.feed.rank, self.feed.world_size, self.shape.uneven)

    def __iter__(self) -> Any:
        """Begin the next epoch, or go on where `load_state_dict` said."""
        epoch, place = self.next_epoch, self._resume
        self.next_epoch, self._resume = epoch + 1, Place()
        self._turn += 1
        self._current = Pass(self, epoch, place, self._turn - 1)
        return self._current

    def counted(self) -> dict[str, float]:
        """What this rank was handed so far. Any thread may ask."""
        return self.counts.now(self._current.watch if self._current is not None else None)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iterator gives; it still begins where a loaded state stands."""
        if epoch != self.next_epoch:
            self.next_epoch, self._resume, self._states = epoch, Place(), {}

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands after the last batch handed out (torchdata's protocol).

        With the state of an iterable-style dataset that has one, which fetchers are asked for.
        """
        return self.with_states(self.position())

    def position(self) -> dict[str, Any]:
        """The same without a dataset's own state."""
        epoch, place = self.next_epoch, self._resume
        if self._current is not None and not self._current.ended:
            epoch, place = self._current.epoch, self._current.after
        return {
            "epoch": epoch,
            "place": list(place),
            "units": self.counts.spent,
            "seed": self._seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, with any number of fetchers.

        Raises:
            ValueError: The state is of another number of ranks and in the middle of a step.
        """
        position, slot, first_slots = state["place"]
        if position % self.feed.world_size:
            raise ValueError(
                f"the state stands at batch {position} of epoch {state['epoch']}, which is in the "
                f"middle of a step of {self.feed.world_size} ranks"
            )
        self.next_epoch = state["epoch"]
        self.counts.resumed = self.counts.spent = state["units"]
        self._resume = Place(position, slot, tuple(first_slots))
        self._seed, self._current = state["seed"], None
        self._states = state.get("streams", {})

    def with_states(self, position: dict[str, Any]) -> dict[str, Any]:
        """A position and where the streams of the dataset stood there, or a little before."""
        epoch, place = position["epoch"], Place(*position["place"])
        if not self.shape.has_state or place == Place():
            return position
        if self._states:
            return {**position, "streams": self._states}
        supply = self.supply()
        try:
            streams = supply.open(epoch).streams or 1
            slots = {slot % streams: slot for slot in range(place.slot, place.slot + streams)}
            found = {stream: supply.state(slot) for stream, slot in slots.items()}
        finally:
            supply.close()
        return {**position, "streams": {key: value for key, value in found.items() if value}}

    def give_states(self, supply: Supply, streams: int) -> None:
        """Tell those who prepare the epoch where its streams stood, if that was loaded."""
        states, self._states = self._states, {}
        for stream, (item, state) in states.items():
            supply.restore(item * streams + stream, state)

    def close(self) -> None:
        """Close all connections; the loader can still be iterated."""
        if self._route is not None:
            self._route.close()

    def sample(self, index: Any) -> Any:
        """`dataset[index]`, from a fetcher."""
        supply = self.supply()
        try:
            if isinstance(supply, Pull):
                return supply.sample(index)
            with randomness.kept(), reraised():
                return self._local_source().sample(index)
        finally:
            supply.close()

    def original(self) -> DataLoader[Any]:
        """The loader itself, unpickled in this rank; loads all of its dataset."""
        return self._local_source().loader

    def part(self) -> Part:
        """What is this rank's, and how much of it is left."""
        feed, units = self.feed, self.feed.units
        left = None if units is None else units - self.counts.spent
        return Part(feed.rank, feed.world_size, self.shape.uneven, left)

    def supply(self) -> Supply:
        """Where the batches of one pass come from."""
        feed, name = self.feed, self.shape.name
        if feed.directory is None and not self.shape.num_workers:
            return LocalSupply(self._local_source(), feed.units is not None)
        if self._route is None:
            directory, key = feed.directory, feed.key
            if directory is None:
                key = os.urandom(32)
                directory = self._own_lanes(key)
            tls = feed.tls() if feed.tls else None
            self._route = Route(name, directory, key, tls, feed.direct, feed.timing)
        blocks = self._blocks.pop() if self._blocks else Blocks(2 * feed.window_bytes)
        return Pull(self._route, blocks, self.shape.timeout_s)

    def keep(self, blocks: Blocks) -> None:
        """Memory of a pass that is over, for the next one."""
        self._blocks.append(blocks)

    def _own_lanes(self, key: bytes) -> Directory:
        """Lanes of this rank's own, as many as the loader has workers: no fetchers are there."""
        feed, name, count = self.feed, self.shape.name, self.shape.num_workers
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
            name, rank = self.shape.name, self.feed.rank
            payload = self.feed.payload(name)
            self._source = Source(payload, name, self._seed, f"rank {rank}")
        return self._source


_feed: Feed | None = None


def use_feed(feed: Feed | None) -> None:
    """Say, in a rank and before its payload is read, where its loaders' batches come from."""
    global _feed
    _feed = feed


def _teach_accelerate() -> None:
    from taas_magic.data.accelerated import teach_accelerate

    teach_accelerate()


def arrive(shape: LoaderShape) -> RemoteLoader:
    """What a registered loader is unpickled to.

    Raises:
        RuntimeError: This process is no rank of a run.
    """
    if _feed is None:
        raise RuntimeError(f"loader {shape.name!r} arrived in process {os.getpid()}, no rank")
    if not _feed.loaders:
        when_imported("accelerate.accelerator", _teach_accelerate)
    loader = RemoteLoader(shape, _feed)
    _feed.loaders.append(loader)
    return loader
