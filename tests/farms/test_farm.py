"""A farm of jobs: cells of a notebook, with a pool of three hosts on this machine."""

import concurrent.futures
import functools
import gc
import hashlib
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from distributed import Client, Future
from msgspec import structs

import taas_magic.api as taas
from taas_magic.capture import pickling
from taas_magic.errors import CaptureError, JobFailed, PoolError, ProtocolError, UsageError
from taas_magic.farms import farm as farm_module
from taas_magic.farms.farm import Farm, Job
from taas_magic.farms.messages import (
    DROP_PART,
    PUT_PART,
    FarmAddress,
    JobOutcome,
    JobUpdate,
    NodeUpdate,
)
from taas_magic.farms.table import FarmState, JobState, mime_bundle
from taas_magic.host.spec import Origin
from taas_magic.notebook import launch
from taas_magic.probe import cores
from tests.cellfiles import cells_of
from tests.conftest import carriers
from tests.eventually import HUNG_S, eventually
from tests.frontend import Frontend
from tests.harness import Notebook, below, without_pytests_filter, words
from tests.nightly import nightly
from tests.rig.pools import enter, settings_in

NO_BATCH_SYSTEM = """
[pools.batch]
engine = "dask_jobqueue.SLURMCluster"
gpus = 0
cores = 2
max_hosts = 3
options = { cores = 2, memory = "1GB" }
"""

[FUNCTIONS] = cells_of("farm_jobs")


def programs(name: str) -> set[psutil.Process]:
    """Return the descendants that run module `name` of `taas_magic.farms`; "" for any module."""
    return {it for it in below(os.getpid()) if f"taas_magic.farms.{name}" in words(it)}


def node_besides(known: set[psutil.Process]) -> psutil.Process:
    """Return the oldest process of a node that is not in `known`.

    Younger processes may be forks of the node, which have its command line until they call exec.
    """
    return min(programs("node") - known, key=lambda it: it.create_time())


@pytest.fixture(scope="module")
def planted(
    warm_notebook: Notebook, several_settings: Path, several_given_back: None
) -> Iterator[Notebook]:
    """Yield a notebook whose variable `farm` is a farm of two nodes. Close the farm at the end."""
    with pytest.MonkeyPatch.context() as patch, without_pytests_filter():
        enter(warm_notebook, several_settings, patch)
        warm_notebook.define(FUNCTIONS)
        warm_notebook.define("farm = taas.farm('many', nodes=2)")
        yield warm_notebook
        warm_notebook.define("farm.close()")
        eventually(lambda: not programs(""))  # the nodes end some time after `close`


@pytest.fixture
def farm(planted: Notebook) -> Farm:
    found = planted.shell.user_ns["farm"]
    assert isinstance(found, Farm)
    return found


@pytest.fixture
def names(planted: Notebook) -> dict[str, Any]:
    found: dict[str, Any] = planted.shell.user_ns
    return found


def test_the_folder_of_an_open_farm_stays(farm: Farm) -> None:
    """Only folders of ended farms are removed, even if `keep` allows no further folders."""
    folders = farm.folder.parent
    (folders / "farm-0").mkdir()
    (folders / "farm-0" / farm_module.LOG).touch()
    farm_module._remove_ended(folders, keep=0)
    assert farm.folder in folders.iterdir()
    assert folders / "farm-0" not in folders.iterdir()


def test_results_arrive_as_they_are_ready_and_a_listener_is_called_for_each(
    planted: Notebook, farm: Farm, names: dict[str, Any]
) -> None:
    planted.define("heard = []\nfarm.on_solution(lambda job: heard.append(job.name))")
    planted.define("jobs = farm.map(train, range(6), more=1)")
    planted.define("got = {job.args: job.result() for job in farm.as_completed(jobs)}")
    planted.define("right = all(type(it) is Solution for it in got.values())")
    got, jobs, heard = names["got"], names["jobs"], names["heard"]
    assert {args: it.value for args, it in got.items()} == {(x,): 3 * x + 1 for x in range(6)}
    assert names["right"]
    eventually(lambda: len(heard) == len(jobs))  # a listener may be called after that
    assert sorted(heard) == sorted(job.name for job in jobs)
    assert all(job.host.endswith(("many-0", "many-1", "many-2")) for job in jobs)
    assert (jobs[2].folder / "output.log").read_text() == "training 2\n"


def test_a_job_that_raises_fails_with_its_traceback_in_the_notebooks_lines(
    planted: Notebook, farm: Farm, names: dict[str, Any]
) -> None:
    assert farm.map(names["divide"], []) == []
    error = farm.submit(names["divide"], 0).exception()
    assert isinstance(error, JobFailed)
    shown = "\n".join(error._render_traceback_())
    assert "Cell In[" in shown and "return 1 / x" in shown
    assert "ZeroDivisionError: division by zero" in shown
    assert "taas_magic" not in shown


def test_a_job_that_raises_is_repeated_as_often_as_retries_allows(
    farm: Farm, names: dict[str, Any], tmp_path: Path
) -> None:
    once = names["once"]
    assert farm.submit(once, str(tmp_path / "a"), retries=1).result() == "the second time"
    with pytest.raises(JobFailed, match="ValueError: the first time"):
        farm.submit(once, str(tmp_path / "b")).result()


def test_a_job_that_kills_its_process_fails_by_name_and_others_go_on(
    farm: Farm, names: dict[str, Any]
) -> None:
    die, train = names["die"], names["train"]
    job = farm.submit(die, retries=1)
    with pytest.raises(JobFailed, match=rf"{job.name} on host .*was killed by SIGKILL"):
        job.result()
    assert farm.submit(train, 2).result().value == 6


def test_a_job_reads_the_store_and_saves_to_its_own_folder(
    planted: Notebook, farm: Farm, names: dict[str, Any]
) -> None:
    (planted.project / "here.txt").write_text("read me")
    save = names["save"]
    job = farm.submit(save, [1, 2])
    assert job.result() is True
    assert torch.load(job.folder / "model.pt", weights_only=True) == [1, 2]
    assert not (planted.project / "model.pt").exists()
    assert not (planted.project / "stray.txt").exists()


def test_files_that_are_kept_out_of_the_store_are_removed_with_their_job(
    farm: Farm, names: dict[str, Any]
) -> None:
    jobs = farm.map(names["leave_stray"], range(20))
    found, folders = zip(*(job.result() for job in jobs), strict=True)
    assert set(found) == {(False, False)}
    assert max(folders) <= farm.state.slots


def test_a_large_array_goes_to_a_host_once_and_each_job_may_write_to_its_own(
    planted: Notebook, farm: Farm, names: dict[str, Any]
) -> None:
    planted.define("data = numpy.zeros(1 << 20)")
    planted.define("sums = [job.result() for job in farm.map(total, [data] * 3)]")
    assert names["sums"] == [1.0] * 3
    assert names["data"][0] == 0.0


def test_an_array_that_several_jobs_share_is_hashed_once(
    farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sizes = hashlib.blake2b, list[int]()

    def recorded(data: Any = b"", **options: Any) -> Any:
        sizes.append(memoryview(data).nbytes)
        return real(data, **options)

    monkeypatch.setattr(hashlib, "blake2b", recorded)
    table = np.arange(1_000_000)
    assert [job.result() for job in farm.map(len, [table] * 3)] == [1_000_000] * 3
    assert sizes.count(table.nbytes) == 1


def test_a_large_result_and_a_large_file_come_back_whole(
    planted: Notebook, farm: Farm, names: dict[str, Any]
) -> None:
    planted.define("def grow(x): taas.save(data := numpy.full(1 << 17, x), 'data.pt'); return data")
    for number, job in enumerate(farm.map(names["grow"], range(3))):
        assert job.result().shape == (1 << 17,) and (job.result() == number).all()
        assert (torch.load(job.folder / "data.pt", weights_only=False) == number).all()


def test_what_cannot_travel_is_refused_before_anything_is_submitted(
    farm: Farm, names: dict[str, Any]
) -> None:
    train = names["train"]
    with pytest.raises(CaptureError, match=r"`more\['lock'\]` is a _thread.lock"):
        farm.submit(train, 1, more={"lock": threading.Lock()})


def test_an_interrupt_of_a_submit_leaves_nothing_in_the_farm(
    farm: Farm, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes while the second large argument is on its way to the farm's process."""
    stored, calls = farm._stored_parts, []
    send = stored._call

    class Interrupted(concurrent.futures.Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            raise KeyboardInterrupt

    def call(op: str, **arguments: Any) -> Any:
        calls.append((op, arguments["name"]))
        sent = send(op, **arguments)
        if len(calls) != 2:
            return sent
        interrupted = Interrupted()
        sent.add_done_callback(lambda sent: interrupted.set_result(sent.result()))
        return interrupted

    known = set(farm.state.jobs)
    monkeypatch.setattr(stored, "_call", call)
    with pytest.raises(KeyboardInterrupt):
        farm.submit(names["train"], torch.rand(1 << 15), more=torch.rand(1 << 15))
    assert not stored._known and not stored._users
    eventually(lambda: len(calls) == 4)
    put = {name for op, name in calls if op == PUT_PART}
    assert put == {name for op, name in calls if op == DROP_PART} and len(put) == 2
    assert set(farm.state.jobs) == known
    monkeypatch.undo()
    assert farm.submit(names["train"], 1).result().value == 3


def test_a_function_that_a_job_returns_uses_the_notebooks_variables(
    planted: Notebook, names: dict[str, Any]
) -> None:
    planted.define("""
factor = 2
def make_multiplier(n):
    global set_by_the_job
    set_by_the_job = 5
    return lambda x: factor * n * x + set_by_the_job
multiply = farm.submit(make_multiplier, 3).result()
first, factor = multiply(1), 10
second = multiply(1)
""")
    assert (names["first"], names["second"]) == (2 * 3 + 5, 10 * 3 + 5)


def test_jobs_get_the_hooks_of_the_notebooks_tensors(
    planted: Notebook, names: dict[str, Any]
) -> None:
    planted.define("""
hooked, also_hooked = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
hooked.register_hook(lambda grad: grad * 2)
def triple_gradient(tensor):
    tensor.grad *= 3
also_hooked.register_post_accumulate_grad_hook(triple_gradient)
def gradients_with(given):
    (hooked + given).backward()
    return hooked.grad.item(), given.grad.item()
gradients = farm.submit(gradients_with, also_hooked).result()
""")
    assert names["gradients"] == (2, 3)


def test_short_jobs_share_a_process_and_fresh_ones_have_their_own(
    farm: Farm, names: dict[str, Any]
) -> None:
    train = names["train"]

    def some_share() -> bool:  # on a busy machine, no job may be short
        return len({job.result().pid for job in farm.map(train, range(12))}) < 12

    eventually(some_share)
    alone = {job.result().pid for job in farm.map(train, range(4), fresh=True)}
    assert len(alone) == 4


@pytest.mark.nightly
def test_jobs_find_the_modules_that_an_earlier_training_imported(farm: Farm) -> None:
    def had_dynamo() -> bool:
        had = "torch._dynamo" in sys.modules
        torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()
        return had

    eventually(lambda: farm.submit(had_dynamo, fresh=True).result())


def test_an_interrupt_of_the_wait_ends_the_jobs_that_are_waited_for(
    farm: Farm, names: dict[str, Any], tmp_path: Path
) -> None:
    wait = names["wait"]
    marks = [tmp_path / str(number) for number in range(2)]
    jobs = farm.map(wait, map(str, marks))

    main = threading.main_thread().ident or 0

    def is_awaited() -> bool:
        frame = sys._current_frames()[main]
        return frame.f_code is Farm.as_completed.__code__ and "ended" in frame.f_locals

    def interrupt() -> None:
        eventually(lambda: all(mark.exists() for mark in marks) and is_awaited())
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt, match="2 jobs were cancelled"):
        list(farm.as_completed(jobs))
    assert [job.state for job in jobs] == ["cancelled"] * 2
    train = names["train"]
    assert farm.submit(train, 1).result().value == 3


def test_a_job_whose_node_dies_runs_again_elsewhere_and_another_node_starts(
    farm: Farm, names: dict[str, Any], tmp_path: Path
) -> None:
    waits, train, mark = names["wait_unless"], names["train"], tmp_path / "mark"
    done = farm.submit(train, 5)
    assert done.result().value == 15
    job = farm.submit(waits, str(mark))
    eventually(lambda: mark.exists() and mark.read_text())
    parents = psutil.Process(int(mark.read_text())).parents()
    [node] = [it for it in parents if "taas_magic.farms.node" in words(it)]
    node.kill()
    assert job.result() == "elsewhere"
    assert done.result().value == 15
    eventually(lambda: [it for it in nodes_of(farm) if it.state == "lost"])
    eventually(lambda: len(farm.status().ready) == 2)


def nodes_of(farm: Farm) -> list[NodeUpdate]:
    return list(farm.status().nodes.values())


def test_the_result_of_a_job_that_ends_during_its_submission_arrives(
    farm: Farm, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, train = farm._client.map, names["train"]

    def submit_and_wait(*args: Any, **kwargs: Any) -> list[Future]:
        futures: list[Future] = submit(*args, **kwargs)
        eventually(lambda: all(future.done() for future in futures))
        return futures

    monkeypatch.setattr(farm._client, "map", submit_and_wait)
    job = farm.submit(train, 3)
    assert job.result().value == 9 and job.took_s
    assert (job.folder / "output.log").read_text() == "training 3\n"


def test_a_node_that_hangs_at_its_start_is_replaced(
    several: Notebook,
) -> None:
    known = programs("node")
    several.define("import taas\nhanging = taas.farm('many', nodes=1)")
    hanging = several.shell.user_ns["hanging"]
    assert isinstance(hanging, Farm)
    ended: list[NodeUpdate] = []
    while not ended:
        eventually(lambda: programs("node") - known)
        node = node_besides(known)
        node.suspend()
        eventually(lambda: {it.state for it in nodes_of(hanging)[-1:]} & {"ready", "lost"})
        ended = [it for it in nodes_of(hanging) if "did nothing" in it.why]
        if not ended:  # the node was ready before the signal stopped it: repeat with the next node
            known.add(node)
            came = hanging.status().ready
            node.kill()
            eventually(lambda came=came: all(it.state != "ready" for it in came))  # type: ignore[misc]
    assert "the farm's node did not start: it did nothing for" in ended[0].why
    eventually(lambda: nodes_of(hanging)[-1] is not ended[0])
    _, alive = psutil.wait_procs([node], timeout=HUNG_S)
    assert not alive
    several.define("hanging.close()")


def no_node_starts(patch: pytest.MonkeyPatch) -> None:
    """Make Python exit at once in each node of the farms that are created from now on."""

    def origin(*args: Any) -> Origin:
        made = own(*args)
        return structs.replace(made, environ={**made.environ, "PYTHONHOME": "/nowhere"})

    own = launch.origin
    patch.setattr(launch, "origin", origin)


def test_jobs_fail_if_no_node_starts(
    several: Notebook, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_node_starts(monkeypatch)
    several.define("never = taas.farm('many')")
    never, train = names["never"], names["train"]
    assert isinstance(never, Farm)
    error = never.submit(train, 1).exception(HUNG_S)
    assert isinstance(error, PoolError)
    assert "3 nodes did not start, so no more are requested: " in str(error)
    assert "the farm's node ended with exit code 1; its log says why" in str(error)
    never.close()


def test_jobs_wait_for_a_starting_node_if_the_nodes_of_another_pool_do_not_start(
    several: Notebook, several_settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has no batch system, so the nodes of the first pool fail at once."""
    many = (several_settings / "taas" / "taas.toml").read_text()
    enter(several, settings_in(tmp_path, NO_BATCH_SYSTEM + many), monkeypatch)
    several.define("import taas\nboth = taas.farm(['batch', 'many'])")
    both = several.shell.user_ns["both"]
    assert isinstance(both, Farm)
    with both:
        assert [job.result() for job in both.map(abs, range(8))] == [*range(8)]
        states = [node.state for node in nodes_of(both)]
        assert states.count("lost") >= 3 and "given up" not in states


@pytest.mark.parametrize("starts", [True, False])
def test_the_error_of_a_farm_whose_process_does_not_start_has_its_log(
    several: Notebook, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    before, why = programs("process"), "did nothing for 0 s" if starts else "no room"
    if starts:
        monkeypatch.setattr(farm_module, "START_TIMEOUT_S", 0.0)
    else:
        command = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit('no room')"]
        monkeypatch.setattr(farm_module, "spawn_command", lambda module: command)
    with pytest.raises(PoolError, match=why) as error:
        taas.farm("many")
    assert farm_module.LOG in str(error.value)
    assert programs("process") <= before


def test_a_farm_that_cannot_connect_to_its_process_ends_the_process(
    several: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    import distributed

    def refuse(*args: object, **options: object) -> None:
        raise OSError("no connection")

    before = programs("process")
    monkeypatch.setattr(distributed, "Client", refuse)
    with pytest.raises(OSError, match="no connection") as error:
        taas.farm("many")
    assert programs("process") <= before, error  # its frames still refer to the process


def test_a_node_reaches_no_file_outside_of_its_jobs_folders(farm: Farm, tmp_path: Path) -> None:
    packed = pickling.dump("the result")

    def delivered(*names: str) -> Job:
        job = Job(farm, "forged", (), {}, tmp_path / "jobs" / "forged")
        files = [(os.fsencode(name), b"x") for name in names]
        farm._store_outcome(job, JobOutcome(took_s=1.0, parts=[packed.data], files=files))
        return job

    for name in ("../outside", f"{tmp_path}/outside", "a/../../outside", "", "."):
        with pytest.raises(ProtocolError):
            delivered("inside", name).result()
    farm._on_message((0.0, {"type": "job", "job": "../outside", "node": "node-0", "lines": "x\n"}))
    assert not list(tmp_path.rglob("*side")) and not (farm.folder / "outside").exists()
    assert delivered("a/inside").result() == "the result"
    assert (tmp_path / "jobs" / "forged" / "a" / "inside").read_bytes() == b"x"


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("raise", 1), ("return", 0)])
def test_a_child_that_a_job_forks_ends_like_a_child_of_a_program(
    farm: Farm, names: dict[str, Any], how: str, code: int
) -> None:
    job = farm.submit(names["fork_and"], how)
    assert job.result() == code
    log = (job.folder / "output.log").read_text() if how == "raise" else ""
    assert ("ValueError: of the child" in log) is (how == "raise")
    train = names["train"]
    assert [it.result().value for it in farm.map(train, range(6))] == [3 * x for x in range(6)]


@pytest.mark.parametrize(
    "how", ["another session", "another group", "another group, and the job dies"]
)
def test_a_child_that_a_job_leaves_is_ended_even_in_another_process_group_or_session(
    farm: Farm, names: dict[str, Any], tmp_path: Path, how: str
) -> None:
    path = tmp_path / "pid"
    error = farm.submit(names["leave_a_child"], how, str(path)).exception()
    assert (error is not None) is how.endswith("dies")
    eventually(lambda: not psutil.pid_exists(int(path.read_text())))


@pytest.mark.parametrize("method", ["fork", "spawn", nightly("forkserver")])
def test_children_of_a_job_find_the_notebooks_names(
    farm: Farm, names: dict[str, Any], method: str
) -> None:
    """If they did not, a Pool would restart its workers endlessly."""
    assert farm.submit(names["in_a_pool"], method).result(HUNG_S) == 6


def test_files_of_a_failed_attempt_are_not_among_those_of_the_next_attempt(
    farm: Farm, names: dict[str, Any], tmp_path: Path
) -> None:
    job = farm.submit(names["save_at_second_try"], str(tmp_path / "mark"), retries=1)
    job.result()
    assert [path.name for path in job.folder.iterdir()] == ["second-\udce9.pt"]


@pytest.mark.parametrize("how", ["closed", "None"])
def test_a_job_that_has_closed_its_output_returns_and_the_next_one_prints(
    farm: Farm, names: dict[str, Any], how: str
) -> None:
    close_output, train = names["close_output"], names["train"]
    assert [job.result() for job in farm.map(close_output, [how] * 4)] == [None] * 4
    jobs = farm.map(train, range(4))
    assert [job.result().value for job in jobs] == [0, 3, 6, 9]
    assert all((job.folder / "output.log").exists() for job in jobs)


def test_a_job_finds_what_the_notebook_has_set_and_edited_before_it_was_submitted(
    planted: Notebook, farm: Farm, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short jobs share a process, which keeps the modules that earlier jobs imported."""
    monkeypatch.syspath_prepend(planted.project)
    # if a file is rewritten in the same second with the same length, Python uses its old bytecode
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = []
    for number in range(4):
        planted.define(f"torch.set_default_dtype(torch.float{(64, 32)[number % 2]})")
        (planted.project / "edited.py").write_text(f"def number(): return {number}\n")
        planted.define("import importlib, edited\nimportlib.reload(edited)")
        jobs = farm.submit(names["default_dtype"]), farm.submit(names["edited"].number)
        found.append([job.result() for job in jobs])
    assert found == [[f"torch.float{(64, 32)[number % 2]}", number] for number in range(4)]


def test_a_registered_loader_is_an_ordinary_loader_in_a_job(
    planted: Notebook, farm: Farm, names: dict[str, Any]
) -> None:
    planted.define("""
from torch.utils.data import DataLoader
loader = taas.register(DataLoader(range(6), batch_size=2))
def sum_of(given): return [sum(batch.sum().item() for batch in it) for it in (given, loader)]
sums = farm.submit(sum_of, loader).result()
taas.unregister(loader)
""")
    assert names["sums"] == [15, 15]


def test_a_listener_may_wait_for_jobs_and_call_sys_exit(
    planted: Notebook, farm: Farm, names: dict[str, Any]
) -> None:
    planted.define("""
chained = []
def chain(job):
    if job.args == (1,):
        chained.append(farm.submit(train, 2).result().value)
        sys.exit("the listener leaves")
farm.on_solution(chain)
""")
    train, chained = names["train"], names["chained"]
    assert farm.submit(train, 1).result().value == 3
    eventually(lambda: chained)
    assert farm.submit(train, 3).result().value == 9 and chained == [6]


def test_a_job_is_like_a_future(farm: Farm, names: dict[str, Any]) -> None:
    job = farm.submit(names["train"], 2)
    ended: queue.SimpleQueue[object] = queue.SimpleQueue()
    job.add_done_callback(ended.put)
    assert ended.get(timeout=HUNG_S) is job
    assert job.done() and not job.running() and not job.cancelled()
    assert job.result(timeout=0).value == 6 and job.exception(timeout=0) is None
    assert not job.cancel() and not job.cancelled()
    waiting = farm.submit(time.sleep, 10_000)
    with pytest.raises(TimeoutError, match="has not ended after 0 s"):
        waiting.result(timeout=0)
    assert waiting.cancel() and waiting.cancelled() and not waiting.cancel()


def test_a_job_may_remove_its_working_folder(farm: Farm, tmp_path: Path) -> None:
    """Several jobs, because only the process of a short job may run a further job."""

    def leave(name: str) -> str:
        os.mkdir(name)
        os.chdir(name)
        os.rmdir(name)
        return name

    folders = [str(tmp_path / str(number)) for number in range(6)]
    assert [job.result() for job in farm.map(leave, folders)] == folders


def test_a_job_that_raises_an_exception_called_cancelled_has_failed(
    planted: Notebook, names: dict[str, Any]
) -> None:
    planted.define("""
class Cancelled(Exception): pass
def give_up(): raise Cancelled("by the function")
job = farm.submit(give_up)
""")
    job = names["job"]
    with pytest.raises(JobFailed, match="Cancelled: by the function") as error:
        job.result()
    assert error.value.etype == "Cancelled"
    assert job.state == "failed" and not job.cancelled()


def test_a_done_callback_may_raise_anything(
    farm: Farm, names: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    job = farm.submit(names["train"], 4)
    job.add_done_callback(lambda job: sys.exit("the callback leaves"))
    assert [it.result().value for it in farm.as_completed([job])] == [12]
    job.add_done_callback(lambda job: pytest.fail("the callback fails"))
    assert farm.submit(names["train"], 2).result().value == 6
    assert caplog.messages.count(f"done callback of job {job.name}") == 2


def test_if_the_output_of_jobs_cannot_be_written_one_warning_says_so(
    farm: Farm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def speak(number: int, mark: str) -> None:
        while not os.path.exists(mark):
            time.sleep(0.02)
        print("first line of", number)
        time.sleep(1)
        print("last line of", number)

    jobs = farm.map(speak, range(2), [str(tmp_path / "mark")] * 2)
    for job in jobs:
        job.folder.mkdir()
        (job.folder / "output.log").symlink_to("/dev/full")
    (tmp_path / "mark").touch()
    assert [job.result() for job in jobs] == [None] * 2
    assert [job.last_line for job in jobs] == ["last line of 0", "last line of 1"]
    [warning] = [it for it in caplog.messages if "output of jobs" in it]
    assert "its file system is full" in warning and str(farm.folder) in warning


def test_a_farm_keeps_neither_arguments_nor_results_of_ended_jobs(
    farm: Farm, names: dict[str, Any]
) -> None:
    given = torch.zeros(1)
    job = farm.submit(names["train"], given)
    result, name = job.result(), job.name
    kept = [weakref.ref(it) for it in (given, result)]
    del given, result, job
    eventually(lambda: gc.collect() >= 0 and not any(it() is not None for it in kept))
    assert farm.status().jobs[name].state == "done"
    assert farm.status().jobs[name].last_line == "training tensor([0.])"


def test_a_job_that_is_cancelled_before_it_has_a_slot_does_not_run(
    farm: Farm, names: dict[str, Any], tmp_path: Path
) -> None:
    """Dask may send a node the end of one job, the next job and its cancellation at once."""

    def stay() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(10_000)

    for number in range(20):
        assert farm.submit(names["train"], number).result().value == 3 * number
        farm.submit(stay).cancel()
    eventually(lambda: not any(psutil.pid_exists(int(it.name)) for it in tmp_path.iterdir()))


def test_an_option_of_submit_that_is_a_parameter_of_the_function_is_refused(farm: Farm) -> None:
    def fetch(url: str, retries: int = 1) -> tuple[str, int]:
        return url, retries

    with pytest.raises(UsageError, match=r"fetch has a parameter `retries`.*functools.partial"):
        farm.submit(fetch, "u", retries=2)
    with pytest.raises(UsageError, match="fetch has a parameter `retries`"):
        farm.submit(fetch, "u", retries=0)
    assert farm.submit(functools.partial(fetch, retries=5), "u", retries=2).result() == ("u", 5)
    with pytest.raises(UsageError, match=r"a farm's job needs a function.*; got int 3\. To call"):
        farm.submit(3)  # type: ignore[arg-type]


def test_arguments_may_have_the_names_of_a_farms_own_parameters(farm: Farm) -> None:
    def echo(**given: Any) -> dict[str, Any]:
        return given

    names = ("self", "function", "args", "kwargs", "name", "job", "iterables", "calls", "folder")
    given: dict[str, Any] = dict.fromkeys(names, 3)
    assert farm.submit(echo, **given).result() == given
    [job] = farm.map(lambda first, **given: (first, given), [1], **given)
    assert job.result() == (1, given)


def test_threads_submit_functions_without_a_name(planted: Notebook, names: dict[str, Any]) -> None:
    planted.define("""import concurrent.futures
def submit_some(number):
    jobs = [farm.submit(lambda x, number=number: (number, x), x) for x in range(10)]
    return [it.result() for it in jobs]
with concurrent.futures.ThreadPoolExecutor(4) as threads:
    results = list(threads.map(submit_some, range(4)))
""")
    assert names["results"] == [[(number, x) for x in range(10)] for number in range(4)]


@pytest.mark.nightly
def test_a_node_whose_forkserver_dies_is_replaced_and_its_jobs_are_done_elsewhere(
    farm: Farm, names: dict[str, Any], tmp_path: Path
) -> None:
    waits, train, mark = names["wait_unless"], names["train"], tmp_path / "mark"
    job = farm.submit(waits, str(mark))
    eventually(lambda: mark.exists() and mark.read_text())
    parent = psutil.Process(int(mark.read_text())).parent()
    assert parent is not None
    parent.kill()
    assert job.result() == "elsewhere"
    assert [it.result().value for it in farm.map(train, range(6))] == [3 * x for x in range(6)]
    eventually(lambda: len(farm.status().ready) == 2)


def test_a_farm_is_closed_while_a_fork_of_the_kernel_lives(several: Notebook) -> None:
    several.define("""import multiprocessing, taas
forked_from = taas.farm('many')
context = multiprocessing.get_context("fork")
over = context.Event()
child = context.Process(target=over.wait)
child.start()
forked_from.close()
over.set()
child.join()
""")
    assert several.shell.user_ns["forked_from"]._process.returncode == 0


@pytest.mark.nightly
def test_a_job_that_is_submitted_while_the_farm_gives_up_fails(
    several: Notebook, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_node_starts(monkeypatch)
    several.define("""
class Slow:
    def __reduce__(self):
        first.exception()
        return list, ()
gives_up = taas.farm("many")
first = gives_up.submit(max, 1, 2)
job = gives_up.submit(len, Slow())
""")
    assert isinstance(names["job"].exception(HUNG_S), PoolError)
    names["gives_up"].close()


def test_an_interrupted_close_ends_the_farms_process_and_all_jobs(
    several: Notebook,
) -> None:
    several.define("import taas\ninterrupted = taas.farm('many', nodes=1)")
    interrupted = several.shell.user_ns["interrupted"]
    assert isinstance(interrupted, Farm)
    jobs = interrupted.map(time.sleep, [10_000] * 3)
    eventually(jobs[0].running)
    jobs[1].add_done_callback(lambda job: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        interrupted.close()
    assert interrupted._process.returncode == 0
    assert interrupted.status().is_closed
    assert [job.state for job in jobs] == ["cancelled", "cancelled", "failed"]
    with pytest.raises(PoolError, match="you closed it"):
        jobs[2].result()


def test_a_job_whose_callback_outlasts_its_node_runs_once(
    several: Notebook, tmp_path: Path
) -> None:
    """Dask would repeat a job whose result is lost. It would do so before it runs the next job."""

    def note(name: str) -> None:
        with open(name, "a") as file:
            file.write("called\n")

    first, second, over = str(tmp_path / "first"), tmp_path / "second", threading.Event()
    several.define(f"import taas\nslow = taas.farm('many', cpus={cores()}, nodes=(0, 1))")
    slow = several.shell.user_ns["slow"]
    assert isinstance(slow, Farm)
    with slow:
        job = slow.submit(note, first)
        job.add_done_callback(lambda job: over.wait(HUNG_S))
        eventually(lambda: [node for node in nodes_of(slow) if node.state == "left"])
        slow.submit(note, str(second))
        eventually(second.exists)
        over.set()
    assert Path(first).read_text() == "called\n"


def test_numbers_of_nodes_and_gpus_that_a_pool_does_not_have_are_refused(several: Notebook) -> None:
    with pytest.raises(UsageError, match=r"0 <= least <= most <= 3"):
        taas.farm("many", nodes=(1, 9))
    with pytest.raises(UsageError, match=r"0 <= least <= most <= 3.*; got 'x'"):
        taas.farm("many", nodes="x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"pool needs the name of a pool.*; got pool=2, "):
        taas.farm(2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"gpus must be 0 to 2"):
        taas.farm("many", gpus=3)


@pytest.mark.nightly
def test_a_farm_of_one_node(
    several: Notebook,
    farm: Farm,
    names: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checks that need a new farm share one farm. The last check kills the farm's process."""
    eventually(lambda: len(farm.status().ready) == 2)  # no other node starts from here on
    known, connect = programs(""), farm_module._connect

    def connect_late(place: FarmAddress) -> Client:
        client = connect(place)
        eventually(lambda: client.scheduler_info()["workers"])
        return client

    with monkeypatch.context() as patch:
        patch.setattr(farm_module, "_connect", connect_late)
        several.define("import taas\nfarm_of_one = taas.farm('many', nodes=1)")
    farm_of_one = names["farm_of_one"]
    assert isinstance(farm_of_one, Farm)
    a_node_that_came_before_the_kernel_listens_is_known(farm_of_one)
    node = node_besides(known)
    a_job_that_is_cancelled_while_its_arguments_come_is_not_called(
        farm_of_one, node, names, tmp_path
    )
    the_only_node_is_replaced_when_it_dies(farm_of_one, node)
    [process] = programs("process") - known
    a_farm_whose_process_dies_says_so_of_each_job(farm_of_one, process, names["wait"])


def a_node_that_came_before_the_kernel_listens_is_known(farm: Farm) -> None:
    eventually(lambda: farm.status().ready)
    assert farm.status().ready[0].host.endswith(("many-0", "many-1", "many-2"))


def a_job_that_is_cancelled_while_its_arguments_come_is_not_called(
    farm: Farm, node: psutil.Process, names: dict[str, Any], tmp_path: Path
) -> None:
    large = names["numpy"].ones(1 << 24)
    marks = [tmp_path / str(number) for number in range(2)]
    for mark in marks:
        node.suspend()
        job = farm.submit(names["mark_with"], large + len(mark.name), str(mark))
        job.cancel()
        node.resume()
    assert farm.submit(names["train"], 1).result().value == 3
    assert not [mark for mark in marks if mark.exists()]


def the_only_node_is_replaced_when_it_dies(farm: Farm, node: psutil.Process) -> None:
    [first] = farm.status().ready
    node.kill()
    eventually(lambda: [it for it in farm.status().ready if it is not first])


def a_farm_whose_process_dies_says_so_of_each_job(
    dying: Farm, process: psutil.Process, wait: Callable[[str], None]
) -> None:
    job = dying.submit(wait, "never")
    process.kill()
    with pytest.raises(PoolError, match=rf"{job.name} of {dying.name}: its process ended"):
        job.result()
    with pytest.raises(PoolError, match="create another farm"):
        dying.submit(wait, "never")
    dying.close()


def test_a_farm_whose_connection_ends_before_its_process_says_so_of_each_job(
    several: Notebook, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = programs("process")
    several.define("dying = taas.farm('many', nodes=1)")
    dying = names["dying"]
    assert isinstance(dying, Farm)
    monkeypatch.setattr(dying._process, "poll", lambda: None)
    [process] = programs("process") - known
    a_farm_whose_process_dies_says_so_of_each_job(dying, process, names["wait"])


def farm_state() -> FarmState:
    state = FarmState("farm-1", "many", 0, 2)
    state.add_job(JobState("train-1"))
    state.add_job(JobState("train-2"))
    state.apply_message(NodeUpdate("node-0", "ready", host="h<1>"))
    state.apply_message(JobUpdate("train-1", "node-0", state="running"))
    state.apply_message(JobUpdate("train-1", "node-0", lines="epoch 1\repoch 2\n"))
    return state


def test_the_table_has_nodes_jobs_their_hosts_and_last_lines() -> None:
    shown = mime_bundle(farm_state())
    assert (
        "1 node (0 to 2); each runs at most 1 job at a time · 1 queued, 1 running"
        in shown["text/plain"]
    )
    assert "train-1  running  h<1>  epoch 2" in shown["text/plain"]
    assert "h&lt;1&gt;" in shown["text/html"]
    assert shown["text/html"].index("1 queued") < shown["text/html"].index("<pre")
    (closed := farm_state()).mark_closed()
    assert "node-0" not in mime_bundle(closed)["text/plain"]


def test_jobs_of_a_lost_node_are_queued_again() -> None:
    state = farm_state()
    why = f"killed; its log says why ({'/long' * 30}/rank-0.log)"
    state.apply_message(NodeUpdate("node-0", "lost", why))
    assert state.counts()["queued"] == 2
    shown = mime_bundle(state)["text/plain"]
    assert why in shown
    assert shown.index("train-1") < shown.index("train-2"), "the job that starts next comes first"


def test_a_job_that_has_ended_neither_runs_nor_waits_again() -> None:
    state = farm_state()
    job = state.jobs["train-1"]
    job.ended = "cancelled"
    state.apply_message(JobUpdate("train-1", "node-0", state="running"))
    state.apply_message(NodeUpdate("node-0", "lost", "killed"))
    assert job.state == "cancelled"


def test_the_remaining_time_is_estimated_from_the_finished_jobs() -> None:
    state = farm_state()
    assert state.eta_s() is None
    state.jobs["train-1"].ended, state.jobs["train-1"].took_s = "done", 8.0
    state.slots = 2
    assert state.eta_s() == 4.0


def test_a_late_update_does_not_return_a_node_to_an_earlier_state() -> None:
    state = farm_state()
    state.apply_message(NodeUpdate("node-0", "starting", host="h2"))
    assert [(node.state, node.host) for node in state.ready] == [("ready", "h2")]
    state.apply_message(NodeUpdate("node-0", "lost", "killed"))
    state.apply_message(NodeUpdate("node-0", "ready"))
    assert not state.ready


def test_the_table_is_read_while_it_changes() -> None:
    state, over = farm_state(), threading.Event()

    def change() -> None:
        for number in range(2000):
            state.apply_message(NodeUpdate(f"node-{number}", "left"))
            state.jobs[f"job-{number}"] = JobState(f"job-{number}")
        over.set()

    threading.Thread(target=change).start()
    while not over.is_set():
        assert len(state.ready) <= 1 and state.eta_s() is None and state.counts()


@pytest.mark.usefixtures("without_warm_up")
def test_each_slot_has_a_gpu_of_its_own_and_a_farm_ends_with_its_kernel(
    kernel_of_its_own: Frontend, tmp_path: Path, no_leftovers: str
) -> None:
    """Two jobs run at the same time, because they wait for each other. Each job sees one GPU."""
    (tmp_path / "project" / "taas.toml").write_text("[pools.local]\ngpus = 2\ncores = 2")
    (tmp_path / "temporary").mkdir()
    request = kernel_of_its_own.run(f"""import os, time
os.environ["CUDA_VISIBLE_DEVICES"] = "4,5"
os.environ["TMPDIR"] = "{tmp_path}/temporary"  # for what nodes and jobs make
import taas
def gpus_beside(mine, other):
    open(mine, "w").close()
    while not os.path.exists(other):
        time.sleep(0.02)
    return os.environ["CUDA_VISIBLE_DEVICES"]
farm = taas.farm("local", gpus=1)
marks = "{tmp_path}/first", "{tmp_path}/second"
jobs = [farm.submit(gpus_beside, *marks), farm.submit(gpus_beside, *marks[::-1])]
print("gpus", sorted(job.result() for job in jobs))
job = farm.submit(time.sleep, 600)
while not farm.status().counts()["running"]:
    time.sleep(0.1)
""")
    assert "gpus ['4', '5']" in kernel_of_its_own.text(request)
    kernel_of_its_own.process.kill()
    eventually(lambda: not carriers(no_leftovers))
    left = {path.name.partition("_")[0] for path in (tmp_path / "temporary").iterdir()}
    assert left <= {"dask-scratch-space", "torchinductor"}  # caches of libraries
