"""What a batch system says of our jobs, and whether the hosts that were asked for still come.

The parsers are pure. Other systems have no entry: their jobs are waited for without a word.
"""

import asyncio
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taas_magic.errors import PoolError

ASK_S = 10.0
"""How long a batch system may take to answer."""

TAIL_LINES = 15

_HISTORY_HINT = "use -x"  # OpenPBS's; Torque takes -x for something else

_SLURM_LIVES = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT")
_PBS_STATES = {
    "Q": "QUEUED",
    "H": "HELD",
    "W": "WAITING",
    "T": "MOVING",
    "S": "SUSPENDED",
    "R": "RUNNING",
    "B": "RUNNING",
    "E": "EXITING",
    "C": "COMPLETED",
    "F": "FINISHED",
}


@dataclass(frozen=True)
class BatchJob:
    """One job, as the batch system sees it.

    Attributes:
        job_id: Its number.
        state: In the system's own word.
        reason: Why it is in this state; "" when the system does not say.
        ended: Whether it will not run any more.
    """

    job_id: str
    state: str
    reason: str
    ended: bool

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason else self.state


def parse_squeue(text: str) -> dict[str, BatchJob]:
    """The jobs in the output of `squeue --format=%i|%T|%r`."""
    jobs = {}
    for line in text.splitlines():
        words = line.strip().split("|", 2)
        if len(words) == 3:
            job_id, state, reason = words
            reason = "" if reason == "None" else reason
            jobs[job_id] = BatchJob(job_id, state, reason, state not in _SLURM_LIVES)
    return jobs


def parse_qstat(text: str) -> dict[str, BatchJob]:
    """The jobs in the output of `qstat -f`, of OpenPBS, PBS Pro or Torque."""
    jobs = {}
    for block in re.split(r"^Job Id: ", text.replace("\n\t", ""), flags=re.MULTILINE)[1:]:
        first, _, rest = block.partition("\n")
        job_id = first.strip().partition(".")[0]  # dask-jobqueue knows jobs by their number alone
        values: dict[str, str] = dict(re.findall(r"^\s+(\w+) = (.*)$", rest, flags=re.MULTILINE))
        letter = values.get("job_state", "")
        reason = values.get("comment", "")
        if "Exit_status" in values:
            reason = f"exit status {values['Exit_status']}"
        state = _PBS_STATES.get(letter, letter)
        jobs[job_id] = BatchJob(job_id, state, reason, letter in ("C", "F", "X"))
    return jobs


@dataclass(frozen=True)
class BatchSystem:
    """How to ask one kind of batch system.

    Attributes:
        title: What users call it.
        command: Asks about jobs; their ids follow.
        parse: Reads the answer.
        history: Asks about jobs that have ended, where `command` does not tell of them.
    """

    title: str
    command: Callable[[Collection[str]], list[str]]
    parse: Callable[[str], dict[str, BatchJob]]
    history: Callable[[Collection[str]], list[str]] | None = None

    async def look(self, job_ids: Collection[str]) -> dict[str, BatchJob]:
        """The jobs that the system knows, by id; one that it does not know has ended.

        Raises:
            OSError: It cannot be asked, or does not answer.
        """
        if not job_ids:
            return {}
        found, complaint = await self._ask(self.command(job_ids))
        if self.history and _HISTORY_HINT in complaint:
            ended, _ = await self._ask(self.history(job_ids))
            found = {**ended, **found}
        if complaint and not found and not _is_about_jobs(complaint):
            raise OSError(complaint)
        return found

    async def _ask(self, command: list[str]) -> tuple[dict[str, BatchJob], str]:
        """What a command says, and what it complains of if it fails."""
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), ASK_S)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
            raise OSError(f"{self.title} did not answer within {ASK_S:.0f} s") from None
        complaint = err.decode(errors="replace").strip() if process.returncode else ""
        return self.parse(out.decode(errors="replace")), complaint


def _is_about_jobs(complaint: str) -> bool:
    """Whether a command failed only because the jobs have ended too long ago to be known."""
    words = ("invalid job id", "unknown job id", "has finished")
    return any(word in complaint.lower() for word in words)


def _squeue(job_ids: Collection[str]) -> list[str]:
    return [
        "squeue",
        "--noheader",
        "--states=all",
        f"--jobs={','.join(job_ids)}",
        "--format=%i|%T|%r",
    ]


def _qstat(job_ids: Collection[str]) -> list[str]:
    return ["qstat", "-f", *job_ids]


def _qstat_history(job_ids: Collection[str]) -> list[str]:
    return ["qstat", "-x", "-f", *job_ids]


SYSTEMS: Mapping[str, BatchSystem] = {
    "slurm": BatchSystem("Slurm", _squeue, parse_squeue),
    "pbs": BatchSystem("PBS", _qstat, parse_qstat, _qstat_history),
}
"""By the name that dask-jobqueue has for each."""


def find_system(name: str) -> BatchSystem | None:
    """The batch system of that name, if it is known and its command is here."""
    system = SYSTEMS.get(name)
    return system if system and shutil.which(system.command([])[0]) else None


def output_tail(folder: Path, job_id: str) -> str:
    """The last lines of what a job wrote, from the newest file that has its number in its name."""
    number = job_id.partition(".")[0]
    named = re.compile(rf"(?<!\d){re.escape(number)}(?!\d)")
    files = [file for file in folder.glob("*") if named.search(file.name) and file.stat().st_size]
    if not files:
        return ""
    newest = max(files, key=lambda file: file.stat().st_mtime)
    lines = newest.read_text(errors="replace").splitlines()
    return "\n".join([*lines[-TAIL_LINES:], f"({newest})"])


LOOK_S = 2.0
"""How often a batch system is asked at most."""

SETTLE_S = 2.0
"""How long a batch system may take to see what became of a job whose host is lost."""


class Vehicles:
    """The vehicles of a pool: Dask workers, each with its job where there is a batch system.

    Args:
        system: The batch system; None where none is known.
        output: The folder with what jobs write; None where there is none.
    """

    def __init__(self, system: BatchSystem | None, output: Path | None) -> None:
        self._system, self._output = system, output
        self._jobs: dict[str, str] = {}
        self._served: set[str] = set()
        """Jobs that need not be watched: their agents have joined, or nobody wants them."""
        self._looked = float("-inf")
        self._said: list[str] = []

    def note(self, workers: Iterable[tuple[object, Any]]) -> None:
        """Learns the jobs of a cluster's workers: pairs of name and worker object."""
        for name, worker in workers:
            job_id = getattr(worker, "job_id", None)
            if job_id and str(job_id) not in self._jobs:
                self._jobs[str(job_id)] = str(name)
                self._looked = float("-inf")

    async def look(
        self, asked: Collection[str], up: Collection[str], agents: Collection[str]
    ) -> list[str]:
        """What is known of the hosts that are awaited, a line each.

        Args:
            asked: Names of all vehicles that should be there.
            up: Those that have joined.
            agents: Those whose agents have joined.

        Raises:
            PoolError: A job has ended before its agent joined.
        """
        self._served |= {job_id for job_id, name in self._jobs.items() if name in agents}
        if time.monotonic() - self._looked < LOOK_S:
            return self._said
        awaited = {j: name for j, name in self._jobs.items() if j not in self._served}
        jobs = await self._ask(awaited)
        self._looked = time.monotonic()
        self._said = [
            f"{name}: {self._about(name, up, awaited, jobs)}"
            for name in sorted(set(asked) - set(agents))
        ]
        return self._said

    def forget(self, kept: Collection[str]) -> None:
        """Nobody wants the vehicles any more but those kept."""
        self._served |= {job_id for job_id, name in self._jobs.items() if name not in kept}

    async def why_lost(self, name: str) -> str:
        """What the batch system says of a lost host's job; "" when it says nothing."""
        job_id = next((j for j in reversed(self._jobs) if self._jobs[j] == name), None)
        if job_id is None or self._system is None:
            return ""
        self._served.add(job_id)
        deadline = time.monotonic() + SETTLE_S
        job = await self._find(job_id)
        while job is not None and not job.ended and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
            job = await self._find(job_id)
        told = str(job) if job else "known no more"
        return f"{self._system.title} job {job_id} is {told}"

    async def _find(self, job_id: str) -> BatchJob | None:
        assert self._system is not None
        try:
            return (await self._system.look([job_id])).get(job_id)
        except OSError:
            return None

    async def _ask(self, awaited: dict[str, str]) -> dict[str, BatchJob]:
        """The state of jobs; those of which nothing is known are left out.

        Raises:
            PoolError: One has ended.
        """
        if self._system is None or not awaited:
            return {}
        try:
            jobs = await self._system.look(awaited)
        except OSError as error:
            return {j: BatchJob(j, "of unknown state", str(error), False) for j in awaited}
        for job_id, name in awaited.items():
            job = jobs.get(job_id)
            if job is None or job.ended:
                self._served.add(job_id)
                raise PoolError(self._early_end(job_id, name, job))
        return jobs

    def _early_end(self, job_id: str, name: str, job: BatchJob | None) -> str:
        assert self._system is not None
        state = str(job) if job else "known no more"
        tail = output_tail(self._output, job_id) if self._output else ""
        said = f"; it wrote:\n{tail}" if tail else "; it wrote nothing"
        return (
            f"{self._system.title} job {job_id} ended before host {name} was ready: {state}{said}"
        )

    def _about(
        self, name: str, up: Collection[str], awaited: dict[str, str], jobs: dict[str, BatchJob]
    ) -> str:
        own = [jobs[j] for j, vehicle in awaited.items() if vehicle == name and j in jobs]
        title = self._system.title if self._system else ""
        said = [f"{title} job {job.job_id} {job}" for job in own]
        if name in up:
            said.append("its Dask worker has joined, the agent starts")
        return "; ".join(said) or "asked for"
