"""A rank: a torch.distributed process, forked by the agent's forkserver, that runs the work.

The work is a cell or a function call. Before the fork, the forkserver has imported torch and
IPython, and has created the shell (`prepare`). The rank has the environment variables that torchrun
sets for its processes. At its end, the rank cleans up as a Python program does.
"""

import atexit
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from traitlets.config import Config

from taas_magic.capture import payload
from taas_magic.capture.home import RankNamespace
from taas_magic.capture.modules import claim_taas
from taas_magic.capture.work import VALUE
from taas_magic.data.loader import RankFeed
from taas_magic.host import cell_main, rendezvous, tracebacks
from taas_magic.host.ddp_groups import keep_ddp_groups
from taas_magic.host.feeding import SessionLoaders, run_feed
from taas_magic.host.heartbeat import send_heartbeats
from taas_magic.host.keyboard import Keyboard
from taas_magic.host.link import OTHERS_END_S, AgentLink, flush_output, rank_file
from taas_magic.host.lone_training import report_lone_training, watch_optimizers
from taas_magic.host.outcome import result_writer, send_outcome
from taas_magic.host.profile import StepProfiler, use_profiler
from taas_magic.host.session_cells import session_prompt
from taas_magic.host.shell import RankShell
from taas_magic.host.spec import LocalShare, ProcessSpec
from taas_magic.host.system import seed_torch_and_numpy
from taas_magic.journal import timeline
from taas_magic.messages import (
    Note,
    RankFinished,
    RankTakesInterrupts,
    Rehearsed,
    StoreProtectionReported,
    StoreWriteReported,
    WrittenFile,
)
from taas_magic.plan import variable_name
from taas_magic.store import redirect
from taas_magic.store.guard import PROTECTED_BY_PYTHON, StoreProtection, apply_rule

attempt_folder = Path()
"""In a rank: the private folder of the attempt, with pipes and scratch folders.

The agent or the supervisor removes the folder.
"""


def prepare() -> None:
    """Import modules and create the shell in the forkserver, so that each rank inherits them.

    1. Find out whether horovod is installed.
    2. If numpy is loaded, import `numpy.random`, which numpy itself imports only on first use.
    3. Create the shell, without a history.
    4. Run a cell that raises an exception. IPython then imports the modules that format tracebacks.
       Otherwise, a failing rank would import these modules while the agent ends the other ranks.
    5. Delete the exception.
    """
    rendezvous.has_horovod()
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")
    config = Config()
    config.HistoryManager.enabled = False  # the history would use a file and a thread
    config.HistoryManager.hist_file = ":memory:"
    shell = RankShell.instance(config=config)
    shell.autoawait = True
    shell.run_cell("raise ValueError", store_history=False)
    _forget_last_exception()  # otherwise, `%debug` opens at this ValueError


def rank_main(spec: ProcessSpec, environ: Mapping[str, str]) -> None:
    """Run the work, or the cells of a session, and clean up as at the end of a Python program.

    First makes this process a rank, connects its registered loaders to the data service, and sets
    torch's number of threads. Without a GPU, process groups use gloo instead of nccl. The process
    groups of DDP models live longer than the models (`keep_ddp_groups`). Except in a rehearsal,
    records whether optimizers make steps without a process group (`watch_optimizers`).

    Returns if the work succeeded; otherwise, ends the process with exit code 1. A session counts as
    successful, even if cells failed. SIGINT after the user's code counts as a failure.

    After successful work and the cleanup, the rank may still have a process group. If so, waits for
    up to `OTHERS_END_S` seconds until all other ranks are ending, too.

    Args:
        spec: Settings of all ranks of this host.
        environ: torchrun's environment variables for this rank (`spec.torchrun_variables`).
    """
    rank = int(environ["RANK"])
    link = _set_up_rank(spec, environ, rank)
    is_session = spec.share.run.is_session
    feeding = closing(SessionLoaders(spec, rank)) if is_session else run_feed(spec.share, rank)
    try:
        with feeding as fed:
            torch.set_num_threads(_thread_count(spec))  # this starts the OpenMP threads
            _use_gloo_without_cuda(link)
            keep_ddp_groups()
            if not spec.share.plan.rehearse:
                watch_optimizers()
            succeeded = _work_and_wait(spec, environ, link, rank, fed)
    except KeyboardInterrupt:  # SIGINT after the user's code: as in plain Python, the rank ends
        succeeded = False
        if not link.is_own:
            os._exit(1)
    _end_program()
    if not succeeded:
        sys.exit(1)
    if dist.is_initialized():
        if environ["GROUP_WORLD_SIZE"] == "1":
            link.wait_for_other_ranks()
        else:
            rendezvous.await_all_ending(environ, OTHERS_END_S)


def _thread_count(spec: ProcessSpec) -> int:
    """Return the rank's number of threads: `OMP_NUM_THREADS`, or the number from the plan.

    `OMP_NUM_THREADS` may list one number for each nesting level; the first one applies to the rank.
    As for OpenMP, a text that is not a positive number counts as not set.
    """
    first = os.environ["OMP_NUM_THREADS"].partition(",")[0].strip()
    host_plan = spec.share.spec.host_plan
    assert host_plan is not None
    return int(first) if first.isdecimal() and int(first) > 0 else host_plan.threads_per_rank


def _set_up_rank(spec: ProcessSpec, environ: Mapping[str, str], rank: int) -> AgentLink:
    """Make this fork of the forkserver a rank that may run the user's code.

    1. Start a new POSIX session (setsid). Until the work starts, SIGINT kills the process.
    2. Connect to the agent, tell the agent that the rank accepts SIGINT, and redirect stdout and
       stderr to the agent.
    3. Make the process write its stack to a file when it crashes or gets `STACK_SIGNAL`.
    4. Apply the run's environment. If horovod is installed, add horovod's environment variables
       from the rendezvous; variables of `--env` override horovod's.
    5. Enforce the rule that only rank 0 writes to the project store. If this fails, send the
       failure and end the process.

    Returns:
        The rank's connection to the agent.
    """
    os.setsid()
    # Until `_run` installs its handler, SIGINT kills the rank silently.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    link = AgentLink(spec.folder, rank)
    link.send(RankTakesInterrupts())
    link.redirect_output()
    faulthandler.enable(rank_file(spec.folder, rank, "stack").open("w"))
    tracebacks.write_stack_on_signal(rank_file(spec.folder, rank, "stacks"))
    _apply_run_environment(spec, environ)
    if rendezvous.has_horovod():
        found = rendezvous.query_horovod(os.environ, lambda text: link.send(Note(text=text)))
        os.environ.update({**found, **spec.share.plan.env})
    claim_taas()
    try:
        _apply_store_rule(spec, link, rank)
    except Exception as error:  # without the store rule, no code of the user may run
        tracebacks.send_failure(link, tracebacks.describe_exception(error, traceback.format_exc()))
        os._exit(1)
    return link


def _work_and_wait(
    spec: ProcessSpec,
    environ: Mapping[str, str],
    link: AgentLink,
    rank: int,
    fed: RankFeed | SessionLoaders | None,
) -> bool:
    """Run the work, or the cells of a session; then wait for the program's other threads.

    Sends heartbeats during the work and the wait. With `--profile`, profiles the work.

    The steps after successful work have this order:

    1. Send the batch counts, wait until the GPU has computed the metrics, and send the metrics.
    2. Send `RankFinished`.
    3. Wait for the other threads, which may still use loaders.
    4. Send the batch counts and metrics once more, without waiting for the GPU.

    After failed work, do only steps 3 and 4. In a session, `Prompt.serve` does steps 1 and 2. If a
    child process that the work forked reaches the end of the work, the child skips all steps: it
    flushes its output and exits.

    Returns:
        Whether the work succeeded; True for a session.

    Raises:
        KeyboardInterrupt: SIGINT arrived after the work, for example during the wait for threads.
    """
    prompt = None
    if isinstance(fed, SessionLoaders):
        prompt = session_prompt(spec, link, rank, environ, fed)
    cut_connections = prompt.cut_connections if prompt is not None else None
    with send_heartbeats(link, fed, cut_connections) as report:
        if prompt is None:
            with _profiled(spec.share, link, rank, fed):
                succeeded = _run(RankShell.instance(), spec, link, rank)
        else:
            prompt.serve(report)
            succeeded = True
        if not link.is_own:  # this process is a child that the work forked
            flush_output()
            os._exit(0 if succeeded else 1)
        if succeeded and prompt is None:
            report(True)  # wait until the GPU has computed the values of all metrics
            link.send(RankFinished())
        # Wait for threads inside the block, because they may still use a loader.
        threading._shutdown()  # type: ignore[attr-defined]
    return succeeded


def _apply_run_environment(spec: ProcessSpec, environ: Mapping[str, str]) -> None:
    """Reset the state inherited from the forkserver, and apply the run's environment.

    - Reset multiprocessing's start method, and seed the random generators of torch and numpy anew.
    - Replace all variables in `os.environ`. The variables of torchrun override the variables of the
      run; the variables of `--env` override both.
    - Make torch and tempfile read the new variables.
    - Set `attempt_folder`, the current folder, `sys.path` and `sys.argv`.
    """
    # Remove the start method that the forkserver has set, so that the cell may set one.
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.current_process().name = "MainProcess"
    seed_torch_and_numpy()
    os.environ.clear()
    os.environ.update({**spec.environ, **environ, **spec.share.plan.env})
    os.environ[cell_main.PAYLOAD] = str(spec.share.folder.payload)
    # At its import in the forkserver, torch has read older values of these variables.
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    if any(name in os.environ for name in ("TORCH_LOGS", "TORCH_TRACE")):
        torch._logging._init_logs()  # type: ignore[attr-defined]
    global attempt_folder
    attempt_folder = spec.folder
    tempfile.tempdir = None  # tempfile then reads TMPDIR of the new environment
    os.chdir(spec.share.cwd)
    sys.path[:] = spec.share.sys_path
    sys.argv[:] = ["taas"]


def _apply_store_rule(spec: ProcessSpec, link: AgentLink, rank: int) -> None:
    """Make this process enforce the rule that only rank 0 writes to the project store.

    From now on, the process reports each write to the agent. In a rehearsal, not even rank 0 writes
    to the project store. A rank other than 0 also reports which mechanism enforces the rule. If
    only Python enforces the rule, a note tells the user.

    Does nothing in two cases: the share has no rule for the project store, or the run only reads
    the project store and is not a rehearsal.

    Call this function before any thread starts and before any code of the user runs.
    """
    share = spec.share
    rule = share.store
    rehearses = share.plan.rehearse > 0
    if rule is None or (share.run.reads_only and not rehearses):
        return
    protection = apply_rule(
        rule,
        f"rank {rank}",
        writes=rank == 0,
        protection=spec.protection,
        scratch=spec.folder / f"scratch-{rank}",
        # the folders of a session's cells are next to the session's own folder
        run_folders=[
            str(share.folder.path.parent) if share.run.is_session else share.run_dir,
            str(spec.folder),
        ],
        on_write=lambda path, is_moved: link.send(StoreWriteReported(path, is_moved)),
        rehearsal=spec.folder / "rehearsal" if rehearses else None,
    )
    if rank != 0:
        link.send(StoreProtectionReported(protection.value))
        if protection is StoreProtection.PYTHON:
            link.send(Note(text=PROTECTED_BY_PYTHON))


@contextmanager
def _profiled(
    share: LocalShare, link: AgentLink, rank: int, fed: RankFeed | SessionLoaders | None
) -> Iterator[None]:
    """With `--profile`, profile the training steps in the `with` block, and write the trace.

    The trace also shows how long the rank waits for batches of registered loaders. A child that the
    cell forked writes no trace. Only rank 0 sends the profiler's notes. Without `--profile`, only
    run the block.
    """
    if not share.plan.profile:
        yield
        return
    file = timeline.trace_file(share.folder.path, share.spec.attempt, rank)

    def note(text: str) -> None:
        if rank == 0:  # the other ranks would send the same note
            link.send(Note(text=text))

    profiler = StepProfiler(share.plan.profile, file, note)
    use_profiler(profiler)
    if isinstance(fed, RankFeed):
        fed.profiler = profiler
    try:
        yield
    finally:
        if link.is_own:
            profiler.close()


def _use_gloo_without_cuda(link: AgentLink) -> None:
    """If there is no GPU, make `init_process_group("nccl")` and `Accelerator()` use gloo.

    For accelerate, set the environment variable `ACCELERATE_USE_CPU`, unless it is set already.
    Replace torch's `init_process_group` by a wrapper. If a caller requests nccl, the wrapper uses
    gloo, ignores the argument `device_id`, and sends the user a note.
    """
    if torch.cuda.is_available():
        return
    # `accelerate launch --cpu` sets this, too. Without it, each rank's Accelerator() trains alone.
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if backend is not None and "nccl" in backend:
            link.send(Note(text='no GPU here: init_process_group("nccl") uses gloo'))
            backend = "gloo"
            kwargs.pop("device_id", None)
        original(backend, *args, **kwargs)

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group


def _run(shell: RankShell, spec: ProcessSpec, link: AgentLink, rank: int) -> bool:
    """Load the work from the payload, run it, and send its results or failure.

    First connects the shell to this rank's agent. If the work cannot be loaded, sends this failure
    and runs nothing. From the start of the work, SIGINT raises KeyboardInterrupt. On rank 0, also
    sends notes about notebook objects that the work changed. In a rehearsal, also sends the rank's
    peak memory and the list of files that it wrote. After success, a note tells the user if each
    rank has trained a model of its own.

    Returns:
        Whether the work succeeded.
    """
    shows = spec.share.plan.shows_displays(rank)
    own_keyboard = Keyboard(link, rank_file(spec.folder, rank, "input"))
    namespace = shell.connect_to_agent(
        link, own_keyboard, shows, colors=spec.share.run.origin.colors
    )
    folder = spec.share.folder
    try:
        loaded = payload.read(folder.payload)
        work = loaded.load_into(namespace)
    except Exception as error:
        tracebacks.send_failure(link, tracebacks.describe_exception(error))
        return False
    texts = {variable_name(text): text for text in spec.share.plan.out}
    out = {name: text for name, text in texts.items() if name != VALUE}
    changes = loaded.change_detector(namespace, out) if rank == 0 else None
    # created before the cell runs, because the cell may change the environment
    scope = RankNamespace(namespace, loaded.kept)
    writer = result_writer(folder, os.environ, link, spec, scope)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    result = shell.run(work, loaded.sources)
    if spec.share.plan.rehearse and link.is_own:
        link.send(_rehearsal_report())
    succeeded = send_outcome(shell, result, link, writer, spec.share.plan.out, changes)
    if succeeded:
        report_lone_training(link, rank, spec.share.plan.working_ranks)
    return succeeded


def _rehearsal_report() -> Rehearsed:
    """Return this rank's peak memory and the files that it wrote, for the report of a rehearsal.

    Files outside the project store are listed separately.
    """
    view = redirect.rehearsal_view()
    written, outside = (view.written(), view.outside()) if view is not None else ({}, {})
    return Rehearsed(
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        written=[WrittenFile(path, size) for path, size in written.items()],
        outside=[WrittenFile(path, size) for path, size in outside.items()],
    )


def _end_program() -> None:
    """Run atexit handlers, delete the program's objects, and flush output, as at a normal exit.

    A fork of the forkserver exits by `os._exit`, without cleanup. So this function cleans up:

    1. Run atexit handlers and `weakref.finalize` callbacks. From the end of this step until the
       function returns, SIGINT is ignored; afterwards, SIGINT ends the process.
    2. Delete the program's objects, so that Python flushes their open files. Modules, functions and
       classes are deleted last.
    3. Flush stdout and stderr.

    This function does not do these other parts of a normal exit:

    - The caller has already waited for threads.
    - multiprocessing ends its child processes when `rank_main` returns.
    - The end of the process closes process groups that the cell left open.
    - Modules are not unloaded, which would take 0.4 s.
    """
    atexit._run_exitfuncs()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt must not leave files incomplete
    shell = RankShell.instance()
    shell.last_value = None
    _forget_last_exception()
    # Modules, functions and classes go last, because a __del__ of the other objects may use them.
    used = types.ModuleType | types.FunctionType | type
    for last in (False, True):
        names = [name for name, value in shell.user_ns.items() if isinstance(value, used) is last]
        shell.user_ns.update(dict.fromkeys(names))
        gc.collect()
    flush_output()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # SIGINT silently ends the wait for other ranks


def _forget_last_exception() -> None:
    """Delete `sys.last_value` and similar variables, in which IPython keeps an exception."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
