"""The host's forkserver: multiprocessing's own, with torch and IPython imported before any run.

Two processes import this module:

- The agent imports neither torch nor IPython. It starts the forkserver and asks it to fork
  processes. A fork takes tens of milliseconds, and is as clean as a new process that imported the
  same modules. The agent passes the function for a fork to run by its dotted name.
- The forkserver runs `_preload` when it imports this module. It imports the remaining modules
  (`LATER`) when it has no child (`start_importing_rest`). This may take a minute, in which a fork
  of the forkserver (`_StandIn`) starts processes in its place.
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

MODULES = ("torch", "taas_magic.api", "taas_magic.host.rank", "taas_magic.host.fetcher")
"""Modules that the forkserver imports first, before the modules that the pool's settings add."""

LATER = ("torch._dynamo",)
"""Modules that the forkserver imports when no cell waits. If it has not, each rank imports them at
its first optimizer step, which takes 1 s."""

_PRELOAD = "TAAS_PRELOAD"
"""Environment variable with the modules that the pool's settings add, separated by commas."""

_AGENT_PID = "TAAS_AGENT_PID"
"""Environment variable with the agent's pid. The forkserver ends with that process."""

_IMPORTS = "TAAS_IMPORTS"
"""Environment variable with the path of the file that names the module being imported."""

_FORGET_S = 1.0
"""Seconds for the forkserver to report that a killed process has ended."""

_LOST = 255
"""Exit code that multiprocessing assigns to a process whose forkserver ended before it."""

_SEEN_S = 1.0
"""Seconds between the moment when a forkserver's pipes close and the moment when it has ended."""

_WATCH_S = 0.5
_STOPPED_LOOK_S = 0.05
_IMPORTS_LOOK_S = 0.1

_context = multiprocessing.get_context("forkserver")
# Process.start() reads the exit codes of all children, also of those that other threads started.
# If two threads read the same exit code, only one of them gets it.
_lock = threading.RLock()
_server: psutil.Process | None = None
_stand_in: "_StandIn | None" = None
_stand_ins: list["_StandIn"] = []
"""The stand-in that starts processes now, if any, and earlier ones that may still have children."""

_has_rest = _is_over = False
_importing = threading.Lock()
_starting: IdleTimer | None = None
"""Idle timer of the process that is starting another one; None if none is being started."""

_start_timeout_s = START_TIMEOUT_S
_imports_file = Path()
_imports_seen = "", 0.0
_why = "this host's forkserver has ended"
_own_pid: int | None = None
"""Pid of the forkserver, set in the forkserver and its forks."""

_problems: list[str] = []
"""Messages about modules of the pool's settings that could not be imported; in the forkserver."""


def begin(modules: Sequence[str]) -> None:
    """Start the forkserver, and return while it still imports modules.

    Must run in the main thread: the forkserver ends with the thread that started it (prctl(2)).

    Args:
        modules: Modules to import in addition to `MODULES`.
    """
    global _server, _imports_file
    _imports_file = Path(tempfile.gettempdir(), f"taas-imports-{os.getpid()}")
    _say_import(_imports_file, MODULES[0])
    os.environ.update({_PRELOAD: ",".join(modules), _AGENT_PID: str(os.getpid())})
    os.environ[_IMPORTS] = str(_imports_file)
    # No import may create a CUDA context, because a fork cannot use it. With this variable, torch
    # asks NVML instead of CUDA whether there is a GPU.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    multiprocessing.set_forkserver_preload([__name__])
    resource_tracker.ensure_running()
    before = psutil.Process().children()
    forkserver.ensure_running()
    [_server] = [child for child in psutil.Process().children() if child not in before]


def importing() -> tuple[str, float]:
    """Return the module that the forkserver is importing, and the seconds for which it has.

    The name is "" if the forkserver is importing nothing.
    """
    global _imports_seen
    try:
        name = _imports_file.read_text()
    except OSError:  # the host's folder is being removed
        name = ""
    if name != _imports_seen[0]:
        _imports_seen = name, time.monotonic()
    return name, time.monotonic() - _imports_seen[1] if name else 0.0


def _say_import(file: Path, name: str) -> None:
    """Write the name of the module being imported to `file`, atomically."""
    new = file.with_suffix(".new")
    new.write_text(name)
    new.replace(file)


def _watch() -> None:
    """End the forkserver if it is stopped or stuck for too long.

    Callers that wait for the forkserver then notice that it has ended, and the host is replaced.
    """
    stopped_at: float | None = None
    while is_alive():
        now = time.monotonic()
        if stopped := [it for it in _servers() if status_of(it) == psutil.STATUS_STOPPED]:
            stopped_at = stopped_at or now
            if now - stopped_at >= STOPPED_S:
                _end(stopped[0], f"was stopped (SIGSTOP) for {STOPPED_S:.0f} s")
        else:
            stopped_at = None
            if (timer := _starting) is not None and timer.idle_s() >= _start_timeout_s:
                what = f"imported {name}" if (name := importing()[0]) else "was to start a process"
                limit = f"for start_timeout_s = {_start_timeout_s:g}"
                _end(
                    _servers()[0],
                    f"used no processor time and read nothing {limit} while it {what}",
                )
        for stand_in in list(_stand_ins):
            stand_in.end_if_over()
        time.sleep(_WATCH_S)


def _servers() -> list[psutil.Process]:
    """Return the forkserver and its stand-ins: this host's ranks and fetchers end with them."""
    servers = [_server] if _server is not None else []
    return servers + [it.process for it in list(_stand_ins)]


def _end(server: psutil.Process, what: str) -> None:
    """Kill the forkserver and its stand-ins because `server` failed as `what` describes."""
    global _why, _is_over
    _is_over = True
    _why = f"this host's forkserver (process {server.pid}) {what}, and was ended"
    for process in _servers():
        with suppress(psutil.NoSuchProcess):
            process.kill()


def warm_up(start_timeout_s: float = START_TIMEOUT_S) -> list[str]:
    """Block until the forkserver has imported `MODULES` and the modules of the pool's settings.

    Args:
        start_timeout_s: Seconds without any work after which the forkserver counts as stuck, now
            and at each start of a process.

    Returns:
        One message for each module of the settings that could not be imported.

    Raises:
        PoolError: The forkserver has ended.
    """
    global _start_timeout_s
    _start_timeout_s = start_timeout_s
    threading.Thread(target=_watch, name="taas-forkserver", daemon=True).start()
    try:
        ours, theirs = multiprocessing.Pipe()
        with ours:
            process = start(f"{__name__}.report", theirs)
            theirs.close()
            problems: list[str] = ours.recv()
        process.join()
    except (EOFError, OSError, PoolError) as error:
        text = "the forkserver could not import torch and what ranks need"
        raise PoolError(_why if _is_over else text) from error
    return problems


class _StandIn:
    """A fork of the forkserver that starts processes while the forkserver imports `LATER`.

    It runs multiprocessing's own server on a separate socket. It ends when the last process that it
    has started has ended, or with the forkserver.

    Attributes:
        children: Processes that it has started.
    """

    def __init__(self) -> None:
        self.children: list[Any] = []
        self._address = os.path.join(util.get_temp_dir(), "stand-in")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            os.chmod(self._address, 0o600)
            listener.listen()
            # The stand-in's server ends when all write ends are closed. Its children hold some.
            held, self._held = multiprocessing.Pipe(duplex=False)
            with held:
                started = start(f"{__name__}.stand_in", listener, held)
        self.process = psutil.Process(started.pid)
        self._started = started

    def has_failed(self) -> bool:
        """Return whether the stand-in has failed. The processes that it started end with it."""
        if self is _stand_in:  # the forkserver is importing and cannot report the exit code
            return status_of(self.process) == ""
        return exitcode(self._started) not in (None, 0)

    def connect(self, fds: Sequence[int]) -> tuple[int, int]:
        """Replace `forkserver.connect_to_new_process`: ask this stand-in to fork a process."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self._address)
            from_child, child_writes = os.pipe()
            child_reads, to_child = os.pipe()
            tracker = resource_tracker.getfd()
            assert tracker is not None
            theirs = child_reads, child_writes, self._held.fileno(), tracker
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
        """Let the stand-in end if it is no longer used and all its children have ended.

        The stand-in must have reported each child's exit code before: it could end before it
        reports the last one, if only that child kept it running.
        """
        if self is _stand_in or self._held.closed:
            return
        self.children = [child for child in self.children if _runs(child)]
        if not self.children:
            self._held.close()


def stand_in(listener: socket.socket, held: Connection) -> None:
    """Start processes until all write ends of `held` are closed. Runs in a fork."""
    global _own_pid
    _own_pid = os.getpid()
    forkserver.main(listener.detach(), held.fileno(), [])


def start_importing_rest() -> None:
    """Make the forkserver import `LATER`, while a stand-in starts processes. Does not block.

    Does nothing while the forkserver has children, since it would not notice their ends during the
    import. Call again when the children have ended.
    """
    threading.Thread(target=_import_rest_once, name="taas-imports", daemon=True).start()


def _import_rest_once() -> None:
    global _has_rest
    with _importing:
        if _has_rest or _server is None:
            return
        # If the forkserver has ended, its callers notice that too.
        with suppress(psutil.NoSuchProcess, PoolError):
            stand_in = _StandIn()
            with _replaced_by(stand_in):
                if any(child != stand_in.process for child in _server.children()):
                    return
                _say_import(_imports_file, LATER[0])
                _server.send_signal(signal.SIGUSR1)
                while importing()[0] and is_alive():
                    time.sleep(_IMPORTS_LOOK_S)
            _has_rest = True


@contextmanager
def _replaced_by(stand_in: _StandIn) -> Iterator[None]:
    """Let the stand-in start processes instead of the forkserver until the block ends."""
    global _stand_in
    own = forkserver.connect_to_new_process
    with _lock:
        _stand_in = stand_in
        _stand_ins.append(stand_in)
        forkserver.connect_to_new_process = stand_in.connect
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
    """Block while the forkserver is stopped (SIGSTOP). After `STOPPED_S`, it is killed."""
    while any(status_of(process) == psutil.STATUS_STOPPED for process in _servers()):
        time.sleep(_STOPPED_LOOK_S)


def took_along(codes: Collection[int | None]) -> bool:
    """Return whether processes with these exit codes ended because the forkserver ended.

    The forkserver's pipes, which report the ends of its processes, close a moment before the system
    shows that the forkserver has ended. So this waits up to `_SEEN_S` if a code is `_LOST`.
    """
    deadline = time.monotonic() + (_SEEN_S if _LOST in codes else 0.0)
    while is_alive():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def start(function: str, *arguments: Any) -> Any:
    """Start a process in a fork of the forkserver.

    Args:
        function: Dotted name of the function that the process calls.
        arguments: The function's arguments; may include sockets and connections.

    Returns:
        The `multiprocessing.Process`.

    Raises:
        PoolError: The forkserver has ended. This host will end too.
    """
    global _starting
    process = _context.Process(target=call, args=(function, *arguments))
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
    """Return an idle timer for the process that starts the next fork; None if there is none."""
    if _stand_in is not None:
        return IdleTimer(_stand_in.process.pid, with_children=False)
    # An import may start programs. After the first import, the forkserver's children are ranks.
    is_first_import = importing()[0] != ""
    return IdleTimer(_server.pid, is_first_import) if _server is not None else None


def why_ended() -> str:
    """Return the error message for a forkserver that has ended."""
    return f"{_why}; another host takes its place"


def call(function: str, *arguments: Any) -> None:
    """Call a function by its dotted name. Runs in a fork, which ends with the forkserver."""
    if _own_pid is not None:
        die_with_parent(_own_pid)
        _leave_resource_tracker()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    module, _, name = function.rpartition(".")
    getattr(importlib.import_module(module), name)(*arguments)


def _leave_resource_tracker() -> None:
    """Disconnect this process from the agent's resource tracker; it starts its own when needed.

    The agent's tracker keeps running after the run has ended, so it would not remove semaphores and
    shared memory that the run left.
    """
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
    tracker._fd = tracker._pid = None


def _runs(process: Any) -> bool:
    """Return whether a process runs, as far as reported. A forgotten one counts as ended."""
    try:
        return exitcode(process) is None
    except ValueError:  # `forget` has closed the process
        return False


def exitcode(process: Any) -> int | None:
    """Return the exit code of a process, negative for a signal; None while it runs."""
    with _lock:
        code: int | None = process.exitcode
    return code


def forget(process: Any) -> None:
    """Close the descriptors of a process that has ended, without waiting for garbage collection."""
    with _lock:
        process.join(_FORGET_S)
        if process.exitcode is not None:
            process.close()


def report(control: Connection) -> None:
    """Send `_problems` to the agent. Runs in a fork."""
    control.send(_problems)


def _preload() -> None:
    """Import modules and prepare the forkserver, so that each rank inherits the result.

    This must create no CUDA context and no thread: a fork's CUDA context is broken, and threads do
    not exist in a fork.
    """
    global _own_pid
    _own_pid = os.getpid()
    # Python's forkserver ends when its pipe closes. Ranks hold that pipe too, so the forkserver
    # would outlive a killed agent.
    die_with_parent(int(os.environ[_AGENT_PID]))
    _close_input()
    gc.disable()  # imported objects stay alive; collecting during the imports takes 0.2 s
    imports_file = Path(os.environ[_IMPORTS])
    for name in MODULES:
        _say_import(imports_file, name)
        importlib.import_module(name)
    for name in filter(None, os.environ[_PRELOAD].split(",")):
        _say_import(imports_file, name)
        try:
            importlib.import_module(name)
        except Exception as error:  # any error of a module is only reported
            _problems.append(f"preload: {name!r} was not imported: {type(error).__name__}: {error}")
    importlib.import_module("taas_magic.host.rank").prepare()
    _settle()
    signal.signal(signal.SIGUSR1, _import_rest)
    _say_import(imports_file, "")


def _close_input() -> None:
    """Make standard input empty, here and in forks.

    The inherited standard input is the agent's, which never ends. Programs that a cell starts, such
    as ssh and ffmpeg, may read it.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _import_rest(number: int, frame: FrameType | None) -> None:
    """Import `LATER` on the agent's signal. Runs in the forkserver's only thread, between forks."""
    gc.disable()
    imports_file = Path(os.environ[_IMPORTS])
    with suppress(Exception):  # a rank that needs the module raises the same error to the user
        for name in LATER:
            _say_import(imports_file, name)
            importlib.import_module(name)
    _settle()
    _say_import(imports_file, "")


def _settle() -> None:
    """Prepare imported objects for forks: drop exit finalizers and freeze the collector."""
    # A rank must not run this process's finalizers when it exits: torch alone has hundreds, and the
    # first rank would remove a temporary folder of all.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    # A collection in a fork would write to every page that holds an object, and so copy the page.
    # A collection here would take 0.4 s and find little.
    gc.freeze()
    gc.enable()


if os.environ.get(_AGENT_PID) == str(os.getppid()):  # otherwise the variable was inherited
    _preload()
