"""Tests of what a run with loaders shows: which ranks waited, the advice, and `--prefill`."""

import os
import signal
from collections.abc import Iterator

import pytest

from taas_magic.errors import RankFailed
from taas_magic.notebook import runs
from tests.data import ledger
from tests.events import Line
from tests.harness import Notebook, Outcome, on_event
from tests.nightly import nightly


@pytest.fixture
def small_buffer(notebook: Notebook) -> Iterator[None]:
    """Write a `taas.toml` in which a prefetch buffer has room for only one or two batches.

    Remove the file after the test.
    """
    settings = notebook.project / "taas.toml"
    settings.write_text('[data]\nbuffer = "100kB"\nrank_buffer = "1MB"\n')
    yield
    settings.unlink()


@pytest.fixture
def short_lease(notebook: Notebook) -> Iterator[None]:
    """Write a `taas.toml` in which ranks wait only 4 s for a fetcher; remove it after the test."""
    settings = notebook.project / "taas.toml"
    settings.write_text("[data]\nfetch_s = 4\n")
    yield
    settings.unlink()


LOADER = """
import time, taas, torch
from torch.utils.data import DataLoader, Dataset

class Pictures(Dataset):
    def __init__(self, size, wait_s=0.0):
        self.size, self.wait_s = size, wait_s

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(self.wait_s)
        return torch.full((64, 64), float(index))

torch.manual_seed(5)
"""
CELL = """
for epoch in range(2):
    for batch in loader:
        print(epoch, *(int(picture[0, 0]) for picture in batch), float(batch.sum()))
"""


def filled(outcome: Outcome) -> list[dict[str, float]]:
    """Return the events of a cell that report the progress of `--prefill`.

    Assert that the cell succeeded, and that no rank started before the last of these events.
    """
    assert outcome.error is None, outcome.shown
    kinds = [event["kind"] for event in outcome.events]
    if "filling" in kinds:
        last = len(kinds) - kinds[::-1].index("filling")
        assert kinds.index("started") >= last
    return outcome.of_kind("filling")


def test_a_run_with_slow_storage_shows_advice(notebook: Notebook) -> None:
    from matplotlib.figure import Figure

    notebook.define(LOADER)
    notebook.define("loader = taas.register(DataLoader(Pictures(160, 0.01), 4, num_workers=1))")
    # Without --prefill, ranks on a busy machine would wait longest for the first batch.
    outcome = notebook.run(CELL, "--cpus 1 --prefill 2")
    assert outcome.error is None and outcome.run is not None
    assert "for 'loader': its storage is slow; --cpus " in outcome.run.advice
    assert isinstance(outcome.run.plot(), Figure)
    old = runs.find(outcome.run.id)
    assert old.advice == outcome.run.advice
    assert 0.1 < outcome.run.waited["loader"] == old.waited["loader"] <= 1.0
    assert isinstance(old.plot(), Figure)
    counted = outcome.of_kind("data")[-1]["loaders"]["loader"]
    assert counted["batches"] == 40
    assert counted["span_s"] >= counted["waited_s"] > counted["first_s"] > 0
    stats = outcome.of_kind("fetched")[-1]["loaders"]["loader"]
    assert stats["fetch_s"] > 10 * stats["fetch_cpu_s"] > 0


COMPUTES = """
import time

batches, began = iter(loader), time.monotonic()
for batch in batches:
    time.sleep(0.3 + 12 * (time.monotonic() - began))  # far longer than the wait for the batch
    began = time.monotonic()
"""


def test_a_rank_that_does_not_wait_gets_no_advice(notebook: Notebook) -> None:
    notebook.define(LOADER)
    notebook.define("loader = taas.register(DataLoader(Pictures(40), 4))")
    outcome = notebook.run(COMPUTES, "--cpus 1 --prefill 10")
    assert outcome.error is None and outcome.run is not None
    assert outcome.run.advice == ""


def test_ranks_start_when_the_prefill_is_complete(notebook: Notebook) -> None:
    notebook.define(LOADER)
    notebook.define("loader = taas.register(DataLoader(Pictures(80, 0.02), 4, num_workers=1))")
    events = filled(outcome := notebook.run(CELL, "--cpus 1 --prefill 12"))
    assert events and events[-1]["wanted"] == 12
    stats = [e for e in outcome.events if e["kind"] in ("fetched", "started")]
    before = stats[: [e["kind"] for e in stats].index("started")]
    assert max(e["loaders"]["loader"]["ready"] for e in before) >= 12
    assert sum(line.batches for line in handed(outcome)) == 40


def test_prefill_all_waits_until_all_units_are_ready(notebook: Notebook) -> None:
    notebook.define(LOADER)
    notebook.define("loader = taas.register(DataLoader(Pictures(40), 4, num_workers=2))")
    filled(outcome := notebook.run(CELL, "--cpus 2 --units 16 --prefill all"))
    assert sum(line.batches for line in handed(outcome)) == 16
    stats = [e for e in outcome.events if e["kind"] in ("fetched", "started")]
    started = [e["kind"] for e in stats].index("started")
    most: dict[int, int] = {}
    for e in stats[:started]:
        most[e["number"]] = max(e["loaders"]["loader"]["ready"], most.get(e["number"], 0))
    assert sum(most.values()) >= 16


def handed(outcome: Outcome) -> list[ledger.Handed]:
    assert outcome.run is not None
    found = ledger.read_ledgers(outcome.run.path / "data" / "ledger")
    assert ledger.audit(found) == []
    return found


def test_ranks_start_when_the_buffer_is_full_and_miss_no_batch(
    notebook: Notebook, small_buffer: None
) -> None:
    notebook.define(LOADER)
    notebook.define("loader = taas.register(DataLoader(Pictures(80), 4, shuffle=True))")
    plain = notebook.run(CELL, "--cpus 0")
    filled(outcome := notebook.run(CELL, "--cpus 2 --units 40 --prefill all"))
    assert outcome.lines == plain.lines
    stats = [event["loaders"]["loader"] for event in outcome.of_kind("fetched")]
    assert stats[-1]["budget_bytes"] <= 100_000
    assert max(one["ready"] for one in stats) < 20


def is_filling(line: Line) -> bool:
    return bool(line["kind"] == "filling" and line["done"])


def test_prefill_can_be_interrupted(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook.define(LOADER)
    notebook.define("loader = taas.register(DataLoader(Pictures(4000, 0.02), 4, num_workers=1))")
    with on_event(monkeypatch, is_filling, lambda run: os.kill(os.getpid(), signal.SIGINT)):
        outcome = notebook.run(CELL, "--cpus 1 --prefill 900")
    assert isinstance(outcome.error, KeyboardInterrupt)
    assert outcome.run is not None and outcome.run.state == "INTERRUPTED"
    assert outcome.of_kind("started") == []
    assert notebook.run("print('usable')", gpus=1).error is None


def test_an_exception_of_a_worker_during_the_prefill_is_shown(notebook: Notebook) -> None:
    notebook.define(LOADER)
    notebook.define("loader = taas.register(DataLoader(Pictures(40), 4, collate_fn=max))")
    outcome = notebook.run(CELL, "--cpus 1 --units 20 --prefill all")
    assert outcome.error is not None
    assert "ambiguous" in outcome.shown


SAYS_WHO = """
import os, psutil, warnings

class SaysWho(Pictures):
    def __getitem__(self, index):
        return psutil.Process(os.getppid()).ppid()  # the parent of a worker's parent: the fetcher

warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
"""
STOPS = """
import os, signal
for number, batch in enumerate(loader):
    if number == 100:
        os.kill(int(batch[0]), signal.SIGSTOP)
"""


@pytest.mark.parametrize("workers", [1, nightly(8)])
def test_a_run_whose_fetcher_does_not_answer_fails_and_names_the_fetcher(
    notebook: Notebook, short_lease: None, workers: int
) -> None:
    notebook.define(LOADER)
    notebook.define(SAYS_WHO)
    loader = f"DataLoader(SaysWho(100_000), 1, num_workers={workers})"
    notebook.define(f"loader = taas.register({loader})")
    outcome = notebook.run(STOPS, "--cpus 1")
    assert isinstance(outcome.error, RankFailed)
    assert 'no fetcher of loader "loader" has answered for ' in outcome.shown
    assert "fetcher 0 on this host is silent" in outcome.shown


def test_a_fetcher_that_is_stopped_is_killed_and_the_message_says_so(notebook: Notebook) -> None:
    notebook.define(LOADER)
    notebook.define(SAYS_WHO)
    notebook.define("loader = taas.register(DataLoader(SaysWho(100_000), 1, num_workers=1))")
    outcome = notebook.run(STOPS, "--cpus 1", gpus=1)
    assert isinstance(outcome.error, RankFailed)
    assert "ended: it was stopped (SIGSTOP) for 5 s and killed (see logs/fetcher-0" in outcome.shown


SAYS_PARENT = """
import os, signal

class SaysParent(Pictures):
    def __getitem__(self, index):
        return os.getppid(), index
"""
KILLS_PARENT = """
seen = []
for parent, index in loader:
    seen.append(int(index))
    if len(seen) == 3:
        os.kill(int(parent), signal.SIGKILL)
seen
"""


def test_the_last_fetcher_is_restarted_as_often_as_max_restarts_allows(
    notebook: Notebook,
) -> None:
    notebook.define(LOADER)
    notebook.define(SAYS_PARENT)
    notebook.define("loader = taas.register(DataLoader(SaysParent(2000), 1, num_workers=1))")
    outcome = notebook.run(KILLS_PARENT, "--cpus 1", gpus=1)
    assert isinstance(outcome.error, RankFailed)
    assert 'no fetcher of loader "loader" is left: fetcher 0 on host' in outcome.shown
    again = notebook.run(KILLS_PARENT, "--cpus 1 --max-restarts 1", gpus=1)
    assert again.error is None and again.run is not None, again.shown
    assert again.run.result == list(range(2000))
    notes = [note["text"] for note in again.of_kind("note")]
    assert "all fetchers have ended and start again (restart 1 of 1)" in notes
    assert not again.of_kind("restart")
