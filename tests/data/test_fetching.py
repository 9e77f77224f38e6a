"""Tests of fetchers in a separate pool, whose hosts are processes on this machine."""

import _thread
import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from taas_magic.config import load_config
from taas_magic.errors import PoolError, RankFailed
from taas_magic.host.spec import RunSpec
from taas_magic.notebook import pools
from taas_magic.notebook.run import RunDriver
from taas_magic.pool.client import ConnectionEnded, PoolConnection
from tests.data import ledger
from tests.events import Line
from tests.eventually import HUNG_S, left_after
from tests.harness import Notebook, Outcome, below, on_event
from tests.rig.pools import enter, given_back, settings_in

SETTINGS = """
[pools.data]
engine = "local"
role = "data"
cores = 1
max_hosts = 2

[pools.late]
engine = "ssh"
hosts = ["localhost:1"]
"""

LOADERS = """
import os, time, taas, torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __init__(self, size, wait_s=0.0):
        self.size, self.wait_s = size, wait_s

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(self.wait_s)
        return torch.rand(4) + index, os.getppid()

torch.manual_seed(5)
loader = taas.register(DataLoader(Numbers(24), batch_size=2, shuffle=True))
slow = taas.register(DataLoader(Numbers(400, 0.01), batch_size=2))
"""

TRAIN = """
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(1)
weights = torch.zeros(4)
for epoch in range(2):
    for batch, _ in loader:
        step = batch.mean(0)
        dist.all_reduce(step)
        weights = 0.9 * weights + 0.1 * step
weights.tolist()
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a configuration folder with a data pool of two hosts."""
    return settings_in(tmp_path_factory.mktemp("config"), SETTINGS)


@pytest.fixture(scope="module")
def no_hosts_left(warm_notebook: Notebook, settings: Path) -> Iterator[None]:
    """Share the data pool among all tests; end the pool afterwards, and check that it is gone."""
    with given_back(warm_notebook, settings, "data"):
        yield


@pytest.fixture
def two_pools(
    warm_notebook: Notebook,
    settings: Path,
    no_hosts_left: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Notebook]:
    """Yield a notebook whose fetchers run in pool `data`; check afterwards that none is left."""
    enter(warm_notebook, settings, monkeypatch)
    warm_notebook.define(LOADERS)
    yield warm_notebook
    assert not left_after(running_in_data_pool)


def running_in_data_pool() -> list[str]:
    rows = pools.rows(load_config(Path.cwd()))
    hosts = next(row.status.hosts for row in rows if row.name == "data")
    return [run_id for host in hosts for run_id in host.runs]


def fetcher_hosts(outcome: Outcome) -> dict[int, str]:
    return {event["number"]: event["host"] for event in outcome.of_kind("fetcher")}


def handed(outcome: Outcome) -> list[ledger.Handed]:
    assert outcome.run is not None
    return ledger.read_ledgers(outcome.run.path / "data" / "ledger")


def test_weights_are_equal_wherever_the_loaders_run(two_pools: Notebook) -> None:
    seen = {}
    # Ranks need only one fetcher. Only all fetchers together can have so many batches ready.
    prefill = {"--cpus 2": "--prefill 12", "--cpus 3": "--prefill 18"}
    for flags in ("--cpus 0", "--cpus 1 --data-pool local", "--cpus 2", "--cpus 3"):
        outcome = two_pools.run(TRAIN, f"{flags} {prefill.get(flags, '')}")
        assert outcome.error is None, outcome.shown
        assert outcome.run is not None
        seen[flags] = outcome.run.result
        assert ledger.audit(handed(outcome)) == []
        hosts = fetcher_hosts(outcome)
        if flags == "--cpus 2":
            assert len(set(hosts.values())) == 2
            assert outcome.run.plan.notes[1:] == ()
        if flags == "--cpus 3":
            assert (len(hosts), len(set(hosts.values()))) == (3, 2)
            shared = '--cpus 3 needs 3 hosts, but pool "data" has 2 hosts: 3 fetchers share them'
            assert outcome.run.plan.notes[-1] == shared
    assert all(weights == seen["--cpus 0"] for weights in seen.values())
    assert seen["--cpus 0"][0] > 0


def test_each_of_two_loaders_has_its_own_host(two_pools: Notebook) -> None:
    source = "[len(set(int(pid) for _, pids in each for pid in pids)) for each in (loader, slow)]"
    outcome = two_pools.run(source, "--cpus 1")
    assert outcome.error is None, outcome.shown
    loaders = {event["number"]: set(event["workers"]) for event in outcome.of_kind("fetcher")}
    assert loaders == {0: {"loader"}, 1: {"slow"}}
    assert len(set(fetcher_hosts(outcome).values())) == 2


KILL = """
import contextlib, psutil
for number, (batch, pids) in enumerate(slow):
    if number == 5 and int(os.environ["RANK"]) == 0:
        fetcher = psutil.Process(int(pids[0]))
        supervisors = [p for p in fetcher.parents() if "supervisor" in " ".join(p.cmdline())]
        for process in VICTIMS(supervisors[0]):
            with contextlib.suppress(psutil.NoSuchProcess):  # a process may end with its parent
                process.kill()
"""

UNTIL_SAID = """
while not os.path.exists("said"):
    time.sleep(0.02)
"""


@contextlib.contextmanager
def said(notebook: Notebook, words: str) -> Iterator[None]:
    """Within the block, create the file `said` when a note of a run contains `words`.

    A cell with `UNTIL_SAID` waits for this file.
    """
    file = notebook.project / "said"
    is_said: Callable[[Line], bool] = lambda line: words in line.get("text", "")  # noqa: E731
    with (
        pytest.MonkeyPatch.context() as patch,
        on_event(patch, is_said, lambda run: file.touch()),
    ):
        yield
    file.unlink(missing_ok=True)


@pytest.mark.fault(18)
def test_a_host_with_fetchers_dies(two_pools: Notebook) -> None:
    """docs/faults.md 10 and 18: the other host provides the batches, and each batch comes once."""
    two_pools.define(
        "def VICTIMS(host):\n    return [host, *host.children(recursive=True)]\nimport psutil"
    )
    with said(two_pools, "is gone"):
        outcome = two_pools.run(f"{KILL}{UNTIL_SAID}number", "--cpus 2 --timeout 100")
    assert outcome.error is None, outcome.shown
    assert outcome.run is not None
    assert outcome.run.result == 99
    lines = handed(outcome)
    assert ledger.audit(lines) == []
    assert ledger.missing(lines, 200) == []
    (gone,) = (note["text"] for note in outcome.of_kind("note") if "is gone" in note["text"])
    assert gone.endswith("other fetchers provide their batches")
    assert "with fetcher " in gone


@pytest.mark.nightly
@pytest.mark.fault(20)
def test_all_hosts_with_fetchers_die(two_pools: Notebook) -> None:
    """docs/faults.md 20: the run fails, and no rank hangs."""
    two_pools.define(
        "def VICTIMS(host):\n"
        "    hosts = [p for p in host.parent().children() if 'supervisor' in str(p.cmdline())]\n"
        "    return [p for h in hosts for p in [h, *h.children(recursive=True)]]\n"
        "import psutil"
    )
    outcome = two_pools.run(KILL, "--cpus 2")
    assert isinstance(outcome.error, RankFailed)
    assert re.search('no fetcher of loader "slow" is left: host .* is gone: ', outcome.shown)
    notes = [note["text"] for note in outcome.of_kind("note")]
    assert any(text.endswith("no fetcher is left") for text in notes)


@pytest.mark.nightly
@pytest.mark.fault(20)
def test_hosts_with_fetchers_die_before_these_listen(
    two_pools: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/faults.md 20: no rank waits for a fetcher that never listens. The run fails."""
    launch = PoolConnection.launch_fetchers

    def launch_in_vain(connection: PoolConnection, run: RunSpec, *args: Any) -> list[str]:
        os.mkfifo(run.folder.path / "logs" / "fetcher-0.log")  # opening it blocks
        hosts = launch(connection, run, *args)
        for process in below(connection.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):  # a process may end with its parent
                process.kill()
        return hosts

    monkeypatch.setattr(PoolConnection, "launch_fetchers", launch_in_vain)
    outcome = two_pools.run(TRAIN, "--cpus 1 --timeout 100")
    assert isinstance(outcome.error, RankFailed)
    assert re.search('no fetcher of loader "loader" is left: host .* is gone: ', outcome.shown)


def test_a_fetcher_cannot_write_to_the_project_store(two_pools: Notebook) -> None:
    two_pools.define(
        "class Caching(Numbers):\n"
        "    def __getitem__(self, index):\n"
        "        open('cache.txt', 'a').write(f'{index}\\n')\n"
        "        return len(open('cache.txt').readlines()), os.system('touch by_shell 2>&-')\n"
        "caching = taas.register(DataLoader(Caching(4), batch_size=None))"
    )
    cell = f"seen = [tuple(map(int, pair)) for pair in caching]{UNTIL_SAID}seen"
    with said(two_pools, "not saved"):
        outcome = two_pools.run(cell, "--cpus 1 --timeout 100", gpus=1)
    assert outcome.error is None, outcome.shown
    assert outcome.run is not None
    assert sorted(count for count, _ in outcome.run.result) == [1, 2, 3, 4]
    assert all(refused for _, refused in outcome.run.result)
    assert not list(two_pools.project.glob("cache.txt")) + list(two_pools.project.glob("by_shell"))
    kept_out = "not saved (fetchers do not write the project store): cache.txt"
    assert kept_out in [note["text"] for note in outcome.of_kind("note")]


def test_an_unavailable_data_pool_fails_the_cell_and_leaves_no_run(
    two_pools: Notebook,
) -> None:
    before = sorted(two_pools.state_dir.glob("runs/*"))
    outcome = two_pools.run(TRAIN, "--cpus 1 --data-pool late")
    assert isinstance(outcome.error, PoolError)
    assert "localhost:1 cannot be reached" in outcome.shown
    assert sorted(two_pools.state_dir.glob("runs/*")) == before


def test_the_plan_names_the_hosts_of_fetchers(
    two_pools: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    two_pools.run("sum(1 for batch in loader)", "--cpus 2 --dry-run")
    said = capsys.readouterr().out
    assert "data pool data: 2 fetchers on 2 hosts" in said
    assert "  host 1: fetcher 1 for loader, 1 core" in said


@pytest.mark.nightly
def test_the_journal_has_the_hosts_of_fetchers_but_not_their_ports(
    two_pools: Notebook,
) -> None:
    outcome = two_pools.run("sum(1 for batch in loader)", "--cpus 2 --prefill 12")
    assert outcome.run is not None
    plan = json.loads((outcome.run.path / "plan.json").read_text())
    assert plan["data"]["pool"] == "data"
    assert set(fetcher_hosts(outcome)) == {0, 1}
    assert all("entry" not in event for event in outcome.of_kind("fetcher"))
    assert {event["number"] for event in outcome.of_kind("fetched")} <= {0, 1}


def test_prefilling_ends_with_the_process_of_the_fetchers_pool(two_pools: Notebook) -> None:
    def kill(run: RunDriver) -> None:
        psutil.Process(pools.named("data", load_config(Path.cwd())).connect().process.pid).kill()

    with (
        pytest.MonkeyPatch.context() as patch,
        on_event(patch, lambda event: event["kind"] == "fetched", kill) as seen,
    ):
        outcome = two_pools.run("list(slow)", "--cpus 1 --prefill 200 --timeout 600")
    assert seen and isinstance(outcome.error, ConnectionEnded)
    assert outcome.run is not None and outcome.run.state == "LOST"
    assert re.search(r'pool "data": its process \d+ was killed by SIGKILL', outcome.shown)


def test_an_interrupt_while_fetchers_start_leaves_no_fetcher(two_pools: Notebook) -> None:
    pools.down("data", load_config(two_pools.project))
    pool = pools.named("data", load_config(two_pools.project))
    original, over = pool.open, threading.Event()

    def interrupted(*arguments: Any) -> PoolConnection:
        _thread.interrupt_main()
        try:
            return original(*arguments)
        finally:
            over.set()

    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(pool, "open", interrupted)
        outcome = two_pools.run(TRAIN, "--cpus 1")
    assert over.wait(HUNG_S)
    assert isinstance(outcome.error, KeyboardInterrupt)
