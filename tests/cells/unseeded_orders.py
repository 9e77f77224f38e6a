"""Samplers and datasets whose order is random in each process, and a cell for two ranks."""

loaders = {}

# %%
import os
import random

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler


class Numbers(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index


class Unseeded(Sampler):
    def __iter__(self):
        order = list(range(40))
        random.Random(os.urandom(8)).shuffle(order)
        return iter(order)

    def __len__(self):
        return 40


class Endless(Unseeded):
    __len__ = None  # type: ignore[assignment]


class Bunches(Sampler):
    def __iter__(self):
        order, rng = list(Unseeded()), random.Random(os.urandom(8))
        while order:
            yield [order.pop() for _ in range(min(len(order), rng.randint(1, 5)))]

    def __len__(self):
        return sum(1 for _ in self)


class Large(Unseeded):
    """Sampler whose order of an epoch has 9.6 MB."""

    def __iter__(self):
        return ([number] * 30_000 for number in super().__iter__())


def first(samples):
    return torch.tensor(samples[:1])


class Stream(IterableDataset):
    def __init__(self, is_seeded):
        self.is_seeded = is_seeded

    def __iter__(self):
        rng = np.random.default_rng(3 if self.is_seeded else None)
        yield from rng.permutation(40).tolist()


def set_generator(worker):
    torch.utils.data.get_worker_info().dataset.rng = np.random.default_rng(worker)


def make():
    return {
        "bunches": DataLoader(Numbers(), batch_sampler=Bunches()),
        "endless": DataLoader(Numbers(), 4, sampler=Endless()),
        "large": DataLoader(Numbers(), batch_sampler=Large(), collate_fn=first),
        "sampler": DataLoader(Numbers(), batch_sampler=BatchSampler(Unseeded(), 4, False)),
        "seeded": DataLoader(Stream(True), 4),
        "stream": DataLoader(Stream(False), 4),
        "worker": DataLoader(Numbers(), 4, num_workers=1, worker_init_fn=set_generator),
    }


# %%
import torch.distributed as dist

dist.init_process_group("gloo")
seen = {}
for name, loader in loaders.items():
    for _epoch in range(2):
        try:
            mine = [n for batch in loader for n in batch.tolist()]
        except Exception as error:
            mine = f"{type(error).__name__}: {error}"  # type: ignore[assignment]
        both = [None, None]
        dist.all_gather_object(both, mine)
        seen.setdefault(name, []).append(both)
seen
