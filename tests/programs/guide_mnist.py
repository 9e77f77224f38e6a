"""Training on handwritten digits, in the same cells as the guide of DataSphere's TaaS."""

# %%
# %pip install taas

# %%
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import taas

EPOCHS = 9
BATCH_SIZE = 32

# %%
digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
labels = torch.tensor(digits.target)
train_set = TensorDataset(images[:1440], labels[:1440])
test_set = TensorDataset(images[1440:], labels[1440:])


# %%
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


# %%
train_loader = DataLoader(train_set, batch_size=BATCH_SIZE, shuffle=True, num_workers=1)
taas.register(train_loader)

# %%
#!g2.8
# pragma taas --gpus 2 --out net
dist.init_process_group("nccl")
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
test_loader = DataLoader(test_set, batch_size=128, num_workers=1)


def test(model):
    model.eval()
    right = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data.to(device))
            right += (output.argmax(dim=1) == target.to(device)).sum().item()
    return right / len(test_set)


torch.manual_seed(1)
net = Net().to(device)
ddp = DistributedDataParallel(net)
optimizer = optim.Adadelta(ddp.parameters(), lr=1.0)
for epoch in range(1, EPOCHS + 1):
    net.train()
    for data, target in train_loader:
        optimizer.zero_grad()
        F.nll_loss(ddp(data.to(device)), target.to(device)).backward()
        optimizer.step()
    print(f"RESULT epoch {epoch} rank {rank} accuracy {test(net):.4f}")

# %%
with torch.no_grad():
    found = net(test_set.tensors[0]).argmax(dim=1)
print("RESULT in the notebook", round((found == test_set.tensors[1]).float().mean().item(), 4))
