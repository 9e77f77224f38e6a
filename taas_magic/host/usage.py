"""Regular reports for the table of ranks: CPU, GPU and memory use, and the line of code.

The reports are about the ranks of one attempt on this host.
"""

import threading
import time
from collections.abc import Sequence

import psutil

from taas_magic.host.spec import EventSink
from taas_magic.host.stacks import code_position, cpu_s, memory_bytes, processes_below
from taas_magic.host.watch import Ranks, RankState
from taas_magic.messages import RankUsage, Usage

FIRST_USAGE_S = 0.5
"""Seconds from an attempt's start to its first measurement, and then to its second measurement.

The first measurement is not reported. A measurement takes some milliseconds of CPU time, which
would delay the first line of a short cell. So an attempt that ends earlier is not measured at all.
"""

USAGE_S = (2.0, 10.0)
"""Shortest and longest time between two reports, in seconds.

The time between two reports is a hundredth of the time since the attempt's start, within these
limits. So the reports of a long run become rarer, and do not fill the journal.
"""

_PAUSE_FACTOR = 50
"""Minimum ratio of the time between two measurements to the time that a measurement takes.

On a host with many large processes, a measurement takes long, because it reads the memory of each
process. Then the ratio keeps the load on the host low: the reports become rarer.
"""

_PLACE_CHARS = 200


class UsageReporter:
    """Sender of regular reports about how much CPU, GPU and memory each rank on this host uses.

    A report also has the line of code that each rank executes. The agent calls `check` regularly.
    For each report, `check` starts a thread that measures the use and sends the report.
    """

    def __init__(self, attempt: int, ranks: Ranks, emit: EventSink) -> None:
        self._attempt, self._ranks, self._emit = attempt, ranks, emit
        self._began = time.monotonic()
        self._due_at = self._began + FIRST_USAGE_S
        self._rows: dict[int, RankUsage] = {}
        self._cpu_s: dict[int, float] = {}
        self._measured_at = self._began
        self._busy, self._closing, self._is_closed = threading.Lock(), threading.Lock(), False

    def check(self, now: float) -> None:
        """If a report is due, start a thread that measures what ranks use, and sends the report.

        Args:
            now: The agent's monotonic clock, in seconds.
        """
        if now >= self._due_at and self._busy.acquire(blocking=False):
            threading.Thread(target=self._report, name="taas-usage", daemon=True).start()

    def close(self) -> None:
        """Send no reports from now on. If a thread is measuring now, its report is dropped."""
        with self._closing:
            self._is_closed = True

    def _report(self) -> None:
        """Measure what the running ranks use, set the time of the next report, and send the report.

        The pause until the next report grows with the attempt's duration (`USAGE_S`) and with the
        time of the measurement (`_PAUSE_FACTOR`). The first measurement is not sent, and no report
        is sent after `close`. After the measurement, releases `_busy`, so that another report may
        begin.
        """
        began, is_first = time.monotonic(), not self._cpu_s
        try:
            self._measure([state for state in self._ranks.states() if not state.ended])
        finally:
            now = time.monotonic()
            pause_s = min(max(USAGE_S[0], (now - self._began) / 100), USAGE_S[1])
            pause_s = max(pause_s, _PAUSE_FACTOR * (now - began))
            self._due_at = began + (FIRST_USAGE_S if is_first else pause_s)
            self._busy.release()
        with self._closing:
            if not is_first and not self._is_closed:
                rows = [row for _, row in sorted(self._rows.items())]
                self._emit(Usage(attempt=self._attempt, ranks=rows))

    def _measure(self, states: Sequence[RankState]) -> None:
        """Measure the CPU use and memory of running ranks, and store a `RankUsage` for each rank.

        CPU use and memory include the rank's descendants. The CPU use is the mean since the last
        call. In the first call, the CPU use is wrong, because ranks of a session have already used
        CPU time before the attempt. So `_report` does not send the results of the first call.

        A `RankUsage` also has the rank's line of code, GPU use and time in collectives, from its
        heartbeats. If a rank runs no code of the user any more, its last line of code stays. The
        `RankUsage` of a rank that is not in `states` does not change.

        Args:
            states: States of the ranks whose processes run.
        """
        before_s, before_at = self._cpu_s, self._measured_at
        below = processes_below(state.pid for state in states)
        self._measured_at = time.monotonic()
        self._cpu_s = {pid: sum(map(cpu_s, found)) for pid, found in below.items()}
        passed_s = max(self._measured_at - before_at, 1e-3)
        for state in states:
            place = code_position(state.beat.stack)[:_PLACE_CHARS]
            if not place and state.rank in self._rows:
                place = self._rows[state.rank].place
            used_s = self._cpu_s[state.pid] - before_s.get(state.pid, 0.0)
            self._rows[state.rank] = RankUsage(
                rank=state.rank,
                cpus=max(0.0, used_s) / passed_s,
                memory_bytes=sum(map(_memory_of, below[state.pid])),
                in_collectives=state.collective_fraction,
                place=place,
                gpu=state.beat.gpu,
            )


def _memory_of(process: psutil.Process) -> int:
    try:
        return memory_bytes(process)
    except psutil.Error:
        return 0
