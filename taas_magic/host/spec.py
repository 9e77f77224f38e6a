"""Descriptions of a run for its hosts, and names of messages between a pool and its agents.

On its way from the kernel to a host, a run has three descriptions:

- `RunSpec`: created by the kernel for the pool; the same for all hosts.
- `ShareSpec`: created by the pool for one host's agent. It contains the `RunSpec`.
- `LocalShare`: created by the agent, with the paths on the agent's host. It contains the
  `ShareSpec`.

All messages between the pool's process and an agent use one stream, which the agent opens. So the
pool's process never connects to a host, and messages keep their order. The kernel imports this
module, so this module must import neither Dask nor torch.
"""

import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from taas_magic.host.system import LOOPBACK, RUN_TOKEN, interface_name
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import (
    AddressesByLoader,
    AnyEvent,
    Event,
    FetcherEnded,
    LoaderAddresses,
    Request,
    StartResponse,
)
from taas_magic.plan import FetcherPlan, HostPlan, Plan
from taas_magic.store.rule import FolderIdentity, StoreRule

if TYPE_CHECKING:
    from taas_magic.data.service import DataServiceSettings
    from taas_magic.store.guard import StoreProtection

CALL = "taas_call"
"""Name of the message with a request from the pool's process to an agent."""

ANSWER = "taas_answer"
"""Name of the message with an agent's response to a request (`CALL`)."""

EVENT = "taas_event"
"""Name of the message by which an agent sends an event of a run to the pool's process."""

BEAT = "taas_beat"
"""Name of the message with an agent's heartbeat to the pool's process."""

BEAT_ACK = "taas_heard"
"""Name of the message with which the pool's process acknowledges a heartbeat."""

AGENT = "taas_agent"
"""Key in the start-up information of a Dask worker. The key shows that the worker is an agent."""

POOL_BEAT = "taas-pool-beat"
"""Dask topic of the heartbeats from the pool's process to its kernels.

Each heartbeat has one line of text for each host that is starting and that kernels wait for.
"""

HOST = "TAAS_HOST"
"""Environment variable of a rank: name of the rank's host, as the user knows it."""

REACH = "TAAS_REACH"
"""Environment variable of a rank: address of a server on the notebook's machine.

The value is `ShareSpec.reach`.
"""


def topic(owner: str) -> str:
    """Return the Dask topic by which a kernel receives the events of all its runs.

    All runs of a kernel share one topic. Dask's client and scheduler never remove a topic, so one
    topic for each run would fill the memory.

    Args:
        owner: Id of the kernel's Dask client.
    """
    return f"taas-{owner}"


def fetchers_share_id(run_id: str) -> str:
    """Return the id of the share that consists of a run's fetchers.

    The ranks' share has another id, `run_id`, because one host may run both shares.
    """
    return f"{run_id}.data"


@dataclass(frozen=True)
class HostAddress:
    """The name and address of a host, as its agent determined them.

    Attributes:
        host: Name of the host, as the user knows it.
        address: Address at which other hosts reach this host's ranks and fetchers.
        is_foreign: Whether the host is not the notebook's machine.
    """

    host: str
    address: str
    is_foreign: bool


class Origin(Struct, frozen=True):
    """The settings that ranks inherit from the notebook.

    Attributes:
        cwd: Path of the project store, which is the working directory of ranks.
        environ: Environment of the kernel. Empty for hosts on other machines.
        sys_path: Import path of the kernel.
        colors: IPython's colour scheme, for tracebacks.
        changed: Environment variables that the notebook has changed, with their new values. The
            value of a removed variable is None.
        store: Identity of the project store on the notebook's machine, by which a host checks
            whether it shares the store. None if all hosts count as sharing the store.
    """

    cwd: str
    environ: Mapping[str, str]
    sys_path: tuple[str, ...]
    colors: str = "neutral"
    changed: Mapping[str, str | None] = {}
    store: FolderIdentity | None = None

    def environ_on(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of ranks on another machine than the notebook's.

        The result is `environ`, with the changes that the notebook has made to its own variables.
        If PATH lacks the folder of this process's Python, the folder becomes the first entry, as in
        an activated environment. So ranks find the programs that are installed beside this Python.

        Args:
            environ: Environment of the agent on that machine.
        """
        merged = {**environ, **self.changed}
        result = {name: value for name, value in merged.items() if value is not None}
        programs = os.path.dirname(sys.executable)
        if (path := result.get("PATH")) and programs not in path.split(os.pathsep):
            result["PATH"] = os.pathsep.join((programs, path))
        return result

    def sys_path_on(self, sys_path: Sequence[str]) -> tuple[str, ...]:
        """Return the import path of ranks on another machine than the notebook's.

        The result is `sys_path`, followed by the user's entries of the kernel's import path.

        Args:
            sys_path: Import path of the agent on that machine.
        """
        users = [path for path in users_path(self.sys_path) if path not in sys_path]
        return (*sys_path, *users)


def environ_changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that differ between two environments, with their new values.

    The value of a removed variable is None.
    """
    changed = {name: value for name, value in now.items() if before.get(name) != value}
    return {**changed, **{name: None for name in before if name not in now}}


_PYTHONS_FOLDERS = ("lib", "lib64", "bin")


def users_path(
    path: Iterable[str], prefixes: Iterable[str] = (sys.prefix, sys.base_prefix)
) -> list[str]:
    """Return the import path's entries that the user has added.

    These are all entries except zip files, Python's own folders, and folders of installed packages.

    Args:
        path: The import path.
        prefixes: Folders of the Python installation and of the virtual environment. Inside them,
            only the folders lib, lib64 and bin count as Python's own, because a prefix may be /usr.
    """
    folders = [os.path.join(*pair, "") for pair in product(prefixes, _PYTHONS_FOLDERS)]
    packages = ("site-packages", "dist-packages")
    return [
        entry
        for entry in path
        if not any(os.path.join(entry, "").startswith(folder) for folder in folders)
        and not any(part in packages or part.endswith(".zip") for part in Path(entry).parts)
    ]


class RunSpec(Struct, frozen=True, omit_defaults=True):
    """A run, as its kernel describes it for the pools of its ranks and fetchers.

    Attributes:
        run_dir: Folder of the run on the notebook's machine.
        origin: Settings that the ranks inherit from the notebook.
        requires: Modules that must be installed on the hosts. The pool checks this before the run
            starts, and compares the versions of Python and torch with the notebook's. None to skip
            both checks.
        reach: Address of a server on the notebook's machine to which ranks connect, as
            "tls://host:port". "" if there is none. In a run of a farm, the server is the scheduler
            of the farm's process.
        reads_only: Whether the run should only read the project store. If True, another run may
            write to the store at the same time, and files that ranks write to a host's mirror are
            not copied back.
        idle_s: Seconds after which the session ends if it runs no cell. None if the run is not a
            session.
        session: Run id of the session whose ranks run this cell. "" if the run has its own ranks.
        cell_number: Number of the cell in its session, from 1.
        preferred_hosts: Names of hosts that get the ranks first, if the pool has these hosts.
    """

    plan: Plan
    run_dir: str
    origin: Origin
    requires: tuple[str, ...] | None = None
    reach: str = ""
    reads_only: bool = False
    idle_s: float | None = None
    session: str = ""
    cell_number: int = 0
    preferred_hosts: tuple[str, ...] = ()

    @classmethod
    def for_pool(
        cls,
        engine: str,
        plan: Plan,
        folder: RunFolder,
        origin: Origin,
        modules: tuple[str, ...] = (),
        **facts: Any,
    ) -> "RunSpec":
        """Return the `RunSpec` of a run for its pool. Every `RunSpec` is created by this method.

        Hosts of the engine `local` are this machine, so the pool does not check their modules.

        Args:
            engine: Engine of the ranks' pool.
            folder: Folder of the run on the notebook's machine.
            modules: Modules that must be installed on the hosts. Ignored for the engine `local`.
            facts: Further fields of the `RunSpec`.
        """
        requires = None if engine == "local" else modules
        return cls(plan, str(folder.path), origin, requires, **facts)

    @property
    def is_session(self) -> bool:
        """Whether the run is a session, whose ranks wait for cells. Each cell is a run, too."""
        return self.idle_s is not None

    @property
    def folder(self) -> RunFolder:
        """The run's folder on the notebook's machine."""
        return RunFolder(Path(self.run_dir))

    def for_session(self) -> "RunSpec":
        """Return a copy of this run without the kernel's environment and import path.

        Call this method for a cell of a session. The session's ranks keep the environment and the
        import path with which they started, so they do not need the kernel's.
        """
        origin = structs.replace(self.origin, environ={}, sys_path=(), changed={})
        return structs.replace(self, origin=origin)

    def for_hosts(self, are_local: bool) -> "RunSpec":
        """Return a copy of this run without the fields that hosts do not need.

        These fields are `requires`, `reach`, `preferred_hosts` and the host plans. If each of 1,000
        hosts got all host plans, the pool would send a million host plans.

        Args:
            are_local: Whether the hosts are on the notebook's machine. If False, the copy also
                lacks the kernel's environment, which may contain secrets. It still has the
                variables that the notebook has changed.
        """
        origin = self.origin if are_local else structs.replace(self.origin, environ={})
        plan = structs.replace(self.plan, hosts=())
        return structs.replace(
            self, plan=plan, origin=origin, requires=None, reach="", preferred_hosts=()
        )


class ShareSpec(Struct, frozen=True, omit_defaults=True):
    """The pool's description of one host's share of a run: the ranks or the fetchers of this host.

    Attributes:
        run: The run, without the fields that hosts do not need (`RunSpec.for_hosts`).
        host_rank: Number of this host, from 0, among the hosts that run the ranks, or among the
            hosts that run the fetchers.
        host_plan: Numbers of this host's ranks, and the number of threads for each rank. None if
            the share consists of fetchers.
        n_hosts: Number of hosts that run the ranks.
        master_addr: Address of the first host, which runs torch's key-value store for the ranks.
        master_port: Port of the key-value store. 0 on the first host, which chooses the port.
        attempt: Number of the attempt, from 0.
        ran_s: Seconds since the start of the first attempt, for `--timeout`. Time in which a rank
            waited for the user's input does not count.
        fetchers: Addresses of the fetchers that have started, by number of the fetcher.
        reach: Address at which ranks on this host connect to a server on the notebook's machine,
            for example to the scheduler of a farm's process. "" if there is no such server. Differs
            from `RunSpec.reach` if the connection goes through a tunnel.
    """

    run: RunSpec
    host_rank: int
    host_plan: HostPlan | None = None
    n_hosts: int = 1
    master_addr: str = LOOPBACK
    master_port: int = 0
    attempt: int = 0
    ran_s: float = 0.0
    fetchers: Mapping[int, AddressesByLoader] = {}
    reach: str = ""

    @property
    def plan(self) -> Plan:
        """Plan of the run, without its hosts.

        The paths in `plan.store` are paths on the notebook's machine. For paths on this host, see
        `LocalShare.store`.
        """
        return self.run.plan

    @property
    def is_fetchers(self) -> bool:
        """Whether the share consists of fetchers, and not of ranks."""
        return self.host_plan is None

    @property
    def share_id(self) -> str:
        """Id of the share: for ranks, the run's id; for fetchers, `fetchers_share_id(run_id)`."""
        return fetchers_share_id(self.plan.run_id) if self.is_fetchers else self.plan.run_id

    @property
    def has_rank_0(self) -> bool:
        """Whether rank 0, which may write to the project store, runs on this host."""
        return self.host_plan is not None and self.host_plan.first_rank == 0

    @property
    def ranks(self) -> range:
        """Global numbers of this host's ranks. Empty if the share consists of fetchers."""
        mine = self.host_plan
        return range(mine.first_rank, mine.first_rank + mine.ranks) if mine else range(0)

    def notebook_log_path(self, rank: int) -> str:
        """Return the path of a rank's log on the notebook's machine."""
        return str(self.run.folder.log(rank))


class LocalShare(Struct, frozen=True):
    """A host's share of a run, with paths on this host.

    The agent creates this description when the run's files are on the host.

    Attributes:
        run_dir: Folder of the run on this host.
        store: Settings of the project store, with this host's paths. None for no restrictions.
        cwd: Working directory of ranks and fetchers: the project store on this host.
        environ: Environment of ranks and fetchers, from the notebook or from this host.
        sys_path: Import path of ranks and fetchers.
    """

    spec: ShareSpec
    run_dir: str
    store: StoreRule | None
    cwd: str
    environ: Mapping[str, str]
    sys_path: tuple[str, ...]

    @property
    def run(self) -> RunSpec:
        """The run that the share is part of."""
        return self.spec.run

    @property
    def plan(self) -> Plan:
        """Plan of the run (`ShareSpec.plan`)."""
        return self.spec.run.plan

    @property
    def folder(self) -> RunFolder:
        """The run's folder on this host."""
        return RunFolder(Path(self.run_dir))

    def rank_environ(self, host_address: HostAddress) -> dict[str, str]:
        """Return the environment of this host's ranks, without torchrun's variables.

        The result has the variables of the share's environment. In addition, it has defaults for
        variables that the share does not set, such as OMP_NUM_THREADS and the network interfaces of
        gloo and NCCL. Further variables contain the run's id and the host's name. If ranks use a
        server on the notebook's machine, another variable contains the server's address
        (`ShareSpec.reach`).
        """
        spec, host = self.spec, self.spec.host_plan
        assert host is not None
        environ = {  # defaults, which variables of the notebook override
            "OMP_NUM_THREADS": str(host.threads_per_rank),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # torchrun's default
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        }
        interface = interface_name(host_address.address if spec.n_hosts > 1 else LOOPBACK)
        # By default, gloo listens at the address of the host's name. That address may belong to the
        # wrong network interface, or to none.
        environ |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), interface)
        if spec.n_hosts > 1:
            environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
        environ |= {**self.environ, RUN_TOKEN: self.plan.run_id, HOST: host_address.host}
        return environ | ({REACH: spec.reach} if spec.reach else {})


EventSink = Callable[[Event], None]
"""Function that sends an event to the pool's process. Any thread of the agent may call it."""


class LaunchRanks(Request[StartResponse]):
    """A request from the kernel to the pool's process: start a run's ranks on the plan's hosts.

    Attributes:
        owner: Id of the kernel's Dask client. The run ends when this client disconnects.
        fetcher_events: Events of the run's fetchers so far, with the fetchers' addresses.
    """

    owner: str
    run: RunSpec
    fetcher_events: Sequence[AnyEvent] = ()


class LaunchFetchers(Request[StartResponse]):
    """A request from the kernel to the pool's process: start a run's fetchers on the plan's hosts.

    Attributes:
        owner: Id of the kernel's Dask client. The fetchers end when this client disconnects.
    """

    owner: str
    run: RunSpec


class StartShare(Request[int]):
    """A request from the pool's process to a host's agent: start the host's share of a run.

    The run's first host responds with the port of torch's key-value store. All other hosts respond
    with 0.

    Attributes:
        is_next_attempt: Whether the host runs an earlier attempt of this run. If True, the agent
            first ends the ranks of the earlier attempt.
    """

    spec: ShareSpec
    is_next_attempt: bool = False


@dataclass(frozen=True)
class ProcessSpec:
    """The settings that all processes of a host's share have in common.

    These processes are the host's ranks of a run, or the host's fetchers of a run.

    Attributes:
        folder: Private folder, under TMPDIR, of the ranks of an attempt or of the fetchers. It has
            pipes and scratch folders.
        environ: Environment variables. For a rank, torchrun's variables override these, and `--env`
            overrides both.
        protection: Mechanism that prevents all processes except rank 0 from writing to the project
            store.
    """

    share: LocalShare
    folder: Path
    environ: Mapping[str, str]
    protection: "StoreProtection"


@dataclass(frozen=True)
class FetcherSpec:
    """The description of one fetcher, which the agent passes to the fetcher's process.

    Attributes:
        plan: Number, host and loaders of the fetcher, from the run's plan.
        service: The run's data service: loaders and settings.
        run_dir: Folder of the run on this host, with the loaders and the fetchers' addresses.
        cores: Number of CPU cores that the fetcher may use.
        listen: Address at which the fetcher listens for TCP connections. "" to serve only ranks on
            the same host.
        fill_batches: Minimum number of batches that all fetchers of the same loaders together
            prepare before ranks request data. 0 for no minimum.
        fill_bytes: Minimum number of bytes that all fetchers of the same loaders together prepare
            before ranks request data. 0 for no minimum.
        setting: Settings of the fetcher's process. None to keep the environment, output and import
            path of the forkserver.
        stacks: File to which the fetcher and its workers write their stacks when the agent sends
            them `STACK_SIGNAL`. None to write no stacks.
    """

    plan: FetcherPlan
    service: "DataServiceSettings"
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
        """Name of the fetcher in messages for the user, such as "fetcher 0 on host a"."""
        return f"fetcher {self.plan.number} on host {self.host or socket.gethostname()}"


def fetcher_failed(run: Plan, fetcher: FetcherPlan, why: str) -> FetcherEnded:
    """Return the event that reports a fetcher which has failed or could not start.

    The field `entry` of the event tells ranks not to wait for this fetcher.

    Args:
        why: Why the fetcher has failed, as text for the user.
    """
    addresses = LoaderAddresses(fetchers=run.cpus, failed=why)
    return FetcherEnded(number=fetcher.number, entry=dict.fromkeys(fetcher.loaders, addresses))


TORCHRUN_NAMES = (
    *("LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
)
"""Environment variables that torchrun sets for a rank."""


def torchrun_variables(
    spec: ShareSpec, local_rank: int, port: int, error_file: Path
) -> dict[str, str]:
    """Return the environment variables that torchrun would set for a rank of this host.

    Args:
        local_rank: Number of the rank on this host.
        port: Port of torch's key-value store.
        error_file: File that `torch.distributed.elastic.multiprocessing.errors.record` writes.
    """
    world_size = str(spec.plan.world_size)
    rank = str(spec.ranks[local_rank])
    return {
        "LOCAL_RANK": str(local_rank),
        "RANK": rank,
        "GROUP_RANK": str(spec.host_rank),
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(len(spec.ranks)),
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
