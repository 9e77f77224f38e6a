"""Output of ranks, live and in log files. Covers faults 37 and 44 to 46 of docs/faults.md."""

import os
import re
import resource
import subprocess
from pathlib import Path

import pytest

from tests.harness import ANSI, Notebook, on_event


def test_output_of_c_code_descriptors_and_programs_is_captured(notebook: Notebook) -> None:
    source = """
import ctypes, os, subprocess
print("python", flush=True)
os.write(1, b"descriptor\\n")
subprocess.run(["echo", "program"])
ctypes.CDLL(None).puts(b"c library")
ctypes.CDLL(None).fflush(None)
os.write(2, b"error\\n")
"""
    expected = ["python", "descriptor", "program", "c library", "error"]
    outcome = notebook.run(source, gpus=1)
    assert outcome.lines[0] == expected
    assert outcome.run is not None
    assert outcome.run.logs(0).splitlines() == expected


def test_many_lines_of_many_ranks_arrive_whole_and_in_order(notebook: Notebook) -> None:
    source = "import os\nfor i in range(10_000):\n    print(os.environ['RANK'], i, 'x' * 70)"
    outcome = notebook.run(source)
    for rank in range(2):
        expected = [f"{rank} {i} {'x' * 70}" for i in range(10_000)]
        assert outcome.lines[rank] == expected
        assert outcome.run is not None and outcome.run.logs(rank).splitlines() == expected


def test_equal_lines_of_several_ranks_are_shown_as_one(
    notebook: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    source = """
import torch.distributed as dist
dist.init_process_group("gloo")
for step in range(50):
    dist.barrier()
    print("the same for all")
"""
    assert notebook.run(source, gpus=3).error is None
    shown = [line for line in capsys.readouterr().out.splitlines() if "the same for all" in line]
    together = [line for line in shown if line.startswith("[0-2 ")]
    alone = [line for line in shown if re.match(r"\[\d\]", line)]
    assert together
    assert 3 * len(together) + len(alone) <= 150
    assert len(shown) < 150


def test_the_flag_logs_shows_only_the_chosen_ranks(
    notebook: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = notebook.run("import os\nprint('rank is', os.environ['RANK'])", "--logs 1")
    shown = capsys.readouterr().out
    assert "rank is 1" in shown and "rank is 0" not in shown
    assert outcome.run is not None and outcome.run.logs(0) == "rank is 0\n"


@pytest.mark.fault(44)
def test_a_flood_is_bounded_and_complete_on_disk(notebook: Notebook) -> None:
    source = """
import os, sys
line = b"y" * 99 + b"\\n"
for _ in range(300):
    os.write(1, line * 1000)
print("ValueError: kept to the end")
"""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = notebook.run(source, gpus=1)
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    dropped = sum(event["lines"] for event in outcome.of_kind("dropped"))
    assert len(outcome.lines[0]) + dropped == 300_001
    assert dropped > 100_000
    assert outcome.lines[0][-1] == "ValueError: kept to the end"
    assert outcome.run is not None and len(outcome.run.logs(0)) == 30_000_000 + 28
    assert grown_bytes < 200e6


@pytest.mark.fault(45)
def test_one_endless_line_is_cut(notebook: Notebook) -> None:
    source = (
        "import os\nfor _ in range(100):\n    os.write(1, b'z' * 1_000_000)\nprint()\nprint('end')"
    )
    outcome = notebook.run(source, gpus=1)
    long, end = outcome.lines[0]
    assert len(long) < 100_000 and "cut" in long
    assert end == "end"


def test_an_unfinished_line_precedes_the_traceback(notebook: Notebook) -> None:
    outcome = notebook.run("print('unfinished', end='')\n1 / 0", gpus=1)
    assert outcome.run is not None
    first, second, *_ = outcome.run.logs(0).splitlines()
    assert first == "unfinished" and second.startswith("Traceback")
    shown = notebook.run("print('unfinished', end='')\nget_ipython().run_cell('1 / 0')", gpus=1)
    first, second, *_ = shown.lines[0]
    assert first == "unfinished" and ANSI.sub("", second).startswith("-----")


@pytest.mark.fault(46)
def test_broken_bytes_do_no_harm(notebook: Notebook) -> None:
    """A rank writes invalid UTF-8, a redrawn line and colours, byte by byte."""
    source = r"""
import os, time
for byte in "grün\n".encode() + b"\xff\xfe bad\n" + b"50%\r100%\n" + b"\x1b[31mred\x1b[0m\n":
    os.write(1, bytes([byte]))
"""
    outcome = notebook.run(source, gpus=1)
    assert outcome.lines[0] == ["grün", "\ufffd\ufffd bad", "100%", "\x1b[31mred\x1b[0m"]


def test_a_redrawn_line_gives_progress_events_and_one_log_line(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    source = f"""
import os, sys, time
for step in range(5):
    sys.stderr.write(f"\\rstep {{step}}")
    sys.stderr.flush()
    while step == 3 and not os.path.exists({str(go)!r}):
        time.sleep(0.01)
print()
"""
    with on_event(monkeypatch, lambda it: it.get("text") == "step 3", lambda run: go.touch()):
        outcome = notebook.run(source, gpus=1)
    assert outcome.lines[0] == ["step 4"]
    assert "step 3" in [event["text"] for event in outcome.of_kind("progress")]


@pytest.mark.fault(37)
def test_a_full_log_disk_does_not_stop_the_run(notebook: Notebook) -> None:
    source = """
import glob, os
path = max(glob.glob(os.environ["TAAS_STATE_DIR"] + "/runs/*/logs/rank-0.log"))
os.remove(path); os.symlink("/dev/full", path)
print("goes on")
"""
    assert notebook.run(source, gpus=1).lines[0] == ["goes on"]


@pytest.mark.fault(37)
@pytest.mark.skipif(os.geteuid() != 0, reason="to mount takes root")
def test_results_find_room_though_logs_fill_the_disk(notebook: Notebook) -> None:
    """The logs fill the disk of the run folder. The run's results still arrive."""
    runs = notebook.state_dir / "runs"
    runs.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", runs], check=True)
    try:
        source = """
import torch
x = torch.arange(10_000)
for number in range(60_000):
    print(number, "x" * 99)
"""
        outcome = notebook.run(source, "--out x")
        assert outcome.error is None, outcome.shown
        assert notebook.shell.user_ns["x"][-1] == 9_999
        assert outcome.run is not None and outcome.run.state == "SUCCEEDED"
        [note] = {note for note in outcome.run.head.notes if "the log of rank 0" in note}
        assert "reserved for the run's results" in note and "rank-0.log" in note
    finally:
        subprocess.run(["umount", "-l", runs], check=True)
