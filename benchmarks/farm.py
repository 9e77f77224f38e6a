"""Time 1,000 jobs that do nothing on 2 nodes: `taas.farm`, plain Dask, Ray and ipyparallel.

    python benchmarks/farm.py [--jobs 1000] [--rounds 5] [--only dask,taas]

Each contestant has two worker processes and one round to warm up. Contestants that are not
installed are left out. "CPU" is the CPU time of this process and all its descendants in a round. If
others use the machine, compare the CPU times rather than the times.
"""

import argparse
import contextlib
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

NODES = 2
Round = Callable[[int], None]


def nothing(x: int) -> int:
    return x


@contextlib.contextmanager
def dask() -> Iterator[Round]:
    """Yield a function that runs jobs on a local Dask cluster."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=NODES, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):

        def run(jobs: int) -> None:
            futures = client.map(nothing, range(jobs), pure=False)
            assert client.gather(futures) == list(range(jobs))

        yield run


@contextlib.contextmanager
def ray() -> Iterator[Round]:
    """Yield a function that runs jobs on a local Ray."""
    import ray

    ray.init(num_cpus=NODES, include_dashboard=False, log_to_driver=False)
    remote = ray.remote(nothing)

    def run(jobs: int) -> None:
        assert ray.get([remote.remote(x) for x in range(jobs)]) == list(range(jobs))

    yield run
    ray.shutdown()


@contextlib.contextmanager
def ipyparallel() -> Iterator[Round]:
    """Yield a function that runs jobs on ipyparallel's engines."""
    import ipyparallel

    with ipyparallel.Cluster(n=NODES) as client:
        view = client.load_balanced_view()

        def run(jobs: int) -> None:
            assert list(view.map_async(nothing, range(jobs)).get()) == list(range(jobs))

        yield run


@contextlib.contextmanager
def taas() -> Iterator[Round]:
    """Yield a function that runs jobs on a farm, in an IPython shell with its own state folder.

    Wait first until all nodes are ready. At the end, close the farm and end its pool.
    """
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    folder = Path(tempfile.mkdtemp(prefix="taas-bench-"))
    os.environ |= {"TAAS_STATE_DIR": str(folder / "state"), "TAAS_WARM": "0"}
    (folder / "project").mkdir()
    os.chdir(folder / "project")
    Path("taas.toml").write_text('[pools.two]\nengine = "local"\ncores = 1\nmax_hosts = 2\n')
    settings = Config()
    settings.HistoryManager.hist_file = ":memory:"
    shell = InteractiveShell.instance(config=settings)
    shell.run_line_magic("load_ext", "taas_magic")
    shell.run_cell("import taas\ndef nothing(x):\n    return x").raise_error()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        shell.run_cell(f"farm = taas.farm('two', nodes={NODES})").raise_error()
    farm, function = shell.user_ns["farm"], shell.user_ns["nothing"]
    while len(farm.status().ready) < NODES:
        time.sleep(0.1)

    def run(jobs: int) -> None:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            found = [job.result() for job in farm.map(function, range(jobs))]
        assert found == list(range(jobs))

    yield run
    farm.close()
    shell.run_line_magic("taas", "down two")


def cpu_s() -> float:
    own = psutil.Process()
    found = 0.0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found += times.user + times.system
    return found


CONTESTANTS = {"dask": dask, "taas": taas, "ray": ray, "ipyparallel": ipyparallel}
MODULES = {"dask": "distributed", "taas": "taas_magic"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(CONTESTANTS))
    asked = parser.parse_args()
    names = [n for n in asked.only.split(",") if importlib.util.find_spec(MODULES.get(n, n))]
    took: dict[str, list[float]] = {name: [] for name in names}
    used: dict[str, list[float]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        rounds = {name: stack.enter_context(CONTESTANTS[name]()) for name in names}
        for number in range(asked.rounds + 1):
            for name, run in rounds.items():
                began, used_before = time.perf_counter(), cpu_s()
                run(asked.jobs)
                if number:  # the results of round 0 are not kept: it only warms up
                    took[name].append(time.perf_counter() - began)
                    used[name].append(cpu_s() - used_before)
    print(
        f"{asked.jobs} jobs on {NODES} nodes, {asked.rounds} rounds, load {os.getloadavg()[0]:.1f}"
    )
    base = statistics.median(took[names[0]])
    for name, seconds in took.items():
        middle = statistics.median(seconds)
        print(
            f"{name:12} median {middle:6.2f} s  ({min(seconds):.2f} to {max(seconds):.2f} s), "
            f"{middle / base:.2f} times {names[0]}; CPU {statistics.median(used[name]):.2f} s"
        )


if __name__ == "__main__":
    main()
