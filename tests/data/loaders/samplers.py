"""Cases of samplers and batch samplers, and of the indices that they pass to the dataset."""

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

SETTINGS = ((2, 0), (2, 1))


class Echo(Dataset):
    """Dataset that returns the index and its type."""

    def __init__(self, size=10):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return type(index).__name__, index


class EveryOther(Sampler):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(0, self.size, 2))

    def __len__(self):
        return (self.size + 1) // 2


class Reshuffled(Sampler):
    """Sampler that draws from torch's global random generator during iteration."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        for _ in range(self.size):
            yield int(torch.randint(self.size, ()))

    def __len__(self):
        return self.size


class Rotated(Sampler):
    """Sampler whose order depends on how often it was iterated."""

    def __init__(self, size):
        self.size, self.turns = size, 0

    def __iter__(self):
        first, self.turns = self.turns, self.turns + 1
        return iter([(first + index) % self.size for index in range(self.size)])

    def __len__(self):
        return self.size


class ByEpoch(Sampler):
    """Sampler whose order depends on the epoch set by `set_epoch`."""

    def __init__(self, size):
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(self.size, generator=generator).tolist())

    def __len__(self):
        return self.size


class Growing:
    """Batch sampler with batches of 1, 2, 3 and 0 samples. It is not a torch `BatchSampler`."""

    def __iter__(self):
        return iter([[0], [1, 2], [3, 4, 5], []])

    def __len__(self):
        return 4


def numbers(size=10):
    return TensorDataset(torch.arange(size))


def generator(seed=3):
    return torch.Generator().manual_seed(seed)


def seeded(loader):
    """Return the batches of three epochs."""
    return [list(loader) for _ in range(3)]


def sequential():
    return DataLoader(numbers(), batch_size=3, sampler=SequentialSampler(numbers()))


def a_list():
    return DataLoader(numbers(), batch_size=2, sampler=[9, 0, 9, 4, 1])


def a_range():
    return DataLoader(numbers(), batch_size=4, sampler=range(9, -1, -1))


def a_tensor_of_indices():
    return DataLoader(numbers(), batch_size=2, sampler=torch.tensor([3, 1, 2]).tolist())


def empty_list():
    return DataLoader(numbers(), batch_size=2, sampler=[])


def shuffle():
    return DataLoader(numbers(), shuffle=True), seeded


def shuffle_in_batches():
    return DataLoader(numbers(), batch_size=3, shuffle=True), seeded


def shuffle_drop_last():
    return DataLoader(numbers(), batch_size=3, shuffle=True, drop_last=True), seeded


def shuffle_single_samples():
    return DataLoader(numbers(), batch_size=None, shuffle=True), seeded


def shuffle_in_workers():
    return DataLoader(numbers(), batch_size=3, shuffle=True, num_workers=2), seeded


def shuffle_with_generator():
    return DataLoader(numbers(), batch_size=3, shuffle=True, generator=generator()), seeded


def shuffle_with_generator_in_workers():
    loader = DataLoader(numbers(), 3, shuffle=True, generator=generator(), num_workers=2)
    return loader, seeded


def random():
    return DataLoader(numbers(), batch_size=3, sampler=RandomSampler(numbers())), seeded


def random_with_generator():
    sampler = RandomSampler(numbers(), generator=generator())
    return DataLoader(numbers(), batch_size=3, sampler=sampler), seeded


def random_with_replacement():
    sampler = RandomSampler(numbers(), replacement=True)
    return DataLoader(numbers(), batch_size=3, sampler=sampler), seeded


def random_with_replacement_and_more_samples():
    sampler = RandomSampler(numbers(), replacement=True, num_samples=41)
    return DataLoader(numbers(), batch_size=8, sampler=sampler)


def random_with_replacement_and_generator():
    sampler = RandomSampler(numbers(), True, 12, generator=generator())
    return DataLoader(numbers(), batch_size=5, sampler=sampler), seeded


def random_fewer_samples():
    return DataLoader(numbers(), batch_size=2, sampler=RandomSampler(numbers(), num_samples=5))


def random_more_samples():
    return DataLoader(numbers(), batch_size=6, sampler=RandomSampler(numbers(), num_samples=25))


def random_of_one_generator_with_the_loader():
    both = generator()
    sampler = RandomSampler(numbers(), generator=both)
    return DataLoader(numbers(), batch_size=3, sampler=sampler, generator=both), seeded


def subset_random():
    return DataLoader(numbers(), batch_size=2, sampler=SubsetRandomSampler([8, 1, 5, 3])), seeded


def subset_random_with_generator():
    sampler = SubsetRandomSampler([8, 1, 5, 3], generator=generator())
    return DataLoader(numbers(), batch_size=2, sampler=sampler), seeded


def subset_random_gives_ints():
    return DataLoader(Echo(), batch_size=2, sampler=SubsetRandomSampler([8, 1, 5]))


def weighted():
    weights = [0.1, 0.4, 0.0, 2.0, 0.5]
    return DataLoader(numbers(), batch_size=4, sampler=WeightedRandomSampler(weights, 20))


def weighted_without_replacement():
    sampler = WeightedRandomSampler([1.0, 2.0, 3.0, 4.0], 4, replacement=False)
    return DataLoader(numbers(), batch_size=3, sampler=sampler), seeded


def weighted_with_generator():
    sampler = WeightedRandomSampler([1.0, 2.0, 3.0], 9, generator=generator())
    return DataLoader(numbers(), batch_size=4, sampler=sampler), seeded


def batch_sampler():
    sampler = BatchSampler(SequentialSampler(numbers()), batch_size=4, drop_last=False)
    return DataLoader(numbers(), batch_sampler=sampler)


def batch_sampler_drop_last():
    sampler = BatchSampler(RandomSampler(numbers()), batch_size=4, drop_last=True)
    return DataLoader(numbers(), batch_sampler=sampler), seeded


def batch_sampler_of_lists():
    return DataLoader(Echo(), batch_sampler=[[0, 1], [5], [2, 3, 4]])


def batch_sampler_of_tuples():
    return DataLoader(Echo(), batch_sampler=[(0, 1), (5,)])


def batch_sampler_of_the_users_own():
    return DataLoader(Echo(), batch_sampler=Growing(), collate_fn=list)


def batch_sampler_as_sampler():
    """Case of bulk loading as in torch's documentation: the sampler yields lists of indices."""
    sampler = BatchSampler(SequentialSampler(range(7)), batch_size=3, drop_last=False)
    return DataLoader(torch.arange(7) * 2, sampler=sampler, batch_size=None)


def batch_sampler_over_custom():
    sampler = BatchSampler(EveryOther(10), batch_size=2, drop_last=False)
    return DataLoader(Echo(), batch_sampler=sampler)


def custom():
    return DataLoader(Echo(), batch_size=2, sampler=EveryOther(10))


def custom_that_draws():
    return DataLoader(numbers(), batch_size=3, sampler=Reshuffled(10)), seeded


def custom_that_remembers():
    return DataLoader(numbers(), batch_size=3, sampler=Rotated(10)), seeded


def custom_with_set_epoch():
    return DataLoader(numbers(), batch_size=3, sampler=ByEpoch(10)), seeded


def told_the_epoch():
    def told(loader):
        loader.sampler.set_epoch(3)
        first = list(loader)
        loader.sampler.set_epoch(1)
        return first, list(loader), list(loader)

    return DataLoader(numbers(), batch_size=3, sampler=ByEpoch(10)), told


def of_strings():
    return DataLoader(Echo(), batch_size=2, sampler=["a", "bc", "déf"])


def of_bytes_single():
    return DataLoader(Echo(), batch_size=None, sampler=["a", "b"])


def of_none():
    return DataLoader(Echo(), batch_size=2, sampler=[None, None, None], collate_fn=list)


def of_floats():
    return DataLoader(Echo(), batch_size=2, sampler=[0.5, 1.5, -2.0])


def of_negative_ints():
    return DataLoader(Echo(), batch_size=2, sampler=[-1, -2, -3])


def of_large_ints():
    return DataLoader(Echo(), batch_size=2, sampler=[2**62, -(2**62), 0])


def of_mixed_types():
    return DataLoader(Echo(), batch_size=2, sampler=[1, "two", 3.0, None], collate_fn=list)


def of_slices():
    return DataLoader(torch.arange(10), batch_size=None, sampler=[slice(0, 3), slice(3, 10)])


def of_dicts():
    return DataLoader(Echo(), batch_size=None, sampler=[{"row": 1}, {"row": 2}])


def of_nested_tuples_single_samples():
    return DataLoader(Echo(), batch_size=None, sampler=[((1, 2), "x"), ((3, 4), "y")])


def of_tuples():
    return DataLoader(Echo(), batch_size=2, sampler=[(0, 1), (1, 0), (2, 2)], collate_fn=list)
