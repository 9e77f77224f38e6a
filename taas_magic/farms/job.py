"""The job process: a fork of the node's forkserver. It runs one job, or several short jobs in turn.

A process runs a further job only if the previous job returned quickly and left the process
unchanged. So each job starts in a process that is as clean as a new process.
"""

import contextlib
import io
import mmap
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from multiprocessing import set_start_method
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch

from taas_magic.capture import payload, pickling
from taas_magic.capture.modules import claim_taas
from taas_magic.capture.work import FunctionWork
from taas_magic.farms.messages import (
    INLINE_BYTES,
    JobAssignment,
    JobOutcome,
    JobProcessState,
    SharedBytes,
)
from taas_magic.host import cell_main, tracebacks
from taas_magic.host.forkserver import DEFERRED_MODULES
from taas_magic.host.link import flush_output
from taas_magic.host.system import seed_torch_and_numpy
from taas_magic.store.guard import StoreProtection, apply_rule
from taas_magic.store.publish import SAVES_FOLDER_VARIABLE

SHORT_S = 0.05
"""Maximum seconds that a job may take so that its process may run a further job.

After a longer job, the node starts a new process, which takes little time in comparison.
"""


_JOB_VARIABLES = (SAVES_FOLDER_VARIABLE, cell_main.PAYLOAD)
"""Environment variables that this process itself sets for each job.

A change of these variables does not make the process unusable for further jobs.
"""


def job_main(process_state: JobProcessState, control: Connection, output: Connection) -> None:
    """Run jobs until the node closes `control`, or until a job makes this process unusable.

    First become the leader of a POSIX session, redirect stdout and stderr to `output`, and apply
    the settings.

    A job makes the process unusable in five cases: the job failed, is `fresh`, took longer than
    `SHORT_S`, changed the process (for example its environment, see `_process_state`), or tried to
    write to the project store. After such a job, send the outcome, kill descendants that have left
    the session, and return.

    A job may fork a child that runs past the end of the function. This child ends without sending
    an outcome.

    Args:
        process_state: Settings that this process applies to itself.
        control: A pipe to the node. The process receives a `JobAssignment` for each job. It answers
            with a `JobOutcome` and then `JobOutcome.n_parts_following` parts of the result.
        output: The pipe to the node for everything that jobs print.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
    kept_out: list[str] = []
    _apply_settings(process_state, kept_out.append)
    before = _process_state()
    had_later = _has_deferred_modules()
    process = os.getpid()
    with contextlib.suppress(EOFError, KeyboardInterrupt):  # the node ends this process
        while True:
            assignment: JobAssignment = pickle.loads(control.recv_bytes())
            began = time.monotonic()
            outcome, parts = _run_job(assignment)
            flush_output()
            if os.getpid() != process:  # a child that the job forked, and that ran past the job
                return
            outcome.took_s = time.monotonic() - began
            outcome.imported_deferred = _has_deferred_modules() and not had_later
            may_go_on = not (outcome.etype or assignment.call.fresh or kept_out)
            outcome.process_is_reusable = (
                may_go_on and outcome.took_s < SHORT_S and _process_state() == before
            )
            if sum(part.nbytes for part in parts) <= INLINE_BYTES:
                outcome.parts, parts = [bytes(part) for part in parts], []
            outcome.n_parts_following = len(parts)
            control.send_bytes(pickle.dumps(outcome))
            for part in parts:
                control.send_bytes(part)
            if not outcome.process_is_reusable:
                _end_children()
                return


def _apply_settings(process_state: JobProcessState, note: Callable[[str], None]) -> None:
    """Apply `process_state` to this process, and keep this process's writes out of the store.

    - Reset the start method of multiprocessing.
    - Set the environment, `sys.path`, `sys.argv`, and torch's number of threads.
    - Make `import taas` return `taas_magic.api`.
    - Redirect writes to the project store into the scratch folder.
    - Set the working directory. If this host does not have this folder, change nothing.

    Args:
        note: Called with each path of the project store to which this process writes or tries to
            write.
    """
    set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(process_state.environ)
    sys.path[:] = process_state.sys_path
    sys.argv[:] = ["taas"]
    claim_taas()
    apply_rule(
        process_state.store,
        "a job",
        protection=StoreProtection(process_state.protection),
        scratch=Path(process_state.scratch),
        run_folders=[process_state.files],
        on_write=lambda path, is_moved: None if is_moved else note(path),
    )
    with contextlib.suppress(OSError):  # this host may not have the notebook's folder
        os.chdir(process_state.cwd)
    torch.set_num_threads(process_state.cpus)


def _process_state() -> tuple[Any, ...]:
    """Return the state of this process that a job must not change if the process is to be reused.

    The state is: number of threads, whether there are child processes, environment, working
    directory, stdout and stderr, and whether CUDA is initialized. If the working directory has been
    removed, it counts as "".
    """
    threads = len(os.listdir("/proc/self/task"))
    environ = {name: value for name, value in os.environ.items() if name not in _JOB_VARIABLES}
    streams = [(it, getattr(it, "closed", True)) for it in (sys.stdout, sys.stderr)]
    has_cuda = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    cwd = ""
    with contextlib.suppress(FileNotFoundError):
        cwd = os.getcwd()
    return threads, _has_children(), environ, cwd, streams, has_cuda


def _has_deferred_modules() -> bool:
    """Return whether this process has imported all modules of `forkserver.DEFERRED_MODULES`.

    The forkserver imports these modules only when a job has needed them.
    """
    return all(name in sys.modules for name in DEFERRED_MODULES)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _end_children() -> None:
    """Kill descendants of this process that have left its POSIX session by `os.setsid`.

    The node kills all processes that are still in the session.
    """
    for child in psutil.Process().children(recursive=True) if _has_children() else ():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(child.pid) != os.getpid():
                child.kill()


def _run_job(assignment: JobAssignment) -> tuple[JobOutcome, list[memoryview]]:
    """Call the job's function, and pickle its result or describe its exception.

    First set the environment variable that names the folder for the job's saved files. If the job
    has forked a child, and an exception ends the function in this child, raise the exception again.

    Returns:
        The outcome, and a list of the result's parts: its pickle, then the buffers of this pickle.
        If the function raised an exception, the list is empty.
    """
    os.environ[SAVES_FOLDER_VARIABLE] = assignment.saves
    process = os.getpid()
    try:
        result = _pickle_result_of(assignment)
    except BaseException as error:  # even SystemExit ends only the job, not this process
        if os.getpid() != process:  # a child that the job forked: it ends as usual in Python
            raise
        return _failure_outcome(error), []
    parts = [memoryview(result.data), *(buffer.raw() for buffer in result.buffers)]
    return JobOutcome(), parts


def _pickle_result_of(assignment: JobAssignment) -> pickling.Pickled:
    """Call the job's function, and return its result as a pickle.

    The result may contain functions of `__main__`. In the notebook, such a function uses the
    notebook's variables. If the function reads a variable that the job has set, the pickle also
    contains the job's value. The function uses the job's value only if the notebook has no variable
    of this name.
    """
    result, namespace, names = _make_call(assignment)
    pickler = pickling.ValuePickler(namespace, "notebook")
    pickler.pending_values = {name: namespace[name] for name in names}
    pickler.pickle_variable("the job's result", result)
    return pickler.pickled()


def _make_call(assignment: JobAssignment) -> tuple[Any, dict[str, Any], list[str]]:
    """Call the job's function in a new `__main__` module, which contains the captured objects.

    - Give the random generators of Python, torch and numpy new seeds, because all job processes
      inherit the same generators from the forkserver.
    - Load the payload: install its modules, and load the captured objects into `__main__`. An
      environment variable names the payload's file, so that spawned child processes can load it.
    - Unpickle the arguments in `__main__`, and call the function.

    Returns:
        The function's result, the namespace of `__main__`, and the names in this namespace that the
        job has set.
    """
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
    main.__spec__ = ModuleSpec(cell_main.__name__, None)  # spawned children import it
    random.seed()
    seed_torch_and_numpy()
    kept = assignment.payload
    held = SharedBytes(kept) if isinstance(kept, bytes) else None
    os.environ[cell_main.PAYLOAD] = path = held.path if held else str(kept)
    loaded = payload.read(Path(path))
    tracebacks.register_sources(loaded.sources)
    captured = loaded.load_into(main.__dict__)
    assert isinstance(captured, FunctionWork)
    data, *buffers = [memoryview(_open_part(part)) for part in assignment.arguments]
    given = pickling.load_each(io.BytesIO(data), buffers, main.__dict__)
    work = assignment.call.shape.with_values(captured.function, given)
    before = dict(main.__dict__)
    result = work.function(*work.args, **work.kwargs)
    missing = object()
    names = [n for n, value in vars(main).items() if before.get(n, missing) is not value]
    return result, vars(main), names


def _open_part(part: bytes | str) -> memoryview | bytearray:
    """Return a part of the arguments as writable memory.

    Args:
        part: The bytes of the part, or a path of a file with the bytes. The file is mapped
            copy-on-write, so that writes do not change it.
    """
    if not isinstance(part, str):
        return bytearray(part)
    with open(part, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def _failure_outcome(error: BaseException) -> JobOutcome:
    try:
        text = tracebacks.format_plain(error)
    except Exception:  # the exception's own __str__ or __repr__ failed, or a deep recursion
        text = traceback.format_exc(limit=1)
    text = tracebacks.shorten(text, tracebacks.TRACEBACK_LIMIT_CHARS)
    etype, message = type(error).__name__, tracebacks.message_of(error)
    return JobOutcome(etype=etype, message=message, traceback=text.splitlines())
