"""In which order a map-style loader's batches come, epoch by epoch.

The order is the loader's own sampler, run under the seed of (run, epoch): what a local DataLoader
would do after `torch.manual_seed(seed_of(seed, epoch))`. A sampler or generator that remembers
earlier epochs is replayed from the state it was registered with, one epoch after the other, so
that an epoch's order depends on nothing but the seed and the epoch's number.
"""

import hashlib
import io
import itertools
import pickle
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import cloudpickle
import torch
from torch.utils.data import DataLoader

from taas_magic.data import randomness
from taas_magic.data.randomness import seed_all
from taas_magic.data.shard import seed_of

_KEEP_EPOCHS = 3
_ENDLESS_STEP = 1024
_KEEP_ENDLESS = 16 * _ENDLESS_STEP


class Indices(Protocol):
    """The batches of one epoch, each a list of indices (or one index)."""

    def __len__(self) -> int: ...

    def __getitem__(self, batch: int, /) -> Any: ...


class _Packed:
    """Lists of ints at 8 bytes an index (a Python list takes 36)."""

    def __init__(self, batches: Iterable[Sequence[int]]) -> None:
        self.flat, self.ends = array("q"), array("q", [0])
        for batch in batches:
            self.flat.extend(batch)
            self.ends.append(len(self.flat))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, batch: int) -> list[int]:
        if not 0 <= batch < len(self):
            raise IndexError(batch)
        return self.flat[self.ends[batch] : self.ends[batch + 1]].tolist()


def _pack(batches: list[Any]) -> tuple[Indices, int]:
    """Return the batches in little memory, and the hash of their order."""
    try:
        packed = _Packed(batches)
    except TypeError:
        return batches, _hash(repr(batches).encode())
    return packed, _hash(packed.flat.tobytes() + packed.ends.tobytes())


def _hash(data: bytes) -> int:
    """A hash of 32 bits, never 0."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little") or 1


class Endless:
    """The batches of a sampler that does not know its length: enumerated as far as asked.

    Remembers the last of them and begins again for an earlier one. What the sampler draws does not
    depend on what else is seeded in the meantime.

    Args:
        begin: Begins the enumeration, under seeds of its own.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self._restart()

    def __getitem__(self, batch: int) -> Any:
        """The batch.

        Raises:
            IndexError: The sampler ended before it.
        """
        if batch < self._first:
            self._restart()
        while self._first + len(self._seen) <= batch:
            more = self._next_ones()
            if not more:
                raise IndexError(batch)
            self._seen.extend(more)
            while len(self._seen) > _KEEP_ENDLESS:
                self._seen.popleft()
                self._first += 1
        return self._seen[batch - self._first]

    def _restart(self) -> None:
        self._seen: deque[Any] = deque()
        self._first = 0
        with randomness.kept():
            self._rest = self._begin()
            self._random = randomness.state()

    def _next_ones(self) -> list[Any]:
        with randomness.kept():
            randomness.go_to(self._random)
            more = list(itertools.islice(self._rest, _ENDLESS_STEP))
            self._random = randomness.state()
        return more


class Epoch:
    """One epoch's order.

    Attributes:
        indices: The batches' indices.
        batches: How many there are; None where the sampler does not know.
        digest: Hash of the order, 0 where it has no end.
    """

    def __init__(self, indices: Indices | Endless, batches: int | None, digest: int) -> None:
        self.indices, self.batches, self.digest = indices, batches, digest


class _SamplerPickler(cloudpickle.Pickler):
    """Pickles samplers without the dataset that they refer to."""

    def __init__(self, file: io.BytesIO, dataset: object) -> None:
        super().__init__(file, protocol=5)
        self._dataset = dataset

    def persistent_id(self, value: object) -> str | None:
        return "dataset" if value is self._dataset else None


class _SamplerUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, dataset: object) -> None:
        super().__init__(file)
        self._dataset = dataset

    def persistent_load(self, name: str) -> object:
        return self._dataset


class Order:
    """The orders of a loader's epochs.

    Args:
        loader: A map-style loader, as it was registered.
        seed: The run's seed.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._dataset, self._seed = loader.dataset, seed
        self._collates = loader.batch_sampler is not None
        sampler = loader.batch_sampler if self._collates else loader.sampler
        self._starts = {0: self._dump((sampler, loader.generator))}
        self._epochs: dict[int, Epoch] = {}

    def epoch(self, number: int) -> Epoch:
        """Return the order of an epoch; enumerates it when it is asked for first."""
        if number not in self._epochs:
            self._epochs[number] = self._run(number)
            for old in list(self._epochs)[:-_KEEP_EPOCHS]:
                del self._epochs[old]
        return self._epochs[number]

    def known(self, number: int) -> Epoch | None:
        """The order of an epoch, if it is enumerated."""
        return self._epochs.get(number)

    def _run(self, number: int) -> Epoch:
        latest = max(start for start in self._starts if start <= number)
        for before in range(latest, number):
            if not self._forgets():
                self._enumerate(before)
        epoch = self._enumerate(number)
        for old in [start for start in self._starts if 1 < start <= number - _KEEP_EPOCHS]:
            del self._starts[old]
        return epoch

    def _forgets(self) -> bool:
        """Whether an epoch leaves the sampler as it was, so that all epochs begin alike."""
        return self._starts.get(1) == self._starts[0]

    def _enumerate(self, number: int) -> Epoch:
        sampler, generator, indices = self._begin(number)
        if not _has_length(sampler):
            self._starts[1] = self._starts[0]
            return Epoch(Endless(lambda: self._begin(number)[2]), None, 0)
        packed, digest = _pack(list(indices))
        if not self._forgets():
            _set_epoch(sampler, 0)
            self._starts[number + 1] = self._dump((sampler, generator))
        return Epoch(packed, len(packed), digest)

    def _begin(self, number: int) -> tuple[Any, Any, Iterator[Any]]:
        """A sampler at the beginning of an epoch, its generator, and its batches."""
        start = self._starts[0] if self._forgets() else self._starts[number]
        sampler, generator = self._load(start)
        _set_epoch(sampler, number)
        seed_all(seed_of(self._seed, number))
        # A local DataLoader's order of draws: the sampler's iterator, the base seed, the indices.
        indices = iter(sampler)
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        return sampler, generator, indices

    def _dump(self, value: object) -> bytes:
        file = io.BytesIO()
        _SamplerPickler(file, self._dataset).dump(value)
        return file.getvalue()

    def _load(self, data: bytes) -> Any:
        return _SamplerUnpickler(io.BytesIO(data), self._dataset).load()


def _set_epoch(sampler: object, number: int) -> None:
    for one in (sampler, getattr(sampler, "sampler", None)):
        set_epoch = getattr(one, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(number)


def _has_length(sampler: Any) -> bool:
    try:
        len(sampler)
    except (TypeError, NotImplementedError):
        return False
    return True
