"""Tests of `--profile`: recording the steps of ranks, and the timeline of the run."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from taas_magic.errors import UsageError
from taas_magic.journal import timeline
from taas_magic.journal.timeline import Span, StepTimes, Timeline, Trace
from tests.harness import Notebook

TRAIN = """
import taas, torch
import torch.distributed as dist
dist.init_process_group("gloo")
for step in range(5):
    taas.step()
    if dist.get_rank() == 1:
        torch.randn(500, 500) @ torch.randn(500, 500)
    total = torch.ones(1)
    dist.all_reduce(total)
"""

LOADER = """
import taas, torch
from torch.utils.data import DataLoader, TensorDataset
loader = taas.register(DataLoader(TensorDataset(torch.arange(40.0)), batch_size=2))
"""

BATCHES = """
for batch, in loader:
    (batch @ batch).item()
"""


def test_the_steps_of_a_cell_are_in_the_runs_timeline(notebook: Notebook) -> None:
    outcome = notebook.run(TRAIN, "--profile 2")
    assert outcome.error is None and outcome.run is not None
    found = outcome.run.timeline()
    assert [(one.step, one.rank) for one in found.steps] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(one.compute_s > 0 and one.communicate_s + one.wait_s > 0 for one in found.steps)
    whole = json.loads(found.path.read_bytes())
    tracks = {
        event["args"]["name"].partition(" on ")[0]
        for event in whole["traceEvents"]
        if event.get("name") == "process_name"
    }
    assert tracks == {"rank 0", "rank 1"}
    assert "is slowest: busy" in repr(found) and "data:image/svg+xml" in found._repr_html_()


def test_a_batch_of_a_registered_loader_begins_a_step(notebook: Notebook) -> None:
    notebook.define(LOADER)
    outcome = notebook.run(BATCHES, "--profile 100")
    assert outcome.error is None and outcome.run is not None
    steps = outcome.run.timeline().steps
    # 11 steps begin: at each of 10 batches and at the loader's end; step 0 warms the profiler up
    assert [one.step for one in steps if one.rank == 0] == list(range(1, 11))
    assert all(one.load_s > 0 for one in steps)


def test_a_note_says_that_a_cell_has_no_steps(notebook: Notebook) -> None:
    outcome = notebook.run("1 + 1", "--profile 3")
    assert outcome.run is not None
    assert sum("--profile has recorded nothing" in note for note in outcome.run.head.notes) == 1
    with pytest.raises(UsageError, match="has no profile"):
        outcome.run.timeline()


def test_a_note_says_that_a_cell_has_only_one_step(notebook: Notebook) -> None:
    outcome = notebook.run("import taas\ntaas.step()", "--profile 3")
    assert outcome.error is None and outcome.run is not None
    [note] = [note for note in outcome.run.head.notes if "--profile" in note]
    assert note.endswith("the cell has only one step, in which the profiler warms up")


OWN_PROFILER = """
import taas, torch
with torch.profiler.profile() as own:
    for step in range(3):
        taas.step()
        torch.ones(1) + 1
assert any(event.key == "aten::add" for event in own.key_averages())
"""


def test_a_note_says_that_the_programs_own_profiler_disables_profile(notebook: Notebook) -> None:
    outcome = notebook.run(OWN_PROFILER, "--profile 1")
    assert outcome.error is None and outcome.run is not None
    text = "--profile has recorded nothing: the program runs a profiler of its own"
    assert outcome.run.head.notes.count(text) == 1


def test_a_trace_that_cannot_be_written_is_noted_and_the_cell_goes_on(notebook: Notebook) -> None:
    ahead = f"""
from pathlib import Path
run = max(Path({str(notebook.state_dir)!r}, "runs").iterdir())
(run / {timeline.FOLDER!r}).write_text("a file where the folder of the traces would be")
"""
    outcome = notebook.run(f"{ahead}{TRAIN}print(step)", "--profile 2", gpus=1)
    assert outcome.error is None and outcome.run is not None, outcome.shown
    assert outcome.lines[0][-1] == "4"
    [note] = [note for note in outcome.run.head.notes if "--profile" in note]
    assert "has recorded nothing: the trace could not be written: " in note


def trace(host: str = "a", **changes: Any) -> Trace:
    """Return the trace of a rank with one step of 100 us, whose last 40 us are a collective."""
    collectives = changes.pop("collectives", {"gloo:all_reduce": [Span(60, 100)]})
    fields: dict[str, Any] = {"loads": [], "work": [], "steps": {1: Span(0, 100)}, **changes}
    return Trace(host=host, collectives=collectives, **fields)


def times(*traces: Trace) -> list[tuple[float, ...]]:
    """Return the load, compute, communicate and wait times of each rank in microseconds."""
    found = timeline.step_times(dict(enumerate(traces)))
    return [tuple(round(seconds * 1e6, 6) for seconds in one[2:]) for one in found]


def test_a_rank_waits_until_the_last_rank_joins_a_collective() -> None:
    late = trace(collectives={"gloo:all_reduce": [Span(90, 100)]})
    assert times(trace(), late) == [(0, 60, 10, 30), (0, 90, 10, 0)]


def test_work_during_a_collective_counts_as_compute() -> None:
    assert times(trace(work=[Span(50, 95)])) == [(0, 95, 5, 0)]


def test_time_of_loading_does_not_count_as_compute() -> None:
    assert times(trace(loads=[Span(-20, 10), Span(5, 20)])) == [(20, 40, 40, 0)]


def test_a_span_across_the_end_of_a_step_is_divided() -> None:
    both = trace(
        steps={1: Span(0, 80), 2: Span(80, 120)}, collectives={"gloo:broadcast": [Span(60, 100)]}
    )
    assert times(both) == [(0, 60, 20, 0), (0, 20, 20, 0)]


def test_clocks_of_other_hosts_are_corrected_by_collectives() -> None:
    other = trace("b", steps={1: Span(1000, 1100)}, collectives={"gloo:x": [Span(1050, 1100)]})
    first = trace(collectives={"gloo:x": [Span(60, 100)]})
    moved, offsets = timeline.align_clocks({0: first, 1: other})
    assert offsets == {0: 0.0, 1: -1000.0}
    assert moved[1].steps == first.steps


def test_clocks_of_one_host_are_not_corrected() -> None:
    late = trace(collectives={"gloo:all_reduce": [Span(70, 140)]})
    assert timeline.align_clocks({0: trace(), 1: late})[1] == {0: 0.0, 1: 0.0}


def event(name: str, ts: float, dur: float, cat: str = "user_annotation") -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "pid": 7, "tid": 1}


def test_gpu_kernels_count_but_not_the_operators_that_launch_them() -> None:
    found = timeline.reduce_trace(
        {
            "baseTimeNanoseconds": 5_000,
            "host_name": "gpu1",
            "traceEvents": [
                {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
                event("ProfilerStep#3", 0, 100),
                event("enumerate(DataLoader)#x.__next__", 1, 2),
                event("aten::mm", 5, 1, "cpu_op"),
                event("nccl:all_reduce", 6, 1),
                event("nccl:all_reduce", 30, 20, "gpu_user_annotation"),
                event("gemm", 10, 20, "kernel"),
                event("ncclDevKernel_AllReduce_Sum_f32(int)", 30, 20, "kernel"),
            ],
        }
    )
    assert found == Trace(
        "gpu1",
        {3: Span(5, 105)},
        [Span(6, 8)],
        {"ncclDevKernel_AllReduce_Sum_f32": [Span(35, 55)]},
        [Span(15, 35)],
    )


@pytest.mark.parametrize(
    ("spans", "removed", "left"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(2, 4), (6, 12)], [(0, 2), (4, 6)]),
        ([(0, 10), (20, 30)], [(5, 25)], [(0, 5), (25, 30)]),
        ([(0, 10), (12, 14)], [(0, 20)], []),
    ],
)
def test_subtract_spans_removes_parts_of_spans(
    spans: list[tuple[float, float]],
    removed: list[tuple[float, float]],
    left: list[tuple[float, float]],
) -> None:
    whole, taken = ([Span(*one) for one in both] for both in (spans, removed))
    assert timeline.subtract_spans(whole, taken) == left


def test_the_slowest_rank_is_the_one_that_waits_least_for_others(tmp_path: Path) -> None:
    steps = [StepTimes(0, 1, 0.0, 0.1, 0.0, 0.3), StepTimes(1, 1, 0.1, 0.2, 0.0, 0.0)]
    found = Timeline(steps, tmp_path)
    assert found.slowest_rank == 1
    text = "rank 1 is slowest: busy 300.0 ms in each step; the other ranks are busy 100.0 ms"
    assert text in found.summary
    only = Timeline(steps[:1], tmp_path)
    assert only.summary == "rank 0 is slowest: busy 100.0 ms in each step"


def test_traces_of_an_earlier_attempt_are_ignored(tmp_path: Path) -> None:
    for attempt, name in ((0, "ProfilerStep#8"), (1, "ProfilerStep#9")):
        path = timeline.trace_file(tmp_path, attempt, 0)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": [event(name, 0, 1)]}).encode()))
    assert [one.step for one in timeline.read_timeline(tmp_path).steps] == [9]
