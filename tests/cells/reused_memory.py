"""Datasets, samplers and collate functions that use the same memory for each sample or batch."""

# %%
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset


class OneArray(Dataset):
    def __init__(self):
        self.array = np.zeros(4, dtype=np.float32)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.array[:] = index
        return self.array


class OneTensor(IterableDataset):
    def __init__(self, item=None):
        self.item = torch.zeros(3)

    def __iter__(self):
        for number in range(11):
            self.item.fill_(number)
            yield self.item


class Fields(OneTensor):
    def __iter__(self):
        fields: dict = {"x": self.item, "names": []}
        for number in range(11):
            fields["x"].fill_(number)
            fields["names"][:] = [f"n{number}"]
            yield fields


class Rows(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.full((2,), float(index))


class IntoOne:
    def __init__(self):
        self.out = torch.zeros(2, 2)

    def __call__(self, rows):
        return torch.stack(rows, out=self.out)


class OneList:
    def __iter__(self):
        batch = []
        for start in range(0, 10, 2):
            batch[:] = [start + 1, start]
            yield batch

    def __len__(self):
        return 5


def make():
    return {
        "unbatched": DataLoader(OneArray(), batch_size=None),
        "unbatched_stream": DataLoader(OneTensor(), batch_size=None),
        "fields": DataLoader(Fields(), batch_size=None),
        "collated_into": DataLoader(Rows(), 2, collate_fn=IntoOne()),
        "first_of_batch": DataLoader(OneTensor(), 1, collate_fn=lambda items: items[0]),
        "sampler": DataLoader(Rows(), batch_sampler=OneList()),
    }
