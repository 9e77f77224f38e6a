"""Tests of pools of SSH hosts: cells run on the hosts, and no fault leaves a process there."""

import contextlib
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from taas_magic.config import Config, load_config
from taas_magic.engines import ssh as engine
from taas_magic.errors import PoolError, RunLost
from taas_magic.notebook import pools
from tests.eventually import HUNG_S, eventually
from tests.harness import Notebook, Outcome, words
from tests.rig.hosts import Hosts, hosts_up, name_of

pytestmark = [pytest.mark.network]

ENDLESS = """
import time
print("begun", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts_up(3, share=[tmp_path_factory.getbasetemp()]) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def remote(warm_notebook: Notebook, hosts: Hosts) -> Iterator["Remote"]:
    """Yield a notebook with two SSH pools, which all tests share.

    After the tests, end the pools, and check that no process is left on the hosts.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAAS_STATE_DIR", str(warm_notebook.state_dir))
        patch.chdir(warm_notebook.project)
        made = Remote(warm_notebook, hosts)
        made.pool("three", 3)
        made.pool("both", 1, 2, gpus=2)
        yield made
        made.down()
        made.settings.unlink()


@pytest.fixture(autouse=True)
def here(remote: "Remote", monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the state folder and the current folder to the notebook's, within each test."""
    monkeypatch.setenv("TAAS_STATE_DIR", str(remote.notebook.state_dir))
    monkeypatch.chdir(remote.notebook.project)


class Remote:
    """Notebook and its SSH pools."""

    def __init__(self, notebook: Notebook, hosts: Hosts) -> None:
        self.notebook, self.hosts = notebook, hosts
        self.settings = notebook.project / "taas.toml"
        self.settings.write_text("")

    def down(self) -> None:
        """End all pools except the local one. Check that no process is left on their hosts."""
        for name in self.config.pools.keys() - {"local"}:
            pools.down(name, self.config)
        for number in range(1, self.hosts.count + 1):
            assert not self.hosts.left(number)

    @property
    def config(self) -> Config:
        return load_config(self.notebook.project)

    def pool(self, name: str, *numbers: int, **more: object) -> None:
        """Add an SSH pool with the hosts `numbers` to taas.toml.

        `more` has further settings of the pool; a setting with the value None is left out.
        """
        values = {
            "engine": "ssh",
            "hosts": [self.hosts.name(number) for number in numbers],
            "python": sys.executable,
            "gpus": 0,
            "cores": 2,
            **more,
        }
        lines = [f"{key} = {value!r}" for key, value in values.items() if value is not None]
        options = more.get("ssh_config", self.hosts.ssh_config)
        lines = [line for line in lines if not line.startswith("ssh_config")]
        lines.append(f'options = {{ ssh_config = "{options}" }}')
        with self.settings.open("a") as file:
            file.write("\n".join([f"[pools.{name}]", *lines, ""]))

    def run(self, source: str, pool: str, gpus: int = 1) -> Outcome:
        return self.notebook.run(source, f"--pool {pool}", gpus=gpus)

    def run_until(self, source: str, pool: str, harm: Callable[[], object]) -> Outcome:
        """Run a cell, call `harm` as soon as a rank has printed "begun", and return the outcome."""
        known = set(self.runs())
        over = threading.Event()

        def wait() -> None:
            while not over.wait(0.05):
                new = set(self.runs()) - known
                if any("begun" in log.read_text() for run in new for log in run.glob("logs/*")):
                    harm()
                    return

        waiting = threading.Thread(target=wait)
        waiting.start()
        try:
            return self.run(source, pool)
        finally:
            over.set()
            waiting.join()

    def runs(self) -> list[Path]:
        return list((self.notebook.state_dir / "runs").glob("*"))

    def pool_process(self, name: str) -> psutil.Process:
        place = pools.named(name, self.config).folder.path / "lock"
        found = [p for p in psutil.Process().children() if str(place) in open_files(p)]
        assert len(found) == 1
        return found[0]


def open_files(process: psutil.Process) -> list[str]:
    folder = Path(f"/proc/{process.pid}/fd")
    with contextlib.suppress(OSError):
        return [os.readlink(link) for link in folder.iterdir()]
    return []


def test_ranks_of_a_cell_run_on_an_ssh_host(remote: Remote, hosts: Hosts) -> None:
    cell = "import os, socket\nprint(socket.gethostname(), os.environ['RANK'])"
    outcome = remote.run(cell, "both", gpus=2)
    assert outcome.error is None
    assert outcome.lines == {0: [f"{hosts.name(1)} 0"], 1: [f"{hosts.name(1)} 1"]}
    assert not [p for p in hosts.processes(1) if "PRIVATE" in words(p) + environ(p)]


def environ(process: psutil.Process) -> str:
    """Return the values of a process's environment; "" if the process has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.environ().values())
    return ""


@pytest.mark.nightly
def test_ranks_of_two_hosts_communicate(remote: Remote, hosts: Hosts) -> None:
    cell = """
import os, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(socket.gethostname(), os.environ["LOCAL_RANK"], int(total))
"""
    outcome = remote.run(cell, "both", gpus=4)
    assert outcome.error is None
    lines = [line for rank in range(4) for line in outcome.lines[rank] if "[W" not in line]
    assert sorted(lines) == [f"{hosts.name(n)} {rank} 4" for n in (1, 2) for rank in (0, 1)]


@pytest.mark.fault(48)
def test_every_port_of_a_host_drops_who_has_no_key(remote: Remote, hosts: Hosts) -> None:
    assert remote.run("1", "both").error is None
    ports = ports_of(hosts, 1)
    assert ports
    for port in ports:
        for said in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(range(200))):
            talk = f"exec 3<>/dev/tcp/$0/{port}; printf {shell_bytes(said)} >&3; timeout 1 cat <&3"
            for address in (hosts.address(1), "127.0.0.1"):
                answer = ""
                with contextlib.suppress(RuntimeError):  # no listener, or a dropped connection
                    answer = hosts.exec(1, "bash", "-c", talk, address)
                assert "HTTP" not in answer
        assert not speaks_without_key(hosts.address(1), port)
    assert remote.run("print('unaffected')", "both").lines == {0: ["unaffected"]}


def ports_of(hosts: Hosts, number: int) -> list[int]:
    """Return the ports on which a host listens, except that of sshd."""
    rows = [row.split() for row in hosts.exec(number, "cat", "/proc/net/tcp").splitlines()[1:]]
    ports = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    return sorted(ports - {22})


def shell_bytes(said: bytes) -> str:
    return "'" + "".join(f"\\x{byte:02x}" for byte in said) + "'"


def speaks_without_key(address: str, port: int) -> bool:
    """Return whether a port answers a TLS peer without a certificate (docs/faults.md 47)."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((address, port), timeout=30) as plain,
            context.wrap_socket(plain) as stranger,
        ):
            stranger.sendall(b"hello")
            return bool(stranger.recv(100))
    except OSError:
        return False


@pytest.mark.nightly
@pytest.mark.fault(51)
def test_an_unknown_host_key_is_reported_and_can_be_added_without_a_restart(
    remote: Remote, hosts: Hosts, tmp_path: Path
) -> None:
    known = tmp_path / "known_hosts"
    config = tmp_path / "ssh_config"
    right = f"Host *\nUserKnownHostsFile {known}\n{hosts.ssh_config.read_text()}"
    remote.pool("strange", 1, ssh_config=config)
    config.write_text(f"Host *\nPort 4\n{right}")
    nobody = remote.run("1", "strange")
    assert isinstance(nobody.error, PoolError) and "SHA256:" not in nobody.shown
    config.write_text(right)  # each attempt reads the configuration again
    for _ in range(2):
        outcome = remote.run("1", "strange")
        assert isinstance(outcome.error, PoolError)
        assert "SHA256:" in outcome.shown and "ssh-keyscan" in outcome.shown
    known.write_text((hosts.state / "known_hosts").read_text())
    assert remote.run("1", "strange").error is None


def test_without_ssh_a_line_names_the_configuration_that_was_not_read(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.pool("unread", 1)
    monkeypatch.setenv("PATH", str(tmp_path))
    outcome = remote.run("1", "unread")
    assert isinstance(outcome.error, PoolError)
    assert f"cannot resolve host {remote.hosts.name(1)}" in outcome.shown
    assert f"{remote.hosts.ssh_config} was not read" in outcome.shown


def test_the_reason_why_an_agent_cannot_start_is_shown(remote: Remote) -> None:
    remote.pool("odd", 1, python="/nowhere/python")
    outcome = remote.run("1", "odd")
    assert isinstance(outcome.error, PoolError)
    assert "/nowhere/python" in outcome.shown


GATED = """
import importlib.abc, os, sys, time

class Gated(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        while name == "distributed" and not os.path.exists(__file__ + ".open"):
            open(__file__).read()
            time.sleep(0.05)

sys.meta_path.insert(0, Gated())
"""
START_S = 2.0


@pytest.mark.nightly
def test_imports_of_the_pools_process_and_on_a_host_may_take_longer_than_any_limit(
    remote: Remote, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = {"taas_magic.pool.process": tmp_path / "here", "taas_magic.host.agent": tmp_path}
    for folder in gates.values():
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(GATED)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'here'}:{os.environ.get('PYTHONPATH', '')}")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{tmp_path}:$PYTHONPATH" exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    remote.pool("slow", 3, python=str(python), start_timeout_s=START_S)
    is_over = threading.Event()

    def is_late(process: psutil.Process, name: str) -> bool:
        """Return whether a process has `name` in its command, and is older than 3 x `START_S`."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return name in words(process) and time.time() - process.create_time() > 3 * START_S
        return False

    def open_gates() -> None:
        for name, folder in gates.items():
            while not is_over.wait(0.1):
                if any(
                    is_late(it, name) for it in [*psutil.Process().children(), *hosts.processes(3)]
                ):
                    break
            (folder / "sitecustomize.py.open").touch()

    opening = threading.Thread(target=open_gates)
    opening.start()
    try:
        outcome = remote.run("print('on')", "slow")
    finally:
        is_over.set()
        opening.join()
    assert outcome.lines == {0: ["on"]}, outcome.shown


@pytest.mark.nightly
def test_a_host_that_is_down_is_replaced_by_another(remote: Remote, hosts: Hosts) -> None:
    remote.pool("spare", 3, 2)
    rule = "INPUT -p tcp --dport 22 -j REJECT --reject-with icmp-host-unreachable"
    hosts.exec(3, "iptables", "-A", *rule.split())
    try:
        outcome = remote.run("import socket\nprint(socket.gethostname())", "spare")
        assert outcome.lines == {0: [hosts.name(2)]}
    finally:
        hosts.exec(3, "iptables", "-D", *rule.split())


@pytest.mark.nightly
def test_rank_0_is_on_the_host_that_the_pool_names_first(remote: Remote, hosts: Hosts) -> None:
    """The other host joins first, because the first cell runs while the first host is down."""
    remote.pool("ordered", 3, 2, gpus=2)
    cell = "import socket\nprint(socket.gethostname())"
    rule = "INPUT -p tcp --dport 22 -j REJECT --reject-with icmp-host-unreachable"
    hosts.exec(3, "iptables", "-A", *rule.split())
    try:
        assert remote.run(cell, "ordered").lines == {0: [hosts.name(2)]}
    finally:
        hosts.exec(3, "iptables", "-D", *rule.split())
    numbers = {0: 3, 1: 3, 2: 2, 3: 2}
    lines = {rank: [hosts.name(number)] for rank, number in numbers.items()}
    assert remote.run(cell, "ordered", gpus=4).lines == lines


@pytest.mark.nightly
def test_ranks_find_the_programs_beside_the_python_of_their_pool(remote: Remote) -> None:
    cell = """
import os, shutil, sys
folder = os.path.dirname(sys.executable)
print(folder == os.environ["PATH"].split(":")[0], shutil.which("torchrun") == f"{folder}/torchrun")
"""
    assert remote.run(cell, "both").lines == {0: ["True True"]}


def test_a_host_is_asked_for_cores_and_gpus_only_once(remote: Remote, hosts: Hosts) -> None:
    remote.pool("asked", 1, 2, cores=None, gpus=None)
    config = remote.config.pools["asked"]
    hosts.cut(1)
    try:
        found = engine.SshEngine(config).capacity()
    finally:
        hosts.heal(1)
    assert (found.gpus, found.cores) == (0, len(os.sched_getaffinity(0)))
    hosts.cut(2)
    try:
        assert engine.SshEngine(config).capacity() == found
    finally:
        hosts.heal(2)


@pytest.mark.fault(35)
@pytest.mark.parametrize("cores", [None, 2])
def test_an_interrupt_while_connecting_into_nothing(
    remote: Remote, hosts: Hosts, cores: int | None
) -> None:
    """The host drops all packets. An interrupt ends the cell while it waits for the connection.

    If the pool's `cores` are unknown, the kernel itself connects. Otherwise, only the pool does.
    """
    name = f"void{cores}"
    remote.pool(name, 3, cores=cores)
    sent = threading.Event()

    def interrupt() -> None:
        while not connects_to(hosts.address(3)):
            threading.Event().wait(0.02)
        sent.set()
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt, daemon=True)
    hosts.hole(3)
    try:
        interrupting.start()
        outcome = remote.run("1", name)
    finally:
        hosts.unhole(3)
        # Otherwise, the next test would see this connection attempt, and would interrupt too early.
        eventually(lambda: not connects_to(hosts.address(3)))
    assert isinstance(outcome.error, KeyboardInterrupt), f"was interrupted: {sent.is_set()}"
    interrupting.join()


def connects_to(address: str) -> bool:
    """Return whether a connection from here to `address` waits for an answer (SYN_SENT)."""
    wanted = socket.inet_aton(address)[::-1].hex().upper()
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(peer.startswith(wanted) and state == "02" for _, _, peer, state, *_ in sockets)


@pytest.mark.nightly
@pytest.mark.fault(52)
def test_sshd_dies_in_a_run(remote: Remote, hosts: Hosts) -> None:
    outcome = remote.run_until(ENDLESS, "three", lambda: hosts.kill_processes(3, "sshd"))
    assert isinstance(outcome.error, RunLost)
    assert hosts.name(3) in outcome.shown
    assert not hosts.left(3)
    assert remote.run("print('again')", "three").lines == {0: ["again"]}


@pytest.mark.nightly
def test_a_killed_pool_process_leaves_clean_hosts(remote: Remote, hosts: Hosts) -> None:
    outcome = remote.run_until(ENDLESS, "three", lambda: remote.pool_process("three").kill())
    assert isinstance(outcome.error, RunLost)
    assert not hosts.left(3)
    assert remote.run("print('again')", "three").lines == {0: ["again"]}


@pytest.mark.nightly
def test_hosts_of_a_hanging_pool_end_their_processes(remote: Remote, hosts: Hosts) -> None:
    assert remote.run("1", "three").error is None
    process = remote.pool_process("three")
    process.suspend()
    try:
        assert not hosts.left(3, ignoring="sshd")  # the connection itself stays open
    finally:
        process.kill()


@pytest.mark.nightly
def test_down_ends_a_host_that_is_just_starting(remote: Remote, hosts: Hosts) -> None:
    remote.pool("late", 3)
    opening = pools.warm(remote.config, "late")
    while not any(name_of(process).startswith("python") for process in hosts.processes(3)):
        assert opening.is_alive()
    pools.down("late", remote.config)
    opening.join(HUNG_S)
    assert not hosts.left(3)
