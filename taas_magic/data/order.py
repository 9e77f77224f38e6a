"""Order of a map-style loader's batches in each epoch.

For each epoch, all random generators get a seed that depends on the loader's seed and the epoch.
Then the loader's own sampler runs. The result is the order of a local DataLoader after
`torch.manual_seed(seed_of(seed, epoch))`. If the sampler or the loader's generator keeps state
between epochs, all earlier epochs are replayed from the state that the loader was sent in.
"""

import copy
import hashlib
import io
import itertools
import pickle
import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any, NamedTuple

import cloudpickle
import torch

from taas_magic.capture.pickling import ValuePickler
from taas_magic.data.generators import generator_types
from taas_magic.data.sharding import seed_of

_numpy: Any = sys.modules.get("numpy")  # if numpy is installed, torch has imported it

_KEEP_EPOCHS = 3
"""Number of latest epochs whose order is kept."""

_UNSIZED_STEP = 1024
"""Number of batches to draw at once from a sampler without a length."""

_KEEP_UNSIZED = 16 * _UNSIZED_STEP
"""Number of latest batches whose indices are kept, for a sampler without a length."""

_MOST_PASSED = 1 << 17
"""Number of batches in an epoch above which a sampler without a length counts as endless."""

_MOST_LENGTHS = 10
"""Multiple of its length above which a sampler with a length counts as endless."""


class EpochOrder(NamedTuple):
    """Order of the batches in one epoch.

    Attributes:
        indices: The values that the sampler yields, by slot. Each value is the indices of a batch's
            samples; for a loader without a batch sampler, each value is a single index.
        batches: Number of batches; None if the sampler has no length or is endless.
        digest: Hash of the indices of all batches, or of the first batches if `batches` is None.
    """

    indices: "UnsizedBatches | PackedBatches | list[Any]"
    batches: int | None
    digest: int


class EpochOrders:
    """Orders of the batches of a map-style loader, one for each epoch.

    To find the order of an epoch, this class runs the loader's sampler. It stores the latest
    orders.

    Args:
        loader: A map-style loader (or its `LoaderParts`), in the state that it was sent in.
    """

    def __init__(self, loader: Any, seed: int) -> None:
        self._dataset, self._seed = loader.dataset, seed
        self._workers = loader.num_workers
        self._persists = bool(self._workers and loader.persistent_workers)
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._starts = {0: dump_without_dataset((sampler, loader.generator), self._dataset)}
        self._epochs: dict[int, EpochOrder] = {}

    def epoch(self, number: int) -> EpochOrder:
        """Return the order of an epoch; run the sampler if the order is not in memory.

        Running the sampler seeds the random generators of this process. If the sampler's state
        changes from epoch to epoch, first replay the earlier epochs, from the latest saved state
        on. Only the first two states, and the latest `_KEEP_EPOCHS` orders and states, are kept.

        Raises:
            Exception: The exception that the sampler raised.
        """
        if number not in self._epochs:
            latest = max(start for start in self._starts if start <= number)
            for before in range(latest, number):
                if not self._has_same_start_state():
                    self._skip_epoch(before)
            self._epochs[number] = self._enumerate(number)
            for old in [start for start in self._starts if 1 < start <= number - _KEEP_EPOCHS]:
                del self._starts[old]
            for old in list(self._epochs)[:-_KEEP_EPOCHS]:
                del self._epochs[old]
        return self._epochs[number]

    def _has_same_start_state(self) -> bool:
        """Return whether the sampler and generator have the same state before every epoch.

        If so, the order of an epoch can be found without running the sampler for earlier epochs.
        Return False until the state after epoch 0 has been recorded.
        """
        return self._starts.get(1) == self._starts[0]

    def _enumerate(self, number: int) -> EpochOrder:
        """Run the sampler from its state before an epoch, and return the epoch's order.

        Also save the sampler's state after the epoch. If the sampler has no length or is endless,
        draw only the first batches and save no state; the order then draws further batches when
        they are needed.
        """
        sampler, generator, indices = self._start_sampler(number)
        if _has_length(sampler):
            most = _most_batches(sampler)
            packed, digest = _pack_batches(itertools.islice(indices, most + 1))
            if len(packed) <= most:
                self._save_state_after(number, sampler, generator)
                return EpochOrder(packed, len(packed), digest)
        unsized = UnsizedBatches(lambda: self._start_sampler(number)[2])
        return EpochOrder(unsized, None, unsized.digest)

    def _skip_epoch(self, number: int) -> None:
        """Run the sampler through an epoch; save the state of sampler and generator after it.

        If the epoch does not end within `_most_batches` batches, the sampler may be endless. In
        this case, save no state; from then on, every epoch begins from the state that the loader
        was sent in.
        """
        sampler, generator, indices = self._start_sampler(number)
        for _ in itertools.islice(indices, _most_batches(sampler)):
            pass
        if next(indices, None) is not None:
            # The sampler may be endless: start each epoch from the same state.
            self._starts[1] = self._starts[0]
            return
        self._save_state_after(number, sampler, generator)

    def _save_state_after(self, number: int, sampler: Any, generator: Any) -> None:
        """Save the state that sampler and generator have after an epoch.

        The next epoch starts from this state. First call the sampler's `set_epoch(0)`, so that the
        number of the epoch does not count as a change of state. Do nothing if the state is the same
        before every epoch.
        """
        if not self._has_same_start_state():
            call_set_epoch(sampler, 0, "sampler")
            self._starts[number + 1] = dump_without_dataset((sampler, generator), self._dataset)

    def _start_sampler(self, number: int) -> tuple[Any, Any, Iterator[Any]]:
        """Seed all random generators, and start the sampler for an epoch.

        First unpickle the sampler with its state before this epoch, and call the sampler's
        `set_epoch`. Then draw the same random numbers as a local DataLoader: start the sampler,
        draw a base seed from the generator and, if the loader has workers, start the sampler again.
        Exception: with persistent workers, epochs after epoch 0 draw no base seed and start the
        sampler only once.

        Returns:
            The sampler, its generator, and the iterator over the epoch's batches.
        """
        start = self._starts[0] if self._has_same_start_state() else self._starts[number]
        sampler, generator = load_with_dataset(start, self._dataset)
        call_set_epoch(sampler, number, "sampler")
        seed_all(seed_of(self._seed, number))
        # Draw random numbers in the order of a local DataLoader: for the sampler's iterator, for
        # the base seed, for the indices. With workers, DataLoader makes the sampler's iterator
        # twice.
        # Persistent workers are started only once, in the first epoch.
        indices = iter(sampler)
        if not (self._persists and number):
            torch.empty((), dtype=torch.int64).random_(generator=generator)
            indices = iter(sampler) if self._workers else indices
        return sampler, generator, indices


def _has_length(sampler: Any) -> bool:
    try:
        len(sampler)
    except (TypeError, NotImplementedError):
        return False
    return True


def _most_batches(sampler: Any) -> int:
    """Return the number of batches in an epoch above which a sampler counts as endless."""
    if not _has_length(sampler):
        return _MOST_PASSED
    return max(_MOST_LENGTHS * len(sampler), _UNSIZED_STEP)


def call_set_epoch(value: object, epoch: int, inner: str) -> None:
    """Call `set_epoch` of a sampler or dataset, and of each object wrapped in it.

    Objects without `set_epoch` are skipped.

    Args:
        inner: Name of the attribute with the wrapped object, such as `dataset` of a Subset.
    """
    visited: list[object] = []
    while value is not None and all(value is not one for one in visited):
        visited.append(value)
        set_epoch = getattr(value, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        value = getattr(value, inner, None)


class UnsizedBatches:
    """Batches of a sampler that has no length or is endless.

    The sampler runs at most `_UNSIZED_STEP` batches beyond the last requested batch.

    Only the latest batches are kept. If an earlier batch is requested, the sampler starts again.
    Between two batches, other code may draw from the random generators that the sampler uses. So
    the state of the generators is restored whenever the sampler continues.

    Args:
        begin: Function that seeds all random generators, and returns the sampler's iterator.

    Attributes:
        digest: Hash of the indices of the first batches.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self._rest: Iterator[Any]
        self._random: Any
        self._raised: Exception | None
        self._restart()
        self._draw()
        self.digest = _pack_batches(self._recent)[1]

    def __getitem__(self, batch: int) -> Any:
        """Return the indices of a batch's samples.

        Run the sampler up to this batch if necessary. If the batch is no longer kept, the sampler
        starts again.

        Raises:
            IndexError: The sampler ended before this batch.
            Exception: The exception that the sampler raised at this batch.
        """
        if batch < self._drawn - len(self._recent):
            self._restart()
        while self._drawn <= batch and not self._has_ended:
            self._draw()
        if self._drawn > batch:
            return self._recent[batch - self._drawn]
        if self._raised is not None and batch == self._drawn:
            raise self._raised
        raise IndexError(batch)

    def _draw(self) -> None:
        """Draw up to `_UNSIZED_STEP` further batches from the sampler, and store their indices.

        Before drawing, restore the saved state of the random generators; afterwards, save the new
        state. If the sampler raises an exception, store the exception. `__getitem__` raises it
        later, when the missing batch is requested.
        """
        _set_random_state(self._random)
        try:
            for _ in range(_UNSIZED_STEP):
                self._recent.append(_copied(next(self._rest)))
                self._drawn += 1
        except StopIteration:
            self._has_ended = True
        except Exception as error:  # raised only when this batch is requested
            self._has_ended, self._raised = True, error
        self._random = _random_state()

    def _restart(self) -> None:
        self._recent, self._drawn = deque[Any](maxlen=_KEEP_UNSIZED), 0
        self._has_ended, self._raised = False, None
        self._rest, self._random = self._begin(), _random_state()


class PackedBatches:
    """Compact sequence of batches, each a list of indices (int or numpy's int64).

    Here, an index takes 8 bytes. In a list of lists, an index would take 36 bytes.
    """

    def __init__(self) -> None:
        self.flat, self.ends = array("q"), array("q", [0])
        self._kind: Any = int

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, batch: int) -> list[Any]:
        if not 0 <= batch < len(self):
            raise IndexError(batch)
        indices = self.flat[self.ends[batch] : self.ends[batch + 1]]
        return indices.tolist() if self._kind is int else [*map(self._kind, indices)]

    def append_if_exact(self, batch: Any) -> bool:
        """Append a batch if it can be stored exactly; return whether it was appended.

        A batch can be stored if it is a list, and if all its indices have the same type as the
        indices of earlier batches: either int or numpy's int64. An int that needs more than 64 bits
        cannot be stored.
        """
        if type(batch) is not list:
            return False
        kinds = set(map(type, batch))
        if not self.flat and _numpy and kinds == {_numpy.int64}:
            self._kind = _numpy.int64
        if not kinds <= {self._kind}:
            return False
        try:
            self.flat.extend(batch)
        except OverflowError:
            del self.flat[self.ends[-1] :]
            return False
        self.ends.append(len(self.flat))
        return True


def _pack_batches(drawn: Iterable[Any]) -> tuple[PackedBatches | list[Any], int]:
    """Pack the indices of all batches that a sampler draws.

    Returns:
        The batches, as `PackedBatches` if all of them can be stored exactly, else as a list; and a
        hash of all indices. The hash of a list is computed from its pickle or, if the list cannot
        be pickled, from its repr.
    """
    packed, others = PackedBatches(), list[Any]()
    for batch in drawn:
        if others or not packed.append_if_exact(batch):
            others.append(_copied(batch))
    if not others:
        return packed, _hash(packed.flat.tobytes() + packed.ends.tobytes())
    batches = [packed[at] for at in range(len(packed))] + others
    try:
        return batches, _hash(cloudpickle.dumps(batches, protocol=5))
    except Exception:  # an index may be unpicklable
        # The repr may differ between workers that have the same order. If so, the client requests
        # the batches' indices (ORDER) without need.
        return batches, _hash(repr(batches).encode())


def _copied(indices: Any) -> Any:
    """Copy `indices` if the sampler may change them afterwards; else return them as they are."""
    if isinstance(indices, torch.Tensor):
        return indices.clone()
    if type(indices) is list:
        return [_copied(index) for index in indices]
    is_array = _numpy and isinstance(indices, _numpy.ndarray)
    return copy.copy(indices) if is_array or type(indices) in (bytearray, dict, set) else indices


def _hash(data: bytes) -> int:
    """Return a 32-bit hash that is never 0, because 0 stands for "no hash"."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little") or 1


@dataclass(frozen=True)
class GeneratorStates:
    """Random generators of a loader, with the states in which each run starts them.

    Attributes:
        generators: The generators themselves.
        states: Pickle of the list of the generators, made when they had these states.
    """

    generators: tuple[Any, ...] = ()
    states: bytes = b""


def pickle_generators(value: object, dataset: object) -> GeneratorStates:
    """Return the random generators in `value`, but not those in `dataset`, in their current state.

    Raises:
        Exception: An object in `value` cannot be pickled.
    """
    pickler = _PicklerWithoutDataset(dataset)
    pickler.add(value)
    kinds = generator_types()
    found = [held for _, held in pickler.memo.copy().values() if isinstance(held, kinds)]
    together = PartsPickler()
    together.add(found)
    return GeneratorStates(tuple(found), together.pickled().data)


def dump_without_dataset(
    value: object, dataset: object, generators: GeneratorStates | None = None
) -> bytes:
    """Pickle `value`, with a placeholder for each of its references to `dataset`.

    Args:
        generators: Generators that the pickle contains with other states than their current ones.
    """
    pickler = _PicklerWithoutDataset(dataset, generators)
    pickler.add(value)
    return pickler.pickled().data


def load_with_dataset(data: bytes, dataset: object) -> Any:
    """Unpickle the result of `dump_without_dataset`; replace the placeholders by `dataset`."""
    return _UnpicklerWithDataset(data, dataset).load()


class PartsPickler(ValuePickler):
    """Pickler of a loader's parts for fetchers.

    Args:
        generators: Generators that the pickle contains with other states than their current ones.
    """

    def __init__(self, generators: GeneratorStates | None = None) -> None:
        super().__init__(to="fetchers")
        self._states = generators or GeneratorStates()
        self._numbers = {id(it): number for number, it in enumerate(self._states.generators)}

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a generator to its element in the pickled list, and other objects as usual.

        pickle reduces the list itself only once, so that generators keep the objects they share.
        """
        if obj is self._states:
            return pickle.loads, (obj.states,)
        number = self._numbers.get(id(obj))
        return (
            super().reducer_override(obj) if number is None else (getitem, (self._states, number))
        )


class _PicklerWithoutDataset(PartsPickler):
    def __init__(self, dataset: object, generators: GeneratorStates | None = None) -> None:
        super().__init__(generators)
        self._dataset = dataset

    def persistent_id(self, value: object) -> str | None:
        return "dataset" if value is self._dataset else None


class _UnpicklerWithDataset(pickle.Unpickler):
    def __init__(self, data: bytes, dataset: object) -> None:
        super().__init__(io.BytesIO(data))
        self._dataset = dataset

    def persistent_load(self, name: str) -> object:
        return self._dataset


def seed_all(seed: int) -> None:
    """Seed the random generators of torch (CPU), `random` and, if installed, numpy.

    The call takes a few microseconds.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if _numpy:
        _numpy.random.seed(seed & 0xFFFF_FFFF)


def _random_state() -> Any:
    numpy_state = _numpy.random.get_state() if _numpy else None
    return torch.default_generator.get_state(), random.getstate(), numpy_state


def _set_random_state(state: Any) -> None:
    torch_state, python_state, numpy_state = state
    torch.default_generator.set_state(torch_state)
    random.setstate(python_state)
    if _numpy:
        _numpy.random.set_state(numpy_state)
