"""Datasets with a state, and a cell that reads a part of them and saves the loaders' states."""

import taas
from tests.cells.shown_batches import show

loaders, counts = {}, {}
again, cpus = 0, 0

# %%
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Generated(IterableDataset):
    """A generator that uses a loaded state when it begins, as in torchdata's examples."""

    def __init__(self, size):
        self.size, self.i, self.resume = size, 0, None

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        self.i = first
        if self.resume is not None:
            self.i, self.resume = self.resume, None
        while self.i < self.size:
            self.i += step
            yield torch.tensor([self.i - step])

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.resume = state["i"]


class Large(Generated):
    def state_dict(self):
        return {"i": self.i, "buffer": torch.full((6 << 20,), float(self.i))}

    def load_state_dict(self, state):
        assert (state["buffer"] == state["i"]).all()
        super().load_state_dict(state)


def make():
    return {
        "one": DataLoader(Generated(400), 1),
        "two": DataLoader(Generated(401), 1, num_workers=2),
        "large": DataLoader(Large(200), 1),
    }


# %%
import itertools
import json
import os

for name, count in counts.items():
    path = f"{name}-{cpus}-{os.environ['RANK']}.pt"
    loader = loaders[name]
    if os.path.exists(path):
        loader.load_state_dict(torch.load(path, weights_only=False))
    batches = iter(loader)
    for batch in itertools.islice(batches, count):
        print(json.dumps([name, 0, show(batch)]))
    if again:
        loader.load_state_dict(loader.state_dict())
        for batch in itertools.islice(iter(loader), again):
            print(json.dumps([name, 0, show(batch)]))
    taas.save(loader.state_dict(), path)
