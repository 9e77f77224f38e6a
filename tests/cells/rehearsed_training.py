"""A notebook with a registered loader, and two cells that a rehearsal runs."""

# %%
import os
import threading  # noqa: F401
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import taas

data = TensorDataset(torch.randn(160, 8), torch.randint(0, 2, (160,)))
train = taas.register(DataLoader(data, batch_size=4))
net = torch.nn.Linear(8, 2)
Path("last.pt").write_text("an old checkpoint")

# %%
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = []
for epoch in range(2):
    seen.append(0)
    for x, y in train:
        seen[-1] += 1
        for _ in range(20):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    if rank == 0:
        os.makedirs("checkpoints", exist_ok=True)
        torch.save(model.state_dict(), f"checkpoints/{epoch}.pt")
        os.replace(f"checkpoints/{epoch}.pt", "last.pt")
    dist.barrier()
    model.load_state_dict(torch.load("last.pt", weights_only=True))  # every rank gets rank 0's file
with open(f"shards/{rank}", "w") as shard:
    shard.write(str(rank))
dist.barrier()
assert sorted(os.listdir("shards")) == ["0", "1"] and os.path.isdir("checkpoints")
print("steps", seen, len(train), os.environ["TAAS_REHEARSE"], dist.get_world_size())

# %%
import glob
from pathlib import Path

import numpy
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

dist.init_process_group("gloo")
rank = dist.get_rank()
with open("log.txt", "a") as log:  # every rank appends; only rank 0's line counts
    log.write(f"rank {rank}")
os.makedirs("out", exist_ok=True)
save_file({"x": torch.full((2,), float(rank))}, "out/x.safetensors")
if rank == 0:
    numpy.save("out/array.npy", numpy.zeros(3))
    Path("last.pt").write_text("new")
    with open("last.pt", "a") as file:
        file.write("er")
    os.symlink("out", "latest")
dist.barrier()
assert Path("last.pt").read_text() == "newer"
assert load_file("out/x.safetensors")["x"].tolist() == [0.0, 0.0]
assert Path("log.txt").read_text() == "rank 0"
dist.barrier()
numpy.load("out/array.npy", mmap_mode="r+")[:] += rank
dist.barrier()
assert numpy.load("out/array.npy")[0] == 0
assert Path("latest/x.safetensors").exists() and os.path.islink("latest")
assert sorted(os.listdir("latest")) == ["array.npy", "x.safetensors"]
assert sorted(glob.glob("out/*")) == ["out/array.npy", "out/x.safetensors"]
names = sorted(it.name for it in os.scandir("."))
assert names == ["last.pt", "latest", "log.txt", "out", "shards"]
dist.barrier()
if rank == 1:
    os.remove("last.pt")  # the store keeps rank 0's file
    os.rename("out/x.safetensors", "moved")
    try:
        Path("out/1.distcp").write_text("")
    except PermissionError as error:
        print(error.strerror)
dist.barrier()
assert Path("last.pt").read_text() == "newer" and Path("out/x.safetensors").exists()
state = {"w": torch.full((2,), 7.0)}
dcp.save(state, checkpoint_id="shards/step")  # type: ignore[attr-defined]
loaded = {"w": torch.zeros(2)}
dcp.load(loaded, checkpoint_id="shards/step")  # type: ignore[attr-defined]
assert loaded["w"].tolist() == [7.0, 7.0]
os.chdir("out")
assert os.listdir() == os.listdir(".") and Path("array.npy").exists()
