"""Registered loaders of many kinds, and a function that returns their attributes and batches."""

# %%
import functools  # noqa: F401
import os  # noqa: F401
import random

import torch
from torch.utils.data import (
    BatchSampler,  # noqa: F401
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    get_worker_info,  # noqa: F401
)

import taas


class Numbers(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


# %%
class Bunches(Sampler):
    def __init__(self, size):
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.size - self.epoch

    def __iter__(self):
        return iter([[n, self.epoch] for n in range(len(self))])


class Unsized(Sampler):
    def __iter__(self):
        return iter([3, 1, 2])


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield int(torch.randint(8, ()))


class Sized(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(range(self.size))


def added(batch):
    return torch.tensor([sum(batch)])


def hello(worker):
    random.seed(worker)


def length(loader):
    try:
        return len(loader)
    except TypeError:
        return None


def about(loader):
    names = (
        *("batch_size", "drop_last", "num_workers", "pin_memory", "timeout", "in_order"),
        *("prefetch_factor", "persistent_workers"),
    )
    shown = {name: getattr(loader, name) for name in names}
    for name in ("collate_fn", "worker_init_fn"):
        shown[name] = getattr(getattr(loader, name), "__name__", None)
    generator, context = loader.generator, loader.multiprocessing_context
    shown["generator"] = None if generator is None else generator.initial_seed()
    shown["context"] = None if context is None else context.get_start_method()
    shown["lengths"] = [length(loader), length(loader.dataset)]
    if not isinstance(loader.dataset, IterableDataset):
        samplers = (loader.sampler, loader.batch_sampler)
        shown["lengths"] += [one if one is None else length(one) for one in samplers]
    return shown


def made():
    return [
        DataLoader(Numbers(3), 4, drop_last=True),
        DataLoader(Numbers(9), 2, shuffle=True, generator=torch.Generator().manual_seed(9)),
        DataLoader(
            Numbers(9),
            2,
            collate_fn=added,
            worker_init_fn=hello,
            num_workers=1,
            timeout=50,
            prefetch_factor=3,
            persistent_workers=True,
            multiprocessing_context="fork",
        ),
        DataLoader(Numbers(9), batch_size=None),
        DataLoader(Numbers(9), batch_sampler=Bunches(5)),
        DataLoader(Numbers(9), 2, sampler=Unsized()),
        DataLoader(Numbers(9), 2, sampler=Endless()),
        DataLoader(Sized(9), 2),
        DataLoader(Sized(9), 2, drop_last=True),
        DataLoader(Sized(9), batch_size=None),
    ]


loaders = [taas.register(loader, seed=5) for loader in made()]


def looked_at(loaders):
    shown = [about(loader) for loader in loaders]
    batches = [
        [torch.as_tensor(one).tolist() for one in loader] for loader in loaders[:6] + loaders[7:]
    ]
    bunches = loaders[4]
    bunches.batch_sampler.set_epoch(3)
    epochs = [length(bunches), [one.tolist() for one in bunches], bunches.batch_sampler.size]
    return shown, batches, epochs
