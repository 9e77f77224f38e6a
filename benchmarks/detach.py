"""Check detached runs whose kernel is killed at a random moment, on this machine and on hosts.

    python benchmarks/detach.py --rounds 30        (Linux, root)

Each round runs a cell with `--detach`, and kills the kernel with SIGKILL. It then attaches to the
run from a terminal, and checks three things: the log is complete and in order; the result is that
of an undisturbed run; and no process of the run or of its pool is left.
"""

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from hosts import WAYS

from taas_magic.notebook import runs
from taas_magic.notebook.runs import Run
from tests.conftest import carriers
from tests.eventually import eventually
from tests.frontend import Frontend, environment, kernel

STEPS = 200
CELL = f"""%%taas --gpus 2 --pool ranks --out total --detach
import os, time
rank, total = int(os.environ["RANK"]), 0
for step in range({STEPS}):
    total += step
    print("step", step, "of rank", rank)
    time.sleep(0.02)
"""
WAIT_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(environment(Path(folder)))
        os.environ["TAAS_WARM"] = "0"
        for name in asked.only:
            with ExitStack() as stack:
                project = Path(folder) / "project"
                project.mkdir(exist_ok=True)
                (project / "taas.toml").write_text(WAYS[name](stack, Path(folder)))
                for number in range(asked.rounds):
                    play(project, f"detach-{os.getpid()}-{number}", draw.uniform(0.0, 4.0))
                print(f"{name}: {asked.rounds} of {asked.rounds} rounds", flush=True)
    return 0


def play(project: Path, token: str, after_s: float) -> None:
    """Play one round: run a detached cell, kill the kernel, attach to the run, and check all.

    Args:
        token: Value of TAAS_TEST_TOKEN, which marks the processes of the round.
        after_s: Seconds between the cell's reply and the kill.

    Raises:
        AssertionError: The log or the result is wrong, or a process is left.
    """
    with kernel(project, TAAS_TEST_TOKEN=token) as frontend:
        reply = frontend.finish(frontend.send(CELL), WAIT_S)  # includes the start of hosts
        assert reply["status"] == "ok", reply
        run = next(runs.newest_first())
        time.sleep(after_s)
        kill(frontend)
    attached = subprocess.run(
        [sys.executable, "-m", "taas_magic", "attach", run.id],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    check(run, attached.stdout)
    eventually(lambda: not (Path(run.context.pool_folder) / "pool.json").exists())
    eventually(lambda: not carriers(token))


def kill(frontend: Frontend) -> None:
    """Kill a kernel, and wait until its manager notices."""
    frontend.process.kill()
    eventually(lambda: not frontend.manager.is_alive())


def check(run: Run, shown: str) -> None:
    """Check the log and the result of a run; `shown` is the output of `attach`."""
    for rank in (0, 1):
        steps = re.findall(rf"step (\d+) of rank {rank}\b", shown)
        assert [*map(int, steps)] == [*range(STEPS)], f"{run.id}: rank {rank}: {steps}"
    out = Run(run.path).wait(WAIT_S)
    assert out == {"total": sum(range(STEPS))}, f"{run.id}: {out}"


if __name__ == "__main__":
    sys.exit(main())
