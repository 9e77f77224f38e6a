"""A note tells the user if each rank trains a model of its own, because no process group exists."""

import pytest

from taas_magic.host.lone_training import LONE_TRAINING
from tests.harness import Notebook, Outcome

STEP = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""

GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo")
"""

TRAINER = """
import lightning, torch
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(2, 2)))
"""

DESTROY = """
dist.barrier()  # without it, gloo fails in a rank that is still connecting to this one
dist.destroy_process_group()
"""

NO_LONE_TRAINING = {
    "a process group that the cell destroys": f"{GROUP}{STEP}{DESTROY}",
    "a step before, in and after a process group": f"{STEP}{GROUP}{STEP}{DESTROY}{STEP}",
    "a process group after the first step": f"{STEP}{GROUP}dist.barrier()",
    "only rank 0 trains": "import os\nif os.environ['RANK'] == '0':" + STEP.replace("\n", "\n    "),
    "a Trainer of Lightning, which has a note of its own": TRAINER,
    "horovod": f"import sys\nsys.modules['horovod.torch'] = sys\n{STEP}",
    "no step": STEP.replace("optimizer.step()", ""),
}


def reported(outcome: Outcome) -> int:
    """Return how often ranks sent the note."""
    assert outcome.error is None, outcome.shown
    return [event["text"] for event in outcome.of_kind("note")].count(LONE_TRAINING)


@pytest.mark.parametrize("step", ["optimizer.step()", "torch.compile(optimizer.step)()"])
def test_one_note_says_that_each_rank_trained_alone(notebook: Notebook, step: str) -> None:
    outcome = notebook.run(STEP.replace("optimizer.step()", step), "--out model", gpus=3)
    assert reported(outcome) == 1
    assert outcome.run is not None and LONE_TRAINING in outcome.run.head.notes


@pytest.mark.parametrize("why", NO_LONE_TRAINING)
def test_no_note_without_lone_training(notebook: Notebook, why: str) -> None:
    assert reported(notebook.run(NO_LONE_TRAINING[why])) == 0


def test_no_note_for_a_single_rank_or_a_rehearsal(notebook: Notebook) -> None:
    assert reported(notebook.run(STEP, gpus=1)) == 0
    assert reported(notebook.run(STEP, "--rehearse")) == 0


def test_a_session_sends_the_note_once(notebook: Notebook) -> None:
    try:
        assert reported(notebook.run(STEP, "--session exp --ranks 1")) == 0
        assert [reported(notebook.run(STEP, "--session exp")) for _ in range(2)] == [1, 0]
    finally:
        notebook.shell.run_line_magic("taas", "end exp")
