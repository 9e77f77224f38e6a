"""Tests of Lightning and accelerate with a registered loader: each sample goes to one rank."""

import pytest

from tests.cellfiles import cells_of
from tests.harness import Notebook

LOADER, LIGHTNING, ACCELERATE, PLACED, GATHERED, PREDICTED, FABRIC = cells_of("trainers")


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
    assert [line for line in lines if line.startswith("dropping")] == ["dropping 0 1 2 3"]
    shorts = [line for line in lines if line.startswith("short")]
    assert shorts == ["short 0 1 2 3 4 5 6 7 0 1 2 3", "short 8 9 10 8 9 10"]
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


def test_accelerate_gathers_all_samples_of_a_step_where_units_end_the_loop(
    notebook: Notebook,
) -> None:
    notebook.define(LOADER)
    outcome = notebook.run(GATHERED, "--cpus 1 --units 2")
    assert outcome.error is None, outcome.shown
    assert outcome.lines[0] == ["short 0 1 2 3 4 5 6 7"]


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


def test_lightning_predicts_each_sample_once_and_refuses_to_overfit(notebook: Notebook) -> None:
    notebook.define(LOADER)
    outcome = notebook.run(PREDICTED, "--cpus 1")
    assert outcome.error is None, outcome.shown
    for name in ("plain", "registered", "stream", "unbatched"):
        lines = [line.split() for rank in (0, 1) for line in outcome.lines[rank]]
        found = [values for first, *values in lines if first == name]
        assert sorted(int(value) for values in found for value in values) == list(range(16)), name
    for rank in (0, 1):
        errors = [line for line in outcome.lines[rank] if line.startswith("error")]
        assert ["limit_train_batches" in error for error in errors] == [True, True]


def test_a_warning_says_that_fabric_discards_a_loaded_position(notebook: Notebook) -> None:
    notebook.define(LOADER)
    outcome = notebook.run(FABRIC, "--cpus 1")
    assert outcome.error is None, outcome.shown
    for rank in (0, 1):
        (warning,) = [line for line in outcome.lines[rank] if "set_epoch" in line]
        assert "discards the loaded position, batch 4 of epoch 1" in warning
        assert "fabric.to_device" in warning
