"""What a host is told of a run: by the controller to the agent, by the agent to its ranks."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from taas_magic.host.system import LOOPBACK, RUN_TOKEN, name_of
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import LoaderPlaces
from taas_magic.plan import HostPlan, Plan
from taas_magic.store.rule import Identity, StoreRule

if TYPE_CHECKING:
    from taas_magic.store.guard import Means

HOST = "TAAS_HOST"
"""The environment variable that has the name of a rank's host, as the user calls it."""

REACH = "TAAS_REACH"
"""The environment variable that has the address at which a rank finds what `reach` names."""

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


class Origin(Struct, frozen=True):
    """What the ranks take over from the notebook.

    Attributes:
        cwd: The project store, a rank's working directory.
        environ: The kernel's environment; empty for hosts of another machine.
        sys_path: The kernel's import path.
        colors: IPython's colour scheme, for tracebacks.
        changed: What of the environment the notebook changed itself; None: removed.
        store: The project store, as the notebook's machine knows it; None where it has none.
    """

    cwd: str
    environ: Mapping[str, str]
    sys_path: tuple[str, ...]
    colors: str = "neutral"
    changed: Mapping[str, str | None] = {}
    store: Identity | None = None

    def on_another_machine(self, environ: Mapping[str, str], sys_path: Sequence[str]) -> "Origin":
        """The same for a host that has programs, packages and devices of its own.

        Args:
            environ: The host's own environment.
            sys_path: Its own import path.
        """
        users = [path for path in users_path(self.sys_path) if path not in sys_path]
        merged = {**environ, **self.changed}
        kept = {name: value for name, value in merged.items() if value is not None}
        return structs.replace(self, environ=kept, sys_path=(*sys_path, *users))


def environ_changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """Return what of an environment was changed; None for a variable that was removed.

    Only that travels to other machines: the rest of a kernel's environment describes its own
    machine, where its programs and libraries lie, and which of its GPUs it may use.
    """
    changed = {name: value for name, value in now.items() if before.get(name) != value}
    return {**changed, **{name: None for name in before if name not in now}}


def users_path(
    path: Iterable[str], prefixes: Iterable[str] = (sys.prefix, sys.base_prefix)
) -> list[str]:
    """Return what of an import path is neither the interpreter's nor of installed packages.

    Args:
        path: `sys.path`, absolute.
        prefixes: Where interpreter and packages lie.
    """
    folders = [os.path.join(prefix, "") for prefix in prefixes]
    packages = ("site-packages", "dist-packages")
    return [
        entry
        for entry in path
        if not any(os.path.join(entry, "").startswith(folder) for folder in folders)
        and not any(part in packages or part.endswith(".zip") for part in Path(entry).parts)
    ]


class HostSpec(Struct, frozen=True):
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
        reach: A port of the notebook's machine that ranks connect to, as "tls://host:port"; as it
            is sent to a host, where that finds it. "": none.
        reads_only: Whether the project store is only read: the run does not own it, and what is
            written to a copy of it stays there.
    """

    plan: Plan
    host_rank: int
    run_dir: str
    origin: Origin
    master_addr: str = LOOPBACK
    master_port: int = 0
    attempt: int = 0
    fetchers: Mapping[int, LoaderPlaces] = {}
    home_dir: str = ""
    requires: tuple[str, ...] | None = None
    n_hosts: int = 1
    reach: str = ""
    reads_only: bool = False

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

    def _defaults(self, interface: str) -> dict[str, str]:
        """Environment variables that the notebook's own ones override."""
        defaults = {
            "OMP_NUM_THREADS": str(self.share.threads_per_rank),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # torchrun's default
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        }
        if self.n_hosts == 1:
            interface = name_of(LOOPBACK)
        # gloo listens on what the host's name resolves to, which may be any interface or none
        defaults |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), interface)
        if self.n_hosts > 1:
            defaults["NCCL_SOCKET_IFNAME"] = f"={interface}"
        return defaults

    def for_ranks(self, pipes: Path, means: "Means", host: str, interface: str) -> "RankSpec":
        """What the ranks of this host are told.

        Args:
            pipes: The host's folder of named pipes.
            means: What this host has to hold ranks to the rule of the store.
            host: The host's name.
            interface: Name of the network interface that ranks of several hosts use.
        """
        return RankSpec(
            run_dir=Path(self.run_dir),
            pipes=pipes,
            cwd=self.origin.cwd,
            environ={
                **self._defaults(interface),
                **self.origin.environ,
                RUN_TOKEN: self.plan.run_id,
                HOST: host,
                **({REACH: self.reach} if self.reach else {}),
            },
            env=self.plan.env,
            sys_path=self.origin.sys_path,
            colors=self.origin.colors,
            out=self.plan.out,
            store=None if self.reads_only else self.plan.store,
            means=means,
        )


@dataclass(frozen=True)
class RankSpec:
    """What all ranks of a host share; pickled, as it goes to a fork of the same program.

    Attributes:
        run_dir: The run's folder.
        pipes: The host's folder of named pipes.
        cwd: A rank's working directory.
        environ: Environment variables; torchrun's override them.
        env: Those of `--env`, which override torchrun's.
        sys_path: The import path.
        colors: IPython's colour scheme.
        out: As `--out` has them.
        store: The rule of the project store.
        means: What this host has to hold ranks to it.
    """

    run_dir: Path
    pipes: Path
    cwd: str
    environ: Mapping[str, str]
    env: Mapping[str, str]
    sys_path: tuple[str, ...]
    colors: str
    out: tuple[str, ...]
    store: StoreRule | None
    means: "Means"


def without_environ(spec: HostSpec) -> HostSpec:
    """A share without what another machine has no use for.

    A kernel's environment may hold keys of all kinds. Those that the notebook set are `changed`.
    """
    return structs.replace(spec, origin=structs.replace(spec.origin, environ={}))


def of_host(spec: HostSpec, host_rank: int) -> HostSpec:
    """A run's share for one of its hosts.

    What all others are to do is left out: told to each of a thousand hosts, it would be a million.
    """
    hosts = spec.plan.hosts
    mine = structs.replace(spec.plan, hosts=(hosts[host_rank],))
    return structs.replace(spec, plan=mine, host_rank=host_rank, n_hosts=len(hosts))


ROLE = "default"

TORCHRUN_NAMES = (
    *("LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
)
"""All of them."""


def torchrun_variables(
    spec: HostSpec, local_rank: int, port: int, error_file: Path
) -> dict[str, str]:
    """What torchrun would set for a rank of this host.

    Args:
        spec: The host's share of the run.
        local_rank: The rank's place on the host.
        port: Of the attempt's store, on the run's first host.
        error_file: Where `torch.distributed.elastic.multiprocessing.errors.record` writes.
    """
    share, world_size = spec.share, str(spec.plan.world_size)
    rank = str(share.first_rank + local_rank)
    return {
        "LOCAL_RANK": str(local_rank),
        "RANK": rank,
        "GROUP_RANK": str(spec.host_rank),
        "ROLE_RANK": rank,
        "ROLE_NAME": ROLE,
        "LOCAL_WORLD_SIZE": str(share.ranks),
        "WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": str(spec.n_hosts),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": spec.master_addr,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(spec.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.plan.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.plan.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }
