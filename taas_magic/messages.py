"""Every value that one process tells another, what one may ask another, and the codecs.

Each has one definition, by which whoever reads it checks it. All is JSON: a line of a rank's pipe,
a message, a line of the journal (docs/events.md); but requests and their answers are msgpack, as
they may hold bytes of files. Readers leave out fields that they do not know, and a field that was
added later has a default, so that journals of older versions are read, too.
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
    """Why a rank, or a host, failed; see docs/events.md."""

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
    """One frame of a stack; `text` is its line of source, "" where that is not known."""

    file: str
    line: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        inside = "" if self.function == "<module>" else f", in {self.function}"
        return f"{self.file}, line {self.line}{inside}" + (f": {self.text}" if self.text else "")


class ProcessStand(Struct, kw_only=True):
    """Where one process stands, in words.

    Attributes:
        command: Its command line; "" for a rank.
        place: The notebook's line.
        waits_for: What its main thread waits for.
        system: Its state, and where in the system's kernel it waits.
        threads: Frames of each thread by its name, outermost first; the main thread comes first.
        pending: Collectives that it has begun and that have not ended.
    """

    pid: int
    command: str = ""
    place: str = ""
    waits_for: str = ""
    system: str = ""
    threads: dict[str, list[str]] = {}
    pending: list[str] = []
    children: "list[ProcessStand]" = []


class RankStand(ProcessStand, kw_only=True):
    """Where a rank stands.

    Attributes:
        quiet_s: How long it has not come forward.
        since: Since when it has not, by the clock of who shows it.
    """

    rank: int
    quiet_s: float = 0.0
    host: str = ""
    since: float = 0.0


class FetcherStand(ProcessStand, kw_only=True):
    """Where a fetcher, by its number in the run, and its workers stand."""

    fetcher: int
    host: str = ""


class RunStacks(Struct):
    """Where the ranks and fetchers of a run stand, and a line for each host that did not say."""

    ranks: list[RankStand] = []
    fetchers: list[FetcherStand] = []
    silent: list[str] = []


class RankCounts(Struct, kw_only=True):
    """What a rank was handed of one loader; docs/events.md says what each field means."""

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
    """What a fetcher counts of one loader; docs/events.md says what each field means."""

    prepared: int = 0
    sent: int = 0
    ready: int = 0
    ready_bytes: int = 0
    budget_bytes: int = 0
    spilled_bytes: int = 0
    spill_refused: bool = False
    fetch_s: float = 0.0
    fetch_cpu_s: float = 0.0
    fetch_most_s: float = 0.0
    workers: int = 0
    idle: int = 0
    up_s: float = 0.0
    refused: int = 0


class Address(NamedTuple):
    """Where a fetcher listens.

    Attributes:
        host: Name or IP address for TCP.
        unix: Name in the abstract namespace, which is also the server's name in the proof.
        machine: `service.machine()` of its host.
    """

    fetcher: int
    host: str
    port: int
    unix: str
    machine: str

    def __str__(self) -> str:
        where = f"at {self.host}:{self.port}" if self.port else "on this host"
        return f"fetcher {self.fetcher} {where}"


class LoaderPlace(Struct, kw_only=True, frozen=True):
    """Where one fetcher has a loader.

    Attributes:
        workers: How many workers its fetchers have together.
        addresses: Where this one listens, by its place among them.
        failed: Why it has ended, or could not start; "" if it listens, or is about to.
    """

    fetchers: int
    workers: int = 0
    addresses: dict[int, Address] = {}
    failed: str = ""


LoaderPlaces = dict[str, LoaderPlace]
"""Where a fetcher listens, by loader."""


class WrittenFile(Struct):
    """A file of rank 0 in the project store."""

    path: str
    bytes: int


class KeptOutFile(Struct):
    """A file of another rank that was kept out; `in_store`: whether rank 0 left such a file."""

    rank: int
    path: str
    in_store: bool


class UnsentFile(Struct):
    """A file of rank 0 that did not get into the store from another machine."""

    path: str
    why: str


class MetricPoint(NamedTuple):
    """One value that a program logged by `taas.log`; `value` is None for NaN and infinity."""

    name: str
    step: int
    value: float | None
    time: float


class Event(Struct, tag_field="kind", kw_only=True):
    """Something that happened in a run.

    Attributes:
        time: Seconds since 1970, when the pool's process saw it.
        host: Who reports it, as the pool's process knows it; "" for what no single host does.
    """

    time: float = field(default_factory=time.time)
    host: str = ""


class RankEvent(Event, kw_only=True):
    """An event of one rank; it leaves the number to its agent."""

    rank: int = 0


class StateChanged(Event, tag="state", kw_only=True):
    """The run is now RUNNING; what reads a journal makes one that is LOST."""

    state: str


class Detached(Event, tag="detached", kw_only=True):
    """The pool's process owns the run from now on, and no kernel does."""


class RanksStarted(Event, tag="started", kw_only=True):
    """The ranks of a host have started.

    Attributes:
        gpus: GPUs that they hold: as many as there are ranks, as far as the host has them.
    """

    attempt: int = 0
    pids: dict[int, int] = {}
    gpus: int = 0


class Lines(RankEvent, tag="lines", kw_only=True):
    """Whole lines that a rank wrote, without their ends."""

    lines: list[str]


class LinesDropped(RankEvent, tag="dropped", kw_only=True):
    """Lines that were too many to show."""

    lines: int
    bytes: int


class Progress(RankEvent, tag="progress", kw_only=True):
    """Rank 0's unfinished line as it stands."""

    text: str


class Display(RankEvent, tag="display", kw_only=True):
    """A rank displayed something; `data` maps media types to contents."""

    data: dict[str, Any]
    metadata: dict[str, Any] | None = None
    display_id: str | None = None
    update: bool = False


class ClearOutput(RankEvent, tag="clear", kw_only=True):
    """A rank cleared its output."""

    wait: bool = False


class Note(Event, tag="note", kw_only=True):
    """Worth knowing, said once."""

    text: str


class Hang(Event, tag="hang", kw_only=True):
    """No rank of a host has come forward; no ranks: one has come forward since."""

    attempt: int
    ranks: list[RankStand]


class RankFailure(Event, tag="failure", kw_only=True):
    """A rank, or its host, failed."""

    failure: Failure


class Settled(Event, tag="settled", kw_only=True):
    """The ranks of a host have ended or failed."""

    attempt: int = 0
    state: str = ""
    cause: str = ""
    failures: list[Failure] = []


class Restart(Event, tag="restart", kw_only=True):
    """All ranks start again: after a failure, or, without one, because of `cause`."""

    attempt: int
    failure: Failure | None = None
    cause: str = ""
    world_size: int | None = None


class StoreReceipt(Event, tag="receipt", kw_only=True):
    """What one host's ranks did to the project store; see `store.receipt.Receipt`."""

    written: list[WrittenFile] = []
    kept_out: list[KeptOutFile] = []
    shared: list[str] = []
    means: str = ""
    complete: bool = True
    not_sent: list[UnsentFile] = []


class FetcherStarted(Event, tag="fetcher", kw_only=True):
    """A fetcher listens.

    Attributes:
        cores: Those of its host.
        workers: How many each loader has.
        entry: Where it listens; not in the journal.
    """

    number: int
    pid: int = 0
    cores: int = 0
    workers: dict[str, int] = {}
    entry: LoaderPlaces | UnsetType = UNSET


class FetcherReport(Event, tag="fetched", kw_only=True):
    """How a fetcher's workers stand, by loader."""

    number: int
    loaders: dict[str, FetcherCounts]


class FetcherEnded(Event, tag="fetcher_ended", kw_only=True):
    """A fetcher has ended. If it was not told to, or never listened, `entry` says why."""

    number: int
    entry: LoaderPlaces | UnsetType = UNSET


class Prefilling(Event, tag="filling", kw_only=True):
    """Ranks wait until so much is ready."""

    done: int
    wanted: int
    unit: str


class RankReport(RankEvent, tag="data", kw_only=True):
    """What a rank was handed, by loader; `cores` of its host."""

    cores: int = 0
    loaders: dict[str, RankCounts]


class Metrics(RankEvent, tag="metrics", kw_only=True):
    """Values that a rank's program logged since the rank's last event of this kind."""

    points: list[MetricPoint]


class CellNames(RankEvent, tag="names", kw_only=True):
    """Which variables a session's cell assigned and deleted on a rank.

    Attributes:
        plain: Digests of those assigned values that consist of numbers and texts (`plain_digest`).
    """

    assigned: list[str] = []
    deleted: list[str] = []
    plain: dict[str, str] = {}


class RanksKilled(Event, tag="killed", kw_only=True):
    """Ranks of a session did not return from a cell in time and were killed."""

    ranks: list[int]


class HostEnded(Event, tag="host_ended", kw_only=True):
    """A host has ended its share of the run."""

    state: str = ""
    failures: list[Failure] = []


class RunEnded(Event, tag="ended", kw_only=True):
    """The run's last event.

    Attributes:
        state: SUCCEEDED, FAILED, INTERRUPTED or LOST.
        failures: Of all hosts, causes before consequences.
        first: The one to blame.
        why: Where the run could not report its own end.
        attempt: The last attempt, whose results count.
    """

    state: str
    failures: list[Failure] = []
    first: Failure | None = None
    elapsed_s: float | None = None
    why: str = ""
    attempt: int = 0


class FetcherFailed(Struct, tag_field="kind", tag="fetcher_failed"):
    """A fetcher tells its agent why it cannot go on."""

    why: str


class RankMessage(Struct, tag_field="kind", kw_only=True):
    """What a rank tells its agent of itself, besides events."""


class RankUp(RankMessage, tag="up"):
    """It would hear an interrupt from now on."""


class RankBeat(RankMessage, tag="beat", kw_only=True):
    """It lives.

    Attributes:
        stack: The user's innermost frames of its main thread, outermost first.
        collectives: How many it has begun and ended, by backend.
        spins: Whether it may use a core to wait: CUDA does, for a collective of NCCL.
    """

    stack: list[StackFrame] = []
    collectives: list[tuple[int, int]] = []
    spins: bool = False


class RankSight(RankMessage, tag="sight"):
    """Where it stands: the stacks of its threads by their names, and collectives not ended."""

    threads: dict[str, list[StackFrame]]
    pending: list[str] = []


class RankRaised(RankMessage, tag="raised"):
    """The exception that the cell failed with; sent again with IPython's drawing of its traceback.

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
    """IPython caught and showed an exception, and the cell goes on; the run will have failed.

    A plain cell goes on in the same way after `%run` of a script that raised. `RankRaised` follows
    when the cell ends.
    """


class RankReported(RankMessage, tag="reported"):
    """All is said of what the cell raised."""


class RankLeft(RankMessage, tag="left"):
    """It ends by `sys.exit(0)`; where, as lines."""

    stack: list[str]


class RankFinished(RankMessage, tag="finished"):
    """The cell ran to its end."""


class RankReturned(RankMessage, tag="returned", kw_only=True):
    """A session's rank waits for its next cell.

    Attributes:
        was_cut: Whether its connections to other ranks were cut to end a collective.
    """

    was_cut: bool = False


class StoreMessage(Struct, tag_field="kind", kw_only=True):
    """What a rank tells its agent of the project store."""


class RankTouched(StoreMessage, tag="touched"):
    """It wrote to the project store, or, where it is not rank 0, was kept from it."""

    path: str


class RankHeld(StoreMessage, tag="held"):
    """What holds it off the project store."""

    means: str


class CellOrder(Struct, kw_only=True):
    """What the agent tells a rank of a session to do next.

    Attributes:
        number: The cell's number in the session, from 1; 0 ends the rank.
        run_dir: Folder of the cell's run on this host.
        takes_part: Whether the rank runs the cell; the others only load the notebook's values.
        shows: Whether what the rank displays is shown.
        out: As `RunOptions.out`.
        colors: IPython's colour scheme for tracebacks.
    """

    number: int
    run_dir: str = ""
    takes_part: bool = True
    shows: bool = False
    out: list[str] = []
    colors: str = "neutral"


class AgentSettings(Struct, kw_only=True):
    """What an engine tells the agent that it starts, by way of the supervisor.

    Attributes:
        scheduler: The pool's address.
        security: Keyword arguments of dask's `Security`.
        name: By which Dask and the engine know the host.
        host_name: By which the user does; "" for what the host calls itself.
        interface: Of the ranks; "" finds it.
        is_foreign: Whether it is another machine than the notebook's.
        local_directory: For what Dask writes.
        lease_s: How long it lives without hearing the pool.
        start_timeout_s: Seconds without any work after which its forkserver counts as stuck.
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
    """The name and the key of the agent that a vehicle is to bring."""

    name: str
    security: dict[str, str | bool]


class HostHello(Struct, kw_only=True):
    """Who a host is.

    Attributes:
        host: Its name, as the user calls it.
        address: Where its ranks and fetchers are reached by those of other hosts.
        means: What holds its ranks off the project store.
    """

    host: str
    address: str
    means: str
    gpus: int


class Facts(Struct, frozen=True):
    """One host, as its own Python saw it.

    Attributes:
        python: Version of the interpreter that the pool names; all below is what that one finds.
        glibc: Version of the C library; "" where it is another one.
        torch: Version; "" where it is not installed.
        cuda: The CUDA version that torch was built for; "" for a CPU build.
        versions: Versions of the packages that were asked for and are there.
        ours: Digest of taas-magic's files; "" where it is not installed.
        missing: Those of the modules asked for that are not there.
        cache: Where taas-magic keeps things on the host.
        cache_error: Why nothing can be written there; "" if it can.
        free_bytes: What may still be written there.
        sites: Names of the folders of packages that we have put there.
        cores: Logical processors that a process may use.
        gpu_names: What they are called, where that could be asked.
        clock: The host's wall clock, in seconds since 1970.
        ahead_s: How far that is ahead of this machine's clock.
        hostname: What it calls itself.
        own_addresses: What that name resolves to on the host itself.
        python_path: What its PYTHONPATH is already.
        reached_at: The address at which SSH reached it; "" where it did not come by SSH.
        sees_store: Whether it shares the project store with the notebook.
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
        """Complete what the probe answered; what it does not say (an old Python) is empty.

        Args:
            host: Who answered just now.
            began: When it was asked, by this machine's clock.
        """
        ahead_s = self.clock - (began + time.time()) / 2 if self.clock else 0.0
        return structs.replace(self, host=host, ahead_s=ahead_s)

    def interface_of(self, address: str) -> str:
        """Return the interface that has an address; "" for none."""
        return next((name for name, seen in self.interfaces.items() if address in seen), "")


class Started(Struct, kw_only=True):
    """The hosts of a run or of its fetchers; or why there are none, or not its project store.

    Attributes:
        is_ending: Whether the pool's process had begun to end when it was asked.
    """

    hosts: list[str] = []
    error: str = ""
    store_error: str = ""
    is_ending: bool = False


class HostStatus(Struct, kw_only=True):
    """What `%taas pools` says of a host.

    Attributes:
        means: What holds its ranks off the project store.
        had_s: How long it is had.
        idle_s: How long it has had no run; None while it has.
        gpu_hours: Of its GPUs, since it is had.
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
        host: Its name, as the user calls it.
        imports: The module that its forkserver imports.
        for_s: Seconds since that import began.
    """

    host: str
    imports: str
    for_s: float


class PoolStatus(Struct, kw_only=True):
    """What `%taas pools` says of a pool.

    Attributes:
        starting: Hosts that cannot start ranks yet.
        refused: Messages and connections that were refused.
        gpu_hours: Of all hosts since the pool began.
        used_gpu_hours: Those of runs.
    """

    hosts: list[HostStatus] = []
    starting: list[StartingHost] = []
    refused: int = 0
    gpu_hours: float = 0.0
    used_gpu_hours: float = 0.0


_FOR_PEOPLE = (Started, RunStacks, HostHello, PoolStatus, list[Facts])
"""Answers that people read; others have paths and contents of files, which stay as they are."""


def leaves(kind: type[Struct]) -> list[Any]:
    """Return the structs below one that have none below them."""
    return [leaf for below in kind.__subclasses__() for leaf in leaves(below)] or [kind]


if TYPE_CHECKING:
    AnyEvent = Event
else:
    AnyEvent = reduce(or_, leaves(Event))


class Request(Struct, Generic[_T]):
    """What one process asks another; each kind says of which type its answer is.

    Dask carries requests by the names of their kinds, and `pool/gate.py` says who may ask which.
    What the pool is asked of all hosts, it may ask of each: `Halt`, `GetStacks`, `GetFacts`.
    """

    @classmethod
    def op(cls) -> str:
        """Return the name by which Dask carries it."""
        return f"taas_{cls.__name__}"

    def read_answer(self, packed: bytes) -> _T:
        """Read the answer.

        Raises:
            ValueError: It is of another type.
        """
        answer: type[_T] = get_args(self.__orig_bases__[0])[0]  # type: ignore[attr-defined]
        read = from_bytes(packed, answer)
        return cleaned(read) if answer in _FOR_PEOPLE else read


class Enter(Request[bool]):
    """Let a kernel in; the answer is False if the pool's process has begun to end.

    Attributes:
        owner: The Dask client of the kernel, which is connected.
    """

    owner: str


class WaitForHosts(Request[Started]):
    """Wait until so many hosts are there and can start ranks at once.

    Attributes:
        owner: The Dask client of the kernel; when it is gone, so is its wait.
        wait: By what it is given up (`Halt`).
        has_run: Whether a cell waits with it, and not the warming alone.
    """

    owner: str
    wait: str
    hosts: int
    has_run: bool = True


class Relay(Request[None]):
    """Take what the fetchers of a run said, perhaps those of another pool."""

    run_id: str
    said: list[AnyEvent]


class Halt(Request[None]):
    """Interrupt (`interrupt`) or end (`kill`) a run's ranks, or its fetchers; they may be over.

    In the place of a run's id, that of a wait for hosts gives it up.
    """

    run_id: str
    how: str


class Detach(Request[str]):
    """Take a run over from its kernel, with its fetchers; the answer says why not, or is ""."""

    run_id: str


class TakeFetchers(Request[list[AnyEvent] | None]):
    """Make a run's fetchers those of another pool's process, which hears their events from then on.

    The answer has the starts and ends of fetchers so far; None: the fetchers are not here.

    Attributes:
        owner: The Dask client of that process; when it is gone, the fetchers end.
    """

    owner: str
    run_id: str


class GetStatus(Request[PoolStatus]):
    """Tell the pool's hosts, what each does, and its kernels."""


class GetStacks(Request[RunStacks]):
    """Tell where a run's ranks, or its fetchers, stand."""

    run_id: str


class EndPool(Request[None]):
    """End every run and then the pool's process."""


class GetAgentKeys(Request[AgentKeys]):
    """Make the name and the key of the agent that a vehicle is to bring."""

    vehicle: str


class Greet(Request[HostHello]):
    """Tell who the host is.

    Attributes:
        has_run: Whether a run waits for it; else it begins to import what a run could do without.
    """

    has_run: bool = True


class GetFacts(Request[list[Facts]]):
    """Tell what hosts are like for their agents' Python: keyword arguments of `probe.main`."""

    packages: list[str] = []
    modules: list[str] = []
    mark: str = ""
    names: bool = True


class EndRun(Request[None]):
    """End a run that has settled on all hosts."""

    run_id: str


class PlaceFetcher(Request[None]):
    """Tell a run's ranks on the host where a fetcher listens."""

    run_id: str
    number: int
    entry: LoaderPlaces


Answer = Callable[[Any], Awaitable[object]]
"""Answers requests of one kind."""


def handlers(answers: Mapping[type[Request[Any]], Answer]) -> dict[str, Callable[..., Any]]:
    """Return what Dask calls, by name, to answer requests of these kinds."""
    return {kind.op(): answering(kind, answer) for kind, answer in answers.items()}


def answering(kind: type[Request[Any]], answer: Answer) -> Callable[[bytes], Awaitable[bytes]]:
    """Return a handler of packed requests of a kind; it raises ProtocolError for what is none."""

    async def handle(request: bytes) -> bytes:
        try:
            asked = from_bytes(request, kind)
        except ValueError as error:
            raise ProtocolError(f"{kind.op()}: {error}") from error
        return to_bytes(await answer(asked))

    return handle


async def ask(scheduler: Any, request: Request[_T]) -> _T:
    """Ask the pool's process by a connection of Dask's to its scheduler; return its answer.

    Raises:
        OSError: It cannot be reached.
    """
    return request.read_answer(await getattr(scheduler, request.op())(request=to_bytes(request)))


_encoder = msgspec.json.Encoder(enc_hook=repr)


def encode(message: Struct) -> bytes:
    """Return a message as one line of JSON, without its end.

    What users display may hold anything; what is no JSON is told by its `repr`. Texts that are not
    UTF-8, such as names of files, are escaped.
    """
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return _encoder.encode(escaped(msgspec.to_builtins(message, enc_hook=repr)))


def escaped(value: Any) -> Any:
    r"""Return a value whose texts can be encoded as UTF-8: a lone surrogate becomes `\udce9`."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {escaped(name): escaped(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(inner) for inner in value]
    return value


# Sequences that a terminal obeys, but for colours: CSI, strings (OSC with hyperlinks and titles,
# DCS, SOS, PM, APC), two-character escapes, and a control character alone.
_CONTROLS = re.compile(
    r"\x1b\[[0-9;:?<=>!]*[ -/]*[@-ln-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[!-/]*[0-Z\\^-~]"
    r"|\x1b(?!\[[0-9;:]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]"
)
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_COLOURS_END = ("\x1b[0m", "\x1b[m")

_COLOURED = frozenset({"Lines.lines", "Failure.tail", "JobNews.lines"})
"""Fields whose texts are lines of a program's output, which may have colours."""

_BLOCKS = frozenset(
    {"Failure.message", "Failure.traceback", "JobOutcome.message", "JobOutcome.traceback"}
    | {"JobNews.lines", "Progress.text", "RunEnded.why", "Started.error", "Started.store_error"}
)
"""Fields whose texts may have several lines, with colours."""


def harmless(text: str) -> str:
    """Return a line that only colours a terminal: other sequences are left out."""
    if text.isprintable():
        return text
    text = _CONTROLS.sub("", text)
    return text if text.endswith(_COLOURS_END) or "\x1b[" not in text else f"{text}\x1b[0m"


def harmless_block(text: str) -> str:
    """Return a text of several lines that only colours a terminal."""
    return text if text.isprintable() else "\n".join(map(harmless, text.split("\n")))


def _harmless_word(text: str) -> str:
    """Return a text in one line without anything that a terminal obeys."""
    return text if text.isprintable() else _COLOURS.sub("", harmless(text.replace("\n", " ")))


def _harmless_line(text: str) -> str:
    """Return a line without breaks: a second line would pass for another rank's."""
    return text if text.isprintable() else harmless(text.replace("\n", " "))


def cleaned(value: _T) -> _T:
    """Remove from every text of a value, at any depth, what a terminal would obey.

    Call it where a value that another host may have made is decoded, and that people will read.
    Structs are changed in place. Names lose line breaks and colours, too; `_COLOURED` and `_BLOCKS`
    name the fields that keep them. Of a `Display`, only plain text is changed: other media types
    are not for terminals.
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
    """Read an event, `cleaned`.

    Raises:
        msgspec.DecodeError: It is none.
    """
    try:
        return cleaned(_event_of(packed))
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deeply") from error


of_rank: Callable[[bytes], Event | RankMessage | StoreMessage] = msgspec.json.Decoder(
    reduce(or_, [*leaves(RankMessage), *leaves(StoreMessage)])
    | (Display | ClearOutput | Note | RankReport | Metrics | CellNames)
).decode
"""Reads what a rank says; raises msgspec.DecodeError where it is no message, as `of_fetcher`."""

of_fetcher: Callable[[bytes], Event | FetcherFailed] = msgspec.json.Decoder(
    FetcherStarted | FetcherReport | Note | FetcherFailed
).decode
"""Reads what a fetcher says."""


def pack(value: object, indent: int | None = None) -> bytes:
    """Return a value with paths and variables, which need not be UTF-8: ASCII JSON keeps them."""
    return json.dumps(msgspec.to_builtins(value, str_keys=True), indent=indent).encode()


def unpack(packed: bytes, kind: type[_T]) -> _T:
    """Read what `pack` wrote.

    Raises:
        ValueError: It is no such value.
    """
    try:
        return msgspec.convert(json.loads(packed), kind, str_keys=True)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def to_bytes(value: object) -> bytes:
    """Return a request or an answer: any texts and numbers, as `pack` has, and bytes of files."""
    try:
        return msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError):  # ten times slower, and rarely needed
        return pack(value)


def from_bytes(packed: bytes, kind: type[_T]) -> _T:
    """Read what `to_bytes` returned.

    Raises:
        ValueError: It is no such value.
    """
    try:
        # the first byte of a JSON text is to msgpack a small number, after which nothing comes
        is_json = len(packed) > 1 and packed[0] < 0x80
        return unpack(bytes(packed), kind) if is_json else msgspec.msgpack.decode(packed, type=kind)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"it is no message: {error}") from error
