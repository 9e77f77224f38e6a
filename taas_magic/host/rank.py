"""A rank: a torch.distributed process, forked by the agent's forkserver, that runs the work.

The work is a cell or a function call. The forkserver has imported torch and IPython and created the
shell (`prepare`). The work has the same environment variables as in a process that torchrun has
started, and the rank cleans up at its end as such a process does. The work runs in an IPython shell
that sends its displays and tracebacks to the agent as messages.
"""

import ast
import atexit
import bdb
import builtins
import faulthandler
import functools
import gc
import importlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell
from msgspec import structs
from traitlets import Any as AnyTrait
from traitlets.config import Config

from taas_magic.capture import payload
from taas_magic.capture.changes import ChangeDetector
from taas_magic.capture.digest import plain_digest
from taas_magic.capture.home import RankNamespace
from taas_magic.capture.modules import ModuleSource, claim_taas, install, outdated
from taas_magic.capture.names import assigned_names
from taas_magic.capture.payload import CellSource
from taas_magic.capture.work import CellWork, FunctionWork, Work
from taas_magic.data.loader import RankFeed
from taas_magic.errors import TaasError
from taas_magic.host import cell_main, keyboard, rendezvous, results, tracebacks
from taas_magic.host.feeding import SessionLoaders, run_feed, session_loaders
from taas_magic.host.keyboard import Keyboard
from taas_magic.host.link import CUT_CONNECTIONS, OTHERS_END_S, AgentLink, rank_file
from taas_magic.host.metrics import METRICS_VARIABLE, MetricBuffer, record_tensorboard, use_buffer
from taas_magic.host.process_groups import ProcessGroupPrefixes
from taas_magic.host.profile import StepProfiler, use_profiler
from taas_magic.host.prompt import Prompt, users_names
from taas_magic.host.spec import LocalShare, ProcessSpec
from taas_magic.journal import timeline
from taas_magic.journal.folder import RunFolder
from taas_magic.late_imports import when_imported
from taas_magic.leases import RANK_BEAT_S
from taas_magic.messages import (
    CellNames,
    CellOrder,
    ClearOutput,
    Display,
    Metrics,
    Note,
    RankBeat,
    RankErrorSent,
    RankExited,
    RankFinished,
    RankRaised,
    RankReport,
    RankShowedError,
    RankStackSample,
    RankTakesInterrupts,
    Rehearsed,
    StoreProtectionReported,
    StoreWriteReported,
    WrittenFile,
)
from taas_magic.plan import name_of
from taas_magic.store import redirect
from taas_magic.store.guard import PROTECTED_BY_PYTHON, StoreProtection, apply_rule

IMAGE_LIMIT_BYTES = 20_000_000
MARKUP_LIMIT_BYTES = 5_000_000
"""Maximum size of HTML, JSON and similar displays. A plot that embeds its library has 4 to 5 MB."""

PLAIN_LIMIT_CHARS = 100_000
_SHOWN_COLLECTIVES = 3
_WHAT_MAIN_HAS = "this cell's __main__: of the notebook it has the names that the cell uses"
"""Description of the rank's `__main__` module, which pickle inserts into one of its errors.

pickle raises this error if a cell loads an object whose class `__main__` does not define. A rank's
`__main__` defines only the classes of the cell, and classes of the notebook that the cell uses.
"""

HIDDEN_DISPLAYS = (
    "some ranks displayed outputs that are not shown; --logs all shows the displays of all ranks"
)

_kept: list[Any] = []

_POINTS = 2000
"""Maximum number of points in one `Metrics` event.

The pool's process handles one event at a time. It responds to no other message meanwhile.
"""

attempt_folder = Path()
"""In a rank: the attempt's private folder on this host. The agent or the supervisor removes it."""


def prepare() -> None:
    """Create the shell and import modules in the forkserver, so that each rank inherits them.

    To make IPython import the modules that format tracebacks, the shell runs a cell that raises an
    exception. Without this step, a failing rank would import these modules while the agent already
    ends the other ranks. `numpy.random` is imported here because numpy imports it only on first
    use.
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

    This function returns if the work succeeded. Otherwise, this function ends the process with exit
    code 1. A session counts as succeeded, even if cells of the session failed. If the work has
    succeeded and the rank still has a process group, this function waits up to `OTHERS_END_S`
    seconds for the end of the other ranks.

    Args:
        spec: Settings of all ranks of this host.
        environ: torchrun's variables for this rank (`spec.torchrun_variables`).
    """
    rank = int(environ["RANK"])
    link = _become_a_rank(spec, environ, rank)
    is_session = spec.share.run.is_session
    with session_loaders(spec, rank) if is_session else run_feed(spec.share, rank) as fed:
        # `set_num_threads` starts the OpenMP threads. `OMP_NUM_THREADS` may list one number for
        # each nesting level; the first one applies to the rank.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
        _use_gloo_without_cuda(link)
        succeeded = _work_and_wait(spec, environ, link, rank, fed)
    _end_program()
    if not succeeded:
        sys.exit(1)
    if dist.is_initialized():
        if environ["GROUP_WORLD_SIZE"] == "1":
            link.await_others()
        else:
            rendezvous.await_all(environ, OTHERS_END_S)


def _become_a_rank(spec: ProcessSpec, environ: Mapping[str, str], rank: int) -> AgentLink:
    """Make this fork of the forkserver a rank that may run the user's code.

    Connects the process to the agent, redirects its output, applies the run's environment, and
    protects the project store from the rank's writes. If the protection fails, ends the process.

    Returns:
        The rank's connection to its agent.
    """
    os.setsid()
    # Until `_run` installs its handler, SIGINT kills the rank silently.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    link = AgentLink(spec.folder, rank)
    link.send(RankTakesInterrupts())
    link.redirect_output()
    faulthandler.enable(rank_file(spec.folder, rank, "stack").open("w"))
    tracebacks.write_stack_on_signal(rank_file(spec.folder, rank, "stacks"))
    _become_a_program(spec, environ)
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

    Sends heartbeats during this time. A child that the work forked may also reach the end of the
    work. This function then ends the child's process, so that only the rank continues.

    Returns:
        Whether the work succeeded.
    """
    prompt = None
    if isinstance(fed, SessionLoaders):
        prompt = _prompt(spec, link, rank, environ, fed)
    with _heartbeat(link, fed, prompt.cut_connections if prompt is not None else None) as report:
        if prompt is None:
            with _profiled(spec.share, link, rank, fed):
                succeeded = _run(RankShell.instance(), spec, link, rank)
        else:
            prompt.serve(report)
            succeeded = True
        if not link.is_own:  # this process is a child that the work forked
            flush()
            os._exit(0 if succeeded else 1)
        try:
            if succeeded and prompt is None:
                link.send(RankFinished())
            # Wait for threads inside the block, because they may still use a loader.
            threading._shutdown()  # type: ignore[attr-defined]
        except KeyboardInterrupt:  # as in plain Python, the rank then ends despite its threads
            succeeded = False
    return succeeded


def _become_a_program(spec: ProcessSpec, environ: Mapping[str, str]) -> None:
    """Reset the state inherited from the forkserver, and apply the notebook's environment.

    Sets new random seeds, the environment variables, the working directory and the import path.
    """
    # Remove the start method that the forkserver has set, so that the cell may set one.
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.current_process().name = "MainProcess"
    torch.default_generator.seed()  # Python's `random` reseeds itself after a fork
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
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

    Also reports writes and the kind of protection to the agent. Call before any thread starts and
    before any code of the user runs.
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
        run_folder=str(share.folder.path.parent) if share.run.is_session else share.run_dir,
        on_write=lambda path: link.send(StoreWriteReported(path)),
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
    """If the run has `--profile`, profile the steps in the `with` block, and write the profile."""
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
    """Make `init_process_group("nccl")` and `Accelerator()` use gloo if there is no GPU."""
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


@contextmanager
def _heartbeat(
    link: AgentLink,
    fed: RankFeed | SessionLoaders | None,
    cut_connections: Callable[[int], None] | None = None,
) -> Iterator[Callable[[], None]]:
    """Send heartbeats in a thread until the block ends.

    With each heartbeat, the thread sends the main thread's stack, the progress of collectives, the
    counts of received batches, and the metrics logged since the last heartbeat. Counts and metrics
    are sent once more at the block's end. If the agent requests a stack report, the thread sends
    the stacks of all threads and the pending collectives instead of the heartbeat.

    Args:
        link: The rank's connection to its agent.
        fed: Access to the run's data service; None if the cell uses no registered loader.
        cut_connections: Function that the thread calls when the agent sends `CUT_CONNECTIONS`. Its
            argument is the number of the cell whose collective must end. None outside a session.

    Yields:
        Function that sends the counts and metrics immediately.
    """
    main, ended, reporting = threading.get_ident(), threading.Event(), threading.Lock()
    run_address = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    metrics = MetricBuffer(int(os.environ["RANK"]))
    use_buffer(metrics)
    if os.environ.get(METRICS_VARIABLE) != "0":
        when_imported("torch.utils.tensorboard.writer", record_tensorboard)

    def send() -> None:
        if fed is not None and (counts := fed.counts()):
            link.send(RankReport(loaders=counts, cores=len(os.sched_getaffinity(0))))
        points = metrics.pop_scalars()
        for at in range(0, len(points), _POINTS):
            link.send(Metrics(points=points[at : at + _POINTS]))

    def report() -> None:
        with reporting:  # one thread at a time, so that the newest counts are sent last
            send()

    def beat() -> None:
        while not ended.is_set():
            asked = link.wait_for_request(RANK_BEAT_S)
            if CUT_CONNECTIONS in asked and cut_connections is not None:
                cut_connections(int(asked.rpartition(CUT_CONNECTIONS)[2].split()[0]))
                continue
            if asked:
                link.send(RankStackSample(tracebacks.threads(main), _pending()))
                if why := _why_ranks_wait(run_address):
                    link.send(Note(text=why))
            else:
                begun, spins = _progress()
                stack = tracebacks.where(main)
                link.send(RankBeat(stack=stack, collectives=begun, spins=spins))
            with reporting:
                if not ended.is_set():
                    send()

    thread = threading.Thread(target=beat, name="taas-heartbeat", daemon=True)
    thread.start()
    try:
        yield report
    finally:
        ended.set()
        report()
        use_buffer(None)


def _why_ranks_wait(run_address: Mapping[str, str]) -> str:
    """Return a message for the user if the cell's own rendezvous address makes all ranks wait.

    While torchrun's variable TORCHELASTIC_USE_AGENT_STORE is set, every rank connects to the
    rendezvous address as a client. If the cell has changed the address, all ranks wait forever.
    Return "" if the address is unchanged or the variable is not set.

    Args:
        run_address: `MASTER_ADDR` and `MASTER_PORT` as the run set them.
    """
    changed = [name for name, value in run_address.items() if os.environ.get(name) != value]
    if not changed or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return ""
    names = " and ".join(changed)
    return (
        f"the program changed {names} while TORCHELASTIC_USE_AGENT_STORE is set, so that no rank "
        f"listens at this address and all ranks wait. Leave {names} unchanged, or delete "
        "TORCHELASTIC_USE_AGENT_STORE from os.environ first"
    )


def _recorded(details: bool) -> dict[str, dict[str, Any]]:
    """Return the records of torch's flight recorders about this rank's collectives, by backend.

    A flight recorder is torch's log of the latest collectives of a process.

    Backends without a flight recorder in this version of torch are left out. The result is empty if
    there is no process group.

    Args:
        details: Whether the records include each collective. If True, the call takes about 0.1 s.
    """
    c10d = torch._C._distributed_c10d
    recorders = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    dumps = {backend: getattr(c10d, name, None) for backend, name in recorders.items()}
    if not dist.is_initialized():
        return {}
    return {backend: json.loads(dump(details)) for backend, dump in dumps.items() if dump}


def _progress() -> tuple[list[tuple[int, int]], bool]:
    """Return the progress of this rank's collectives.

    Returns:
        Two values. First, for each backend, the number of collectives that have begun, and the
        number that have ended. Second, whether this rank may busy-wait for an NCCL collective.
    """
    counts = {}
    for backend, trace in _recorded(details=False).items():
        groups = list(trace.get("pg_status", {}).values())
        begun = sum(int(group["last_enqueued_collective"]) for group in groups)
        counts[backend] = begun, sum(int(group["last_completed_collective"]) for group in groups)
    begun, ended = counts.get("nccl", (0, 0))
    return list(counts.values()), begun > ended


def _pending() -> list[str]:
    """Return the names of this rank's pending collectives, such as "all_reduce #12".

    A name ends in the number of the collective within its process group. The list has at most
    `_SHOWN_COLLECTIVES` names.
    """
    entries = [it for trace in _recorded(details=True).values() for it in trace.get("entries", [])]
    return [
        f"{entry['profiling_name'].rpartition(':')[2]} "
        f"#{entry['collective_seq_id'] or entry['p2p_seq_id']}"
        for entry in entries
        if not entry["retired"]
    ][:_SHOWN_COLLECTIVES]


def _run(shell: "RankShell", spec: ProcessSpec, link: AgentLink, rank: int) -> bool:
    """Load the work from the payload, run it, and send its results or failure.

    Returns:
        Whether the work succeeded.
    """
    shows = spec.share.plan.shows_displays(rank)
    own_keyboard = Keyboard(link, rank_file(spec.folder, rank, "input"))
    namespace = shell.bind(link, own_keyboard, shows, colors=spec.share.run.origin.colors)
    folder = spec.share.folder
    try:
        loaded = payload.read(folder.payload)
        install(loaded.modules)
        work = loaded.load_into(namespace)
    except Exception as error:
        tracebacks.send_failure(link, tracebacks.describe_exception(error))
        return False
    out = {name_of(text) for text in spec.share.plan.out}
    changes = loaded.change_detector(namespace, out) if rank == 0 else None
    # created before the cell runs, because the cell may change the environment
    scope = RankNamespace(namespace, loaded.kept)
    writer = _result_writer(folder, os.environ, link, spec, scope)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    result = shell.run(work, loaded.sources)
    if spec.share.plan.rehearse and link.is_own:
        link.send(_rehearsed())
    return _report(shell, result, link, writer, spec.share.plan.out, changes)


def _rehearsed() -> Rehearsed:
    """Return this rank's data for the report of a rehearsal.

    The data are the peak memory, and the files that the rank has written inside and outside the
    project store.
    """
    view = redirect.rehearsal_view()
    written, outside = (view.written(), view.outside()) if view is not None else ({}, {})
    return Rehearsed(
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        written=[WrittenFile(path, size) for path, size in written.items()],
        outside=[WrittenFile(path, size) for path, size in outside.items()],
    )


def _result_writer(
    folder: RunFolder,
    environ: Mapping[str, str],
    link: AgentLink,
    spec: ProcessSpec,
    scope: RankNamespace,
) -> results.ResultWriter:
    return results.ResultWriter(
        folder.results,
        environ,
        lambda text: link.send(Note(text=text)),
        scope,
        spec.share.plan.untrusted_pool,
    )


def _report(
    shell: "RankShell",
    result: ExecutionResult,
    link: AgentLink,
    writer: results.ResultWriter,
    out: Sequence[str],
    changes: ChangeDetector | None = None,
    *,
    is_session: bool = False,
) -> bool:
    """Send the cell's results or failure to the agent; return whether the cell succeeded.

    Args:
        shell: Shell that ran the cell.
        result: IPython's result of the cell.
        link: The rank's connection to its agent.
        writer: Writer of results.
        out: Values of `--out`, such as "loss@all".
        changes: Detector of notebook objects that the cell changed. For each change, this function
            sends a note to the user. None to send no such notes.
        is_session: Whether the rank belongs to a session, in which `sys.exit(0)` only ends the
            cell.
    """
    failure = _failure(shell, result)
    if failure is not None:
        tracebacks.send_failure(link, failure)
    elif link.is_own and result.error_in_exec is not None and not is_session:  # sys.exit(0)
        # If all ranks leave by sys.exit(0), the run succeeds; otherwise it fails.
        link.send(RankExited(tracebacks.frames(result.error_in_exec)))
    for text in changes.notes(shell.user_ns) if changes and link.is_own and failure is None else ():
        link.send(Note(text=text))
    if link.is_own and result.error_before_exec is None:
        failed = failure is not None
        try:
            writer.write(shell.users_names(), out, value=shell.last_value, failed=failed)
        except KeyboardInterrupt:  # the values written before the interrupt are kept
            return False
    if link.is_own and failure is not None:
        link.send(RankErrorSent())
    return failure is None


def _failure(shell: "RankShell", result: ExecutionResult) -> RankRaised | None:
    """Return the failure of the cell; None if the cell succeeded.

    The failure is the first exception that IPython has shown, even if the cell continued after it.
    For example, `%run`, `%time`, `%%capture` and `run_cell` show an exception of their code, and
    the cell continues. If IPython has shown none, the failure is the exception that ended the cell.
    `sys.exit(0)` is not a failure.
    """
    raised = result.error_before_exec or result.error_in_exec
    if shell.failure is not None or raised is None:
        return shell.failure
    if isinstance(raised, SystemExit) and not raised.code:
        return None
    if isinstance(raised, bdb.BdbQuit):
        is_refused = shell.keyboard is not None and shell.keyboard.was_refused
        raised.args = (keyboard.NO_DEBUGGER if is_refused else keyboard.USER_QUIT,)
    # IPython has not shown this exception: it is BdbQuit, or a handler of the user has hidden it.
    return tracebacks.describe_exception(raised)


class _SessionCells:
    """Runner of a session's cells on this rank. All cells share one namespace."""

    def __init__(
        self, spec: ProcessSpec, link: AgentLink, environ: Mapping[str, str], feeds: SessionLoaders
    ) -> None:
        self._spec, self._link, self._environ, self._feeds = spec, link, environ, feeds
        self._shell = RankShell.instance()
        own_keyboard = Keyboard(link, rank_file(spec.folder, int(environ["RANK"]), "input"))
        colors = spec.share.run.origin.colors
        self._namespace = self._shell.bind(link, own_keyboard, shows=False, colors=colors)
        self._modules: dict[str, ModuleSource] = {}
        self._kept: frozenset[str] = frozenset()
        self._groups = ProcessGroupPrefixes()
        self._groups.install()

    def run(self, order: CellOrder) -> bool:
        """Run a cell, and send its results or failure; return whether the cell succeeded.

        Also sends the names that the cell has assigned or deleted. If this rank does not take part
        in the cell, only the results of `--out` are sent.
        """
        folder, shell, link = RunFolder(Path(order.run_dir)), self._shell, self._link
        shell.shows, shell.last_value = order.shows, None
        os.environ[cell_main.PAYLOAD] = str(folder.payload)
        # A new process group must not use keys of an earlier group in the key-value store.
        self._groups.begin_cell(order.number)
        redirect.begin_run()
        try:
            loaded = payload.read(folder.payload)
            settings = loaded.load_settings()
            if order.takes_part and (names := outdated(loaded.modules)):
                link.send(Note(text=_outdated_note(names)))
            self._modules |= loaded.modules
            loaded = structs.replace(loaded, modules=self._modules)
            install(self._modules)
            self._feeds.begin_cell(order.number, folder.path, settings)
            work = loaded.load_into(self._namespace)
        except Exception as error:
            tracebacks.send_failure(link, tracebacks.describe_exception(error))
            link.send(RankErrorSent())
            return False
        sets = self._assigned_by(work) if order.takes_part else set()
        self._kept = (self._kept | loaded.kept) - sets
        scope = RankNamespace(self._namespace, self._kept)
        writer = _result_writer(folder, self._environ, link, self._spec, scope)
        before = {name: id(value) for name, value in self._names().items()}
        if order.takes_part:
            result = shell.run(work, loaded.sources)
            succeeded = _report(shell, result, link, writer, order.out, is_session=True)
        else:
            writer.write(shell.users_names(), order.out, value=None, failed=False)
            succeeded = True
        if link.is_own:
            changes = self._changes(before, sets)
            changes.fetched = self._feeds.end_cell()
            self._kept -= set(changes.assigned)
            link.send(changes)
            flush()
        return succeeded

    def _names(self) -> dict[str, Any]:
        return users_names(self._shell.users_names())

    def _assigned_by(self, work: Work) -> set[str]:
        """Return the names that the cell's text assigns; empty if the work is a function call."""
        if isinstance(work, CellWork):
            with suppress(SyntaxError):  # reported when the cell runs
                return assigned_names(work.python)
        return set()

    def _changes(self, before: Mapping[str, int], sets: Collection[str]) -> CellNames:
        """Return the names that the cell assigned and the names that it deleted.

        A name counts as assigned if the `id` of its value has changed. This check may miss a new
        value, because Python may reuse the `id` of a freed value. So every name that the cell's
        text assigns counts as assigned, too.

        Args:
            before: The `id` of each value before the cell, by name.
            sets: Names that the cell's text assigns.
        """
        now = self._names()
        assigned = [
            name for name, value in now.items() if name in sets or before.get(name) != id(value)
        ]
        digests = {name: plain_digest(now[name]) for name in assigned}
        return CellNames(
            assigned=assigned,
            deleted=[name for name in before if name not in now],
            plain={name: digest for name, digest in digests.items() if digest},
        )


def _outdated_note(names: Sequence[str]) -> str:
    """Return a note that the files of modules have changed since the session imported them."""
    modules = ", ".join(f"`{name}`" for name in names)
    return (
        f"the ranks use the old code of {modules}, edited since the session imported it: call "
        f"importlib.reload({names[0]}) in a cell of the session, or `%taas restart`"
    )


def _prompt(
    spec: ProcessSpec, link: AgentLink, rank: int, environ: Mapping[str, str], feeds: SessionLoaders
) -> Prompt:
    """Create the prompt of a rank that belongs to a session."""
    cells = _SessionCells(spec, link, environ, feeds)

    def has_pending() -> bool:
        return any(begun > ended for begun, ended in _progress()[0])

    return Prompt(link, spec.folder, rank, cells.run, has_pending)


def _end_program() -> None:
    """Clean up as Python does at a normal exit.

    A fork of the forkserver exits by `os._exit`, without cleanup. So this function runs atexit
    handlers and `weakref.finalize` callbacks. Then it deletes the program's objects, so that Python
    flushes their open files. Last, it flushes stdout and stderr.

    These parts of a normal exit do not happen here:

    - Waiting for threads. The caller has already waited.
    - Ending the child processes that multiprocessing has started. multiprocessing ends these
      children when `rank_main` returns.
    - Closing process groups that the cell left open. The end of the process closes these groups.
    - Unloading modules, which would take 0.4 s.
    """
    atexit._run_exitfuncs()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt must not leave files incomplete
    _keep_groups()
    shell = RankShell.instance()
    shell.last_value = None
    _forget_last_exception()
    # Modules, functions and classes go last, because a __del__ of the other objects may use them.
    used = types.ModuleType | types.FunctionType | type
    for last in (False, True):
        names = [name for name, value in shell.user_ns.items() if isinstance(value, used) is last]
        shell.user_ns.update(dict.fromkeys(names))
        gc.collect()
    flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # SIGINT silently ends the wait for other ranks


def _forget_last_exception() -> None:
    """Remove the exception that the shell keeps for debuggers."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)


def _keep_groups() -> None:
    """Keep the process groups of remaining DDP models alive until the process ends.

    If the cell has called `destroy_process_group`, a model has the last reference to its process
    group. To delete such a model could cause a deadlock: torch joins gloo's threads while it holds
    the GIL, and one of these threads may wait for the GIL (pytorch/pytorch#56297). A normal exit of
    Python causes no deadlock, because Python then ends threads that request the GIL.
    """
    ddp = torch.nn.parallel.DistributedDataParallel
    _kept.extend(it.process_group for it in gc.get_objects() if issubclass(type(it), ddp))


def flush() -> None:
    """Flush stdout and stderr, unless the cell has closed them."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()


def _use_text_bars() -> None:
    """Make tqdm.notebook draw text bars for the status header, because ranks have no widgets."""
    module, text = sys.modules["tqdm.notebook"], importlib.import_module("tqdm.std")
    for name in ("tqdm", "tqdm_notebook"):
        setattr(module, name, text.tqdm)
    for name in ("trange", "tnrange"):
        setattr(module, name, text.trange)


def _find_the_notebooks_folder() -> None:
    """Make hydra's `initialize(config_path=…)` search the notebook's folder.

    Without this function, hydra searches this folder only in a Jupyter kernel, which hydra
    recognizes by the class name of the IPython shell.
    """
    vars(sys.modules["hydra._internal.utils"])["is_notebook"] = lambda: True


def bounded(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a display without the representations that are too large for a browser.

    The limits are `IMAGE_LIMIT_BYTES` for images except SVG, and `MARKUP_LIMIT_BYTES` otherwise.
    The text representation then names each omitted representation. A text longer than
    `PLAIN_LIMIT_CHARS` is cut.

    Args:
        data: The representations of the display, by MIME type.
    """
    kept, notes = {}, []
    for form, value in data.items():
        is_image = form.startswith("image/") and form != "image/svg+xml"
        limit = IMAGE_LIMIT_BYTES if is_image else MARKUP_LIMIT_BYTES
        is_text = isinstance(value, str | bytes)
        size = len(value if is_text else json.dumps(value, default=repr))
        if form == "text/plain" or size <= limit:
            kept[form] = value
        else:
            notes.append(
                f"[{form} of {size / 1e6:,.0f} MB is not shown: the limit is "
                f"{limit / 1e6:.0f} MB; save it to a file]"
            )
    plain = tracebacks.shorten(str(kept.get("text/plain", "")), PLAIN_LIMIT_CHARS)
    if plain or notes:
        kept["text/plain"] = "\n".join([*notes, *filter(None, [plain])])
    return kept


class _CellCompiler(CachingCompiler):
    """A compiler that compiles the cell under the file name that the notebook's kernel uses."""

    cell: CellWork | None = None
    labels: Mapping[str, str] = {}

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        """Return the file name for a piece of code, and store the code in linecache.

        The `%%taas` cell is not stored here, because `tracebacks.register_sources` has stored it.
        """
        if self.cell is not None and raw_code == self.cell.source:
            return self.cell.filename
        name: str = super().cache(transformed_code, number, raw_code)
        return name

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        """Return how tracebacks name a cell, for example `("Cell", "In[5]")`.

        Args:
            name: File name under which the code was compiled.

        Returns:
            The two parts of the name; None if the code is not a cell.
        """
        if name in self.labels:
            label, _, number = self.labels[name].partition(" ")
            return label, number
        found: tuple[str, str] | None = super().format_code_name(name)
        return found


class _LinkDisplayHook(DisplayHook):
    """A display hook that sends the value of the cell's last expression to the agent."""

    def quiet(self) -> bool:
        """Return whether the cell ends in a semicolon, which suppresses the display of its value.

        IPython's own method reads the history, which is disabled on ranks.
        """
        cell = RankShell.instance().compile.cell
        return cell is not None and self.semicolon_at_end_of_expression(cell.source)

    def __call__(self, result: Any = None) -> None:
        if result is None or self.quiet():
            return
        shell = RankShell.instance()
        shell.last_value = result
        data, metadata = self.compute_format_data(result)
        if shell.shows:
            shell.publish(data, metadata)
        self.update_user_ns(result)


class _LinkDisplayPublisher(DisplayPublisher):
    """A display publisher that sends the displays of `display(...)` to the agent."""

    def publish(self, data: Any, metadata: Any = None, **kwargs: Any) -> None:
        display_id = (kwargs.get("transient") or {}).get("display_id")
        RankShell.instance().publish(data, metadata or {}, display_id, bool(kwargs.get("update")))

    def clear_output(self, wait: bool = False) -> None:
        shell = RankShell.instance()
        if shell.link is not None and shell.shows:
            shell.link.send(ClearOutput(wait=wait))


class _LineShift(ast.NodeTransformer):
    """An AST transformer that gives code the line numbers of the notebook's cell.

    The rank runs only the lines below the `%%taas` line. Without this class, tracebacks would give
    number 1 to the first line below `%%taas`. Code that the cell passes to IPython, by `%%capture`
    or `run_cell`, keeps its own line numbers.

    Args:
        shell: The shell that runs the cell.
        lines: Number of lines of the notebook's cell up to and including the `%%taas` line.
    """

    def __init__(self, shell: "RankShell", lines: int) -> None:
        self._shell, self._lines = shell, lines

    def visit(self, node: ast.AST) -> ast.AST:
        return node if self._shell.depth else ast.increment_lineno(node, self._lines)


class RankShell(InteractiveShell):
    """The IPython shell of a rank.

    The forkserver creates the shell, and each rank inherits it. This saves 30 ms at each start.

    Attributes:
        link: The rank's connection to its agent; None in the forkserver.
        keyboard: Source of the lines that the user types; None in the forkserver.
        last_value: Value of the cell's last expression.
        failure: First exception that IPython has shown during the work; None if there is none.
        depth: Nesting depth of the running code: 1 in the cell, 2 in a `%%capture` of the cell; 0
            if no code runs.
        shows: Whether displays of this rank are sent to the notebook (`Plan.shows_displays`).
    """

    link: AgentLink | None = None
    keyboard: Keyboard | None = None
    shows = False
    last_value: Any = None
    failure: RankRaised | None = None
    depth = 0
    _drawn = ""
    _has_hidden = False
    _at_start: Mapping[str, Any] = {}
    display_pub_class = AnyTrait(_LinkDisplayPublisher)
    displayhook_class = AnyTrait(_LinkDisplayHook)
    compiler_class = AnyTrait(_CellCompiler)

    def bind(
        self, link: AgentLink, own_keyboard: Keyboard, shows: bool, colors: str
    ) -> dict[str, Any]:
        """Connect the shell to this rank's agent and keyboard, and create a clean `__main__`.

        The `__spec__` of `__main__` is that of `python -m taas_magic.host.cell_main`. So spawned
        children use `cell_main` as their main module, and find the cell's definitions there.

        Args:
            link: The rank's connection to its agent.
            own_keyboard: Source of the lines that the user types on this rank.
            shows: Whether displays of this rank are sent to the notebook.
            colors: IPython's colour scheme, for tracebacks.

        Returns:
            The cell's namespace: `sys.modules["__main__"].__dict__`, as in a kernel. So an object
            that is pickled by its name in `__main__` can be unpickled in this process and its
            forks.
        """
        main = types.ModuleType("__main__")
        main.__spec__ = ModuleSpec(cell_main.__name__, None, origin=_WHAT_MAIN_HAS)
        # Spawned children call this module `__mp_main__`, also in objects that they send back.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        self.user_module, self.user_ns = main, main.__dict__
        self.init_user_ns()
        # Restore Python's own functions. IPython's `exit` and `quit` accept no exit code, and its
        # `open` accepts no descriptor below 3.
        main.__dict__.update({name: vars(builtins)[name] for name in ("exit", "quit")})
        del main.__dict__["open"]
        main.__dict__["_dh"] = [os.getcwd()]  # hydra reads the notebook's folder here
        self._at_start = dict(main.__dict__)
        self.link, self.keyboard, self.shows = link, own_keyboard, shows
        own_keyboard.install()
        self.colors = colors
        if hasattr(self.InteractiveTB, "set_colors"):  # IPython 8 needs this call for tracebacks
            self.InteractiveTB.set_colors(colors)
        # If ps1 is set, Lightning assumes an interactive session and refuses DDP
        for name in ("ps1", "ps2", "ps3"):
            sys.__dict__.pop(name, None)
        when_imported("tqdm.notebook", _use_text_bars)
        when_imported("hydra._internal.utils", _find_the_notebooks_folder)
        return main.__dict__

    def run(self, work: Work, sources: Mapping[str, CellSource]) -> ExecutionResult:
        """Run the work, and return IPython's result.

        If an exception ends the work, `showtraceback` sends the failure before this method returns.

        Args:
            work: The cell or function call.
            sources: The notebook's cells, by the file name under which each cell was compiled.
        """
        compiler = self.compile
        assert isinstance(compiler, _CellCompiler)
        compiler.labels = tracebacks.register_sources(sources)
        threading.excepthook = tracebacks.print_of_thread
        sys.unraisablehook = tracebacks.print_unraisable
        # IPython warns about every SystemExit. A cell may end by SystemExit, as a script may.
        warnings.filterwarnings("ignore", "To exit: use", UserWarning)
        self.failure = None
        if isinstance(work, FunctionWork):
            compiler.cell = None
            return self._call(work)
        compiler.cell = work
        compiler.flags |= work.compiler_flags
        self.ast_transformers[:] = [
            *(it for it in self.ast_transformers if not isinstance(it, _LineShift)),
            _LineShift(self, work.lines_above),
        ]
        return self.run_cell(work.source, store_history=False)

    def transform_cell(self, raw_cell: str) -> str:
        """Return the Python code for a text with IPython syntax.

        For the text of the cell itself, return the code into which the kernel has transformed it.
        """
        cell: CellWork | None = self.compile.cell
        if cell is not None and raw_cell == cell.source:
            return cell.python
        python: str = super().transform_cell(raw_cell)
        return python

    def _call(self, work: FunctionWork) -> ExecutionResult:
        """Call the work's function, with the same IPython events and hooks as in `run_cell`.

        If the function raises an exception, the traceback starts at the frame of the function.
        """
        info = ExecutionInfo(work.raw, False, False, True, None)
        result = ExecutionResult(info)
        self.events.trigger("pre_execute")
        self.events.trigger("pre_run_cell", info)
        self.depth += 1
        try:
            with self.builtin_trap, self.display_trap:
                self.last_value = work.function(*work.args, **work.kwargs)
        except BaseException as error:  # like `run_cell`, which catches every exception
            assert error.__traceback__ is not None
            result.error_in_exec = error.with_traceback(error.__traceback__.tb_next)
            if not isinstance(error, bdb.BdbQuit):
                self.showtraceback(tb_offset=0, running_compiled_code=True)
        finally:
            self.depth -= 1
            self.events.trigger("post_execute")
            self.events.trigger("post_run_cell", result)
        return result

    def users_names(self) -> dict[str, Any]:
        """Return the user's variables: the namespace without the values that `bind` has set."""
        start = self._at_start
        return {n: v for n, v in self.user_ns.items() if n not in start or start[n] is not v}

    def atexit_operations(self) -> None:
        """Do nothing. IPython's method deletes the cell's names, which a `__del__` may need."""

    def enable_gui(self, gui: Any = None) -> None:
        """Do nothing, because the backend of `%matplotlib inline` is active already."""

    def publish(
        self, data: Any, metadata: Any, display_id: str | None = None, update: bool = False
    ) -> None:
        """Send a display to the agent if the notebook shows displays of this rank.

        Otherwise, drop the display; for the first one, send a note about hidden displays.
        """
        if self.link is not None and self.shows:
            shown = bounded(data)
            self.link.send(
                Display(data=shown, metadata=metadata, display_id=display_id, update=update)
            )
        elif self.link is not None and not self._has_hidden:
            self._has_hidden = True
            self.link.send(Note(text=HIDDEN_DISPLAYS))

    async def run_code(self, *args: Any, **kwargs: Any) -> bool:
        """Run code as IPython does, and count the nesting depth."""
        self.depth += 1
        try:
            has_failed: bool = await super().run_code(*args, **kwargs)
        finally:
            self.depth -= 1
        return has_failed

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Record an exception that IPython shows, and report it to the agent.

        The first such exception is the rank's failure, even if the cell continues after it. The
        rank sends its message to the agent before IPython formats the traceback, which takes up to
        0.1 s. So the order in which ranks' messages arrive shows which rank has failed first.

        - If the exception ends the cell, the message has a traceback in Python's format. The agent
          may kill the rank before IPython's traceback is ready.
        - If the cell continues, the message has no traceback. This method writes the traceback to
          the log, because Jupyter would show it in the output of a cell without `%%taas`, too.
        """
        value = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        if self.link is None:  # in the forkserver (`prepare`)
            super().showtraceback(exc_tuple, *args, **kwargs)
            return
        is_exit = isinstance(value, SystemExit)
        if value is None or (isinstance(value, SystemExit) and not value.code):
            return
        ends_cell = not self.depth or (self.depth == 1 and kwargs.get("running_compiled_code"))
        tracebacks.remove_own_frames(value)
        shown = tracebacks.describe_exception(value)
        if ends_cell and self.link.is_own:
            self.link.send(self.failure or shown)
        elif self.link.is_own:
            self.link.send(RankShowedError())
        # IPython shows the frames of an exception group but not its exceptions. TaasErrors format
        # themselves.
        is_plain = isinstance(value, SyntaxError | TaasError) or tracebacks.is_group(value)
        if not is_plain and not is_exit and self.link.is_own:
            self._drawn = ""
            super().showtraceback((type(value), value, value.__traceback__), *args, **kwargs)
            shown = tracebacks.describe_exception(value, self._drawn) if self._drawn else shown
        # Here, `sys.exit(3)` in a `%run` of the cell looks the same as `sys.exit(3)` in the cell.
        # So every SystemExit counts as the end of the cell.
        if self.failure is not None or not (ends_cell or is_exit):
            shown.is_logged = True
            # Not `sys.stderr`, which `%%capture` may redirect: errors must not be captured.
            if sys.__stderr__ is not None:
                with suppress(ValueError):  # the cell has closed stderr
                    sys.__stderr__.write("\n".join([*shown.traceback, ""]))
        self.failure = self.failure or shown

    def showsyntaxerror(self, *args: Any, **kwargs: Any) -> None:
        """Record a syntax error as `showtraceback` records any other exception."""
        self.showtraceback(running_compiled_code=kwargs.get("running_compiled_code", False))

    def _showtraceback(self, etype: Any, evalue: Any, stb: Any) -> None:
        self._drawn = self.InteractiveTB.stb2text(stb) if stb else ""
