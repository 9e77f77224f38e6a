"""`--out` with real ranks: the values that return, those that cannot, and the messages."""

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from taas_magic.capture import pickling
from taas_magic.capture.pickling import Pickled
from taas_magic.capture.plain import PlainWriter
from taas_magic.capture.work import VALUE
from taas_magic.config import Config
from taas_magic.errors import RankFailed, ResultError, UsageError
from taas_magic.host.results import ResultCriteria, ResultsHeader, receive
from taas_magic.notebook import pools
from tests.harness import Notebook

MEET = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo"); dist.barrier()  # no rank ends before the other has joined
rank = dist.get_rank()
"""


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("histroy", "did you mean history?"),
        ("1x", 'got "1x"'),
        ("for", 'got "for"'),
        ("history@2", "--gpus 2 has ranks @0 to @1, @last and @all"),
        ("history@first", 'got "history@first"'),
        ("history,history@1", "each once"),
        ("history,history", "each once"),
        ("unused", "neither sets nor uses it"),
    ],
)
def test_a_name_that_the_cell_cannot_set_is_refused_before_the_start(
    notebook: Notebook, out: str, said: str
) -> None:
    notebook.define("unused = 1")
    # the text "__main__" also occurs in code that can set any name
    outcome = notebook.run('if __name__ == "__main__":\n    history = [1]', f"--out {out}")
    assert outcome.run is None
    assert isinstance(outcome.error, UsageError)
    assert said in outcome.shown and "\n" not in outcome.shown


def test_a_name_that_the_cell_sets_indirectly_is_not_refused(notebook: Notebook) -> None:
    notebook.define("def train():\n    global losses\n    losses = [3]")
    source = "train()\nfor step in range(2): pass\nlisted = !echo hi\nexec('later = 4')"
    outcome = notebook.run(source, "--out losses,step,listed,later", gpus=1)
    assert outcome.error is None
    space = notebook.shell.user_ns
    assert (space["losses"], space["step"], space["listed"], space["later"]) == ([3], 1, ["hi"], 4)


def test_values_that_cannot_be_returned_do_not_affect_other_values(notebook: Notebook) -> None:
    source = """
import threading
class Grumpy:
    def __setstate__(self, state): raise ValueError("not here")
grumpy = Grumpy()
grumpy.x = 1
state = {"lock": threading.Lock()}
steps = (i for i in range(3))
history = [1, 2]
if len(history) > 5:
    never = 1
"""
    outcome = notebook.run(source, "--out state,history,never,steps,grumpy", gpus=1)
    assert isinstance(outcome.error, ResultError)
    run = outcome.run
    assert run is not None and run.state == "SUCCEEDED"
    assert notebook.shell.user_ns["history"] == [1, 2] and run.out == {"history": [1, 2]}
    assert set(run.missing) == {"state", "never", "steps", "grumpy"}
    assert "these were returned: history" in outcome.shown
    assert "`state['lock']` is a _thread.lock and cannot be sent to the notebook" in outcome.shown
    assert "make a list of it" in run.missing["steps"]
    assert "rank 0 has no such variable; it has: threading, Grumpy," in run.missing["never"]
    assert "ValueError: not here" in run.missing["grumpy"]
    assert "create it inside the cell" not in outcome.shown
    notes = [event["text"] for event in outcome.of_kind("note")]
    assert [note for note in notes if note.startswith("--out state could not be returned")]


def test_values_of_a_cell_that_fails_at_its_end_are_returned(
    notebook: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "history = [1, 2]\nassert not history\nmodel = 3"
    outcome = notebook.run(source, "--out history,model", gpus=1)
    assert isinstance(outcome.error, RankFailed) and outcome.error.etype == "AssertionError"
    assert notebook.shell.user_ns["history"] == [1, 2]
    assert "returned although the run failed (--out): history\n" in capsys.readouterr().out
    assert outcome.run is not None and set(outcome.run.missing) == {"model"}
    assert "model" not in notebook.shell.user_ns


def test_values_of_an_interrupted_cell_are_returned(notebook: Notebook) -> None:
    source = """
history = []
for step in range(600):
    history.append(step)
    if step == 2 and rank == 0:
        os.kill(%d, 2)
    if step > 1:
        time.sleep(1)
"""
    outcome = notebook.run(MEET + "import time" + source % os.getpid(), "--out history")
    assert isinstance(outcome.error, KeyboardInterrupt)
    assert notebook.shell.user_ns["history"][:3] == [0, 1, 2]


def test_an_interrupt_while_values_are_loaded_does_not_lose_them(notebook: Notebook) -> None:
    notebook.define("""
import os, signal
loads, home = [], os.getpid()
def load_slowly():
    if os.getpid() == home:
        loads.append(1)
        if len(loads) == 1:
            signal.raise_signal(signal.SIGINT)
    return "loaded"
class SlowValue:
    def __reduce__(self):
        return load_slowly, ()
""")
    outcome = notebook.run("slow = SlowValue()", "--out slow", gpus=1)
    assert isinstance(outcome.error, KeyboardInterrupt) and outcome.run is not None
    assert f"while the values of run {outcome.run.id} were loaded" in outcome.shown
    assert outcome.run.state == "SUCCEEDED" and outcome.run.out == {"slow": "loaded"}


def test_a_value_can_be_requested_from_another_rank(notebook: Notebook) -> None:
    source = (
        "import os\nrank = first = int(os.environ.pop('RANK'))\nonly = 'here' if rank else None"
    )
    outcome = notebook.run(source, "--out first,rank@last,only@1", gpus=3)
    assert outcome.error is None
    space = notebook.shell.user_ns
    assert (space["first"], space["rank"], space["only"]) == (0, 2, "here")


def test_a_wrapped_model_is_returned_without_its_wrapper_and_still_fits_its_optimizer(
    notebook: Notebook,
) -> None:
    notebook.define("import torch\nclass Net(torch.nn.Linear): pass")
    source = """
model = torch.nn.parallel.DistributedDataParallel(Net(2, 1))
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""
    outcome = notebook.run(MEET + source, "--out model,optimizer,rank")
    assert outcome.error is None
    space: dict[str, Any] = notebook.shell.user_ns
    assert type(space["model"]) is space["Net"]
    assert space["optimizer"].param_groups[0]["params"][0] is space["model"].weight
    notes = [event["text"] for event in outcome.of_kind("note") if "--out" in event["text"]]
    said = "a DistributedDataParallel is returned as its `.module`"
    assert notes == [f"--out model, optimizer: {said}"]


SHARD = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = torch.nn.Linear(4, 6)
whole = {name: value.clone() for name, value in model.state_dict().items()}
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters())
"""


def test_sharded_values_are_gathered(notebook: Notebook) -> None:
    notebook.define(
        "import typing\nclass Part(typing.NamedTuple):\n    weights: list\n    rank: int"
    )
    source = "part = {'named': Part([model.weight], rank)}\nlist(model.parameters())"
    source += "\nof_each = model"
    out = "--out model,part@last,whole,optimizer,of_each@all"
    outcome = notebook.run(MEET + SHARD + source, out)
    assert isinstance(outcome.error, ResultError)
    assert outcome.run is not None and set(outcome.run.missing) == {"optimizer", "of_each"}
    assert "a sharded model is gathered only on rank 0" in outcome.run.missing["of_each"]
    assert "get_optimizer_state_dict" in outcome.run.missing["optimizer"]
    space = notebook.shell.user_ns
    assert space["model"].keys() == space["whole"].keys()
    for name, value in space["whole"].items():
        assert value.equal(space["model"][name])
    part = space["part"]["named"]
    assert type(part) is space["Part"] and part.rank == 1
    assert part.weights[0].equal(space["whole"]["weight"])
    assert any("as its full state_dict()" in event["text"] for event in outcome.of_kind("note"))


def test_a_sharded_value_that_a_rank_lacks_is_named_and_not_waited_for(notebook: Notebook) -> None:
    source = """
half = init_device_mesh("cpu", (2, 1), mesh_dim_names=("each", "both"))["both"]
if rank == 0:
    best = model.state_dict()
    alone = torch.distributed.tensor.distribute_tensor(whole["bias"], half)
"""
    session = "--session unequal"
    try:
        assert notebook.run(MEET + SHARD, session).error is None
        outcome = notebook.run(source, f"{session} --out best,model,alone")
        failed = notebook.run(
            "best = model.weight\ndist.barrier()\nassert not rank", f"{session} --out best"
        )
    finally:
        notebook.shell.run_line_magic("taas", "end unequal")
    assert isinstance(outcome.error, ResultError) and outcome.run is not None
    assert set(outcome.run.missing) == {"best"}
    assert "rank 1 has no such sharded variable" in outcome.run.missing["best"]
    assert set(outcome.run.out["model"]) == {"weight", "bias"}
    assert outcome.run.out["alone"].shape == (6,)
    assert isinstance(failed.error, RankFailed) and failed.run is not None
    assert "rank 1 failed before it was gathered" in failed.run.missing["best"]


def test_sharded_values_without_a_process_group_are_named(notebook: Notebook) -> None:
    source = "dist.destroy_process_group()\nhistory = [rank]"
    outcome = notebook.run(MEET + SHARD + source, "--out model,history")
    assert isinstance(outcome.error, ResultError)
    assert notebook.shell.user_ns["history"] == [0]
    assert "it is sharded, and gathering it raised" in outcome.shown


def test_a_last_value_that_cannot_be_returned_is_no_error(notebook: Notebook) -> None:
    outcome = notebook.run("import threading\nx = 1\nthreading.Lock()", "--out x", gpus=1)
    assert outcome.error is None
    assert outcome.run is not None and outcome.run.out == {"x": 1}
    with pytest.warns(UserWarning, match=r"result of run \S+ did not come back: .*lock"):
        assert outcome.run.result is None


@pytest.mark.parametrize("made", ["torch.ones(size)", "Large()"])
def test_a_large_last_value_is_shown_and_not_returned(notebook: Notebook, made: str) -> None:
    source = f"""
import torch
size = 1_000
class Large:
    def __init__(self): self.data = bytes(size)
    def __repr__(self): return "Large"
{made}
"""
    outcome = notebook.run(source, gpus=1)
    assert outcome.run is not None and outcome.run.result is not None
    outcome = notebook.run(source.replace("1_000", "2_000_000"), "--out size", gpus=1)
    assert outcome.error is None and outcome.run is not None
    with pytest.warns(UserWarning, match=r"did not come back: it is larger than 1 MB; .* --out"):
        assert outcome.run.result is None
    assert outcome.run.out == {"size": 2_000_000} and outcome.run.missing == {}
    assert sum(file.stat().st_size for file in (outcome.run.path / "results").iterdir()) < 10_000
    assert outcome.of_kind("display") and not outcome.of_kind("note")
    # a function's value has no limit
    notebook.define("import taas\nlarge = taas.run(lambda: bytes(4_000_000), gpus=1)")
    assert len(notebook.shell.user_ns["large"].result) == 4_000_000


def test_results_are_those_of_the_last_attempt(notebook: Notebook) -> None:
    source = """
import os
early = attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0:
    stale = 1
assert attempt == 1
"""
    outcome = notebook.run(source, "--max-restarts 1 --out early,stale", gpus=1)
    assert isinstance(outcome.error, ResultError)
    assert outcome.run is not None and outcome.run.out == {"early": 1}
    assert set(outcome.run.missing) == {"stale"}


def test_a_full_disk_is_reported_and_the_run_succeeds(notebook: Notebook) -> None:
    source = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
large, small = bytes(2 << 20), 1
"""
    outcome = notebook.run(source, "--out large,small", gpus=1)
    assert isinstance(outcome.error, ResultError)
    assert outcome.run is not None and outcome.run.out == {"small": 1}
    assert "writing it raised OSError" in outcome.run.missing["large"]


class Makes:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(self.file),)


def forge(path: Path, names: Sequence[str], value: Any, *, is_plain: bool = False) -> None:
    """Write a results file in which each of `names` has `value`, as a malicious host could."""
    path.parent.mkdir(exist_ok=True)
    written = Pickled(pickle.dumps(dict.fromkeys(names, value)), ())
    if is_plain and not isinstance(value, Makes):
        writer = PlainWriter()
        writer.write_value(dict.fromkeys(names, value))
        written = Pickled(writer.data, ())
    pickling.write_archive(path, written, ResultsHeader(names=[*names], is_plain=is_plain))


@pytest.mark.parametrize(
    "name", ["0-0-0", "2-0-0", "1-1-0", "1-3-0", "1-9-0", "01-1-0", "1-0-0.part-1"]
)
def test_a_file_of_another_rank_or_attempt_is_not_read(tmp_path: Path, name: str) -> None:
    """The kernel expects results of attempt 1, from ranks 0 and 2 of four ranks."""
    out, sources = ("x", "y@2"), ResultCriteria(attempt=1, world_size=4)
    forge(tmp_path / "results" / name, ["x", "y", VALUE], Makes(tmp_path / "made"))
    received = receive(tmp_path / "results", out, sources, {})
    assert received.values == {} and set(received.missing) == {"x", "y"}
    assert not (tmp_path / "made").exists()


def test_only_values_that_were_requested_from_a_rank_are_received(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    forge(folder / "0-0-0", ["x"], "of rank 0", is_plain=True)
    forge(folder / "0-2-0", ["x", VALUE], "of rank 2", is_plain=True)
    forge(folder / "0-2-1", ["y"], "of rank 2", is_plain=True)
    forge(folder / "0-3-0", ["z"], "of rank 3", is_plain=True)
    received = receive(folder, ("x", "y@2", "z@last"), ResultCriteria(attempt=0, world_size=4), {})
    assert received.values == {"x": "of rank 0", "y": "of rank 2", "z": "of rank 3"}
    forge(folder / "0-2-2", ["x"], Makes(tmp_path / "made"), is_plain=True)
    forge(folder / "0-2-3", ["y"], Makes(tmp_path / "made"), is_plain=True)
    received = receive(folder, ("x", "y@2"), ResultCriteria(attempt=0, world_size=4), {})
    assert received.values == {"x": "of rank 0", "y": "of rank 2"}
    assert not (tmp_path / "made").exists()
    forge(folder / "0-2-4", ["y"], Makes(tmp_path / "made"))
    received = receive(folder, ("y@2",), ResultCriteria(0, world_size=4, untrusted_pool="far"), {})
    assert received.values == {"y": "of rank 2"} and not (tmp_path / "made").exists()


def test_a_file_that_cannot_be_read_is_the_reason_for_missing_values(tmp_path: Path) -> None:
    forge(tmp_path / "results" / "0-0-0", ["x"], 1, is_plain=True)
    (tmp_path / "results" / "0-0-1").write_bytes(b"cut short")
    received = receive(tmp_path / "results", ("x", "y"), ResultCriteria(0, world_size=1), {})
    assert received.values == {"x": 1}
    assert "0-0-1 is incomplete" in received.missing["y"]


@pytest.mark.fault(73)
def test_a_host_that_lies_runs_nothing_in_the_kernel(notebook: Notebook, tmp_path: Path) -> None:
    """Rank 1 writes forged results files; the requested values arrive unchanged."""
    source = f"""
import os, pickle, glob
from pathlib import Path
from taas_magic.capture import pickling
from taas_magic.host.results import ResultsHeader
class Makes:
    def __reduce__(self):
        return os.mknod, ({str(tmp_path / "made")!r},)
folder = max(Path({str(notebook.state_dir)!r}, "runs").iterdir()) / "results"
names = ["x", "<value>"]
if rank:
    folder.mkdir(exist_ok=True)
    data = pickle.dumps(dict.fromkeys(names, pickling.loads and Makes()))
    for name in ("0-1-0", "0-1-9", "1-0-0", "7-1-0", "0-2-0"):
        header = ResultsHeader(names=names)
        pickling.write_archive(folder / name, pickling.Pickled(data, ()), header)
x, y = [rank], "mine"
dist.barrier()
rank + 7
"""
    outcome = notebook.run(MEET + source, "--out x,y@last")
    assert outcome.error is None, outcome.shown
    assert outcome.run is not None and outcome.run.result == 7
    assert outcome.run.out == {"x": [0], "y": "mine"}
    assert not (tmp_path / "made").exists()


@pytest.mark.fault(73)
def test_of_an_untrusted_pool_only_plain_data_come(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pools.named("local", Config())
    (notebook.project / "taas.toml").write_text("[pools.local]\ntrusted = false\n")
    # Only this kernel treats the pool as untrusted; the settings of the pool's process stay.
    monkeypatch.setattr(pool, "config", structs.replace(pool.config, trusted=False))
    source = """
import torch
from IPython.display import display, HTML
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(model.parameters())
state, whole = model.state_dict(), {"model": model.state_dict(), "rows": [1, (2.0, None)]}
display(HTML("<script>alert()</script>"))
model
"""
    outcome = notebook.run(source, "--out model,optimizer,state,whole", gpus=1)
    (notebook.project / "taas.toml").unlink()
    assert isinstance(outcome.error, ResultError)
    run = outcome.run
    assert run is not None
    with pytest.warns(UserWarning, match=r'did not come back: .* pool "local" is not trusted'):
        assert run.result is None
    assert set(run.out) == {"state", "whole"} and set(run.missing) == {"model", "optimizer"}
    weights = run.out["state"]["weight"], run.out["whole"]["model"]["weight"]
    assert weights[0].data_ptr() == weights[1].data_ptr()
    assert "loading it would run code from host " in run.missing["model"]
    assert "model.state_dict()" in outcome.shown and "trusted = true" in outcome.shown
