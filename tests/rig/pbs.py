"""Stand-ins for `qsub`, `qstat` and `qdel`: Debian has no package of a PBS.

They queue and run the real job script that dask-jobqueue writes, and behave like OpenPBS: job ids
such as `3.rig`; output in `<id>.OU` and `<id>.ER`; `qstat -f` with `comment` and `Exit_status`;
finished jobs only with `-x`; `qdel` sends SIGTERM and later SIGKILL; OpenPBS's exit codes. They
cannot show effects of a site's own configuration.

As a program, this file is one of the three commands, or the process that runs a job (`watch`).
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.eventually import HUNG_S

SERVER = "rig"
FOLDER = "TAAS_RIG_PBS"
KILL_DELAY_S = 10.0
ENDED_BY_SIGNAL = 256
FULL = "Not Running: Insufficient amount of resource: ncpus"
COMMANDS = ("qsub", "qstat", "qdel")

State = dict[str, Any]


@dataclass(frozen=True)
class Pbs:
    """A running queue.

    Attributes:
        folder: Folder with the queue's state, and with the commands in `bin`.
    """

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables for the commands; PATH has the queue's `bin` first."""
        return {FOLDER: str(self.folder), "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}

    def jobs(self) -> dict[str, str]:
        """Return the state letter of each job, by job id."""
        with _state(self.folder) as state:
            return {job_id: job["state"] for job_id, job in state["jobs"].items()}

    def processes(self, job_id: str) -> list[psutil.Process]:
        """Return the processes of a running job."""
        with _state(self.folder) as state:
            first = psutil.Process(state["jobs"][_whole(job_id)]["pid"])
        return [first, *first.children(recursive=True)]

    def wait_until_empty(self) -> None:
        """Wait until no job waits or runs."""
        deadline = time.monotonic() + HUNG_S
        while set(self.jobs().values()) - {"F"}:
            assert time.monotonic() < deadline, f"jobs did not end: {self.jobs()}"
            time.sleep(0.05)

    def delete(self, job_id: str) -> None:
        """Run `qdel`, and ignore its exit code: the job may have finished meanwhile.

        `qdel` may start the next job's process. So this must not run in the test's own process.
        """
        qdel = [str(self.folder / "bin" / "qdel"), job_id]
        environ = {**os.environ, **self.environ}
        subprocess.run(qdel, env=environ, stderr=subprocess.DEVNULL, check=False, timeout=HUNG_S)


@contextlib.contextmanager
def pbs_up(
    slots: int, commands: list[list[str]] | None = None, parent: Path | None = None
) -> Iterator[Pbs]:
    """Run a queue until the block ends; then delete its jobs, wait for their end, and remove it.

    Args:
        slots: Number of jobs that can run at the same time.
        commands: Command prefix for the job script in each slot, such as one that enters a host
            of hosts.py; None runs all jobs on this machine.
        parent: Folder in which to create the queue's folder; hosts must see it.
    """
    folder = Path(tempfile.mkdtemp(prefix="taas-pbs-", dir=parent))
    (folder / "bin").mkdir()
    for name in COMMANDS:
        file = folder / "bin" / name
        file.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        file.chmod(0o755)
    enter = commands or [[] for _ in range(slots)]
    (folder / "state.json").write_text(json.dumps({"next": 1, "enter": enter, "jobs": {}}))
    pbs = Pbs(folder)
    try:
        yield pbs
    finally:
        for job_id, letter in pbs.jobs().items():
            if letter != "F":
                pbs.delete(job_id)
        pbs.wait_until_empty()
        shutil.rmtree(folder)


@contextlib.contextmanager
def _state(folder: Path) -> Iterator[State]:
    """Lock the queue's state and yield it; save it after the block."""
    path = folder / "state.json"
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        state = json.load(file)
        yield state
        file.seek(0)
        file.truncate()
        json.dump(state, file)


def _submit(folder: Path, script: Path) -> int:
    """Queue a copy of a job script, start waiting jobs in free slots, and print the job's id."""
    text = script.read_text()
    directives = dict(re.findall(r"^#PBS -([A-Za-z]) (.*)$", text, flags=re.MULTILINE))
    with _state(folder) as state:
        job_id = f"{state['next']}.{SERVER}"
        state["next"] += 1
        (folder / f"{job_id}.SC").write_text(text)  # a copy: the caller removes the script
        state["jobs"][job_id] = {
            "name": directives.get("N", script.name),
            "output": directives.get("o", os.getcwd()),
            "error": directives.get("e", os.getcwd()),
            "state": "Q",
            "comment": "",
            "slot": None,
        }
    _schedule(folder)
    print(job_id)
    return 0


def _schedule(folder: Path) -> None:
    """Start waiting jobs in free slots, in order of submission.

    A process of its own (`watch`) runs each started job. If no slot is free, a job gets the comment
    `FULL`.
    """
    with _state(folder) as state:
        jobs = state["jobs"]
        used = {job["slot"] for job in jobs.values() if job["state"] == "R"}
        free = [slot for slot in range(len(state["enter"])) if slot not in used]
        for job_id, job in jobs.items():
            if job["state"] != "Q":
                continue
            if not free:
                job["comment"] = FULL
                continue
            job.update(state="R", slot=free.pop(0), comment="Job run")
            words = [sys.executable, __file__, "watch", job_id]
            subprocess.Popen(  # not with qsub's stdout: its caller reads that to the end
                words,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )


def _watch(folder: Path, job_id: str) -> int:
    """Run a job's script to its end, as PBS's mom does.

    Do nothing if the job was deleted before. At the end, record the exit status, and start further
    jobs.
    """
    with _state(folder) as state:
        job = state["jobs"][job_id]
        if job["state"] == "F":
            return 0
        enter = state["enter"][job["slot"]]
        with (
            open(Path(job["output"]) / f"{job_id}.OU", "wb") as output,
            open(Path(job["error"]) / f"{job_id}.ER", "wb") as error,
        ):
            process = subprocess.Popen(
                [*enter, "bash", str(folder / f"{job_id}.SC")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=error,
                start_new_session=True,
                env={**os.environ, "PBS_JOBID": job_id, "PBS_JOBNAME": job["name"]},
            )
        job["pid"] = process.pid
    code = process.wait()
    with _state(folder) as state:
        status = code if code >= 0 else ENDED_BY_SIGNAL - code
        state["jobs"][job_id].update(state="F", exit=status, comment="Job finished")
    _schedule(folder)
    return 0


def _delete(folder: Path, job_id: str) -> int:
    """Delete a job as `qdel` does.

    If the job runs, end its processes. Otherwise, the job counts as finished at once.

    Returns:
        The exit code of `qdel`; not 0 if the job is unknown or finished.
    """
    job_id = _whole(job_id)
    with _state(folder) as state:
        job = state["jobs"].get(job_id)
        if job is None:
            return _complain(f"qdel: Unknown Job Id {job_id}", 153)
        if job["state"] == "F":
            return _complain(f"qdel: Job has finished {job_id}", 35)
        if "pid" not in job:  # it waits, or `watch` has not started
            job.update(state="F", exit=ENDED_BY_SIGNAL + signal.SIGTERM, comment="Job deleted")
    if "pid" not in job:
        _schedule(folder)  # its slot is free
        return 0
    _end(job["pid"])
    return 0


def _end(pid: int) -> None:
    """Send SIGTERM to a job's process group, and SIGKILL after `KILL_DELAY_S`."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)
        deadline = time.monotonic() + KILL_DELAY_S
        while time.monotonic() < deadline:
            os.killpg(pid, 0)
            time.sleep(0.05)
        os.killpg(pid, signal.SIGKILL)


def _show(folder: Path, words: list[str]) -> int:
    """Print jobs as `qstat -f` does, and return the exit code; finished jobs need `-x`."""
    history = "-x" in words
    code = 0
    with _state(folder) as state:
        for job_id in (_whole(word) for word in words if not word.startswith("-")):
            job = state["jobs"].get(job_id)
            if job is None:
                code = _complain(f"qstat: Unknown Job Id {job_id}", 153)
            elif job["state"] == "F" and not history:
                why = "use -x or -H to obtain historical job information"
                code = _complain(f"qstat: {job_id} Job has finished, {why}", 35)
            else:
                print(_block(job_id, job))
    return code


def _block(job_id: str, job: State) -> str:
    """Return the text of `qstat -f` about a job; a comment continues in a second line."""
    lines = [
        f"Job Id: {job_id}",
        f"    Job_Name = {job['name']}",
        f"    job_state = {job['state']}",
    ]
    if job["comment"]:
        lines.append(f"    comment = {job['comment'][:20]}\n\t{job['comment'][20:]}")
    if "exit" in job:
        lines.append(f"    Exit_status = {job['exit']}")
    return "\n".join(lines) + "\n"


def _whole(job_id: str) -> str:
    return job_id if "." in job_id else f"{job_id}.{SERVER}"


def _complain(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code


def main(command: str, words: list[str]) -> int:
    folder = Path(os.environ[FOLDER])
    if command == "qsub":
        return _submit(folder, Path(words[-1]))
    if command == "qstat":
        return _show(folder, words)
    if command == "watch":
        return _watch(folder, words[0])
    return max(_delete(folder, job_id) for job_id in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
