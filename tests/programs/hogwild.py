"""Hogwild: spawned processes train one model in shared memory, without locks."""

# %%
import os

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(2, 32)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, x):
        return nn.functional.log_softmax(self.fc2(nn.functional.relu(self.fc1(x))), dim=1)


# %%
def quadrants_dataset():
    """Return random points of a plane; the class of a point is its quadrant."""
    points = torch.rand(512, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return TensorDataset(points, (points > 0).long() @ torch.tensor([1, 2]))


def train(worker, seed, model, dataset):
    torch.manual_seed(seed + worker)
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    parameters = list(model.parameters())
    for _ in range(6):
        for data, target in loader:
            loss = nn.functional.nll_loss(model(data), target)
            gradients = torch.autograd.grad(loss, parameters)
            # The step of torch.optim.SGD would import torch._dynamo: 1.2 s in each process.
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= 0.4 * gradient


@torch.no_grad()
def test(model, dataset):
    data, target = dataset.tensors
    return (model(data).argmax(dim=1) == target).float().mean().item()


# %% taas
if __name__ == "__main__":
    mp.set_start_method("spawn", force=True)
    torch.manual_seed(1)
    dataset = quadrants_dataset()
    model = Net()
    model.share_memory()  # each process has gradients of its own
    before = test(model, dataset)
    processes = []
    for worker in range(2):
        process = mp.Process(target=train, args=(worker, 1, model, dataset))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()
    print("RESULT rank", os.environ["RANK"], "exit codes", [p.exitcode for p in processes])
    print(f"RESULT rank {os.environ['RANK']} before {before:.2f}", end=" ")
    print("learned", test(model, dataset) > 0.85)
