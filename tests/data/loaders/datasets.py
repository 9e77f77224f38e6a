"""Cases of datasets, one kind per loader."""

import torch
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
    random_split,
)

SETTINGS = ((1, 0), (2, 1))


class Squares(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index, index * index


class InBulk(Squares):
    def __getitems__(self, indices):
        return [("bulk", index) for index in indices]


class WithoutLength(Dataset):
    def __getitem__(self, index):
        return index + 100


class Keyed(Dataset):
    def __init__(self):
        self.rows = {"red": 1, "green": 2, "blue": 3}

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, key):
        return key, self.rows[key]


class Count(IterableDataset):
    def __init__(self, stop, start=0):
        self.start, self.stop = start, stop

    def __iter__(self):
        return iter(range(self.start, self.stop))


class CountWithLength(Count):
    def __len__(self):
        return self.stop - self.start


class Generated(Count):
    def __iter__(self):
        for number in range(self.stop):
            yield {"number": number, "half": number / 2}


class ByWorker(IterableDataset):
    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        info = get_worker_info()
        size = self.sizes[info.id] if info else sum(self.sizes)
        worker = info.id if info else -1
        return iter([(worker, number) for number in range(size)])


class EveryNth(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id, 23, info.num_workers))


class Countdown(IterableDataset):
    """Iterable dataset that is its own iterator."""

    def __init__(self, start):
        self.start = start

    def __iter__(self):
        self.left = self.start
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


def numbers(size, first=0):
    return TensorDataset(torch.arange(first, first + size))


def map_style():
    return DataLoader(Squares(11), batch_size=3)


def map_style_single_samples():
    return DataLoader(Squares(5), batch_size=None)


def map_style_in_bulk():
    return DataLoader(InBulk(7), batch_size=2)


def map_style_in_bulk_in_workers():
    return DataLoader(InBulk(7), batch_size=2, num_workers=2)


def map_style_without_length():
    return DataLoader(WithoutLength(), batch_size=2, sampler=[4, 1, 3])


def map_style_by_keys():
    return DataLoader(Keyed(), batch_size=2, sampler=["blue", "red", "green"])


def map_style_with_transform():
    class Halved(Squares):
        def __getitem__(self, index):
            return torch.tensor(float(index)) / 2

    return DataLoader(Halved(6), batch_size=4)


def map_style_empty():
    return DataLoader(Squares(0), batch_size=3)


def map_style_of_one():
    return DataLoader(Squares(1), batch_size=3)


def tensor_dataset():
    return DataLoader(TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6)), batch_size=4)


def tensor_dataset_of_one_tensor():
    return DataLoader(numbers(7), batch_size=2)


def tensor_dataset_single_samples():
    return DataLoader(numbers(4), batch_size=None)


def subset():
    return DataLoader(Subset(Squares(20), [3, 17, 5, 5, 0]), batch_size=2)


def subset_of_subset():
    inner = Subset(Squares(20), range(10, 20))
    return DataLoader(Subset(inner, [9, 0, 4]), batch_size=2)


def subset_in_bulk():
    return DataLoader(Subset(InBulk(20), [3, 17, 5]), batch_size=2)


def concat():
    return DataLoader(ConcatDataset([numbers(3), numbers(4, 100)]), batch_size=2)


def concat_by_plus():
    return DataLoader(Squares(3) + Squares(2), batch_size=4)


def concat_negative_indices():
    return DataLoader(ConcatDataset([numbers(3), numbers(4, 100)]), sampler=[-1, -7, 2])


def stack_of_tuples():
    return DataLoader(StackDataset(numbers(5), Squares(5)), batch_size=2)


def stack_of_dicts():
    return DataLoader(StackDataset(left=numbers(5), right=Squares(5)), batch_size=2)


def stack_in_bulk():
    return DataLoader(StackDataset(InBulk(5), Squares(5)), batch_size=2)


def split_with_generator():
    generator = torch.Generator().manual_seed(3)
    return DataLoader(random_split(Squares(20), [13, 7], generator)[1], batch_size=3)


def split_by_fractions():
    generator = torch.Generator().manual_seed(3)
    return DataLoader(random_split(Squares(20), [0.25, 0.75], generator)[0], batch_size=3)


def iterable():
    return DataLoader(Count(10), batch_size=4)


def iterable_single_samples():
    return DataLoader(Count(5), batch_size=None)


def iterable_drop_last():
    return DataLoader(Count(10), batch_size=4, drop_last=True)


def iterable_with_length():
    def each_length(loader):
        return len(loader.dataset), list(loader)

    return DataLoader(CountWithLength(10), batch_size=3), each_length


def iterable_of_generated_dicts():
    return DataLoader(Generated(7), batch_size=3)


def iterable_that_is_its_iterator():
    return DataLoader(Countdown(7), batch_size=2)


def iterable_empty():
    return DataLoader(Count(0), batch_size=2)


def iterable_in_one_worker():
    return DataLoader(Count(10), batch_size=4, num_workers=1)


def iterable_repeated_by_workers():
    return DataLoader(Count(5), batch_size=2, num_workers=2)


def iterable_shared_among_workers():
    return DataLoader(EveryNth(), batch_size=3, num_workers=2)


def iterable_uneven_workers():
    return DataLoader(ByWorker([0, 4, 20]), batch_size=7, num_workers=3)


def iterable_uneven_workers_drop_last():
    return DataLoader(ByWorker([0, 4, 20]), batch_size=7, num_workers=3, drop_last=True)


def iterable_uneven_workers_single_samples():
    return DataLoader(ByWorker([1, 0, 3]), batch_size=None, num_workers=3)


def chain():
    return DataLoader(ChainDataset([Count(5), Count(103, 100)]), batch_size=3)


def chain_by_plus():
    return DataLoader(Count(5) + Count(103, 100), batch_size=3)


def chain_in_workers():
    return DataLoader(ChainDataset([Count(5), Count(103, 100)]), batch_size=3, num_workers=2)
