"""Scalars of Lightning's `self.log` become metrics of the run, whatever the Trainer's logger is."""

import csv
import importlib
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from taas_magic.display.failure import LIGHTNING_ADVICE
from taas_magic.host import metrics
from taas_magic.host.lightning import lightning_callbacks, pytorch_lightning_callbacks
from taas_magic.host.metrics import MetricBuffer
from tests.cellfiles import cells_of
from tests.harness import Notebook
from tests.nightly import nightly

[TRAININGS] = cells_of("lightning_scalars")
NAMES = ("csv", "none", "wandb", "tensorboard")

Series = dict[str, dict[int, float]]
"""The values of each scalar, by step. Scalars have names without the training's name."""


def by_csv_logger(folder: Path) -> Series:
    """Return the scalars that Lightning's CSVLogger wrote in the training `csv`."""
    found: Series = {}
    with (folder / "lightning_logs/version_0/metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if name.startswith("csv/") and value:
                    found.setdefault(name.removeprefix("csv/"), {})[int(row["step"])] = float(value)
    return found


def test_ranks_record_the_same_scalars_as_lightnings_csv_logger(notebook: Notebook) -> None:
    outcome = notebook.run(TRAININGS)
    assert outcome.error is None and outcome.run is not None, outcome.shown
    notes = {note["text"] for note in outcome.of_kind("note") if "each rank" in note["text"]}
    assert notes == {
        "Lightning's Trainer uses 1 of the 2 ranks, so each rank trains a model of its own, on all "
        'data of a loader that is not registered. Write Trainer(devices=2, strategy="ddp")'
    }
    recorded: dict[str, Series] = {name: {} for name in NAMES}
    counts: Counter[tuple[str, int]] = Counter()
    with (outcome.run.path / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            training, _, name = row["name"].partition("/")
            if training in recorded:
                counts[row["name"], int(row["step"])] += 1
                values = recorded[training].setdefault(name, {})
                values[int(row["step"])] = float(row["value"])
    logged = by_csv_logger(notebook.project)
    del logged["single"], recorded["tensorboard"]["single"]
    assert {"loss", "both_step", "both_epoch", "late", "epoch", "validation", "test"} == {*logged}
    assert {*logged["loss"]} == {1, 3, 5, 7, 9, 11, 13}
    for training in NAMES:
        assert recorded[training] == {
            name: pytest.approx(series) for name, series in logged.items()
        }, training
    assert {*counts.values()} == {1}, counts


MISPLACED = """
import lightning, torch
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)
placement = {"accelerator": "cpu", "devices": "auto", "strategy": STRATEGY}
trainer = lightning.Trainer(**placement, max_epochs=1, logger=False, enable_checkpointing=False)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(4, 1)))
"""


@pytest.mark.parametrize("strategy", ["ddp", nightly("ddp_notebook")])
def test_a_trainer_that_does_not_fit_the_ranks_gets_advice(
    strategy: str, notebook: Notebook
) -> None:
    outcome = notebook.run(f"STRATEGY = {strategy!r}\n{MISPLACED}")
    assert f"advice: {LIGHTNING_ADVICE}" in outcome.shown


FACTORIES = {
    "lightning.pytorch": lightning_callbacks,
    "pytorch_lightning": pytorch_lightning_callbacks,
}
"""The factory of callbacks for each module. Only the test imports the modules, which takes 4 s."""


@pytest.mark.parametrize(("module", "factory"), FACTORIES.items(), ids=FACTORIES)
def test_only_a_rank_that_records_has_the_callback(
    module: str, factory: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = importlib.import_module(module).Callback
    assert factory() == []
    monkeypatch.setattr(metrics, "_buffer", MetricBuffer(0))
    [callback] = factory()
    assert isinstance(callback, kind)
    assert isinstance(pickle.loads(pickle.dumps(callback)), kind)
    monkeypatch.setenv(metrics.METRICS_VARIABLE, "0")
    assert factory() == []
