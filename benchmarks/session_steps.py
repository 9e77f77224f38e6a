"""Time the same steps on ranks that stay: a session, nbdistributed and ipyparallel.

    python benchmarks/session_steps.py

Each tool runs the same program on two ranks, in a kernel of its own. The table shows how long each
cell took and whether it failed. If a cell does not end within 180 s, the script skips the tool's
other steps. It also skips tools that are not installed (`pip install '.[bench]'`).
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec

from contestants import free_port, ipyparallel_cells, notebook
from kernel_client import CellError, Notebook
from programs import RANKS, SESSION_START

INTERRUPT_AFTER_S = 3.0
NO_END = ", has not ended"

BUILD = """
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data, target = torch.randn(64, 8)[rank::2], torch.randn(64, 1)[rank::2]
"""
EPOCH = """
optimizer.zero_grad()
loss = (model(data) - target).square().mean()
loss.backward()
optimizer.step()
print("loss", loss.item(), flush=True)
"""
STEPS = {
    "build the model": BUILD,
    "train an epoch": EPOCH,
    "train another": EPOCH,
    "a gradient of each rank": "print(rank, model.module.weight.grad.norm().item(), flush=True)",
    "another learning rate": "for group in optimizer.param_groups: group['lr'] = 0.01",
    "rank 1 raises, rank 0 waits for it": """
if rank == 1:
    raise ValueError("bad batch")
dist.all_reduce(torch.ones(1))
""",
    "the process group again": """
dist.destroy_process_group()
""",
    "go on": "print('rank', rank, 'is here', flush=True)",
    "rank 0 waits for ever; interrupt after 3 s": """
if rank == 0:
    import time
    time.sleep(600)
""",
    "go on after the interrupt": "print('rank', rank, 'is here', flush=True)",
}

Cell = Callable[[str], str]


@contextmanager
def taas() -> Iterator[tuple[Notebook, Cell]]:
    with notebook() as kernel:
        kernel.run("%load_ext taas_magic", f"%%taas --gpus {RANKS} --session s\n{SESSION_START}")
        yield kernel, lambda program: f"%%taas --session s\n{program}"
        kernel.run("%taas down")


@contextmanager
def nbdistributed() -> Iterator[tuple[Notebook, Cell]]:
    with notebook() as kernel:
        kernel.run("%load_ext nbdistributed", f"%dist_init --num-processes {RANKS}", SESSION_START)
        yield kernel, lambda program: program
        kernel.run("%dist_shutdown")


@contextmanager
def ipyparallel() -> Iterator[tuple[Notebook, Cell]]:
    start, cell = ipyparallel_cells(free_port())
    with notebook() as kernel:
        kernel.run(*start, cell(SESSION_START))
        yield kernel, cell
        kernel.run("cluster.stop_cluster_sync()")


TOOLS = {"taas-magic": taas, "nbdistributed": nbdistributed, "ipyparallel": ipyparallel}


def main() -> int:
    found: dict[str, dict[str, str]] = {}
    for name, tool in TOOLS.items():
        if name == "taas-magic" or find_spec(name):
            found[name] = steps_of(tool)
    print(f"| step | {' | '.join(found)} |", "|---" * (1 + len(found)) + "|", sep="\n")
    for step in STEPS:
        print(f"| {step} | {' | '.join(of_tool.get(step, '-') for of_tool in found.values())} |")
    return 0


def steps_of(tool: Callable[[], AbstractContextManager[tuple[Notebook, Cell]]]) -> dict[str, str]:
    """Run the steps with one tool; return the duration and the outcome of each, as text.

    If a step does not end in time, or the tool fails, print this and leave out the other steps.
    """
    found: dict[str, str] = {}
    try:
        with tool() as (kernel, cell):
            for step, program in STEPS.items():
                found[step] = timed(kernel, cell(program), "interrupt after" in step)
                print(f"{tool.__name__}: {step}: {found[step]}", file=sys.stderr, flush=True)
                if NO_END in found[step]:
                    raise CellError(f"{step}{NO_END}")
    except CellError as error:
        print(f"{tool.__name__} failed: {error}", file=sys.stderr, flush=True)
    return found


def timed(kernel: Notebook, cell: str, is_interrupted: bool) -> str:
    """Run a cell; return its duration and how it ended, as text.

    Args:
        is_interrupted: Whether to interrupt the kernel after `INTERRUPT_AFTER_S` seconds.
    """
    began, timer = time.monotonic(), threading.Timer(INTERRUPT_AFTER_S, kernel.interrupt)
    if is_interrupted:
        timer.start()
    try:
        text, how = kernel.run(cell).text, ""
        if "Error" in text:
            how = ", prints the error and succeeds"
    except CellError as error:
        how = ", fails" if "no end after" not in str(error) else NO_END
    timer.cancel()
    return f"{time.monotonic() - began:.2f} s{how}"


if __name__ == "__main__":
    sys.exit(main())
