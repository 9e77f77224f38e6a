"""Measure the same cells on this machine, on SSH hosts and on nodes of a Slurm cluster.

    python benchmarks/hosts.py --rounds 5        (Linux, root)

The hosts are the simulated hosts of the tests (tests/rig) on this machine. So the figures show the
cost of our code, but not of a real network. Every pool runs the same cells: two ranks that meet and
print, and one rank that touches 2,000 batches of 196 KiB from a fetcher in another pool.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config as ShellConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from taas_magic.config import load_config
from taas_magic.journal import folder as journal
from taas_magic.messages import Lines
from taas_magic.notebook import launch, pools
from tests.harness import Notebook
from tests.rig.hosts import Hosts, hosts_up
from tests.rig.slurm import CORES, PATH, slurm_up

MEET = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("met", time.time(), flush=True)
"""

LOADER = """
import numpy, taas, torch
from torch.utils.data import DataLoader, Dataset

class Ready(Dataset):
    def __len__(self):
        return 1 << 20
    def __getitem__(self, i):
        return torch.from_numpy(BYTES.copy())

BYTES = numpy.zeros(196 << 10, dtype="uint8")
loader = taas.register(DataLoader(Ready(), batch_size=None, num_workers=1))
"""

TOUCH = """
import time
batches, started = iter(loader), time.perf_counter()
while time.perf_counter() - started < 5:  # idle hosts, on the same processors, still import modules
    next(batches).sum()
began = time.perf_counter()
for _ in range(5000):
    next(batches).sum()
rate = 5000 / (time.perf_counter() - began)
"""

COLUMNS = (
    "the pool comes up, s",
    "two ranks meet, s",
    "a line arrives after, ms",
    "batches/s",
    "MB/s",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    asked = parser.parse_args()
    _print(f"| pool | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    with tempfile.TemporaryDirectory() as folder, _notebook(Path(folder)) as notebook:
        for name in asked.only:
            with ExitStack() as stack:
                toml = WAYS[name](stack, Path(folder))
                (notebook.project / "taas.toml").write_text(toml)
                cells = measure(notebook, asked.rounds)
            _print(f"| {name} | {' | '.join(cells)} |")
    return 0


def _print(line: str) -> None:
    """Print to the real standard output; the output of the notebook goes to a file."""
    print(line, file=sys.__stdout__, flush=True)


def measure(notebook: Notebook, rounds: int) -> list[str]:
    """Measure the pools `ranks` and `data` of a notebook, and return a row of the table.

    Each column has the median, minimum and maximum over the rounds. A round runs four cells in
    which two ranks meet, and one cell that reads batches. The first cell includes the start of the
    pool. The round then ends both pools.
    """
    config = load_config(notebook.project)
    up, meet, delay, rate = [], [], [], []
    for number in range(rounds):
        up.append(_seconds(lambda: _ok(notebook.run(MEET, "--pool ranks", gpus=2))))
        for _ in range(3):
            meet.append(_seconds(lambda: _ok(notebook.run(MEET, "--pool ranks", gpus=2))))
            delay += _delays()
        notebook.define(LOADER if number == 0 else "pass")
        _ok(notebook.run(TOUCH, "--pool ranks --data-pool data --cpus 1 --out rate", gpus=1))
        rate.append(notebook.shell.user_ns["rate"])
        for name in ("ranks", "data"):
            pools.down(name, config)
    notebook.define("taas.unregister(loader)")
    mb = [value * (196 << 10) / 1e6 for value in rate]
    return [*map(_spread, (up, meet, [1e3 * s for s in delay], rate, mb))]


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _ok(outcome: Any) -> None:
    if outcome.error is not None:
        raise SystemExit(outcome.shown)


def _delays() -> list[float]:
    """Return the seconds from each rank's print to the line's record in the last run's journal."""
    assert launch.last_run is not None
    found = []
    for seen in journal.RunFolder(launch.last_run.path).read_events():
        words = seen.lines[0].split() if isinstance(seen, Lines) else [""]
        if words[0] == "met":
            found.append(seen.time - float(words[1]))
    return found


def _spread(values: list[float]) -> str:
    middle, low, high = map(_short, (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2g}"


@contextmanager
def _notebook(folder: Path) -> Iterator[Notebook]:
    """Yield a notebook in this process, with its own state folder; its output goes to a file."""
    (folder / "project").mkdir()
    os.environ["TAAS_STATE_DIR"] = str(folder / "state")
    os.environ["TAAS_WARM"] = "0"
    before = Path.cwd()
    os.chdir(folder / "project")
    settings = ShellConfig()
    settings.HistoryManager.hist_file = ":memory:"
    shell = InteractiveShell.instance(config=settings)
    shell.run_line_magic("load_ext", "taas_magic")
    with (folder / "shown").open("w") as shown, contextlib.redirect_stdout(shown):
        yield Notebook(shell, Path.cwd(), journal.state_dir())
    os.chdir(before)  # IPython needs an existing folder when it exits


def _table(name: str, **values: Any) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if key != "options"]
    options = ", ".join(f"{k} = {v}" for k, v in values.get("options", {}).items())
    return "\n".join([f"[pools.{name}]", *lines, f"options = {{ {options} }}", ""])


def _local(stack: ExitStack, folder: Path) -> str:
    return "".join(_table(name, engine="local", gpus=0, cores=1) for name in ("ranks", "data"))


def _ssh(stack: ExitStack, folder: Path) -> str:
    hosts: Hosts = stack.enter_context(hosts_up(3))
    common: dict[str, Any] = {"engine": "ssh", "python": sys.executable, "cores": 1}
    common["options"] = {"ssh_config": json.dumps(str(hosts.ssh_config))}
    ranks = _table("ranks", hosts=[hosts.name(1), hosts.name(2)], gpus=1, **common)
    return ranks + _table("data", hosts=[hosts.name(3)], gpus=0, role="data", **common)


def _slurm(stack: ExitStack, folder: Path) -> str:
    """Start a Slurm with three nodes, and return the text of taas.toml with two pools on it."""
    slurm = stack.enter_context(slurm_up(3, share=(folder,)))
    assert slurm.hosts is not None
    os.environ["SLURM_CONF"], os.environ["PATH"] = str(slurm.conf), PATH
    options = {
        "queue": '"debug"',
        "cores": str(CORES),
        "memory": '"1GB"',
        "walltime": '"00:20:00"',
        "interface": '"eth0"',
        "scheduler_options": f'{{ host = "{slurm.hosts.caller}" }}',
    }
    common: dict[str, Any] = {"engine": "dask_jobqueue.SLURMCluster", "options": options}
    ranks = _table("ranks", gpus=1, max_hosts=2, **common)
    return ranks + _table("data", gpus=0, max_hosts=1, role="data", **common)


WAYS: dict[str, Callable[[ExitStack, Path], str]] = {
    "this machine": _local,
    "SSH hosts": _ssh,
    "Slurm": _slurm,
}
"""For each row, the function that starts the hosts and returns the text of taas.toml."""


if __name__ == "__main__":
    sys.exit(main())
