"""A rank: one torch.distributed process, forked by the agent's forkserver, that runs the cell once.

The forkserver has torch and IPython in memory and the shell made (preload.py). Inside, everything
is as in a process that torchrun started, and it ends as such a process ends.
"""

import atexit
import faulthandler
import functools
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from taas_magic import short_name
from taas_magic.capture import modules, payload
from taas_magic.host import horovod, results, stacks, tracebacks
from taas_magic.host.cell_main import PAYLOAD
from taas_magic.host.link import Link, feed, stack_file, stacks_file
from taas_magic.host.processes import die_with_parent
from taas_magic.host.shell import RankShell
from taas_magic.host.spec import RankSpec
from taas_magic.journal.folder import RunFolder
from taas_magic.leases import RANK_BEAT_S
from taas_magic.messages import (
    Note,
    RankBeat,
    RankCells,
    RankFinished,
    RankHeld,
    RankLeft,
    RankReported,
    RankSight,
    RankTouched,
    RankUp,
)
from taas_magic.store.guard import HELD_BY_PYTHON, Means, hold

_SHOWN_COLLECTIVES = 3


def rank_main(spec: RankSpec, environ: Mapping[str, str]) -> None:
    """Run the cell; returns when it succeeded, else ends the process with exit code 1.

    Args:
        spec: What all ranks of this host share (`HostSpec.for_ranks`).
        environ: torchrun's variables of this rank (`torchrun.variables`).
    """
    os.setsid()
    die_with_parent()
    agent = multiprocessing.parent_process()
    if agent is None or not agent.is_alive():
        os._exit(1)  # it, and so the forkserver, ended before this process asked to end with it
    rank, local_rank = int(environ["RANK"]), int(environ["LOCAL_RANK"])
    attempt = int(environ["TORCHELASTIC_RESTART_COUNT"])
    # the supervisor ignores interrupts, and what is ignored stays so in all that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    link = Link(spec.pipes, attempt, local_rank)
    link.send(RankUp(os.getpid()))
    link.redirect_output()
    faulthandler.enable(stack_file(spec.pipes, attempt, local_rank).open("w"))
    stacks.listen(stacks_file(spec.pipes, attempt, local_rank))
    _become_a_program(spec, environ)
    if horovod.is_installed():
        found = horovod.ask(os.environ, lambda text: link.send(Note(text=text)))
        os.environ.update({**found, **spec.env})
    short_name.claim()
    try:
        _hold_to_store_rule(spec, link, rank, spec.pipes / f"scratch-{attempt}-{local_rank}")
    except Exception as error:  # what is not held runs nothing of the user's
        tracebacks.send(link, error, traceback.format_exc())
        os._exit(1)
    # it starts them; of the numbers of nested levels the first is that of a rank
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
    _use_gloo_without_cuda(link)
    with _heartbeat(link), feed(spec.run_dir, rank, attempt, link):
        succeeded = _run(RankShell.instance(), spec, link, rank)
    if not link.is_own:  # a child that the cell forked, and that ran on to the cell's end
        _flush()
        os._exit(0 if succeeded else 1)
    if succeeded:
        link.send(RankFinished())
    _end_program()
    if not succeeded:
        sys.exit(1)


def _become_a_program(spec: RankSpec, environ: Mapping[str, str]) -> None:
    """Undo what being a fork of another program has left, and take the notebook's environment."""
    # as in a program that has not chosen one yet: a cell may call set_start_method() itself
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.current_process().name = "MainProcess"
    _seed_anew()
    os.environ.clear()
    os.environ.update({**spec.environ, **environ, **spec.env})
    os.environ[PAYLOAD] = str(RunFolder(spec.run_dir).payload)
    tempfile.tempdir = None  # found anew: TMPDIR may be another
    os.chdir(spec.cwd)
    sys.path[:] = spec.sys_path
    sys.argv[:] = ["taas"]


def _seed_anew() -> None:
    """Give this fork random numbers of its own; Python's `random` does so by itself."""
    torch.default_generator.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _hold_to_store_rule(spec: RankSpec, link: Link, rank: int, scratch: Path) -> None:
    """Before any thread and any of the user's code: the store is rank 0's to write."""
    if spec.store is None:
        return
    means = hold(
        spec.store,
        rank,
        means=spec.means,
        scratch=scratch,
        run_folder=str(spec.run_dir),
        note=lambda path: link.send(RankTouched(path)),
    )
    if rank != 0:
        link.send(RankHeld(means.value))
        if means is Means.PYTHON:
            link.send(Note(text=HELD_BY_PYTHON))


def _use_gloo_without_cuda(link: Link) -> None:
    """Let `init_process_group("nccl")` and `Accelerator()` work without a GPU, by gloo."""
    if torch.cuda.is_available():
        return
    # What `accelerate launch --cpu` sets; without it each rank's Accelerator() trains alone.
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
def _heartbeat(link: Link) -> Iterator[None]:
    main, ended = threading.get_ident(), threading.Event()

    def beat() -> None:
        while not ended.is_set():
            if link.is_asked(RANK_BEAT_S):
                link.send(RankSight(tracebacks.threads(main), _pending()))
            else:
                frame = sys._current_frames().get(main)
                stack = tracebacks.where(frame) if frame else []
                begun, spins = _progress()
                link.send(RankBeat(stack=stack, collectives=begun, spins=spins))

    thread = threading.Thread(target=beat, name="taas-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _recorded(details: bool) -> dict[str, dict[str, Any]]:
    """What torch's flight recorders know of this rank's collectives, by backend.

    A torch of another version, or built without the backend, may lack one.

    Args:
        details: Whether to have each collective: some 0.1 s of work.
    """
    c10d = torch._C._distributed_c10d
    recorders = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    dumps = {backend: getattr(c10d, name, None) for backend, name in recorders.items()}
    if not dist.is_initialized():
        return {}
    return {backend: json.loads(dump(details)) for backend, dump in dumps.items() if dump}


def _progress() -> tuple[list[tuple[int, int]], bool]:
    """How many collectives this rank has begun and ended, and whether it may wait by spinning."""
    counts = {
        backend: (_sum(trace, "last_enqueued_collective"), _sum(trace, "last_completed_collective"))
        for backend, trace in _recorded(details=False).items()
    }
    begun, ended = counts.get("nccl", (0, 0))
    return list(counts.values()), begun > ended


def _sum(trace: Mapping[str, Any], count: str) -> int:
    return sum(int(group[count]) for group in trace.get("pg_status", {}).values())


def _pending() -> list[str]:
    """The first collectives that have not ended, each with its number in its group."""
    entries = [it for trace in _recorded(details=True).values() for it in trace.get("entries", [])]
    return [
        f"{entry['profiling_name'].rpartition(':')[2]} "
        f"#{entry['collective_seq_id'] or entry['p2p_seq_id']}"
        for entry in entries
        if not entry["retired"]
    ][:_SHOWN_COLLECTIVES]


def _run(shell: RankShell, spec: RankSpec, link: Link, rank: int) -> bool:
    namespace = shell.bind(link, shows=rank == 0, colors=spec.colors)
    folder = RunFolder(spec.run_dir)
    try:
        loaded = payload.read(folder.payload)
        modules.install(loaded.modules)
        loaded.load_into(namespace)
    except Exception as error:
        tracebacks.send(link, error)
        return False
    if os.environ["LOCAL_RANK"] == "0":  # the same for all; the agent names frames by them
        cells = {name: (cell.label, cell.text) for name, cell in loaded.sources.items()}
        link.send(RankCells(cells))
    sender = results.ResultSender.of_environ(
        folder.results, lambda text: link.send(Note(text=text))
    )
    result = shell.run(loaded.cell, loaded.sources)
    raised = result.error_before_exec or result.error_in_exec
    if isinstance(raised, SystemExit) and not raised.code:
        if link.is_own:  # fine if all ranks do, else a failure
            link.send(RankLeft(tracebacks.frames(raised)))
        raised = None
    elif isinstance(raised, SystemExit):
        tracebacks.send(link, raised)
    if link.is_own and result.error_before_exec is None:
        failed = raised is not None
        sender.send(shell.users_names(), spec.out, value=shell.last_value, failed=failed)
    if link.is_own and raised is not None:
        link.send(RankReported())
    return raised is None


def _end_program() -> None:
    """End as Python ends a program; a fork of the forkserver leaves by `os._exit` instead.

    Threads are waited for, what atexit and `weakref.finalize` were given is called, the program's
    own objects go, so that files which it left open are written, and output is flushed. What the
    program imported stays: to take that down takes Python 0.4 s. multiprocessing ends its own
    children when the process's function returns.

    A process group that the cell left open is closed with the process.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    shell = RankShell.instance()
    shell.last_value = None
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    for name, value in list(shell.user_ns.items()):
        if not isinstance(value, ModuleType | FunctionType | type):  # what a __del__ may need
            del shell.user_ns[name]
    gc.collect()
    _flush()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
