"""Lightning and accelerate take a registered loader as it is: sharded once, not twice."""

import pytest

from tests.harness import Notebook

LOADER = """
import taas, torch
from torch.utils.data import DataLoader, TensorDataset

loader = taas.register(DataLoader(TensorDataset(torch.arange(16.0)[:, None]), 2, shuffle=True))
"""
LIGHTNING = """
import lightning as L, torch, warnings, logging
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

trainer = L.Trainer(
    max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Model(), loader)
"""
ACCELERATE = """
from accelerate import Accelerator
import torch
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
model, prepared = accelerator.prepare(model, loader)
for epoch in range(2):
    for (batch,) in prepared:
        print("saw", epoch, *(int(value) for value in batch))
accelerator.end_training()
"""

PLACED = """
from accelerate import Accelerator
import torch
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
left = accelerator.prepare(loader, device_placement=[False])
print("left", left.device)
accelerator.end_training()
"""


def test_accelerate_places_batches_and_knows_the_epochs_end(notebook: Notebook) -> None:
    notebook.define(LOADER)
    outcome = notebook.run(PLACED, "--cpus 1")
    assert outcome.error is None, outcome.shown
    lines = outcome.lines[0]
    assert lines[:2] == ["type True True", "total 4 4 16"]
    steps = [line for line in lines if line.startswith("step")]
    assert steps == [
        *("step 0 False False", "step 1 False False", "step 2 True False", "step 3 True True")
    ]
    gathered = [line.split()[1:] for line in lines if line.startswith("gathered")]
    assert sorted(int(value) for values in gathered for value in values) == list(range(16))
    assert "placed meta" in lines
    assert "left None" in lines
    resumed = [
        int(value)
        for rank in (0, 1)
        for line in outcome.lines[rank]
        if line.startswith("resumed")
        for value in line.split()[1:]
    ]
    assert sorted(resumed) == sorted(int(value) for values in gathered[2:] for value in values)
    rests = [line.split() for rank in (0, 1) for line in outcome.lines[rank] if "rest" in line]
    assert [rest[1] for rest in rests] == ["1", "1"]
    assert sorted(rests[0][2:] + rests[1][2:], key=int) == gathered[3]


@pytest.mark.parametrize("source", [LIGHTNING, ACCELERATE], ids=["lightning", "accelerate"])
def test_every_sample_is_seen_once_an_epoch(notebook: Notebook, source: str) -> None:
    notebook.define(LOADER)
    outcome = notebook.run(source, "--cpus 1")
    assert outcome.error is None, outcome.shown
    for epoch in "01":
        seen = [
            int(index)
            for lines in outcome.lines.values()
            for line in lines
            if line.startswith(f"saw {epoch}")
            for index in line.split()[2:]
        ]
        assert sorted(seen) == list(range(16))
