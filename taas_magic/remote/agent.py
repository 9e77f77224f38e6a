"""The agent: one a host, a Dask worker without a nanny, that runs hosts' shares of runs.

It owns a forkserver that has torch and IPython imported, so that a rank starts in tens of
milliseconds, in a clean process. The server is a fork of the agent itself: torch is imported once a
host, not twice at a time, and its memory is shared. The agent joins the pool only when that server
is warm, so a host that the pool knows is a host that is ready.

Run by the supervisor, which passes on the engine's words: one JSON line on standard input with the
scheduler's address and the pool's key (never in argv, where `ps` shows it).
"""

import asyncio
import gc
import importlib
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing import forkserver, resource_tracker, util

from taas_magic.remote.process import die_with_parent

PRELOAD = ["taas_magic.remote.preload"]


def main() -> int:
    """Runs until the pool closes the host or is lost; returns the process's exit code."""
    die_with_parent(os.getppid())
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(PRELOAD)
    gc.disable()  # what is imported stays; to look through it again and again takes 0.2 s
    importlib.import_module("taas_magic.remote.imported")
    fork_server()
    from taas_magic.remote.dask_host import serve

    gc.freeze()
    gc.enable()
    asyncio.run(serve(json.loads(sys.stdin.readline()), warm_forkserver))
    return 0


def fork_server() -> None:
    """Starts multiprocessing's forkserver as a fork of this process, which has no thread yet."""
    resource_tracker.ensure_running()  # a program of its own
    spawn, util.spawnv_passfds = util.spawnv_passfds, _fork  # type: ignore[assignment]
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def _fork(executable: bytes, words: Sequence[str], passed: Sequence[int]) -> int:
    """Runs a `python -c` command in a fork instead of in a new Python; returns its process id.

    It ends with the agent by a signal: the end of its pipe, for which it waits, is also held by
    every rank.
    """
    agent_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    die_with_parent(agent_pid)
    kept = sorted({0, 1, 2, *passed})
    for below, above in pairwise([*kept, os.sysconf("SC_OPEN_MAX")]):
        os.closerange(below + 1, above)
    exec(words[-1], {})
    os._exit(0)


def warm_forkserver() -> None:
    """Returns when the forkserver has imported everything: a process that does nothing has run."""
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    process.start()
    process.join()
