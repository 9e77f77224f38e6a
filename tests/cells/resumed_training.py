"""A registered loader, a cell that iterates it, and a training that resumes from a checkpoint."""

# %%
import torch
from torch.utils.data import DataLoader, Dataset

import taas


class Numbers(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == 90:
            raise ValueError("ninety is bad")
        return torch.tensor([float(index)]) + 0 * torch.rand(1)


torch.manual_seed(5)
loader = taas.register(DataLoader(Numbers(20), batch_size=2, shuffle=True))

# %%
import os

rank = int(os.environ["RANK"])
for epoch in range(2):
    for batch in loader:
        print(epoch, *(int(value) for value in batch))
print("type", type(loader).__mro__[1].__name__, len(loader), len(loader.dataset))  # type: ignore[arg-type]


# %%
def train(path, dies_at=None):
    import os
    import signal

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import taas

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first, step, attempt = 0, 0, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.path.exists(path):
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
        first, step = state["epoch"], state["step"]
    print("from step", step)
    for epoch in range(first, 2):
        for batch in loader:
            print(attempt, epoch, *(int(value) for value in batch))
            if (attempt, step, dist.get_rank()) == (0, dies_at, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            loss = (model(batch / 40) - batch.sum()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state["loader"] = loader.state_dict()  # type: ignore[attr-defined]
            taas.save(state | {"epoch": epoch, "step": step}, path)
            dist.barrier()
    return model.module.weight.detach()
