"""No wait is endless: stopped or killed processes, and the user's second interrupt."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from taas_magic.config import Config, PoolConfig
from taas_magic.display.view import View
from taas_magic.errors import PoolError, RunLost
from taas_magic.host.spec import LaunchRanks
from taas_magic.host.system import status_of
from taas_magic.messages import StartResponse
from taas_magic.notebook import pools, runs
from taas_magic.notebook.run import Interrupts, RunDriver
from taas_magic.pool.client import ConnectionEnded, Pool, PoolConnection, PoolWait
from taas_magic.pool.process import PoolFolder
from tests.conftest import carriers
from tests.events import event, new_state
from tests.eventually import HUNG_S, eventually
from tests.frontend import Frontend, before_start
from tests.harness import (
    AGENT,
    Notebook,
    forkservers,
    interrupt_twice,
    left_of,
    on_event,
    words,
)
from tests.nightly import nightly

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

POOL = "taas_magic.pool.process"
ENDLESS = "%%taas --gpus 2\nimport time\nprint('begun', flush=True)\ntime.sleep(600)\n"


@pytest.mark.nightly
@pytest.mark.fault(61)
def test_two_interrupts_end_the_cell_whatever_does_not_answer(
    kernel_of_its_own: Frontend, no_leftovers: str
) -> None:
    """The agent, and later the pool's process, is suspended during a run."""
    frontend = kernel_of_its_own
    frontend.run("import taas_magic.pool.client as c; c.SILENT_S = c.ANSWER_S = 8.0")
    two_interrupts_end_the_cell(frontend, no_leftovers, AGENT, "waiting for the interrupted run")
    two_interrupts_end_the_cell(frontend, no_leftovers, POOL, "did not answer")


def two_interrupts_end_the_cell(frontend: Frontend, token: str, stopped: str, said: str) -> None:
    """Stop a process during a run, and interrupt the run twice. The next cell must show `said`.

    Args:
        frontend: The kernel.
        token: Token of the kernel's processes.
        stopped: Text in the command line of the process that SIGSTOP stops.
        said: Text that the next cell shows before its ranks start.
    """
    request = frontend.send(ENDLESS)
    frontend.wait(lambda: "begun" in frontend.text(request))
    eventually(lambda: len(carriers_of(token, stopped)) == 1)  # a replaced process may be ending
    [process] = carriers_of(token, stopped)
    process.suspend()
    frontend.manager.interrupt_kernel()
    frontend.wait(lambda: threading.Event().wait(0.5) is False)
    began = time.monotonic()
    frontend.manager.interrupt_kernel()
    reply = frontend.finish(request)
    print(f"{stopped}: {time.monotonic() - began:.2f} s after the second interrupt")
    assert reply["ename"] == "KeyboardInterrupt"
    assert "are still stopping; they are killed" in reply["evalue"]
    heads = frontend.contents(request, "update_display_data")
    assert heads[-1]["data"]["text/plain"].startswith("INTERRUPTED")
    again = frontend.run("%%taas --gpus 1\nprint('on')")
    assert "[0] on" in frontend.text(again)
    assert said in before_start(frontend, again)


@pytest.mark.nightly
def test_the_hosts_that_are_still_stopping_are_those_of_the_newest_attempt(own_pool: Pool) -> None:
    run, interrupts = RunDriver(new_state(n_hosts=2)), Interrupts()
    run.hosts, interrupts.count = ["gpu1", "gpu2"], 2
    for host, attempt in (("gpu1", 0), ("gpu2", 0), ("gpu3", 1), ("gpu1", 1)):
        run.queue_event(event("restart", attempt=1) if host == "gpu3" else event("note", text="on"))
        run.queue_event(event("started", host, attempt=attempt, pids={}))
    run.follow(own_pool.connect(), View(run.head), interrupts)
    assert (
        run.head.state == "INTERRUPTED" and "ranks on gpu3, gpu1 are still stopping" in run.head.why
    )
    assert "Until the run has ended, files may still arrive" in run.head.why


def carriers_of(token: str, command: str) -> list[psutil.Process]:
    return [process for process in carriers(token) if command in words(process)]


OWN = Config(pools={"own": PoolConfig("own")})


@pytest.fixture
def own_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leftovers: str) -> Iterator[Pool]:
    """Yield a pool for this test only. The pool's process listens, and has no host yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pools, "_pools", {})
    pool = pools.named("own", OWN)
    pool.connect()
    yield pool
    pool.down()


def process_of(pool: Pool) -> psutil.Process:
    return psutil.Process(pool.connect().process.pid)


def test_a_pool_that_another_kernel_uses_is_listed_as_running(
    own_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_pool.connect()
    assert pools.rows(OWN)[0].state == "ready"
    # without its list of pools, this process acts as another kernel
    monkeypatch.setattr(pools, "_pools", {})
    assert pools.rows(OWN)[0].state == "running"


def test_a_stopped_pool_is_reported_and_down_ends_it(
    own_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taas_magic.pool.client.SILENT_S", 3.0)
    monkeypatch.setattr("taas_magic.pool.client.ANSWER_S", 3.0)
    connection, process = own_pool.connect(), process_of(own_pool)
    process.suspend()
    with pytest.raises(PoolError, match=rf"process {process.pid} has been silent for \d+ s"):
        connection.status()
    [row] = pools.rows(OWN)
    assert (row.state, row.status.hosts) == ("silent", [])
    own_pool.down()
    assert pools.rows(OWN)[0].state == "down"
    assert status_of(process) in ("", psutil.STATUS_ZOMBIE)
    assert not own_pool.folder.is_locked


@pytest.mark.fault(61)
def test_a_kernel_that_comes_to_a_stopped_pool_replaces_it(
    own_pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = process_of(own_pool)
    process.suspend()
    other = Pool(own_pool.config, tmp_path)
    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr("taas_magic.pool.client.ANSWER_S", 3.0)
        joining = threading.Thread(target=other.connect, args=(told.extend,))
        joining.start()
        process.wait(HUNG_S)
        patch.undo()  # the new process may need more time to answer
        joining.join()
    assert 'pool "own" did not answer: its process is replaced' in told
    assert not other.connect().status().hosts
    other.down()


@pytest.mark.nightly
def test_waits_end_with_the_process_that_is_killed_and_the_next_one_starts_another(
    own_pool: Pool, tmp_path: Path
) -> None:
    own_killed, other = own_pool.connect(), Pool(own_pool.config, tmp_path)
    process, other_killed = process_of(own_pool), other.connect()
    with ThreadPoolExecutor() as threads:
        opening = [threads.submit(pool.open) for pool in (own_pool, other)]
        eventually(lambda: own_killed._waiting and other_killed._waiting)
        process.kill()
        for opened in opening:
            with pytest.raises(ConnectionEnded, match=rf"its process {process.pid} ") as ended:
                opened.result(HUNG_S)
            assert "ConnectionPool" not in str(ended.value) and "hangs" not in str(ended.value)
    assert "was killed by SIGKILL" in own_killed.why
    assert len(own_pool.open().status().hosts) == 1
    assert other.connect().process.pid == own_pool.connect().process.pid != process.pid
    other.close()


@pytest.mark.nightly
def test_a_wait_that_began_before_the_pool_was_ended_starts_no_process(own_pool: Pool) -> None:
    """The thread that waits for the pool continues only after `down` has begun."""
    wait = PoolWait(own_pool)
    with ThreadPoolExecutor() as threads:
        with own_pool._joining:
            opening = threads.submit(own_pool.open, wait=wait)
            ending = threads.submit(own_pool.down)
            eventually(lambda: own_pool.end_count)
        with pytest.raises(PoolError, match='pool "own": this kernel ended it during the wait'):
            opening.result()
        ending.result()
    assert not own_pool.folder.is_locked
    assert own_pool.open().is_ready, "a wait that begins later starts the pool"


@pytest.mark.nightly
def test_a_wait_says_that_another_kernel_ended_the_pool(own_pool: Pool, tmp_path: Path) -> None:
    mine, other = own_pool.connect(), Pool(own_pool.config, tmp_path)
    other.connect()
    with ThreadPoolExecutor() as threads:
        opening = threads.submit(own_pool.open)
        eventually(lambda: mine._waiting and process_of(own_pool).children())
        hosts = process_of(own_pool).children(recursive=True)
        for host in hosts:
            host.suspend()  # a suspended host cannot join before the pool ends
        ending = threads.submit(other.down)
        with pytest.raises(PoolError, match="the command `down` ended the pool"):
            opening.result(HUNG_S)
        for host in hosts:
            with contextlib.suppress(psutil.NoSuchProcess):
                host.resume()
        ending.result()


def test_an_interrupt_while_a_pool_starts_leaves_no_wait_and_one_process(
    tmp_path: Path, no_leftovers: str
) -> None:
    pool = Pool(PoolConfig("local"), tmp_path)
    wait, before = PoolWait(pool), psutil.Process().children()
    with ThreadPoolExecutor() as threads:
        opening = threads.submit(pool.open, wait=wait)
        eventually(lambda: pool.folder.reap_children())
        wait.cancel()
        with pytest.raises(PoolError, match="the wait for its hosts was cancelled"):
            opening.result()
    started = [child for child in psutil.Process().children() if child not in before]
    assert len(started) == 1 and pool.connection is None
    pool.down()
    assert not left_of(started)


@pytest.mark.nightly
@pytest.mark.fault(61)
def test_a_run_ends_with_its_pools_process_though_another_has_taken_its_place(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's process is replaced before the kernel checks whether the old process lives."""
    pool, replaced, check = pools.named("local", Config()), threading.Event(), RunDriver._check_pool

    def replace(run: RunDriver) -> None:
        process_of(pool).kill()
        eventually(lambda: pool.connection is None)
        pool.open()
        replaced.set()

    def check_late(run: RunDriver, *args: Any) -> None:
        assert replaced.wait(HUNG_S)
        check(run, *args)

    monkeypatch.setattr(RunDriver, "_check_pool", check_late)
    first = pool.connect().process
    with on_event(monkeypatch, lambda event: event["kind"] == "lines", replace):
        outcome = notebook.run("import time\nprint('begun', flush=True)\ntime.sleep(600)", gpus=1)
    assert isinstance(outcome.error, RunLost)
    assert outcome.run is not None and outcome.run.state == "LOST"
    assert f"its process {first.pid} was killed by SIGKILL" in outcome.shown
    assert pool.connect().process.pid != first.pid
    assert notebook.run("print('on')", gpus=1).lines == {0: ["on"]}


@pytest.mark.nightly
def test_a_pool_that_is_killed_during_a_launch_is_reported_in_plain_words(
    notebook: Notebook,
) -> None:
    assert notebook.run("pass", gpus=1).error is None
    process = process_of(pools.named("local", Config()))
    [forkserver] = forkservers(process.children(recursive=True))
    forkserver.suspend()  # the launch waits for the forkserver
    begun = set(notebook.state_dir.glob("runs/*/events.jsonl"))

    def kill() -> None:
        eventually(lambda: set(notebook.state_dir.glob("runs/*/events.jsonl")) - begun)
        process.kill()

    killing = threading.Thread(target=kill)
    killing.start()
    outcome = notebook.run("pass", gpus=1)
    killing.join()
    assert isinstance(outcome.error, RunLost)
    assert outcome.run is not None and outcome.run.state == "LOST"
    assert f"its process {process.pid} was killed by SIGKILL" in outcome.shown
    assert "ConnectionPool" not in outcome.shown and "hangs" not in outcome.shown
    assert notebook.run("print('on')", gpus=1).lines == {0: ["on"]}


def test_a_session_that_its_pool_refuses_to_start_is_no_run(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that fails between the wait for hosts and the start cannot be had at will."""
    call, earlier = PoolConnection.call, {run.id for run in runs.newest_first()}

    def refuse(connection: PoolConnection, request: Any, *about: Any) -> Any:
        if isinstance(request, LaunchRanks) and request.run.is_session:
            return StartResponse(error="its only host is gone")
        return call(connection, request, *about)

    with monkeypatch.context() as patch:
        patch.setattr(PoolConnection, "call", refuse)
        outcome = notebook.run("pass", "--session exp --name cell", gpus=1)
    assert 'pool "local": its only host is gone' in str(outcome.error)
    new = [run for run in runs.newest_first() if run.id not in earlier]
    assert [(run.name, run.state) for run in new] == [("cell", "FAILED")]
    assert notebook.run("print('on')", "--session exp", gpus=1).lines == {0: ["on"]}
    notebook.shell.run_line_magic("taas", "end exp")


HASTY = PoolConfig("local", start_timeout_s=5)


@pytest.mark.nightly
@pytest.mark.usefixtures("no_leftovers")
def test_a_pool_that_stops_while_it_starts_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, hasty = Pool(PoolConfig("local"), tmp_path), Pool(HASTY, tmp_path)
    monkeypatch.setattr(PoolFolder, "path", tmp_path)  # both pools use one folder
    monkeypatch.setattr("taas_magic.pool.client.REPORT_WAIT_AFTER_S", 0.0)
    told: list[str] = []
    before = psutil.Process().children()

    def begun(process: psutil.Process) -> bool:
        # true only after the new process has called exec
        return process not in before and POOL in words(process)

    with ThreadPoolExecutor() as threads:
        opening = threads.submit(hasty.connect, told.extend)
        while not (new := [it for it in psutil.Process().children() if begun(it)]):
            threading.Event().wait(0.001)
        new[0].suspend()
        with pytest.raises(PoolError, match="did not start"):
            opening.result()
    assert told == [
        f'pool "local": waiting for its process {new[0].pid} to answer ({tmp_path / "pool.log"})'
    ]
    assert not pool.connect().status().hosts
    pool.down()


@pytest.mark.fault(62)
@pytest.mark.parametrize("harm", [psutil.Process.suspend, nightly(psutil.Process.kill)])
def test_what_a_host_has_ready_is_replaced_where_it_is_gone_or_stopped(
    notebook: Notebook, harm: Callable[[psutil.Process], None]
) -> None:
    assert notebook.run("pass", gpus=1).error is None
    local = process_of(pools.named("local", Config()))
    [process] = forkservers(local.children(recursive=True))
    harm(process)
    # the signal takes effect after a moment
    eventually(lambda: status_of(process) in ("", psutil.STATUS_STOPPED))
    assert notebook.run("print('on')", gpus=1).lines == {0: ["on"]}


@pytest.mark.nightly
@pytest.mark.usefixtures("no_leftovers")
def test_a_stopped_supervisor_does_not_outlive_a_killed_pool(own_pool: Pool) -> None:
    own_pool.open()
    [supervisor] = process_of(own_pool).children()
    tree = [supervisor, *supervisor.children(recursive=True)]
    supervisor.suspend()
    process_of(own_pool).kill()
    assert not left_of(tree)


@pytest.mark.nightly
def test_a_forkserver_that_stops_during_a_run_is_reported(notebook: Notebook) -> None:
    source = "import os, time\nif os.environ['RANK'] == '0':\n    os.kill(os.getppid(), 19)\n"
    outcome = notebook.run(source + "    time.sleep(600)\n")
    assert isinstance(outcome.error, RunLost)
    assert "was stopped (SIGSTOP) for 5 s" in outcome.shown
    assert notebook.run("print('again')", gpus=1).error is None


BLOCKED = """
import os, signal
log = os.path.join(os.path.dirname(os.environ["TAAS_PAYLOAD"]), "logs", "rank-0.log")
os.remove(log)
os.mkfifo(log)
os.kill(os.getpid(), signal.SIGKILL)
"""


def opens_a_pipe(process: psutil.Process) -> bool:
    """Return whether a thread of a process is blocked opening a named pipe without a reader."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/wchan")
    return any(_read(path) == "wait_for_partner" for path in tasks)


def _read(path: Path) -> str:
    """Return the text of a file in /proc, or "" if its process or thread has ended."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


@pytest.mark.nightly
def test_an_interrupt_while_a_restart_waits_for_its_host_is_an_interrupt(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
import psutil
above = psutil.Process().parents()
next(it for it in above if "host.agent" in str(it.cmdline())).kill()
"""

    def interrupt(run: RunDriver) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with on_event(monkeypatch, lambda event: event["kind"] == "restart", interrupt):
        outcome = notebook.run(source, "--max-restarts 1", gpus=1)
    assert isinstance(outcome.error, KeyboardInterrupt)
    assert outcome.run is not None and outcome.run.head.state == "INTERRUPTED"
    assert notebook.run("print('on')", gpus=1).lines == {0: ["on"]}


def test_a_host_that_does_not_end_a_run_is_ended(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the restart, the agent blocks: it opens a log that is a named pipe without a reader."""

    def interrupt(run: RunDriver) -> None:
        while not opens_a_pipe(agent):
            threading.Event().wait(0.02)
        interrupt_twice()

    assert notebook.run("pass", gpus=1).error is None
    below = process_of(pools.named("local", Config())).children(recursive=True)
    [agent] = [process for process in below if AGENT in words(process)]
    with on_event(monkeypatch, lambda event: event["kind"] == "restart", interrupt):
        outcome = notebook.run(BLOCKED, "--max-restarts 1", gpus=1)
    assert isinstance(outcome.error, KeyboardInterrupt)
    again = notebook.run("print('on')", gpus=1)
    assert again.lines == {0: ["on"]}
    assert any("within 30 s; it is replaced" in str(event) for event in outcome.events)


@pytest.mark.nightly
@pytest.mark.fault(62)
@pytest.mark.usefixtures("no_leftovers")
def test_a_stopped_supervisor_keeps_nothing_from_ending(own_pool: Pool) -> None:
    """`down` ends all processes of a host whose supervisor is suspended."""
    own_pool.open()
    [supervisor] = process_of(own_pool).children()
    supervisor.suspend()
    tree = [supervisor, *supervisor.children(recursive=True)]
    own_pool.down()
    assert not left_of(tree)
