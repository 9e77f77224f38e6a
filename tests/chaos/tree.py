"""Kill, stop and interrupt processes of a kernel and its pool at random moments, from a seed.

After each harm, the cell must end, the next cell must run, and nothing may be left.
"""

import os
import random
import re
import secrets
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from tests.conftest import TOKEN, abandoned, carriers, describe, end
from tests.eventually import HUNG_S, left_after
from tests.frontend import Frontend, Scene
from tests.harness import FORKSERVER, words

COLD = 0.2
"""Fraction of the rounds that begin without hosts, so that the harm meets hosts that start."""

STOPPED_S = 2.0
"""Seconds for which a kernel or a pool's process stays stopped. No other process can end them."""

NOT_OURS = re.compile(r"torchinductor_.*|[a-z0-9_]{8}")
"""Names of files that other software leaves: torch's cache, and the file by which Python's tempfile
tests whether a folder is writable (left if the process is killed at that moment)."""

MODULES = {
    "pool": "taas_magic.pool.process",
    "agent": "taas_magic.host.agent",
    "supervisor": "taas_magic.host.supervisor",
}
PLACES = ("kernel", *MODULES, "forkserver", "rank", "fetcher", "worker")
HARMS = tuple(f"{deed} {place}" for place in PLACES for deed in ("kill", "stop"))
SESSION_HARMS = (*HARMS, "interrupt kernel", "interrupt rank", "interrupt fetcher")

LOADER = """
import taas, torch
from torch.utils.data import DataLoader, TensorDataset
loader = taas.register(DataLoader(TensorDataset(torch.arange(64)), batch_size=1, num_workers=1))
"""
TRAIN = """%%taas --gpus 2 --cpus 1
import os, time
print("pid", os.getpid(), flush=True)
for batch in loader:
    time.sleep(0.05)
"""
NEXT = "%%taas --gpus 1\nprint('the next one')"


@dataclass(frozen=True)
class Program:
    """The cells of a round.

    Attributes:
        start: Cells that run first, and again after each end of the kernel or of the session.
        cell: Cell that is running when the harm is done.
        next: Cell that must succeed afterwards.
        way_out: Part of a line that `next` may show instead; "" if it must succeed.
        back: Cell that runs in a new kernel after the old one was killed; "" runs `start` again.
    """

    start: tuple[str, ...]
    cell: str
    next: str
    way_out: str
    harms: tuple[str, ...]
    back: str = ""


CELLS = Program((LOADER,), TRAIN, NEXT, "", HARMS)
START_SESSION = """%%taas --gpus 2 --session exp --cpus 1
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
"""
SESSION = Program(
    start=(LOADER, START_SESSION),
    cell="""%%taas --session exp
print("pid", os.getpid(), flush=True)
for batch in loader:
    time.sleep(0.05)
    dist.all_reduce(torch.ones(1))
""",
    next="""%%taas --session exp
first = next(iter(loader))
dist.destroy_process_group()
dist.init_process_group("gloo")
print("the next one")
""",
    way_out="Start it",
    harms=SESSION_HARMS,
)
"""If the session has ended, a line of the next cell's error or output says how to start it."""

DETACHED = replace(
    SESSION,
    start=(LOADER, START_SESSION.replace("--session exp", "--session exp --detach")),
    back="%taas attach exp",
)
"""A detached session. After a kernel is killed, the next kernel takes the session over."""


@dataclass
class Outcomes:
    """Numbers of rounds with one kind of harm, by the outcome of the next cell.

    Attributes:
        ran: Number of rounds in which the next cell ran.
        said: Number of rounds in which the next cell said how to start the session again.
    """

    rounds: int = 0
    ran: int = 0
    said: int = 0


@dataclass
class Result:
    """The result of all rounds.

    Attributes:
        harms: The outcomes of each harm.
        late: Harms after which the cell did not end in time.
        broken: Harms after which the next cell failed, each with the error.
        left: Processes and files that were left.
    """

    harms: defaultdict[str, Outcomes] = field(default_factory=lambda: defaultdict(Outcomes))
    late: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Number of rounds so far."""
        return sum(outcomes.rounds for outcomes in self.harms.values())

    def table(self) -> str:
        """Return a table with one row for each harm."""
        rows = [f"{'harm':20} rounds  next cell ran  said how to start again"]
        for harm, seen in sorted(self.harms.items()):
            rows.append(f"{harm:20} {seen.rounds:6}  {seen.ran:13}  {seen.said:23}")
        return "\n".join(rows)

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds; not ended in time: {len(self.late)}; "
            f"next cell not fine: {len(self.broken)}; left over: {len(self.left)}"
        )


class Chaos:
    """Rounds of harm to the processes of one kernel and its pool.

    Args:
        harms: The harms to choose from; a subset of the program's harms.
        end_s: Seconds for a cell to end after the harm.
        gone_s: Seconds after which nothing of the harmed processes may be left.
    """

    def __init__(
        self,
        scene: Scene,
        seed: int,
        program: Program,
        harms: tuple[str, ...],
        end_s: float,
        gone_s: float,
    ) -> None:
        self._scene, self._random, self._harms = scene, random.Random(seed), harms
        self._program = program
        self._end_s, self._gone_s = end_s, gone_s
        self._token = secrets.token_hex(8)
        self._files = set(Path("/dev/shm").iterdir())
        self._doomed: dict[psutil.Process, tuple[float, str]] = {}
        self.result = Result()

    def play(self, rounds: int, say: Callable[[str], None]) -> Result:
        """Play rounds, then end the kernel and look for leftovers.

        Args:
            rounds: Number of rounds.
            say: Function that is called with one line for each round.
        """
        with self._scene.kernel(**{TOKEN: self._token}) as frontend:
            self._run(frontend, self._program.start)
            while self.result.rounds < rounds:
                self._round(frontend, say)
        self.result.left += left_after(self._all_left, self._gone_s)
        return self.result

    def _round(self, frontend: Frontend, say: Callable[[str], None]) -> None:
        harm = self._random.choice(self._harms)
        delay_s = self._random.uniform(0.0, 2.5)
        if self._random.random() < COLD:
            frontend.run("%taas down")
            if self._program.way_out:  # the session has ended with its pool
                self._run(frontend, self._program.start)
        request = frontend.send(self._program.cell)
        with suppress(AssertionError):  # the delay is over, or the cell has ended
            frontend.wait(lambda: request in frontend.replies, delay_s)
        victims = list(self._find(frontend, harm.split()[1]))
        if victims:
            self.result.harms[harm].rounds += 1
            which = self._random.choice(victims)
            began = time.monotonic()
            with self._harmed(harm, which):
                self._finish(frontend, request, harm)
            took_s = time.monotonic() - began
            self._check_next(frontend, harm)
            say(f"{self.result.rounds}: {harm} after {delay_s:.1f} s, took {took_s:.1f} s")
        else:
            self._finish(frontend, request, harm)
        self._look_for_old(frontend, harm)

    @contextmanager
    def _harmed(self, harm: str, which: psutil.Process) -> Iterator[None]:
        """Kill, interrupt or stop a process. Only a kernel or a pool's process is resumed."""
        deeds = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT, "stop": signal.SIGSTOP}
        with suppress(psutil.NoSuchProcess):
            which.send_signal(deeds[harm.split()[0]])
        if harm in ("stop kernel", "stop pool"):
            time.sleep(STOPPED_S)
            with suppress(psutil.NoSuchProcess):
                which.resume()
        yield

    def _finish(self, frontend: Frontend, request: str, harm: str) -> None:
        """Wait until the cell has ended. If it is late, interrupt it twice, as a user would."""
        if harm == "kill kernel":
            frontend.manager.restart_kernel(now=True)
            frontend.client.wait_for_ready(timeout=HUNG_S)
            if not self._program.back:
                self._run(frontend, self._program.start)
            elif (error := self._try(frontend, self._program.back)) is not None:
                if not self._has_way_out(error):
                    self.result.broken.append(f"{harm}: {self._program.back}: {error}")
                self._run(frontend, self._program.start)
            return
        try:
            frontend.finish(request, self._end_s)
        except AssertionError:
            self.result.late.append(harm)
            frontend.manager.interrupt_kernel()
            frontend.manager.interrupt_kernel()
            frontend.finish(request, self._end_s)

    def _run(self, frontend: Frontend, cells: tuple[str, ...]) -> None:
        for cell in cells:
            frontend.run(cell)

    def _check_next(self, frontend: Frontend, harm: str) -> None:
        """Run the next cell, and count whether it ran or said how to start the session again."""
        outcomes = self.result.harms[harm]
        if (error := self._try(frontend, self._program.next)) is None:
            outcomes.ran += 1
        elif self._has_way_out(error):
            outcomes.said += 1
            self._run(frontend, self._program.start)
        else:
            self.result.broken.append(f"{harm}: {error}")

    def _try(self, frontend: Frontend, cell: str) -> str | None:
        """Run a cell; return None if it succeeded, and otherwise its output and its error."""
        request = frontend.send(cell)
        if frontend.finish(request)["status"] == "ok":
            return None
        [error] = frontend.contents(request, "error")
        return f"{frontend.text(request)}\n{error['evalue']}"

    def _has_way_out(self, error: str) -> bool:
        """Return whether a line of `error` says how to start the session again.

        `error` also has the cell's output. The output has this line if a process of the session has
        died in the cell itself.
        """
        way_out = self._program.way_out
        return bool(way_out) and way_out in error

    def _find(self, frontend: Frontend, place: str) -> Iterator[psutil.Process]:
        if place == "kernel":
            yield frontend.process
            return
        for process in sorted(self._tree(frontend), key=lambda process: process.pid):
            if _place_of(process) == place:
                yield process

    def _look_for_old(self, frontend: Frontend, harm: str) -> None:
        """Record processes that left the tree. Report and end those that live on for too long."""
        now = time.monotonic()
        seen = carriers(self._token)
        tree = self._tree(frontend)  # after `carriers`: a newer process is no leftover
        for process in seen:
            if process not in tree:
                self._doomed.setdefault(process, (now, harm))
        for process, (since, why) in list(self._doomed.items()):
            if is_over(process) or process in tree:
                del self._doomed[process]
            elif now - since > self._gone_s:
                self.result.left.append(f"{why}: process {describe(process)}")
                end(process)

    def _tree(self, frontend: Frontend) -> set[psutil.Process]:
        """Return the processes of the kernel and of its pool, also of an earlier kernel's pool."""
        roots = [frontend.process]
        for lock in self._scene.state.glob("pools/*/lock"):  # contains the pool's process id
            with suppress(ValueError, psutil.NoSuchProcess):
                roots.append(psutil.Process(int(lock.read_text())))
        tree = set(roots)
        for root in roots:
            with suppress(psutil.NoSuchProcess):
                tree.update(root.children(recursive=True))
        return tree

    def _all_left(self) -> list[str]:
        """Return descriptions of processes and files that are left after the kernel's end."""
        found = [f"process {describe(process)}" for process in carriers(self._token)]
        files = abandoned(set(Path("/dev/shm").iterdir()) - self._files)
        kept = [path for path in self._scene.tmp.iterdir() if not NOT_OURS.fullmatch(path.name)]
        return found + [f"file {path}" for path in (*files, *kept)]


def is_over(process: psutil.Process) -> bool:
    """Return whether a process has ended."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _place_of(process: psutil.Process) -> str:
    """Return the kind of a process, one of `PLACES`; "" for any other process."""
    said = words(process)
    for place, module in MODULES.items():
        if module in said:
            return place
    if FORKSERVER not in said:
        return ""
    with suppress(psutil.NoSuchProcess, FileNotFoundError):
        above = [words(parent) for parent in process.parents()]
        depth = sum(FORKSERVER in text for text in above)
        if depth == 0:
            return "forkserver"
        if depth == 1:
            return "fetcher" if "/fetcher-" in os.readlink(f"/proc/{process.pid}/fd/1") else "rank"
        return "worker"
    return ""


def grown(
    frontend: Frontend, before: dict[str, tuple[int, int, int]], more: int
) -> dict[str, tuple[int, int, int]]:
    """Return the processes that have gained at least `more` descriptors or `more` threads.

    Checks until no process has, or until a time limit, because processes may still close
    descriptors.

    Args:
        frontend: The kernel.
        before: The earlier result of `memory_of`.
        more: Smallest growth that counts.
    """

    def found() -> dict[str, tuple[int, int, int]]:
        after = memory_of(frontend)
        assert after.keys() == before.keys()
        return {
            name: seen
            for name, seen in after.items()
            if any(now - then >= more for now, then in zip(seen[1:], before[name][1:], strict=True))
        }

    return left_after(found, HUNG_S)


def memory_of(frontend: Frontend) -> dict[str, tuple[int, int, int]]:
    """Return the bytes of memory, descriptors and threads of kernel, pool, agent and forkserver."""
    found = {"kernel": frontend.process}
    for process in frontend.process.children(recursive=True):
        if (place := _place_of(process)) in ("pool", "supervisor", "agent", "forkserver"):
            found[place] = process
    return {
        name: (process.memory_full_info().uss, process.num_fds(), process.num_threads())
        for name, process in found.items()
    }
