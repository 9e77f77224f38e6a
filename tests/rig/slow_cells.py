"""Cells for tests of slow imports: they use ranks, fetchers, a farm and a federation."""

from tests.cellfiles import cells_of

POOLS = """
[pools.sites]
engine = "local"
max_hosts = 2
gpus = 1
cores = 1
"""

CELL = "%%taas --gpus 1\nprint('cell', {number})"

LOADER = """
import taas, torch
from torch.utils.data import DataLoader, TensorDataset
loader = taas.register(DataLoader(TensorDataset(torch.arange(8)), batch_size=2, num_workers=1))
"""
TRAIN = "%%taas --gpus 1 --cpus 1\nprint('batches', sum(1 for _ in loader))"

FARM = """
import taas
farm = taas.farm(pool="sites")
print("jobs", [job.result() for job in farm.map(lambda x: x * x, range(5))])
print(farm.status())
farm.close()
"""

[FEDERATION] = cells_of("slow_federation")
