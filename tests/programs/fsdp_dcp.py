"""FSDP2 with distributed checkpoints, saved synchronously, by a thread, and by a process."""

# %%
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self, width=16, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class AppState(Stateful):
    """State of a model and an optimizer, which `dcp.save` and `dcp.load` can save and load."""

    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


# %%
def build(mesh, seed):
    torch.manual_seed(seed)
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(8, 16, generator=generator)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def norm(model):
    """Return the norm of all parameters, which are gathered from all ranks."""
    parts = [parameter.detach().full_tensor().square().sum() for parameter in model.parameters()]
    return torch.stack(parts).sum().sqrt().item()


def resumed(mesh, folder):
    model, optimizer = build(mesh, seed=1)
    dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=folder)
    return norm(model)


# %% taas --shared-writes checkpoints
if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (2,))
    model, optimizer = build(mesh, seed=0)
    print(f"RESULT rank {rank} loss {train(model, optimizer, 5):.4f}")
    weight = model.layers[0].up.weight
    print(f"RESULT rank {rank}", isinstance(weight, DTensor), tuple(weight.to_local().shape))

    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id="checkpoints/at_once")
    expected = norm(model)
    assert resumed(mesh, "checkpoints/at_once") == expected
    print(f"RESULT rank {rank} at once {expected:.4f}")

    for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
        folder = f"checkpoints/{kind.value}"
        train(model, optimizer, 1)
        expected = norm(model)
        saving = dcp.async_save(
            {"app": AppState(model, optimizer)},
            checkpoint_id=folder,
            async_checkpointer_type=kind,
        )
        saving.result()
        assert resumed(mesh, folder) == expected
        print(f"RESULT rank {rank} {kind.value} {expected:.4f}")
    dist.destroy_process_group()
