"""DataLoaders in each rank, whose workers start by fork, spawn or forkserver.

By fork, workers are used with and without `persistent_workers`. Spawn and forkserver are slow,
because their workers import torch. So spawn is used only with `persistent_workers`, and forkserver
only without it.
"""

# %%
import os

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

SCALE = 10


class Windows(Dataset):
    def __init__(self, series, width):
        self.series, self.width = series, width

    def __len__(self):
        return len(self.series) - self.width

    def __getitem__(self, index):
        return SCALE * self.series[index : index + self.width], get_worker_info().id


def collate(samples):
    windows, workers = zip(*samples, strict=True)
    return torch.from_numpy(np.stack(windows)), sorted(set(workers))


def seed_worker(worker_id):
    np.random.seed(torch.initial_seed() % 2**32)


def loader_of(method, persistent):
    dataset = Windows(np.arange(20), 4)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return DataLoader(
        dataset,
        batch_size=2,
        sampler=DistributedSampler(dataset, world_size, rank, shuffle=False),
        num_workers=2 if method == "fork" else 1,
        collate_fn=collate,
        worker_init_fn=seed_worker,
        multiprocessing_context=method,
        persistent_workers=persistent,
        generator=torch.Generator().manual_seed(0),
    )


# %% taas
if __name__ == "__main__":
    choices = [(method, persistent) for method in (None, "fork") for persistent in (False, True)]
    for method, persistent in [*choices, ("spawn", True), ("forkserver", False)]:
        loader = loader_of(method, persistent)
        epochs = [list(loader) for _ in range(1 + persistent)]
        total = sum(x.sum().item() for epoch in epochs for x, _ in epoch)
        workers = sorted({worker for epoch in epochs for _, seen in epoch for worker in seen})
        print(f"RESULT rank {os.environ['RANK']} {method} {persistent} {total} {workers}")
        del loader
