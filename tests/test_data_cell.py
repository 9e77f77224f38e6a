"""Registered loaders in `%%taas` cells: the whole way, from a notebook."""

import pytest

from taas_magic import registry
from taas_magic.capture import pickling
from taas_magic.data import audit, ledger
from tests.harness import Notebook


@pytest.fixture(autouse=True)
def nothing_registered():
    yield
    registry._registered.clear()
    pickling.STAND_INS.clear()


LOADER = """
import taas, torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == 90:
            raise ValueError("ninety is bad")
        return torch.tensor([float(index)]) + 0 * torch.rand(1)

torch.manual_seed(5)
loader = taas.register(DataLoader(Numbers(20), batch_size=2, shuffle=True))
"""
CELL = """
import os
rank = int(os.environ["RANK"])
for epoch in range(2):
    for batch in loader:
        print(epoch, *(int(value) for value in batch))
print("type", type(loader).__mro__[1].__name__, len(loader), len(loader.dataset))
"""


def streams(outcome) -> dict[int, list[str]]:
    assert outcome.error is None, outcome.shown
    return outcome.lines


@pytest.mark.parametrize("cpus", [0, 1, 3])
def test_a_cell_gets_the_same_stream_for_every_number_of_hosts(
    notebook: Notebook,
    cpus: int,
    streams_seen={},  # noqa: B006
) -> None:
    notebook.define(LOADER)
    outcome = notebook.run(CELL, f"--cpus {cpus}")
    lines = streams(outcome)
    assert streams_seen.setdefault("lines", lines) == lines
    for epoch in "01":
        handed = [line.split()[1:] for rank in lines for line in lines[rank] if line[0] == epoch]
        assert sorted(int(index) for pair in handed for index in pair) == list(range(20))
    assert lines[0][-1] == "type DataLoader 5 20"
    handed = ledger.read(outcome.run.path / "data" / "ledger")
    assert audit.audit(handed) == []
    assert sum(line.batches for line in handed) == 20
    counted = outcome.of_kind("data")[-1]["loaders"]["loader"]
    assert counted["batches"] == 10


def test_units_and_a_datasets_exception(notebook: Notebook) -> None:
    notebook.define(LOADER)
    lines = streams(notebook.run(CELL, "--cpus 1 --units 6"))
    assert [len([line for line in lines[rank] if line[0] == "0"]) for rank in (0, 1)] == [3, 3]
    notebook.define("bad = taas.register(DataLoader(Numbers(100), batch_size=10))")
    outcome = notebook.run("for batch in bad:\n    pass", "--cpus 1")
    assert outcome.error is not None
    assert "ninety is bad" in outcome.shown
    assert "index 90" in outcome.shown
