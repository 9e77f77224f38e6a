"""torch.compile of a small model under DistributedDataParallel."""

# %%
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1 = nn.Linear(16, 32)
        self.lin2 = nn.Linear(32, 1)

    def forward(self, x):
        return self.lin2(torch.sin(self.lin1(x)) ** 2)


def swish(x):
    return x * torch.sigmoid(x) + torch.cos(x)


# %% taas
import torch._inductor.config  # noqa: E402

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
# Speed does not matter here. So torch need not compile a test program for each vector instruction
# set.
torch._inductor.config.cpp.vec_isa_ok = False
compiled_swish = torch.compile(swish)
x = torch.linspace(-2, 2, 64).reshape(4, 16) * (rank + 1)
eager = x * torch.sigmoid(x) + torch.cos(x)
print(f"RESULT rank {rank} function", torch.allclose(compiled_swish(x), eager, atol=1e-6))

torch.manual_seed(0)
model = Model()
ddp = DistributedDataParallel(model)
compiled = torch.compile(ddp)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
for _ in range(5):
    loss = compiled(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"RESULT rank {rank} loss {loss.item():.3f}")
print(f"RESULT rank {rank} threads", torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
dist.destroy_process_group()
