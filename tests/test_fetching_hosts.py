"""Fetchers on other hosts than the ranks, over a network that is cut, slowed and lossy."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from taas_magic import launch, registry
from taas_magic.capture import pickling
from taas_magic.data import audit, ledger
from taas_magic.taas_toml import load
from tests.harness import Notebook, Outcome
from tests.rig.hosts import Hosts, hosts_up

pytestmark = [pytest.mark.network, pytest.mark.timeout(600)]

GONE_WITHIN_S = 60.0
FETCHERS = (2, 3)
"""The hosts of the data pool; the ranks are on host 1."""

LOADERS = """
import os, socket, time, taas, torch
from torch.utils.data import DataLoader, Dataset

class Pictures(Dataset):
    def __init__(self, size, width=16, wait_s=0.0):
        self.size, self.width, self.wait_s = size, width, wait_s

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(self.wait_s)
        return torch.rand(self.width) + index

torch.manual_seed(5)
"""

TRAIN = """
weights = torch.zeros(16, dtype=torch.float64)
for number, batch in enumerate(loader):
    for picture in batch:
        weights = 0.9 * weights + 0.1 * picture[:16]
    if number == 3:
        print("under way", flush=True)
(socket.gethostname(), number + 1, weights.tolist())
"""


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    yield
    registry._registered.clear()
    pickling.STAND_INS.clear()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_up(3) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def pools(warm_notebook: Notebook, hosts: Hosts) -> Iterator[None]:
    """The notebook's pools: `g` with host 1, `c` for data with hosts 2 and 3."""
    settings = warm_notebook.project / "taas.toml"
    data = [hosts.name(number) for number in FETCHERS]
    settings.write_text(
        pool_table("g", [hosts.name(1)], hosts.ssh_config)
        + pool_table("c", data, hosts.ssh_config, 'role = "data"')
    )
    yield
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAAS_STATE_DIR", str(warm_notebook.state_dir))
        patch.chdir(warm_notebook.project)
        config = load(warm_notebook.project)
        settings.unlink()
        for name in ("g", "c"):
            launch.down(name, config)
    for number in range(1, hosts.count + 1):
        _, left = psutil.wait_procs(hosts.processes(number), timeout=GONE_WITHIN_S)
        assert not left


def pool_table(name: str, names: list[str], ssh_config: Path, more: str = "") -> str:
    return f"""
[pools.{name}]
engine = "ssh"
hosts = {names}
python = "{sys.executable}"
gpus = 0
cores = 1
options = {{ ssh_config = "{ssh_config}" }}
{more}
"""


@pytest.fixture
def remote(
    warm_notebook: Notebook, pools: None, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Notebook]:
    """A notebook with these pools; after each test no fetcher is left on its hosts."""
    monkeypatch.setenv("TAAS_STATE_DIR", str(warm_notebook.state_dir))
    monkeypatch.chdir(warm_notebook.project)
    warm_notebook.define(LOADERS)
    yield warm_notebook
    deadline = time.monotonic() + GONE_WITHIN_S
    while (left := fetchers_on(hosts)) and time.monotonic() < deadline:
        threading.Event().wait(0.2)
    assert not left


def fetchers_on(hosts: Hosts) -> list[psutil.Process]:
    """The fetchers and lanes on the data pool's hosts: what a forkserver has started."""
    found = []
    for number in FETCHERS:
        for process in hosts.processes(number):
            with contextlib.suppress(psutil.Error):
                parents = [" ".join(parent.cmdline()) for parent in process.parents()]
                if sum("taas_magic.remote.agent" in words for words in parents) > 1:
                    found.append(process)
    return found


def train(notebook: Notebook, flags: str, source: str = TRAIN, gpus: int = 1) -> Outcome:
    outcome = notebook.run(source, f"--pool g {flags}", gpus=gpus)
    assert outcome.error is None, outcome.shown
    return outcome


def result(outcome: Outcome) -> tuple[str, int, list[float]]:
    assert outcome.run is not None
    handed = ledger.read(outcome.run.path / "data" / "ledger")
    host, batches, weights = outcome.run.result
    assert audit.audit(handed) == []
    assert audit.missing(handed, batches) == []
    return host, batches, weights


def received(hosts: Hosts, number: int) -> int:
    """Bytes that have arrived at a host."""
    return int(hosts.exec(number, "cat", "/sys/class/net/eth0/statistics/rx_bytes"))


def sent_by_caller(hosts: Hosts) -> int:
    return psutil.net_io_counters(pernic=True)[f"{hosts.prefix}br"].bytes_sent


def test_data_goes_from_fetcher_host_to_rank_host_and_nowhere_else(
    remote: Notebook, hosts: Hosts
) -> None:
    remote.define("loader = taas.register(DataLoader(Pictures(40, width=500_000), 2))")
    here = result(train(remote, "--cpus 0"))
    before, by_caller = received(hosts, 1), sent_by_caller(hosts)
    outcome = train(remote, "--cpus 2")
    arrived = received(hosts, 1) - before
    by_caller = sent_by_caller(hosts) - by_caller
    assert result(outcome) == here
    assert here[:2] == (hosts.name(1), 20)
    used = {event["host"] for event in outcome.of_kind("fetcher")}
    assert used == {hosts.name(number) for number in FETCHERS}
    data_bytes = 40 * 500_000 * 4
    assert arrived > data_bytes
    assert by_caller < data_bytes / 4
