"""Datasets that have their own random generators or count epochs themselves."""

# %%
import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Augment:
    def __init__(self):
        self.rng = np.random.default_rng(3)


class Noisy(Dataset):
    def __init__(self):
        self.transforms = [Augment()]

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index


class Counting(IterableDataset):
    def __init__(self):
        self.epoch, self.position = 0, 0

    def __iter__(self):
        self.position = 0
        for number in range(6):
            self.position += 1
            yield torch.tensor([number + 100 * self.epoch])
        self.epoch += 1


class Shuffled(IterableDataset):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        yield from torch.randperm(6, generator=self.generator)


class CountingInDict(IterableDataset):
    def __init__(self):
        self.state = {"epoch": 0}

    def __iter__(self):
        for number in range(6):
            yield torch.tensor([number + 100 * self.state["epoch"]])
        self.state["epoch"] += 1


class ShuffledByDict(IterableDataset):
    def __init__(self):
        self.held = {"r": random.Random(0)}

    def __iter__(self):
        yield from map(torch.tensor, self.held["r"].sample(range(6), 6))


class Told(Counting):
    def set_epoch(self, epoch):
        self.epoch = epoch


def make():
    return {
        "noisy": DataLoader(Noisy(), 2),
        "counting": DataLoader(Counting(), 1),
        "shuffled": DataLoader(Shuffled(), 1),
        "counting in a dict": DataLoader(CountingInDict(), 1),
        "shuffled by a dict": DataLoader(ShuffledByDict(), 1),
        "told": DataLoader(Told(), 1),
        "workers": DataLoader(Counting(), 1, num_workers=1),
    }
