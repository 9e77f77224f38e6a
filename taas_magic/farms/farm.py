"""The kernel's side of a farm: submits jobs and receives their results as they become ready.

As soon as a job has ended, a thread of the kernel stores the job's result in the kernel. So the
result remains even if the job's node is lost later.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import logging
import os
import pickle
import queue
import shutil
import subprocess
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from IPython.core.getipython import get_ipython

from taas_magic import leases, messages
from taas_magic.capture import payload, pickling, process_state
from taas_magic.capture.work import FunctionWork
from taas_magic.config import Config, load_config
from taas_magic.engines.base import log_tail
from taas_magic.errors import (
    JobFailed,
    PoolError,
    ProtocolError,
    UsageError,
    interrupted,
    reason_of,
)
from taas_magic.farms import table
from taas_magic.farms.messages import (
    CANCELLED,
    DROP_PART,
    INLINE_BYTES,
    LOST_NODES,
    PUT_PART,
    TOPIC,
    FarmAddress,
    FarmSettings,
    FarmUpdate,
    JobCall,
    JobEnded,
    JobOutcome,
    JobUpdate,
    NodeUpdate,
    Part,
)
from taas_magic.farms.table import FarmState, JobState
from taas_magic.host.activity import wait_for_start
from taas_magic.host.system import spawn_command, wait_or_kill
from taas_magic.journal.folder import state_dir
from taas_magic.late_imports import import_in_thread
from taas_magic.messages import cleaned
from taas_magic.notebook import launch, pools
from taas_magic.notebook.options import check_callable, refuse_shared_names
from taas_magic.plan import new_run_id
from taas_magic.pool.client import disconnect
from taas_magic.shared_files import lock
from taas_magic.store import rule as store
from taas_magic.store.tree import why_invalid

if TYPE_CHECKING:
    from distributed import Client, Future

LOG = "farm.log"

START_TIMEOUT_S = leases.START_TIMEOUT_S
"""Seconds for which the starting farm's process may do nothing; then its start has failed."""

END_S = 30.0
"""Maximum seconds for the farm's process to end by itself when the farm is closed.

After this time, the kernel kills the process.
"""

EXIT_CODE_S = 10.0
"""Seconds that the kernel waits for the exit code of the farm's process.

The wait begins when the connection to the process has broken. If the process does not end in this
time, the error reports only the broken connection.
"""

WATCH_S = 0.5
"""Seconds between refreshes of the table, and between checks that the farm's process still runs."""


class Job(JobState):
    """A submitted call of a function on a farm, like a `concurrent.futures.Future`.

    Attributes:
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        folder: The job's folder, with its output (`output.log`) and the files that it saved by
            `taas.save`.
        outcome: Future of the result or the exception. If several threads set it, the first wins.
    """

    def __init__(
        self, farm: "Farm", name: str, args: tuple[Any, ...], kwargs: dict[str, Any], folder: Path
    ) -> None:
        super().__init__(name)
        self.args, self.kwargs, self.folder = args, kwargs, folder
        self.outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._farm = farm

    def __repr__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return f"<job {self.name}: {self.state}{where}>"

    @property
    def state(self) -> str:
        """State of the job: "queued", "running", "done", "failed" or "cancelled"."""
        if not self.ended and self.outcome.done():
            error = self.outcome.exception()
            is_cancelled = getattr(error, "etype", "") == CANCELLED
            self.ended = "done" if error is None else "cancelled" if is_cancelled else "failed"
        return super().state

    def done(self) -> bool:
        """Return whether the job has ended: returned, failed or cancelled."""
        return self.outcome.done()

    def result(self, timeout: float | None = None) -> Any:
        """Wait until the job has ended, and return the function's result.

        If the user interrupts this call, the job is cancelled.

        Args:
            timeout: Maximum seconds to wait for the job's end; default is no limit.

        Raises:
            JobFailed: The function raised an exception, the job's process died, or the job was
                cancelled. The message has the job's traceback, with the notebook's line numbers.
            PoolError: The farm's process has ended, or no node could be started.
            TimeoutError: The job has not ended within `timeout` seconds. The job continues.
            KeyboardInterrupt: The user interrupted this call.
            Exception: The kernel could not unpickle the result or write the job's files.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self.outcome.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the job has ended, and return the exception with which it ended.

        If the user interrupts this call, the job is cancelled.

        Args:
            timeout: Maximum seconds to wait for the job's end; default is no limit.

        Returns:
            The exception, such as a `JobFailed`; None if the function returned.

        Raises:
            TimeoutError: The job has not ended within `timeout` seconds. The job continues.
            KeyboardInterrupt: The user interrupted this call.
        """
        with self._farm.cancelling([self]):
            try:
                return self.outcome.exception(timeout)
            except concurrent.futures.TimeoutError:
                late = f"job {self.name} has not ended after {timeout} s"
                raise TimeoutError(late) from None

    def running(self) -> bool:
        """Return whether a node runs the job now."""
        return self.state == "running"

    def cancelled(self) -> bool:
        """Return whether the job was cancelled."""
        return self.state == "cancelled"

    def add_done_callback(self, function: Callable[["Job"], object]) -> None:
        """Call `function` with this job when the job ends, or now if the job has already ended.

        The thread that ends the job calls `function`: a thread of the farm, or the thread that
        cancels the job. If the job has already ended, this method itself calls `function`, and then
        returns. If `function` raises an exception other than KeyboardInterrupt, the exception is
        only logged.
        """

        def call(outcome: concurrent.futures.Future[Any]) -> None:
            try:
                function(self)
            except KeyboardInterrupt:  # by the user, who interrupts a call of `cancel`
                raise
            except BaseException:  # even `sys.exit` must not end the farm's thread
                logging.getLogger("taas").exception("done callback of job %s", self.name)

        self.outcome.add_done_callback(call)

    def cancel(self) -> bool:
        """Cancel the job, unless the job has ended.

        The job counts as cancelled at once, and its stored arguments are removed. If the job is
        running, its node then sends SIGINT to the job's process. If the job still runs 5 s later
        (`node.GRACE_S`), the node kills the process. This method does not wait for the process.

        Returns:
            True if this call cancelled the job; False if the job had already ended.
        """
        had_ended = self.done()
        self.set_outcome(
            JobFailed(f"job {self.name} was cancelled", name=self.name, etype=CANCELLED)
        )
        if (future := self._farm._forget_job(self.name)) is not None:
            future.cancel()
        return not had_ended

    def set_outcome(self, error: BaseException | None, result: Any = None) -> None:
        """Set the outcome of the job, unless the job already has one, and end it in the table.

        Args:
            error: The exception of a job that did not return, else None.
            result: The function's result.
        """
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            if error is None:
                self.outcome.set_result(result)
            else:
                self.outcome.set_exception(error)
        self._farm.state.end_job(self)


class Farm:
    """A farm, which runs calls of functions as jobs on the hosts of pools. Made by `taas.farm`.

    At the end of a `with` block, the farm is closed.

    Attributes:
        folder: The folder with the farm's log and the folders of its jobs.
        state: The state of the farm and its jobs. The notebook shows this state as a table.
    """

    def __init__(self, settings: FarmSettings, config: Config, shell: Any) -> None:
        self._shell, self._config, self.name = shell, config, settings.name
        self.folder = state_dir() / "farms" / self.name
        _remove_ended(self.folder.parent, config.runs.keep)
        (self.folder / "jobs").mkdir(mode=0o700, parents=True)
        self.state = FarmState(self.name, ", ".join(settings.pools), settings.least, settings.most)
        self._process, address = _start_process(settings, self.folder)
        self.state.slots = address.slots
        try:
            self._client = _connect(address)
        except BaseException:  # such as an interrupt by the user
            _end_process(self._process)
            raise
        self._stored_parts = _StoredParts(self._client)
        self._jobs: dict[str, tuple[Job, Future, list[Part]]] = {}
        self._on_solution: list[Callable[[Job], None]] = []
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._closed = threading.Event()
        self._why_over = ""
        self._lacks_output = False
        self._ended: queue.SimpleQueue[FarmUpdate | None] = queue.SimpleQueue()
        self._solved: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._client.subscribe_topic(TOPIC, self._on_message)
        self._show(update=False)
        threading.Thread(target=self._end_jobs, name="taas-farm", daemon=True).start()
        threading.Thread(target=self._watch, name="taas-farm-watch", daemon=True).start()
        threading.Thread(target=self._call_listeners, name="taas-farm-tell", daemon=True).start()

    def __enter__(self) -> "Farm":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        return table.mime_bundle(self.state)

    def submit(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        retries: int | None = None,
        fresh: bool | None = None,
        **kwargs: Any,
    ) -> Job:
        """Submit a job: a process on a host of the farm will call `function` with the arguments.

        This method returns when the farm's process has received the large arguments.

        Args:
            function: Any callable. It is sent with the notebook objects that it uses, like the
                objects that a `%%taas` cell uses.
            args: Positional arguments of the call.
            retries: Number of further calls if the function raises or its process dies; default 0.
            fresh: Whether the job needs a process in which no other job has run; default False.
            kwargs: Keyword arguments of the call.

        Returns:
            The job, which gives the result or exception when the call has ended.

        Raises:
            CaptureError: An object cannot be pickled. The message says where the object is, such as
                `config['a'][3].db`.
            PoolError: The farm is closed, or its process has ended.
            UsageError: `function` is not callable. Or `retries` or `fresh` was given, but the
                function has a parameter of the same name.
        """
        return self._submit([(args, kwargs)], function, retries, fresh)[0]

    def map(
        self,
        function: Callable[..., Any],
        /,
        *iterables: Iterable[Any],
        retries: int | None = None,
        fresh: bool | None = None,
        **kwargs: Any,
    ) -> list[Job]:
        """Submit one job for each call that the built-in `map` would make.

        Args:
            function: Any callable.
            iterables: Sources of the positional arguments. The n-th job receives the n-th element
                of each iterable. The shortest iterable determines the number of jobs.
            retries: Number of further calls of a job if the function raises or its process dies;
                default 0.
            fresh: Whether each job needs a process in which no other job has run; default False.
            kwargs: Keyword arguments, the same for all jobs.

        Returns:
            The jobs, in the order of the iterables' elements. Empty if an iterable is empty.

        Raises:
            CaptureError: An object cannot be pickled. The message says where the object is, such as
                `config['a'][3].db`.
            PoolError: The farm is closed, or its process has ended.
            UsageError: `function` is not callable. Or `retries` or `fresh` was given, but the
                function has a parameter of the same name.
        """
        calls = [(args, kwargs) for args in zip(*iterables, strict=False)]
        return self._submit(calls, function, retries, fresh)

    def as_completed(self, jobs: Iterable[Job] | None = None) -> Iterator[Job]:
        """Yield each job when it has ended: returned, failed or cancelled.

        Jobs that have already ended come first, then the other jobs as they end. Each job comes
        once. The jobs to wait for are fixed when the iteration starts. If the user interrupts the
        iteration, all `jobs` that have not ended are cancelled.

        Args:
            jobs: The jobs to wait for; default is all jobs of the farm that have not ended.

        Raises:
            KeyboardInterrupt: The user interrupted the iteration.
        """
        waiting = list(self._unfinished() if jobs is None else jobs)
        with self.cancelling(waiting):
            jobs_of = {job.outcome: job for job in waiting}
            ended: queue.SimpleQueue[concurrent.futures.Future[Any]] = queue.SimpleQueue()
            for outcome in jobs_of:
                outcome.add_done_callback(ended.put)
            for _ in jobs_of:
                yield jobs_of[ended.get()]

    def on_solution(self, listener: Callable[[Job], None]) -> None:
        """Call `listener` with each job whose function returns from now on.

        A thread of the farm calls `listener`. Jobs that fail or are cancelled cause no call. An
        exception of `listener` is only logged.
        """
        self._on_solution.append(listener)

    def status(self) -> FarmState:
        """Return the state of the farm. A notebook shows the returned object as a table."""
        return self.state

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Cancel all `jobs` that have not ended. Running jobs get SIGINT, and SIGKILL 5 s later."""
        for job in jobs:
            job.cancel()

    @contextmanager
    def cancelling(self, jobs: Sequence[Job]) -> Iterator[None]:
        """Return a context manager that cancels unfinished `jobs` if the user interrupts its block.

        Raises:
            KeyboardInterrupt: The user interrupted the block.
        """
        try:
            yield
        except KeyboardInterrupt:
            left = [job for job in jobs if not job.done()]
            self.cancel(left)
            jobs_were = "1 job was" if len(left) == 1 else f"{len(left)} jobs were"
            raise interrupted(f"Stopped by you; {jobs_were} cancelled.") from None

    def close(self) -> None:
        """Cancel the jobs that have not ended, release the hosts and end the farm's process.

        Then show the farm as closed. A further call does nothing. If the user interrupts this
        method, it skips only the current step. Jobs that it has not cancelled end with a PoolError.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._why_over = self._why_over or "you closed it"
        with contextlib.ExitStack() as steps:  # calls these functions from the last to the first
            steps.callback(self._show)
            steps.callback(self.state.mark_closed)
            steps.callback(_end_process, self._process)
            steps.callback(disconnect, self._client)
            steps.callback(self._ended.put, None)
            steps.callback(self._end_unfinished_jobs, self._why_over)
            self.cancel(self._unfinished())

    def _show(self, update: bool = True) -> None:
        transient = {"display_id": self.name}
        mime_bundle = table.mime_bundle(self.state)
        self._shell.display_pub.publish(mime_bundle, transient=transient, update=update)

    def _unfinished(self) -> list[Job]:
        with self._lock:
            return [job for job, *_ in self._jobs.values()]

    def _submit(
        self,
        calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        function: Callable[..., Any],
        retries: int | None,
        fresh: bool | None,
    ) -> list[Job]:
        """Submit one job for each item of `calls`, a pair of positional and keyword arguments.

        If `calls` is empty, return []. Otherwise:

        - Pickle all arguments.
        - Capture the function with the notebook objects that a job needs. Several jobs share one
          capture if their arguments use the same notebook variables and modules.
        - Store large arguments and captures in the farm's process. If there are several jobs, store
          also small captures there.
        - Send all jobs in one message.

        If the farm has ended meanwhile, the returned jobs have already ended with an error. If an
        exception or an interrupt ends this method, cancel all of these jobs and remove their stored
        parts.

        Raises:
            CaptureError: The function or an argument cannot be pickled.
            PoolError: The farm accepts no more jobs.
            UsageError: `function` is not callable. Or `retries` or `fresh` was given, but the
                function has a parameter of the same name.
        """
        if self._why_over:
            raise PoolError(f"{self.name} accepts no jobs: {self._why_over}; create another farm")
        if not calls:
            return []
        check_callable("a farm's job", function)
        options = {"retries": retries, "fresh": fresh}
        given = [name for name, option in options.items() if option is not None]
        refuse_shared_names("a farm's job", function, given)
        works = [FunctionWork(function, *call) for call in calls]
        packed = [_pack_arguments(work, self._shell.user_ns) for work in works]
        functions: dict[Any, tuple[bytes, str]] = {}
        for call in packed:
            key = call.needs, call.modules
            if key not in functions:
                functions[key] = self._pack_function(function, call)
        title = getattr(function, "__name__", "job").strip("<>")
        jobs: list[Job] = []
        job_calls: list[JobCall] = []
        parts: list[list[Part]] = []
        marks: dict[tuple[int, int], str] = {}
        store = functools.partial(self._stored_parts.store_part, marks=marks)
        try:
            for call in packed:
                work, (captured, settings_hash) = call.work, functions[call.needs, call.modules]
                name = f"{title}-{next(self._numbers)}"
                folder = self.folder / "jobs" / name
                jobs.append(Job(self, name, work.args, dict(work.kwargs), folder))
                job_calls.append(JobCall(name, work.shape, bool(fresh), settings_hash))
                parts.append([])
                parts[-1].append(store(captured, is_shared=len(packed) > 1))
                for part in call.parts:
                    parts[-1].append(store(part))
            for job in jobs:
                self.state.add_job(job)
            self._send_jobs(jobs, job_calls, parts, retries or 0)
        except BaseException:  # such as an interrupt by the user
            for job, stored in zip(jobs, parts, strict=False):
                if job.name not in self._jobs:
                    self._stored_parts.release_parts(stored)
                job.cancel()
            raise
        if self._why_over:  # the farm ended meanwhile
            self._end_unfinished_jobs(self._why_over)
        return jobs

    def _send_jobs(
        self, jobs: list[Job], calls: list[JobCall], parts: list[list[Part]], retries: int
    ) -> None:
        """Submit all jobs to Dask in one message, because a message for each job would be slow.

        Record each job in `_jobs`, together with the job's Dask future and parts.

        Args:
            calls: The call of each job.
            parts: For each job, the parts of its payload and arguments, or the names under which
                these parts are stored.
            retries: Number of further calls of a job if its call fails.
        """
        from taas_magic.farms.worker import run_job

        names = [job.name for job in jobs]
        with self._lock, warnings.catch_warnings():
            # Ignore Dask's advice to scatter large arguments: `_StoredParts` already does so.
            warnings.filterwarnings("ignore", message="Sending large graph")
            futures = self._client.map(
                run_job, calls, parts, key=names, retries=retries, pure=False
            )
            self._jobs.update(zip(names, zip(jobs, futures, parts, strict=True), strict=True))

    def _pack_function(
        self, function: Callable[..., Any], call: "_PackedCall"
    ) -> tuple[bytes, str]:
        """Capture a function and all notebook objects that the function and its arguments use.

        Write the payload to a temporary file in the farm's folder, and read it from there.

        Returns:
            The payload, and the value of `JobCall.settings_hash`: a hash of the captured modules
            and of the process state.
        """
        path = self.folder / f"function-{threading.get_ident()}"
        settings = launch.capture_settings(self._shell, self._config)
        captured = payload.capture(
            FunctionWork(function),
            self._shell.user_ns,
            **settings,
            to="jobs",
            needs=call.needs,
            imports=call.modules,
        )
        setting_bytes = pickle.dumps((captured.modules, process_state.collect()))
        try:
            payload.write(captured, path)
            return path.read_bytes(), hashlib.blake2b(setting_bytes, digest_size=16).hexdigest()
        finally:
            path.unlink(missing_ok=True)

    def _watch(self) -> None:
        """Refresh the farm's table, and find jobs that ended without a message. Runs in a thread.

        Until the farm closes, repeat these checks every `WATCH_S`:

        - If the farm's process has ended, end all jobs with an error.
        - If Dask counts a job as failed or cancelled, make the thread of `_end_jobs` end this job,
          unless this thread still has messages of jobs that have ended.
        - If the state has changed, show the table again.
        """
        shown = 0
        while not self._closed.wait(WATCH_S):
            if not self._why_over and self._process.poll() is not None:
                self._handle_lost_process()
            with self._lock:
                over = ("error", "cancelled")
                names = [name for name, it in self._jobs.items() if it[1].status in over]
            if self._ended.empty():  # otherwise, the jobs may be among those that it has
                for name in names:
                    self._ended.put(JobUpdate(name, "", "erred"))
            if shown != self.state.changes:
                shown = self.state.changes
                self._show()

    def _handle_lost_process(self) -> None:
        """End all jobs with an error, because the farm's process has ended or cannot be reached.

        If the user has closed the farm, do nothing. Otherwise, first wait up to `EXIT_CODE_S` for
        the exit code, which the error reports. From now on, the farm accepts no jobs.
        """
        if self._closed.is_set():
            return
        try:
            why = f"its process ended with code {self._process.wait(EXIT_CODE_S)}"
        except subprocess.TimeoutExpired:
            why = "the connection to its process broke"
        self._end_unfinished_jobs(f"{why} ({self.folder / LOG})")

    def _end_unfinished_jobs(self, why: str) -> None:
        """Accept no more jobs, and end all unfinished jobs with an error that says `why`."""
        self._why_over = why
        for job in self._unfinished():
            job.set_outcome(PoolError(f"job {job.name} of {self.name}: {why}"))
            self._forget_job(job.name)

    def _end_jobs(self) -> None:
        """End each job when its outcome or error arrives from the farm's process or a node.

        This method runs in a thread until the farm is closed. It removes the Dask future and the
        stored arguments of each ended job. If the farm's process gives up starting nodes, this
        method ends all jobs with an error. When the farm is closed, this method makes the thread of
        `_call_listeners` end.
        """
        while (message := self._ended.get()) is not None:
            if isinstance(message, NodeUpdate):
                self._end_unfinished_jobs(message.why)
            else:
                self._end_job(message)
            del message  # it has the result
        self._solved.put(None)

    def _end_job(self, message: JobOutcome | JobUpdate) -> None:
        """End the job to which a message belongs. Remove its Dask future and stored arguments."""
        with self._lock:
            job, future, _ = self._jobs.get(message.job, (None, None, ()))
        if isinstance(message, JobOutcome) and job is not None:
            self._store_outcome(job, message)
        elif job is not None and future is not None:
            self._store_failure(job, future)
        self._forget_job(message.job)

    def _forget_job(self, name: str) -> "Future | None":
        """Remove and return an ended job's Dask future, and remove its stored arguments.

        Dask forgets the job when no reference to the future is left.

        Args:
            name: Name of the job.

        Returns:
            The future, or None if the farm has no future of this job.
        """
        with self._lock:
            _, future, parts = self._jobs.pop(name, (None, None, ()))
        self._stored_parts.release_parts(parts)
        return future

    def _store_failure(self, job: Job, future: "Future") -> None:
        """End a job with the error of its Dask future.

        If the future has no error, the connection to the farm's process has broken. In this case,
        end all jobs with an error.
        """
        from distributed.client import FutureCancelledError

        with contextlib.suppress(FutureCancelledError, OSError):
            if (error := future.exception()) is not None:
                job.set_outcome(self._make_exception(job, error))
        if not job.done():
            self._handle_lost_process()

    def _store_outcome(self, job: Job, message: JobOutcome) -> None:
        """Write the job's saved files to its folder, unpickle its result, and end the job.

        Another thread (`_call_listeners`) then passes the job to the listeners of `on_solution`. If
        writing or unpickling raises an exception, the job ends with this exception, and the
        listeners do not get the job.
        """
        job.host, job.took_s = self.state.host_of(message.node), message.took_s
        try:
            files = [
                (_path_in_job_folder(job.folder, os.fsdecode(name)), data)
                for name, data in message.files
            ]
            for path, data in files:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            data, *buffers = message.parts
            views = [memoryview(bytearray(part)) for part in buffers]
            result = pickling.loads(data, views, namespace=self._shell.user_ns)
        except BaseException as error:  # the user's `__setstate__` may raise anything
            job.set_outcome(error)
            return
        job.set_outcome(None, result)
        self._solved.put(job)

    def _call_listeners(self) -> None:
        """Call the listeners of `on_solution` with each job that returned, until the farm closes.

        This method runs in a thread of its own, because a listener may wait for further jobs. An
        exception of a listener is logged.
        """
        while (job := self._solved.get()) is not None:
            for listener in self._on_solution:
                try:
                    listener(job)
                except BaseException:  # even `sys.exit` must not end this thread
                    logging.getLogger("taas").exception("on_solution of job %s", job.name)
            del job  # it has the arguments and the result

    def _make_exception(self, job: Job, error: BaseException) -> JobFailed:
        """Return the exception for a job that failed; its message has host, traceback and log path.

        If the job failed because each node that ran it was lost, the message says so. Also record
        the host on which the job failed.

        Args:
            error: Exception of the job's Dask future.
        """
        from distributed.scheduler import KilledWorker

        ended = cleaned(error.outcome) if isinstance(error, JobEnded) else JobOutcome()
        if isinstance(error, JobEnded):
            job.host = self.state.host_of(ended.node)
            head = f"job {job.name} on host {job.host}: {error}".removesuffix(": ")
        elif isinstance(error, KilledWorker):
            head = f"job {job.name} ran on {LOST_NODES + 1} nodes, and each was lost"
        else:
            head = f"job {job.name} {error!r}"
        log = job.folder / "output.log"
        details = [*ended.traceback, *([f"full log: {log}"] if log.exists() else [])]
        return JobFailed(head, details, name=job.name, etype=ended.etype)

    def _on_message(self, pair: tuple[float, dict[str, Any]]) -> None:
        """Handle a message from a node or the farm's process. Runs in the Dask client's thread.

        - An outcome or a failure of a job: pass the message to the thread of `_end_jobs`. Release
          the Dask future of a job that returned, because Dask would run the job again if the node
          ended before that thread has handled the message.
        - Any other message about an unknown job: do nothing.
        - Any other message about a job: append the job's new output to `output.log` in the job's
          folder. Then apply the message to the state that the table shows.
        - A message about a node: apply the message to the state that the table shows. If the farm
          gives up starting nodes, also pass the message to the thread of `_end_jobs`.
        """
        message: FarmUpdate = msgspec.convert(pair[1], FarmUpdate)
        if isinstance(message, JobOutcome) or (
            isinstance(message, JobUpdate) and message.state == "erred"
        ):
            self._ended.put(message)
            if isinstance(message, JobOutcome) and (entry := self._jobs.get(message.job)):
                entry[1].release()
            return
        if isinstance(message, JobUpdate) and message.job not in self.state.jobs:
            return  # an unknown name must not become a folder
        if isinstance(message, JobUpdate) and message.lines:
            self._write_output(message)
        self.state.apply_message(cleaned(message))
        if isinstance(message, NodeUpdate) and message.state == "given up":
            # The thread of `_end_jobs` ends the jobs. This thread must not: ending jobs may wait
            # for this thread.
            self._ended.put(message)

    def _write_output(self, message: JobUpdate) -> None:
        """Append a job's new output to `output.log` in the job's folder.

        If the output cannot be written, for example because the disk is full, drop this output. The
        first time, log a warning.
        """
        path = self.folder / "jobs" / message.job / "output.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as log:
                log.write(message.lines)
        except OSError as error:
            if not self._lacks_output:
                logging.getLogger("taas").warning(
                    "%s cannot write to %s: %s; output of jobs will be missing in such files",
                    self.name,
                    path,
                    reason_of(error),
                )
            self._lacks_output = True


_unknown_places = itertools.count(1)


def _place_of(data: memoryview) -> tuple[int, int]:
    """Return the address and the size of memory in bytes.

    If numpy is not installed, the address is unknown. Then return a pair that no other call
    returns.
    """
    try:
        import numpy
    except ImportError:
        return -next(_unknown_places), data.nbytes
    return numpy.frombuffer(data, "u1").ctypes.data, data.nbytes


class _StoredParts:
    """Registry of the parts of arguments and payloads that the farm's process stores for jobs.

    The farm's process stores equal parts of several jobs once. When no job needs a part any more,
    the part is removed. Any thread may call the methods.
    """

    def __init__(self, client: "Client") -> None:
        self._client, self._lock = client, threading.Lock()
        self._numbers = itertools.count()
        self._known: dict[str, str] = {}
        self._users: Counter[str] = Counter()

    def store_part(
        self, part: Any, marks: dict[tuple[int, int], str], is_shared: bool = False
    ) -> Part:
        """Store a part in the farm's process if it is shared or larger than `INLINE_BYTES`.

        An equal part that is stored already is used again. Each call adds 1 to the part's number of
        users, and `release_parts` subtracts 1. If an exception or an interrupt ends the transfer of
        a new part, the farm's process removes this part.

        Args:
            part: Bytes, or memory of an array or tensor.
            marks: Hash of each part that was passed before, by the address and the size of its
                memory. This method adds the hash of `part`. While the dict is in use, the caller
                must keep all these parts.
            is_shared: Whether several jobs use the part. A shared part is always stored.

        Returns:
            The value to send with the job: the name of the stored part, or the bytes of a part that
            was not stored.
        """
        from distributed.protocol import to_serialize

        data = memoryview(part).cast("B")
        if data.nbytes <= INLINE_BYTES and not is_shared:
            return bytes(data)
        place = _place_of(data)
        if place not in marks:
            marks[place] = hashlib.blake2b(data, digest_size=16).hexdigest()
        mark = marks[place]
        with self._lock:
            if mark not in self._known:
                # Use a new name each time, because the request to remove an earlier copy of the
                # same part may still be on its way.
                name = f"{mark}-{next(self._numbers)}"
                putting = self._call(PUT_PART, name=name, data=to_serialize(bytes(data)))
                try:
                    putting.result()
                except BaseException:  # such as an interrupt by the user
                    putting.add_done_callback(lambda _: self._call(DROP_PART, name=name))
                    raise
                self._known[mark] = name
            self._users[mark] += 1
            return self._known[mark]

    def release_parts(self, parts: Collection[Part]) -> None:
        """Release the parts of an ended job; remove stored parts that no other job needs.

        Only request the removal, and do not wait for it. Ignore parts that were not stored.
        """
        with self._lock:
            for name in parts:
                if isinstance(name, str):
                    mark = name.partition("-")[0]
                    self._users[mark] -= 1
                    if not self._users[mark]:
                        del self._users[mark], self._known[mark]
                        self._call(DROP_PART, name=name)

    def _call(self, op: str, **arguments: Any) -> Any:
        calling = getattr(self._client.scheduler, op)(**arguments)
        return asyncio.run_coroutine_threadsafe(calling, self._client.loop.asyncio_loop)


@dataclass(frozen=True)
class _PackedCall:
    """The function call of a job, together with a pickle of the arguments.

    Attributes:
        work: The call as the user made it, with the arguments as objects.
        parts: The same arguments, pickled: first the pickle, then the memory of each array and
            tensor in it.
        needs: Names of notebook variables that functions among the arguments use.
        modules: Names of modules that the arguments refer to.
    """

    work: FunctionWork
    parts: tuple[Any, ...]
    needs: tuple[str, ...]
    modules: tuple[str, ...]


def _pack_arguments(work: FunctionWork, namespace: dict[str, Any]) -> _PackedCall:
    """Pickle a call's arguments without copying the memory of arrays and tensors.

    Also collect the names of notebook variables and modules that the arguments use.

    Raises:
        CaptureError: An argument cannot be pickled.
    """
    pickler = pickling.ValuePickler(namespace, "jobs")
    for name, value in work.arguments():
        pickler.pickle_variable(name, value)
    pickled = pickler.pickled()
    parts = (pickled.data, *(buffer.raw() for buffer in pickled.buffers))
    modules = tuple(sorted(pickler.modules - {"__main__"}))
    return _PackedCall(work, parts, tuple(pickler.needs), modules)


def _path_in_job_folder(folder: Path, name: str) -> Path:
    """Return the path in a job's folder for the relative path `name` that a node sent.

    Raises:
        ProtocolError: `name` is invalid, for example because it contains "..".
    """
    if why := why_invalid(name):
        raise ProtocolError(f"a farm's node sent {name!r} for a job's folder: {why}")
    return folder / name


def farm(
    pool: str | Sequence[str] = "local",
    *,
    gpus: int = 0,
    cpus: int = 1,
    nodes: tuple[int, int] | int | None = None,
) -> Farm:
    """Start a farm of jobs on the hosts of one or several pools.

    This function returns when the farm's process has started. The start takes about a second. The
    notebook shows a table of the farm's nodes and jobs. Nodes start when jobs need them. Jobs can
    read the project store; their writes to the project store are discarded.

    Args:
        pool: Name of the pool, or names of several pools.
        gpus: Number of CUDA devices that each job has for itself.
        cpus: Number of processors of each job. A host runs several jobs at a time if it has enough
            processors and devices for them.
        nodes: Number of hosts: a fixed number, or a tuple with the smallest and the largest number.
            By default, the farm uses as many hosts as its jobs need, up to all hosts of the pools.

    Returns:
        The farm, with methods to submit jobs and to wait for their results.

    Raises:
        UsageError: `gpus`, `cpus` or `nodes` does not fit the hosts of the pools, an argument has a
            wrong type, a pool is not trusted, or there is no notebook.
        StoreError: The project store is not usable.
        PoolError: The farm's process did not start.
    """
    shell = get_ipython()
    if shell is None:
        raise UsageError("taas.farm needs a notebook: run it in a Jupyter kernel or in IPython")
    config = load_config(Path.cwd())
    names = [pool] if isinstance(pool, str) else pool
    if not isinstance(names, Sequence) or not isinstance(gpus, int) or not isinstance(cpus, int):
        raise UsageError(
            "taas.farm: pool needs the name of a pool, or a list of names; gpus and cpus need "
            f"integers; got pool={pool!r}, gpus={gpus!r}, cpus={cpus!r}"
        )
    most = sum(config.pool(name).max_hosts for name in names)
    least, most = _node_limits(nodes, most)
    for name in names:
        if not config.pool(name).trusted:
            raise UsageError(
                f"pool {name!r} is not trusted, but a farm unpickles the results of its hosts: set "
                "trusted = true for the pool in taas.toml, or use %%taas"
            )
        offers = pools.named(name, config).capacity()
        if gpus < 0 or gpus > offers.gpus:
            raise UsageError(f"gpus must be 0 to {offers.gpus} in pool {name!r}; got {gpus}")
        if not 1 <= cpus <= offers.cores:
            raise UsageError(f"cpus must be 1 to {offers.cores} in pool {name!r}; got {cpus}")
    rule = store.choose(
        os.getcwd(), config.store.path or "", "discard", (), config.store.limit_bytes
    )
    settings = FarmSettings(
        name=f"farm-{new_run_id()}",
        pools=tuple(names),
        least=least,
        most=most,
        gpus=gpus,
        cpus=cpus,
        store=rule,
        origin=launch.origin(shell, rule.path),
    )
    return Farm(settings, config, shell)


def _node_limits(nodes: tuple[int, int] | int | None, hosts: int) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes for the argument `nodes` of `farm`.

    If `nodes` is a number, both limits are this number. If `nodes` is None, the limits are 0 and
    `hosts`.

    Args:
        hosts: Number of all hosts of the farm's pools.

    Raises:
        UsageError: `nodes` has a wrong type, or the limits break the rule 0 <= smallest <= largest
            <= `hosts`, or the largest number is 0.
    """
    match nodes:
        case None:
            least, most = 0, hosts
        case int():
            least = most = nodes
        case (int(least), int(most)):
            pass
        case _:
            least = most = -1
    if not 0 <= least <= most or not 1 <= most <= hosts:
        raise UsageError(
            f"nodes must be (least, most) with 0 <= least <= most <= {hosts}, the number of "
            f"hosts; got {nodes!r}"
        )
    return least, most


def _remove_ended(folder: Path, keep: int) -> None:
    """Remove old folders of ended farms from `folder`.

    Keep the newest `keep` folders of farms, and the folders of all farms that have not ended. A
    farm has ended if no process holds the lock on the farm's log.
    """
    farms = sorted(folder.glob("farm-*"))  # oldest first, because the names contain the time
    for old in farms[: max(0, len(farms) - keep)]:
        # A farm's process locks the log while it lives. Another kernel may remove the same folder.
        with contextlib.suppress(FileNotFoundError), (old / LOG).open("ab") as log:
            if lock(log.fileno()):
                shutil.rmtree(old, ignore_errors=True)


def _start_process(
    settings: FarmSettings, folder: Path
) -> tuple[subprocess.Popen[bytes], FarmAddress]:
    """Start the farm's process, send it the settings, and wait until it reports its address.

    The process inherits a shared lock on its log, so that no kernel removes the folder while the
    process runs. If the start fails or is interrupted, kill the process.

    Args:
        folder: The farm's folder, in which the process writes its log.

    Returns:
        The process, and the address and key for connecting to it.

    Raises:
        PoolError: The process ended, or did nothing for `START_TIMEOUT_S`. The message has the last
            lines of its log.
    """
    path = folder / LOG
    with path.open("ab") as log:
        lock(log.fileno(), shared=True, wait=True)  # held while the process has its log open
        process = subprocess.Popen(
            spawn_command("taas_magic.farms.process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(messages.to_json(settings) + b"\n")
        process.stdin.flush()
        has_answered = wait_for_start(process, process.stdout.fileno(), START_TIMEOUT_S)
        line = process.stdout.readline() if has_answered else b""
    except BaseException:  # such as an interrupt by the user
        process.kill()
        raise
    finally:
        process.stdout.close()
    if not line:
        process.kill()
        process.communicate()
        why = "did not start" if has_answered else f"did nothing for {START_TIMEOUT_S:g} s"
        raise PoolError(f"the farm's process {why}:\n{log_tail(path)}")
    return process, messages.from_json(line, FarmAddress)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Make the farm's process release the hosts and end. If it runs after `END_S`, kill it."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the farm's process has ended
        # The line makes the process end. Closing the pipe may not be enough, because a fork of the
        # kernel may have the pipe open.
        process.stdin.write(b"\n")
        process.stdin.close()
    wait_or_kill(process, END_S)


def _connect(address: FarmAddress) -> "Client":
    import_in_thread("distributed")
    from distributed import Client, Security

    secure = Security(**address.security)
    return Client(address.address, security=secure, set_as_default=False)
