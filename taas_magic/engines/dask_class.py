"""The engine for pools whose hosts come from a Dask cluster class: batch systems, clouds, others.

The class starts plain Dask workers, the vehicles. The only task of a vehicle is to start an agent
of taas-magic on its host (`host/vehicle.py`). The pool's scheduler replaces the Dask scheduler that
the class would start.

For Slurm and PBS, the engine queries the batch system for the state of jobs whose hosts have not
joined or are lost. Messages to the user contain these states.
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
"""Directive that forbids a batch system to requeue a job, by dask-jobqueue's name of the system."""


class DaskClassEngine(Engine):
    """Engine that gets hosts from the Dask cluster class that the pool's `engine` setting names.

    The pool's `options` are the keyword arguments of the class.

    Raises:
        UsageError: The class's package is not installed, or a pool of dask-jobqueue has the option
            `processes` with a value other than 1.
    """

    def __init__(self, pool: PoolConfig) -> None:
        super().__init__(pool)
        self._vehicles = Vehicles(None, None)
        self._turn = asyncio.Lock()
        """Lock for all calls that make Dask start or end workers."""
        self._ending: set[asyncio.Task[None]] = set()
        package = pool.engine.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            extra = "taas-magic[jobqueue]" if package == _BATCH_PACKAGE else package
            raise UsageError(
                f'pool "{pool.name}": engine "{pool.engine}" needs the package "{package}", which '
                f"is not installed here: pip install '{extra}'"
            )

        processes = pool.options.get("processes", 1)
        if package == _BATCH_PACKAGE and processes != 1:
            raise UsageError(
                f'pool "{pool.name}": each Dask job is one host: remove the option "processes", '
                f"and set gpus = {processes}"
            )

    def capacity(self) -> HostCapacity:
        """Return the numbers of GPUs and cores of one host, as taas.toml specifies them.

        If taas.toml lacks these numbers, use 0 GPUs and the number of cores of this machine.
        """
        cores = self.pool.cores or self.pool.options.get("cores") or probe.cores()
        return HostCapacity(self.pool.gpus or 0, int(cores))

    @asynccontextmanager
    async def open(self, scheduler: type, keys: "Keys", folder: str) -> AsyncIterator["Scheduler"]:
        """Create and run the Dask cluster until the `with` block ends; then end all its workers.

        The cluster starts without workers; `request_hosts` adds them. From the end of the block on,
        `request_hosts` can start no more hosts. These settings of the cluster come from this
        method:

        - The cluster's scheduler has the class `scheduler`. It uses TLS, and makes each worker
          start an agent.
        - The cluster class gets the pool's options. If the class accepts them, it also gets the
          pool's name and the settings for TLS.
        - A class of dask-jobqueue also gets the defaults of `batch_options`.

        For a class of dask-jobqueue, this method also creates the `Vehicles` that query the batch
        system.

        Args:
            scheduler: Class of the scheduler.
            keys: Certificates and keys of the pool.
            folder: The pool's private folder, which the hosts of a batch system must share.

        Yields:
            The running scheduler.

        Raises:
            UsageError: The class does not exist, is no Dask cluster class, or refuses its options.
        """
        from distributed import Security

        pool, cluster_class = self.pool, _find_class(self.pool)
        classes = (base.__module__ for base in cluster_class.__mro__)
        is_batch = any(module.startswith(f"{_BATCH_PACKAGE}.") for module in classes)
        given = Security(**keys.cluster(workers_connect=not is_batch))
        ours = {"security": given, "protocol": "tls://", "name": pool.name}
        options = {**pool.options, "asynchronous": True, **_accepted_arguments(cluster_class, ours)}
        if is_batch:
            system = str(cluster_class.job_cls.config_name)
            options = batch_options(pool, options, system, Path(folder))
            self._vehicles = Vehicles(find_system(system), Path(options["log_directory"]))
        self._cluster = cluster = _make_cluster(pool, cluster_class, options)
        place = _scheduler_options(cluster)
        cluster.worker_spec.clear()  # hosts are requested when a run needs them

        def make_scheduler(**options: Any) -> Any:
            return _make_workers_start_agents(scheduler(**options), pool, keys)

        secure = Security(**keys.scheduler())
        cluster.scheduler_spec = {
            "cls": make_scheduler,
            "options": {**place, "protocol": "tls://", "security": secure, "dashboard": False},
        }
        async with cluster:
            _forget_workers_that_leave(cluster)
            try:
                yield cluster.scheduler
            finally:
                # From here on no `request_hosts` may start hosts, because Dask would wait for them.
                await self._turn.acquire()
                await self._end_workers_except(())

    async def request_hosts(self, count: int) -> list[str]:
        """Request as many hosts as are missing from a total of `count`; do not wait for hosts.

        Also query the batch system for the jobs of hosts that have not joined. If the task that
        calls this method is cancelled, the request continues in the background. So the engine
        records each host that it has requested.

        Returns:
            One line for the user about each host of earlier calls that cannot start ranks yet.

        Raises:
            PoolError: A host could not be started, or a host's batch job ended before the host
                could start ranks.
        """
        return await asyncio.shield(self._request_hosts(count))

    async def _request_hosts(self, count: int) -> list[str]:
        """Start as many Dask workers as are missing from a total of `count`.

        First query the batch system for the jobs of earlier workers whose agents are not ready. If
        such a job has ended, remove its worker, so that the next call starts another one. Each new
        worker gets a name that no worker has had before. At the end, record the batch jobs of all
        workers.

        Returns:
            One line for the user about each worker that had been requested before this call and
            whose agent is not ready.

        Raises:
            PoolError: A worker could not be started. All workers that do not run have then been
                removed. Or the batch job of an earlier worker ended before the worker's agent was
                ready.
        """
        from distributed import Status

        async with self._turn:
            cluster = self._cluster
            names = [str(worker.name) for worker in cluster.scheduler.workers.values()]
            agents = {vehicle_of(name) for name in self.ready} - {""}
            try:
                lines = await self._vehicles.describe_awaited(
                    [*map(str, cluster.worker_spec)], names, agents
                )
            except JobEnded as ended:
                await cluster.scale_down([ended.worker])
                raise
            # Never reuse a name. `ready` keeps the agents of lost workers. And some time after a
            # worker has left (the setting `distributed.deploy.lost-worker-timeout`), Dask closes a
            # worker of the same name that has not joined yet.
            for _ in range(count - len(cluster.worker_spec)):
                cluster.worker_spec[self.new_name()] = cluster.new_spec
            try:
                await cluster
            except (RuntimeError, OSError) as error:  # OSError: the command is not installed here
                workers = cluster.workers.items()
                await cluster.scale_down([n for n, it in workers if it.status != Status.running])
                text = str(error)  # dask-jobqueue's message quotes what the command wrote
                gist = text.partition("stderr:\n")[2].strip() or text
                raise PoolError(f"{self.pool.engine} could not start a host: {gist}") from error
            self._vehicles.record_jobs(cluster.workers.items())
            return lines

    def is_starting(self) -> bool:
        """Return whether a host's Dask worker has joined, but the host cannot start ranks yet.

        Such a host counts as making progress, because a stuck agent ends its host. A worker that
        waits in the batch system does not count.
        """
        requested = set(map(str, self._cluster.worker_spec))
        joined = {str(worker.name) for worker in self._cluster.scheduler.workers.values()}
        return bool(requested & joined - {vehicle_of(agent) for agent in self.ready})

    async def release_hosts(self, keep: Collection[str]) -> None:
        """End the Dask workers of all hosts whose agents are not in `keep`.

        This includes workers that were requested and have not joined.
        """
        async with self._turn:
            await self._end_workers_except(keep)

    async def _end_workers_except(self, keep: Collection[str]) -> None:
        kept = {vehicle_of(name) for name in keep}
        left = [name for name in self._cluster.worker_spec if str(name) not in kept]
        await self._cluster.scale_down(left)
        self._vehicles.forget(kept)

    async def why_lost(self, agent: str) -> str:
        """Return the state of a lost host's batch job in words; "" if there is no batch job.

        Then a background task ends the host's Dask worker, which may still run although its agent
        is silent.

        Args:
            agent: Name of the host's agent.
        """
        worker = vehicle_of(agent)
        why = await self._vehicles.why_lost(worker)
        self._ending.add(ending := asyncio.create_task(self._end_worker(worker)))
        ending.add_done_callback(self._ending.discard)
        return why

    async def _end_worker(self, name: str) -> None:
        async with self._turn:
            await self._cluster.scale_down([name])


def _forget_workers_that_leave(cluster: "SpecCluster") -> None:
    """Remove each worker that leaves the scheduler from the cluster's table `worker_spec`.

    Dask would start each worker of this table again, also if no run needs the worker any more.
    """
    from distributed import Scheduler, SchedulerPlugin

    class Leaving(SchedulerPlugin):
        """Plugin that the scheduler informs of each worker that joins or leaves."""

        name = "taas-vehicles"

        def __init__(self) -> None:
            self._names: dict[str, str] = {}

        def add_worker(self, scheduler: Scheduler, worker: str) -> None:
            self._names[worker] = str(scheduler.workers[worker].name)

        def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
            cluster.worker_spec.pop(self._names.pop(worker, None), None)

    cluster.scheduler.add_plugin(Leaving())


def _find_class(pool: PoolConfig) -> Any:
    """Import and return the Dask cluster class that a pool's setting `engine` names.

    Raises:
        UsageError: The class does not exist, or is no Dask cluster class.
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


def _accepted_arguments(cluster_class: type, values: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(cluster_class).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(values)
    return {name: value for name, value in values.items() if name in parameters}


def batch_options(
    pool: PoolConfig, options: Mapping[str, Any], system: str, folder: Path
) -> dict[str, Any]:
    """Return keyword arguments for a dask-jobqueue class: our defaults and the user's options.

    For Slurm and PBS, also add a directive that forbids the batch system to requeue jobs. The
    user's own directives come after it. This function creates the folder for the output of batch
    jobs.

    Args:
        pool: The pool's settings, which determine some defaults.
        options: The user's own keyword arguments, which replace the defaults.
        system: dask-jobqueue's name of the batch system.
        folder: The pool's private folder, with keys and the output of jobs. The hosts must share
            this folder with this machine.
    """
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
    """Return a new object of a Dask cluster class, without starting the cluster.

    Raises:
        UsageError: The class refuses its options, or cannot start further workers, because its
            attribute `new_spec` is None.
    """
    try:
        cluster = cluster_class(**options)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f'pool "{pool.name}": {pool.engine} refuses its options: {error}'
        ) from error
    if cluster.new_spec is None:
        raise UsageError(
            f'pool "{pool.name}": {pool.engine} does not say how to start one more worker'
        )
    return cluster


def _scheduler_options(cluster: "SpecCluster") -> dict[str, Any]:
    """Return options with which the pool's scheduler listens on an address that hosts can reach.

    The options are the values of `host`, `interface` and `port` that the cluster class sets for
    Dask's own scheduler. If the class sets neither `host` nor `interface`, `host` is this machine's
    IP address.
    """
    from distributed import Scheduler
    from distributed.utils import get_ip

    spec = cluster.scheduler_spec or {}
    made = spec.get("cls")
    is_dasks = isinstance(made, type) and issubclass(made, Scheduler)
    options = spec.get("options", {}) if is_dasks else {}
    place = {key: options[key] for key in ("host", "interface", "port") if options.get(key)}
    return place if place.keys() & {"host", "interface"} else {**place, "host": get_ip()}


def _make_workers_start_agents(scheduler: Any, pool: PoolConfig, keys: "Keys") -> Any:
    """Make every vehicle (plain Dask worker) of `scheduler` start an agent; return the scheduler.

    Register a worker plugin that starts the agent, and a handler by which the scheduler sends the
    agent's name and keys to the vehicle.
    """
    from distributed.protocol.pickle import dumps

    from taas_magic.host.vehicle import Vehicle

    interface = pool.interface or pool.options.get("interface") or ""
    vehicle = Vehicle(interface, pool.lease_s, pool.start_timeout_s, pool.preload)
    scheduler.worker_plugins[Vehicle.name] = dumps(vehicle)

    async def new_host(request: GetAgentKeys) -> AgentKeys:
        name = agent_name(request.vehicle)
        return AgentKeys(name=name, security=keys.host(name))

    scheduler.handlers |= handlers({GetAgentKeys: new_host})
    return scheduler


QUERY_LIMIT_S = 10.0
"""Maximum seconds for a command that queries a batch system, such as `squeue`."""

_HISTORY_HINT = "use -x"  # in an error text of OpenPBS; in Torque, -x has another meaning

_UNKNOWN = ("invalid job id", "unknown job id", "has finished")
"""Parts of error texts by which a batch system says that it has forgotten an ended job."""

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
    """The state of one job of a batch system.

    Attributes:
        job_id: The batch system's id of the job.
        state: State in words of the batch system, such as "PENDING".
        reason: Reason for the state, or exit status; "" if the batch system gives none.
        ended: Whether the job has ended and will not run again.
    """

    job_id: str
    state: str
    reason: str
    ended: bool

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason else self.state


def parse_squeue(text: str) -> dict[str, BatchJob]:
    """Return the jobs in the output of `squeue --format=%i|%T|%r`, by job id.

    A job has ended unless its state is a state of a waiting or active job, such as PENDING or
    RUNNING (`_SLURM_LIVES`). Lines of another format are ignored.
    """
    jobs = {}
    for line in text.splitlines():
        words = line.strip().split("|", 2)
        if len(words) == 3:
            job_id, state, reason = words
            reason = "" if reason == "None" else reason
            jobs[job_id] = BatchJob(job_id, state, reason, state not in _SLURM_LIVES)
    return jobs


def parse_qstat(text: str) -> dict[str, BatchJob]:
    """Return the jobs in the output of `qstat -f` (OpenPBS, PBS Pro or Torque), by job number.

    qstat reports a job's state as a letter. `BatchJob.state` is the word for this letter, such as
    "QUEUED" for Q; an unknown letter stays. `BatchJob.reason` is the job's exit status; if there is
    none, it is the job's comment. A job has ended if the letter is C, F or X.
    """
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
    """Commands and parser for queries of one kind of batch system.

    Attributes:
        title: Name of the batch system for the user.
        command: Function that returns a command line, which lists the jobs with the given ids.
        parse: Function that returns the jobs in the output of such a command line, by id.
        history: Function that returns a second command line, which also lists ended jobs. None if
            the first command line lists ended jobs itself.
    """

    title: str
    command: Callable[[Collection[str]], list[str]]
    parse: Callable[[str], dict[str, BatchJob]]
    history: Callable[[Collection[str]], list[str]] | None = None

    async def query(self, job_ids: Collection[str]) -> dict[str, BatchJob]:
        """Return the jobs with the given ids that the batch system still knows, by id.

        The batch system forgets a job some time after the job's end. So a job that is missing from
        the result has ended.

        First run the command line of `command`. In Slurm and Torque, it lists ended jobs, too. In
        OpenPBS, only the command line of `history` lists ended jobs. If the error text of the first
        command says so, also run the second one.

        If the first command fails and no job is found, the error text decides. If this text says
        that the batch system has forgotten a job, return an empty dict. Otherwise, raise OSError.

        Raises:
            OSError: A command cannot be run, or does not end within `QUERY_LIMIT_S`. Or the first
                command fails for a reason other than a forgotten job, and no job is found.
        """
        if not job_ids:
            return {}
        found, complaint = await self._run_command(self.command(job_ids))
        if self.history and _HISTORY_HINT in complaint:
            ended, _ = await self._run_command(self.history(job_ids))
            found = {**ended, **found}
        ended_long_ago = any(phrase in complaint.lower() for phrase in _UNKNOWN)
        if complaint and not found and not ended_long_ago:
            raise OSError(complaint)
        return found

    async def _run_command(self, command: list[str]) -> tuple[dict[str, BatchJob], str]:
        """Run a command that queries jobs; kill the command after `QUERY_LIMIT_S` seconds.

        Returns:
            Two values: the jobs in the command's output, by id; and the command's error text, or ""
            if the command succeeds.

        Raises:
            OSError: The command cannot be run, or did not end within `QUERY_LIMIT_S`.
        """
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), QUERY_LIMIT_S)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
            raise OSError(f"{self.title} did not answer within {QUERY_LIMIT_S:.0f} s") from None
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
"""The batch systems that taas-magic can query, by dask-jobqueue's name of the system."""


def find_system(name: str) -> BatchSystem | None:
    """Return the description of the batch system that dask-jobqueue calls `name`.

    Return None if taas-magic cannot query this system, or if the system's command (such as
    `squeue`) is not installed on this machine.
    """
    system = SYSTEMS.get(name)
    return system if system and shutil.which(system.command([])[0]) else None


def output_tail(folder: Path, job_id: str) -> str:
    """Return the last lines of a batch job's newest output file, and the file's path.

    The names of the job's output files contain the job's number. Return "" if `folder` has no such
    file, or only empty ones.
    """
    number = job_id.partition(".")[0]
    named = re.compile(rf"(?<!\d){re.escape(number)}(?!\d)")
    files = [file for file in folder.glob("*") if named.search(file.name) and file.stat().st_size]
    return log_tail(max(files, key=lambda file: file.stat().st_mtime)) if files else ""


QUERY_GAP_S = 2.0
"""Minimum seconds between two queries of a batch system for the jobs of missing hosts."""

LONGEST_QUERY_GAP_S = 30.0
"""Maximum seconds between two queries; the gap grows while the states of all jobs stay the same."""

JOB_END_WAIT_S = 2.0
"""Maximum seconds that the pool waits until a batch system reports the end of a lost host's job."""


class JobEnded(PoolError):
    """Raised if a batch job ended before its host could start ranks.

    Args:
        worker: Name of the job's Dask worker.
    """

    def __init__(self, worker: str, message: str) -> None:
        super().__init__(message)
        self.worker = worker


class Vehicles:
    """Registry of a pool's vehicles (Dask workers that start agents) and of their batch jobs.

    The registry queries the batch system for the states of the jobs, for messages to the user.

    Args:
        system: The batch system that runs the vehicles; None if taas-magic cannot query it.
        output: Folder with the output of batch jobs; None if there is no such folder.
    """

    def __init__(self, system: BatchSystem | None, output: Path | None) -> None:
        self._system, self._output = system, output
        self._jobs: dict[str, str] = {}
        self._served: set[str] = set()
        """Names of workers whose jobs need no more queries.

        Their agents are ready, their jobs have ended, or the pool has returned their hosts.
        """
        self._queried_at, self._gap_s = float("-inf"), QUERY_GAP_S
        self._workers: list[set[str]] = []
        """Arguments of the last call of `describe_awaited`."""
        self._lines: list[str] = []

    def record_jobs(self, workers: Iterable[tuple[object, Any]]) -> None:
        """Record the id of the batch job that runs each worker of a cluster.

        Workers without a job id are ignored. If a worker has a new job, the next call of
        `describe_awaited` queries the jobs at once.

        Args:
            workers: Pairs of a worker's name and dask-jobqueue's worker object.
        """
        for name, worker in ((str(name), worker) for name, worker in workers):
            job_id = getattr(worker, "job_id", None)
            if job_id and self._jobs.get(name) != str(job_id):
                self._jobs[name] = str(job_id)
                self._queried_at = float("-inf")

    async def describe_awaited(
        self, requested: Collection[str], up: Collection[str], agents: Collection[str]
    ) -> list[str]:
        """Return one line for the user about each requested worker whose agent is not ready.

        The lines contain job states from the batch system. A call soon after the last query returns
        the lines of that query, unless `record_jobs` has found a new job since then. "Soon" means
        `QUERY_GAP_S` seconds at first. Each query with the same result makes this time longer, up
        to `LONGEST_QUERY_GAP_S`. Other lines or arguments make it short again. From this call on,
        the jobs of the workers in `agents` are not queried.

        Args:
            requested: Names of all requested Dask workers.
            up: Names of the Dask workers that have joined the pool's scheduler.
            agents: Names of the Dask workers whose agents are ready: their hosts can start ranks.

        Raises:
            JobEnded: A worker's batch job ended before its agent was ready.
        """
        self._served |= set(agents)
        workers = [*map(set, (requested, up, agents))]
        if workers != self._workers:
            self._workers, self._gap_s = workers, QUERY_GAP_S
        if time.monotonic() - self._queried_at < self._gap_s:
            return self._lines
        jobs = await self._query_jobs(
            {n: j for n, j in self._jobs.items() if n not in self._served}
        )
        self._queried_at = time.monotonic()
        awaited = sorted(set(requested) - set(agents))
        lines = [f"{name}: {self._describe_job(jobs.get(name), name in up)}" for name in awaited]
        is_same = lines == self._lines
        self._gap_s = min(1.2 * self._gap_s, LONGEST_QUERY_GAP_S) if is_same else QUERY_GAP_S
        self._lines = lines
        return lines

    def forget(self, kept: Collection[str]) -> None:
        """Stop querying the batch jobs of all workers whose names are not in `kept`."""
        self._served |= self._jobs.keys() - set(kept)

    async def why_lost(self, name: str) -> str:
        """Return the state of a lost host's batch job in words.

        Wait up to `JOB_END_WAIT_S` seconds until the batch system reports that the job has ended.
        If the job has not ended by then, return its current state. If the query fails, the text
        says that the state is unknown. Later calls of `describe_awaited` do not query this job.

        If the host has no known batch job, or if taas-magic cannot query the batch system, return
        "" at once.

        Args:
            name: Name of the host's Dask worker.
        """
        job_id = self._jobs.get(name)
        if job_id is None or self._system is None:
            return ""
        self._served.add(name)
        deadline = time.monotonic() + JOB_END_WAIT_S
        try:
            while (job := (await self._system.query([job_id])).get(job_id)) and not job.ended:
                if time.monotonic() >= deadline:
                    break
                await asyncio.sleep(0.5)
        except OSError as error:
            return f"{self._system.title} job {job_id} is in an unknown state ({error})"
        return f"{self._system.title} job {job_id} is {job or 'no longer known'}"

    async def _query_jobs(self, awaited: dict[str, str]) -> dict[str, BatchJob]:
        """Query the batch jobs of workers whose agents are not ready; return them by worker name.

        If the query fails, each job in the result has the state "in an unknown state", with the
        error as the reason. If taas-magic cannot query the batch system, or if `awaited` is empty,
        return an empty dict.

        Args:
            awaited: Job id of each worker, by worker name.

        Raises:
            JobEnded: A job has ended, or the batch system has forgotten the job. The message has
                the last lines of the job's output. Later calls do not query this job.
        """
        if self._system is None or not awaited:
            return {}
        try:
            jobs = await self._system.query(awaited.values())
        except OSError as error:
            state = "in an unknown state", str(error), False
            return {name: BatchJob(job_id, *state) for name, job_id in awaited.items()}
        for name, job_id in awaited.items():
            job = jobs.get(job_id)
            if job is None or job.ended:
                self._served.add(name)
                tail = output_tail(self._output, job_id) if self._output else ""
                output = (
                    f"The end of the job's output:\n{tail}" if tail else "The job printed nothing"
                )
                raise JobEnded(
                    name,
                    f"{self._system.title} job {job_id} ended before host {name} was ready: "
                    f"{job or 'no longer known'}. {output}",
                )
        return {name: jobs[job_id] for name, job_id in awaited.items()}

    def _describe_job(self, job: BatchJob | None, is_up: bool) -> str:
        parts = [f"{self._system.title} job {job.job_id} {job}"] if self._system and job else []
        parts += ["its Dask worker has joined, and the agent starts"] * is_up
        return "; ".join(parts) or "requested; its Dask worker has not joined yet"
