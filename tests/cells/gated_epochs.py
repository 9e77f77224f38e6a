"""A loader whose epochs wait for a file, and a cell that forks in the middle of an epoch."""

# %%
import os
import time

import torch
from torch.utils.data import DataLoader, Dataset

import taas


class Gated(Dataset):
    """A dataset whose third sample waits until a file with the number of the epoch exists."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 20

    def __getitem__(self, index):
        time.sleep(0.001)  # a worker holds back the reply of a faster batch
        while index > 1 and not os.path.exists(str(self.epoch)):
            time.sleep(0.01)
        return torch.tensor(index)


loader = taas.register(DataLoader(Gated(), batch_size=1))

# %%
import multiprocessing
from pathlib import Path

next(iter(loader))
context = multiprocessing.get_context("fork")
go, goes = context.Pipe()


def child():
    goes.recv()
    iter(loader)  # in the child, this ends the iteration that the parent began


process = context.Process(target=child)
process.start()
Path("0").touch()
batches = iter(loader)
seen = [int(next(batches))]
go.send("go")
process.join()
Path("1").touch()
print(seen + [int(batch) for batch in batches] == list(range(20)), process.exitcode)
print("retried", loader.counts.retried)  # type: ignore[attr-defined]
