"""Tests of the pool's process: who can connect, how kernels share the pool, and when it ends."""

import contextlib
import gc
import os
import platform
import shlex
import socket
import ssl
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, LocalCluster, Security
from tornado.iostream import IOStream

from taas_magic.config import Config, PoolConfig
from taas_magic.errors import PoolError
from taas_magic.messages import EndPool, Event, Request, StartResponse, WaitForHosts, to_json
from taas_magic.notebook import pools
from taas_magic.notebook.run import RunDriver
from taas_magic.pool import process as pool_process
from taas_magic.pool.address import PoolAddress
from taas_magic.pool.client import Pool, PoolConnection, disconnect
from taas_magic.pool.process import PoolFolder
from taas_magic.setup.facts import KernelVersions
from taas_magic.shared_files import open_and_lock
from tests.events import line_of
from tests.eventually import HUNG_S
from tests.frontend import Frontend
from tests.harness import Notebook, below, left_of, listening_ports
from tests.rig.hosts import missing

UNFORESEEN = """
import sys
if any("taas_magic.pool.process" in word for word in sys.orig_argv):
    from taas_magic.pool.runs import PoolRun

    async def end(self):
        raise ZeroDivisionError("not foreseen")

    PoolRun._end_ranks = end
"""


def the_pool(notebook: Notebook) -> Pool:
    return pools.named("local", Config())


def connection_of(pool: Pool) -> PoolConnection:
    assert pool.connection is not None
    return pool.connection


def test_only_the_user_can_read_the_pools_files(notebook: Notebook) -> None:
    folder = the_pool(notebook).folder.path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "pool.json").stat().st_mode) == 0o600


def test_the_key_is_in_no_command_line_or_environment(notebook: Notebook) -> None:
    for process in below(os.getpid()):
        # a process of an earlier test may end meanwhile
        with contextlib.suppress(psutil.NoSuchProcess):
            words = " ".join([*process.cmdline(), *process.environ().values()])
            assert "PRIVATE KEY" not in words


@pytest.mark.fault(48)
@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.0\r\n\r\n", bytes(range(200))])
def test_who_has_no_key_is_dropped_and_the_run_goes_on(notebook: Notebook, words: bytes) -> None:
    """Strangers write to each port of the pool's processes. The next run succeeds."""
    for port in listening_ports(below(os.getpid())):
        stranger = socket.create_connection(("127.0.0.1", port), timeout=HUNG_S)
        with stranger, contextlib.suppress(OSError):  # the peer may close it at any moment
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            while data := stranger.recv(4096):
                assert b"HTTP" not in data
    assert notebook.run("print('unaffected')", gpus=1).error is None


@pytest.mark.fault(47)
def test_another_certificate_is_refused(notebook: Notebook) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for port in listening_ports(below(os.getpid())):
        with socket.create_connection(("127.0.0.1", port), timeout=HUNG_S) as plain:
            assert not answers(context, plain)
    assert notebook.run("print('unaffected')", gpus=1).error is None


def answers(context: ssl.SSLContext, plain: socket.socket) -> bool:
    """Return whether a peer sends data over TLS.

    A TLS 1.3 client learns that it was refused only at its first read.
    """
    try:
        with context.wrap_socket(plain) as stranger:
            stranger.sendall(b"hello")
            return bool(stranger.recv(100))
    except (ssl.SSLError, ConnectionError):
        return False


def test_ports_are_bound_to_one_address(notebook: Notebook) -> None:
    source = """
import psutil, torch.distributed as dist
dist.init_process_group("gloo")
tree = psutil.Process().parents()[3].children(recursive=True)
pids = {process.pid for process in tree}
found = [c for c in psutil.net_connections("tcp") if c.pid in pids and c.status == "LISTEN"]
print(sorted({c.laddr.ip for c in found}))
dist.barrier()
"""
    assert notebook.run(source).lines[0] == ["['127.0.0.1']"]


def test_the_kernel_receives_all_events_of_a_run(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, put = connection_of(the_pool(notebook))._client, RunDriver.queue_event
    send = client._send_to_scheduler
    heard: list[str] = []

    def send_late(message: dict[str, object]) -> None:
        if message["op"] != "subscribe-topic":
            send(message)

    def hear(run: RunDriver, event: Event) -> None:
        heard.append(line_of(event)["kind"])
        put(run, event)

    monkeypatch.setattr(client, "_send_to_scheduler", send_late)
    monkeypatch.setattr(RunDriver, "queue_event", hear)
    outcome = notebook.run("print('here')")
    assert heard[0] == "state"
    assert heard == [event["kind"] for event in outcome.events]


def test_a_second_kernel_attaches_to_the_same_pool(notebook: Notebook) -> None:
    source = """
from pathlib import Path
from taas_magic.config import Config
from taas_magic.notebook.pools import named
pool = named("local", Config())
assert pool.folder.is_locked and pool.connection is None
connection = pool.open()
print(len(connection.status().hosts), connection.address)
pool.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=HUNG_S
    )
    assert done.stdout.split() == ["1", connection_of(the_pool(notebook)).address]


@pytest.mark.network
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_another_machine_with_the_same_home_folder_has_a_pool_of_its_own(
    notebook: Notebook,
) -> None:
    source = """
from pathlib import Path
from taas_magic.config import Config
from taas_magic.errors import PoolError
from taas_magic.messages import GetStatus
from taas_magic.notebook import pools
from taas_magic.notebook.runs import runs
from taas_magic.pool.client import ask_pool
pool, run = pools.named("local", Config()), runs()[0]
for ask in (
    lambda: ask_pool(Path(run.context.pool_folder), GetStatus()),
    lambda: pools.pool_of_session(run, Config()),
):
    try:
        ask()
    except PoolError as error:
        print(error)
print(pool.open().address)
pool.down()
"""
    assert notebook.run("pass").error is None
    program = shlex.join([sys.executable, "-c", source])
    namespaces = ["--mount", "--mount-proc", "--uts", "--net", "--pid", "--fork", "--kill-child"]
    script = f"hostname elsewhere; ip link set lo up; {program}"
    machine = ["unshare", *namespaces, "sh", "-c", script]
    done = subprocess.run(machine, capture_output=True, text=True, check=False, timeout=HUNG_S)
    assert done.returncode == 0, done.stderr
    of_pool, of_session, address = done.stdout.strip().splitlines()
    name = platform.node()
    assert f"the pool's process on machine {name} does not answer" in of_pool
    assert f"the session belongs to machine {name}" in of_session
    here = connection_of(the_pool(notebook))
    assert address != here.address and here.is_ready


@pytest.mark.process
def test_a_pool_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    pool = Pool(PoolConfig("broken", engine="nonesuch", start_timeout_s=HUNG_S), tmp_path)
    with pytest.raises(PoolError, match='there is no engine "nonesuch"'):
        pool.open()


def test_only_a_pool_of_the_same_name_counts_as_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAAS_STATE_DIR", str(tmp_path))
    lab, cpu = (PoolFolder(PoolConfig(name), tmp_path) for name in ("lab", "lab-cpu"))
    place = PoolAddress("tls://a:1", {}, str(tmp_path), KernelVersions("3.9.1", "1.13.1", ""))
    (cpu.path / "pool.json").write_bytes(to_json(place))
    lock = open_and_lock(cpu.path / "lock")
    assert lock is not None
    assert cpu.find_other_versions() == ["Python 3.9.1, torch 1.13.1"]
    assert lab.find_other_versions() == []
    os.close(lock)


@pytest.mark.usefixtures("no_leftovers")
def test_a_pool_can_be_ended_while_it_starts(tmp_path: Path) -> None:
    pool = Pool(PoolConfig("local"), tmp_path)
    before = set(psutil.Process().children())
    with ThreadPoolExecutor() as threads:
        opening = threads.submit(pool.connect)
        while not set(psutil.Process().children()) - before:
            threading.Event().wait(0.001)
        pool.down()  # the pool's process is still in its first imports
        with pytest.raises(PoolError, match="this kernel ended it during the wait"):
            opening.result()
    assert not pool.folder.is_locked


OTHER_KERNEL = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "taas_magic")
cell = '''%%taas --gpus 1
import subprocess
child = subprocess.Popen(["sleep", "600"])
print("begun", flush=True)
import os, time
while not os.path.exists("go on"):
    time.sleep(0.05)
print("child lives:", child.poll() is None)
'''
sys.exit(not shell.run_cell(cell).success)
"""


def test_runs_of_two_kernels_do_not_touch_each_other(notebook: Notebook, tmp_path: Path) -> None:
    words = [sys.executable, "-c", OTHER_KERNEL]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        while "begun" not in other.stdout.readline():
            assert other.poll() is None
        assert notebook.run("print('beside it')", f"--store {tmp_path}").error is None
        (notebook.project / "go on").touch()
        assert "child lives: True" in other.stdout.read()
    assert other.returncode == 0


@pytest.mark.usefixtures("no_leftovers")
def test_all_that_wait_for_an_ending_pool_get_one_new_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old process still holds the lock. A warm-up and three cells wait for one new process."""
    monkeypatch.setattr(pool_process, "LINGER_S", 0.2)
    pool = Pool(PoolConfig("local"), tmp_path)
    lock = open_and_lock(pool.folder.path / "lock")
    assert lock is not None
    threading.Timer(0.5, os.close, [lock]).start()
    pool.connect()
    with ThreadPoolExecutor() as threads:
        for waiting in [threads.submit(pool.open) for _ in range(3)]:
            waiting.result()
    assert pool.connection_with(hosts=1)
    pool.down()


@pytest.mark.nightly
@pytest.mark.usefixtures("no_leftovers")
def test_a_kernel_that_connects_while_its_pool_ends_gets_a_new_pool(tmp_path: Path) -> None:
    config = PoolConfig("local", start_timeout_s=60)
    first, late = Pool(config, tmp_path), Pool(config, tmp_path)
    first.open()
    late.connect()
    ending = connection_of(first)
    assert late.connection_with(1)
    ending.call(EndPool())
    assert late.connection_with(1) is None, "a cell waits for the next process"
    while (first.folder.path / "pool.json").exists():
        threading.Event().wait(0.001)
    assert late.open().process.pid != ending.process.pid
    assert connection_of(late).is_ready and ending.has_ended
    first.close()
    late.down()


@pytest.mark.usefixtures("no_leftovers")
def test_a_pool_with_old_settings_ends_by_itself_after_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # shorter than the time until the first kernel connects
    monkeypatch.setattr(pool_process, "LINGER_S", 0.01)
    monkeypatch.chdir(tmp_path)
    before, after = (
        Config(pools={"brief": PoolConfig("brief", start_timeout_s=limit_s)})
        for limit_s in (120, 121)
    )
    others = psutil.Process().children()
    pool = pools.named("brief", before)
    pool.open()
    [process] = [child for child in psutil.Process().children() if child not in others]
    tree = [process, *below(process.pid)]
    assert len(tree) >= 4
    connection_of(pool)._listeners["busy"] = print
    assert pools.named("brief", after) is not pool
    connection = connection_of(pool)
    assert connection.is_ready, "a run is on it"
    # The end of a session calls this method in the thread of the Dask client.
    connection._client.loop.add_callback(connection.stop_events, "busy")
    while not pool.is_unused():
        threading.Event().wait(0.05)
    assert not left_of(tree)
    assert not pool.folder.is_locked and not (pool.folder.path / "pool.json").exists()
    pool.close()
    assert connection._client.status == "closed"


@pytest.mark.nightly
def test_a_run_ends_if_its_pool_raises_an_error(kernel_of_its_own: Frontend) -> None:
    folder = Path(os.environ["TAAS_STATE_DIR"]).parent / "customized"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(UNFORESEEN)
    kernel_of_its_own.run(f"%taas down\nimport os; os.environ['PYTHONPATH'] += ':{folder}'")
    reply = kernel_of_its_own.fail("%%taas --gpus 1\nprint('ran')")
    assert "its pool failed: ZeroDivisionError('not foreseen')" in reply["evalue"], reply


@pytest.mark.usefixtures("no_leftovers")
def test_all_that_wait_get_the_messages_about_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads wait, the second one later. Each gets the messages since its wait began."""
    asked, over = threading.Semaphore(0), threading.Event()
    heard: list[list[str]] = [[], []]

    def call(request: Request[Any], *more: Any) -> Any:
        if not isinstance(request, WaitForHosts):
            return answer(request, *more)
        asked.release()
        over.wait(HUNG_S)
        return StartResponse()

    pool = Pool(PoolConfig("local"), tmp_path)
    connection = pool.connect()
    answer = connection.call
    monkeypatch.setattr(connection, "call", call)
    waiting = [threading.Thread(target=pool.open, args=(1, lines.extend)) for lines in heard]
    for thread in waiting:
        thread.start()
        assert asked.acquire(timeout=HUNG_S)
        connection._on_beat((0.0, ("host a: still connecting",)))
    over.set()
    for thread in waiting:
        thread.join()
    assert heard == [["host a: still connecting"] * 2, ["host a: still connecting"]]
    monkeypatch.undo()
    pool.down()


def test_a_client_that_could_not_connect_again_is_closed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pytest fails the test if the client's `__del__` raises."""
    tried = threading.Event()

    def start_tls(*_: object, **__: object) -> None:
        tried.set()
        raise ValueError("IOStream is not idle; cannot convert to SSL")

    security = Security.temporary()
    with LocalCluster(
        n_workers=0, processes=False, security=security, dashboard_address=None
    ) as it:
        client = Client(it.scheduler_address, security=security, set_as_default=False)
        monkeypatch.setattr(IOStream, "start_tls", start_tls)
        client.loop.add_callback(client.scheduler_comm.comm.abort)
        assert tried.wait(HUNG_S)
        disconnect(client)
        monkeypatch.undo()
        del client
        gc.collect()
