"""A federation of two hosts: its apps, its run and its result."""

# %%
import time

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

import taas

client_app = ClientApp()


@client_app.train()
def train(message, context):
    import torch

    (weights,) = message.content["arrays"].to_numpy_ndarrays()
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
