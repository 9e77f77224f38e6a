"""The host's forkserver: multiprocessing's forkserver with torch and IPython already imported.

Two processes import this module:

- The agent, which must import neither torch nor IPython. The agent starts the forkserver, and
  requests new processes from the forkserver. On a farm, the node does the same.
- The forkserver, which runs `_preload` when it imports this module. Later, the forkserver imports
  the remaining modules (`DEFERRED_MODULES`). During this import, a fork of the forkserver
  (`_StandIn`) starts processes instead.
"""

import gc
import importlib
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, reduction, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from taas_magic.errors import PoolError
from taas_magic.host.activity import IdleTimer
from taas_magic.host.system import die_with_parent, status_of
from taas_magic.leases import START_TIMEOUT_S, STOPPED_S

_RANK = "taas_magic.host.rank"
MODULES = ("torch", "taas_magic.api", _RANK, "taas_magic.host.fetcher")
"""Modules that the forkserver imports first, before the modules that the pool's settings add."""

DEFERRED_MODULES = ("torch._dynamo",)
"""Modules that a forkserver does not import at its start, because this import may take a minute.

A host's forkserver imports these modules when the host is idle. On a farm, a node's forkserver
imports these modules when a job has imported them in its own process, because later jobs probably
need the same modules.
"""

_PRELOAD = "TAAS_PRELOAD"
"""Environment variable with the modules that the forkserver imports in addition to `MODULES`.

These modules are from the pool's settings, separated by commas.
"""

_AGENT_PID = "TAAS_AGENT_PID"
"""Environment variable with the agent's pid. When the agent ends, the forkserver ends, too."""

_IMPORTS = "TAAS_IMPORTS"
"""Environment variable with the path of the imports file.

While the forkserver imports a module, this file contains the module's name.
"""

_CLOSE_WAIT_S = 1.0
"""Maximum seconds that `close_process` waits until the forkserver reports the end of a process."""

_LOST_EXIT_CODE = 255
"""Exit code that multiprocessing reports if the forkserver ended before it sent the real exit code.
"""

_END_VISIBLE_S = 1.0
"""Maximum seconds that `caused_ends` waits until psutil shows that a forkserver has ended."""

_WATCH_S = 0.5
_STOPPED_CHECK_S = 0.05
_IMPORTS_CHECK_S = 0.1

_context = multiprocessing.get_context("forkserver")
# Process.start() reads the exit codes of all children, including children that other threads
# started. If two threads read the exit code of the same child, only one thread gets the code. So a
# thread must hold this lock while it starts a process or reads an exit code.
_lock = threading.RLock()
_server: psutil.Process | None = None
_stand_in: "_StandIn | None" = None
_stand_ins: list["_StandIn"] = []
"""All `_StandIn` objects so far, including earlier stand-ins that may still have children."""

_has_deferred = _is_over = False
_importing = threading.Lock()
_starting: IdleTimer | None = None
"""Idle timer of the forkserver or stand-in that is starting a process; None at other times."""

_start_timeout_s = START_TIMEOUT_S
_imports_file = Path()
_imports_seen = "", 0.0
_why = "this host's forkserver has ended"
_own_pid: int | None = None
"""Pid of the forkserver, in the forkserver itself and its forks; None in the agent.

Stand-ins are an exception: in a stand-in and its forks, this is the pid of the stand-in.
"""

_failure = ""
"""In the forkserver and its forks: the error that ended the imports, as text; "" if there was none.
"""

_problems: list[str] = []
"""In the forkserver and its forks: messages about modules of the pool's settings that could not be
imported."""


def start_forkserver(modules: Sequence[str]) -> None:
    """Start the forkserver, without waiting for its imports. `warm_up` waits for the imports.

    The steps are:

    1. Create the imports file. The forkserver will write to this file the name of the module that
       the forkserver is importing.
    2. Set environment variables for the forkserver, such as the list of modules and the path of the
       imports file.
    3. Start multiprocessing's resource tracker and the forkserver.
    4. Store the forkserver's process in `_server`.

    Call this function in the main thread. When the thread that started the forkserver ends, the
    system kills the forkserver (prctl(2)).

    Args:
        modules: Modules to import in addition to `MODULES`.
    """
    global _server, _imports_file
    _imports_file = Path(tempfile.gettempdir(), f"taas-imports-{os.getpid()}")
    _write_import_name(_imports_file, MODULES[0])
    os.environ.update({_PRELOAD: ",".join(modules), _AGENT_PID: str(os.getpid())})
    os.environ[_IMPORTS] = str(_imports_file)
    # No import may create a CUDA context, because a fork cannot use an inherited context. With this
    # variable, torch asks NVML instead of CUDA whether there is a GPU.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    multiprocessing.set_forkserver_preload([__name__])
    resource_tracker.ensure_running()
    before = psutil.Process().children()
    forkserver.ensure_running()
    [_server] = [child for child in psutil.Process().children() if child not in before]


def importing() -> tuple[str, float]:
    """Return the name of the module that the forkserver is importing, and for how many seconds.

    The seconds count from the first call of this function that returned this name. If the
    forkserver is importing nothing, the result is ("", 0).
    """
    global _imports_seen
    try:
        name = _imports_file.read_text()
    except OSError:  # the host's folder is being removed
        name = ""
    if name != _imports_seen[0]:
        _imports_seen = name, time.monotonic()
    return name, time.monotonic() - _imports_seen[1] if name else 0.0


def _write_import_name(file: Path, name: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(name)
    new.replace(file)


def _watch() -> None:
    """Watch the forkserver and its stand-ins; kill all of them if one is suspended or stuck.

    Runs in a thread of the agent. Suspended means stopped by SIGSTOP for `STOPPED_S` seconds. Stuck
    means idle for `_start_timeout_s` seconds while starting a process. Without the kill, the
    agent's threads that start processes would wait forever. After the kill, these threads get an
    error, and the pool replaces the host.

    Also ends each stand-in that is not needed any more. Returns when the forkserver has ended, or
    when a stand-in has failed.
    """
    stopped_at: float | None = None
    while is_alive():
        now = time.monotonic()
        if stopped := [it for it in _servers() if status_of(it) == psutil.STATUS_STOPPED]:
            stopped_at = stopped_at or now
            if now - stopped_at >= STOPPED_S:
                _kill_all(stopped[0], f"was stopped (SIGSTOP) for {STOPPED_S:.0f} s")
        else:
            stopped_at = None
            if (timer := _starting) is not None and timer.idle_s() >= _start_timeout_s:
                name = importing()[0]
                what = f"imported {name}" if name else "was starting a process"
                limit = f"for start_timeout_s = {_start_timeout_s:g}"
                _kill_all(
                    _servers()[0],
                    f"used no processor time and read nothing {limit} while it {what}",
                )
        for stand_in in list(_stand_ins):
            stand_in.end_if_over()
        time.sleep(_WATCH_S)


def _servers() -> list[psutil.Process]:
    """Return the forkserver and its stand-ins, which are the parents of all ranks and fetchers."""
    servers = [_server] if _server is not None else []
    return servers + [it.process for it in list(_stand_ins)]


def _kill_all(server: psutil.Process, what: str) -> None:
    """Kill the forkserver and its stand-ins because one of these processes failed.

    Also stores the reason for `why_ended`.

    Args:
        server: The process that failed.
        what: What the process did, as text for the user, such as "was stopped (SIGSTOP) for 5 s".
    """
    global _why, _is_over
    _is_over = True
    _why = f"this host's forkserver (process {server.pid}) {what}, and was ended"
    for process in _servers():
        with suppress(psutil.NoSuchProcess):
            process.kill()


def warm_up(start_timeout_s: float = START_TIMEOUT_S) -> list[str]:
    """Block until the forkserver has imported `MODULES` and the modules of the pool's settings.

    First starts the thread that watches the forkserver (`_watch`). Then starts a short-lived
    process. This process can start only after the imports, and reports the errors of the imports.

    Args:
        start_timeout_s: Seconds without any work after which the forkserver counts as stuck, now
            and at each later start of a process.

    Returns:
        One message for each module of the pool's settings that could not be imported.

    Raises:
        PoolError: The forkserver has ended, or could not import a module of `MODULES`.
    """
    global _start_timeout_s
    _start_timeout_s = start_timeout_s
    threading.Thread(target=_watch, name="taas-forkserver", daemon=True).start()
    try:
        ours, theirs = multiprocessing.Pipe()
        with ours:
            process = start_process(f"{__name__}.report_imports", theirs)
            theirs.close()
            reported: tuple[str, list[str]] = ours.recv()
        process.join()
    except (EOFError, OSError, PoolError) as error:
        text = "the forkserver ended while it imported torch and what ranks need"
        raise PoolError(_why if _is_over else text) from error
    failure, problems = reported
    if failure:
        raise PoolError(failure)
    return problems


class _StandIn:
    """A fork of the forkserver that starts processes during the import of `DEFERRED_MODULES`.

    After the import, the stand-in starts no more processes, and ends when all its children have
    ended.

    Attributes:
        children: Processes that the stand-in has started and that may still run.
    """

    def __init__(self) -> None:
        self.children: list[Any] = []
        self._address = os.path.join(util.get_temp_dir(), "stand-in")
        with suppress(FileNotFoundError):
            os.unlink(self._address)  # an earlier import may have failed
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            os.chmod(self._address, 0o600)
            listener.listen()
            # The stand-in's server ends when all write ends of this pipe are closed. Each child of
            # the stand-in holds a write end.
            read_end, self._write_end = multiprocessing.Pipe(duplex=False)
            with read_end:
                started = start_process(f"{__name__}.stand_in", listener, read_end)
        self.process = psutil.Process(started.pid)
        self._started = started

    def has_failed(self) -> bool:
        """Return whether the stand-in has failed.

        A stand-in has failed if it ended before the import was over, or later with an exit code
        other than 0. All children of a failed stand-in have also ended, because the system kills a
        child when its parent ends.
        """
        if self is _stand_in:  # the forkserver is importing and cannot report the exit code
            return status_of(self.process) == ""
        return _known_exitcode(self._started) not in (None, 0)

    def fork_process(self, fds: Sequence[int]) -> tuple[int, int]:
        """Make this stand-in fork a process; return descriptors of two pipes to the new process.

        During the import of `DEFERRED_MODULES`, multiprocessing calls this method instead of its
        own function `forkserver.connect_to_new_process`.

        Args:
            fds: Descriptors that the new process receives.

        Returns:
            The descriptor from which multiprocessing reads the process's pid and exit code, and the
            descriptor to which it writes the pickled `Process` object.
        """
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self._address)
            from_child, child_writes = os.pipe()
            child_reads, to_child = os.pipe()
            tracker = resource_tracker.getfd()
            assert tracker is not None
            theirs = child_reads, child_writes, self._write_end.fileno(), tracker
            try:
                reduction.sendfds(client, [*theirs, *fds])
            except BaseException:
                os.close(from_child)
                os.close(to_child)
                raise
            finally:
                os.close(child_reads)
                os.close(child_writes)
        return from_child, to_child

    def end_if_over(self) -> None:
        """Make the stand-in end if the import is over and all children of the stand-in have ended.

        A child counts as ended only after the stand-in has reported the child's exit code.
        """
        if self is _stand_in or self._write_end.closed:
            return
        self.children = [child for child in self.children if _may_run(child)]
        if not self.children:
            self._write_end.close()


def stand_in(listener: socket.socket, read_end: Connection) -> None:
    """Run the server of a stand-in: fork a process for each request. Blocks until the server ends.

    Runs in the stand-in's own process.

    Args:
        listener: Socket on which requests for new processes arrive.
        read_end: Read end of a pipe. The agent and the stand-in's children have write ends of this
            pipe. The server ends when all write ends are closed.
    """
    global _own_pid
    _own_pid = os.getpid()
    forkserver.main(listener.detach(), read_end.fileno(), [])


def start_importing_deferred() -> None:
    """Start a thread that makes the forkserver import `DEFERRED_MODULES`.

    During the import, the forkserver could neither start processes nor report the exit of a child.
    So from now until the end of the import, a stand-in starts all new processes. The import begins
    when all processes that the forkserver itself has started have ended.

    Does nothing if a thread from an earlier call is still running.
    """
    if not _importing.locked():
        threading.Thread(target=_import_deferred_once, name="taas-imports", daemon=True).start()


def _import_deferred_once() -> None:
    """Make the forkserver import `DEFERRED_MODULES`, and wait until the import is over.

    The steps are:

    1. Create a stand-in, which starts all new processes until the end of the import.
    2. Wait until the stand-in is the only child of the forkserver.
    3. Write the name of the first module to the imports file.
    4. Send SIGUSR1 to the forkserver, whose handler imports the modules (`_import_deferred`).
    5. Wait until the forkserver has emptied the imports file. The wait also ends if the forkserver
       has ended or a stand-in has failed.

    Does nothing if an earlier call has taken all these steps. If one of the first four steps fails,
    for example because the disk is full, returns without an exception; a later call tries again.
    Runs in a thread, and holds the lock `_importing`.
    """
    global _has_deferred
    with _importing:
        if _has_deferred or _server is None:
            return
        # If the forkserver has ended, the other users of this module report the error. If the disk
        # is full, each rank imports the modules itself.
        with suppress(psutil.NoSuchProcess, PoolError, OSError):
            stand_in = _StandIn()
            with _starting_from(stand_in):
                while _server.children() != [stand_in.process]:
                    time.sleep(_WATCH_S)
                _write_import_name(_imports_file, DEFERRED_MODULES[0])
                _server.send_signal(signal.SIGUSR1)
                while importing()[0] and is_alive():
                    time.sleep(_IMPORTS_CHECK_S)
            _has_deferred = True


@contextmanager
def _starting_from(stand_in: _StandIn) -> Iterator[None]:
    """Make `stand_in` start all new processes, instead of the forkserver, until the block ends.

    Replaces multiprocessing's `connect_to_new_process` during the block. After the block, the
    stand-in continues to run until its children have ended.
    """
    global _stand_in
    own = forkserver.connect_to_new_process
    with _lock:
        _stand_in = stand_in
        _stand_ins.append(stand_in)
        forkserver.connect_to_new_process = stand_in.fork_process
    try:
        yield
    finally:
        with _lock:
            _stand_in = None
            forkserver.connect_to_new_process = own


def is_alive() -> bool:
    """Return whether the forkserver runs and no stand-in has failed."""
    if _is_over or (_server is not None and status_of(_server) == ""):
        return False
    return not any(stand_in.has_failed() for stand_in in list(_stand_ins))


def wait_while_stopped() -> None:
    """Block while the forkserver or a stand-in is suspended by SIGSTOP.

    Blocks for at most about `STOPPED_S` seconds, because the thread of `_watch` then kills these
    processes.
    """
    while any(status_of(process) == psutil.STATUS_STOPPED for process in _servers()):
        time.sleep(_STOPPED_CHECK_S)


def caused_ends(codes: Collection[int | None]) -> bool:
    """Return whether processes have ended because the forkserver has ended.

    The result is True whenever the forkserver has ended or a stand-in has failed, because the
    system then kills their children.

    After the forkserver's end, the system may show the forkserver as running for a moment. The exit
    code `_LOST_EXIT_CODE` is a sign of such an end. So if a process has this code, this function
    waits up to `_END_VISIBLE_S` seconds for the end to be visible. Otherwise, it does not wait.

    Args:
        codes: Exit codes of the processes; None for a process that still runs.
    """
    deadline = time.monotonic() + (_END_VISIBLE_S if _LOST_EXIT_CODE in codes else 0.0)
    while is_alive():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def start_process(function: str, *arguments: Any) -> Any:
    """Make the forkserver, or the stand-in if one is in use, fork a process that calls `function`.

    During the start, this function holds `_lock`. The thread of `_watch` kills the forkserver and
    its stand-ins if the start gets stuck.

    Args:
        function: Dotted name of the function that the new process calls.
        arguments: The function's arguments; may include sockets and connections.

    Returns:
        The `multiprocessing.Process` object of the new process.

    Raises:
        PoolError: The forkserver has ended. The pool replaces this host.
        OSError: The process could not be started, although the forkserver runs.
    """
    global _starting
    process = _context.Process(target=run_in_fork, args=(function, *arguments))
    with _lock:
        try:
            _starting = _start_timer()
            if not is_alive():
                raise EOFError
            process.start()
            if _stand_in is not None:
                _stand_in.children.append(process)
        except EOFError as error:  # the forkserver has ended or is about to end
            raise PoolError(why_ended()) from error
        except OSError as error:
            if is_alive():
                raise
            raise PoolError(why_ended()) from error
        finally:
            _starting = None
    return process


def _start_timer() -> IdleTimer | None:
    """Return a new idle timer for the stand-in if one is in use, else for the forkserver.

    Return None if the forkserver was not started yet.
    """
    if _stand_in is not None:
        return IdleTimer(_stand_in.process.pid, with_children=False)
    # During the first imports, work of children counts, because an import may start programs.
    # Later, the children are ranks and fetchers, whose work says nothing about the forkserver.
    is_first_import = importing()[0] != ""
    return IdleTimer(_server.pid, is_first_import) if _server is not None else None


def why_ended() -> str:
    """Return a message for the user: why the forkserver ended, and that a new host is used."""
    return f"{_why}; another host takes its place"


def run_in_fork(function: str, *arguments: Any) -> None:
    """Call a function in this new process, a fork of the forkserver or of a stand-in.

    First makes the system kill this process when its parent ends, disconnects the agent's resource
    tracker, and resets the handler of SIGUSR1.

    Args:
        function: Dotted name of the function.
    """
    if _own_pid is not None:
        die_with_parent(_own_pid)
        _disconnect_resource_tracker()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    module, _, name = function.rpartition(".")
    getattr(importlib.import_module(module), name)(*arguments)


def _disconnect_resource_tracker() -> None:
    """Disconnect this fork from the agent's resource tracker.

    multiprocessing then starts a new tracker for the fork when needed. When the run ends, the new
    tracker removes semaphores and shared memory that the run did not release.
    """
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
    tracker._fd = tracker._pid = None


def _may_run(process: Any) -> bool:
    """Return False if a process has certainly ended; True if the process may still run.

    A process has certainly ended if its exit code is known, or if `close_process` has released its
    `Process` object.
    """
    try:
        return _known_exitcode(process) is None
    except ValueError:  # `close_process` has closed the process
        return False


def _known_exitcode(process: Any) -> int | None:
    """Return the exit code of a process without waiting; None if the code is not known now.

    The code is not known while the process runs, or while another thread holds `_lock`. This
    function never waits for `_lock`, because the thread of `_watch` calls it. A thread that holds
    `_lock` may be waiting for a suspended forkserver, and only `_watch` can end that wait.
    """
    if not _lock.acquire(blocking=False):
        return None
    try:
        code: int | None = process.exitcode
    finally:
        _lock.release()
    return code


def exitcode(process: Any) -> int | None:
    """Return the exit code of a process: negative if a signal ended it, None while it runs."""
    with _lock:
        code: int | None = process.exitcode
    return code


def close_process(process: Any) -> None:
    """Wait up to `_CLOSE_WAIT_S` for the end of a process; then release its `Process` object.

    If the process has not ended in time, the `Process` object is not released, and its descriptors
    stay open. Whether or not the process has ended, do not use `process` after this call.
    """
    with _lock:
        process.join(_CLOSE_WAIT_S)
        if process.exitcode is not None:
            process.close()


def report_imports(control: Connection) -> None:
    """Send the errors of the forkserver's imports to the agent: `_failure` and `_problems`.

    Runs in the short-lived fork of the forkserver that `warm_up` starts.
    """
    control.send((_failure, _problems))


def _preload() -> None:
    """Import all modules except `DEFERRED_MODULES`, and prepare the forkserver for forks.

    Runs in the forkserver. The steps are:

    1. Make the system kill the forkserver when the agent ends.
    2. Make standard input empty.
    3. Import the modules. If an import fails that ranks need, print the traceback and record the
       error in `_failure`, because Python's forkserver would ignore an ImportError silently.
    4. Prepare the forkserver for forks, and install `_import_deferred` as the handler of SIGUSR1.
    5. Empty the imports file. The empty file tells the agent that the imports are over.

    No import may create a CUDA context or a thread, because a fork can use neither.
    """
    global _own_pid, _failure
    _own_pid = os.getpid()
    # Python's forkserver ends when the write ends of a pipe are closed. Ranks hold write ends, too,
    # so without this line the forkserver would outlive a killed agent.
    die_with_parent(int(os.environ[_AGENT_PID]))
    _close_input()
    gc.disable()  # imported objects stay alive; collecting during the imports takes 0.2 s
    imports_file = Path(os.environ[_IMPORTS])
    try:
        _import_modules(imports_file)
    except Exception as error:  # any error of a module
        traceback.print_exc()
        what = f"{type(error).__name__}: {error}"
        _failure = f"the forkserver could not import {imports_file.read_text()}: {what}"
    _prepare_for_forks()
    signal.signal(signal.SIGUSR1, _import_deferred)
    _clear_imports_file(imports_file)


def _import_modules(imports_file: Path) -> None:
    """Import `MODULES` and the modules of the pool's settings, and create the shell for ranks.

    Before each import, write the module's name to `imports_file`. If a module of the pool's
    settings cannot be imported, add a message to `_problems` and continue. If a module of `MODULES`
    cannot be imported, raise the exception of this import.
    """
    for name in MODULES:
        _write_import_name(imports_file, name)
        importlib.import_module(name)
    for name in filter(None, os.environ[_PRELOAD].split(",")):
        _write_import_name(imports_file, name)
        try:
            importlib.import_module(name)
        except Exception as error:  # any error of a module is only reported
            _problems.append(f"preload: {name!r} was not imported: {type(error).__name__}: {error}")
    _write_import_name(imports_file, _RANK)
    importlib.import_module(_RANK).prepare()


def _close_input() -> None:
    """Replace standard input by /dev/null in this process and its forks.

    Programs that a cell starts, such as ssh and ffmpeg, may read standard input. Without the
    replacement, they would read the agent's standard input, and wait forever.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _import_deferred(number: int, frame: FrameType | None) -> None:
    """Import `DEFERRED_MODULES` in the forkserver. Handler of SIGUSR1, which the agent sends.

    Before each import, write the module's name to the imports file, unless the disk is full. If an
    import fails, skip the remaining modules, without an exception. At the end, prepare the
    forkserver for forks (`_prepare_for_forks`), and empty the imports file. The empty file tells
    the agent that the imports are over.
    """
    gc.disable()
    imports_file = Path(os.environ[_IMPORTS])
    with suppress(Exception):  # a rank that needs the module imports it, and shows the error
        for name in DEFERRED_MODULES:
            with suppress(OSError):
                _write_import_name(imports_file, name)
            importlib.import_module(name)
    _prepare_for_forks()
    _clear_imports_file(imports_file)


def _clear_imports_file(imports_file: Path) -> None:
    """Empty the imports file, if there is one, to show that no import is running.

    Works even if the disk is full.
    """
    with suppress(OSError):
        os.truncate(imports_file, 0)


def _prepare_for_forks() -> None:
    """Prepare the forkserver's finalizers and its garbage collector for forks.

    Disable the finalizers that a fork would run at its exit, so that a fork does not remove files
    that all forks share. Then enable the garbage collector, but exempt all present objects from it.
    Otherwise, a collection in a fork would copy the memory pages that the fork shares with the
    forkserver.
    """
    # A rank must not run the forkserver's finalizers at its exit. torch alone has hundreds, and the
    # first rank that exits would remove a temporary folder that all ranks share.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    # A collection in a fork writes to every memory page that holds an object, and each such write
    # copies the page. A collection before the freeze would take 0.4 s and find little.
    gc.freeze()
    gc.enable()


if os.environ.get(_AGENT_PID) == str(os.getppid()):  # true only in the forkserver
    _preload()
