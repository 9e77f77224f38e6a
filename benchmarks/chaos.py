"""Inject random faults into the data service or a kernel's processes, or measure many runs.

    python -m benchmarks.chaos [--faults 1000] [--seed 1] [--tls] [--rest 5]
    python -m benchmarks.chaos --processes 500 [--only "kill agent"] [--seed 1]
    python -m benchmarks.chaos --session 100 [--detach] [--only "stop rank"] [--seed 1]
    python -m benchmarks.chaos --first-cells 200 [--deed "kill pool"] [--seed 1]
    python -m benchmarks.chaos --runs 300

- `--faults` (the default) kills fetchers, kills or stops their workers, and cuts connections, while
  two ranks train. One rank is on the fetchers' host; the other one gets its batches by TCP, or
  under TLS with `--tls`. With `--rest S`, the ranks pause after every 40 steps, for S seconds on
  average. The batches, the weights and the ledger of read samples must not change.
- `--processes` kills or stops one of a kernel's descendant processes while a cell runs. The cell
  must end, and the next cell must run.
- `--session` does the same during the cells of a session with a fetcher, and also interrupts
  processes. If the session has ended, the next cell must say so in one line. With `--detach`, the
  session is detached, and a new kernel takes it over after the kernel was killed.
- `--first-cells` starts a kernel in each round. At a random moment of the first two cells, it kills
  the pool's process, ends the pool, or interrupts, restarts or kills the kernel. Each cell must
  succeed or say clearly why it failed.
- `--runs` runs many cells, and prints how much memory, descriptors and threads have grown.

The same seed gives the same faults again.
"""

import argparse
import collections
import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from taas_magic.data.service import new_certificate
from taas_magic.host.agent_worker import DEFERRED_IDLE_S
from taas_magic.pool.controller import FIRST_KERNEL_S
from tests.chaos.first_cells import DEEDS, FirstCells
from tests.chaos.harm import play
from tests.chaos.tree import CELLS, DETACHED, HARMS, NEXT, SESSION, Chaos, Program, memory_of
from tests.eventually import eventually
from tests.frontend import Frontend, Scene

END_S, GONE_S = 45.0, 20.0
"""Maximum seconds after a fault: for the cell to end, and for processes and files to be gone."""

CELL_END_S = 20.0
"""Maximum seconds in which a cell of `--first-cells` that fails must end."""

WARM_RUNS = 20
HAS_ALL = "%%taas --gpus 1\nimport sys\nprint('all:', 'torch._dynamo' in sys.modules)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--processes", type=int, metavar="ROUNDS")
    parser.add_argument("--session", type=int, metavar="ROUNDS")
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("--only", choices={*HARMS, *SESSION.harms}, action="append")
    parser.add_argument("--first-cells", type=int, metavar="ROUNDS")
    parser.add_argument("--deed", choices=DEEDS, action="append")
    parser.add_argument("--runs", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--rest", type=float, default=0.0, metavar="SECONDS")
    asked = parser.parse_args()
    if asked.processes:
        harm_processes(asked.processes, asked.seed, CELLS, tuple(asked.only or HARMS))
    elif asked.session:
        program = DETACHED if asked.detach else SESSION
        harm_processes(asked.session, asked.seed, program, tuple(asked.only or program.harms))
    elif asked.first_cells:
        harm_first_cells(asked.first_cells, asked.seed, tuple(asked.deed or DEEDS))
    elif asked.runs:
        run_again_and_again(asked.runs)
    else:
        harm_the_data_service(asked.faults, asked.seed, asked.tls, asked.rest)


def harm_the_data_service(faults: int, seed: int, is_tls: bool, rest_s: float) -> None:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tls = new_certificate() if is_tls else None
        done = play(Path(folder), seed, faults, tls=tls, rest_s=rest_s)
    counts = ", ".join(f"{count} x {kind}" for kind, count in collections.Counter(done).items())
    print(f"{len(done)} faults ({counts}) in {time.perf_counter() - started:.0f} s: all the same")


def harm_processes(rounds: int, seed: int, program: Program, harms: tuple[str, ...]) -> None:
    """Kill or stop processes in `rounds` rounds; print a table and a line for each failure.

    If the user interrupts the rounds, print the results up to then.
    """
    started = time.perf_counter()
    _say(f"seed {seed}")
    with _scene() as scene:
        chaos = Chaos(scene, seed, program, harms, END_S, GONE_S)
        with contextlib.suppress(KeyboardInterrupt):  # prints the results so far
            chaos.play(rounds, say=_say)
    result = chaos.result
    print(result.table())
    took_s = time.perf_counter() - started
    print(f"seed {seed}: {result} after {GONE_S:.0f} s ({took_s:.0f} s)")
    for line in result.late + result.broken + result.left:
        print(f"    {line}")


def harm_first_cells(rounds: int, seed: int, deeds: tuple[str, ...]) -> None:
    """Disturb the first cells of `rounds` kernels, and print the results.

    If the user interrupts the rounds, print the results up to then.
    """
    started = time.perf_counter()
    with _scene() as scene:
        cells = FirstCells(scene, seed, deeds, CELL_END_S, GONE_S + FIRST_KERNEL_S)
        with contextlib.suppress(KeyboardInterrupt):  # prints the results so far
            cells.play(rounds, say=_say)
    print(f"seed {seed}: {cells.result} ({time.perf_counter() - started:.0f} s)")
    for line in cells.result.wrong:
        print(f"    {line}")


def run_again_and_again(runs: int) -> None:
    """Run many cells, and print how much each process of the kernel's tree has grown.

    Before the first measurement, run `WARM_RUNS` cells, and wait until an idle host has imported
    its further modules.
    """
    with _scene() as scene, scene.kernel() as frontend:
        _run(frontend, WARM_RUNS)

        def has_all() -> bool:
            return "all: True" in frontend.text(frontend.run(HAS_ALL))

        eventually(has_all, every_s=2 * DEFERRED_IDLE_S)  # leaves the host idle, so that it imports
        before = memory_of(frontend)
        began = time.perf_counter()
        _run(frontend, runs)
        took_s = time.perf_counter() - began
        after = memory_of(frontend)
    print(f"{runs} runs after {WARM_RUNS} to warm up, {took_s / runs:.2f} s each")
    for name, (size, descriptors, threads) in after.items():
        old_size, old_descriptors, old_threads = before[name]
        print(
            f"{name:10} {old_size / 1e6:7.1f} -> {size / 1e6:7.1f} MB "
            f"({(size - old_size) / runs / 1e3:+.1f} kB a run), descriptors "
            f"{old_descriptors} -> {descriptors}, threads {old_threads} -> {threads}"
        )


def _run(frontend: Frontend, runs: int) -> None:
    for _ in range(runs):
        frontend.run(NEXT)
        frontend.outputs.clear()
        frontend.replies.clear()


@contextlib.contextmanager
def _scene() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder))
        yield scene
        scene.close()


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
