"""The contestants of launch.py: for each tool, a function that measures one round."""

import os
import socket
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from kernel_client import Notebook
from programs import (
    ALL_PRINT,
    CLOCK,
    FLOOD,
    ONE_PRINTS,
    RANKS,
    SESSION_PRINTS,
    SESSION_START,
    STEP_PRINTS,
    Flood,
    delay_s,
    first_line_s,
    flood,
)

Figures = dict[str, float]
"""Results of one round: seconds by column, and numbers of lines for `glued` and `lost`."""

POLL_S = 0.2
SESSION_CELLS = 5
PAUSE_S = 8.0
"""Seconds to wait before a cell, as a user does who reads its code.

Meanwhile, an idle host imports `torch._dynamo`.
"""

HERE = Path(__file__).parent
COLD = {"cold": ALL_PRINT, "cold, optimizer step": STEP_PRINTS}
TOKEN = "TAAS_BENCHMARK"
"""Environment variable of every process that a benchmark starts; its value is our process id."""


@contextmanager
def notebook() -> Iterator[Notebook]:
    """Yield a new kernel in an empty folder. It has its own state folder, and so its own pools."""
    with TemporaryDirectory(prefix="taas-benchmark-") as folder:
        environ = {
            "PYTHONPATH": os.pathsep.join((str(HERE.parent), str(HERE))),
            "TAAS_STATE_DIR": f"{folder}/state",
            # nbdistributed starts its workers by `python`, which must be this environment's
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            TOKEN: str(os.getpid()),
        }
        with Notebook(environ, folder) as fresh:
            yield fresh


def taas() -> Figures:
    """Measure `%%taas` in new kernels without a warm pool, with a warm pool, and in a session."""

    def cell(program: str) -> str:
        return f"%%taas --gpus {RANKS}\n{program}"

    figures: Figures = {}
    for column, program in COLD.items():
        with notebook() as cold:
            figures[column] = first_line_s(cold.run("%load_ext taas_magic", cell(program)))
            cold.run("%taas down")
    with notebook() as warm:
        warm.run("%load_ext taas_magic")
        while "idle" not in warm.run("%taas pools").text:
            time.sleep(POLL_S)
        figures["after warming"] = first_line_s(warm.run(cell(ALL_PRINT)))
        figures |= _warm_figures(warm, cell)
        warm.run(f"%%taas --gpus {RANKS} --session bench\n{SESSION_START}")
        figures |= _session_figures(warm, lambda program: f"%%taas --session bench\n{program}")
        warm.run("%taas down")
    return figures


def torchrun() -> Figures:
    """Measure torchrun as a shell command in a cell. Nothing stays warm between its launches."""

    def cell(program: str) -> str:
        Path(file).write_text(program)
        return f"!{launcher} --standalone --nproc-per-node {RANKS} {file}"

    launcher = Path(sys.executable).with_name("torchrun")
    with TemporaryDirectory() as folder, notebook() as any_kernel:
        file = f"{folder}/script.py"
        figures = {
            column: first_line_s(any_kernel.run(cell(program))) for column, program in COLD.items()
        }
        return figures | _warm_figures(any_kernel, cell)


def accelerate() -> Figures:
    """Measure accelerate's notebook_launcher, which forks the kernel."""

    def cell(program: str) -> str:
        function = "def train():" + textwrap.indent(program, "    ")
        call = f'notebook_launcher(train, num_processes={RANKS}, use_port="{free_port()}")'
        return f"from accelerate import notebook_launcher\n{function}\n{call}"

    with notebook() as kernel:
        figures = {
            column: first_line_s(kernel.run(cell(program))) for column, program in COLD.items()
        }
        return figures | _warm_figures(kernel, cell)


def ipyparallel_cells(port: int) -> tuple[list[str], Callable[[str], str]]:
    """Return the cells that start engines, and a function that makes a cell for the engines.

    ipyparallel does not set torch's environment, so a cell sets it by hand. Without `--no-stream`,
    `%%px` shows its output as a display, which `kernel_client` does not record.

    Args:
        port: Value of MASTER_PORT.
    """

    def cell(program: str) -> str:
        return f"%%px --no-stream\n{program}"

    start = [
        "import ipyparallel",
        f"cluster = ipyparallel.Cluster(n={RANKS})",
        "client = cluster.start_and_connect_sync()",
        "view = client[:]",
        f"view.scatter('rank', range({RANKS}), flatten=True)",
    ]
    set_up = [
        "import os",
        f"os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='{port}', RANK=str(rank), "
        f"WORLD_SIZE='{RANKS}')",
    ]
    return ["\n".join(start), cell("\n".join(set_up))], cell


def ipyparallel() -> Figures:
    """Measure the cells after the first on ipyparallel's engines, which stay between cells."""
    start, cell = ipyparallel_cells(free_port())
    with notebook() as kernel:
        kernel.run(*start, cell(SESSION_START))
        figures = _session_figures(kernel, cell)
        kernel.run("cluster.stop_cluster_sync()")
        return figures


def nbdistributed() -> Figures:
    """Measure the cells after the first on nbdistributed's ranks."""
    with notebook() as kernel:
        kernel.run("%load_ext nbdistributed", f"%dist_init --num-processes {RANKS}", SESSION_START)
        figures = _session_figures(kernel, lambda program: program)
        kernel.run("%dist_shutdown")
        return figures


def floor() -> Figures:
    def cell(program: str) -> str:
        return f"floor.launch({program!r}, {RANKS})"

    with notebook() as kernel:
        kernel.run("import torch.distributed, floor; floor.warm()")
        kernel.run(cell(ALL_PRINT))
        return _warm_figures(kernel, cell)


def _warm_figures(kernel: Notebook, cell: Callable[[str], str]) -> Figures:
    """Measure a kernel that has launched ranks before.

    The figures are the times of four launches, the delay of a line, and the time and completeness
    of a flood of lines. Before the fourth launch, pause for `PAUSE_S` seconds.
    """
    figures = {
        "warm": first_line_s(kernel.run(cell(ALL_PRINT))),
        "warm, one prints": first_line_s(kernel.run(cell(ONE_PRINTS))),
        "warm, optimizer step": first_line_s(kernel.run(cell(STEP_PRINTS))),
    }
    time.sleep(PAUSE_S)
    figures |= {
        "rested, optimizer step": first_line_s(kernel.run(cell(STEP_PRINTS))),
        "delay": delay_s(kernel.run(cell(CLOCK))),
    }
    seen: Flood = flood(kernel.run(cell(FLOOD)))
    return figures | {"flood": seen.seconds, "glued": seen.glued, "lost": seen.lost}


def _session_figures(kernel: Notebook, cell: Callable[[str], str]) -> Figures:
    """Return the median time of `SESSION_CELLS` cells on ranks that keep their process group.

    Before these cells, run one more cell, which is not measured.
    """
    kernel.run(cell(SESSION_PRINTS))
    seconds = [first_line_s(kernel.run(cell(SESSION_PRINTS))) for _ in range(SESSION_CELLS)]
    return {"session": statistics.median(seconds)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


CONTESTANTS: dict[str, Callable[[], Figures]] = {
    "taas-magic": taas,
    "torchrun": torchrun,
    "accelerate": accelerate,
    **{each.__name__: each for each in (nbdistributed, ipyparallel) if find_spec(each.__name__)},
    "floor": floor,
}
