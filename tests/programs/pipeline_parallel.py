"""Pipeline parallelism: two stages, GPipe and 1F1B schedules."""

# %%
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

MICROBATCHES = 4


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def layers():
    torch.manual_seed(0)
    return [Layer(16) for _ in range(4)]


def loss_fn(output, target):
    return nn.functional.mse_loss(output, target)


# %% taas
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
for schedule_class in (ScheduleGPipe, Schedule1F1B):
    module = nn.Sequential(*layers()[2 * rank : 2 * rank + 2]).to(device)
    stage = PipelineStage(module, rank, world_size, device)
    schedule = schedule_class(stage, MICROBATCHES, loss_fn=loss_fn)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        x = torch.randn(32, 16, generator=generator).to(device)
        losses = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.roll(1, dims=1), losses=losses)
        optimizer.step()
        optimizer.zero_grad()
    if rank == world_size - 1:
        print(f"RESULT {schedule_class.__name__} {torch.stack(losses).mean().item():.4f}")
dist.destroy_process_group()
