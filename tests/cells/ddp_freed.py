"""A function frees its DDP model after it has destroyed the model's process group."""

# %%
import threading
import time
import weakref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.destroy_process_group()


def train():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    destroyed, begun = threading.Event(), torch.ones(1)

    def use_the_gil(future):  # a thread of gloo runs this function
        destroyed.wait()
        time.sleep(0.5)

    if dist.get_rank() == 0:
        sent = dist.all_reduce(torch.ones(1), async_op=True)
        sent.get_future().add_done_callback(use_the_gil)
        dist.send(begun, 1)
    else:
        dist.recv(begun, 0)
        dist.all_reduce(torch.ones(1))
    group = weakref.ref(model.process_group)
    dist.destroy_process_group()
    destroyed.set()
    return group


# %%
group = train()
print("freed")

# %%
print("kept" if group() else "deleted")
