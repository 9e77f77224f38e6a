"""Measure how long `attach` takes to show an ended run with a journal of 100 MB.

    python benchmarks/attach.py

There are three such runs. Their journals are full of printed lines, of reports about loaders, and
of values that rank 0 logged by `taas.log`.
"""

import contextlib
import io
import os
import tempfile
import time
from pathlib import Path

from taas_magic.journal.folder import JournalWriter, RunFolder
from taas_magic.messages import (
    Event,
    Lines,
    MetricPoint,
    Metrics,
    RankCounts,
    RankReport,
    RunEnded,
    StateChanged,
    encode,
)
from taas_magic.notebook.attach import attach
from taas_magic.notebook.runs import Run
from taas_magic.plan import Flags, HostCapacity, make_plan

JOURNAL_BYTES = 100_000_000
RANKS = 8


def journal(run_id: str, kind: str) -> Run:
    """Create an ended run whose journal is full of one kind of event, and return it.

    Args:
        kind: "lines", "reports" or "metrics".
    """
    plan = make_plan(Flags(gpus=RANKS), HostCapacity(0, RANKS), run_id)
    folder = RunFolder.create(run_id, plan, "pass")
    events: list[Event] = []
    for step in range(2000):
        rank, now = step % RANKS, 1e9 + step / RANKS
        if kind == "reports":
            counts = RankCounts(batches=step, span_s=step / RANKS, waited_s=1.0, bytes=step * 1000)
            events.append(RankReport(rank=rank, cores=8, loaders={"train": counts}, time=now))
        elif kind == "metrics":
            steps = range(step * 100, step * 100 + 100)
            points = [MetricPoint("loss", at, 1 / (at + 1), now) for at in steps]
            events.append(Metrics(rank=0, points=points, time=now))
        else:
            events.append(Lines(rank=rank, lines=[f"step {step} loss {1 / (step + 1)}"], time=now))
    block = b"".join(encode(event) + b"\n" for event in events)
    with folder.events.open("wb") as file:
        file.write(encode(StateChanged(state="RUNNING", time=1e9)) + b"\n")
        while file.tell() < JOURNAL_BYTES:
            file.write(block)
    writer = JournalWriter(folder)
    writer.append(RunEnded(state="SUCCEEDED", time=2e9))
    writer.close()
    return Run(folder.path)


def main() -> None:
    """Attach five times to each run, and print the shortest elapsed time and the least CPU time."""
    with tempfile.TemporaryDirectory() as state:
        os.environ["TAAS_STATE_DIR"] = state
        for number, kind in enumerate(("lines", "reports", "metrics")):
            run = journal(f"run-{number}", kind)
            size = Path(run.path / "events.jsonl").stat().st_size
            took = []
            for _ in range(5):
                began, cpu = time.perf_counter(), time.process_time()
                with contextlib.redirect_stdout(io.StringIO()):
                    attach(Run(run.path))
                took.append((time.perf_counter() - began, time.process_time() - cpu))
            wall, used = (min(each) for each in zip(*took, strict=True))
            print(f"{kind}: {size / 1e6:.0f} MB, {wall:.2f} s, of which {used:.2f} s computing")


if __name__ == "__main__":
    main()
