"""What a host is told of a run, as the keeper sends it to the agent and the agent to its ranks."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from taas_magic.data.entries import Entry
from taas_magic.environ import applied, users_path
from taas_magic.journal import RunFolder
from taas_magic.plan import HostPlan, Plan
from taas_magic.remote.interface import LOOPBACK, name_of
from taas_magic.travel.same import Identity

RUN_TOKEN = "TAAS_RUN_ID"
"""The environment variable by which the children of a run's ranks are known."""

VALUE = "<value>"
"""The name of the last expression's value among a run's results; no variable can have it."""


@dataclass(frozen=True)
class Place:
    """A host, as its agent found it.

    Attributes:
        host: Its name, as the user calls it.
        address: Where its ranks and fetchers are reached by those of other hosts.
        interface: Name of the network interface that has this address.
        is_foreign: Whether it is another machine than the notebook's.
        sys_path: The agent's import path.
    """

    host: str
    address: str
    interface: str
    is_foreign: bool = False
    sys_path: tuple[str, ...] = ()


@dataclass(frozen=True)
class Origin:
    """What the ranks take over from the notebook.

    Attributes:
        cwd: The project store, a rank's working directory.
        environ: The kernel's environment.
        sys_path: The kernel's import path.
        colors: IPython's colour scheme, for tracebacks.
        changed: What of the environment the notebook changed itself; None: removed.
        store: The project store, as the notebook's machine knows it; None where it has none.
    """

    cwd: str
    environ: Mapping[str, str]
    sys_path: tuple[str, ...]
    colors: str = "neutral"
    changed: Mapping[str, str | None] = field(default_factory=dict)
    store: Identity | None = None

    def on_another_machine(self, environ: Mapping[str, str], sys_path: Sequence[str]) -> "Origin":
        """The same for a host that has programs, packages and devices of its own.

        Args:
            environ: The host's own environment.
            sys_path: Its own import path.
        """
        users = [path for path in users_path(self.sys_path) if path not in sys_path]
        return dataclasses.replace(
            self, environ=applied(environ, self.changed), sys_path=(*sys_path, *users)
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Origin":
        """The inverse of `dataclasses.asdict`."""
        store = Identity(**values["store"]) if values.get("store") else None
        return cls(**{**values, "sys_path": tuple(values["sys_path"]), "store": store})


@dataclass(frozen=True)
class HostSpec:
    """One host's share of a run.

    Attributes:
        plan: The run's; of its hosts, as it is sent to one (`of_host`), only that one.
        host_rank: This host's place among the run's hosts.
        run_dir: The run's folder.
        origin: What the ranks take over from the notebook.
        master_addr: Where the first host has the ranks' store.
        master_port: Its port; 0 on the first host, which makes it.
        attempt: Which start of the ranks this is, from 0.
        fetchers: Where the fetchers that have started listen, by number.
        home_dir: The run's folder on the notebook's machine, where `run_dir` is another.
        requires: Modules that must be installed on the hosts; None asks hosts nothing.
        n_hosts: Hosts of the run.
    """

    plan: Plan
    host_rank: int
    run_dir: str
    origin: Origin
    master_addr: str = LOOPBACK
    master_port: int = 0
    attempt: int = 0
    fetchers: Mapping[str, Entry] = field(default_factory=dict)
    home_dir: str = ""
    requires: tuple[str, ...] | None = None
    n_hosts: int = 1

    @property
    def share(self) -> HostPlan:
        """The ranks of this host."""
        return next(host for host in self.plan.hosts if host.host_rank == self.host_rank)

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self.run_dir))

    def told_log(self, rank: int) -> str:
        """Where the user finds a rank's log."""
        return str(RunFolder(Path(self.home_dir or self.run_dir)).log(rank))

    def to_json(self) -> dict[str, Any]:
        """As plain values, for the wire."""
        return {**dataclasses.asdict(self), "plan": self.plan.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "HostSpec":
        """The inverse of `to_json`."""
        origin = Origin.from_json(values["origin"])
        parsed = {"plan": Plan.from_json(values["plan"]), "origin": origin}
        return cls(**{**values, **parsed})

    def _defaults(self, interface: str) -> dict[str, str]:
        """Environment variables that the notebook's own ones override."""
        defaults = {
            "OMP_NUM_THREADS": str(self.share.threads_per_rank),
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        }
        if self.n_hosts == 1:
            interface = name_of(LOOPBACK)
        # gloo listens on what the host's name resolves to, which may be any interface or none
        defaults |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), interface)
        if self.n_hosts > 1:
            defaults["NCCL_SOCKET_IFNAME"] = f"={interface}"
        return defaults

    def for_ranks(self, pipes: Path, means: str, interface: str) -> dict[str, Any]:
        """What `rank_main` is called with.

        Args:
            pipes: The host's folder of named pipes.
            means: What this host has to hold ranks to the rule of the store.
            interface: Name of the network interface that ranks of several hosts use.
        """
        return {
            "run_dir": self.run_dir,
            "pipes": str(pipes),
            "cwd": self.origin.cwd,
            "environ": {**self.origin.environ, RUN_TOKEN: self.plan.run_id},
            "env": dict(self.plan.env),
            "sys_path": list(self.origin.sys_path),
            "colors": self.origin.colors,
            "out": list(self.plan.out),
            "store": self.plan.store,
            "means": means,
            "defaults": self._defaults(interface),
        }


def of_host(spec: Mapping[str, Any], host_rank: int) -> dict[str, Any]:
    """A `HostSpec` as plain values, for one of the run's hosts.

    What all others are to do is left out: told to each of a thousand hosts, it would be a million.
    """
    plan = spec["plan"]
    mine = {**plan, "hosts": [plan["hosts"][host_rank]]}
    return {**spec, "plan": mine, "host_rank": host_rank, "n_hosts": len(plan["hosts"])}
