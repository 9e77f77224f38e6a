"""A registered loader, used by Lightning and by accelerate."""

# %%
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import taas

loader = taas.register(DataLoader(TensorDataset(torch.arange(16.0)[:, None]), 2, shuffle=True))
dropping = taas.register(DataLoader(TensorDataset(torch.arange(6)), 2), uneven="drop")
numbers: Any = [{"n": n, "name": f"{n}"} for n in range(12)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(16.0)[:, None])


stream = taas.register(DataLoader(Stream(), 2))
unbatched = taas.register(DataLoader(TensorDataset(torch.arange(16.0)[:, None]), None))
short = taas.register(DataLoader(numbers, 4, sampler=range(11)))

# %%
import logging
import warnings

import lightning as L
import torch

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, _):
        print("saw", self.current_epoch, *(int(value) for value in batch[0]))
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


L.seed_everything(0, workers=True)
trainer = L.Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), loader)

# %%
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
model, prepared = accelerator.prepare(model, loader)
for epoch in range(2):
    for (batch,) in prepared:
        print("saw", epoch, *(int(value) for value in batch))
accelerator.end_training()

# %%
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
prepared = accelerator.prepare(loader)
print("type", isinstance(prepared, type(loader)), prepared.device == accelerator.device)
print("total", prepared.total_batch_size, len(prepared), len(prepared.dataset))
for step, (batch,) in enumerate(prepared):
    with accelerator.accumulate():
        print("step", step, accelerator.sync_gradients, prepared.end_of_dataloader)
    seen = accelerator.gather_for_metrics(batch)
    print("gathered", *sorted(int(value) for value in seen))
    if step == 1:
        state = prepared.state_dict()
prepared.device = torch.device("meta")
print("placed", *{batch.device.type for (batch,) in prepared})
prepared.load_state_dict(state)
prepared.device = None
print("resumed", *(int(value) for (batch,) in prepared for value in batch))
prepared.set_epoch(0)
rest = accelerator.skip_first_batches(prepared, 3)
print("rest", len(rest), *(int(value) for (batch,) in rest for value in batch))
for (batch,) in accelerator.prepare(dropping):
    print("dropping", *accelerator.gather_for_metrics(batch).tolist())
for batch in accelerator.prepare(short):
    print("short", *accelerator.gather_for_metrics(batch["n"]).tolist(), *batch["name"])
left = accelerator.prepare(loader, device_placement=[False])
print("left", left.device)
accelerator.end_training()

# %%
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
for batch in accelerator.prepare(short):
    print("short", *accelerator.gather_for_metrics(batch["n"]).tolist())
accelerator.end_training()

# %%
import logging
import warnings

import lightning as L
import torch

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Predictor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def predict_step(self, batch):
        return batch[0] if isinstance(batch, list) else batch

    def training_step(self, batch, _):
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


quiet = dict(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
plain = torch.utils.data.DataLoader(loader.dataset, 2)
loaders = {"plain": plain, "registered": loader, "stream": stream, "unbatched": unbatched}
for name, used in loaders.items():
    predictions = L.Trainer(**quiet).predict(Predictor(), used)
    print(name, *(int(value) for batch in predictions for value in batch))
for used in (loader, unbatched):
    try:
        L.Trainer(overfit_batches=1, max_epochs=1, **quiet).fit(Predictor(), used)
    except TypeError as error:
        print("error", error)

# %%
import lightning as L

fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
list(loader)
batches = iter(loader)
next(batches), next(batches)
loader.load_state_dict(loader.state_dict())  # type: ignore[attr-defined]
for (batch,) in fabric.setup_dataloaders(loader):
    print("saw", *(int(value) for value in batch))
