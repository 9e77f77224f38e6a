"""Cells for tests of slow imports: they use ranks, fetchers, a farm and a federation."""

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

FEDERATION = """
import numpy as np, taas, time
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

client_app = ClientApp()

@client_app.train()
def train(message, context):
    import torch
    weights, = message.content["arrays"].to_numpy_ndarrays()
    content = {"arrays": ArrayRecord([weights + torch.ones(2).numpy()])}
    content["metrics"] = MetricRecord({"num-examples": 1})
    return Message(RecordDict(content), reply_to=message)

server_app = ServerApp()

@server_app.main()
def main(grid, context):
    while len(list(grid.get_node_ids())) < 2:
        time.sleep(0.1)
    strategy = FedAvg(fraction_evaluate=0, min_available_nodes=2)
    return strategy.start(grid, ArrayRecord([np.zeros(2)]), num_rounds=2, timeout=3600)

result = taas.federation(pool="sites").run(server_app, client_app)
print("weights", result.arrays.to_numpy_ndarrays()[0].tolist())
"""
