"""The training that the documentation's pictures show."""

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import taas

digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)
train_set = TensorDataset(pixels[:1400], labels[:1400])


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


# %%
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from tqdm import trange

dist.init_process_group()
ddp = DistributedDataParallel(make_model())
optimizer = torch.optim.Adam(ddp.parameters(), lr=5e-4)
sampler = DistributedSampler(train_set)
for epoch in trange(400, desc="epochs"):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(train_set, batch_size=32, sampler=sampler):
        logits = ddp(x)
        loss = nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy = (logits.argmax(1) == y).float().mean()
        taas.log(loss=loss, accuracy=accuracy)
    if epoch % 5 == 0:
        print(f"epoch {epoch}: last loss {loss.item():.3f}")
