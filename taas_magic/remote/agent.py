"""The agent: one a host, a Dask worker without a nanny, that runs hosts' shares of runs.

It owns a forkserver that has torch and IPython imported, so that a rank starts in tens of
milliseconds, in a clean process. It joins the pool only when that server is warm, so a host that
the pool knows is a host that is ready.

Run by the supervisor, which passes on the engine's words: one JSON line on standard input with the
scheduler's address and the pool's key (never in argv, where `ps` shows it).
"""

import asyncio
import gc
import json
import logging
import multiprocessing
import os
import sys
from multiprocessing import forkserver

from taas_magic.remote.process import die_with_parent

PRELOAD = ["taas_magic.remote.preload"]


def main() -> int:
    """Runs until the pool closes the host or is lost; returns the process's exit code."""
    die_with_parent(os.getppid())
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()  # its imports run while ours do
    gc.disable()  # what is imported stays; to look through it again and again takes 0.2 s
    from taas_magic.remote.dask_host import serve

    gc.freeze()
    gc.enable()
    asyncio.run(serve(json.loads(sys.stdin.readline()), warm_forkserver))
    return 0


def warm_forkserver() -> None:
    """Returns when the forkserver has imported everything: a process that does nothing has run."""
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    process.start()
    process.join()
