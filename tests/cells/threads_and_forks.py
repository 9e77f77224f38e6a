"""Cells that iterate loaders in threads, while a thread draws numbers, and in a fork."""

import json

from tests.cells.shown_batches import show

loaders = {}

# %%
import torch
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.rand(2) + index


def make():
    return {name: DataLoader(Noise(), 2, shuffle=True) for name in ("one", "two")}


# %%
import json
import threading

import torch


def take(name):
    taken[name] = [show(batch) for batch in loaders[name]]


taken = {}
torch.manual_seed(3)
threads = [threading.Thread(target=take, args=(name,)) for name in loaders]
for thread in threads:
    thread.start()
drawn = []
while len(drawn) < 1000 or any(thread.is_alive() for thread in threads):
    drawn.append(torch.rand(()).item())
for thread in threads:
    thread.join()
for name in taken:
    print(json.dumps([name, 0, taken[name]]))
torch.manual_seed(3)
print(json.dumps(["same", 0, drawn == [torch.rand(()).item() for _ in drawn]]))

# %%
import threading

import torch


def draw():
    while not over.is_set():
        torch.randn(1_000_000)  # holds the lock of torch's generator, but not the GIL


over = threading.Event()
thread = threading.Thread(target=draw)
thread.start()
for name, loader in loaders.items():
    for batch in loader:
        print(json.dumps([name, 0, show(batch)]))
over.set()
thread.join()

# %%
import os
import tempfile

for loader in loaders.values():
    for _batch in loader:  # so that connections are open when the cell forks
        pass
file = tempfile.mktemp()
child = os.fork()
who = "the rank's" if child else "the fork's"
lines = [
    json.dumps([f"{who} {name}", 1, show(batch)])
    for name, loader in loaders.items()
    for batch in loader
]
if not child:
    with open(file, "w") as said:
        print(*lines, sep="\n", file=said)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
with open(file) as said:
    print(*lines, said.read(), sep="\n", end="")
