"""A ClientApp that counts the bytes of its host's data, and a ServerApp that averages results."""

# %%
import time

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

import taas  # noqa: F401

client_app = ClientApp()


@client_app.train()
def train(message, context):
    with open(context.node_config["data"]) as file:
        examples = len(file.read())
    print("trains in round", message.content["config"]["server-round"], flush=True)
    (weights,) = message.content["arrays"].to_numpy_ndarrays()
    drawn = {"torch": torch.rand(1).item(), "numpy": np.random.rand()}
    metrics = MetricRecord({"num-examples": examples, "seen": float(examples), **drawn})
    content = {"arrays": ArrayRecord([weights + examples]), "metrics": metrics}
    return Message(RecordDict(content), reply_to=message)


server_app = ServerApp()


@server_app.main()
def main(grid, context):
    print("serves", context.run_config["rounds"], "rounds", flush=True)
    while len(list(grid.get_node_ids())) < 2:
        time.sleep(0.1)
    strategy = FedAvg(fraction_evaluate=0, min_train_nodes=1, min_available_nodes=1)
    return strategy.start(
        grid,
        ArrayRecord([np.zeros(2)]),
        num_rounds=context.run_config["rounds"],
        timeout=context.run_config["timeout"],
    )
