"""Samplers whose indices have many types, and a dataset that describes its indices."""

# %%
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Echo(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return [type(index).__name__, str(index), repr(getattr(index, "dtype", ""))]


class Together(Echo):
    def __getitems__(self, indices):
        return [[type(indices).__name__, str(indices)], *map(self.__getitem__, indices)]


class Given:
    def __init__(self, *given):
        self.given = given

    def __iter__(self):
        return iter(self.given)

    def __len__(self):
        return len(self.given)


class Drawn:
    def __iter__(self):
        return iter(np.random.default_rng(3).permutation(8))

    def __len__(self):
        return 8


def plain(items):
    return items


def batches(*given):
    return DataLoader(Echo(), batch_sampler=Given(*given), collate_fn=plain)


def make():
    mask = np.array([True, False, True])
    return {
        "tuples": batches((0, 1), (2, 3)),
        "tuples_within": batches([(0, 1), (2, 3)], [(4, 5)]),
        "bools": batches([True, False], [False]),
        "mixed": batches([1, 2], [True], [3, "x"], [np.int64(4), 5]),
        "keys": batches(b"ab", b"cd"),
        "texts": batches(["a", "b"], ["c"]),
        "tensors": batches(torch.tensor([3, 4]), torch.tensor([5, 6])),
        "numpy": batches([np.int64(1), np.int64(2)], [np.int32(3)]),
        "all_numpy": batches([np.int64(1), np.int64(2)], [], [np.int64(3)]),
        "large": batches([1 << 70, 2], [3]),
        "drawn": DataLoader(Echo(), 3, sampler=Drawn(), collate_fn=plain),
        "together": DataLoader(Together(), batch_sampler=Given((0, 1), [2]), collate_fn=plain),
        "masks": DataLoader(Echo(), sampler=Given(mask, ~mask), batch_size=None),
        "slices": DataLoader(Echo(), sampler=Given(slice(0, 2), ...), batch_size=None),
    }
