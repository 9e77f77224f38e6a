"""A rank: one torch.distributed process, forked by the agent's forkserver, that runs the cell once.

The forkserver has torch and IPython in memory and the shell made (preload.py). `rank_main` is the
entry point that torch's elastic agent calls in the fork.
"""

import atexit
import faulthandler
import functools
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from taas_magic.capture import modules, payload, pickling
from taas_magic.errors import CaptureError
from taas_magic.journal import RunFolder
from taas_magic.remote import feeding
from taas_magic.remote.guard import Means
from taas_magic.remote.hold import HELD_BY_PYTHON, hold
from taas_magic.remote.link import Link, stack_file
from taas_magic.remote.process import adopt_orphans, die_with_parent
from taas_magic.remote.shell import RankShell, cut, message_of
from taas_magic.remote.spec import VALUE

BEAT_S = 1.0
"""How often a rank says that it lives and where its main thread stands, in seconds."""

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCH")


def rank_main(spec: Mapping[str, Any]) -> None:
    """Runs the cell; returns when it succeeded, else ends the process with exit code 1.

    Args:
        spec: The run's share of this host, as `HostSpec.to_json` gives it.
    """
    os.setsid()
    die_with_parent()
    agent = multiprocessing.parent_process()
    if agent is None or not agent.is_alive():
        os._exit(1)  # it, and so the forkserver, ended before this process asked to end with it
    adopt_orphans()
    # the supervisor ignores interrupts, and what is ignored stays so in all that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    pipes = Path(spec["pipes"])
    link = Link(pipes, attempt, local_rank)
    link.send("up", pid=os.getpid())
    link.redirect_output()
    atexit._clear()
    faulthandler.enable(stack_file(pipes, attempt, local_rank).open("w"))
    _take_environment(spec)
    try:
        _hold_to_store_rule(spec, link, rank, pipes / f"scratch-{attempt}-{local_rank}")
    except Exception as error:  # what is not held runs nothing of the user's
        _send_failure(link, error, traceback.format_exc())
        os._exit(1)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # it starts them
    _use_gloo_without_cuda(link)
    with _heartbeat(link), feeding.feed(Path(spec["run_dir"]), rank, attempt, link):
        succeeded = _run(RankShell.instance(), spec, link, rank)
        if succeeded:
            _finish()
    sys.stdout.flush()
    sys.stderr.flush()
    if not succeeded:
        os._exit(1)
    link.send("done")


def _take_environment(spec: Mapping[str, Any]) -> None:
    """Makes the notebook's environment this rank's, under torchrun's variables."""
    torchrun = {key: value for key, value in os.environ.items() if key.startswith(_TORCHRUN)}
    os.environ.clear()
    os.environ.update({**spec["defaults"], **spec["environ"], **torchrun, **spec["env"]})
    os.chdir(spec["cwd"])
    sys.path[:] = spec["sys_path"]
    sys.argv[:] = ["taas"]


def _hold_to_store_rule(spec: Mapping[str, Any], link: Link, rank: int, scratch: Path) -> None:
    """Before any thread and any of the user's code: the store is rank 0's to write."""
    if spec["store"] is None:
        return
    means = hold(
        spec["store"],
        rank,
        means=Means(spec["means"]),
        scratch=scratch,
        run_folder=spec["run_dir"],
        note=lambda path: link.send("touched", path=path),
    )
    if rank != 0:
        link.send("held", means=means.value)
        if means is Means.PYTHON:
            link.send("note", text=HELD_BY_PYTHON)


def _use_gloo_without_cuda(link: Link) -> None:
    """Lets `init_process_group("nccl")` and `Accelerator()` work without a GPU, by gloo."""
    if torch.cuda.is_available():
        return
    # What `accelerate launch --cpu` sets; without it each rank's Accelerator() trains alone.
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if backend is not None and "nccl" in backend:
            link.send("note", text="no GPU on this host: backend 'nccl' was given, gloo is used")
            backend = "gloo"
            kwargs.pop("device_id", None)
        original(backend, *args, **kwargs)

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group


@contextmanager
def _heartbeat(link: Link) -> Iterator[None]:
    main, ended = threading.get_ident(), threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            frame = sys._current_frames().get(main)
            stack = traceback.extract_stack(frame, limit=8) if frame else []
            where = [f"{entry.filename}:{entry.lineno} in {entry.name}" for entry in stack]
            link.send("beat", stack=where)

    thread = threading.Thread(target=beat, name="taas-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _run(shell: RankShell, spec: Mapping[str, Any], link: Link, rank: int) -> bool:
    namespace = shell.bind(link, shows=rank == 0, colors=spec["colors"])
    folder = RunFolder(Path(spec["run_dir"]))
    try:
        loaded = payload.read(folder.payload)
        modules.install(loaded.modules)
        loaded.load_into(namespace)
    except Exception as error:
        _send_failure(link, error, traceback.format_exc())
        return False
    result = shell.run(loaded.cell, loaded.sources)
    raised = result.error_before_exec or result.error_in_exec
    if isinstance(raised, SystemExit) and not raised.code:
        _leave(link, raised)
    elif raised is not None:
        if isinstance(raised, SystemExit):
            _send_failure(link, raised, _cell_frames(raised))
        return False
    return rank != 0 or _send_result(shell, spec["out"], folder, link)


def _leave(link: Link, error: SystemExit) -> None:
    """Tells the agent that this rank left by `sys.exit(0)`: fine if all do, else a failure."""
    link.send("left", stack=_cell_frames(error).splitlines())


def _cell_frames(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    shown = [frame for frame in frames if "/IPython/core/" not in frame.filename]
    return "".join(traceback.format_list(shown))


def _send_failure(link: Link, error: BaseException, text: str) -> None:
    link.send(
        "failure",
        etype=type(error).__name__,
        message=message_of(error),
        traceback=cut(text, 65536).splitlines(),
    )


def _send_result(shell: RankShell, out: list[str], folder: RunFolder, link: Link) -> bool:
    """Writes what goes back into the notebook; False, after a failure was sent, if it cannot."""
    namespace = shell.user_ns
    missing = [name for name in out if name not in namespace]
    if missing:
        have = ", ".join(sorted(n for n in namespace if not n.startswith("_"))) or "none"
        error = NameError(f"--out {','.join(missing)}: no such variable on rank 0; it has: {have}")
        _send_failure(link, error, "")
        return False
    values = {name: namespace[name] for name in out}
    try:
        results = pickling.dump_named({**values, VALUE: _value(shell.last_value)})
        pickling.write(folder.result, results)
    except CaptureError as unsendable:
        _send_failure(link, unsendable, "")
        return False
    return True


def _value(value: Any) -> Any:
    """The last expression's value, or None where it cannot travel."""
    try:
        pickling.dump(value)
    except CaptureError:
        return None
    return value


def _finish() -> None:
    """Does what Python does when a program ends; the agent ends this process without it.

    A process group that the cell left open stays so until all ranks are done, and is closed with
    their processes: closed here, it would break a collective that a slower rank has just begun.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
