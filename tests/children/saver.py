"""Save one file repeatedly, each time filled with another value, until killed."""

import itertools
from multiprocessing.connection import Connection

import torch

from taas_magic.store.publish import save

COUNT = 50_000


def saves_for_ever(path: str, ready: Connection) -> None:
    for value in itertools.count():
        save(torch.full((COUNT,), float(value)), path)
        if value == 0:
            ready.send("saved once")
