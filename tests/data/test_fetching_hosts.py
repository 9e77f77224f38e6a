"""Tests of fetchers on other hosts than the ranks, over a slow, lossy or broken network."""

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest

from taas_magic.config import load_config
from taas_magic.errors import PoolError
from taas_magic.notebook import pools
from tests.data import ledger
from tests.events import Line
from tests.eventually import HUNG_S, left_after
from tests.harness import Notebook, Outcome, on_event
from tests.rig.hosts import Hosts, hosts_up
from tests.rig.pools import ssh_pool

pytestmark = [pytest.mark.network]

BUFFER_KIB = 64
BATCH_BYTES = 2 * 2_000 * 4
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


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_up(3) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def far_pools(warm_notebook: Notebook, hosts: Hosts) -> Iterator[None]:
    """Add two pools to the notebook: `g` with host 1, and the data pool `c` with hosts 2 and 3.

    After the tests, end the pools, and check that no process is left on the hosts.
    """
    settings = warm_notebook.project / "taas.toml"
    data = ssh_pool("c", hosts, FETCHERS, gpus=0, more='role = "data"')
    settings.write_text(ssh_pool("g", hosts, [1], gpus=0) + data)
    yield
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAAS_STATE_DIR", str(warm_notebook.state_dir))
        patch.chdir(warm_notebook.project)
        config = load_config(warm_notebook.project)
        settings.unlink()
        for name in ("g", "c"):
            pools.down(name, config)
    for number in range(1, hosts.count + 1):
        _, left = psutil.wait_procs(processes_of(hosts, number), timeout=HUNG_S)
        assert not left


def processes_of(hosts: Hosts, number: int) -> list[psutil.Process]:
    """Return the processes of a host; an empty list if the host is powered off."""
    try:
        return hosts.processes(number)
    except psutil.NoSuchProcess:
        return []


@pytest.fixture
def remote(
    warm_notebook: Notebook, far_pools: None, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Notebook]:
    """Yield a notebook with the pools; after each test, check that no fetcher is left."""
    monkeypatch.setenv("TAAS_STATE_DIR", str(warm_notebook.state_dir))
    monkeypatch.chdir(warm_notebook.project)
    warm_notebook.define(LOADERS)
    yield warm_notebook
    assert not left_after(lambda: fetchers_on(hosts), HUNG_S)


def fetchers_on(hosts: Hosts) -> list[psutil.Process]:
    """Return the fetchers and workers on the data pool's hosts.

    They are the processes that a forkserver has started.
    """
    found = []
    for number in FETCHERS:
        for process in processes_of(hosts, number):
            with contextlib.suppress(psutil.Error):
                parents = [" ".join(parent.cmdline()) for parent in process.parents()]
                if sum("taas_magic.host.agent" in words for words in parents) > 1:
                    found.append(process)
    return found


def train(notebook: Notebook, flags: str, source: str = TRAIN, gpus: int = 1) -> Outcome:
    outcome = notebook.run(source, f"--pool g {flags}", gpus=gpus)
    assert outcome.error is None, outcome.shown
    return outcome


def result(outcome: Outcome) -> tuple[str, int, list[float]]:
    assert outcome.run is not None
    handed = ledger.read_ledgers(outcome.run.path / "data" / "ledger")
    host, batches, weights = outcome.run.result
    assert ledger.audit(handed) == []
    assert ledger.missing(handed, batches) == []
    return host, batches, weights


def received(hosts: Hosts, number: int) -> int:
    """Return the number of bytes that a host has received over its network since its start."""
    return int(hosts.exec(number, "cat", "/sys/class/net/eth0/statistics/rx_bytes"))


def sent_by_caller(hosts: Hosts) -> int:
    return psutil.net_io_counters(pernic=True)[f"{hosts.prefix}br"].bytes_sent


def test_data_goes_from_fetcher_host_to_rank_host_and_nowhere_else(
    remote: Notebook, hosts: Hosts
) -> None:
    remote.define("loader = taas.register(DataLoader(Pictures(40, width=500_000), 2))")
    here = result(train(remote, "--cpus 0"))
    train(remote, "--cpus 2 --prefill 16")  # copies the project's files to all hosts
    before, by_caller = received(hosts, 1), sent_by_caller(hosts)
    # The rank needs only one fetcher. Only both together can have so many batches ready.
    outcome = train(remote, "--cpus 2 --prefill 16")
    arrived = received(hosts, 1) - before
    by_caller = sent_by_caller(hosts) - by_caller
    assert result(outcome) == here
    assert here[:2] == (hosts.name(1), 20)
    used = {event["host"] for event in outcome.of_kind("fetcher")}
    assert used == {hosts.name(number) for number in FETCHERS}
    data_bytes = 40 * 500_000 * 4
    assert arrived > data_bytes
    assert by_caller < data_bytes / 4


SCALED = """
class Scaled(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        if not hasattr(self, "made"):
            self.made = "cache/made.txt"
            open(self.made, "w").write("made once")
        assert open(self.made).read()
        return float(open("scale.txt").read())

scaled = taas.register(DataLoader(Scaled(), batch_size=1, num_workers=1))
"""


def test_a_sessions_fetchers_read_the_files_that_the_notebook_has_changed(
    remote: Notebook,
) -> None:
    """The files that the fetchers themselves wrote to a folder of `--shared-writes` stay.

    The first batches of a cell may have been prepared before the notebook changed the file.
    """
    scale, shared = remote.project / "scale.txt", remote.project / "cache"
    big = remote.project / "big.bin"
    shared.mkdir()
    scale.write_text("1")
    remote.define(SCALED)
    flags = "--cpus 1 --session scaled --shared-writes cache --out read"
    source = "read = [open('scale.txt').read(), *(batch.item() for batch in scaled)]"
    try:
        for content in ("1", "2", "3"):
            scale.write_text(content)
            train(remote, flags, source)
            read = remote.shell.user_ns["read"]
            assert (read[0], read[-1]) == (content, float(content))
        with big.open("wb") as file:
            file.truncate(2 << 30)
        outcome = remote.run(source, f"--pool g {flags}", gpus=1)
        assert isinstance(outcome.error, PoolError)
        assert "cannot read changed files: the project store" in str(outcome.error)
        big.unlink()
        scale.write_text("4")
        train(remote, f"{flags} --send scaled", source)
        assert remote.shell.user_ns["read"] == ["4", *[4.0] * 12]
    finally:
        big.unlink(missing_ok=True)
        remote.define("%taas end scaled")
        scale.unlink()
        shutil.rmtree(shared)


def during(outcome_of: Callable[[], Outcome], hosts: Hosts, harm: Callable[[], None]) -> Outcome:
    """Run a cell, call `harm` as soon as data flows to host 1, and return the cell's outcome."""
    flowing = received(hosts, 1) + 300_000
    ended = threading.Event()

    def wait_and_harm() -> None:
        while not ended.wait(0.05):
            if received(hosts, 1) > flowing:
                harm()
                return

    thread = threading.Thread(target=wait_and_harm)
    thread.start()
    try:
        return outcome_of()
    finally:
        ended.set()
        thread.join()


@pytest.mark.fault(15, 16, 17)
@pytest.mark.parametrize("fault", ["lossy", "slow", "reset"])
def test_a_bad_network_costs_time_and_nothing_else(
    remote: Notebook, hosts: Hosts, fault: str
) -> None:
    """Cause faults 15 (30 % loss), 16 (1 Mbit/s) and 17 (resets within batches) of docs/faults.md.

    The batches must stay the same.
    """
    remote.define("loader = taas.register(DataLoader(Pictures(60, width=2_000, wait_s=0.02), 2))")
    here = result(train(remote, "--cpus 0"))
    every_40th = "-m statistic --mode nth --every 40 --packet 0"
    resets = f"INPUT -s {hosts.address(2)} -p tcp --sport 1024: {every_40th}"
    with contextlib.ExitStack() as healed:
        if fault == "lossy":
            hosts.lose(1, "30")
            healed.callback(hosts.lose, 1, "none")
        elif fault == "slow":
            settings = remote.project / "taas.toml"
            healed.callback(settings.write_text, whole := settings.read_text())
            settings.write_text(f'[data]\nbuffer = "{BUFFER_KIB}KiB"\n{whole}')
            for number in FETCHERS:
                hosts.limit(number, "1mbit")
                healed.callback(hosts.limit, number, "none")
        else:
            rule = [*resets.split(), "-j", "REJECT", "--reject-with", "tcp-reset"]
            hosts.exec(1, "iptables", "-A", *rule)
            healed.callback(hosts.exec, 1, "iptables", "-D", *rule)
        outcome = train(remote, "--cpus 2")
    assert result(outcome) == here
    if fault == "slow":
        assert 0 < most_ready(outcome) <= (BUFFER_KIB << 10) + BATCH_BYTES


def most_ready(outcome: Outcome) -> int:
    """Return the largest size of prepared batches that a fetcher reported, in bytes."""
    told = [one for event in outcome.of_kind("fetched") for one in event["loaders"].values()]
    return max(int(one["ready_bytes"]) for one in told)


SAID = "/tmp/said"
UNTIL_SAID = f"""
while not os.path.exists({SAID!r}):
    time.sleep(0.05)
"""


@pytest.mark.fault(18)
def test_a_host_with_fetchers_is_powered_off(
    remote: Notebook, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/faults.md 11 and 18: the other host's fetcher takes over, and each batch comes once."""
    remote.define("loader = taas.register(DataLoader(Pictures(200, 20_000, wait_s=0.05), 2))")
    body, result_line = TRAIN.rstrip().rsplit("\n", 1)
    source = f"{body}{UNTIL_SAID}{result_line}"
    is_said: Callable[[Line], bool] = lambda line: "is gone" in line.get("text", "")  # noqa: E731
    with on_event(monkeypatch, is_said, lambda run: hosts.exec(1, "touch", SAID)):
        outcome = during(
            lambda: train(remote, "--cpus 2 --timeout 300", source),
            hosts,
            lambda: hosts.kill(3),
        )
    assert any("is gone" in note["text"] for note in outcome.of_kind("note"))
    host, batches, _ = result(outcome)
    assert (host, batches) == (hosts.name(1), 100)
