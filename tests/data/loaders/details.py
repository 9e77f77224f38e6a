"""Cases of index types, of memory that a dataset reuses, of settings, and of resumed streams."""

import itertools

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)

SETTINGS = ((1, 0), (2, 1))


class Made(Dataset):
    def __init__(self, make, size):
        self.make, self.size = make, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.make(index)


class Echo(Dataset):
    """Dataset that returns the index and its type."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return type(index).__name__, index


class ToldWorker(Dataset):
    """Dataset whose samples contain what `get_worker_info()` returns."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        info = get_worker_info()
        return None if info is None else (info.num_workers, info.dataset is self)


class Marked(Dataset):
    """Dataset whose samples tell whether `worker_init_fn` was called in the worker."""

    mark = "none"

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.mark


def mark(worker_id):
    get_worker_info().dataset.mark = "marked"


class TwoArguments(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


class Raising(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise TwoArguments(5, "odd constructor")


class CountWithLength(IterableDataset):
    def __len__(self):
        return 10

    def __iter__(self):
        return iter(range(10))


class StatefulStream(IterableDataset):
    """Iterable dataset whose state is its position, as in torchdata's documentation."""

    def __init__(self, sizes):
        self.sizes, self.place, self.resumed = sizes, 0, None

    def __iter__(self):
        info = get_worker_info()
        worker = info.id if info else 0
        self.place, self.resumed = self.resumed or 0, None
        for number in range(self.place, self.sizes[worker]):
            self.place += 1
            yield worker * 1000 + number

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.resumed = state["place"]


class ByEpoch(Dataset):
    """Map-style dataset whose samples depend on the epoch set by `set_epoch`."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.epoch * 100 + index


class EpochBatches:
    """Batch sampler whose batches depend on the epoch set by `set_epoch`."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 3

    def __iter__(self):
        return iter([[self.epoch], [self.epoch + 1], [self.epoch + 2]])


def of(make, size=6, **options):
    return DataLoader(Made(make, size), **{"batch_size": 2, **options})


def single(make):
    return of(make, batch_size=None)


def listed(make):
    return of(make, collate_fn=list)


def numbers(size=11):
    return TensorDataset(torch.arange(size))


def shuffled(**options):
    return DataLoader(numbers(), batch_size=2, shuffle=True, **options)


def kinds(seen):
    return [type(event).__name__ for event in seen]


def at_the_first(loader):
    """Return the first batch, or the exception that it raises."""
    try:
        return next(iter(loader))
    except Exception as error:
        return error


def length(loader):
    """Iterate one epoch; return `len(loader)` before, the number of batches, and `len` after."""
    return len(loader), len(list(loader)), len(loader)


def one_array_filled_by_collate_fn():
    array = np.zeros((2, 3))

    def filled(samples):
        array[:] = sum(samples)
        return torch.from_numpy(array)

    def sums(loader):
        return [float(batch.sum()) for batch in loader]

    return of(lambda i: i, size=8, collate_fn=filled), sums


def one_buffer_filled_again():
    """Case in which the dataset fills the same tensor anew for each sample, and returns it.

    The sum of a batch shows which sample it has.
    """
    buffer = torch.zeros(3)

    def sums(loader):
        return [float(batch.sum()) for batch in loader]

    return of(lambda i: buffer.fill_(i), batch_size=None), sums


def one_large_buffer_filled_again():
    buffer = torch.zeros(70_000)

    def sums(loader):
        return [float(batch.max()) for batch in loader]

    return of(lambda i: buffer.fill_(i), batch_size=None), sums


def tensors_nested():
    return listed(lambda i: torch.nested.nested_tensor([torch.ones(i + 1), torch.zeros(2)]))


def of_tuples_single_samples():
    return DataLoader(Echo(), batch_size=None, sampler=[(0, 1), (1, 0), (2, 2)])


def of_tensors():
    return DataLoader(Echo(), batch_size=2, sampler=torch.tensor([2, 0, 1]), collate_fn=list)


def of_bools():
    return DataLoader(Echo(), batch_size=2, sampler=[True, False, True], collate_fn=list)


def of_numpy_ints():
    import numpy as np

    return DataLoader(Echo(), batch_size=2, sampler=np.array([2, 0, 1]), collate_fn=list)


def of_bytes():
    return DataLoader(Echo(), batch_size=None, sampler=[b"a", b"bc", b""])


def worker_info_without_workers():
    return DataLoader(ToldWorker(), batch_size=2, collate_fn=list)


def worker_init_fn_without_workers():
    return DataLoader(Marked(), batch_size=2, worker_init_fn=mark)


def attribute_timeout():
    def attributes(loader):
        names = ["batch_size", "drop_last", "num_workers", "timeout", "pin_memory"]
        return [getattr(loader, name) for name in names], len(loader.dataset)

    return DataLoader(numbers(), batch_size=3, drop_last=True, num_workers=2, timeout=5), attributes


def of_ints_beyond_64_bits():
    return DataLoader(Echo(), batch_size=2, sampler=[2**70, 1, 0], collate_fn=list)


def stateful_stream_after_150_batches():
    def late(loader):
        batches = iter(loader)
        taken = len(list(itertools.islice(batches, 75)))
        state = loader.state_dict()
        rest = list(itertools.islice(batches, 5))
        loader.load_state_dict(state)
        return taken, rest, list(itertools.islice(loader, 5))

    return DataLoader(StatefulStream([400]), batch_size=1), late


def length_of_a_stream_with_length():
    return DataLoader(CountWithLength(), batch_size=3), length


def length_of_a_stream_with_length_drop_last():
    return DataLoader(CountWithLength(), batch_size=3, drop_last=True), length


def stateful_stream_resumed_twice():
    def resumed(loader):
        batches = iter(loader)
        taken = len(list(itertools.islice(batches, 70)))
        loader.load_state_dict(loader.state_dict())
        second = list(itertools.islice(loader, 5))
        loader.load_state_dict(loader.state_dict())
        return taken, second, list(itertools.islice(loader, 5))

    return DataLoader(StatefulStream([400]), batch_size=1), resumed


def stateful_stream_resumed_in_workers():
    def resumed(loader):
        batches = iter(loader)
        taken = len(list(itertools.islice(batches, 70)))
        loader.load_state_dict(loader.state_dict())
        second = list(itertools.islice(loader, 5))
        loader.load_state_dict(loader.state_dict())
        return taken, second, list(itertools.islice(loader, 5))

    return DataLoader(StatefulStream([400, 400]), batch_size=1, num_workers=2), resumed


def attributes_of_workers():
    def attributes(loader):
        return loader.timeout, loader.prefetch_factor, loader.persistent_workers, loader.in_order

    loader = DataLoader(
        numbers(),
        batch_size=2,
        num_workers=1,
        timeout=5,
        prefetch_factor=7,
        persistent_workers=True,
        in_order=False,
    )
    return loader, attributes


def attribute_pin_memory():
    return DataLoader(numbers(), pin_memory=True), lambda loader: loader.pin_memory


def attribute_batch_sampler():
    def attributes(loader):
        sampler = loader.batch_sampler
        return sampler.batch_size, sampler.drop_last, len(sampler.sampler)

    sampler = BatchSampler(SequentialSampler(range(10)), 3, True)
    return DataLoader(numbers(10), batch_sampler=sampler), attributes


def set_epoch_of_a_batch_sampler():
    def told(loader):
        loader.batch_sampler.set_epoch(5)
        return list(loader)

    return DataLoader(numbers(), batch_sampler=EpochBatches()), told


def set_epoch_of_the_dataset():
    def told(loader):
        loader.dataset.set_epoch(3)
        return list(loader)

    return DataLoader(ByEpoch(), batch_size=2), told


def exception_group():
    def raise_group(index):
        raise ExceptionGroup(  # noqa: F821
            "two at once", [ValueError("one"), KeyError("two")]
        )

    return of(raise_group), lambda loader: kinds([at_the_first(loader)])


def assignment_to_the_dataset():
    """Case in which a cell assigns to an attribute of the dataset.

    The assignment must have an effect on the samples, or raise an AttributeError.
    """

    def assigned(loader):
        try:
            loader.dataset.mark = "assigned"
        except AttributeError:
            return "refused or done"
        done = all(mark == "assigned" for batch in loader for mark in batch)
        return "refused or done" if done else "neither"

    return DataLoader(Marked(), batch_size=2), assigned
