"""The host's forkserver: multiprocessing's own, with torch and IPython imported before any run.

Two processes import this module. The agent, which imports neither torch nor IPython, starts the
forkserver and has it start processes, in tens of milliseconds and as clean as ones that imported
the same modules themselves; what they run is a function that the agent only names. The forkserver
imports it for its effect (`_preload`), and imports the rest when it has no child
(`start_importing_rest`).
While the forkserver imports the rest, which may take a minute, a fork of it (`_StandIn`) starts
processes in its place.
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
"""What the forkserver imports first, besides the modules that the pool's settings name."""

LATER = ("torch._dynamo",)
"""What it imports when no cell waits; else each rank does, at its first optimizer step: 1 s."""

_PRELOAD = "TAAS_PRELOAD"
"""The environment variable that names the modules which a pool's settings add, with commas."""

_AGENT_PID = "TAAS_AGENT_PID"
"""The environment variable that names the process with which the forkserver ends."""

_IMPORTS = "TAAS_IMPORTS"
"""The environment variable that names the file in which the forkserver says what it imports."""

_FORGET_S = 1.0
"""How long the forkserver may take to say that a killed process has ended."""

_LOST = 255
"""The exit code that multiprocessing gives to a process whose forkserver ended before it."""

_SEEN_S = 1.0
"""How long it may take until a forkserver that closed its pipes is seen to have ended."""

_WATCH_S = 0.5
_STOPPED_LOOK_S = 0.05
_IMPORTS_LOOK_S = 0.1

_context = multiprocessing.get_context("forkserver")
# Process.start() looks at all children, also those of other threads, and reads their exit codes:
# two threads that read the same one leave one of them without it.
_lock = threading.RLock()
_server: psutil.Process | None = None
_stand_in: "_StandIn | None" = None
_stand_ins: list["_StandIn"] = []
"""The one that starts processes now, if any, and earlier ones, of which some may have children."""

_has_rest = _is_over = False
_importing = threading.Lock()
_starting: IdleTimer | None = None
"""Watches the process that is asked to start another one, as long as it has not answered."""

_start_timeout_s = START_TIMEOUT_S
_imports_file = Path()
_imports_seen = "", 0.0
_why = "this host's forkserver has ended"
_own_pid: int | None = None
"""In the forkserver, and what it forks: the forkserver's process id."""

_problems: list[str] = []
"""In the forkserver: a message for each module of the settings that could not be imported."""


def begin(modules: Sequence[str]) -> None:
    """Start the forkserver; returns while it still imports, besides torch and IPython `modules`.

    Must run in the main thread: the forkserver ends with the thread that started it (prctl(2)).
    """
    global _server, _imports_file
    _imports_file = Path(tempfile.gettempdir(), f"taas-imports-{os.getpid()}")
    _say_import(_imports_file, MODULES[0])
    os.environ.update({_PRELOAD: ",".join(modules), _AGENT_PID: str(os.getpid())})
    os.environ[_IMPORTS] = str(_imports_file)
    # Nothing in torch's imports may make a CUDA context, which no fork survives: torch then asks
    # NVML instead of CUDA whether there is a GPU.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    multiprocessing.set_forkserver_preload([__name__])
    resource_tracker.ensure_running()
    before = psutil.Process().children()
    forkserver.ensure_running()
    [_server] = [child for child in psutil.Process().children() if child not in before]


def importing() -> tuple[str, float]:
    """Return the module that the forkserver imports, and for how many seconds it has; "": none."""
    global _imports_seen
    try:
        name = _imports_file.read_text()
    except OSError:  # the host's folder is being removed
        name = ""
    if name != _imports_seen[0]:
        _imports_seen = name, time.monotonic()
    return name, time.monotonic() - _imports_seen[1] if name else 0.0


def _say_import(file: Path, name: str) -> None:
    """Write what the forkserver imports; nobody ever reads half of it."""
    new = file.with_suffix(".new")
    new.write_text(name)
    new.replace(file)


def _watch() -> None:
    """End the forkserver when it is stopped or stuck for too long.

    Who waits for it then sees it gone, as when it ended by itself; and the host is replaced.
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
    """Return the processes on which this host's ranks and fetchers depend."""
    servers = [_server] if _server is not None else []
    return servers + [it.process for it in list(_stand_ins)]


def _end(server: psutil.Process, what: str) -> None:
    """End the forkserver, and its stand-in with it."""
    global _why, _is_over
    _is_over = True
    _why = f"this host's forkserver (process {server.pid}) {what}, and was ended"
    for process in _servers():
        with suppress(psutil.NoSuchProcess):
            process.kill()


def warm_up(start_timeout_s: float = START_TIMEOUT_S) -> list[str]:
    """Block until the forkserver has imported everything; returns what it could not, and why.

    Args:
        start_timeout_s: Seconds without any work after which the forkserver counts as stuck, now
            and at each start of a process.

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
    """A fork of the forkserver, which starts processes while the forkserver imports the rest.

    It runs multiprocessing's own server on a socket of its own. It ends when the last process that
    it has started has ended, and with the forkserver.

    Attributes:
        children: What it has started.
    """

    def __init__(self) -> None:
        self.children: list[Any] = []
        self._address = os.path.join(util.get_temp_dir(), "stand-in")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            os.chmod(self._address, 0o600)
            listener.listen()
            # its server ends when all writing ends are closed, which its children have, too
            held, self._held = multiprocessing.Pipe(duplex=False)
            with held:
                started = start(f"{__name__}.stand_in", listener, held)
        self.process = psutil.Process(started.pid)
        self._started = started

    def has_failed(self) -> bool:
        """Return whether it has ended with processes that it started, which end with it."""
        if self is _stand_in:  # the forkserver, which imports, says nothing of its exit code
            return status_of(self.process) == ""
        return exitcode(self._started) not in (None, 0)

    def connect(self, fds: Sequence[int]) -> tuple[int, int]:
        """Do what `forkserver.connect_to_new_process` does, with this process."""
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
        """Let it end, if it has been replaced and has said how each of its children ended.

        It ends before it says so of the last one, where that alone keeps it from its end.
        """
        if self is _stand_in or self._held.closed:
            return
        self.children = [child for child in self.children if _runs(child)]
        if not self.children:
            self._held.close()


def stand_in(listener: socket.socket, held: Connection) -> None:
    """Start processes until nobody holds the other end of `held`; a fork of the forkserver."""
    global _own_pid
    _own_pid = os.getpid()
    forkserver.main(listener.detach(), held.fileno(), [])


def start_importing_rest() -> None:
    """Have the forkserver import LATER, in a thread; a fork of it starts processes meanwhile.

    Does nothing while the forkserver has children: it would not see their ends. To be called again
    when they have ended.
    """
    threading.Thread(target=_import_rest_once, name="taas-imports", daemon=True).start()


def _import_rest_once() -> None:
    global _has_rest
    with _importing:
        if _has_rest or _server is None:
            return
        # where it has ended, whoever uses it sees that as well
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
    """Have the stand-in start processes instead of the forkserver, for as long as the block."""
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
    """Return whether the forkserver lives, and nobody has given it up."""
    if _is_over or (_server is not None and status_of(_server) == ""):
        return False
    return not any(stand_in.has_failed() for stand_in in list(_stand_ins))


def wait_while_stopped() -> None:
    """Block while the forkserver is stopped (SIGSTOP); for too long, and `_watch` ends it."""
    while any(status_of(process) == psutil.STATUS_STOPPED for process in _servers()):
        time.sleep(_STOPPED_LOOK_S)


def took_along(codes: Collection[int | None]) -> bool:
    """Return whether the forkserver has ended, and with it processes that have these exit codes.

    Its pipes, by which they are seen to end, close before the system shows its own end.
    """
    deadline = time.monotonic() + (_SEEN_S if _LOST in codes else 0.0)
    while is_alive():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def start(function: str, *arguments: Any) -> Any:
    """Start a process in a fork of the warm forkserver; returns the `multiprocessing.Process`.

    Args:
        function: What it runs, by its dotted name.
        arguments: What it is called with; sockets and connections travel too.

    Raises:
        PoolError: The forkserver has ended; so will this host.
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
        except EOFError as error:  # it has ended, or will have in a moment
            raise PoolError(why_ended()) from error
        except OSError as error:
            if is_alive():
                raise
            raise PoolError(why_ended()) from error
        finally:
            _starting = None
    return process


def _start_timer() -> IdleTimer | None:
    """Return what watches the process that is now asked to start one."""
    if _stand_in is not None:
        return IdleTimer(_stand_in.process.pid, with_children=False)
    # an import may start programs; later, what is below the forkserver are ranks
    is_first_import = importing()[0] != ""
    return IdleTimer(_server.pid, is_first_import) if _server is not None else None


def why_ended() -> str:
    """Return what is to be told of a forkserver that is gone."""
    return f"{_why}; another host takes its place"


def call(function: str, *arguments: Any) -> None:
    """Call a function by its dotted name; in a process of the forkserver, which ends with that."""
    if _own_pid is not None:
        die_with_parent(_own_pid)
        _leave_resource_tracker()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    module, _, name = function.rpartition(".")
    getattr(importlib.import_module(module), name)(*arguments)


def _leave_resource_tracker() -> None:
    """Have this process start its own resource tracker when it needs one, as a program does.

    A fork of the forkserver would use the agent's tracker, which goes on when the run has ended:
    semaphores and shared memory that the run left would stay.
    """
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
    tracker._fd = tracker._pid = None


def _runs(process: Any) -> bool:
    """Return whether a process runs, as far as was said; one that was forgotten does not."""
    try:
        return exitcode(process) is None
    except ValueError:  # it is closed
        return False


def exitcode(process: Any) -> int | None:
    """Return a process's exit code, negative for a signal; None while it runs."""
    with _lock:
        code: int | None = process.exitcode
    return code


def forget(process: Any) -> None:
    """Free the descriptors of a process that has been ended; else they wait for the collector."""
    with _lock:
        process.join(_FORGET_S)
        if process.exitcode is not None:
            process.close()


def report(control: Connection) -> None:
    """Send `_problems` to the agent; in a fork."""
    control.send(_problems)


def _preload() -> None:
    """Import and make, in the forkserver, what each rank then finds done.

    No CUDA context and no thread may come of it: forks would inherit the one broken and the other
    not at all.
    """
    global _own_pid
    _own_pid = os.getpid()
    # Ranks hold the pipe on whose end a forkserver waits, so it would outlive a killed agent.
    die_with_parent(int(os.environ[_AGENT_PID]))
    _close_input()
    gc.disable()  # what is imported stays; to look through it again and again takes 0.2 s
    imports_file = Path(os.environ[_IMPORTS])
    for name in MODULES:
        _say_import(imports_file, name)
        importlib.import_module(name)
    for name in filter(None, os.environ[_PRELOAD].split(",")):
        _say_import(imports_file, name)
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a module raises is only reported
            _problems.append(f"preload: {name!r} was not imported: {type(error).__name__}: {error}")
    importlib.import_module("taas_magic.host.rank").prepare()
    _settle()
    signal.signal(signal.SIGUSR1, _import_rest)
    _say_import(imports_file, "")


def _close_input() -> None:
    """Have descriptor 0 end at once, here and in forks; else it is the agent's, which never does.

    What a cell starts may read it: ssh, ffmpeg.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _import_rest(number: int, frame: FrameType | None) -> None:
    """Handle the agent's signal, in the forkserver's only thread, between two forks."""
    gc.disable()
    imports_file = Path(os.environ[_IMPORTS])
    with suppress(Exception):  # whoever needs it meets the same error where the user sees it
        for name in LATER:
            _say_import(imports_file, name)
            importlib.import_module(name)
    _settle()
    _say_import(imports_file, "")


def _settle() -> None:
    """Have forks find what was imported as if it had always been there."""
    # What is to happen at the end of this process, no rank calls at its own: torch alone has
    # hundreds of finalizers, and a temporary folder would go with the first rank.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    # A collection in a fork would write to, and so copy, every page that holds an object. Here, it
    # would take 0.4 s to find what little the imports left.
    gc.freeze()
    gc.enable()


if os.environ.get(_AGENT_PID) == str(os.getppid()):  # else the variable was inherited
    _preload()
