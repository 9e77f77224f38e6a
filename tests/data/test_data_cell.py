"""Tests of registered loaders in `%%taas` cells of a notebook, with and without fetchers."""

import pytest
import torch

from tests.cellfiles import cells_of
from tests.data import ledger
from tests.harness import Notebook, Outcome

LOADER, CELL, RESUMED = cells_of("resumed_training")


def streams(outcome: Outcome) -> dict[int, list[str]]:
    assert outcome.error is None, outcome.shown
    return outcome.lines


@pytest.mark.parametrize("cpus", [0, 1, 3])
def test_a_cell_gets_the_same_stream_for_every_number_of_hosts(
    notebook: Notebook,
    cpus: int,
    streams_seen: dict[str, dict[int, list[str]]] = {},  # noqa: B006
) -> None:
    notebook.define(LOADER)
    outcome = notebook.run(CELL, f"--cpus {cpus}")
    lines = streams(outcome)
    assert streams_seen.setdefault("lines", lines) == lines
    for epoch in "01":
        pairs = [line.split()[1:] for rank in lines for line in lines[rank] if line[0] == epoch]
        assert sorted(int(index) for pair in pairs for index in pair) == list(range(20))
    assert lines[0][-1] == "type DataLoader 5 20"
    assert outcome.run is not None
    handed = ledger.read_ledgers(outcome.run.path / "data" / "ledger")
    assert ledger.audit(handed) == []
    assert sum(line.batches for line in handed) == 20
    counted = outcome.of_kind("data")[-1]["loaders"]["loader"]
    assert counted["batches"] == 10


@pytest.mark.fault(21)
def test_units_and_a_datasets_exception(notebook: Notebook) -> None:
    notebook.define(LOADER)
    lines = streams(notebook.run(CELL, "--cpus 1 --units 6"))
    assert [len([line for line in lines[rank] if line[0] == "0"]) for rank in (0, 1)] == [3, 3]
    unfed = notebook.run("1", '--cpus 1 --prefill 2 --name "#1 try" # --units 6')
    assert unfed.error is None and unfed.run is not None and unfed.run.name == "#1 try"
    [note] = [note for note in unfed.run.head.notes if "no registered loader" in note]
    assert note.startswith("--cpus, --prefill: no effect") and "taas.register(" in note
    longest = "name='é' * 50"
    notebook.define(f"bad = taas.register(DataLoader(Numbers(100), batch_size=10), {longest})")
    outcome = notebook.run("for batch in bad:\n    pass", "--cpus 1")
    assert outcome.error is not None
    assert "ninety is bad" in outcome.shown
    assert "index 90" in outcome.shown


@pytest.mark.fault(22)
def test_a_rank_that_dies_while_it_uses_a_batch(notebook: Notebook) -> None:
    notebook.define(LOADER)
    notebook.define(RESUMED)
    notebook.define("loader = taas.register(DataLoader(Numbers(40), 2, shuffle=True))")
    whole = notebook.run("weights = train('whole.pt')", "--cpus 1 --out weights")
    assert whole.error is None, whole.shown
    undisturbed = notebook.shell.user_ns["weights"]
    flags = "--cpus 2 --out weights --max-restarts 1"
    outcome = notebook.run("weights = train('torn.pt', dies_at=13)", flags)
    assert outcome.error is None, outcome.shown
    assert torch.equal(notebook.shell.user_ns["weights"], undisturbed)
    assert outcome.lines[0].count("from step 13") == 1
    assert outcome.run is not None
    handed = ledger.read_ledgers(outcome.run.path / "data" / "ledger")
    assert ledger.audit(handed) == []
    assert {line.attempt for line in handed} == {0, 1}
    assert sum(line.batches for line in handed if line.attempt) == 2 * (20 - 13)
    for rank in (0, 1):
        steps = [line.split()[1:] for line in whole.lines[rank][1:]]
        after = [line.split()[1:] for line in outcome.lines[rank] if line.startswith("1 ")]
        assert after == steps[13:]


BLOCKS = """
import resource, taas, torch
from torch.utils.data import DataLoader

small = taas.register(DataLoader([torch.ones(1 << 18)] * 40))  # 1 MiB a batch
large = taas.register(DataLoader([torch.ones(20 << 20)]))
"""
LIMITED = """
import psutil
[starter] = psutil.Process().children()  # its own servers, not yet started, come from it
resource.prlimit(starter.pid, resource.RLIMIT_FSIZE, (64 << 20, resource.RLIM_INFINITY))
print(sum(batch.shape[1] for batch in small) >> 18)
next(iter(large))
"""


def test_a_limit_of_file_sizes_limits_only_the_memory_for_batches(notebook: Notebook) -> None:
    notebook.define(BLOCKS)
    outcome = notebook.run(LIMITED, "--cpus 0", gpus=1)
    assert outcome.lines[0] == ["40"]
    assert "files can have at most 67 MB here (ulimit -f)" in outcome.shown


def test_a_change_of_the_dataset_in_ranks_is_reported(notebook: Notebook) -> None:
    notebook.define(LOADER)
    notebook.define("numbers = Numbers(8); loader = taas.register(DataLoader(numbers, 2))")
    outcome = notebook.run("numbers.stage = 2\nfor batch in loader: pass", gpus=2)
    assert outcome.error is None and outcome.run is not None
    [note] = [note for note in outcome.run.head.notes if "changed" in note]
    assert note.startswith(
        "numbers was changed in the ranks, but not in the fetchers of loader loader"
    )


def test_a_result_that_contains_a_loader_has_the_notebooks_loader(notebook: Notebook) -> None:
    notebook.define(LOADER)
    notebook.define("class Trainer: pass\ntrainer = Trainer(); trainer.loader = loader")
    outcome = notebook.run("trainer.seen = len([*trainer.loader])", "--out trainer")
    assert outcome.error is None, outcome.shown
    trainer = notebook.shell.user_ns["trainer"]
    assert trainer.loader is notebook.shell.user_ns["loader"] and trainer.seen > 0
