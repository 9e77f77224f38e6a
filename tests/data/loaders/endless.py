"""Cases of samplers that never end, or that have no `len`."""

import itertools

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset

SETTINGS = ((1, 0), (2, 0), (2, 1), (2, 3))


class Endless(Sampler):
    def __iter__(self):
        return itertools.cycle(range(10))


class EndlessWithLength(Endless):
    def __len__(self):
        return 10


class WithoutLength(Sampler):
    def __iter__(self):
        return iter(range(6))


def numbers(size=10):
    return TensorDataset(torch.arange(size))


def first_ones(loader):
    return list(itertools.islice(loader, 6)), list(itertools.islice(loader, 2))


def endless():
    return DataLoader(numbers(), batch_size=4, sampler=Endless()), first_ones


def endless_with_a_length():
    return DataLoader(numbers(), batch_size=4, sampler=EndlessWithLength()), first_ones


def endless_single_samples():
    return DataLoader(numbers(), batch_size=None, sampler=Endless()), first_ones


def endless_batch_sampler():
    sampler = BatchSampler(Endless(), batch_size=3, drop_last=False)
    return DataLoader(numbers(), batch_sampler=sampler), first_ones


def without_length():
    return DataLoader(numbers(), batch_size=4, sampler=WithoutLength())
