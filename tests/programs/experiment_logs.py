"""TensorBoard's SummaryWriter and wandb in offline mode, written by rank 0."""

# %%
import glob

import torch
import torch.distributed as dist
import wandb
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

# %% taas
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
writer = run = None
if rank == 0:
    writer = SummaryWriter("tensorboard_logs")
    run = wandb.init(project="digits", mode="offline", dir="wandb_logs", config={"lr": 0.1})
for step in range(10):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        writer.add_scalar("loss", loss.item(), step)
        run.log({"loss": loss.item()}, step=step)
if rank == 0:
    writer.add_histogram("weight", model.module.weight, 10)
    writer.close()
    print(f"RESULT summary {run.summary['loss']:.4f}")
    run.finish()
    print("RESULT files", len(glob.glob("tensorboard_logs/events.*")), end=" ")
    print(len(glob.glob("wandb_logs/wandb/offline-run-*/run-*.wandb")))
print(f"RESULT rank {rank} loss {loss.item():.4f}")
dist.destroy_process_group()
