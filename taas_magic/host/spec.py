"""Descriptions of a run for its hosts, and the names of messages between the pool and its agents.

The controller sends a `HostSpec` to the agent; the agent passes `ProcessSpec` and `FetcherSpec` on
to its ranks and fetchers. The controller's calls, their responses, events and heartbeats share the
one stream that an agent opens when it joins. So nothing ever connects to a host, and messages keep
their order. The kernel imports this module, so it imports neither Dask nor torch.
"""

import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from taas_magic.host.system import LOOPBACK, RUN_TOKEN, name_of
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import (
    AnyEvent,
    Event,
    FetcherEnded,
    LoaderAddresses,
    LoaderPlaces,
    Request,
    Started,
)
from taas_magic.plan import FetcherPlan, HostPlan, Plan
from taas_magic.store.rule import Identity

if TYPE_CHECKING:
    from taas_magic.data.service import Service
    from taas_magic.store.guard import StoreProtection

CALL = "taas_call"
ANSWER = "taas_answer"
EVENT = "taas_event"
BEAT = "taas_beat"
HEARD = "taas_heard"
"""Name of the message with which the pool's process confirms an agent's heartbeat (`BEAT`).

`CALL` is a request of the controller to an agent, `ANSWER` is its response, and `EVENT` has events
of the agent.
"""

AGENT = "taas_agent"
"""Key by which a joining agent identifies itself. Workers without it are not hosts of the pool."""

POOL_BEAT = "taas-pool-beat"
"""Dask topic of the heartbeats from the pool's process to its kernels.

Each heartbeat carries one line for each host that the kernels wait for.
"""

HOST = "TAAS_HOST"
"""Environment variable with the name of a rank's host, as the user knows it."""

REACH = "TAAS_REACH"
"""Environment variable with `HostSpec.reach`: an address on the notebook's machine.

Ranks connect to it. The variable is not set if the run has no such address.
"""

VALUE = "<value>"
"""Key of the last expression's value among a run's results. No variable can have this name."""

RETURNED = "__taas_returned"
"""Variable of a rank that holds the value that the function of `taas.run` returned."""


def topic(owner: str) -> str:
    """Return the Dask topic for the events of a kernel's runs. Each event carries its run's id.

    There is one topic for each kernel and not for each run, because Dask's client and scheduler
    never forget a topic.

    Args:
        owner: Id of the kernel's Dask client.
    """
    return f"taas-{owner}"


def share_id(run_id: str) -> str:
    """Return the id of the share that consists of a run's fetchers.

    It differs from the id of the ranks' share, because fetchers start before the ranks and one host
    may run both.
    """
    return f"{run_id}.data"


@dataclass(frozen=True)
class HostAddress:
    """The name and address of a host, as its agent determined them.

    Attributes:
        host: Name of the host, as the user knows it.
        address: Address at which other hosts reach its ranks and fetchers.
        is_foreign: Whether the host is another machine than the notebook's.
    """

    host: str
    address: str
    is_foreign: bool


class Origin(Struct, frozen=True):
    """The settings that ranks inherit from the notebook.

    Attributes:
        cwd: Project store, which is a rank's working directory.
        environ: Environment of the kernel. Empty for hosts on other machines.
        sys_path: Import path of the kernel.
        colors: IPython's colour scheme, for tracebacks.
        changed: Environment variables that the notebook changed. None for a removed variable.
        store: Identity of the project store on the notebook's machine; None if it has none.
    """

    cwd: str
    environ: Mapping[str, str]
    sys_path: tuple[str, ...]
    colors: str = "neutral"
    changed: Mapping[str, str | None] = {}
    store: Identity | None = None

    def on_another_machine(self, environ: Mapping[str, str], sys_path: Sequence[str]) -> "Origin":
        """Return the settings for a host that has its own environment and import path."""
        users = [path for path in users_path(self.sys_path) if path not in sys_path]
        merged = {**environ, **self.changed}
        kept = {name: value for name, value in merged.items() if value is not None}
        return structs.replace(self, environ=kept, sys_path=(*sys_path, *users))


def environ_changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that changed between two environments; None for a removed variable.

    Only these are sent to other machines. The rest of a kernel's environment describes its own
    machine: the paths of programs and libraries, and the GPUs that it may use.
    """
    changed = {name: value for name, value in now.items() if before.get(name) != value}
    return {**changed, **{name: None for name in before if name not in now}}


def users_path(
    path: Iterable[str], prefixes: Iterable[str] = (sys.prefix, sys.base_prefix)
) -> list[str]:
    """Return the entries of an import path that are neither Python's nor of installed packages."""
    folders = [os.path.join(prefix, "") for prefix in prefixes]
    packages = ("site-packages", "dist-packages")
    return [
        entry
        for entry in path
        if not any(os.path.join(entry, "").startswith(folder) for folder in folders)
        and not any(part in packages or part.endswith(".zip") for part in Path(entry).parts)
    ]


class HostSpec(Struct, frozen=True):
    """One host's share of a run: its ranks, or its fetchers.

    Attributes:
        plan: Plan of the run. The copy for one host (`of_host`) contains only that host.
        host_rank: Number of this host among the hosts of the run, or of its fetchers.
        run_dir: Folder of the run on this host.
        origin: Settings that the ranks inherit from the notebook.
        master_addr: Address of the first host, which runs torch's key-value store for the ranks.
        master_port: Port of that store. 0 on the first host, which chooses the port.
        attempt: Number of the attempt, from 0.
        ran_s: Seconds that earlier attempts used. They count towards `--timeout`.
        fetchers: Addresses of the fetchers that have started, by number of the fetcher.
        home_dir: Folder of the run on the notebook's machine, if it differs from `run_dir`.
        requires: Modules that must be installed on the hosts. None checks nothing.
        n_hosts: Number of hosts of the run.
        reach: Address on the notebook's machine that ranks connect to, as "tls://host:port". "" if
            there is none. Hosts may need different addresses for the same port; the copy for one
            host has the one that this host can use.
        reads_only: Whether the run only reads the project store. It does not own the store, and
            writes to a host's mirror are not copied back.
        fetches: Whether the share consists of fetchers, which never write to the project store.
        idle_s: Seconds after which a session without a cell ends. None if the run is no session.
        session: Run id of the session whose ranks run this cell. "" if the run has its own ranks.
        cell_number: Number of the cell in its session, from 1.
    """

    plan: Plan
    host_rank: int
    run_dir: str
    origin: Origin
    master_addr: str = LOOPBACK
    master_port: int = 0
    attempt: int = 0
    ran_s: float = 0.0
    fetchers: Mapping[int, LoaderPlaces] = {}
    home_dir: str = ""
    requires: tuple[str, ...] | None = None
    n_hosts: int = 1
    reach: str = ""
    reads_only: bool = False
    fetches: bool = False
    idle_s: float | None = None
    session: str = ""
    cell_number: int = 0

    @property
    def is_session(self) -> bool:
        """Whether the run is a session: its ranks stay and wait for cells, which are runs, too."""
        return self.idle_s is not None

    @property
    def share_id(self) -> str:
        """Id of the share in the pool and on its hosts."""
        return share_id(self.plan.run_id) if self.fetches else self.plan.run_id

    @property
    def has_rank_0(self) -> bool:
        """Whether rank 0, which writes to the project store, runs here."""
        return not self.fetches and self.share.first_rank == 0

    @property
    def share(self) -> HostPlan:
        """Plan of this host's share: the numbers of its ranks, and their number of threads."""
        return next(host for host in self.plan.hosts if host.host_rank == self.host_rank)

    @property
    def ranks(self) -> range:
        """Global numbers of this host's ranks."""
        return range(self.share.first_rank, self.share.first_rank + self.share.ranks)

    @property
    def folder(self) -> RunFolder:
        """The run's folder on this host."""
        return RunFolder(Path(self.run_dir))

    def notebook_log_path(self, rank: int) -> str:
        """Return the path of a rank's log on the notebook's machine."""
        return str(RunFolder(Path(self.home_dir or self.run_dir)).log(rank))

    def environ(self, place: HostAddress) -> dict[str, str]:
        """Return the environment of this host's ranks. torchrun's variables override it."""
        environ = {  # the notebook's variables override these
            "OMP_NUM_THREADS": str(self.share.threads_per_rank),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # torchrun's default
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        }
        interface = name_of(place.address if self.n_hosts > 1 else LOOPBACK)
        # by default gloo listens on the host name's address, which may be any interface or none
        environ |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), interface)
        if self.n_hosts > 1:
            environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
        environ |= {**self.origin.environ, RUN_TOKEN: self.plan.run_id, HOST: place.host}
        return environ | ({REACH: self.reach} if self.reach else {})


Emit = Callable[[Event], None]
"""Function that sends an event to the pool's process. Any thread of the agent may call it."""


class Launch(Request[Started]):
    """A request to start a run, or its fetchers, on the hosts of its plan.

    Attributes:
        owner: Id of the kernel's Dask client. The run ends when this client disconnects.
        spec: Share of the first host, from which the other shares are derived.
        said: Events that the run's fetchers have sent before the run starts.
    """

    owner: str
    spec: HostSpec
    said: Sequence[AnyEvent] = ()


class StartShare(Request[int]):
    """A request to a host to start its share of a run.

    The response is the port of torch's key-value store on the run's first host; 0 on other hosts.

    Attributes:
        spec: The host's share.
        again: Whether to end the ranks of the last attempt first, and start the next attempt.
    """

    spec: HostSpec
    again: bool = False


@dataclass(frozen=True)
class ProcessSpec:
    """The settings that all ranks, or all fetchers, of a host have in common.

    They are pickled, because they are sent to a fork of the same program.

    Attributes:
        share: The host's share of the run, with this host's paths.
        folder: Folder of the attempt or the fetchers, under TMPDIR, for pipes and scratch folders.
        environ: Environment variables. For a rank, torchrun's variables override these, and
            `--env` overrides both.
        means: The host's mechanism that enforces the rule of the project store.
    """

    share: HostSpec
    folder: Path
    environ: Mapping[str, str]
    means: "StoreProtection"


@dataclass(frozen=True)
class FetcherSpec:
    """The description of one fetcher, with which its process is started.

    Attributes:
        plan: Number, host and loaders of the fetcher, from the run's plan.
        service: The run's data service: loaders and settings.
        run_dir: Folder of the run on this host, with the loaders and the fetchers' addresses.
        cores: Number of CPU cores that the fetcher may use.
        host: Name of the host.
        listen: Address to listen at for TCP. "" to serve this host's ranks only.
        fill_batches: Number of batches that the fetchers of the same loaders together prepare
            before ranks ask for any.
        fill_bytes: The same amount in bytes.
        setting: Settings inherited from the notebook. None to inherit nothing.
        stacks: File to which the fetcher and its workers write their stacks on request. None if
            they write none.
    """

    plan: FetcherPlan
    service: "Service"
    run_dir: Path
    cores: int
    host: str = ""
    listen: str = "127.0.0.1"
    fill_batches: int = 0
    fill_bytes: int = 0
    setting: ProcessSpec | None = None
    stacks: Path | None = None

    @property
    def who(self) -> str:
        """Name of the fetcher in messages."""
        return f"fetcher {self.plan.number} on host {self.host or socket.gethostname()}"


def without_environ(spec: HostSpec) -> HostSpec:
    """Return a share without the kernel's environment, for other machines.

    They do not need the environment, and it may hold secrets. The variables that the notebook
    changed are kept in `Origin.changed`.
    """
    return structs.replace(spec, origin=structs.replace(spec.origin, environ={}))


def of_host(spec: HostSpec, host_rank: int) -> HostSpec:
    """Return one host's share of a run, with a copy of the plan that contains only that host.

    If each of 1,000 hosts got the whole plan, a million host plans would be sent.

    Args:
        spec: The run.
        host_rank: Number of the host.
    """
    hosts = spec.plan.hosts
    if spec.fetches:
        return structs.replace(spec, host_rank=host_rank)
    mine = structs.replace(spec.plan, hosts=(hosts[host_rank],))
    return structs.replace(spec, plan=mine, host_rank=host_rank, n_hosts=len(hosts))


def fetcher_failed(run: Plan, fetcher: FetcherPlan, why: str) -> FetcherEnded:
    """Return the event for a fetcher that failed or never started.

    The event's entry tells the ranks not to wait for this fetcher.
    """
    place = LoaderAddresses(fetchers=run.cpus, failed=why)
    return FetcherEnded(number=fetcher.number, entry=dict.fromkeys(fetcher.loaders, place))


TORCHRUN_NAMES = (
    *("LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
)
"""Environment variables that torchrun sets for a rank."""


def torchrun_variables(
    spec: HostSpec, local_rank: int, port: int, error_file: Path
) -> dict[str, str]:
    """Return the environment variables that torchrun would set for a rank of this host.

    Args:
        spec: The host's share of the run.
        local_rank: Number of the rank on this host.
        port: Port of torch's key-value store.
        error_file: File that `torch.distributed.elastic.multiprocessing.errors.record` writes.
    """
    share, world_size = spec.share, str(spec.plan.world_size)
    rank = str(share.first_rank + local_rank)
    return {
        "LOCAL_RANK": str(local_rank),
        "RANK": rank,
        "GROUP_RANK": str(spec.host_rank),
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
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
