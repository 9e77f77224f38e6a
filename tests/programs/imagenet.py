"""ImageNet-style: argparse, main_worker, DataLoader workers, --multiprocessing-distributed."""

# %%
import argparse
import os
import random

import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="PyTorch ImageNet-style training")
parser.add_argument("-j", "--workers", default=1, type=int)
parser.add_argument("--epochs", default=1, type=int)
parser.add_argument("-b", "--batch-size", default=16, type=int)
parser.add_argument("--lr", default=0.05, type=float)
parser.add_argument("--world-size", default=-1, type=int)
parser.add_argument("--rank", default=-1, type=int)
parser.add_argument("--dist-url", default="env://", type=str)
parser.add_argument("--seed", default=0, type=int)
parser.add_argument("--multiprocessing-distributed", action="store_true")


# %%
class Pictures(Dataset):
    """Synthetic pictures: the class is the quarter that is bright."""

    def __len__(self):
        return 128

    def __getitem__(self, index):
        picture = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(index))
        row, column = divmod(index % 4, 2)
        picture[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
        return picture, index % 4


class AverageMeter:
    def __init__(self, name):
        self.name = name
        self.sum = self.count = 0.0

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total)
        self.sum, self.count = total.tolist()

    def __str__(self):
        return f"{self.name} {self.sum / self.count:.4f}"


def small_resnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def train(loader, model, criterion, optimizer, device):
    losses = AverageMeter("loss")
    model.train()
    for images, target in loader:
        output = model(images.to(device, non_blocking=True))
        loss = criterion(output, target.to(device, non_blocking=True))
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    losses.all_reduce()
    return losses


def main_worker(gpu, ngpus_per_node, args):
    if args.dist_url == "env://" and args.rank == -1:
        args.rank = int(os.environ["RANK"])
    if args.multiprocessing_distributed:
        # Until here, `rank` is the number of the node, as in the original example.
        args.rank = args.rank * ngpus_per_node + gpu
    torch.manual_seed(args.seed)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank
    )
    device = torch.device("cuda", gpu) if torch.cuda.is_available() else torch.device("cpu")
    model = nn.parallel.DistributedDataParallel(small_resnet().to(device))
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    dataset = Pictures()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(
        dataset, args.batch_size, sampler=sampler, num_workers=args.workers, pin_memory=False
    )
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = train(loader, model, criterion, optimizer, device)
        print(f"RESULT rank {args.rank} of {args.world_size} epoch {epoch} {losses}", flush=True)
    # Like the original example, this program does not destroy the process group. If the model held
    # the last reference to the group, torch 2.13 could hang here: the end of the group joins gloo's
    # thread and holds the GIL, for which gloo's thread may wait. Unlike the original example, this
    # program ends with a barrier. Otherwise, a process could end while gloo's thread still holds a
    # tensor of the last collective, and could be aborted ("terminate called",
    # https://github.com/pytorch/pytorch/pull/179291).
    dist.barrier()


def main(args):
    random.seed(args.seed)
    cudnn.deterministic = True
    if args.dist_url == "env://" and args.world_size == -1:
        args.world_size = int(os.environ["WORLD_SIZE"])
    ngpus_per_node = 1
    if args.multiprocessing_distributed:
        args.world_size = ngpus_per_node * args.world_size
        mp.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))
    else:
        main_worker(int(os.environ["LOCAL_RANK"]), ngpus_per_node, args)


# %% taas
if __name__ == "__main__":
    main(parser.parse_args(["--multiprocessing-distributed", "--workers", "1", "--epochs", "1"]))
