"""Tests that batches, states and exceptions in a cell equal those of a local DataLoader.

Each test iterates a group of loaders in one cell, with several numbers of fetchers.
"""

import json
import sys
import types
import warnings
from typing import Any

import pytest
import torch

from taas_magic.data.sharding import seed_of
from tests.cellfiles import cells_of
from tests.harness import Notebook, Outcome
from tests.nightly import nightly

SEED = 5
HAS_NOTES = HAS_GROUPS = sys.version_info >= (3, 11)
WAYS = [nightly(0, 3), (1, 2), nightly(3, 1)]
"""Pairs of a number of fetchers and a number of ranks."""

SHOW, CELL = cells_of("shown_batches")


def register(notebook: Notebook, source: str) -> None:
    """Run `source` in the notebook, and register the loaders that its function `make` returns.

    `make` returns a dict; each key is the name of its loader.
    """
    notebook.define(SHOW + source)
    notebook.define(
        f"import taas, torch; torch.manual_seed({SEED})\n"
        "loaders = {k: taas.register(v, name=k) for k, v in make().items()}"
    )


def remote(
    notebook: Notebook, cpus: int, ranks: int, epochs: int = 1
) -> dict[str, list[list[object]]]:
    """Run a cell that iterates all loaders, and return the batches of all ranks together.

    Returns:
        For each loader's name, a list of epochs. Each epoch is a list of batches in their order.
    """
    notebook.define(f"EPOCHS = {epochs}")
    outcome = notebook.run(CELL, f"--cpus {cpus}", gpus=ranks)
    assert outcome.error is None, outcome.shown
    lines = handed(outcome)
    found: dict[str, list[tuple[int, list[object]]]] = {}
    for (name, epoch), by_rank in lines.items():
        most = max(map(len, by_rank.values()))
        steps = [by_rank[rank][step] for step in range(most) for rank in sorted(by_rank)]
        found.setdefault(name, []).append((epoch, steps))
    return {name: [steps for _, steps in sorted(found[name])] for name in found}


def handed(outcome: Outcome) -> dict[tuple[str, int], dict[int, list[object]]]:
    found: dict[tuple[str, int], dict[int, list[object]]] = {}
    for rank, lines in outcome.lines.items():
        for name, epoch, batch in map(json.loads, lines):
            found.setdefault((name, epoch), {}).setdefault(rank, []).append(batch)
    return found


def defined(source: str) -> dict[str, Any]:
    """Run `source` in a new module, which workers can import; return the module's variables."""
    module = sys.modules["taas_tests_local"] = types.ModuleType("taas_tests_local")
    exec(SHOW + source, vars(module))
    return vars(module)


def local(source: str, epochs: int = 1) -> dict[str, list[list[object]]]:
    """Return the batches of local loaders: for each loader's name, a list of epochs.

    Each epoch has the seed that a registered loader would use.
    """
    space = defined(source)
    given: dict[str, list[list[object]]] = {}
    for name, loader in space["make"]().items():
        for epoch in range(epochs):
            for part in (loader.sampler, loader.dataset):
                getattr(part, "set_epoch", int)(epoch)
            torch.manual_seed(seed_of(SEED, epoch))
            batches = [space["show"](batch) for batch in loader]
            given.setdefault(name, []).append(json.loads(json.dumps(batches)))
    return given


def compare(notebook: Notebook, source: str, cpus: int, ranks: int, epochs: int = 1) -> None:
    """Assert that ranks get the batches of local loaders.

    If the last step has too few batches, the epoch's first batches must fill it.
    """
    register(notebook, source)
    found, expected = remote(notebook, cpus, ranks, epochs), local(source, epochs)
    for name in expected:
        for epoch, steps in enumerate(expected[name]):
            padding = steps[: -len(steps) % ranks]
            assert found.get(name, [[]] * epochs)[epoch] == steps + padding, (name, epoch)


[REUSED] = cells_of("reused_memory")


@pytest.mark.parametrize(("cpus", "ranks"), WAYS)
def test_datasets_that_reuse_memory(notebook: Notebook, cpus: int, ranks: int) -> None:
    compare(notebook, REUSED, cpus, ranks)


[INDICES] = cells_of("index_kinds")


@pytest.mark.parametrize(("cpus", "ranks"), WAYS)
def test_indices_arrive_as_the_sampler_gave_them(notebook: Notebook, cpus: int, ranks: int) -> None:
    compare(notebook, INDICES, cpus, ranks)


STATEFUL, TAKE = cells_of("stateful_streams")
TAKEN = (
    {"one": 70, "two": 70, "large": 70},
    {"one": 10, "two": 150, "large": 3},
    {"one": 5, "two": 9},
    {"one": 200, "two": 9},
)
"""Number of batches of each stream that each run reads. Run n then reads 7 n more batches."""


@pytest.mark.parametrize("cpus", [nightly(0), 1, nightly(3)])
def test_a_stream_continues_after_each_resume(notebook: Notebook, cpus: int) -> None:
    register(notebook, STATEFUL)
    expected = local(STATEFUL)
    found: dict[str, list[object]] = {name: [] for name in expected}
    for number, counts in enumerate(TAKEN):
        notebook.define(f"counts, again, cpus = {counts}, {7 * number}, {cpus}")
        outcome = notebook.run(TAKE, f"--cpus {cpus}", gpus=1)
        assert outcome.error is None, outcome.shown
        lines = handed(outcome)
        for name, count in counts.items():
            assert len(lines[name, 0][0]) == count + 7 * number
            found[name] += lines[name, 0][0]
    for name, batches in found.items():
        assert batches == expected[name][0][: len(batches)], name


FAILING, CATCH = cells_of("failing_datasets")


AT_THE_BEGINNING = {"begins": "LookupError", "init": "OSError", "sampling": "ArithmeticError"}
"""Loaders whose first batch raises, and the exception's type. The first two end torch's worker."""


def caught(notebook: Notebook, cpus: int) -> dict[str, Any]:
    outcome = notebook.run(CATCH, f"--cpus {cpus}", gpus=1)
    assert outcome.error is None, outcome.shown
    return {name: by_rank[0][0] for (name, _), by_rank in handed(outcome).items()}


def caught_here() -> dict[str, Any]:
    """Return the outcomes of the local loaders of `FAILING`, by name.

    The loaders `exit` and those in `AT_THE_BEGINNING` are left out. So is `group`, because torch
    cannot send an exception group from a worker.
    """
    space = defined(FAILING)
    lines: list[str] = []
    made = space["make"]()
    left_out = {"group", "exit", *AT_THE_BEGINNING}
    space["loaders"] = {name: made[name] for name in made if name not in left_out}
    exec(CATCH, space | {"print": lines.append})
    return {name: outcome for name, _, outcome in map(json.loads, lines)}


@pytest.mark.parametrize("cpus", [nightly(0), 1, nightly(3)])
def test_a_datasets_exceptions_are_raised_as_a_local_loader_raises_them(
    notebook: Notebook, cpus: int
) -> None:
    register(notebook, FAILING)
    found, expected = caught(notebook, cpus), caught_here()

    def kinds(outcome: list[Any]) -> list[Any]:
        return [one[0] if len(one) == 4 else one for one in outcome]

    for name in expected:
        assert kinds(found[name]) == kinds(expected[name]), name
        # an exception that takes no message has a note with its origin (Python 3.11 and later)
        told = [one[2] for one in found[name] if len(one) == 4]
        assert all(told) or (name == "silent" and not HAS_NOTES), name
    first = {name: found[name][0][0] for name in AT_THE_BEGINNING}
    assert first == AT_THE_BEGINNING
    if HAS_GROUPS:
        kind, inner, is_told, _ = found["group"][2]
        assert (kind, inner, is_told) == ("ExceptionGroup", ["KeyError", "ValueError"], True)
    kind, _, is_told, text = found["exit"][2]
    assert (kind, is_told) == ("RuntimeError", True)
    assert "SystemExit: 3" in text
    assert "index 5" in text
    assert [len(found[name]) for name in ("group", "exit")] == [4, 4], "the next batches come"


def test_a_failed_cell_shows_the_datasets_traceback(notebook: Notebook) -> None:
    register(notebook, FAILING)
    for name, words in {"value": "five is bad", "group": "inner", "exit": "SystemExit: 3"}.items():
        outcome = notebook.run(f"for batch in loaders[{name!r}]:\n    pass", "--cpus 1", gpus=1)
        assert "Original" in outcome.shown, name
        assert "index 5" in outcome.shown, name
        assert words in outcome.shown, name
        assert "in __getitem__" in outcome.shown, name


THREADS, IN_THREADS, BESIDE_A_DRAW, BESIDE_A_FORK = cells_of("threads_and_forks")


@pytest.mark.parametrize("cpus", [0, nightly(1)])
def test_loaders_in_threads_do_not_affect_each_other_or_the_main_thread(
    notebook: Notebook, cpus: int
) -> None:
    register(notebook, THREADS)
    whole = remote(notebook, cpus, 1)
    outcome = notebook.run(IN_THREADS, f"--cpus {cpus}", gpus=1)
    assert outcome.error is None, outcome.shown
    found = {name: by_rank[0][0] for (name, _), by_rank in handed(outcome).items()}
    assert found.pop("same"), "the main thread's random numbers are its own"
    assert found == {name: whole[name][0] for name in whole}


def test_a_lock_that_a_thread_of_the_cell_holds_does_not_block_loaders(notebook: Notebook) -> None:
    register(notebook, THREADS)
    notebook.define("import json")
    whole = remote(notebook, 0, 1)
    outcome = notebook.run(BESIDE_A_DRAW, "--cpus 0", gpus=1)
    assert outcome.error is None, outcome.shown
    found = {name: by_rank[0] for (name, _), by_rank in handed(outcome).items()}
    assert found == {name: whole[name][0] for name in whole}


@pytest.mark.parametrize("cpus", [nightly(0), 1])
def test_a_fork_of_the_rank_has_its_own_connections(notebook: Notebook, cpus: int) -> None:
    register(notebook, THREADS)
    notebook.define("import json")
    whole = remote(notebook, cpus, 1, epochs=2)
    outcome = notebook.run(BESIDE_A_FORK, f"--cpus {cpus}", gpus=1)
    assert outcome.error is None, outcome.shown
    found = {name: by_rank[0] for (name, _), by_rank in handed(outcome).items()}
    both = ("the rank's", "the fork's")
    assert found == {f"{who} {name}": whole[name][1] for name in whole for who in both}


[OWN_RANDOMNESS] = cells_of("own_randomness")


WITH_ALL = """
import glob, time
run = f"{os.environ['TAAS_STATE_DIR']}/runs/{os.environ['TORCHELASTIC_RUN_ID']}"
while len(glob.glob(f"{run}/data/fetchers/*.json")) < CPUS:
    time.sleep(0.05)
"""
"""Start of a cell that waits until all fetchers run.

A fetcher that prepares a stream before the others start does not see that its epochs differ.
"""


@pytest.mark.parametrize("cpus", [nightly(0), nightly(1), 3])
def test_a_datasets_own_random_generator_or_epoch_causes_a_warning(
    notebook: Notebook, cpus: int
) -> None:
    with pytest.warns(UserWarning) as told:
        register(notebook, OWN_RANDOMNESS)
    said = [str(one.message) for one in told if "random generator of its own" in str(one.message)]
    assert len(said) == 3
    assert '"noisy"' in said[0]
    assert "(transforms[0].rng)" in said[0]
    assert "--cpus" in said[0]
    assert '"shuffled"' in said[1]
    assert "set_epoch" in said[1]
    assert '"shuffled by a dict"' in said[2]
    assert "(held['r'])" in said[2]
    found, expected = dict[str, dict[int, list[object]]](), local(OWN_RANDOMNESS, epochs=3)
    notebook.define("EPOCHS = 3")
    cell = "import os" + WITH_ALL.replace("CPUS", str(cpus)) + CELL
    outcome = notebook.run(cell, f"--cpus {cpus}", gpus=1)
    assert outcome.error is None, outcome.shown
    lines = outcome.lines[0]
    warned = [line for line in lines if "counts its epochs in its attribute" in line]
    assert "\"counting\" counts its epochs in its attribute 'epoch'" in warned[0]
    assert '"counting in a dict" counts' in warned[1] and "state['epoch']" in warned[1]
    assert len(warned) == 2
    for name, epoch, batch in map(json.loads, (line for line in lines if line.startswith("["))):
        found.setdefault(name, {}).setdefault(epoch, []).append(batch)
    for name in ("told", "workers"):
        assert [found[name][epoch] for epoch in range(3)] == expected[name], name
    for name in ("counting", "counting in a dict"):
        assert found[name] == dict.fromkeys(range(3), expected[name][0]), name


UNSEEDED, SEEN = cells_of("unseeded_orders")


@pytest.mark.parametrize("cpus", [0, 2])
def test_ranks_share_an_unseeded_order_or_get_a_warning(notebook: Notebook, cpus: int) -> None:
    register(notebook, UNSEEDED)
    outcome = notebook.run(SEEN, f"--cpus {cpus}")
    assert outcome.error is None and outcome.run is not None, outcome.shown
    seen = outcome.run.result
    said = "\n".join(line for lines in outcome.lines.values() for line in lines)
    assert '"worker" gives the dataset a random generator of its own (rng)' in said
    of_all = ["large", "sampler", "seeded", "worker", *([] if not cpus else ["endless", "stream"])]
    for name in of_all:
        for mine, other in seen[name]:
            assert sorted(mine + other) == list(range(40)), name
    for mine, other in seen["bunches"]:
        assert {*mine, *other} == set(range(40))
    assert ("batch 0 of epoch 0 differs between rank" in said) is (not cpus)
    assert 'loader "seeded": batch' not in said
    if not cpus:
        for both in seen["endless"]:  # the first rank gets its own order, and the other a message
            assert [type(mine) for mine in sorted(both, key=repr)] == [str, list]
            assert any("use --cpus 1" in mine for mine in both if isinstance(mine, str))


[KINDS] = cells_of("batch_kinds")


@pytest.mark.parametrize(("cpus", "ranks"), [nightly(0, 1), (1, 2)])
def test_datasets_and_batches_of_many_kinds(notebook: Notebook, cpus: int, ranks: int) -> None:
    with warnings.catch_warnings():  # torch warns of nested tensors and read-only arrays
        compare(notebook, KINDS, cpus, ranks)


[HABITS] = cells_of("dataset_habits")


@pytest.mark.parametrize(("cpus", "ranks"), [nightly(0, 2), (1, 1)])
def test_datasets_with_unusual_code_over_two_epochs(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, cpus: int, ranks: int
) -> None:
    (notebook.project / "habits.txt").write_text("beside the notebook")
    monkeypatch.setenv("HABITS", "set in the notebook")
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():  # torch warns of a dataset with too many samples
            compare(notebook, HABITS, cpus, ranks, epochs=2)
    finally:
        torch.set_default_dtype(torch.float32)


OWN_ITER = """
import taas
from torch.utils.data import DataLoader

class Doubling(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield 2 * batch
"""


def test_a_loader_with_its_own_iter_is_refused(notebook: Notebook) -> None:
    notebook.define(OWN_ITER)
    with pytest.raises(TypeError, match="Doubling is a DataLoader with an `__iter__` of its own"):
        notebook.define("loader = taas.register(Doubling(list(range(4))))")
