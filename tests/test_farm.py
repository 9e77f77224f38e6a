"""A farm of jobs, as a user has it: cells of a notebook, a pool of three hosts of this machine."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import taas_magic.api as taas
from taas_magic.errors import CaptureError, JobFailed, PoolError, UsageError
from taas_magic.farms.farm import Farm
from taas_magic.farms.table import FarmState, JobState, html, text
from taas_magic.farms.terms import JobNews, NodeNews
from tests.harness import Notebook, below, without_pytests_filter, words
from tests.rig.pools import enter

FUNCTIONS = """import os, signal, threading, time
import numpy
import taas
SCALE = 3

class Solution:
    def __init__(self, value, pid): self.value, self.pid = value, pid

def train(x, *, more=0):
    print("training", x)
    return Solution(x * SCALE + more, os.getpid())

def divide(x):
    return 1 / x

def once(path):
    if not os.path.exists(path):
        open(path, "w").close()
        raise ValueError("the first time")
    return "the second time"

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def save(value):
    taas.save(value, "model.pt")
    with open("stray.txt", "w") as stray:
        stray.write("not for the store")
    return os.path.exists("here.txt")

def total(array):
    array[0] = 1
    return float(array.sum())

def wait(path):
    open(path, "w").close()
    time.sleep(600)

def wait_unless(path):
    if not os.path.exists(path):
        with open(path, "w") as mark:
            mark.write(str(os.getpid()))
        time.sleep(600)
    return "elsewhere"
"""


@pytest.fixture(scope="module")
def planted(
    warm_notebook: Notebook, several_settings: Path, several_given_back: None
) -> Iterator[Notebook]:
    """The notebook with a farm of two nodes, `farm`; closed at the end, and nothing is left."""
    with pytest.MonkeyPatch.context() as patch, without_pytests_filter():
        enter(warm_notebook, several_settings, patch)
        warm_notebook.define(FUNCTIONS)
        warm_notebook.define("farm = taas.farm('many', nodes=2)")
        yield warm_notebook
        warm_notebook.define("farm.close()")
        assert not [words(it) for it in below(os.getpid()) if "taas_magic.farms" in words(it)]


@pytest.fixture
def farm(planted: Notebook) -> Farm:
    found = planted.shell.user_ns["farm"]
    assert isinstance(found, Farm)
    return found


@pytest.fixture
def names(planted: Notebook) -> dict[str, object]:
    return planted.shell.user_ns


def test_results_come_back_as_they_are_ready_and_a_listener_hears_of_each(
    planted: Notebook, farm: Farm, names: dict[str, object]
) -> None:
    planted.define("heard = []\nfarm.on_solution(lambda job: heard.append(job.name))")
    planted.define("jobs = farm.map(train, range(6), more=1)")
    planted.define("got = {job.args: job.result() for job in farm.as_completed(jobs)}")
    planted.define("right = all(type(it) is Solution for it in got.values())")
    got, jobs = names["got"], names["jobs"]
    assert isinstance(got, dict) and isinstance(jobs, list)
    assert {args: it.value for args, it in got.items()} == {(x,): 3 * x + 1 for x in range(6)}
    assert names["right"]
    assert sorted(names["heard"]) == sorted(job.name for job in jobs)  # type: ignore[call-overload]
    assert all(job.host.endswith(("many-0", "many-1", "many-2")) for job in jobs)
    assert (jobs[2].folder / "output.log").read_text() == "training 2\n"


def test_a_job_that_raises_fails_with_its_traceback_in_the_notebooks_lines(
    planted: Notebook, farm: Farm, names: dict[str, object]
) -> None:
    error = farm.submit(names["divide"], 0).exception()  # type: ignore[arg-type]
    assert isinstance(error, JobFailed)
    shown = "\n".join(error._render_traceback_())
    assert "Cell In[" in shown and "return 1 / x" in shown
    assert "ZeroDivisionError: division by zero" in shown
    assert "taas_magic" not in shown


def test_a_job_is_called_again_as_often_as_it_may(
    farm: Farm, names: dict[str, object], tmp_path: Path
) -> None:
    once = names["once"]
    assert callable(once)
    assert farm.submit(once, str(tmp_path / "a"), retries=1).result() == "the second time"
    with pytest.raises(JobFailed, match="ValueError: the first time"):
        farm.submit(once, str(tmp_path / "b")).result()


def test_a_job_that_kills_its_process_fails_by_name_and_others_go_on(
    farm: Farm, names: dict[str, object]
) -> None:
    die, train = names["die"], names["train"]
    assert callable(die) and callable(train)
    job = farm.submit(die, retries=1)
    with pytest.raises(JobFailed, match=rf"{job.name} on host .*was killed by SIGKILL"):
        job.result()
    assert farm.submit(train, 2).result().value == 6


def test_a_job_reads_the_store_and_saves_to_its_own_folder(
    planted: Notebook, farm: Farm, names: dict[str, object]
) -> None:
    (planted.project / "here.txt").write_text("read me")
    save = names["save"]
    assert callable(save)
    job = farm.submit(save, [1, 2])
    assert job.result() is True
    assert torch.load(job.folder / "model.pt", weights_only=True) == [1, 2]
    assert not (planted.project / "model.pt").exists()
    assert not (planted.project / "stray.txt").exists()


def test_a_large_array_goes_to_a_host_once_and_each_job_may_write_to_its_own(
    planted: Notebook, farm: Farm, names: dict[str, object]
) -> None:
    planted.define("data = numpy.zeros(1 << 20)")
    planted.define("sums = [job.result() for job in farm.map(total, [data] * 3)]")
    assert names["sums"] == [1.0] * 3
    assert names["data"][0] == 0.0  # type: ignore[index]


def test_what_cannot_travel_is_refused_before_anything_is_submitted(
    farm: Farm, names: dict[str, object]
) -> None:
    train = names["train"]
    assert callable(train)
    with pytest.raises(CaptureError, match=r"`more\['lock'\]` is a _thread.lock"):
        farm.submit(train, 1, more={"lock": threading.Lock()})


def test_short_jobs_share_a_process_and_fresh_ones_have_their_own(
    farm: Farm, names: dict[str, object]
) -> None:
    train = names["train"]
    assert callable(train)
    shared = {job.result().pid for job in farm.map(train, range(12))}
    alone = {job.result().pid for job in farm.map(train, range(4), fresh=True)}
    assert len(shared) < 12 and len(alone) == 4


def test_an_interrupt_of_the_wait_ends_the_jobs_that_are_waited_for(
    farm: Farm, names: dict[str, object], tmp_path: Path
) -> None:
    wait = names["wait"]
    assert callable(wait)
    marks = [tmp_path / str(number) for number in range(2)]
    jobs = farm.map(wait, map(str, marks))

    def interrupt() -> None:
        while not all(mark.exists() for mark in marks):
            threading.Event().wait(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt, match="2 jobs were cancelled"):
        list(farm.as_completed(jobs))
    assert [job.state for job in jobs] == ["cancelled"] * 2
    train = names["train"]
    assert callable(train)
    assert farm.submit(train, 1).result().value == 3


def test_a_job_whose_node_dies_is_done_elsewhere_and_another_node_comes(
    farm: Farm, names: dict[str, object], tmp_path: Path
) -> None:
    waits, train, mark = names["wait_unless"], names["train"], tmp_path / "mark"
    assert callable(waits) and callable(train)
    done = farm.submit(train, 5)
    assert done.result().value == 15
    job = farm.submit(waits, str(mark))
    while not (mark.exists() and mark.read_text()):
        threading.Event().wait(0.05)
    parents = psutil.Process(int(mark.read_text())).parents()
    [node] = [it for it in parents if "taas_magic.farms.node" in words(it)]
    node.kill()
    assert job.result() == "elsewhere"
    assert done.result().value == 15
    while len(farm.status().here) < 2:
        threading.Event().wait(0.05)
    assert [it for it in farm.status().nodes.values() if it.state == "lost"]


def test_the_only_node_is_replaced_when_it_dies(several: Notebook) -> None:
    known = below(os.getpid())
    several.define("import taas\nfarm_of_one = taas.farm('many', nodes=1)")
    farm_of_one = several.shell.user_ns["farm_of_one"]
    assert isinstance(farm_of_one, Farm)
    while not farm_of_one.status().here:
        threading.Event().wait(0.05)
    new = [it for it in below(os.getpid()) if it not in known]
    [node] = [it for it in new if "taas_magic.farms.node" in words(it)]
    node.kill()
    while [it.name for it in farm_of_one.status().here] in ([], ["node-0"]):
        threading.Event().wait(0.05)
    several.define("farm_of_one.close()")


def test_bounds_that_a_pool_cannot_keep_are_refused(several: Notebook) -> None:
    with pytest.raises(UsageError, match=r"0 <= least <= most <= 3"):
        taas.farm("many", nodes=(1, 9))
    with pytest.raises(UsageError, match=r"gpus=0 to 2"):
        taas.farm("many", gpus=3)


def test_a_farm_whose_process_dies_says_so_of_each_job(
    several: Notebook, names: dict[str, object]
) -> None:
    several.define("dying = taas.farm('many', nodes=1)")
    dying, wait = names["dying"], names["wait"]
    assert isinstance(dying, Farm) and callable(wait)
    job = dying.submit(wait, "never")
    [process] = [it for it in below(os.getpid()) if "farms.process" in words(it)][-1:]
    process.kill()
    with pytest.raises(PoolError, match=rf"{job.name} of {dying.name}: its process ended"):
        job.result()
    with pytest.raises(PoolError, match="make another farm"):
        dying.submit(wait, "never")
    dying.close()


def farm_state() -> FarmState:
    state = FarmState("farm-1", "many", 0, 2)
    state.add(JobState("train-1"))
    state.add(JobState("train-2"))
    state.take(NodeNews("node-0", "here", host="h<1>"))
    state.take(JobNews("train-1", "node-0", state="running"))
    state.take(JobNews("train-1", "node-0", lines="epoch 1\repoch 2\n"))
    return state


def test_the_table_has_nodes_jobs_their_hosts_and_last_lines() -> None:
    shown = text(farm_state())
    assert "1 nodes of 1 slots (0 to 2) · 1 queued, 1 running" in shown
    assert "train-1  running  h<1>  epoch 2" in shown
    assert "h&lt;1&gt;" in html(farm_state())


def test_jobs_of_a_node_that_is_lost_wait_again() -> None:
    state = farm_state()
    state.take(NodeNews("node-0", "lost", "killed"))
    assert state.counts()["queued"] == 2
    assert "killed" in text(state)


def test_what_is_left_to_do_is_estimated_by_what_was_done() -> None:
    state = farm_state()
    assert state.eta_s() is None
    state.jobs["train-1"].end("done")
    state.jobs["train-1"].took_s = 8.0
    state.slots = 2
    assert state.eta_s() == 4.0
