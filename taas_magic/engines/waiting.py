"""Hosts that a Dask cluster class was asked for: whether they still come, and why one was lost.

Lives in the pool's process, on its event loop.
"""

import asyncio
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from taas_magic.engines.batch import BatchSystem, Job, output_tail
from taas_magic.errors import PoolError

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

    async def _find(self, job_id: str) -> Job | None:
        assert self._system is not None
        try:
            return (await self._system.look([job_id])).get(job_id)
        except OSError:
            return None

    async def _ask(self, awaited: dict[str, str]) -> dict[str, Job]:
        """The state of jobs; those of which nothing is known are left out.

        Raises:
            PoolError: One has ended.
        """
        if self._system is None or not awaited:
            return {}
        try:
            jobs = await self._system.look(awaited)
        except OSError as error:
            return {j: Job(j, "of unknown state", str(error), False) for j in awaited}
        for job_id, name in awaited.items():
            job = jobs.get(job_id)
            if job is None or job.ended:
                self._served.add(job_id)
                raise PoolError(self._early_end(job_id, name, job))
        return jobs

    def _early_end(self, job_id: str, name: str, job: Job | None) -> str:
        assert self._system is not None
        state = str(job) if job else "known no more"
        tail = output_tail(self._output, job_id) if self._output else ""
        said = f"; it wrote:\n{tail}" if tail else "; it wrote nothing"
        return (
            f"{self._system.title} job {job_id} ended before host {name} was ready: {state}{said}"
        )

    def _about(
        self, name: str, up: Collection[str], awaited: dict[str, str], jobs: dict[str, Job]
    ) -> str:
        own = [jobs[j] for j, vehicle in awaited.items() if vehicle == name and j in jobs]
        title = self._system.title if self._system else ""
        said = [f"{title} job {job.job_id} {job}" for job in own]
        if name in up:
            said.append("its Dask worker has joined, the agent starts")
        return "; ".join(said) or "asked for"
