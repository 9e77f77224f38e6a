"""The engine of pools whose hosts a Dask cluster class gets: batch systems, clouds, anything.

The class is named by its import path and used as it is. Its workers are plain Dask workers, and to
us only vehicles (`host/vehicle.py`); the scheduler is ours and lives in the pool's process,
whatever the class would have used.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas_magic import probe
from taas_magic.config import PoolConfig
from taas_magic.engines.base import Engine
from taas_magic.engines.batch import Vehicles, find_system
from taas_magic.errors import PoolError, UsageError
from taas_magic.host.spec import ASK_HOST
from taas_magic.host.vehicle import agent_name, vehicle_of
from taas_magic.messages import AgentKeys, pack
from taas_magic.plan import HostCapacity

if TYPE_CHECKING:
    from distributed import SpecCluster

    from taas_magic.engines.keys import Keys

_BATCH_PACKAGE = "dask_jobqueue"
_NO_REQUEUE = {"slurm": "--no-requeue", "pbs": "-r n"}
"""What keeps a batch system from starting a job a second time, by dask-jobqueue's name of it."""


class DaskClassEngine(Engine):
    """Opens the Dask cluster class that `engine` names, with `options` as its keyword arguments."""

    name = "dask class"

    def __init__(self, pool: PoolConfig) -> None:
        super().__init__(pool)
        self._vehicles = Vehicles(None, None)
        package = pool.engine.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            extra = "taas-magic[jobqueue]" if package == _BATCH_PACKAGE else package
            raise UsageError(
                f'pool "{pool.name}": engine "{pool.engine}" needs the package "{package}", which '
                f"is not installed here: pip install '{extra}'"
            )

    def capacity(self) -> HostCapacity:
        """What taas.toml says: hosts that must be queued for cannot be asked."""
        cores = self.pool.cores or self.pool.options.get("cores") or probe.cores()
        return HostCapacity(self.pool.gpus or 0, int(cores))

    def prepare(self) -> None:
        """Nothing can be started ahead of a batch system."""

    def open(self, scheduler: type, keys: "Keys", folder: str) -> "SpecCluster":
        from distributed import Security

        cluster_class, options = _find_class(self.pool), {**self.pool.options, "asynchronous": True}
        given = Security(**keys.cluster(talks=not _is_batch(cluster_class)))
        ours = {"security": given, "protocol": "tls://", "name": self.pool.name}
        options |= _accepted(cluster_class, ours)
        if _is_batch(cluster_class):
            system = str(cluster_class.job_cls.config_name)
            options = batch_options(self.pool, options, system, Path(folder))
            self._vehicles = Vehicles(find_system(system), Path(options["log_directory"]))
        cluster = _make_cluster(self.pool, cluster_class, options)
        place = _scheduler_place(cluster)
        cluster.worker_spec.clear()  # hosts are taken when a run needs them

        def make_scheduler(**options: Any) -> Any:
            return _with_vehicles(scheduler(**options), self.pool, keys)

        secure = Security(**keys.scheduler())
        cluster.scheduler_spec = {
            "cls": make_scheduler,
            "options": {**place, "protocol": "tls://", "security": secure, "dashboard": False},
        }
        return cluster

    async def ensure(self, cluster: Any, count: int) -> list[str]:
        names = [str(worker.name) for worker in cluster.scheduler.workers.values()]
        agents = {vehicle_of(name) for name in names} - {""}
        lines = await self._vehicles.look([*map(str, cluster.worker_spec)], names, agents)
        self.ask_for(cluster, count)
        try:
            await cluster
        except RuntimeError as error:
            await cluster.scale_down([n for n, w in cluster.workers.items() if not _is_up(w)])
            raise PoolError(f"{self.pool.engine} could not start a host: {_gist(error)}") from error
        self._vehicles.note(cluster.workers.items())
        return lines

    async def release(self, cluster: Any, keep: Collection[str]) -> None:
        kept = {vehicle_of(name) for name in keep}
        await super().release(cluster, kept)
        self._vehicles.forget(kept)

    async def why_lost(self, agent: str) -> str:
        return await self._vehicles.why_lost(vehicle_of(agent))


def _is_up(worker: Any) -> bool:
    from distributed import Status

    return bool(worker.status == Status.running)


def _gist(error: RuntimeError) -> str:
    """What a batch system's command wrote, of all that dask-jobqueue says of it."""
    text = str(error)
    return text.partition("stderr:\n")[2].strip() or text


def _find_class(pool: PoolConfig) -> Any:
    """The class that a pool names.

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


def _make_cluster(
    pool: PoolConfig, cluster_class: Any, options: Mapping[str, Any]
) -> "SpecCluster":
    """The cluster as its class makes it, not started.

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


def _accepted(cluster_class: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those keyword arguments that a class takes."""
    parameters = inspect.signature(cluster_class).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(values)
    return {name: value for name, value in values.items() if name in parameters}


def _is_batch(cluster_class: type) -> bool:
    return any(base.__module__.startswith(f"{_BATCH_PACKAGE}.") for base in cluster_class.__mro__)


def batch_options(
    pool: PoolConfig, options: Mapping[str, Any], system: str, folder: Path
) -> dict[str, Any]:
    """The keyword arguments of a dask-jobqueue class: what suits vehicles, then the user's own.

    Args:
        pool: The pool's settings.
        options: What is asked for so far.
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


def _scheduler_place(cluster: "SpecCluster") -> dict[str, Any]:
    """Where our scheduler listens: on one address, which the hosts reach."""
    from distributed import Scheduler
    from distributed.utils import get_ip

    spec = cluster.scheduler_spec or {}
    made = spec.get("cls")
    options = (
        spec.get("options", {}) if isinstance(made, type) and issubclass(made, Scheduler) else {}
    )
    place = {key: options[key] for key in ("host", "interface", "port") if options.get(key)}
    return place if place.keys() & {"host", "interface"} else {**place, "host": get_ip()}


def _with_vehicles(scheduler: Any, pool: PoolConfig, keys: "Keys") -> Any:
    """Has the scheduler make a vehicle of every worker that joins."""
    from distributed.protocol.pickle import dumps

    from taas_magic.host.vehicle import Vehicle

    interface = pool.interface or pool.options.get("interface") or ""
    vehicle = Vehicle(interface, pool.lease_s, pool.preload)
    scheduler.worker_plugins[Vehicle.name] = dumps(vehicle)

    def new_host(vehicle: str) -> bytes:
        """`AgentKeys` of the agent that a vehicle is to bring, packed."""
        name = agent_name(vehicle)
        return pack(AgentKeys(name=name, security=keys.host(name)))

    scheduler.handlers[ASK_HOST] = new_host
    return scheduler
