"""What a batch system says of our jobs: Slurm's `squeue` and PBS's `qstat`, read and put in words.

The parsers are pure. Other systems have no entry: their jobs are waited for without a word.
"""

import asyncio
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

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
class Job:
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


def parse_squeue(text: str) -> dict[str, Job]:
    """The jobs in the output of `squeue --format=%i|%T|%r`."""
    jobs = {}
    for line in text.splitlines():
        words = line.strip().split("|", 2)
        if len(words) == 3:
            job_id, state, reason = words
            reason = "" if reason == "None" else reason
            jobs[job_id] = Job(job_id, state, reason, state not in _SLURM_LIVES)
    return jobs


def parse_qstat(text: str) -> dict[str, Job]:
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
        jobs[job_id] = Job(job_id, state, reason, letter in ("C", "F", "X"))
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
    parse: Callable[[str], dict[str, Job]]
    history: Callable[[Collection[str]], list[str]] | None = None

    async def look(self, job_ids: Collection[str]) -> dict[str, Job]:
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

    async def _ask(self, command: list[str]) -> tuple[dict[str, Job], str]:
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
