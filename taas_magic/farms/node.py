"""The node of a farm: a process on one host that contains a Dask worker and starts job processes.

To start a node, the farm starts a run with one rank. The rank (`run_node`) starts the node as a
child process and waits until the node ends. So when the pool ends the run, the node ends, too.

The node starts a forkserver before it imports Dask, and joins the farm when the forkserver has
imported torch and IPython. The imports have no time limit. But if the forkserver uses no processor
time and reads nothing for `start_timeout_s`, the start of the node fails.
"""

import asyncio
import contextlib
import logging
import os
import pickle
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import psutil
from msgspec import structs

from taas_magic import messages, probe
from taas_magic.errors import PoolError, signal_name
from taas_magic.farms.messages import (
    CANCELLED,
    INLINE_BYTES,
    TOPIC,
    JobAssignment,
    JobCall,
    JobEnded,
    JobOutcome,
    JobProcessState,
    JobUpdate,
    NodeProcessState,
    NodeSettings,
    NodeUpdate,
    SharedBytes,
)
from taas_magic.host import forkserver
from taas_magic.host.activity import wait_for_start
from taas_magic.host.agent import use_temporary_folder
from taas_magic.host.spec import REACH, TORCHRUN_NAMES
from taas_magic.host.system import (
    CALM_DASK,
    LOOPBACK,
    die_with_parent,
    spawn_command,
)
from taas_magic.leases import NODE_JOIN_S

if TYPE_CHECKING:
    from distributed import Security

GRACE_S = 5.0
"""Seconds from SIGINT to SIGKILL for the process of a cancelled job that does not end."""

DASK_SETTINGS = {
    **CALM_DASK,
    "distributed.admin.low-level-log-length": 0,
    "distributed.comm.offload": False,  # all large data are bytes, which need no serialization
}

LINES_BYTES = 256 << 10
"""Maximum bytes of a job's output that the node holds in memory until it sends the output.

If a job prints more between two sends, the node drops the rest, and sends the number of dropped
bytes.
"""

IMPORT_REPORT_S = 2.0
"""Seconds between two reports of a starting node about the module that is being imported."""

_END_S = 3.0
"""Seconds that a node waits for a job process to end by itself. Then the node kills the process."""

_FLUSH_S = 0.2
"""Seconds between two times at which a node sends a running job's buffered output."""


def run_node(settings: NodeSettings) -> None:
    """Start a node's process, and wait until it ends. The only rank of a node's run calls this.

    The process gets this rank's environment without torchrun's variables, and with a PYTHONPATH
    that contains the folder of taas-magic. Write the settings to the standard input of the process.
    Wait until the node has joined the farm, and then until the node ends.

    Usually, the host's agent ends the run by SIGINT to this rank. This function then kills the
    node's process and returns. After an error, this function kills the node's process, too.

    Raises:
        RuntimeError: The node's process ended by itself with an exit code other than 0, or did
            nothing for `settings.start_timeout_s` at its start.
    """
    from taas_magic.host import rank  # imports torch, which the node's own process does later

    scheduler, here = os.environ.pop(REACH), os.getcwd()
    environ = {name: value for name, value in os.environ.items() if name not in TORCHRUN_NAMES}
    environ["OMP_NUM_THREADS"] = str(settings.cpus)
    store = structs.replace(settings.store, path=here)
    jobs = JobProcessState(dict(environ), here, sys.path, settings.cpus, store)
    process_state = NodeProcessState(settings, scheduler, jobs, str(rank.attempt_folder))
    # This is the PYTHONPATH by which the host's agent found this package and its dependencies:
    # psutil reads the environment at the start of the process. os.environ may have changed since.
    first = psutil.Process().environ().get("PYTHONPATH", "")
    ours = str(Path(__file__).parent.parent.parent)
    places = dict.fromkeys([*filter(None, first.split(os.pathsep)), ours])
    environ["PYTHONPATH"] = os.pathsep.join(places)
    del environ["OMP_NUM_THREADS"]
    reader, writer = os.pipe()
    command = [*spawn_command(__name__), str(os.getpid()), str(writer)]
    node = subprocess.Popen(command, stdin=subprocess.PIPE, cwd="/", env=environ, pass_fds=[writer])
    os.close(writer)
    assert node.stdin is not None
    try:
        node.stdin.write(messages.to_json(process_state) + b"\n")
        node.stdin.flush()
        if not wait_for_start(node, reader, settings.start_timeout_s):
            limit = f"start_timeout_s = {settings.start_timeout_s:g}"
            raise RuntimeError(f"the farm's node did not start: it did nothing for {limit} s")
        code = node.wait()
    except KeyboardInterrupt:  # the agent ends a run by SIGINT
        code = 0
    finally:
        node.kill()
        node.wait()
        os.close(reader)
    if code:
        raise RuntimeError(f"the farm's node ended with exit code {code}; its log says why")


def main() -> int:
    """Run a node until its parent (a rank) or the farm ends; return the exit code.

    Create a temporary folder, start the forkserver, and run the Dask worker. At the end, remove the
    temporary folder.

    The program has two arguments: the pid of its parent, and a file descriptor. The node closes the
    descriptor when it has joined the farm. Standard input has one line: a `NodeProcessState` as
    JSON.
    """
    die_with_parent(int(sys.argv[1]))
    starting = int(sys.argv[2])
    os.set_inheritable(starting, False)
    process_state = messages.from_json(sys.stdin.buffer.readline(), NodeProcessState)
    logging.getLogger("distributed").setLevel(logging.ERROR)
    folder = Path(tempfile.mkdtemp(prefix="node-", dir=process_state.folder))
    try:
        use_temporary_folder(str(folder))
        forkserver.start_forkserver([])
        asyncio.run(_run_worker(process_state, folder, starting))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


async def _run_worker(process_state: NodeProcessState, folder: Path, starting: int) -> None:
    """Join the farm when the forkserver is ready, and run jobs until the farm ends the node.

    While the forkserver imports modules, report their names to the kernel. Then join the farm's
    Dask scheduler as a worker. When the farm has ended the node, end the job processes of all
    slots.

    Args:
        starting: The descriptor to close when the node has joined the farm.
    """
    import dask

    dask.config.set(DASK_SETTINGS)  # first: Dask reads some settings when it is imported
    from distributed import Security

    from taas_magic.farms.worker import NodeWorker
    from taas_magic.host.agent_worker import use_steady_clock
    from taas_magic.store import guard

    use_steady_clock()
    protection = guard.strongest_protection().value
    settings, security = process_state.settings, Security(**process_state.settings.security)
    warming = asyncio.ensure_future(asyncio.to_thread(forkserver.warm_up, settings.start_timeout_s))
    await _report_imports(warming, process_state, security)
    await warming
    slots = Slots(process_state, folder, protection)
    threads = ThreadPoolExecutor(settings.slots + 2)  # these start and end processes
    asyncio.get_running_loop().set_default_executor(threads)
    node = NodeWorker(
        process_state.scheduler,
        slots=slots,
        nthreads=settings.slots,
        memory_limit=0,
        name=settings.name,
        host=LOOPBACK,
        contact_address=settings.unique_address,
        security=security,
        local_directory=str(folder),
        death_timeout=NODE_JOIN_S,
    )
    async with node:
        os.close(starting)
        await node.finished()
    slots.close()


async def _report_imports(
    warming: "asyncio.Future[list[str]]", process_state: NodeProcessState, security: "Security"
) -> None:
    """Report to the kernel, every `IMPORT_REPORT_S`, which module the forkserver is importing.

    Args:
        warming: Future that is done when the forkserver has imported all modules. Then this
            function returns.
    """
    from distributed.core import rpc

    options = security.get_connection_args("worker")
    async with rpc(process_state.scheduler, connection_args=options) as scheduler:
        while not (await asyncio.wait({warming}, timeout=IMPORT_REPORT_S))[0]:
            name, for_s = forkserver.importing()
            update = NodeUpdate(
                process_state.settings.name, "starting", f"imports {name}, {for_s:.0f} s"
            )
            await scheduler.log_event(topic=TOPIC, msg=msgspec.to_builtins(update))


class Slots:
    """The slots of a node. Each slot runs one job at a time in a process of its own.

    Each slot has its own CUDA devices. Call the methods only in the thread of the node's event
    loop. Only `close` blocks this thread.

    Args:
        folder: The node's temporary folder.
        protection: Mechanism that keeps the jobs' writes out of the project store.
    """

    def __init__(self, process_state: NodeProcessState, folder: Path, protection: str) -> None:
        self._settings, self._jobs = process_state.settings, folder / "jobs"
        self._jobs.mkdir()
        self._free: list[Slot] = []
        self._running: dict[str, Slot] = {}
        named, gpus = os.environ.get("CUDA_VISIBLE_DEVICES"), self._settings.gpus
        devices = named.split(",") if named else [*map(str, range(probe.count_gpus()))]
        for number in reversed(range(self._settings.slots)):
            mine = ",".join(devices[number * gpus : (number + 1) * gpus])
            job = structs.replace(
                process_state.jobs,
                environ={**process_state.jobs.environ, "CUDA_VISIBLE_DEVICES": mine},
                protection=protection,
                files=str(self._jobs),
                scratch=str(folder / f"scratch-{number}"),
            )
            self._free.append(Slot(job))

    def cancel(self, name: str) -> None:
        """Cancel the job `name`, if this node runs it.

        Send SIGINT to the job's process, and SIGKILL if the job still runs `GRACE_S` later.
        """
        if (slot := self._running.get(name)) is not None:
            slot.cancel()

    async def run(
        self,
        call: JobCall,
        parts: Awaitable[list[bytes | SharedBytes]],
        report: Callable[[JobUpdate], None],
    ) -> JobOutcome:
        """Run a job in a free slot, and return its outcome with the files that it saved.

        A slot is always free, because Dask never runs more jobs at a time than there are slots.
        After the job:

        - If the slot's process must not run a further job, end this process. Free the slot.
        - If the job has imported the forkserver's deferred modules, make the forkserver import
          these modules for later jobs.
        - Read the files that the job saved into the outcome, and remove the files from this host.

        Args:
            parts: Awaitable whose result is a list: the payload, then the job's pickled arguments
                and the buffers of this pickle.
            report: Called with each piece of the job's output. Also called once with the state
                "running" if the job does not end immediately.

        Raises:
            JobEnded: The job raised an exception, was cancelled, or its process died. The files
                that the job saved are lost.
        """
        name, node = call.name, self._settings.name
        files = self._jobs / name
        slot = self._running[name] = self._free.pop()
        try:
            loaded_parts = await parts
            first, *others = [it.path if isinstance(it, SharedBytes) else it for it in loaded_parts]
            outcome = await slot.run(
                JobAssignment(call, str(files), first, others),
                lambda state, text: report(JobUpdate(name, node, state, text)),
            )
        finally:
            del self._running[name]  # a late cancel must not reach the slot's next job
            await slot.prepare_next()
            self._free.append(slot)
        if outcome.imported_deferred:
            forkserver.start_importing_deferred()  # later jobs will probably need the modules, too
        outcome.job, outcome.node = name, node
        if outcome.etype:
            await asyncio.to_thread(shutil.rmtree, files, ignore_errors=True)
            raise JobEnded(outcome)
        if files.exists():
            outcome.files = await asyncio.to_thread(_collect_files, files)
        return outcome

    def close(self) -> None:
        """End the job processes of all slots. Call when no job runs. Blocks."""
        for slot in self._free:
            slot.close()


def _collect_files(folder: Path) -> list[tuple[bytes, bytes]]:
    """Read the files that a job saved, and remove their folder.

    Returns:
        The path of each file, relative to the folder, and its content.
    """
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [(os.fsencode(path.relative_to(folder)), path.read_bytes()) for path in found]
    shutil.rmtree(folder)
    return files


ReportOutput = Callable[[str, str], None]
"""Callback for news about a job.

The first argument is the job's new state, or "". The second argument is new output, or "".
"""


class Slot:
    """A slot of a node: runs one job at a time, in a process of its own.

    A job gets a new process, or a process that earlier jobs have left unchanged.

    Args:
        process_state: Settings of the slot's job processes.
    """

    def __init__(self, process_state: JobProcessState) -> None:
        self._process_state = process_state
        self._scratch = ""
        self._process: Any = None
        self._control: Any = None
        self._output: Any = None
        self._events: Any = None
        self._is_cancelled = self._is_reusable = False
        self._kill_timer: asyncio.TimerHandle | None = None
        self._settings_hash = ""

    async def run(self, assignment: JobAssignment, report: ReportOutput) -> JobOutcome:
        """Run a job in this slot, if necessary in a new process; return the job's outcome.

        The process of the previous job runs this job if four conditions hold:

        - The previous job left the process unchanged.
        - Both jobs have the same `JobCall.settings_hash`.
        - This job is not `fresh`.
        - The process has not ended, and has sent nothing since the previous job.

        During the job, pass its output to `report`. If the process ends during the job, the outcome
        says how the process ended, or that the job was cancelled. If the job is cancelled while the
        process starts, do not send the job to the process.
        """
        is_other = assignment.call.fresh or assignment.call.settings_hash != self._settings_hash
        # An idle process must send nothing. If it has sent something or has ended, replace it.
        if is_other or self._process is None or self._events.select(0):
            await asyncio.to_thread(self._replace_process)
        self._settings_hash = assignment.call.settings_hash
        lines = _OutputBuffer(report)
        try:
            if self._is_cancelled:  # while the job's process was starting
                raise EOFError
            if sum(map(len, (assignment.payload, *assignment.arguments))) > INLINE_BYTES:
                await asyncio.to_thread(self._control.send_bytes, pickle.dumps(assignment))
            else:
                self._control.send_bytes(pickle.dumps(assignment))
            outcome = await self._wait(lines, report)
            for _ in range(outcome.n_parts_following):
                outcome.parts.append(await asyncio.to_thread(self._control.recv_bytes))
        except (EOFError, OSError):
            outcome = await asyncio.to_thread(self._outcome_of_ended_process)
        lines.add(self._read_output())
        lines.flush(whole=False)
        self._is_reusable = outcome.process_is_reusable
        return outcome

    async def prepare_next(self) -> None:
        """End the slot's process if it must not run a further job. Call this after each job.

        Also stop the timer that would kill the process of a cancelled job.
        """
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        if self._is_cancelled or not self._is_reusable:
            await asyncio.to_thread(self.close)
        self._is_cancelled = self._is_reusable = False

    def cancel(self) -> None:
        """Cancel the slot's job.

        Send SIGINT to the job's process, and SIGKILL if the job still runs `GRACE_S` later. If the
        process is still starting, the job will not run. A second call for the same job does
        nothing.
        """
        if not self._is_cancelled:
            self._is_cancelled = True
            if (process := self._process) is not None:
                _signal_group(process.pid, 2)
                loop = asyncio.get_running_loop()
                self._kill_timer = loop.call_later(GRACE_S, _signal_group, process.pid, 9)

    def close(self) -> None:
        """End the slot's process and its children, and remove its scratch folder. Blocks.

        Close the pipe to the process, so that the process ends. If it does not end within `_END_S`,
        kill it. Then kill all processes that remain in its POSIX session. If the slot has no
        process, do nothing.
        """
        process, self._process = self._process, None
        if process is None:
            return
        self._events.close()
        self._control.close()
        if not connection.wait([process.sentinel], _END_S):
            _signal_group(process.pid, 9)
            connection.wait([process.sentinel], _END_S)
        _kill_session(process.pid)
        self._output.close()
        forkserver.close_process(process)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _replace_process(self) -> None:
        """End the slot's process, and start a new process with a new scratch folder. Blocks.

        If the forkserver has ended, exit this node's process, because no job process can be
        started.
        """
        self.close()
        self._scratch = f"{self._process_state.scratch}-{time.monotonic_ns()}"
        process_state = structs.replace(self._process_state, scratch=self._scratch)
        self._control, theirs = connection.Pipe()
        self._output, written = get_context("forkserver").Pipe(duplex=False)
        try:
            process = forkserver.start_process(
                "taas_magic.farms.job.job_main", process_state, theirs, written
            )
        except PoolError:
            _exit_node()
        theirs.close()
        written.close()
        os.set_blocking(self._output.fileno(), False)
        self._events = selectors.EpollSelector()
        for source in (self._control, self._output, process.sentinel):
            self._events.register(source, selectors.EVENT_READ)
        self._process = process

    async def _wait(self, lines: "_OutputBuffer", report: ReportOutput) -> JobOutcome:
        """Pass the job's state and output to `report` until the job ends; return its outcome.

        Report the state "running" once, unless the job ends at once. If the result is large, its
        parts still follow in the pipe, and the caller reads them.

        Args:
            lines: Buffer that passes the output to `report`.

        Raises:
            EOFError: The job's process has ended without an outcome.
        """
        has_reported = False
        while True:
            ready = await self._wait_for_output()
            if self._output in ready:
                lines.add(printed := self._read_output())
                if not printed:  # end of file: the process is about to end
                    self._events.unregister(self._output)
            if self._control in ready:
                outcome: JobOutcome = pickle.loads(self._control.recv_bytes())
                return outcome
            if self._process.sentinel in ready:  # its children may keep the pipes open: no EOF
                raise EOFError
            if not has_reported:
                report("running", "")
                has_reported = True
            lines.flush()

    async def _wait_for_output(self) -> set[Any]:
        """Wait until the job process has sent something or has ended, at most `_FLUSH_S`.

        Returns:
            The pipes of the process that have data, and its sentinel if it has ended; an empty set
            if nothing happened in `_FLUSH_S`.
        """
        loop, may_read = asyncio.get_running_loop(), asyncio.Event()
        timer = loop.call_later(_FLUSH_S, may_read.set)
        loop.add_reader(self._events, may_read.set)
        try:
            await may_read.wait()
        finally:
            loop.remove_reader(self._events)
            timer.cancel()
        return {key.fileobj for key, _ in self._events.select(0)}

    def _read_output(self) -> bytes:
        try:
            return os.read(self._output.fileno(), 1 << 20)
        except BlockingIOError:
            return b""

    def _outcome_of_ended_process(self) -> JobOutcome:
        """Return the outcome of a job whose process ended without sending an outcome.

        The outcome says that the job was cancelled, or which exit code or signal its process had.
        If the process died because the forkserver has ended, exit this node's process. Blocks.
        """
        if self._is_cancelled:
            return JobOutcome(etype=CANCELLED)
        connection.wait([self._process.sentinel], _END_S)
        code = forkserver.exitcode(self._process) or 0
        if forkserver.caused_ends([code]):
            _exit_node()
        how = f"was killed by {signal_name(code)}" if code < 0 else f"exited with code {code}"
        return JobOutcome(etype="JobDied", message=f"its process {self._process.pid} {how}")


def _exit_node() -> NoReturn:
    """Write the reason to stderr, and exit this node's process, because its forkserver has ended.

    Other nodes then run the jobs of this node again.
    """
    sys.stderr.write(f"{forkserver.why_ended()}\n")
    sys.stderr.flush()
    os._exit(1)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended
        os.killpg(group, number)


def _kill_session(session: int) -> None:
    """Kill all processes of a POSIX session: also orphans, and processes in other process groups.

    Repeat the search until it finds no new process, because a process may have forked meanwhile.
    """
    killed: set[int] = set()
    while found := {pid for pid in psutil.pids() if _session_of(pid) == session} - killed:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, 9)
        killed |= found


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


class _OutputBuffer:
    """Buffer that collects a job's output and passes it to `report` every `_FLUSH_S`.

    The buffer holds at most `LINES_BYTES`.
    """

    def __init__(self, report: ReportOutput) -> None:
        self._report, self._waiting = report, b""
        self._left_out, self._flushed_at = 0, time.monotonic()

    def add(self, data: bytes) -> None:
        """Add output of the job. Drop the bytes that exceed `LINES_BYTES`, and count them.

        If the last flush was more than `_FLUSH_S` ago, flush the buffer.
        """
        room = LINES_BYTES - len(self._waiting)
        self._left_out += max(0, len(data) - room)
        self._waiting += data[:room]
        if time.monotonic() - self._flushed_at >= _FLUSH_S:
            self.flush()

    def flush(self, whole: bool = True) -> None:
        """Pass the buffered output to `report`, with a line about dropped bytes if there are any.

        Args:
            whole: Whether to pass only whole lines, and keep an incomplete last line in the buffer.
                If the buffer is full, the incomplete line is passed, too.
        """
        self._flushed_at = time.monotonic()
        end = 1 + max(self._waiting.rfind(b"\n"), self._waiting.rfind(b"\r"))
        if not whole or len(self._waiting) >= LINES_BYTES:
            end = len(self._waiting)
        text, self._waiting = self._waiting[:end].decode("utf-8", "replace"), self._waiting[end:]
        if self._left_out:
            text += f"\n… {self._left_out:,} bytes left out …\n"
            self._left_out = 0
        if text:
            self._report("", text)
