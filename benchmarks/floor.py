"""The floor: nothing but a fork server that has torch in memory. Runs in the kernel.

No environment, no capture, no logs apart, no failure seen: what a launch costs at least. The ranks
write into one pipe, which the kernel reads and prints.
"""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

HOST = "127.0.0.1"

_context: Any = multiprocessing.get_context("forkserver")


def warm() -> None:
    """Start the fork server; return when it has imported torch."""
    _context.set_forkserver_preload(["torch.distributed", "floor"])
    nothing = _context.Process(target=os.getpid)
    nothing.start()
    nothing.join()


def launch(program: str, ranks: int) -> None:
    """Run a program's text as so many ranks; print what they do, until they have ended."""
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
    """One rank; finds the store that is there by torchrun's variables."""
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
