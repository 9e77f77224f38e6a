"""Tests of `taas.log`: its values appear in the run's table, and as curves in the status header."""

import base64
import io
import math
import resource
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from taas_magic.display import head
from taas_magic.errors import UsageError
from taas_magic.host import metrics as in_rank
from taas_magic.host.metrics import MetricBuffer
from taas_magic.journal import metrics
from taas_magic.journal.folder import JournalWriter, PlanHead, RunFolder
from taas_magic.journal.metrics import CURVE_POINTS, Curve, sparkline, svg_data_url
from taas_magic.messages import (
    MetricPoint,
    Metrics,
    RanksStarted,
    Restart,
    decode_event,
    encode,
)
from taas_magic.notebook.runs import compare
from tests.events import new_state
from tests.eventually import eventually
from tests.harness import Notebook

TRAIN = """
import taas, torch, math, numpy
for step in range(20):
    taas.log(step=step, loss=torch.tensor(1.0 / (step + 1)), rate=0.1)
    taas.log({"of each": step * (RANK + 1)}, step=step, all_ranks=True)
taas.log(odd=math.nan)
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter(FOLDER) as writer:
    writer.add_scalar("Accuracy/test", 0.5, 7)
    writer.add_scalar("half", 0.5, 0.5)
    writer.add_scalars("both", {"train": 1, "test": numpy.float32(2)}, global_step=7)
"""


def test_logged_values_are_in_the_runs_table_and_header(notebook: Notebook, tmp_path: Path) -> None:
    ahead = f"import os\nRANK, FOLDER = int(os.environ['RANK']), {str(tmp_path)!r}\n"
    outcome = notebook.run(ahead + TRAIN)
    assert outcome.error is None and outcome.run is not None
    table = outcome.run.metrics
    of_0, of_1 = (table[table["rank"] == rank].set_index("step") for rank in (0, 1))
    assert list(of_0.index) == list(range(20))
    assert of_0["loss"].tolist() == pytest.approx([1 / (step + 1) for step in range(20)])
    assert of_1["of each"].tolist() == [2 * step for step in range(20)]
    assert of_1["loss"].isna().all() and math.isnan(of_0["odd"][0])
    assert of_0["Accuracy/test"][7] == 0.5 and "half" not in of_0
    assert (of_0["both/train"][7], of_0["both/test"][7]) == (1, 2)
    shown = head.mime_bundle(state_of(outcome.run.path), 0.0)
    assert "loss: 0.05 " in shown["text/plain"]
    assert "of each: 19 " in shown["text/plain"]
    assert "20 values on each of 2 ranks" in shown["text/plain"]
    assert shown["text/html"].count("<img src='data:image/svg+xml;base64,") == 4
    assert "… and 3 more metrics: run.metrics" in shown["text/plain"]


EXTREMES = """
import math, taas
for value in (1e308, -1e308, 1e-320, 2**70, 0.5, math.inf, math.nan):
    taas.log(extreme=value, low=-abs(value), high=1e308)
for wrong in ({"x": 10**400}, {"a\\nb": 1.0}, {"x" * 1001: 1.0}):
    try:
        taas.log(wrong)
    except ValueError as error:
        print(error)
try:
    taas.log(x=1.0, step=2**63)
except ValueError as error:
    print(error)
taas.log({"time": 1.0, "time_": 2.0, "time__": 3.0}, step=0)
for wrong in (("loss", 3), ({"loss": 3}, 3), (3,), (0,), ([("loss", 3)],)):
    try:
        taas.log(*wrong)
    except TypeError as error:
        print(error)
"""


def test_curves_have_any_number_and_each_metric_a_column(notebook: Notebook) -> None:
    outcome = notebook.run(EXTREMES, gpus=1)
    assert outcome.error is None and outcome.run is not None
    assert outcome.lines[0] == [
        "taas.log: x is too large for a float",
        "taas.log: the name 'a\\nb' has control characters or surrogates",
        f"taas.log: the name '{'x' * 20}'… has 1,001 characters; at most 1,000 are allowed",
        "taas.log: step is too large; it must fit into 64 bits",
        *["write taas.log(step=step, loss=loss) or taas.log({'loss': loss}, step=step)"] * 5,
    ]
    table = outcome.run.metrics
    assert table.loc[0, ["time_", "time__", "time___"]].tolist() == [1.0, 2.0, 3.0]
    assert table["extreme"].tolist()[:5] == [1e308, -1e308, 1e-320, 2.0**70, 0.5]
    shown = head.mime_bundle(state_of(outcome.run.path), 0.0)
    assert "extreme: nan █▁▅▅▅   7 values" in shown["text/plain"]
    assert "high: 1e+308 ▅▅▅▅▅▅▅ 7 values" in shown["text/plain"]
    compare(outcome.run, metric="extreme").savefig(io.BytesIO())


RESUMED = """
import os, taas
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in (1, 2) if attempt else (0, 1, 2, 3):  # the second attempt resumes, and ends earlier
    taas.log(step=step, given=float(10 * attempt + step))
    taas.log(counted=float(10 * attempt + step))
if not attempt:
    raise ValueError("the first attempt fails")
for epoch in range(2):
    for step in range(2):
        taas.log(step=step, score=float(10 * epoch + step))
        taas.log(step=step, rate=0.5)
"""


def test_the_table_repeats_steps_of_epochs_but_not_those_of_a_restart(notebook: Notebook) -> None:
    outcome = notebook.run(RESUMED, "--max-restarts 1", gpus=1)
    assert outcome.error is None and outcome.run is not None
    table = outcome.run.metrics
    assert table["step"].tolist() == [0, 1, 2, 0, 1]
    assert table["given"].dropna().tolist() == [0.0, 11.0, 12.0]
    assert table["counted"].dropna().tolist() == [11.0, 12.0]
    scores = table[["score", "rate"]].dropna()
    assert scores.index.tolist() == [0, 1, 3, 4] and set(scores["rate"]) == {0.5}
    assert scores["score"].tolist() == [0.0, 1.0, 10.0, 11.0]
    [axes] = compare(outcome.run, metric="score").axes
    steps = list(numpy.asarray(axes.lines[0].get_xdata()))
    assert steps == pytest.approx([0, 1, math.nan, 0, 1], nan_ok=True)
    curves = state_of(outcome.run.path).curves
    assert curves["score"][0].points == scores["score"].tolist()
    assert curves["given"][0].points == [0.0, 11.0, 12.0]
    assert curves["counted"][0].points == [11.0, 12.0]


def state_of(folder: Path) -> head.RunState:
    state = new_state()
    for event in RunFolder(folder).read_events():
        state.apply(event)
    return state


def popped(buffer: MetricBuffer, waits_for_gpu: bool = False) -> list[tuple[int, float | None]]:
    return [(it.step, it.value) for it in buffer.pop_scalars(waits_for_gpu=waits_for_gpu)]


def test_a_value_that_is_no_number_is_refused_where_it_is_logged() -> None:
    buffer = MetricBuffer(0)
    with pytest.raises(
        TypeError, match=r"taas\.log: name must be a number, or a tensor .* it is a str"
    ):
        buffer.add({"name": "3.0"}, 0, False)
    with pytest.raises(TypeError, match=r"it is a torch\.float32 tensor with the shape \(2,\)"):
        buffer.add({"first": 1.0, "name": torch.zeros(2)}, 0, False)
    with pytest.raises(TypeError, match=r"it is a torch\.complex64 tensor with the shape \(\)"):
        buffer.add({"name": torch.tensor(1j)}, 0, False)
    with pytest.raises(TypeError, match=r"the name of a value must be a string, not 1"):
        buffer.add({1: 2.0}, 0, False)  # type: ignore[dict-item]
    assert popped(buffer) == []


@pytest.mark.parametrize("step", ["3", 0.5, math.nan, math.inf, [1]])
def test_a_step_that_is_no_integer_is_refused_where_it_is_logged(step: Any) -> None:
    for rank in (0, 1):  # if only rank 0 raised, the other ranks would wait for it
        buffer = MetricBuffer(rank)
        with pytest.raises(TypeError, match=r"taas\.log: step must be an integer; it is "):
            buffer.add({"loss": 1.0}, step, False)
        with pytest.raises(TypeError, match=r"taas\.log: loss must be a number"):
            buffer.add({"loss": "much"}, 0, False)
        with pytest.raises(ValueError, match=r"taas\.log: step is too large"):
            buffer.add({"loss": 1.0}, 1 << 63, False)
        assert popped(buffer) == []


def test_arrays_are_values_and_tensors_are_steps() -> None:
    buffer, step = MetricBuffer(0), torch.tensor(8)
    buffer.add({"loss": numpy.array([3.0])}, step, False)  # type: ignore[arg-type]
    step += 1
    buffer.add({"loss": numpy.float32(2.0)}, 9.0, False)  # type: ignore[arg-type]
    assert popped(buffer) == [(8, 3.0), (9, 2.0)]


def test_a_partial_dtensor_is_refused(tmp_path: Path) -> None:
    # This import takes 2 s, in each process that collects the tests.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    address = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        norm = DTensor.from_local(torch.tensor(2.0), mesh, [Partial()])
        buffer = MetricBuffer(0)
        with pytest.raises(TypeError, match=r"partial sums of the ranks\. Log its full_tensor\(\)"):
            buffer.add({"norm": norm}, 0, False)
        buffer.add({"norm": norm.full_tensor()}, 0, False)
        assert popped(buffer) == [(0, 2.0)]
    finally:
        torch.distributed.destroy_process_group()


class _GpuTensor:
    """Stand-in for a CUDA tensor with one element, its copy, and the copy's stream and event.

    Attributes:
        is_queued: Whether the GPU has not computed the tensor yet.
        is_lost: Whether the GPU has failed, so that the tensor cannot be read.
    """

    is_cuda, dtype, shape = True, torch.float32, ()

    def __init__(self, value: float = 0.0, is_queued: bool = False, is_lost: bool = False) -> None:
        self.value, self.is_queued, self.is_lost = value, is_queued, is_lost
        self.stream = self

    def numel(self) -> int:
        return 1

    def is_complex(self) -> bool:
        return False

    def detach(self) -> "_GpuTensor":
        return self

    def record_event(self) -> "_GpuTensor":
        return self

    def query(self) -> bool:
        return not self.is_queued

    def __float__(self) -> float:
        if self.is_lost:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.value


@pytest.fixture
def gpu_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the buffer of metrics store a `_GpuTensor` itself, instead of a CUDA copy of it."""
    monkeypatch.setattr(in_rank, "_GpuScalar", lambda tensor: tensor)


@pytest.mark.usefixtures("gpu_scalars")
def test_a_value_that_the_gpu_lost_does_not_stop_the_heartbeats() -> None:
    buffer = MetricBuffer(0)
    buffer.add({"lost": _GpuTensor(is_lost=True), "kept": 1.0}, 0, False)
    assert popped(buffer) == [(0, 1.0)]


@pytest.mark.usefixtures("gpu_scalars")
def test_a_value_that_the_gpu_has_not_computed_is_sent_later_and_in_order() -> None:
    buffer, queued = MetricBuffer(0), _GpuTensor(2.0, is_queued=True)
    for value in (1.0, queued):
        buffer.add({"loss": value}, None, False)
    assert popped(buffer) == []
    buffer.add({"loss": 3.0}, None, False)
    threading.Timer(0.1, setattr, (queued, "is_queued", False)).start()
    assert popped(buffer, waits_for_gpu=True) == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_a_tensor_keeps_the_value_that_it_had() -> None:
    buffer, value = MetricBuffer(0), torch.tensor(3.0, requires_grad=True)
    buffer.add({"loss": value}, None, False)
    value.data.zero_()
    buffer.add({"loss": value}, None, False)
    assert popped(buffer) == [(0, 3.0), (1, 0.0)]
    assert popped(buffer) == []


def test_other_ranks_are_recorded_only_on_request() -> None:
    buffer = MetricBuffer(3)
    buffer.add({"loss": 1.0}, 0, False)
    buffer.add({"loss": 2.0}, 0, True)
    assert popped(buffer) == [(0, 2.0)]


def test_outside_a_run_nothing_happens() -> None:
    in_rank.use_buffer(None)
    in_rank.log(loss=1.0)


def test_a_curve_of_many_values_has_few_points() -> None:
    curve = Curve()
    for step in range(100_000):
        curve.add(float(step))
    assert CURVE_POINTS / 2 <= len(curve.points) <= CURVE_POINTS
    assert (curve.count, curve.last) == (100_000, 99_999.0)
    assert curve.points == sorted(curve.points)
    assert curve.points[0] < 1_000 and curve.points[-1] > 99_000


def test_the_curve_of_a_constant_is_even() -> None:
    curve = Curve()
    for step in range(777):
        curve.add(0.1, step)
    assert set(curve.points) == {0.1} and set(sparkline([0.1] * 61)) == {"▅"}


def test_a_restart_replaces_the_points_from_its_first_step_on() -> None:
    state = new_state()

    def log(*values: tuple[int, float]) -> None:
        points = [MetricPoint("loss", step, value, 1.0) for step, value in values]
        state.apply(Metrics(points=points, rank=0), 1.0)

    log((0, 5.0), (1, 4.0), (2, 3.0), (3, 2.0))
    state.apply(Restart(attempt=1), 1.0)
    log((4, 1.0))  # the last value of the old attempt may come late
    state.apply(RanksStarted(attempt=1, pids={0: 1}), 1.0)
    assert state.curves["loss"][0].points == [5.0, 4.0, 3.0, 2.0, 1.0]
    log((2, 1.0), (1, 0.5))
    assert state.curves["loss"][0].points == [5.0, 4.0, 1.0, 0.5]


def test_a_sparkline_rises_and_has_gaps() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0]) == "▁▃▆█"
    assert sparkline([1.0, math.nan, 1.0]) == "▅ ▅"
    assert sparkline([math.nan]) == " " and sparkline([]) == ""
    assert len(sparkline([float(i) for i in range(1000)])) == 24


def test_a_picture_has_a_curve_for_each_rank_and_skips_nan() -> None:
    address = svg_data_url([[0.0, 1.0, math.nan, 2.0, 3.0], [1.0, 1.0]])
    svg = base64.b64decode(address.partition(",")[2]).decode()
    assert svg.count("<polyline") == 3 and "nan" not in svg


def test_values_that_json_lacks_arrive_as_no_number() -> None:
    points = [MetricPoint("a", 0, math.nan, 1.0), MetricPoint("a", 1, math.inf, 1.0)]
    event = decode_event(encode(Metrics(points=points)))
    assert isinstance(event, Metrics)
    assert [math.isnan(metrics.number(point)) for point in event.points] == [True, True]


def table_of(folder: Path, *points: MetricPoint) -> Path:
    folder.mkdir()
    (folder / metrics.FILE).write_bytes(metrics.rows(Metrics(points=list(points)), is_first=True))
    return folder


def test_values_logged_again_get_rows_and_torn_lines_are_skipped(tmp_path: Path) -> None:
    first = [MetricPoint("loss", step, 1.0, 5.0) for step in range(3)]
    again = MetricPoint("loss", 2, 0.25, 9.0)
    folder = table_of(tmp_path / "run", *first, again, MetricPoint("rate", 1, 0.5, 9.5))
    with (folder / metrics.FILE).open("a") as file:
        file.write("10.0,3,0,loss,0.1,0")
    found = metrics.read_metrics(folder)
    assert list(found["step"]) == [0, 1, 2, 2, 1]  # the rate has a row of the second pass
    assert list(found["loss"][:4]) == [1.0, 1.0, 1.0, 0.25]
    assert len(metrics.read_metrics(tmp_path / "no run")["step"]) == 0


def test_metrics_do_not_replace_the_columns_of_the_table(tmp_path: Path) -> None:
    points = [MetricPoint(name, 4, 0.5, 7.0) for name in ("step", "rank", "time", "loss")]
    found = metrics.read_metrics(table_of(tmp_path / "run", *points))
    assert {name: list(found[name]) for name in found} == {
        **{"step": [4], "rank": [0], "time": [7.0]},
        **{"step_": [0.5], "rank_": [0.5], "time_": [0.5], "loss": [0.5]},
    }


def test_runs_are_compared_by_a_metric_that_all_have(tmp_path: Path) -> None:
    one = metrics.read_metrics(
        table_of(tmp_path / "1", MetricPoint("loss", 0, 1.0, 0.0), MetricPoint("a", 0, 1.0, 0.0))
    )
    two = metrics.read_metrics(table_of(tmp_path / "2", MetricPoint("loss", 0, 2.0, 0.0)))
    figure = metrics.draw_metric({"one": one, "two": two}, None)
    [axes] = figure.axes
    assert axes.get_ylabel() == "loss" and [line.get_label() for line in axes.lines] == [
        "one",
        "two",
    ]
    never = metrics.read_metrics(table_of(tmp_path / "3", MetricPoint("loss", 0, None, 0.0)))
    [axes] = metrics.draw_metric({"never a number": never}, "loss").axes
    assert [line.get_label() for line in axes.lines] == ["never a number"]
    for wrong, kind in (("first", "str"), ([], "list")):
        with pytest.raises(UsageError, match=rf"compare needs runs, such as .*; got a {kind}$"):
            compare(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r'no metric "a" in common\. Metrics of all runs: loss'):
        metrics.draw_metric({"one": one, "two": two}, "a")


def test_a_row_that_was_only_partly_written_leaves_nothing_in_the_table() -> None:
    folder, said = RunFolder.create("r1", PlanHead("r1", "", "local", 1), ""), list[str]()
    # The file is large, so that the limit below concerns no other file.
    folder.metrics.write_bytes(b"time,step,rank,name,value\n" + b"1.0,0,0,old,1.0\n" * 100_000)
    limit_bytes = folder.metrics.stat().st_size + 10
    writer = JournalWriter(folder, said.append)
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The limit ends a write in the middle of a row, as a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, previous[1]))
    try:
        writer.append(logged(1, 2.0))
        eventually(lambda: bool(said))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
    writer.append(logged(2, 3.0))
    writer.close()
    table = metrics.read_metrics(folder.path)
    assert len(table["step"]) == 100_001
    assert list(table["step"])[-1] == 2 and list(table["loss"])[-1] == 3.0
    assert said == [f"File too large ({folder.events})"]


def logged(step: int, value: float) -> Metrics:
    return Metrics(rank=0, points=[MetricPoint("loss", step, value, 1.0)])
