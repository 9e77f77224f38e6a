"""The engine of pools whose hosts a Dask cluster class gets: batch systems, clouds, anything.

The class is named by its import path and used as it is. Its workers are plain Dask workers, and to
us only vehicles (`remote/vehicle.py`); the scheduler is ours and lives in the pool's process,
whatever the class would have used.
"""

import importlib
import importlib.util
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas_magic.config import PoolConfig
from taas_magic.engines.base import Engine
from taas_magic.errors import UsageError
from taas_magic.plan import HostCapacity

if TYPE_CHECKING:
    from distributed import Security, SpecCluster

_BATCH_PACKAGE = "dask_jobqueue"
_NO_REQUEUE = {"slurm": "--no-requeue", "pbs": "-r n"}
"""Directives that keep a batch system from starting a job a second time, by dask-jobqueue's name."""


class DaskClassEngine(Engine):
    """Opens the Dask cluster class that `engine` names, with `options` as its keyword arguments."""

    name = "dask class"

    def __init__(self, pool: PoolConfig) -> None:
        super().__init__(pool)
        package = pool.engine.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            extra = "taas-magic[jobqueue]" if package == _BATCH_PACKAGE else package
            raise UsageError(
                f"pool {pool.name!r}: engine {pool.engine!r} needs the package {package!r}, which "
                f"is not installed here: pip install '{extra}'"
            )

    def capacity(self) -> HostCapacity:
        """What taas.toml says: hosts that must be queued for cannot be asked."""
        cores = self.pool.cores or self.pool.options.get("cores") or len(os.sched_getaffinity(0))
        return HostCapacity(self.pool.gpus or 0, int(cores))

    def prepare(self) -> None:
        """Nothing can be started ahead of a batch system."""

    def open(self, scheduler: type, security: Mapping[str, Any], folder: str) -> "SpecCluster":
        from distributed import Security

        secure = Security(**security)
        cluster = _make_cluster(self.pool, secure, Path(folder))
        place = _scheduler_place(cluster)
        cluster.worker_spec.clear()  # hosts are taken when a run needs them

        def make_scheduler(**options: Any) -> Any:
            return _with_vehicles(scheduler(**options), self.pool, security)

        cluster.scheduler_spec = {
            "cls": make_scheduler,
            "options": {**place, "protocol": "tls://", "security": secure, "dashboard": False},
        }
        return cluster


def _make_cluster(pool: PoolConfig, security: "Security", folder: Path) -> "SpecCluster":
    """The cluster as its class makes it, not started.

    Raises:
        UsageError: There is no such class, it is none, or it refuses the options.
    """
    from distributed import SpecCluster

    cluster_class = _find_class(pool)
    if not (isinstance(cluster_class, type) and issubclass(cluster_class, SpecCluster)):
        raise UsageError(f"pool {pool.name!r}: {pool.engine!r} is not a Dask SpecCluster")
    ours = {"security": security, "protocol": "tls://", "name": pool.name}
    options = {**pool.options, **_accepted(cluster_class, ours), "asynchronous": True}
    if _is_batch(cluster_class):
        options = batch_options(pool, options, _config_name(cluster_class), folder)
    try:
        cluster = cluster_class(**options)
    except (TypeError, ValueError) as error:
        raise UsageError(f"pool {pool.name!r}: {pool.engine} refuses its options: {error}") from error
    if cluster.new_spec is None:
        raise UsageError(f"pool {pool.name!r}: {pool.engine} says not how to start one more worker")
    return cluster


def _find_class(pool: PoolConfig) -> Any:
    module, _, name = pool.engine.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"pool {pool.name!r}: there is no {pool.engine!r}: {error}") from error


def _accepted(cluster_class: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those keyword arguments that a class takes."""
    parameters = inspect.signature(cluster_class).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(values)
    return {name: value for name, value in values.items() if name in parameters}


def _is_batch(cluster_class: type) -> bool:
    return any(base.__module__.startswith(f"{_BATCH_PACKAGE}.") for base in cluster_class.__mro__)


def _config_name(cluster_class: Any) -> str:
    return str(cluster_class.job_cls.config_name)


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
        raise UsageError(f"pool {pool.name!r}: a job is one host: processes must be 1")
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
    options = spec.get("options", {}) if isinstance(made, type) and issubclass(made, Scheduler) else {}
    place = {key: options[key] for key in ("host", "interface", "port") if options.get(key)}
    return place if place.keys() & {"host", "interface"} else {**place, "host": get_ip()}


def _with_vehicles(scheduler: Any, pool: PoolConfig, security: Mapping[str, Any]) -> Any:
    """Has the scheduler make a vehicle of every worker that joins."""
    from distributed.protocol.pickle import dumps

    from taas_magic.remote.vehicle import Vehicle

    interface = pool.interface or pool.options.get("interface") or ""
    scheduler.worker_plugins[Vehicle.name] = dumps(Vehicle(security, interface, pool.lease_s))
    return scheduler
