"""Datasets that send functions of the notebook to a process pool."""

# %%
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from torch.utils.data import DataLoader, Dataset, IterableDataset

import taas

OFFSET = 100


@dataclass
class Task:
    number: int


def work(task):
    return task.number + OFFSET


def pool():
    return ProcessPoolExecutor(1, multiprocessing.get_context("fork"))


class Items(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        with pool() as executor:
            return executor.submit(work, Task(index)).result()


class Stream(IterableDataset):
    def __iter__(self):
        with pool() as executor:
            yield from executor.map(work, [Task(number) for number in range(2)])


items = taas.register(DataLoader(Items(), batch_size=None))
stream = taas.register(DataLoader(Stream(), batch_size=None))

# %%
for _epoch in range(2):
    print(list(items), list(stream))
