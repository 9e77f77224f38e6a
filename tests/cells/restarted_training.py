"""A training that saves each step, can lose a rank, and resumes from its file."""


# %%
def train(path, kill_at=None):
    import os

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import taas

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters())
    first = 0
    if os.path.exists(path):
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    for step in range(first, 6):
        if step == kill_at and dist.get_rank() == 1 and first == 0:
            os.kill(os.getpid(), 9)
        x = torch.arange(3.0) + step + dist.get_rank()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        taas.save(state, path)
        dist.barrier()
    return model.module.weight.detach()
