"""What a host is told of a run, and the words in which the pool and its agents speak.

By the controller to the agent (`HostSpec`), by the agent to its ranks and fetchers. Calls of the
controller and their answers, events and beats are messages in the one stream that an agent opened
when it joined; so nobody ever connects to a host, and messages keep their order. Imported by the
kernel, too: it imports neither Dask nor torch.
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
    LoaderPlace,
    LoaderPlaces,
    Request,
    Started,
)
from taas_magic.plan import FetcherPlan, HostPlan, Plan
from taas_magic.store.rule import Identity

if TYPE_CHECKING:
    from taas_magic.data.service import Service
    from taas_magic.store.guard import Means

CALL = "taas_call"
ANSWER = "taas_answer"
EVENT = "taas_event"
BEAT = "taas_beat"
HEARD = "taas_heard"

AGENT = "taas_agent"
"""What an agent says of itself when it joins; others that join are no hosts of the pool."""

POOL_BEAT = "taas-pool-beat"
"""The Dask topic by which the pool's process tells its kernels that it lives.

With it comes what is known of the hosts that they wait for, a line each.
"""

HOST = "TAAS_HOST"
"""The environment variable that has the name of a rank's host, as the user calls it."""

REACH = "TAAS_REACH"
"""The environment variable that has the address at which a rank finds what `reach` names."""

VALUE = "<value>"
"""The name of the last expression's value among a run's results; no variable can have it."""


def topic(owner: str) -> str:
    """Return the Dask topic that carries the events of a kernel's runs, each with its run's id.

    One for each kernel, which `owner`, its Dask client, tells, not for each run: neither Dask's
    client nor its scheduler forgets a topic.
    """
    return f"taas-{owner}"


def share_id(run_id: str) -> str:
    """Return what a run's fetchers are known by, apart from its ranks: they begin before them."""
    return f"{run_id}.data"


@dataclass(frozen=True)
class Place:
    """A host, as its agent found it.

    Attributes:
        host: Its name, as the user calls it.
        address: Where its ranks and fetchers are reached by those of other hosts.
        is_foreign: Whether it is another machine than the notebook's.
    """

    host: str
    address: str
    is_foreign: bool


class Origin(Struct, frozen=True):
    """What the ranks take over from the notebook.

    Attributes:
        cwd: The project store, a rank's working directory.
        environ: The kernel's environment; empty for hosts of another machine.
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
        """Return the same for a host with an environment and an import path of its own."""
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
    """Return what of an import path is neither the interpreter's nor of installed packages."""
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
        plan: The run's; of its hosts, as it is sent to one (`of_host`), only that one.
        host_rank: This host's place among the run's hosts, or among those of its fetchers.
        master_addr: Where the first host has the ranks' store.
        master_port: Its port; 0 on the first host, which makes it.
        ran_s: How long the run has run before this attempt, of what `--timeout` allows it.
        fetchers: Where the fetchers that have started listen, by number.
        home_dir: The run's folder on the notebook's machine, where `run_dir` is another.
        requires: Modules that must be installed on the hosts; None asks hosts nothing.
        reach: A port of the notebook's machine that ranks connect to, as "tls://host:port"; as it
            is sent to a host, where that finds it. "": none.
        reads_only: Whether the project store is only read: the run does not own it, and what is
            written to a copy of it stays there.
        fetches: Whether the share is fetchers, which never write to the project store.
        idle_s: Seconds after which a session without a cell ends; None: the run is no session.
        session: Run id of the session whose ranks run this cell; "": the run has its own ranks.
        cell_number: The cell's number in its session, from 1.
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
        """Whether the ranks stay and wait for cells, which are runs of their own."""
        return self.idle_s is not None

    @property
    def share_id(self) -> str:
        """What the share is known by, in the pool and on its hosts."""
        return share_id(self.plan.run_id) if self.fetches else self.plan.run_id

    @property
    def has_rank_0(self) -> bool:
        """Whether rank 0, which writes to the project store, runs here."""
        return not self.fetches and self.share.first_rank == 0

    @property
    def share(self) -> HostPlan:
        """The ranks of this host."""
        return next(host for host in self.plan.hosts if host.host_rank == self.host_rank)

    @property
    def ranks(self) -> range:
        """The global numbers of this host's ranks."""
        return range(self.share.first_rank, self.share.first_rank + self.share.ranks)

    @property
    def folder(self) -> RunFolder:
        """The run's folder on this host."""
        return RunFolder(Path(self.run_dir))

    def told_log(self, rank: int) -> str:
        """Return where the user finds a rank's log."""
        return str(RunFolder(Path(self.home_dir or self.run_dir)).log(rank))

    def environ(self, place: Place) -> dict[str, str]:
        """Return the environment of the ranks of this host, which torchrun's variables override."""
        environ = {  # the notebook's own ones override these
            "OMP_NUM_THREADS": str(self.share.threads_per_rank),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # torchrun's default
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        }
        interface = name_of(place.address if self.n_hosts > 1 else LOOPBACK)
        # gloo listens on what the host's name resolves to, which may be any interface or none
        environ |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), interface)
        if self.n_hosts > 1:
            environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
        environ |= {**self.origin.environ, RUN_TOKEN: self.plan.run_id, HOST: place.host}
        return environ | ({REACH: self.reach} if self.reach else {})


Emit = Callable[[Event], None]
"""Sends an event of a run to the pool's process; any thread of the agent may call it."""


class Launch(Request[Started]):
    """Start a run, or its fetchers, on as many hosts as its plan has; its first one is told `spec`.

    Attributes:
        owner: The Dask client of the kernel; when it is gone, so is the run.
        said: Events that the run's fetchers have sent before.
    """

    owner: str
    spec: HostSpec
    said: Sequence[AnyEvent] = ()


class StartShare(Request[int]):
    """Start the host's share of a run; `again` ends its ranks of the attempt before.

    The answer is the port where the attempt's ranks meet, on the run's first host; 0 elsewhere.
    """

    spec: HostSpec
    again: bool = False


@dataclass(frozen=True)
class ProcessSpec:
    """What all ranks, or fetchers, of a host share; pickled: it goes to a fork of the same program.

    Attributes:
        share: The host's share of the run, with this host's paths.
        folder: That of the attempt, or of the fetchers, under TMPDIR: pipes, scratch folders.
        environ: Environment variables; of a rank, torchrun's override them, and `--env` those.
        means: What this host has to hold it to the rule of the project store.
    """

    share: HostSpec
    folder: Path
    environ: Mapping[str, str]
    means: "Means"


@dataclass(frozen=True)
class FetcherSpec:
    """What a fetcher is to do.

    Attributes:
        run_dir: The run's folder on this host, with the loaders and the fetchers' addresses.
        listen: Address to listen at for TCP; "" for this host's ranks only.
        spill: Folder for what memory has no room for; None: the workers wait instead.
        fill_batches: What all fetchers of its loaders are to have ready before ranks ask.
        fill_bytes: The same in bytes.
        setting: What it takes over from the notebook; None: nothing.
        stacks: File to which it and its workers write their stacks when asked; None: they do not.
    """

    plan: FetcherPlan
    service: "Service"
    run_dir: Path
    cores: int
    host: str = ""
    listen: str = "127.0.0.1"
    spill: Path | None = None
    fill_batches: int = 0
    fill_bytes: int = 0
    setting: ProcessSpec | None = None
    stacks: Path | None = None

    @property
    def who(self) -> str:
        """What messages call it."""
        return f"fetcher {self.plan.number} on host {self.host or socket.gethostname()}"


def without_environ(spec: HostSpec) -> HostSpec:
    """Return a share without what another machine has no use for.

    A kernel's environment may hold keys of all kinds. Those that the notebook set are `changed`.
    """
    return structs.replace(spec, origin=structs.replace(spec.origin, environ={}))


def of_host(spec: HostSpec, host_rank: int) -> HostSpec:
    """Return a run's share for one of its hosts.

    What all others are to do is left out: told to each of a thousand hosts, it would be a million.
    """
    hosts = spec.plan.hosts
    if spec.fetches:
        return structs.replace(spec, host_rank=host_rank)
    mine = structs.replace(spec.plan, hosts=(hosts[host_rank],))
    return structs.replace(spec, plan=mine, host_rank=host_rank, n_hosts=len(hosts))


def fetcher_failed(run: Plan, fetcher: FetcherPlan, why: str) -> FetcherEnded:
    """Return the end of a fetcher that ended by itself, or never listened.

    Its entry tells the ranks so: they do not wait for it.
    """
    place = LoaderPlace(fetchers=run.cpus, failed=why)
    return FetcherEnded(number=fetcher.number, entry=dict.fromkeys(fetcher.loaders, place))


TORCHRUN_NAMES = (
    *("LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
)
"""The variables that torchrun sets for a rank."""


def torchrun_variables(
    spec: HostSpec, local_rank: int, port: int, error_file: Path
) -> dict[str, str]:
    """Return what torchrun would set for a rank of this host.

    Args:
        error_file: Where `torch.distributed.elastic.multiprocessing.errors.record` writes.
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
