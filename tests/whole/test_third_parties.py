"""Trainers of other projects run unchanged in a cell: they find torchrun's environment."""

import pytest

from tests.harness import Notebook

pytestmark = pytest.mark.timeout(240)

ACCELERATE = """
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(0)
accelerator = Accelerator()
data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(64, 1) / 64)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(30):
    for (x,) in loader:
        loss = (model(x) - 3 * x - 1).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
weight = accelerator.unwrap_model(model).weight.item()
weights = accelerator.gather(torch.tensor([weight])).tolist()
accelerator.print(accelerator.distributed_type, "batches", len(loader))
"""

LIGHTNING = """
import lightning as L, torch

class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return (self.line(batch[0]) - 3 * batch[0] - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

L.seed_everything(0)
data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(64, 1) / 64)
line = Line()
trainer = L.Trainer(
    strategy="ddp", devices=2, accelerator="cpu", max_epochs=30,
    logger=False, enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(line, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
weight = line.line.weight.item()
seen = trainer.world_size, trainer.num_training_batches, type(trainer.strategy).__name__
"""


def test_accelerate(notebook: Notebook) -> None:
    outcome = notebook.run(ACCELERATE, "--out weights")
    assert outcome.error is None
    first, second = notebook.shell.user_ns["weights"]
    assert first == second == pytest.approx(3, abs=0.05)
    assert [line for line in outcome.lines[0] if "MULTI_CPU batches 8" in line]


def test_lightning(notebook: Notebook) -> None:
    outcome = notebook.run(LIGHTNING, "--out weight,seen")
    assert outcome.error is None
    assert notebook.shell.user_ns["seen"] == (2, 8, "DDPStrategy")
    assert notebook.shell.user_ns["weight"] == pytest.approx(3, abs=0.05)
