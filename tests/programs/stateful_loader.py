"""torchdata's StatefulDataLoader: stop in the middle of an epoch, and continue from its state."""

# %%
import itertools

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return index * index


class Counter(IterableDataset):
    """A stream of numbers, divided among the workers of all ranks; its state is the position."""

    def __init__(self, length, rank, world_size):
        self.length, self.rank, self.world_size = length, rank, world_size
        self.position = 0

    def __iter__(self):
        worker = get_worker_info()
        first = self.rank * worker.num_workers + worker.id
        step = self.world_size * worker.num_workers
        for i in itertools.count(self.position):
            if first + i * step >= self.length:
                break
            self.position = i + 1
            yield first + i * step
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def map_style():
    sampler = StatefulDistributedSampler(Squares(), shuffle=True, seed=5)
    return StatefulDataLoader(Squares(), batch_size=4, sampler=sampler, num_workers=2)


def iterable():
    dataset = Counter(64, dist.get_rank(), dist.get_world_size())
    return StatefulDataLoader(dataset, batch_size=4, num_workers=2)


# %% taas
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
for make in (map_style, iterable):
    whole = [batch.tolist() for batch in make()]
    loader = make()
    first = [batch.tolist() for batch in itertools.islice(loader, 3)]
    state = loader.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    rest = [batch.tolist() for batch in resumed]
    print(f"RESULT rank {dist.get_rank()} {make.__name__}", first + rest == whole, whole)
dist.destroy_process_group()
