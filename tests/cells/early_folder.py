"""Ranks that save and list files; rank 1 makes a folder in the store before rank 0 does."""

# %%
import os
import shutil

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()  # else a rank may end before the others have connected
rank = dist.get_rank()
model = torch.full((4,), float(rank))

if rank == 0:
    dist.barrier()
os.makedirs("out/deep", exist_ok=True)
os.chdir("out")
if rank == 1:
    assert os.listdir() == ["deep"] and os.path.isdir("deep")
    dist.barrier()
torch.save(model, "m.pt")
torch.save(model, os.path.abspath("deep/m.pt"))
if rank == 1:
    open("mine.txt", "w").close()
dist.barrier()
for path in ("m.pt", "deep/m.pt", os.path.abspath("m.pt"), "../out/m.pt"):
    assert torch.load(path, weights_only=True)[0] == 0, path
assert set(os.listdir()) - {"mine.txt"} == {"deep", "m.pt"}
assert {entry.name for entry in os.scandir(".")} == set(os.listdir("."))
dist.barrier()
shutil.rmtree("deep")
os.chdir("..")
assert os.listdir() == ["out"]
