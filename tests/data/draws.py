"""Compares random registered loaders with local DataLoaders; a seed determines each loader.

The batches must be those of a local DataLoader with the same arguments, bit for bit and each
exactly once. Exceptions that docs/data.md lists are not drawn, or are checked in another way
(`Draw.is_unseeded`).
"""

import contextlib
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from taas_magic.data.loader import RemoteLoader
from taas_magic.data.sharding import Uneven, seed_of
from tests.data.data_rig import SEED, Service, service, workers_of
from tests.eventually import HUNG_S

DATASETS = ("rows", "together", "subset", "concat")
UNSEEDED = ("shuffled", "ragged")
STREAMS = ("lines", "sized", "chain", "stateful", *UNSEEDED)
SAMPLERS = (
    *("sequential", "shuffle", "generator", "weighted", "subset", "memory", "epochs"),
    *("unsized", "unsized memory", "bunches", "nested", "unseeded"),
)
ITEMS = ("tensor", "dict", "tuple", "text", "views", "array", "none", "sparse", "complex")
COLLATES = ("default", "list", "dict", "joined")
FAULTS = ("", "", "", "kill worker", "kill fetcher")


@dataclass(frozen=True)
class Draw:
    """Description of a random loader, and of how a test iterates this loader.

    Attributes:
        leave: Number of steps after which all ranks leave the first epoch; -1 to finish the epoch.
        save: Number of steps of the last epoch after which ranks save their states. New ranks load
            the states and continue. -1 to save no states.
        cpus: Number of fetchers of the first ranks.
        cpus_after: Number of fetchers of the ranks that load the states.
        fault: Fault that the test causes in the first epoch, after two steps; "" for none.
        are_threads: Whether each rank iterates in its own thread. If not, the ranks iterate in one
            thread, and make one step each in turn.
        item_s: Maximum seconds that the dataset takes for an item.
        load_s: Maximum seconds that a process takes to unpickle the dataset.
        window_bytes: Size of the batches that each rank requests ahead.
    """

    seed: int
    dataset: str
    sampler: str
    item: str
    collate: str
    size: int
    batch_size: int | None
    drop_last: bool
    num_workers: int
    persistent: bool
    epochs: int
    leave: int
    save: int
    world_size: int
    uneven: Uneven
    cpus: int
    cpus_after: int
    fault: str
    are_threads: bool
    item_s: float
    load_s: float
    window_bytes: int

    @property
    def is_stream(self) -> bool:
        return self.dataset in STREAMS

    @property
    def is_unseeded(self) -> bool:
        return self.sampler == "unseeded" or self.dataset in UNSEEDED


def draw(seed: int) -> Draw:
    """Return the draw of a seed. The same seed always gives the same draw."""
    rng = random.Random(seed)
    dataset = rng.choice(DATASETS + STREAMS)
    is_stream = dataset in STREAMS
    sampler = "" if is_stream else rng.choice(SAMPLERS)
    item = rng.choice(ITEMS)
    collate = rng.choice(COLLATES if item in ("tensor", "dict", "tuple", "text") else ("list",))
    has_batch_sampler = sampler in ("bunches", "nested")
    batch_size = None if rng.random() < 0.1 and not has_batch_sampler else rng.randint(1, 6)
    num_workers = rng.randint(0, 2)
    world_size, epochs = rng.randint(1, 3), rng.randint(1, 3)
    cpus = rng.randint(0, 3)
    is_unseeded = sampler == "unseeded" or dataset in UNSEEDED
    if dataset in UNSEEDED:
        batch_size = 1  # so that two batches with the same sample are equal
        world_size = world_size if cpus else 1  # each rank would read other data (docs/data.md)
    fault = rng.choice(FAULTS)
    if not cpus or (fault and is_unseeded) or (fault == "kill fetcher" and cpus < 2):
        fault = ""  # no fetcher would be left, or the epoch would be lost (docs/data.md)
    can_save = not is_unseeded  # its order cannot be repeated
    return Draw(
        seed=seed,
        dataset=dataset,
        sampler=sampler,
        item=item,
        collate="bare" if batch_size is None else collate,
        size=rng.choice((1, rng.randint(2, 12), rng.randint(13, 60))),
        batch_size=batch_size,
        drop_last=batch_size is not None and not has_batch_sampler and rng.random() < 0.3,
        num_workers=num_workers,
        persistent=num_workers > 0 and rng.random() < 0.5,
        epochs=epochs,
        leave=rng.randint(0, 3) if epochs > 1 and rng.random() < 0.3 else -1,
        save=rng.randint(0, 6) if can_save and rng.random() < 0.5 else -1,
        world_size=world_size,
        uneven=rng.choice(("pad", "drop", "keep")),
        cpus=cpus,
        cpus_after=rng.randint(0, 3),
        fault=fault,
        are_threads=rng.random() < 0.5,
        item_s=rng.choice((0.0, 0.0, 0.03)),
        load_s=rng.choice((0.0, 0.0, 0.3)),
        window_bytes=rng.choice((1, 4096, 1 << 20)),
    )


def value_of(index: int, kind: str) -> Any:
    """Return the dataset's item at an index; `kind` is a key of the dict `kinds`.

    The same arguments always give equal items.
    """
    row = torch.arange(6, dtype=torch.float32) + index
    square = torch.arange(30).reshape(5, 6) + index
    kinds: dict[str, Callable[[], Any]] = {
        "tensor": lambda: row,
        "dict": lambda: {"row": row, "label": index, "name": f"n{index}"},
        "tuple": lambda: (row, index, float(index) / 3),
        "text": lambda: f"text {index}",
        "views": lambda: [square[:, 2], square[::2, 1::3], square.t(), square[1]],
        "array": lambda: np.arange(12, dtype=np.int16).reshape(3, 4) + index,
        "none": lambda: (None, index, [], b"bytes", {index}),
        "sparse": lambda: torch.eye(3).to_sparse() * index,
        "complex": lambda: [row.to(torch.complex64) * 1j, row > 2, row.to(torch.bfloat16)],
    }
    return kinds[kind]()


@dataclass
class Pace:
    """Random delays of a dataset. They do not change the data.

    Attributes:
        item_s: Maximum seconds of the delay before an item.
        load_s: Maximum seconds of the delay while the dataset is unpickled.
    """

    item_s: float = 0.0
    load_s: float = 0.0

    def __setstate__(self, state: dict[str, float]) -> None:
        self.__dict__.update(state)
        time.sleep(self.load_s * _own.random())

    def item(self, index: int, kind: str) -> tuple[int, Any]:
        """Sleep at most `item_s` seconds, and return the index and the item at this index."""
        if self.item_s:
            time.sleep(self.item_s * _own.random())
        return index, value_of(index, kind)


_own = random.SystemRandom()
"""Source of random numbers that no seed changes."""


class Rows(Dataset[Any]):
    def __init__(self, size: int, kind: str, pace: Pace) -> None:
        self.size, self.kind, self.pace = size, kind, pace

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.pace.item(int(index), self.kind)


class Together(Rows):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]


class Lines(IterableDataset[Any]):
    """Iterable-style dataset; each worker yields a part of the items."""

    def __init__(self, first: int, size: int, kind: str, pace: Pace) -> None:
        self.first, self.size, self.kind, self.pace = first, size, kind, pace

    def __iter__(self) -> Iterator[Any]:
        for index in self.indices():
            yield self.pace.item(index, self.kind)

    def indices(self) -> Sequence[int]:
        """Return the indices of this worker's items, in order."""
        info = get_worker_info()
        begin, step = (info.id, info.num_workers) if info else (0, 1)
        return range(self.first + begin, self.first + self.size, step)


class Sized(Lines):
    def __len__(self) -> int:
        return self.size


class Shuffled(Lines):
    """Iterable-style dataset whose items come in another order in each iteration."""

    def indices(self) -> Sequence[int]:
        indices = super().indices()
        return _own.sample(indices, len(indices))


class Ragged(Shuffled):
    """Shuffled dataset whose worker 0 yields twice as many items as each other worker."""

    def indices(self) -> Sequence[int]:
        info = get_worker_info()
        count = info.num_workers if info else 1
        number = info.id if info else 0
        mine = [n for n in range(self.size) if n % (count + 1) % count == number]
        return _own.sample(mine, len(mine))


class Stateful(Lines):
    """Iterable dataset with `state_dict` and `load_state_dict`."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        begin, step = (info.id, info.num_workers) if info else (0, 1)
        while (index := begin + self.at * step) < self.size:
            self.at += 1
            yield self.pace.item(index, self.kind)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Memory(Sampler[int]):
    """Sampler whose own generator gives another order in each epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.rng = size, random.Random(size)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.sample(range(self.size), self.size))

    def __len__(self) -> int:
        return self.size


class Epochs(Memory):
    """Sampler whose order depends on the epoch set by `set_epoch`."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(self.size), self.size))


class Drawn(Memory):
    """Sampler that draws each index from torch's global random generator when it yields it."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            yield int(torch.randint(self.size, ()))


class Unseeded(Memory):
    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(os.urandom(8)).sample(range(self.size), self.size))


class Unsized(Drawn):
    __len__ = None  # type: ignore[assignment]


class UnsizedMemory(Memory):
    __len__ = None  # type: ignore[assignment]


class Bunches(Memory):
    """Batch sampler that has no length. In each epoch, it yields other batch sizes."""

    def __iter__(self) -> Iterator[Any]:
        order = self.rng.sample(range(self.size), self.size)
        while order:
            yield [order.pop() for _ in range(min(len(order), self.rng.randint(1, 5)))]

    __len__ = None  # type: ignore[assignment]


def bare(item: Any) -> Any:
    return item


def joined(items: Sequence[Any]) -> Any:
    """Collate items into a dict: each item under its number, and the number of items."""
    return {f"{at}": item for at, item in enumerate(items)} | {"count": len(items)}


def named(items: Sequence[Any]) -> Any:
    return {"items": list(items)}


def make(one: Draw) -> DataLoader[Any]:
    """Return a new loader as the draw describes it."""
    size, about = one.size, (one.item, Pace(one.item_s, one.load_s))
    datasets: dict[str, Callable[[], Any]] = {
        "rows": lambda: Rows(size, *about),
        "together": lambda: Together(size, *about),
        "subset": lambda: Subset(Rows(2 * size, *about), range(size)),
        "concat": lambda: ConcatDataset(
            [Subset(Rows(size, *about), part) for part in (range(1), range(1, size))]
        ),
        "lines": lambda: Lines(0, size, *about),
        "sized": lambda: Sized(0, size, *about),
        "chain": lambda: ChainDataset([Lines(0, 2, *about), Lines(2, size, *about)]),
        "stateful": lambda: Stateful(0, size, *about),
        "shuffled": lambda: Shuffled(0, size, *about),
        "ragged": lambda: Ragged(0, size, *about),
    }
    samplers: dict[str, Callable[[], dict[str, Any]]] = {
        "": dict,
        "sequential": dict,
        "shuffle": lambda: {"shuffle": True},
        "generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(size)},
        "weighted": lambda: {"sampler": WeightedRandomSampler(range(1, size + 1), 2 * size)},
        "subset": lambda: {"sampler": SubsetRandomSampler(range(0, size, 2))},
        "memory": lambda: {"sampler": Memory(size)},
        "epochs": lambda: {"sampler": Epochs(size)},
        "unsized": lambda: {"sampler": Unsized(size)},
        "unsized memory": lambda: {"sampler": UnsizedMemory(size)},
        "bunches": lambda: {"batch_sampler": Bunches(size)},
        "nested": lambda: {
            "batch_sampler": BatchSampler(RandomSampler(range(size), True, size + 3), 3, False)
        },
        "unseeded": lambda: {"sampler": Unseeded(size)},
    }
    collates = {"default": None, "list": list, "dict": named, "joined": joined, "bare": bare}
    chosen = samplers[one.sampler]()
    if "batch_sampler" not in chosen:
        chosen |= {"batch_size": one.batch_size, "drop_last": one.drop_last}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of more workers than cores
        return DataLoader(
            datasets[one.dataset](),
            collate_fn=collates[one.collate],
            num_workers=one.num_workers,
            persistent_workers=one.persistent,
            **chosen,
        )


def exact(value: Any) -> Any:
    """Convert a batch to values that can be compared: they are equal only if all bits are equal."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            parts = [value.is_coalesced(), value._indices(), value._values()]
            return [str(value.layout), list(value.shape), *map(exact, parts)]
        sizes = zip(value.shape, value.stride(), strict=True)
        steps = [step for size, step in sizes if size > 1]
        data = value.contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else b""
        return [str(value.dtype), list(value.shape), steps, data.hex(), str(value.tolist())]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), value.tobytes().hex()]
    if isinstance(value, dict):
        return {key: exact(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(exact, value)]
    return [type(value).__name__, value]


def local(one: Draw) -> list[list[Any]]:
    """Return the batches of each epoch of a local DataLoader, converted by `exact`.

    Each epoch has the seed that a registered loader would use.
    """
    loader, epochs = make(one), list[list[Any]]()
    for epoch in range(one.epochs):
        for part in (loader.sampler, loader.dataset):
            getattr(part, "set_epoch", int)(epoch)
        torch.manual_seed(seed_of(SEED, epoch))
        epochs.append([exact(batch) for batch in loader])
    return epochs


def dealt(batches: Sequence[Any], one: Draw) -> list[list[Any]]:
    """Return for each rank the list of batches of an epoch that the rank should receive."""
    whole, rest = divmod(len(batches), one.world_size)
    padded = [*batches]
    if rest and one.uneven == "pad":
        padded += [batches[at % len(batches)] for at in range(one.world_size - rest)]
    elif rest and one.uneven == "drop":
        padded = padded[: whole * one.world_size]
    return [padded[rank :: one.world_size] for rank in range(one.world_size)]


class Agreed:
    """Implementation of `taas_magic.data.other_ranks.KeyValueStore` for ranks in one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._news = threading.Condition()

    def store_first(self, key: str, value: bytes) -> bytes:
        with self._news:
            return self._values.setdefault(key, value)

    def publish(self, key: str, value: bytes, replaced: str) -> None:
        with self._news:
            self._values[key] = value
            self._values.pop(replaced, None)
            self._news.notify_all()

    def read(self, key: str) -> bytes:
        with self._news:
            assert self._news.wait_for(lambda: key in self._values, HUNG_S), key
            return self._values[key]


class Player:
    """Test run that iterates the loader of a draw, and records what each rank receives.

    Attributes:
        epochs: For each epoch, a list with the list of batches of each rank.
    """

    def __init__(self, one: Draw, folder: Path) -> None:
        self._one, self._folder = one, folder
        self.epochs: list[list[list[Any]]] = []

    def play(self) -> None:
        one = self._one
        with self._serving(one.cpus, "first") as (running, ranks):
            for epoch in range(one.epochs):
                is_last = epoch == one.epochs - 1
                most = one.save if is_last else one.leave if not epoch else -1
                harm = one.fault if not epoch else ""
                handed = self._pass(running, ranks, most, harm)
                self.epochs.append(handed)
            states = [loader.state_dict() for loader in ranks]
        if one.save < 0:
            return
        with self._serving(one.cpus_after, "after") as (running, ranks):
            for loader, state in zip(ranks, states, strict=True):
                loader.load_state_dict(state)
            # A rank whose last epoch was over continues with the next epoch: leave it out.
            left = [rank for rank in ranks if rank.next_epoch == one.epochs - 1]
            rest = self._pass(running, left, -1)
            for rank, more in zip(left, rest, strict=True):
                self.epochs[-1][rank.feed.rank] += more

    @contextlib.contextmanager
    def _serving(self, cpus: int, name: str) -> Iterator[tuple[Service, list[RemoteLoader]]]:
        one, agreed = self._one, Agreed()
        workers = max(1, one.num_workers)
        with service(self._folder / name, make(one), fetchers=cpus, workers=workers) as running:
            yield (
                running,
                [
                    running.loader(
                        rank=rank,
                        world_size=one.world_size,
                        shape={"uneven": one.uneven},
                        local=not cpus,
                        window_bytes=one.window_bytes,
                        agreement=agreed if one.world_size > 1 else None,
                    )
                    for rank in range(one.world_size)
                ],
            )

    def _pass(
        self, running: Service, ranks: Sequence[RemoteLoader], most: int, harm: str = ""
    ) -> list[list[Any]]:
        """Iterate the loaders of all ranks until each has ended or has made `most` steps.

        The ranks make one step each in turn, or each iterates in its thread (`Draw.are_threads`).

        Args:
            running: Fetchers of the ranks.
            ranks: Loader of each rank.
            most: Maximum number of steps; -1 for no limit.
            harm: Fault to cause after two steps; "" for none.

        Returns:
            The batches of each rank.
        """
        if self._one.are_threads and ranks:
            with ThreadPoolExecutor(len(ranks)) as threads:
                harms = [harm, *[""] * len(ranks)]
                alone = lambda loader, own: self._in_turn(running, [loader], most, own)[0]  # noqa: E731
                return list(threads.map(alone, ranks, harms))
        return self._in_turn(running, ranks, most, harm)

    def _in_turn(
        self, running: Service, ranks: Sequence[RemoteLoader], most: int, harm: str
    ) -> list[list[Any]]:
        passes = [iter(loader) for loader in ranks]
        handed: list[list[Any]] = [[] for _ in passes]
        left, step = set(range(len(passes))), 0
        while left and step != most:
            if step == 2:
                self._harm(running, harm)
            for rank in sorted(left):
                try:
                    handed[rank].append(exact(next(passes[rank])))
                except StopIteration:
                    left.remove(rank)
            step += 1
        return handed

    def _harm(self, running: Service, harm: str) -> None:
        if harm == "kill worker":
            workers_of(running, 0, max(1, self._one.num_workers))[0].kill()
        elif harm == "kill fetcher":
            running.processes[0][0].kill()


def differences(one: Draw, folder: Path) -> list[str]:
    """Iterate the loader of a draw, and compare the batches with those of a local DataLoader.

    Returns:
        One sentence for each difference. If the iteration raises an exception, only the exception.
    """
    expected, player = local(one), Player(one, folder)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            player.play()
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
    found = [str(it.message) for it in warned if "read the dataset again" in str(it.message)]
    for epoch, handed in enumerate(player.epochs):
        model = dealt(expected[epoch], one)
        if one.leave >= 0 and not epoch and one.epochs > 1:
            model = [mine[: one.leave] for mine in model]
        if one.is_unseeded:
            found += _not_once(expected[epoch], epoch, handed, model)
            continue
        for rank, (mine, theirs) in enumerate(zip(handed, model, strict=True)):
            found += _differing(f"epoch {epoch}, rank {rank}", mine, theirs)
    return found


def _differing(where: str, mine: list[Any], theirs: list[Any]) -> list[str]:
    if len(mine) != len(theirs):
        return [f"{where}: {len(mine)} batches instead of {len(theirs)}"]
    pairs = enumerate(zip(mine, theirs, strict=True))
    return [
        f"{where}, step {step}: {str(got)[:200]} instead of {str(want)[:200]}"
        for step, (got, want) in pairs
        if got != want
    ][:2]


def _not_once(
    expected: list[Any], epoch: int, handed: list[list[Any]], model: list[list[Any]]
) -> list[str]:
    """Check the batches of an epoch whose order is random, and return at most one fault.

    A fault is a wrong number of batches, a batch that came twice, or padding that does not repeat
    the first batches.

    Args:
        expected: Batches of a local DataLoader, in another order; only their number matters.
        epoch: Number of the epoch.
        handed: Batches that each rank has received.
        model: Batches of a local DataLoader, as the ranks should receive them.
    """
    if [len(mine) for mine in handed] != [len(mine) for mine in model]:
        return [f"epoch {epoch}: {[len(mine) for mine in handed]} batches"]
    steps = max(map(len, handed), default=0)
    rows = [mine[step] for step in range(steps) for mine in handed if step < len(mine)]
    count = len(expected)
    whole = [str(batch) for batch in rows[:count]]
    if len(set(whole)) != len(whole):
        return [f"epoch {epoch}: batches come twice"]
    if any(str(batch) != whole[at % count] for at, batch in enumerate(rows)):
        return [f"epoch {epoch}: it is not padded by its first batches"]
    return []
