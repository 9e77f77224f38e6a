"""DistributedDataParallel with a checkpoint, and a second start that resumes from it."""

# %%
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CHECKPOINT = "ddp_checkpoint.pt"
pixels, digits = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits))


# %%
class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(64, 32)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(32, 10)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


class Trainer:
    def __init__(self, model, data, optimizer, local_rank):
        self.device = torch.device("cuda", local_rank) if torch.cuda.is_available() else "cpu"
        self.model = DistributedDataParallel(model.to(self.device))
        self.data = data
        self.optimizer = optimizer
        self.epochs_run = 0
        if os.path.exists(CHECKPOINT):
            self.load()

    def load(self):
        snapshot = torch.load(CHECKPOINT, map_location=self.device, weights_only=True)
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.epochs_run = snapshot["epochs_run"]
        print("RESULT resumed after epoch", self.epochs_run)

    def save(self):
        if dist.get_rank() == 0:
            snapshot = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({**snapshot, "epochs_run": self.epochs_run}, CHECKPOINT)
        dist.barrier()

    def train_epoch(self):
        self.data.sampler.set_epoch(self.epochs_run)
        total = torch.zeros(2)
        for x, y in self.data:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x.to(self.device)), y.to(self.device))
            loss.backward()
            self.optimizer.step()
            total += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def train(self, until_epoch):
        while self.epochs_run < until_epoch:
            loss = self.train_epoch()
            self.epochs_run += 1
            self.save()
            print(f"RESULT epoch {self.epochs_run} loss {loss:.4f}")


def prepare():
    model = ToyModel()
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, pin_memory=False)
    return model, loader, torch.optim.Adam(model.parameters(), lr=1e-3)


# %% taas
backend = "nccl" if torch.cuda.is_available() else "gloo"
dist.init_process_group(backend)
torch.manual_seed(0)
trainer = Trainer(*prepare(), int(os.environ["LOCAL_RANK"]))
trainer.train(until_epoch=2)

# %% taas
if not dist.is_initialized():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(1)  # other weights, which the checkpoint's replace
resumed = Trainer(*prepare(), int(os.environ["LOCAL_RANK"]))
resumed.train(until_epoch=4)
dist.destroy_process_group()
