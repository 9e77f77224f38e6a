"""Cases of loader states that one run saves and another run, with another `--cpus`, loads."""

import itertools

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

SETTINGS = ((1, 0, 1), (2, 3, 0))


class Stream(IterableDataset):
    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        info = get_worker_info()
        worker = info.id if info else 0
        return iter([worker * 100 + number for number in range(self.sizes[worker])])


class StatefulIterator:
    """Iterator with `state_dict` and `load_state_dict`, for a dataset that has neither."""

    def __init__(self, samples):
        self.samples, self.place = samples, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place >= len(self.samples):
            raise StopIteration
        self.place += 1
        return self.samples[self.place - 1]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class OfStatefulIterators(Stream):
    def __iter__(self):
        return StatefulIterator(list(super().__iter__()))


class Rotated(Sampler):
    def __init__(self, size):
        self.size, self.turns = size, 0

    def __iter__(self):
        first, self.turns = self.turns, self.turns + 1
        return iter([(first + index) % self.size for index in range(self.size)])

    def __len__(self):
        return self.size


def nothing(loader):
    return None


def begun(loader):
    iter(loader)


def taken(loader):
    return list(itertools.islice(loader, 2))


def whole(loader):
    return list(loader)


def all_taken(loader):
    """Return all batches; stop after the last one without a further call of `next`."""
    return list(itertools.islice(loader, len(loader)))


def later(loader):
    return list(loader), list(loader), next(iter(loader))


def jumped(loader):
    loader.set_epoch(6)
    return next(iter(loader))


def broken_twice(loader):
    return next(iter(loader)), next(iter(loader))


def numbers(size=12):
    return TensorDataset(torch.arange(size))


def generator(seed=13):
    return torch.Generator().manual_seed(seed)


def shuffled(**options):
    return DataLoader(numbers(), batch_size=2, shuffle=True, **options)


def sequential_at_the_start():
    return DataLoader(numbers(), batch_size=2), nothing


def sequential_in_the_middle():
    return DataLoader(numbers(), batch_size=2), taken


def shuffle_at_the_start():
    return shuffled(), nothing


def shuffle_begun():
    return shuffled(), begun


def shuffle_in_the_middle():
    return shuffled(), taken


def shuffle_after_the_last_batch():
    return shuffled(), all_taken


def shuffle_at_the_end():
    return shuffled(), whole


def shuffle_in_a_later_epoch():
    return shuffled(), later


def shuffle_after_set_epoch():
    return shuffled(), jumped


def shuffle_after_breaks():
    return shuffled(), broken_twice


def shuffle_in_workers():
    return shuffled(num_workers=2), taken


def shuffle_single_samples():
    return DataLoader(numbers(), batch_size=None, shuffle=True), taken


def generator_in_the_middle():
    return shuffled(generator=generator()), taken


def generator_at_the_end():
    return shuffled(generator=generator()), whole


def generator_in_a_later_epoch():
    return shuffled(generator=generator()), later


def random_sampler_with_generator():
    sampler = RandomSampler(numbers(), generator=generator())
    return DataLoader(numbers(), batch_size=2, sampler=sampler), later


def batch_sampler():
    sampler = BatchSampler(RandomSampler(numbers()), batch_size=2, drop_last=True)
    return DataLoader(numbers(), batch_sampler=sampler), taken


def weighted():
    sampler = WeightedRandomSampler([1.0, 2.0, 3.0], 16)
    return DataLoader(numbers(), batch_size=2, sampler=sampler), taken


def sampler_that_remembers():
    return DataLoader(numbers(), batch_size=2, sampler=Rotated(12)), later


def stream_in_the_middle():
    return DataLoader(Stream([13]), batch_size=2), taken


def stream_at_the_end():
    return DataLoader(Stream([13]), batch_size=2), whole


def stream_in_workers():
    return DataLoader(Stream([9, 7]), batch_size=2, num_workers=2), taken


def stream_in_uneven_workers():
    return DataLoader(Stream([2, 17]), batch_size=2, num_workers=2), taken


def stateful_iterator():
    return DataLoader(OfStatefulIterators([13]), batch_size=2), taken


def stateful_iterators_in_workers():
    return DataLoader(OfStatefulIterators([9, 7]), batch_size=2, num_workers=2), taken
