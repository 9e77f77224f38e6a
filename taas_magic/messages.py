"""Messages, requests and responses between processes, and their codecs.

Each type is defined once, and its reader checks the data against that definition. Messages are
JSON: lines of a rank's pipe, messages to the pool's process, lines of the journal (docs/events.md).
Requests and responses are msgpack, as they may contain the bytes of files. Readers ignore fields
that they do not know, and fields that were added later have defaults, so that journals of older
versions remain readable.

Most events come from a host: a rank, a fetcher or the agent makes the event, and the agent sends it
to the pool's process. The pool's process writes it to the journal and sends it to the kernel.
"""

import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import UNSET, Struct, UnsetType, field, structs

from taas_magic.errors import ProtocolError

_T = TypeVar("_T")


class Failure(Struct, kw_only=True, frozen=True):
    """Failure of a rank or a host; docs/events.md describes the fields."""

    rank: int | None = None
    host: str = ""
    pid: int | None = None
    how: str = ""
    etype: str = ""
    etype_module: str = ""
    message: str = ""
    traceback: list[str] = []
    stack: list[str] = []
    signal: str = ""
    exitcode: int | None = None
    consequence: bool = False
    log_path: str = ""
    advice: str = ""
    tail: list[str] = []


class StackFrame(NamedTuple):
    """A frame of a Python stack; `text` is its source line, or "" if unknown."""

    file: str
    line: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        inside = "" if self.function == "<module>" else f", in {self.function}"
        return f"{self.file}, line {self.line}{inside}" + (f": {self.text}" if self.text else "")


class ProcessStack(Struct, kw_only=True):
    """Stack report of one process: its threads and what it waits for, as text for people.

    Attributes:
        command: Command line of the process; "" for a rank.
        place: Line of the notebook that it executes.
        waits_for: Event that its main thread waits for.
        system: State of the process, as psutil names it.
        threads: Frames by thread, outermost frame first. The main thread is the first one.
        pending: Collectives that have started and not finished.
        children: Stack reports of its child processes.
        memory_bytes: Its memory; memory shared with other processes is divided among them (PSS).
    """

    pid: int
    command: str = ""
    place: str = ""
    waits_for: str = ""
    system: str = ""
    threads: dict[str, list[str]] = {}
    pending: list[str] = []
    children: "list[ProcessStack]" = []
    memory_bytes: int = 0


class RankStack(ProcessStack, kw_only=True):
    """Stack report of a rank.

    Attributes:
        quiet_s: Seconds since the rank last made progress.
        since: Time of that progress, by the clock of the machine that displays it.
        cpus: Processors that the rank and its descendants used while the report was made.
    """

    rank: int
    quiet_s: float = 0.0
    host: str = ""
    since: float = 0.0
    cpus: float = 0.0


class FetcherStack(ProcessStack, kw_only=True):
    """Stack report of a fetcher and its workers; `fetcher` is its number in the run."""

    fetcher: int
    host: str = ""


class RunStacks(Struct):
    """Stack reports of a run; `silent` has a line for each host that did not respond."""

    ranks: list[RankStack] = []
    fetchers: list[FetcherStack] = []
    silent: list[str] = []


class RankCounts(Struct, kw_only=True):
    """Data metrics of a rank for one loader; docs/events.md describes the fields."""

    workers: int = 0
    batches: int = 0
    units: int = 0
    bytes: int = 0
    waited_s: float = 0.0
    retried: int = 0
    first_s: float = 0.0
    span_s: float = 0.0
    receive_s: float = 0.0
    receive_cpu_s: float = 0.0
    held_bytes: int = 0
    resumed: int = 0
    spent: int = 0


class FetcherCounts(Struct, kw_only=True):
    """Data metrics of a fetcher for one loader; docs/events.md describes the fields."""

    prepared: int = 0
    sent: int = 0
    ready: int = 0
    ready_bytes: int = 0
    budget_bytes: int = 0
    fetch_s: float = 0.0
    fetch_cpu_s: float = 0.0
    fetch_most_s: float = 0.0
    workers: int = 0
    idle: int = 0
    up_s: float = 0.0
    refused: int = 0


class Address(NamedTuple):
    """Address of a fetcher's server.

    Attributes:
        fetcher: Number of the fetcher in the run.
        host: Host name or IP address for TCP.
        port: TCP port; 0 if the server listens on a Unix socket only.
        unix: Name of its Unix socket in the abstract namespace. Authentication also uses this name
            for the server.
        machine: `service.machine()` of its host; a client on the same machine uses the Unix socket.
    """

    fetcher: int
    host: str
    port: int
    unix: str
    machine: str

    def __str__(self) -> str:
        where = f"at {self.host}:{self.port}" if self.port else "on this host"
        return f"fetcher {self.fetcher} {where}"


class LoaderAddresses(Struct, kw_only=True, frozen=True):
    """Addresses at which fetchers serve one loader.

    Attributes:
        fetchers: Number of fetchers that run the loader.
        workers: Number of workers of these fetchers together.
        addresses: Known addresses, by the index of the fetcher among these fetchers. A fetcher
            reports only its own.
        failed: Reason why the reporting fetcher has ended or could not start; "" if it listens or
            is about to.
    """

    fetchers: int
    workers: int = 0
    addresses: dict[int, Address] = {}
    failed: str = ""


LoaderPlaces = dict[str, LoaderAddresses]
"""Addresses at which a fetcher serves its loaders, by the name of the loader."""


class WrittenFile(Struct):
    """A file that rank 0 wrote to the project store."""

    path: str
    bytes: int


class KeptOutFile(Struct):
    """A file of another rank that was kept out of the project store.

    Attributes:
        in_store: Whether rank 0 left a file with this path in the project store.
    """

    rank: int
    path: str
    in_store: bool


class UnsentFile(Struct):
    """A file of rank 0 that could not be copied from its host to the project store."""

    path: str
    why: str


class MetricPoint(NamedTuple):
    """A value that a program logged by `taas.log`; `value` is None for NaN and infinity."""

    name: str
    step: int
    value: float | None
    time: float


class Event(Struct, tag_field="kind", kw_only=True):
    """Base class of the events of a run: the records of its journal.

    Attributes:
        time: Time at which the pool's process received the event, in seconds since 1970.
        host: Name of the reporting host; "" for an event that no single host reports. The pool's
            process sets it.
    """

    time: float = field(default_factory=time.time)
    host: str = ""


class RankEvent(Event, kw_only=True):
    """Base class of the events of one rank. The rank's agent sets `rank`."""

    rank: int = 0


class StateChanged(Event, tag="state", kw_only=True):
    """The pool's process reports that the run's state is now RUNNING."""

    state: str


class Detached(Event, tag="detached", kw_only=True):
    """The pool's process reports that it owns the run from now on, instead of a kernel."""


class RanksStarted(Event, tag="started", kw_only=True):
    """An agent reports that the ranks of its host have started.

    Attributes:
        pids: Process id by rank.
        gpus: Number of GPUs that the ranks use: one each, but not more than the host has.
    """

    attempt: int = 0
    pids: dict[int, int] = {}
    gpus: int = 0


class Lines(RankEvent, tag="lines", kw_only=True):
    """An agent sends complete lines that a rank wrote, without line ends."""

    lines: list[str]


class LinesDropped(RankEvent, tag="dropped", kw_only=True):
    """An agent reports how many lines and bytes of a rank are not shown, as there were too many."""

    lines: int
    bytes: int


class Progress(RankEvent, tag="progress", kw_only=True):
    """An agent sends the current text of rank 0's unfinished line, such as a progress bar."""

    text: str


class Display(RankEvent, tag="display", kw_only=True):
    """A rank sends an output that it displayed; `data` maps media types to contents."""

    data: dict[str, Any]
    metadata: dict[str, Any] | None = None
    display_id: str | None = None
    update: bool = False


class ClearOutput(RankEvent, tag="clear", kw_only=True):
    """A rank reports that it cleared its output; `wait` is the argument of `clear_output`."""

    wait: bool = False


class Note(Event, tag="note", kw_only=True):
    """Any process sends a note for the user, which the run's head shows."""

    text: str


class Hang(Event, tag="hang", kw_only=True):
    """An agent reports that no rank of its host makes progress.

    Attributes:
        ranks: Stack reports of the ranks; empty if a rank has made progress again.
    """

    attempt: int
    ranks: list[RankStack]


class RankFailure(Event, tag="failure", kw_only=True):
    """An agent, or the pool's process, reports that a rank or a host failed."""

    failure: Failure


class Settled(Event, tag="settled", kw_only=True):
    """An agent reports that the ranks of its host have ended or failed.

    When the agents of all hosts have reported, the pool's process ends or restarts the run.

    Attributes:
        state: SUCCEEDED, FAILED or INTERRUPTED.
        cause: "rank", "left", "stopped", "timeout", "interrupt" or "host"; "" on success.
        failures: Failures of the ranks of this host.
    """

    attempt: int = 0
    state: str = ""
    cause: str = ""
    failures: list[Failure] = []


class Restart(Event, tag="restart", kw_only=True):
    """The pool's process reports that all ranks start again.

    Attributes:
        failure: The failure that made the restart necessary; None if no host named one.
    """

    attempt: int
    failure: Failure | None = None


class StoreReceipt(Event, tag="receipt", kw_only=True):
    """An agent lists its ranks' writes to the project store; see `store.receipt.Receipt`."""

    written: list[WrittenFile] = []
    kept_out: list[KeptOutFile] = []
    shared: list[str] = []
    means: str = ""
    complete: bool = True
    not_sent: list[UnsentFile] = []


class FetcherStarted(Event, tag="fetcher", kw_only=True):
    """A fetcher reports that it now accepts connections from ranks.

    Attributes:
        number: Number of the fetcher in the run.
        cores: Number of processors of its host.
        workers: Number of workers by the name of the loader.
        entry: Addresses of the fetcher; not in the journal.
    """

    number: int
    pid: int = 0
    cores: int = 0
    workers: dict[str, int] = {}
    entry: LoaderPlaces | UnsetType = UNSET


class FetcherReport(Event, tag="fetched", kw_only=True):
    """A fetcher reports its data metrics, by loader."""

    number: int
    loaders: dict[str, FetcherCounts]


class FetcherEnded(Event, tag="fetcher_ended", kw_only=True):
    """An agent reports that a fetcher has ended.

    Attributes:
        number: Number of the fetcher in the run.
        entry: Its loaders. If it ended unexpectedly or could not start, `failed` has the reason.
    """

    number: int
    entry: LoaderPlaces | UnsetType = UNSET


class Prefilling(Event, tag="filling", kw_only=True):
    """The kernel reports the fetchers' progress while ranks wait for prepared data (`--prefill`).

    Attributes:
        done: Amount that is ready.
        wanted: Amount to wait for.
        unit: Unit of both: "bytes" or "batches".
    """

    done: int
    wanted: int
    unit: str


class RankReport(RankEvent, tag="data", kw_only=True):
    """A rank reports its data metrics by loader, and the `cores` of its host."""

    cores: int = 0
    loaders: dict[str, RankCounts]


class Metrics(RankEvent, tag="metrics", kw_only=True):
    """A rank sends the values that its program logged since the last event of this kind."""

    points: list[MetricPoint]


class InputRequested(RankEvent, tag="input", kw_only=True):
    """A rank asks the user for a line of input, and waits for it.

    Attributes:
        number: Number of the request, unique in all attempts of the run.
        prompt: Text that the program shows before the input, such as "(Pdb) ".
        is_hidden: Whether the line must not be shown while it is typed, as for a password.
    """

    number: int
    prompt: str = ""
    is_hidden: bool = False


class InputAnswered(RankEvent, tag="answered", kw_only=True):
    """The pool's process reports that a rank has received its line of input, or a refusal."""


class Rehearsed(RankEvent, tag="rehearsed", kw_only=True):
    """A rank of a rehearsal reports what it has used and written.

    Attributes:
        peak_bytes: Largest resident memory of the rank so far, without its child processes.
        written: Files that a run would have written to the project store. All ranks see the same
            files.
        outside: Files that this rank wrote outside the project store.
    """

    peak_bytes: int
    written: list[WrittenFile] = []
    outside: list[WrittenFile] = []


class CellNames(RankEvent, tag="names", kw_only=True):
    """Names of variables that a session's cell assigned and deleted on a rank.

    Attributes:
        plain: Digests (`plain_digest`) of the assigned values that consist of numbers and strings.
        fetched: Numbers of the session's cells whose fetchers the rank still needs.
    """

    assigned: list[str] = []
    deleted: list[str] = []
    plain: dict[str, str] = {}
    fetched: list[int] = []


class RanksKilled(Event, tag="killed", kw_only=True):
    """An agent reports that it killed ranks of a session that did not end a cell in time."""

    ranks: list[int]


class HostEnded(Event, tag="host_ended", kw_only=True):
    """An agent reports that its host has ended its share of the run."""

    state: str = ""
    failures: list[Failure] = []


class RunEnded(Event, tag="ended", kw_only=True):
    """The pool's process reports the end of the run, as the run's last event.

    If that process is lost, the kernel or a reader of the journal makes the event.

    Attributes:
        state: SUCCEEDED, FAILED, INTERRUPTED or LOST.
        failures: Failures of all hosts, causes before consequences.
        first: The failure to blame; None if there is none.
        elapsed_s: Seconds that the run took.
        why: Reason for the end if the run itself could not report it, for example because the
            pool's process is gone; else "".
        attempt: Number of the last attempt, whose results count.
    """

    state: str
    failures: list[Failure] = []
    first: Failure | None = None
    elapsed_s: float | None = None
    why: str = ""
    attempt: int = 0


class FetcherFailed(Struct, tag_field="kind", tag="fetcher_failed"):
    """A fetcher's message to its agent: the reason why it cannot continue."""

    why: str


class RankMessage(Struct, tag_field="kind", kw_only=True):
    """Base class of messages about itself that a rank sends to its agent, in addition to events."""


class RankUp(RankMessage, tag="up"):
    """The rank reports that from now on it reacts to an interrupt (SIGINT)."""


class RankBeat(RankMessage, tag="beat", kw_only=True):
    """The rank reports periodically that it is alive.

    Attributes:
        stack: The user's innermost frames of its main thread, outermost first.
        collectives: Numbers of started and of finished collectives, for each backend.
        spins: Whether the rank may use a core while it only waits, as CUDA does for NCCL.
    """

    stack: list[StackFrame] = []
    collectives: list[tuple[int, int]] = []
    spins: bool = False


class RankStackSample(RankMessage, tag="stack_sample"):
    """The rank sends its stack report: stacks by the thread's name, and unfinished collectives."""

    threads: dict[str, list[StackFrame]]
    pending: list[str] = []


class RankRaised(RankMessage, tag="raised"):
    """The rank reports the exception that the cell failed with.

    The rank sends it again with the traceback as IPython formats it.

    Attributes:
        is_logged: Whether the rank has already written the traceback to its log.
        etype_module: The module that defines the exception's type.
    """

    etype: str
    message: str
    traceback: list[str]
    is_logged: bool = False
    etype_module: str = ""


class RankShowed(RankMessage, tag="showed"):
    """The rank reports that IPython caught and showed an exception, and that the cell continues.

    The run counts as failed: `RankRaised` follows when the cell ends. A plain cell continues in the
    same way after `%run` of a script that raised.
    """


class RankReported(RankMessage, tag="reported"):
    """The rank reports that it has sent everything about the exception that the cell raised."""


class RankLeft(RankMessage, tag="left"):
    """The rank reports that it ends by `sys.exit(0)`; `stack` has the lines of the call."""

    stack: list[str]


class RankFinished(RankMessage, tag="finished"):
    """The rank reports that the cell ran to its end."""


class RankReturned(RankMessage, tag="returned", kw_only=True):
    """A session's rank reports that it waits for its next cell.

    Attributes:
        was_cut: Whether its connections to other ranks were closed to end a collective.
    """

    was_cut: bool = False


class StoreMessage(Struct, tag_field="kind", kw_only=True):
    """Base class of messages about the project store that a rank sends to its agent."""


class RankTouched(StoreMessage, tag="touched"):
    """The rank reports a write to the project store; a write of a rank other than 0 is kept out."""

    path: str


class RankHeld(StoreMessage, tag="held"):
    """The rank reports what keeps its writes out of the project store (`StoreProtection`)."""

    means: str


class CellOrder(Struct, kw_only=True):
    """The agent's order to a rank of a session: run the next cell, or end.

    Attributes:
        number: Number of the cell in the session, from 1; 0 ends the rank.
        run_dir: Folder of the cell's run on this host.
        takes_part: Whether the rank runs the cell; other ranks only load the notebook's values.
        shows: Whether the notebook shows the rank's displays.
        out: See `RunOptions.out`.
        colors: IPython's colour scheme for tracebacks.
    """

    number: int
    run_dir: str = ""
    takes_part: bool = True
    shows: bool = False
    out: list[str] = []
    colors: str = "neutral"


class AgentSettings(Struct, kw_only=True):
    """Settings that an engine sends to the agent that it starts, through the supervisor.

    Attributes:
        scheduler: Address of the pool's process.
        security: Keyword arguments of Dask's `Security`.
        name: Name of the host for Dask and the engine.
        host_name: Name of the host for the user; "" for the host's own name.
        interface: Network interface of the ranks; "" if the agent shall find it.
        is_foreign: Whether the host is another machine than the notebook's.
        local_directory: Folder for Dask's files; None for Dask's default.
        lease_s: Seconds without a message from the pool after which the host ends all its
            processes.
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
    """Name and key for an agent that a vehicle starts; the response to `GetAgentKeys`."""

    name: str
    security: dict[str, str | bool]


class HostHello(Struct, kw_only=True):
    """Description of a host that its agent sends to the pool's process; the response to `Greet`.

    Attributes:
        host: Name of the host for the user.
        address: Address at which other hosts reach its ranks and fetchers.
        means: What keeps writes of its ranks out of the project store (`StoreProtection`).
        gpus: Number of its GPUs.
    """

    host: str
    address: str
    means: str
    gpus: int


class Facts(Struct, frozen=True):
    """Facts about a host, as `probe.main` finds them in the Python that the pool uses there.

    Attributes:
        python: Version of the interpreter that the pool's settings name. All other facts are
            those that this interpreter finds.
        glibc: Version of glibc; "" if the host has another C library.
        torch: Version of torch; "" if it is not installed.
        cuda: CUDA version that torch was built for; "" for a CPU build.
        versions: Versions of the requested packages that are installed.
        ours: Digest of taas-magic's files; "" if it is not installed.
        missing: Requested modules that are not installed.
        cache: Folder for taas-magic's files on the host (`probe.cache_folder`).
        cache_error: Reason why the cache is not writable; "" if it is writable.
        free_bytes: Bytes that can still be written to the cache.
        sites: Names of the package folders that taas-magic has put into the cache.
        cores: Number of logical processors that a process may use.
        gpus: Number of GPUs.
        gpu_names: Names of the GPUs; empty if they were not requested or could not be found.
        clock: The host's wall clock, in seconds since 1970.
        ahead_s: Seconds by which the host's clock is ahead of the clock of the machine that asked.
        hostname: The host's own name.
        own_addresses: Addresses that the host itself resolves that name to.
        interfaces: Addresses by network interface.
        python_path: Entries of PYTHONPATH.
        reached_at: Address at which SSH reached the host; "" without SSH.
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
    ours: str = ""
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
    sees_store: bool = False

    def of(self, host: str, began: float) -> "Facts":
        """Return the facts with `host` and `ahead_s` set.

        Call it as soon as the facts arrive: it compares the host's clock with the current time.

        Args:
            host: Name of the host.
            began: Time at which the probe was started, by this machine's clock.
        """
        ahead_s = self.clock - (began + time.time()) / 2 if self.clock else 0.0
        return structs.replace(self, host=host, ahead_s=ahead_s)

    def interface_of(self, address: str) -> str:
        """Return the name of the network interface with this address; "" if there is none."""
        return next((name for name, seen in self.interfaces.items() if address in seen), "")


class Started(Struct, kw_only=True):
    """Response of the pool's process to a request for hosts, or to start a run or its fetchers.

    Attributes:
        hosts: Names of the hosts.
        error: Reason why there are no hosts; else "".
        store_error: Reason why the project store cannot be used; else "".
        is_ending: Whether the pool's process had begun to end when it received the request.
    """

    hosts: list[str] = []
    error: str = ""
    store_error: str = ""
    is_ending: bool = False


class HostStatus(Struct, kw_only=True):
    """Status of a host, for `%taas pools`.

    Attributes:
        means: What keeps writes of its ranks out of the project store (`StoreProtection`).
        runs: Ids of the runs on the host.
        had_s: Seconds since the host was allocated.
        idle_s: Seconds without a run; None if it has one.
        gpu_hours: GPU hours since the host was allocated.
    """

    host: str
    means: str
    runs: list[str]
    had_s: float
    idle_s: float | None
    gpu_hours: float


class StartingHost(Struct, kw_only=True):
    """A host that has joined its pool, and cannot start ranks yet.

    Attributes:
        host: Name of the host for the user.
        imports: Module that its forkserver is importing.
        for_s: Seconds since that import began.
    """

    host: str
    imports: str
    for_s: float


class PoolStatus(Struct, kw_only=True):
    """Status of a pool, for `%taas pools`.

    Attributes:
        hosts: Hosts that can start ranks.
        starting: Hosts that cannot start ranks yet.
        refused: Number of refused messages and connections.
        gpu_hours: GPU hours of all hosts since the pool's process started.
        used_gpu_hours: GPU hours of runs.
    """

    hosts: list[HostStatus] = []
    starting: list[StartingHost] = []
    refused: int = 0
    gpu_hours: float = 0.0
    used_gpu_hours: float = 0.0


_FOR_PEOPLE = (Started, RunStacks, HostHello, PoolStatus, list[Facts])
"""Types of responses that people read, which are cleaned of control sequences.

Other responses contain paths and contents of files, which must not be changed.
"""


def leaves(kind: type[Struct]) -> list[Any]:
    """Return the subclasses of a struct, at any depth, that have no subclasses themselves."""
    return [leaf for below in kind.__subclasses__() for leaf in leaves(below)] or [kind]


if TYPE_CHECKING:
    AnyEvent = Event
else:
    AnyEvent = reduce(or_, leaves(Event))


class Request(Struct, Generic[_T]):
    """Base class of requests that one process sends to another. `Request[T]` has a response of `T`.

    The class name of a request is the name of its operation in Dask. `pool/gate.py` lists the
    operations that each peer may send. To execute `Halt`, `GetStacks` or `GetFacts` for all hosts,
    the pool's process sends the same request to each agent.
    """

    @classmethod
    def op(cls) -> str:
        """Return the name of the request's operation in Dask."""
        return f"taas_{cls.__name__}"

    def read_answer(self, packed: bytes) -> _T:
        """Decode the response to this request.

        Raises:
            ValueError: The response has another type.
        """
        answer: type[_T] = get_args(self.__orig_bases__[0])[0]  # type: ignore[attr-defined]
        read = from_bytes(packed, answer)
        return cleaned(read) if answer in _FOR_PEOPLE else read


class RegisterKernel(Request[bool]):
    """A kernel registers with the pool's process, which then stays as long as the kernel.

    The response is False if the pool's process has begun to end.

    Attributes:
        owner: Id of the kernel's Dask client, which is connected already.
    """

    owner: str


class WaitForHosts(Request[Started]):
    """A kernel asks the pool's process to wait until enough hosts can start ranks immediately.

    Attributes:
        owner: Id of the kernel's Dask client; if the client disconnects, the wait is cancelled.
        wait: Id to pass to `Halt` to cancel the wait.
        hosts: Number of hosts to wait for.
        has_run: Whether a run waits for the hosts; False if the wait only warms the pool.
    """

    owner: str
    wait: str
    hosts: int
    has_run: bool = True


class Relay(Request[None]):
    """A kernel forwards events of a run's fetchers to the pool's process that owns the run.

    The fetchers may belong to another pool.
    """

    run_id: str
    said: list[AnyEvent]


class Halt(Request[None]):
    """A kernel or a pool's process stops the ranks or the fetchers of a run.

    A kernel sends it to the pool's process, which sends it to the agents. It is no error if the
    ranks or fetchers have already ended.

    Attributes:
        run_id: Id of the run, of its fetchers, or of a wait for hosts, which is then cancelled.
        how: "interrupt" or "kill".
    """

    run_id: str
    how: str


class AnswerInput(Request[None]):
    """A kernel answers a rank's `InputRequested`.

    A kernel sends it to the pool's process, which sends it to the agent of the rank. The agent
    writes it to a pipe of the rank.

    Attributes:
        rank: The rank that asked.
        number: `InputRequested.number`.
        line: The line that the user typed, without a line end; None if the user ended the input.
        is_refused: Whether nobody can type. `line` is None then.
    """

    run_id: str
    rank: int
    number: int
    line: str | None = None
    is_refused: bool = False


class PauseClocks(Request[None]):
    """The pool's process pauses or resumes the clocks of `--timeout` and `--hang` on a run's hosts.

    The clocks are paused while a rank waits for the user's input.
    """

    run_id: str
    is_paused: bool


class Detach(Request[str]):
    """A kernel hands a run and its fetchers over to the pool's process.

    A session stays with its kernel until the kernel ends.

    The response is "", or the reason why this is impossible.
    """

    run_id: str


class SessionState(Struct, kw_only=True):
    """State of a session, for the kernel that takes it over.

    Attributes:
        error: Reason why the kernel cannot have the session; "" if it has it now.
        cells: Number of cells that the session has begun.
        fetchers: Number of fetchers that its cells have started.
        cell: Run id of the cell that runs, or that has run without a kernel; "" for none.
    """

    error: str = ""
    cells: int = 0
    fetchers: int = 0
    cell: str = ""


class TakeSession(Request[SessionState]):
    """A kernel takes over a detached session, and gets its events from now on.

    Attributes:
        owner: Id of the kernel's Dask client.
    """

    owner: str
    run_id: str


class TakeFetchers(Request[list[AnyEvent] | None]):
    """The pool's process that owns a run takes over its fetchers from another pool's process.

    From then on, it receives the events of the fetchers. The response has the events of their
    starts and ends so far, or is None if that pool does not run the fetchers.

    Attributes:
        owner: Id of the new owner's Dask client; if the client disconnects, the fetchers end.
    """

    owner: str
    run_id: str


class GetStatus(Request[PoolStatus]):
    """A kernel asks the pool's process for the status of the pool and its hosts."""


class GetStacks(Request[RunStacks]):
    """Get the stack reports of a run's ranks or fetchers.

    A kernel sends it to the pool's process, which sends it to the agents.

    Attributes:
        run_id: Id of the run or of its fetchers.
    """

    run_id: str


class EndPool(Request[None]):
    """A kernel asks the pool's process to end every run and then itself."""


class GetAgentKeys(Request[AgentKeys]):
    """A vehicle asks the pool's process for the name and key of the agent that it starts.

    A vehicle is a Dask worker of a batch system or cloud (host/vehicle.py).

    Attributes:
        vehicle: Name of that Dask worker.
    """

    vehicle: str


class Greet(Request[HostHello]):
    """The pool's process asks an agent to describe its host as soon as the host can start ranks.

    Attributes:
        has_run: Whether a run waits for the host. If not, the agent starts to import modules that
            runs do not need immediately.
    """

    has_run: bool = True


class GetFacts(Request[list[Facts]]):
    """Get facts about the hosts.

    A kernel sends it to the pool's process, which sends it to the agents. The fields are the
    arguments of `probe.main`, which runs in the agent's Python.
    """

    packages: list[str] = []
    modules: list[str] = []
    mark: str = ""
    names: bool = True


class EndRun(Request[None]):
    """The pool's process asks an agent to end a run whose ranks have ended on all hosts."""

    run_id: str


class PlaceFetcher(Request[None]):
    """The pool's process sends an agent the addresses of a fetcher, for the ranks on its host."""

    run_id: str
    number: int
    entry: LoaderPlaces


Answer = Callable[[Any], Awaitable[object]]
"""Function that executes a request of one type and returns its response."""


def handlers(answers: Mapping[type[Request[Any]], Answer]) -> dict[str, Callable[..., Any]]:
    """Return the handlers that Dask calls for these types of requests, by operation."""
    return {kind.op(): answering(kind, answer) for kind, answer in answers.items()}


def answering(kind: type[Request[Any]], answer: Answer) -> Callable[[bytes], Awaitable[bytes]]:
    """Return a handler that decodes a request, executes it and encodes the response.

    The handler raises ProtocolError if the bytes are not a request of this type.
    """

    async def handle(request: bytes) -> bytes:
        try:
            asked = from_bytes(request, kind)
        except ValueError as error:
            raise ProtocolError(f"{kind.op()}: {error}") from error
        return to_bytes(await answer(asked))

    return handle


async def send_request(scheduler: Any, request: Request[_T]) -> _T:
    """Send a request to the pool's process and return the response.

    Args:
        scheduler: A Dask connection (`rpc`) to the scheduler of the pool's process.
        request: The request.

    Raises:
        OSError: The pool's process cannot be reached.
    """
    return request.read_answer(await getattr(scheduler, request.op())(request=to_bytes(request)))


_encoder = msgspec.json.Encoder(enc_hook=repr)


def encode(message: Struct) -> bytes:
    """Encode a message as one line of JSON, without a line end.

    Displayed objects may contain any type: values that JSON does not have are replaced by their
    `repr`. Strings that are not valid UTF-8, such as file names, are escaped.
    """
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return _encoder.encode(escaped(msgspec.to_builtins(message, enc_hook=repr)))


def escaped(value: Any) -> Any:
    r"""Escape lone surrogates in all strings of a value, such as `\udce9`, which UTF-8 rejects."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {escaped(name): escaped(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(inner) for inner in value]
    return value


# Terminal control sequences except colours: CSI, strings (OSC with hyperlinks and titles, DCS, SOS,
# PM, APC), two-character escapes, and single control characters.
_CONTROLS = re.compile(
    r"\x1b\[[0-9;:?<=>!]*[ -/]*[@-ln-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[!-/]*[0-Z\\^-~]"
    r"|\x1b(?!\[[0-9;:]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]"
)
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_COLOURS_END = ("\x1b[0m", "\x1b[m")

_COLOURED = frozenset({"Lines.lines", "Failure.tail", "JobUpdate.lines"})
"""Fields with single lines of a program's output, which keep their colours."""

_BLOCKS = frozenset(
    {"Failure.message", "Failure.traceback", "JobOutcome.message", "JobOutcome.traceback"}
    | {"JobUpdate.lines", "Progress.text", "RunEnded.why", "Started.error", "Started.store_error"}
    | {"InputRequested.prompt"}
)
"""Fields with text of several lines, which keeps its line breaks and colours."""


def harmless(text: str) -> str:
    """Remove all terminal control sequences except colours from a line."""
    if text.isprintable():
        return text
    text = _CONTROLS.sub("", text)
    return text if text.endswith(_COLOURS_END) or "\x1b[" not in text else f"{text}\x1b[0m"


def harmless_block(text: str) -> str:
    """Remove all terminal control sequences except colours from a text of several lines."""
    return text if text.isprintable() else "\n".join(map(harmless, text.split("\n")))


def _harmless_word(text: str) -> str:
    """Remove line breaks and all terminal control sequences, including colours."""
    return text if text.isprintable() else _COLOURS.sub("", harmless(text.replace("\n", " ")))


def _harmless_line(text: str) -> str:
    """Remove line breaks and all terminal control sequences except colours from a line.

    A second line could be mistaken for another rank's output.
    """
    return text if text.isprintable() else harmless(text.replace("\n", " "))


def cleaned(value: _T) -> _T:
    """Remove terminal control sequences from every string of a value, at any depth.

    Call it after decoding a value that may come from another host and that people will read.
    Structs are changed in place. Strings also lose line breaks and colours, except in the fields
    listed in `_COLOURED` and `_BLOCKS`. In a `Display`, only plain text is changed, as other media
    types are not for terminals.
    """
    return _cleaned(value, _harmless_word)  # type: ignore[no-any-return]


def _cleaned(value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {_cleaned(key, clean): _cleaned(inner, clean) for key, inner in value.items()}
    if isinstance(value, list):
        return [_cleaned(inner, clean) for inner in value]
    if isinstance(value, tuple):
        inner = [_cleaned(each, clean) for each in value]
        return type(value)(*inner) if hasattr(value, "_fields") else tuple(inner)
    if isinstance(value, Struct):
        for name in value.__struct_fields__:
            structs.force_setattr(value, name, _cleaned_field(value, name))
    return value


def _cleaned_field(struct: Struct, name: str) -> Any:
    value, where = getattr(struct, name), f"{type(struct).__name__}.{name}"
    if isinstance(struct, Display) and name in ("data", "metadata"):
        plain = {"text/plain": harmless_block} if name == "data" else {}
        return value and {
            form: plain[form](shown) if form in plain and isinstance(shown, str) else shown
            for form, shown in value.items()
        }
    if where in _BLOCKS:
        return _cleaned(value, harmless_block)
    return _cleaned(value, _harmless_line if where in _COLOURED else _harmless_word)


_event_of: Callable[[bytes], Event] = msgspec.json.Decoder(AnyEvent).decode


def event_of(packed: bytes) -> Event:
    """Decode an event and clean it of control sequences (`cleaned`).

    Raises:
        msgspec.DecodeError: `packed` is no event.
    """
    try:
        return cleaned(_event_of(packed))
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deeply") from error


of_rank: Callable[[bytes], Event | RankMessage | StoreMessage] = msgspec.json.Decoder(
    reduce(or_, [*leaves(RankMessage), *leaves(StoreMessage)])
    | (Display | ClearOutput | Note | RankReport | Metrics | CellNames | InputRequested | Rehearsed)
).decode
"""Decode a message from a rank to its agent; raise msgspec.DecodeError for any other bytes."""

of_fetcher: Callable[[bytes], Event | FetcherFailed] = msgspec.json.Decoder(
    FetcherStarted | FetcherReport | Note | FetcherFailed
).decode
"""Decode a message from a fetcher to its agent; raise msgspec.DecodeError for any other bytes."""


def pack(value: object, indent: int | None = None) -> bytes:
    """Encode a value as ASCII JSON, which keeps even paths and strings that are not valid UTF-8."""
    return json.dumps(msgspec.to_builtins(value, str_keys=True), indent=indent).encode()


def unpack(packed: bytes, kind: type[_T]) -> _T:
    """Decode a value that `pack` encoded.

    Raises:
        ValueError: `packed` is not a value of this type.
    """
    try:
        return msgspec.convert(json.loads(packed), kind, str_keys=True)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def to_bytes(value: object) -> bytes:
    """Encode a request or a response, which may contain bytes, any strings and any integers."""
    try:
        return msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError):  # `pack` is ten times slower, and rarely needed
        return pack(value)


def from_bytes(packed: bytes, kind: type[_T]) -> _T:
    """Decode a value that `to_bytes` encoded.

    Raises:
        ValueError: `packed` is not a value of this type.
    """
    try:
        # In msgpack, the first byte of a JSON text would be a small number, with nothing after it.
        is_json = len(packed) > 1 and packed[0] < 0x80
        return unpack(bytes(packed), kind) if is_json else msgspec.msgpack.decode(packed, type=kind)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"it is no message: {error}") from error
