"""torch.distributed.rpc: a parameter server on rank 0, a trainer on rank 1."""

# %%
import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer


# %%
class ParameterServer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        return self.linear(x)

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def add(a, b):
    return a + b


def run_trainer():
    server = rpc.remote("ps", ParameterServer)
    rrefs = server.rpc_sync().parameter_rrefs()
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    y = x.sum(dim=1, keepdim=True)
    for _ in range(30):
        with dist_autograd.context() as context_id:
            loss = nn.functional.mse_loss(server.rpc_sync().forward(x), y)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    return loss.item()


# %% taas
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc("ps" if rank == 0 else "trainer", rank=rank, world_size=world_size)
if rank == 1:
    print("RESULT sum", rpc.rpc_sync("ps", add, args=(torch.ones(2), 3)).tolist())
    print("RESULT async", rpc.rpc_async("ps", add, args=(1, 2)).wait())
    print(f"RESULT loss {run_trainer():.4f}")
rpc.shutdown()
