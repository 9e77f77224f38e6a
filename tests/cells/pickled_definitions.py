"""Classes of several kinds and their objects, for tests of the capture."""

# %%
import dataclasses
import enum
import typing

import torch
from torch.utils.data import DataLoader, Dataset  # noqa: F401


@dataclasses.dataclass
class Config:
    steps: int = 3

    def double(self):
        return self.steps * FACTOR


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Pair(typing.NamedTuple):
    left: int
    right: object


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x) * FACTOR


class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return Pair(i, (Config(i), Colour.RED, Net()))


FACTOR = 2
config, colour, pair, net = Config(4), Colour.BLUE, Pair(1, 2), Net()
data = Numbers()
