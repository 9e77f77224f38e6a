"""Regular reports of what ranks use (`host.usage`), with processes that stand for ranks."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import psutil
import pytest

from taas_magic.host import usage
from taas_magic.host.usage import UsageReporter
from taas_magic.host.watch import Ranks
from taas_magic.messages import Event, RankBeat, StackFrame, Usage
from tests.eventually import eventually

HOLDS = """
import time
while time.process_time() < 2:
    pass
held = b"x" * 60_000_000
print("up", flush=True)
time.sleep(600)
"""
"""A rank of a session that has used two seconds of CPU time, and now waits for its next cell."""


@pytest.fixture
def rank() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def reports(reporter: UsageReporter, sent: list[Event]) -> Callable[[], bool]:
    """Return a condition: check the reporter, and return whether `sent` has an event."""

    def is_sent() -> bool:
        reporter.check(time.monotonic())
        return bool(sent)

    return is_sent


def test_a_usage_report_covers_the_time_since_the_last_one_and_ended_ranks(
    rank: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "USAGE_S", (0.1, 0.1))
    ranks, sent = Ranks([3]), list[Event]()
    ranks.record_start({3: rank.pid})
    ranks.record_message(3, RankBeat(stack=[StackFrame("Cell In[1]", 2, "<module>")]))
    reporter = UsageReporter(1, ranks, sent.append)
    eventually(reports(reporter, sent))
    first = sent[0]
    assert isinstance(first, Usage) and first.attempt == 1
    [row] = first.ranks
    assert row.rank == 3 and 60e6 < row.memory_bytes < 200e6
    assert row.cpus < 0.5, "CPU time from before the first measurement counts"
    assert row.place == "Cell In[1], line 2"
    ranks.record_message(3, RankBeat())  # the rank has run its cell
    sent.clear()
    eventually(reports(reporter, sent))
    assert isinstance(sent[0], Usage) and sent[0].ranks[0].place == "Cell In[1], line 2"
    rank.kill()
    rank.wait()
    for state in ranks.states():
        state.exitcode = -9
    sent.clear()
    eventually(reports(reporter, sent))
    assert isinstance(sent[0], Usage) and sent[0].ranks[0].memory_bytes > 60e6
    reporter.close()
    sent.clear()
    for _ in range(20):
        assert not reports(reporter, sent)()
        time.sleep(0.02)


def test_a_short_cell_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = threading.Event()

    def measure(pids: Iterable[int]) -> dict[int, list[psutil.Process]]:
        measured.set()
        return {}

    monkeypatch.setattr(usage, "processes_below", measure)
    reporter = UsageReporter(0, Ranks([]), list[Event]().append)
    began = time.monotonic()
    reporter.check(began + usage.FIRST_USAGE_S - 0.1)
    assert not measured.wait(0.2)
    reporter.check(began + usage.FIRST_USAGE_S + 0.1)
    eventually(measured.is_set)
