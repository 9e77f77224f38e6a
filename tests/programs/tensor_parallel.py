"""Tensor parallelism: column- and row-wise linear layers over a device mesh."""

# %%
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(10, 32)
        self.out_proj = nn.Linear(32, 5)

    def forward(self, x):
        return self.out_proj(torch.relu(self.in_proj(x)))


PLAN = {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}

# %% taas
device_type = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device_type, (int(os.environ["WORLD_SIZE"]),))
rank = mesh.get_rank()

torch.manual_seed(0)
reference = FeedForward().to(device_type)
torch.manual_seed(0)
model = parallelize_module(FeedForward().to(device_type), mesh, PLAN)
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
for step in range(5):
    torch.manual_seed(step)  # the same input on all ranks
    x = torch.rand(20, 10, device=device_type)
    losses = []
    for module, optimizer in zip((model, reference), optimizers, strict=True):
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 1e-5, losses
shard = model.in_proj.weight.to_local()
print(f"RESULT rank {rank} shard {tuple(shard.shape)} loss {losses[0]:.4f}")
whole = model.in_proj.weight.full_tensor()
print(f"RESULT rank {rank} same", torch.allclose(whole, reference.in_proj.weight, atol=1e-6))
dist.destroy_process_group()
