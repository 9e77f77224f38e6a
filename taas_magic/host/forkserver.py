"""The host's forkserver: multiprocessing's own, with torch and IPython imported before any run.

Two processes import this module. The agent, which imports neither torch nor IPython, starts the
forkserver and has it start processes, in tens of milliseconds and as clean as ones that imported
the same modules themselves; what they run is a function that the agent only names. The forkserver
imports it for its effect (`_preload`), and imports the rest when no cell waits (`import_rest`).
"""

import gc
import importlib
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import psutil

from taas_magic.errors import PoolError
from taas_magic.host.system import die_with_parent, status_of
from taas_magic.leases import STOPPED_S

MODULES = ("torch", "taas_magic.api", "taas_magic.host.rank", "taas_magic.host.fetcher")
"""What the forkserver imports first, besides the modules that the pool's settings name."""

LATER = ("torch._dynamo",)
"""What it imports when no cell waits; else each rank does, at its first optimizer step: 1 s."""

START_S = 30.0
"""How long it may take to start a process, once it has imported everything."""

_PRELOAD = "TAAS_PRELOAD"
"""The environment variable that names the modules which a pool's settings add, with commas."""

_AGENT_PID = "TAAS_AGENT_PID"
"""The environment variable that names the process with which the forkserver ends."""

_FORGET_S = 1.0
"""How long the forkserver may take to say that a killed process has ended."""

_LOST = 255
"""The exit code that multiprocessing gives to a process whose forkserver ended before it."""

_SEEN_S = 1.0
"""How long it may take until a forkserver that closed its pipes is seen to have ended."""

_WATCH_S = 0.5
_STOPPED_LOOK_S = 0.05

_context = multiprocessing.get_context("forkserver")
# Process.start() looks at all children, also those of other threads, and reads their exit codes:
# two threads that read the same one leave one of them without it.
_lock = threading.Lock()
_server: psutil.Process | None = None
_is_warm = _has_rest = _is_over = False
_importing = threading.Lock()
_begun_at: float | None = None
_why = "this host's forkserver has ended"
_own_pid: int | None = None
"""In the forkserver, and what it forks: the forkserver's process id."""

_problems: list[str] = []
"""In the forkserver: a message for each module of the settings that could not be imported."""


def begin(modules: Sequence[str]) -> None:
    """Start the forkserver; returns while it still imports, besides torch and IPython `modules`.

    Must run in the main thread: the forkserver ends with the thread that started it (prctl(2)).
    """
    global _server
    os.environ.update({_PRELOAD: ",".join(modules), _AGENT_PID: str(os.getpid())})
    # Nothing in torch's imports may make a CUDA context, which no fork survives: torch then asks
    # NVML instead of CUDA whether there is a GPU.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    multiprocessing.set_forkserver_preload([__name__])
    resource_tracker.ensure_running()
    before = psutil.Process().children()
    forkserver.ensure_running()
    [_server] = [child for child in psutil.Process().children() if child not in before]
    threading.Thread(target=_watch, args=(_server,), name="taas-forkserver", daemon=True).start()


def _watch(server: psutil.Process) -> None:
    """End the forkserver when it is stopped, or hangs, for too long.

    Who waits for it then sees it gone, as when it ended by itself; and the host is replaced.
    """
    stopped_at: float | None = None
    while status := status_of(server):
        now = time.monotonic()
        stopped_at = (stopped_at or now) if status == psutil.STATUS_STOPPED else None
        if stopped_at is not None and now - stopped_at >= STOPPED_S:
            _end(server, f"was stopped (SIGSTOP) for {STOPPED_S:.0f} s")
        elif _is_warm and _begun_at is not None and now - _begun_at >= START_S:
            _end(server, f"did not start a process within {START_S:.0f} s")
        time.sleep(_WATCH_S)


def _end(server: psutil.Process, what: str) -> None:
    global _why, _is_over
    _is_over = True
    _why = f"this host's forkserver (process {server.pid}) {what}, and was ended"
    server.kill()


def warm_up() -> list[str]:
    """Block until the forkserver has imported everything; returns what it could not, and why.

    Raises:
        PoolError: The forkserver has ended.
    """
    global _is_warm
    try:
        problems = _reported()
    except (EOFError, OSError, PoolError) as error:
        raise PoolError("the forkserver could not import torch and what ranks need") from error
    _is_warm = True
    return problems


def import_rest() -> None:
    """Block until the warm forkserver has imported LATER; what is started now waits for that, too.

    Raises:
        PoolError: The forkserver has ended.
    """
    global _has_rest
    with _importing:
        if _has_rest or _server is None:
            return
        try:
            _server.send_signal(signal.SIGUSR1)
            _reported()
        except (EOFError, OSError, psutil.NoSuchProcess) as error:
            raise PoolError(why_ended()) from error
        _has_rest = True


def _reported() -> list[str]:
    """Return the forkserver's `_problems`, which a fork sends once all before it is done."""
    ours, theirs = multiprocessing.Pipe()
    with ours:
        process = start(f"{__name__}.report", theirs)
        theirs.close()
        problems: list[str] = ours.recv()
    process.join()
    return problems


def is_alive() -> bool:
    """Return whether the forkserver lives, and nobody has given it up."""
    return not _is_over and (_server is None or status_of(_server) != "")


def wait_while_stopped() -> None:
    """Block while the forkserver is stopped (SIGSTOP); for too long, and `_watch` ends it."""
    while _server is not None and status_of(_server) == psutil.STATUS_STOPPED:
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
    global _begun_at
    process = _context.Process(target=call, args=(function, *arguments))
    with _lock:
        try:
            _begun_at = time.monotonic()
            if not is_alive():
                raise EOFError
            process.start()
        except EOFError as error:  # it has ended, or will have in a moment
            raise PoolError(why_ended()) from error
        except OSError as error:
            if is_alive():
                raise
            raise PoolError(why_ended()) from error
        finally:
            _begun_at = None
    return process


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
    for name in MODULES:
        importlib.import_module(name)
    for name in filter(None, os.environ[_PRELOAD].split(",")):
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a module raises is only reported
            _problems.append(f"preload: {name!r} was not imported: {type(error).__name__}: {error}")
    importlib.import_module("taas_magic.host.rank").prepare()
    _settle()
    signal.signal(signal.SIGUSR1, _import_rest)


def _close_input() -> None:
    """Have descriptor 0 end at once, here and in forks; else it is the agent's, which never does.

    What a cell starts may read it: ssh, ffmpeg.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _import_rest(number: int, frame: FrameType | None) -> None:
    """Handle `import_rest`'s signal, in the forkserver's only thread, between two forks."""
    gc.disable()
    with suppress(Exception):  # whoever needs it meets the same error where the user sees it
        for name in LATER:
            importlib.import_module(name)
    _settle()


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
