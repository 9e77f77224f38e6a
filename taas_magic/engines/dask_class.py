"""The engine of pools whose hosts a Dask cluster class gets: batch systems, clouds, anything.

The class is named by its import path and used as it is. Its workers are plain Dask workers, and to
us only vehicles (`host/vehicle.py`); the scheduler is ours and lives in the pool's process,
whatever the class would have used. Slurm and PBS are asked what became of jobs whose hosts have
not joined, or are lost; other systems' jobs are waited for without a word.
"""

import asyncio
import importlib
import importlib.util
import inspect
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas_magic import probe
from taas_magic.config import PoolConfig
from taas_magic.engines.base import Engine, log_tail
from taas_magic.errors import PoolError, UsageError
from taas_magic.host.vehicle import agent_name, vehicle_of
from taas_magic.messages import AgentKeys, GetAgentKeys, handlers
from taas_magic.plan import HostCapacity

if TYPE_CHECKING:
    from distributed import Scheduler, SpecCluster

    from taas_magic.engines.keys import Keys

_BATCH_PACKAGE = "dask_jobqueue"
_NO_REQUEUE = {"slurm": "--no-requeue", "pbs": "-r n"}
"""What keeps a batch system from starting a job a second time, by dask-jobqueue's name of it."""


class DaskClassEngine(Engine):
    """Opens the Dask cluster class that `engine` names, with `options` as its keyword arguments."""

    def __init__(self, pool: PoolConfig) -> None:
        super().__init__(pool)
        self._vehicles = Vehicles(None, None)
        self._turn = asyncio.Lock()
        """Hosts that are being given back and hosts that are asked for may have the same names."""
        package = pool.engine.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            extra = "taas-magic[jobqueue]" if package == _BATCH_PACKAGE else package
            raise UsageError(
                f'pool "{pool.name}": engine "{pool.engine}" needs the package "{package}", which '
                f"is not installed here: pip install '{extra}'"
            )

    def capacity(self) -> HostCapacity:
        """Return what taas.toml says, else no GPU and this machine's cores: none can be asked."""
        cores = self.pool.cores or self.pool.options.get("cores") or probe.cores()
        return HostCapacity(self.pool.gpus or 0, int(cores))

    @asynccontextmanager
    async def open(self, scheduler: type, keys: "Keys", folder: str) -> AsyncIterator["Scheduler"]:
        """See `Engine.open`; raises UsageError where the class cannot be used."""
        from distributed import Security

        pool, cluster_class = self.pool, _find_class(self.pool)
        classes = (base.__module__ for base in cluster_class.__mro__)
        is_batch = any(module.startswith(f"{_BATCH_PACKAGE}.") for module in classes)
        given = Security(**keys.cluster(talks=not is_batch))
        ours = {"security": given, "protocol": "tls://", "name": pool.name}
        options = {**pool.options, "asynchronous": True, **_accepted(cluster_class, ours)}
        if is_batch:
            system = str(cluster_class.job_cls.config_name)
            options = batch_options(pool, options, system, Path(folder))
            self._vehicles = Vehicles(find_system(system), Path(options["log_directory"]))
        self._cluster = cluster = _make_cluster(pool, cluster_class, options)
        place = _scheduler_place(cluster)
        cluster.worker_spec.clear()  # hosts are taken when a run needs them

        def make_scheduler(**options: Any) -> Any:
            return _with_vehicles(scheduler(**options), pool, keys)

        secure = Security(**keys.scheduler())
        cluster.scheduler_spec = {
            "cls": make_scheduler,
            "options": {**place, "protocol": "tls://", "security": secure, "dashboard": False},
        }
        async with cluster:
            try:
                yield cluster.scheduler
            finally:
                # Who still waits for hosts has no turn any more: Dask would wait for those.
                await self._turn.acquire()
                await self._keep(())

    async def bring(self, count: int) -> list[str]:
        """See `Engine.bring`; the batch system is asked about jobs whose hosts have not joined.

        Who stops waiting does not undo half: a host that was asked for at that moment would be
        known to nobody.
        """
        return await asyncio.shield(self._bring(count))

    async def _bring(self, count: int) -> list[str]:
        from distributed import Status

        async with self._turn:
            cluster = self._cluster
            names = [str(worker.name) for worker in cluster.scheduler.workers.values()]
            agents = {vehicle_of(name) for name in names} - {""}
            lines = await self._vehicles.look([*map(str, cluster.worker_spec)], names, agents)
            # no host has the name of an earlier one: Dask closes, 15 s after a worker has left
            # (`distributed.deploy.lost-worker-timeout`), what then has its name and has not joined
            for _ in range(count - len(cluster.worker_spec)):
                cluster.worker_spec[self.new_name()] = cluster.new_spec
            try:
                await cluster
            except (RuntimeError, OSError) as error:  # OSError: the system's command is not here
                workers = cluster.workers.items()
                await cluster.scale_down([n for n, it in workers if it.status != Status.running])
                text = str(error)  # all that dask-jobqueue says; of that, what the command wrote
                gist = text.partition("stderr:\n")[2].strip() or text
                raise PoolError(f"{self.pool.engine} could not start a host: {gist}") from error
            self._vehicles.note(cluster.workers.items())
            return lines

    async def give_back(self, keep: Collection[str]) -> None:
        """See `Engine.give_back`; a host is given back with the vehicle that brought its agent."""
        async with self._turn:
            await self._keep(keep)

    async def _keep(self, keep: Collection[str]) -> None:
        kept = {vehicle_of(name) for name in keep}
        left = [name for name in self._cluster.worker_spec if str(name) not in kept]
        await self._cluster.scale_down(left)
        self._vehicles.forget(kept)

    async def why_lost(self, agent: str) -> str:
        """See `Engine.why_lost`; the batch system is asked about the job of the host."""
        return await self._vehicles.why_lost(vehicle_of(agent))


def _find_class(pool: PoolConfig) -> Any:
    """Return the class that a pool names.

    Raises:
        UsageError: There is none, or it is no Dask cluster.
    """
    from distributed import SpecCluster

    module, _, name = pool.engine.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f'pool "{pool.name}": there is no "{pool.engine}": {error}') from error
    if not (isinstance(found, type) and issubclass(found, SpecCluster)):
        raise UsageError(f'pool "{pool.name}": "{pool.engine}" is not a Dask SpecCluster')
    return found


def _accepted(cluster_class: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those keyword arguments that a class takes."""
    parameters = inspect.signature(cluster_class).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(values)
    return {name: value for name, value in values.items() if name in parameters}


def batch_options(
    pool: PoolConfig, options: Mapping[str, Any], system: str, folder: Path
) -> dict[str, Any]:
    """Return keyword arguments of a dask-jobqueue class: what suits vehicles, then the user's own.

    Args:
        system: The batch system, as dask-jobqueue calls it.
        folder: The pool's private folder, which hosts must see: keys (0600) lie in it, and the
            output of jobs.

    Raises:
        UsageError: One job is to hold several Dask workers.
    """
    if options.get("processes", 1) != 1:
        raise UsageError(f'pool "{pool.name}": a job is one host: processes must be 1')
    jobs = folder / "jobs"
    jobs.mkdir(mode=0o700, exist_ok=True)
    defaults = {
        "processes": 1,
        "nanny": False,
        "log_directory": str(jobs),
        "shared_temp_directory": str(folder),
        "job_name": f"taas-{pool.name}",
        "cores": pool.cores,
        "python": pool.python,
        "interface": pool.interface,
    }
    given = {name: value for name, value in defaults.items() if value is not None}
    once = [_NO_REQUEUE[system]] if system in _NO_REQUEUE else []
    directives = [*once, *options.get("job_extra_directives", ())]
    return {**given, **options, "job_extra_directives": directives}


def _make_cluster(
    pool: PoolConfig, cluster_class: Any, options: Mapping[str, Any]
) -> "SpecCluster":
    """Return the cluster as its class makes it, not started.

    Raises:
        UsageError: The class refuses its options, or cannot say how to start a worker.
    """
    try:
        cluster = cluster_class(**options)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f'pool "{pool.name}": {pool.engine} refuses its options: {error}'
        ) from error
    if cluster.new_spec is None:
        raise UsageError(f'pool "{pool.name}": {pool.engine} says not how to start one more worker')
    return cluster


def _scheduler_place(cluster: "SpecCluster") -> dict[str, Any]:
    """Return where our scheduler listens: on one address, which the hosts reach."""
    from distributed import Scheduler
    from distributed.utils import get_ip

    spec = cluster.scheduler_spec or {}
    made = spec.get("cls")
    is_dasks = isinstance(made, type) and issubclass(made, Scheduler)
    options = spec.get("options", {}) if is_dasks else {}
    place = {key: options[key] for key in ("host", "interface", "port") if options.get(key)}
    return place if place.keys() & {"host", "interface"} else {**place, "host": get_ip()}


def _with_vehicles(scheduler: Any, pool: PoolConfig, keys: "Keys") -> Any:
    """Have the scheduler make a vehicle of every worker that joins."""
    from distributed.protocol.pickle import dumps

    from taas_magic.host.vehicle import Vehicle

    interface = pool.interface or pool.options.get("interface") or ""
    vehicle = Vehicle(interface, pool.lease_s, pool.preload)
    scheduler.worker_plugins[Vehicle.name] = dumps(vehicle)

    async def new_host(asked: GetAgentKeys) -> AgentKeys:
        name = agent_name(asked.vehicle)
        return AgentKeys(name=name, security=keys.host(name))

    scheduler.handlers |= handlers({GetAgentKeys: new_host})
    return scheduler


ASK_S = 10.0
"""How long a batch system may take to answer."""

_HISTORY_HINT = "use -x"  # OpenPBS's; Torque takes -x for something else

_UNKNOWN = ("invalid job id", "unknown job id", "has finished")
"""What commands complain of that fail only because jobs have ended too long ago to be known."""

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
    """Return the jobs in the output of `squeue --format=%i|%T|%r`."""
    jobs = {}
    for line in text.splitlines():
        words = line.strip().split("|", 2)
        if len(words) == 3:
            job_id, state, reason = words
            reason = "" if reason == "None" else reason
            jobs[job_id] = BatchJob(job_id, state, reason, state not in _SLURM_LIVES)
    return jobs


def parse_qstat(text: str) -> dict[str, BatchJob]:
    """Return the jobs in the output of `qstat -f`, of OpenPBS, PBS Pro or Torque."""
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
        command: Asks about jobs; their ids follow.
        history: Asks about jobs that have ended, where `command` does not tell of them.
    """

    title: str
    command: Callable[[Collection[str]], list[str]]
    parse: Callable[[str], dict[str, BatchJob]]
    history: Callable[[Collection[str]], list[str]] | None = None

    async def look(self, job_ids: Collection[str]) -> dict[str, BatchJob]:
        """Return the jobs that the system knows, by id; one that it does not know has ended.

        Raises:
            OSError: It cannot be asked, or does not answer.
        """
        if not job_ids:
            return {}
        found, complaint = await self._ask(self.command(job_ids))
        if self.history and _HISTORY_HINT in complaint:
            ended, _ = await self._ask(self.history(job_ids))
            found = {**ended, **found}
        ended_long_ago = any(said in complaint.lower() for said in _UNKNOWN)
        if complaint and not found and not ended_long_ago:
            raise OSError(complaint)
        return found

    async def _ask(self, command: list[str]) -> tuple[dict[str, BatchJob], str]:
        """Return what a command says, and what it complains of if it fails."""
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


_SQUEUE = ["squeue", "--noheader", "--states=all", "--format=%i|%T|%r"]

SYSTEMS: Mapping[str, BatchSystem] = {
    "slurm": BatchSystem("Slurm", lambda ids: [*_SQUEUE, f"--jobs={','.join(ids)}"], parse_squeue),
    "pbs": BatchSystem(
        title="PBS",
        command=lambda ids: ["qstat", "-f", *ids],
        parse=parse_qstat,
        history=lambda ids: ["qstat", "-x", "-f", *ids],
    ),
}
"""By the name that dask-jobqueue has for each."""


def find_system(name: str) -> BatchSystem | None:
    """Return the batch system of that name, if it is known and its command is here."""
    system = SYSTEMS.get(name)
    return system if system and shutil.which(system.command([])[0]) else None


def output_tail(folder: Path, job_id: str) -> str:
    """Return the last lines of what a job wrote, from the newest file named with its number."""
    number = job_id.partition(".")[0]
    named = re.compile(rf"(?<!\d){re.escape(number)}(?!\d)")
    files = [file for file in folder.glob("*") if named.search(file.name) and file.stat().st_size]
    return log_tail(max(files, key=lambda file: file.stat().st_mtime)) if files else ""


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
        """Those whose jobs need not be watched: their agents have joined, or nobody wants them."""
        self._looked = float("-inf")
        self._said: list[str] = []

    def note(self, workers: Iterable[tuple[object, Any]]) -> None:
        """Learn the jobs of a cluster's workers: pairs of name and worker object."""
        for name, worker in ((str(name), worker) for name, worker in workers):
            job_id = getattr(worker, "job_id", None)
            if job_id and self._jobs.get(name) != str(job_id):
                self._jobs[name] = str(job_id)
                self._served.discard(name)  # a worker that was lost has another job, and its name
                self._looked = float("-inf")

    async def look(
        self, asked: Collection[str], up: Collection[str], agents: Collection[str]
    ) -> list[str]:
        """Return what is known of the hosts that are awaited, a line each.

        Args:
            asked: Names of all vehicles that should be there.
            up: Those that have joined.
            agents: Those whose agents have joined.

        Raises:
            PoolError: A job has ended before its agent joined.
        """
        self._served |= set(agents)
        if time.monotonic() - self._looked < LOOK_S:
            return self._said
        jobs = await self._ask({n: j for n, j in self._jobs.items() if n not in self._served})
        self._looked = time.monotonic()
        awaited = sorted(set(asked) - set(agents))
        self._said = [f"{name}: {self._about(jobs.get(name), name in up)}" for name in awaited]
        return self._said

    def forget(self, kept: Collection[str]) -> None:
        """Stop watching vehicles that nobody wants any more: all but those kept."""
        self._served |= self._jobs.keys() - set(kept)

    async def why_lost(self, name: str) -> str:
        """Return what the batch system says of a lost host's job; "" when it says nothing."""
        job_id = self._jobs.get(name)
        if job_id is None or self._system is None:
            return ""
        self._served.add(name)
        deadline = time.monotonic() + SETTLE_S
        try:
            while (job := (await self._system.look([job_id])).get(job_id)) and not job.ended:
                if time.monotonic() >= deadline:
                    break
                await asyncio.sleep(0.5)
        except OSError as error:
            return f"{self._system.title} job {job_id} is of unknown state ({error})"
        return f"{self._system.title} job {job_id} is {job or 'known no more'}"

    async def _ask(self, awaited: dict[str, str]) -> dict[str, BatchJob]:
        """Return the jobs of vehicles, which are awaited with those ids.

        Raises:
            PoolError: One has ended.
        """
        if self._system is None or not awaited:
            return {}
        try:
            jobs = await self._system.look(awaited.values())
        except OSError as error:
            state = "of unknown state", str(error), False
            return {name: BatchJob(job_id, *state) for name, job_id in awaited.items()}
        for name, job_id in awaited.items():
            job = jobs.get(job_id)
            if job is None or job.ended:
                self._served.add(name)
                tail = output_tail(self._output, job_id) if self._output else ""
                wrote = f":\n{tail}" if tail else " nothing"
                raise PoolError(
                    f"{self._system.title} job {job_id} ended before host {name} was ready: "
                    f"{job or 'known no more'}; it wrote{wrote}"
                )
        return {name: jobs[job_id] for name, job_id in awaited.items()}

    def _about(self, job: BatchJob | None, is_up: bool) -> str:
        said = [f"{self._system.title} job {job.job_id} {job}"] if self._system and job else []
        said += ["its Dask worker has joined, the agent starts"] * is_up
        return "; ".join(said) or "asked for"
