"""A loader whose second batch never arrives, and a cell that a signal interrupts as it waits."""

values, number = 1, 14

# %%
import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import taas


class Stuck(Dataset):
    """A dataset that never returns its second sample, but sends a signal to the rank."""

    def __init__(self, values, signal):
        self.values, self.signal = values, signal

    def __len__(self):
        return 8

    def __getitem__(self, index):
        while index and not Path("rank").exists():
            time.sleep(0.01)
        if index == 1:
            os.kill(int(Path("rank").read_text()), self.signal)
        while index:
            time.sleep(1)
        return torch.zeros(self.values)


Path("rank").unlink(missing_ok=True)
loader = taas.register(DataLoader(Stuck(values, number), batch_size=1))

# %%
import os
import signal
from pathlib import Path


def ring(*_):
    raise TimeoutError("took too long")


signal.signal(signal.SIGALRM, ring)
batches = iter(loader)
next(batches)
Path("draft").write_text(str(os.getpid()))
try:
    os.rename("draft", "rank")  # the signal comes only after this
    next(batches)
except (KeyboardInterrupt, TimeoutError) as error:
    print(type(error).__name__)
