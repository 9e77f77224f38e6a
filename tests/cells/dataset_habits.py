"""Datasets, samplers and functions with unusual habits."""

# %%
import os
import pathlib

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate


class Rows(Dataset):
    def __init__(self, size=9):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"x": torch.full((2,), float(index)), "index": index}


class Curriculum(Rows):
    """A dataset with a method `set_epoch`. Its sampler refers to it, too."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return torch.tensor([index, self.epoch])


class Easier(Sampler):
    def __init__(self, dataset):
        self.dataset, self.epoch = dataset, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(3 + 2 * self.epoch))


class Holes(Rows):
    def __getitem__(self, index):
        return None if index % 3 else super().__getitem__(index)


class Shared(Rows):
    def __getitem__(self, index):
        x = torch.arange(4.0) + index
        return {"x": x, "same": x, "part": x[1:3]}


class Relative(Rows):
    """A dataset that reads a file in the notebook's folder and an environment variable."""

    def __getitem__(self, index):
        text = pathlib.Path("habits.txt").read_text()
        return [text, os.environ.get("HABITS", ""), torch.zeros(1), torch.tensor(0.5)]


class Liar(IterableDataset):
    def __len__(self):
        return 3

    def __iter__(self):
        return iter(range(7))


class Restless(IterableDataset):
    """A dataset that is its own iterator and can restart."""

    def __init__(self):
        self.left = []

    def __iter__(self):
        self.left = list("abcdefg")
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


class Parts(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        yield from range(info.id, 17, info.num_workers)


class Uneven:
    def __iter__(self):
        yield from ([], [1], [2, 3, 4], [5])


class Mixed:
    """A collate_fn that draws random numbers."""

    def __call__(self, items):
        batch = default_collate(items)
        return batch | {"order": torch.randperm(len(items)).shape}


def without_holes(items):
    kept = [item for item in items if item is not None]
    return default_collate(kept) if kept else None


def share(items):
    item = items[0]
    item["x"].add_(100)
    return [item, item["same"] is item["x"], item]


def bare(items):
    return items


def generator():
    return torch.Generator().manual_seed(4)


def make():
    curriculum = Curriculum()
    return {
        "curriculum": DataLoader(curriculum, 2, sampler=Easier(curriculum)),
        "holes": DataLoader(Holes(), 2, collate_fn=without_holes),
        "shared": DataLoader(Shared(4), 1, collate_fn=share),
        "relative": DataLoader(Relative(2), 1),
        "liar": DataLoader(Liar(), 2),
        "restless": DataLoader(Restless(), 2),
        "dropped": DataLoader(Parts(), 3, num_workers=2, drop_last=True),
        "uneven": DataLoader(Rows(), batch_sampler=Uneven(), collate_fn=bare),
        "mixed": DataLoader(Rows(), 4, collate_fn=Mixed(), drop_last=True),
        "drawn": DataLoader(Rows(), 2, shuffle=True, generator=generator()),
        "empty": DataLoader(Rows(0), 2, collate_fn=bare),
        "epochs": DataLoader(Rows(5), 2, shuffle=True),
    }
