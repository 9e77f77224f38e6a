"""Profile the first steps of a rank with torch.profiler, for `--profile N`.

A step begins when the program requests a batch from a registered loader, or calls `taas.step()`.
The profiler writes the trace of N steps to the run folder, where `journal/timeline.py` reads it.
"""

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from taas_magic.journal.timeline import LOAD

WARM_UP_STEPS = 1
"""Number of steps in which the profiler already runs, but records nothing.

The first step is not typical, because torch allocates memory and selects kernels in it.
"""


class StepProfiler:
    """The profiler of one rank. It records the first steps of the rank's training.

    The steps are counted in the thread that begins the first step. Calls from other threads begin
    no step.

    Args:
        steps: Number of steps to record, after the steps in which the profiler warms up.
        file: Path for the trace; the path ends in `.json.gz`. The file exists only when the trace
            is complete.
        note: Function that sends a message to the user.
    """

    def __init__(self, steps: int, file: Path, note: Callable[[str], None]) -> None:
        self._steps, self._file, self._note = steps, file, note
        self._pid, self._thread = os.getpid(), 0
        self._profile: Any = None
        self._begun = 0
        self._has_ended = self._is_marked = False
        self._why_empty = (
            "no registered loader gave a batch, and the cell has not called taas.step()"
        )

    def step(self) -> None:
        """Begin the next step of the profile. Called by `taas.step()`.

        After the first call, requests for batches of registered loaders begin no steps any more.
        """
        self._is_marked = True
        self._begin_step()

    @contextmanager
    def batch(self, loader: str) -> Iterator[None]:
        """Mark the `with` block in the trace as a wait for a batch of the loader named `loader`.

        First begins the next step of the profile, unless the program calls `taas.step()`. After the
        end of the profile, only runs the block.
        """
        from torch.profiler import record_function

        if not self._is_marked:
            self._begin_step()
        if self._has_ended:
            yield
        else:
            with record_function(LOAD + loader):
                yield

    def close(self) -> None:
        """End the profile if it is not over yet, and write the trace of the steps recorded so far.

        If there is no trace, because no step was recorded, send the user a note that says why.
        """
        if self._profile is not None and not self._has_ended:
            self._end_profile()
        if not self._file.exists():
            self._note(f"--profile has recorded nothing: {self._why_empty}")

    def _begin_step(self) -> None:
        """Count the next step. Start torch's profiler at the first step, and end it after the last.

        The profiler runs during `WARM_UP_STEPS` steps, and then during the steps that it records.
        When the step after the recorded steps begins, the profile ends, and its trace is written.
        If the program already runs a profiler of its own, the profile ends at the first step,
        without a trace.

        Do nothing in a thread that did not begin the first step, in a fork of the rank, and after
        the end of the profile.
        """
        here = threading.get_ident()
        if self._has_ended or os.getpid() != self._pid or self._thread not in (0, here):
            return
        self._thread = here
        self._begun += 1
        if self._profile is None:
            self._start_profile()
        else:
            self._profile.step()
        if self._begun > WARM_UP_STEPS + self._steps:
            self._end_profile()

    def _start_profile(self) -> None:
        """Start torch's profiler. It warms up, records the steps, and then writes the trace.

        If the program already runs a profiler of its own, end the profile instead, because a second
        profiler would crash the process.

        Also record why there is no trace yet; `close` shows this reason to the user if there is
        none at the end. Also suppress torch's warning about profiles of several cycles, because
        this profile has only one cycle.
        """
        import torch
        from torch.profiler import profile, schedule

        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            # a second profiler would crash the process
            self._has_ended = True
            self._why_empty = "the program runs a profiler of its own"
            return
        self._why_empty = "the cell has only one step, in which the profiler warms up"
        # Some versions of torch warn that a profile of several cycles loses events. This profile
        # has only one cycle.
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each")
        self._profile = profile(
            schedule=schedule(wait=0, warmup=WARM_UP_STEPS, active=self._steps, repeat=1),
            on_trace_ready=self._write,
        )
        self._profile.start()

    def _end_profile(self) -> None:
        self._has_ended = True
        self._profile.stop()

    def _write(self, profile: Any) -> None:
        """Write the trace. If this fails, only record the reason, which `close` shows."""
        part = self._file.with_name(f".{self._file.name}")
        try:
            self._file.parent.mkdir(mode=0o700, exist_ok=True)
            profile.export_chrome_trace(str(part))
            part.rename(self._file)
        except (OSError, RuntimeError) as error:
            self._why_empty = f"the trace could not be written: {error}"
            with suppress(OSError):
                part.unlink()


_profiler: StepProfiler | None = None


def use_profiler(profiler: StepProfiler | None) -> None:
    """Set the profiler whose steps `taas.step()` begins. If None, `taas.step()` does nothing."""
    global _profiler
    _profiler = profiler


def step() -> None:
    """Tell the profiler of `--profile N` that the next step of the training begins.

    Call `step` once at the end of each iteration, in every rank. The call is needed only if the
    cell uses no registered loader, or if an iteration takes several batches. Without `--profile`,
    and in the notebook, `step` does nothing.
    """
    if _profiler is not None:
        _profiler.step()
