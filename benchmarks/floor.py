"""A minimal launcher, as a lower bound for launch.py: a fork server that has imported torch.

The module runs in the kernel. It transfers no notebook objects and no environment, keeps no log for
each rank and detects no failures.
"""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

HOST = "127.0.0.1"

_context: Any = multiprocessing.get_context("forkserver")


def warm() -> None:
    """Start the fork server, and wait until it has imported torch."""
    _context.set_forkserver_preload(["torch.distributed", "floor"])
    nothing = _context.Process(target=os.getpid)
    nothing.start()
    nothing.join()


def launch(program: str, ranks: int) -> None:
    """Run the text `program` on `ranks` ranks, and print their output until all have ended.

    Start a TCPStore in this process as the ranks' rendezvous. All ranks write to one pipe.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    reading, writing = _context.Pipe(duplex=False)
    for rank in range(ranks):
        arguments = program, rank, ranks, store.port, writing
        _context.Process(target=rank_main, args=arguments).start()
    writing.close()
    while data := os.read(reading.fileno(), 1 << 16):
        print(data.decode(), end="", flush=True)


def rank_main(program: str, rank: int, ranks: int, port: int, output: Connection) -> None:
    """Run `program` as one rank. With torchrun's variables, it connects to the existing store."""
    sys.stdout = open(output.fileno(), "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR=HOST,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        OMP_NUM_THREADS="1",
    )
    exec(compile(program, "<rank>", "exec"), {"__name__": "__main__"})
