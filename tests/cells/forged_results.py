"""Two cells: an all-reduce, and a rank that forges the results of other ranks."""

MADE = "path"

# %%
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.ones(1)
dist.all_reduce(total)

# %%
import pickle
from pathlib import Path

from taas_magic.capture import pickling
from taas_magic.host.results import ResultsHeader


class Makes:
    def __reduce__(self):
        return os.mknod, (MADE,)


names = ["x", "<value>"]
folder = Path(os.environ["TAAS_PAYLOAD"]).parent / "results"
if rank:
    folder.mkdir(exist_ok=True)
    data = pickle.dumps(dict.fromkeys(names, Makes()))
    for name in ("0-0-0", "0-0-9", "0-1-0", "1-0-0"):
        written = pickling.Pickled(data, ())
        pickling.write_archive(folder / name, written, ResultsHeader(names=names))
x = rank
dist.barrier()
rank + 7
