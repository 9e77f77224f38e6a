"""Requests that one process sends to another, and their responses.

Requests are operations of Dask, encoded as msgpack. Kernels and agents send requests to the Dask
scheduler in the pool's process. The pool's process also sends requests to the agents. In this
module, each response is defined before its request.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar, get_args

from msgspec import Struct, structs

from taas_magic.errors import ProtocolError
from taas_magic.messages.codec import from_bytes, to_bytes
from taas_magic.messages.events import AddressesByLoader, AnyEvent, RunStacks
from taas_magic.messages.terminal import cleaned

_T = TypeVar("_T")


class Request(Struct, Generic[_T]):
    """Base class of the requests that processes send to each other.

    The type parameter is the type of the response. The class name of a request names its operation
    in Dask. `pool/gate.py` lists the operations that each peer may send.
    """

    @classmethod
    def op(cls) -> str:
        """Return the name of the request's operation in Dask."""
        return f"taas_{cls.__name__}"

    def read_answer(self, packed: bytes) -> _T:
        """Decode the response to this request.

        If people read responses of this type (`_SHOWN_RESPONSES`), also remove terminal control
        sequences.

        Raises:
            ValueError: The response has another type.
        """
        answer: type[_T] = get_args(self.__orig_bases__[0])[0]  # type: ignore[attr-defined]
        read = from_bytes(packed, answer)
        return cleaned(read) if answer in _SHOWN_RESPONSES else read


# Between a kernel and the pool's process.


class RegisterKernel(Request[bool]):
    """Request of a kernel to the pool's process: accept this kernel.

    The pool's process runs at least until each accepted kernel has disconnected. The response is
    False if the process has begun to end, or if the kernel's Dask client is not connected.

    Attributes:
        owner: Id of the kernel's Dask client.
    """

    owner: str


class StartResponse(Struct, kw_only=True):
    """Response of the pool's process to `WaitForHosts`, `LaunchRanks` and `LaunchFetchers`.

    Attributes:
        hosts: Names of the hosts on which the ranks or fetchers start; empty for `WaitForHosts`.
        error: Reason why the request failed, for example because the pool has no hosts; "" without
            an error.
        store_error: Reason why the project store cannot be used; "" without an error.
        is_ending: Whether the pool's process had begun to end when the request arrived. If so, the
            request had no effect.
    """

    hosts: list[str] = []
    error: str = ""
    store_error: str = ""
    is_ending: bool = False


class WaitForHosts(Request[StartResponse]):
    """Request of a kernel to the pool's process: respond when enough hosts are ready for ranks.

    Attributes:
        owner: Id of the kernel's Dask client. If the client disconnects, this request is cancelled.
        wait: Id that the kernel chooses for this request. `Halt` with this id cancels the request.
        hosts: Number of hosts to wait for.
        has_run: Whether a run waits for the hosts; False if the kernel only warms the pool.
    """

    owner: str
    wait: str
    hosts: int
    has_run: bool = True


class ForwardEvents(Request[None]):
    """Request of a kernel to the process of the ranks' pool: accept events of the run's fetchers.

    The fetchers may run in another pool than the ranks. So their events first arrive at the kernel,
    and the kernel forwards the events by this request. The process of the ranks' pool publishes the
    events as events of the run.
    """

    run_id: str
    events: list[AnyEvent]


class Detach(Request[str]):
    """Request of a kernel to the pool's process: own a run and its fetchers from now on.

    Afterwards, the run continues when the kernel ends. If the run is a session, the kernel still
    receives the session's events until the kernel ends. The response is the reason why the pool's
    process cannot take the run over, or "" on success.
    """

    run_id: str


class SessionState(Struct, kw_only=True):
    """State of a session. The kernel that takes the session over receives this state.

    Attributes:
        error: Reason why the kernel cannot take the session over; "" on success.
        cells: Number of cells that the session has begun.
        fetchers: Number of fetchers that the session's cells have started.
        cell: Run id of the running cell. If no cell is running: run id of the newest cell that
            continued after its kernel was gone. "" if there is no such cell either, or if a kernel
            has taken the session over since then.
    """

    error: str = ""
    cells: int = 0
    fetchers: int = 0
    cell: str = ""


class TakeOverSession(Request[SessionState]):
    """Request of a kernel to the pool's process: make this kernel the owner of a detached session.

    From now on, the kernel receives the session's events.

    Attributes:
        owner: Id of the kernel's Dask client.
    """

    owner: str
    run_id: str


class TakeOverFetchers(Request[list[AnyEvent] | None]):
    """Request of one pool's process to another: make the sender the owner of a run's fetchers.

    The sender owns the run, and the receiver runs the fetchers. The response has the events of the
    fetchers' starts and ends so far, or is None if the receiver does not run the fetchers.

    Attributes:
        owner: Id of the sender's Dask client. If this client disconnects, the fetchers end.
    """

    owner: str
    run_id: str


class PrepareFetchers(Request[str]):
    """Request of a kernel to a pool's process: prepare a session's fetchers for a cell.

    The kernel sends this request when the session begins a cell. During this cell, the fetchers of
    each earlier cell may restart once. If all fetchers of an earlier cell have already ended
    unexpectedly, they restart when this request arrives. The pool's process responds when the
    fetchers' hosts have copied the changed files of the project store (`UpdateStoreCopy`). The
    response is "", or the reason why a host could not copy them.

    Attributes:
        session: Run id of the session.
    """

    session: str


class HostStatus(Struct, kw_only=True):
    """Status of a host, for `%taas pools`.

    Attributes:
        protection: Mechanism by which the host protects the project store, such as "Landlock" (a
            value of `store.guard.StoreProtection`).
        allocated_s: Seconds since the host was allocated.
        runs: Ids of the runs on the host.
        idle_s: Seconds for which the host has been without a run; None if a run is on it now.
        gpu_hours: GPU hours since the host was allocated.
    """

    host: str
    protection: str
    runs: list[str]
    allocated_s: float
    idle_s: float | None
    gpu_hours: float


class StartingHost(Struct, kw_only=True):
    """A host that has joined its pool but cannot start ranks yet.

    Attributes:
        imports: Module that the host's forkserver is importing.
        for_s: Seconds since the forkserver began to import this module.
    """

    host: str
    imports: str
    for_s: float


class PoolStatus(Struct, kw_only=True):
    """Status of a pool, for `%taas pools`.

    Attributes:
        hosts: Hosts that can start ranks.
        starting: Hosts that cannot start ranks yet.
        refused: Number of messages and connections that the pool's process refused, because they
            were not authenticated, invalid, forbidden or too late.
        gpu_hours: Sum over all hosts: GPUs of the host times the hours for which the host was
            allocated, since the pool's process started.
        used_gpu_hours: The part of `gpu_hours` in which runs used the hosts.
    """

    hosts: list[HostStatus] = []
    starting: list[StartingHost] = []
    refused: int = 0
    gpu_hours: float = 0.0
    used_gpu_hours: float = 0.0


class GetStatus(Request[PoolStatus]):
    """Request of a kernel to the pool's process for the status of the pool and its hosts."""


class EndPool(Request[None]):
    """Request of a kernel to the pool's process: end all runs, then exit."""


# A kernel asks the pool's process, which forwards the same request to each agent concerned.


class Halt(Request[None]):
    """Request of a kernel or a pool's process: stop the ranks or the fetchers of a run.

    If the ranks or fetchers have already ended, the request does nothing.

    Attributes:
        run_id: Id of a run or of the run's fetchers. If it is the id of a wait for hosts
            (`WaitForHosts.wait`), the pool's process ends this wait instead.
        how: "interrupt" or "kill".
    """

    run_id: str
    how: str


class AnswerInput(Request[None]):
    """Request of a kernel: pass the user's line of input to the rank that sent `InputRequested`.

    Attributes:
        rank: The rank that waits for the line.
        number: Number of the rank's `InputRequested` event.
        line: The line that the user typed, without a line end; None if the user ended the input, or
            if `is_refused` is True.
        is_refused: Whether the kernel tells the rank that no user can type a line.
    """

    run_id: str
    rank: int
    number: int
    line: str | None = None
    is_refused: bool = False


class UpdateStoreCopy(Request[str]):
    """Request to a host: copy changed files of the project store for a session's fetchers.

    If the host shares the store, or the fetchers have ended, the host copies nothing. The response
    is "", or the reason why the files could not be copied.

    Attributes:
        run_id: Id of the fetchers.
    """

    run_id: str


class GetStacks(Request[RunStacks]):
    """Request of a kernel for the stack reports of a run's ranks or fetchers.

    Attributes:
        run_id: Id of the run, or id of the run's fetchers.
    """

    run_id: str


class HostFacts(Struct, frozen=True):
    """Facts about a host, such as its GPUs and packages.

    On the host, `probe.main` finds these facts, in the Python that the pool's settings name.

    Attributes:
        host: Name of the host for the user.
        torch: Version of torch; "" if torch is not installed.
        cuda: CUDA version that torch was built for; "" for a CPU build.
        versions: Versions of the requested packages that are installed, by package.
        taas_digest: Digest of the files of taas-magic; "" if taas-magic is not installed.
        missing: The requested modules that are not installed.
        cache: Folder on the host for files of taas-magic (`probe.cache_folder`).
        cache_error: Reason why the cache is not writable; "" if the cache is writable.
        free_bytes: Bytes that can still be written to the cache.
        sites: Names of the package folders that taas-magic has put into the cache.
        cores: Number of logical processors that a process may use.
        gpu_names: Names of the GPUs; empty if not requested or not found.
        clock: The host's wall clock, in seconds since 1970.
        ahead_s: Seconds by which the host's clock is ahead of the clock of the machine that
            requested the facts.
        hostname: The host's own name.
        own_addresses: Addresses to which the host itself resolves `hostname`.
        interfaces: Addresses of each network interface, by the interface's name.
        python_path: The entries of the host's PYTHONPATH.
        reached_at: Address at which SSH reached the host; "" without SSH.
        is_managed: Whether the operating system manages the host's Python, so that pip refuses to
            install packages.
        sees_store: Whether the host shares the project store with the notebook.
    """

    host: str = ""
    python: str = ""
    implementation: str = ""
    executable: str = ""
    system: str = ""
    machine: str = ""
    glibc: str = ""
    torch: str = ""
    cuda: str = ""
    versions: Mapping[str, str] = {}
    taas_digest: str = ""
    missing: tuple[str, ...] = ()
    cache: str = ""
    cache_error: str = ""
    free_bytes: int = 0
    sites: tuple[str, ...] = ()
    cores: int = 0
    gpus: int = 0
    gpu_names: tuple[str, ...] = ()
    clock: float = 0.0
    ahead_s: float = 0.0
    hostname: str = ""
    own_addresses: tuple[str, ...] = ()
    interfaces: Mapping[str, tuple[str, ...]] = {}
    python_path: tuple[str, ...] = ()
    reached_at: str = ""
    is_managed: bool = False
    sees_store: bool = False

    def with_host(self, host: str, began: float) -> "HostFacts":
        """Return a copy of these facts with the fields `host` and `ahead_s` set.

        Call this method as soon as the facts arrive, because it compares `clock` with this
        machine's clock. It assumes that the probe read `clock` halfway between its start and now.
        If `clock` is 0, `ahead_s` becomes 0.

        Args:
            host: Name of the host.
            began: Time at which the probe was started, by this machine's clock.
        """
        ahead_s = self.clock - (began + time.time()) / 2 if self.clock else 0.0
        return structs.replace(self, host=host, ahead_s=ahead_s)

    def interface_of(self, address: str) -> str:
        """Return the name of the host's network interface with `address`; "" if there is none."""
        return next((name for name, seen in self.interfaces.items() if address in seen), "")


class GetHostFacts(Request[list[HostFacts]]):
    """Request of a kernel for facts about the hosts of a pool, such as their GPUs and packages.

    On each host, the agent calls `probe.main` with the fields of this request as arguments.

    Attributes:
        packages: Distributions whose versions are requested.
        modules: Top-level modules to check; the facts name the missing ones.
        mark: Path of a new file in the project store. A host that has this file shares the store.
        names: Whether the names of the GPUs are requested.
    """

    packages: list[str] = []
    modules: list[str] = []
    mark: str = ""
    names: bool = True


# The pool's process sends these requests to an agent.


class HostHello(Struct, kw_only=True):
    """Response to `DescribeHost`: an agent's description of its host.

    Attributes:
        host: Name of the host for the user.
        address: Address at which other hosts reach the ranks and fetchers of this host.
        protection: Mechanism by which the host protects the project store, such as "Landlock" (a
            value of `store.guard.StoreProtection`).
    """

    host: str
    address: str
    protection: str
    gpus: int


class DescribeHost(Request[HostHello]):
    """Request of the pool's process to an agent: describe the agent's host.

    The agent sends the response as soon as the host can start ranks.

    Attributes:
        has_run: Whether a run waits for the host. If not, the agent begins to import modules that
            runs need later.
    """

    has_run: bool = True


class PauseClocks(Request[None]):
    """Request of the pool's process to an agent: pause or resume the clocks of a run.

    These clocks measure the time for `--timeout` and `--hang`. They are paused while a rank waits
    for the user, because this time must not count.
    """

    run_id: str
    is_paused: bool


class EndRun(Request[None]):
    """Request of the pool's process to an agent: end a run whose ranks have ended on all hosts."""

    run_id: str


class SetFetcherAddress(Request[None]):
    """Request of the pool's process to an agent: pass a fetcher's addresses to the ranks.

    The agent writes the addresses to a folder, in which the ranks on its host find them.

    Attributes:
        number: Number of the fetcher in the run.
        entry: The addresses, by name of the loader that the fetcher serves.
    """

    run_id: str
    number: int
    entry: AddressesByLoader


# An engine sends settings to an agent. A vehicle asks the pool's process for an agent's keys.


class AgentSettings(Struct, kw_only=True):
    """Settings that an engine sends to the agent that it starts, through the supervisor.

    Attributes:
        security: Keyword arguments of Dask's `Security`.
        name: Name of the host for Dask and the engine.
        host_name: Name of the host for the user; "" for the host's own name.
        interface: Network interface for the ranks' connections; "" if the agent must choose one.
        is_foreign: Whether the host is not the notebook's machine.
        local_directory: Folder for Dask's files; None for Dask's default.
        start_timeout_s: Seconds without any activity after which the host's forkserver counts as
            stuck.
    """

    scheduler: str
    security: dict[str, str | bool]
    name: str | int
    host_name: str = ""
    interface: str = ""
    is_foreign: bool = True
    local_directory: str | None = None
    lease_s: float
    start_timeout_s: float


class AgentKeys(Struct, kw_only=True):
    """Response to `GetAgentKeys`: a name and a key for an agent that a vehicle will start.

    Attributes:
        name: Name of the host for Dask and the engine.
        security: Keyword arguments of Dask's `Security`, with the agent's private key.
    """

    name: str
    security: dict[str, str | bool]


class GetAgentKeys(Request[AgentKeys]):
    """Request of a vehicle to the pool's process: send a name and a key for the vehicle's agent.

    A vehicle is a Dask worker of a batch system or cloud, and starts an agent on its host
    (host/vehicle.py).

    Attributes:
        vehicle: Name of the Dask worker that is the vehicle.
    """

    vehicle: str


_SHOWN_RESPONSES = (StartResponse, RunStacks, HostHello, PoolStatus, list[HostFacts])
"""Types of responses that people read. `read_answer` removes terminal control sequences from these.

Other responses contain paths and contents of files, which must not change.
"""


RequestHandler = Callable[[Any], Awaitable[object]]
"""Function that executes a request of one type and returns its response."""


def handlers(answers: Mapping[type[Request[Any]], RequestHandler]) -> dict[str, Callable[..., Any]]:
    """Return the handlers that Dask's `Server` calls for requests, by the name of the operation.

    Args:
        answers: For each type of request, the function that executes a request and returns the
            response.
    """
    return {kind.op(): make_handler(kind, answer) for kind, answer in answers.items()}


def make_handler(
    kind: type[Request[Any]], answer: RequestHandler
) -> Callable[[bytes], Awaitable[bytes]]:
    """Return a handler that decodes a request, passes it to `answer`, and encodes the response.

    The handler raises ProtocolError if the bytes are not a request of the type `kind`.
    """

    async def handle(request: bytes) -> bytes:
        try:
            decoded = from_bytes(request, kind)
        except ValueError as error:
            raise ProtocolError(f"{kind.op()}: {error}") from error
        return to_bytes(await answer(decoded))

    return handle


async def send_request(scheduler: Any, request: Request[_T]) -> _T:
    """Send a request to the pool's process and return the response.

    Args:
        scheduler: A Dask connection (`rpc`) to the scheduler of the pool's process.

    Raises:
        OSError: The pool's process cannot be reached.
        ValueError: The response does not have the type that belongs to the request.
    """
    return request.read_answer(await getattr(scheduler, request.op())(request=to_bytes(request)))
