"""Events of a run: the messages that the notebook shows and the journal records.

The pool's process writes each event as a line of JSON to the journal (docs/events.md), and sends
the event to the kernel. Each new field must have a default, so that journals of older versions
remain readable.
"""

import time
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from taas_magic.messages.terminal import cleaned

# Parts of events.


class Failure(Struct, kw_only=True, frozen=True):
    """Failure of a rank or a host, with the traceback or other facts that show the cause.

    Attributes:
        rank: The rank that failed; None if no single rank is the cause.
        how: Kind of failure, such as "raised", "signal", "exit" or "host" (docs/events.md).
        etype: Type of the exception; "" without an exception.
        stack: Last known Python stack, if there is no exception.
        signal: Name of the signal that ended the process; "" for none.
        consequence: Whether another rank's failure caused this failure.
        tail: Last lines of the rank's log.
        advice: Sentence that says what the user can do.
    """

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
    """A frame of a Python stack; `text` is the source line that runs, or "" if unknown."""

    file: str
    line: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        inside = "" if self.function == "<module>" else f", in {self.function}"
        return f"{self.file}, line {self.line}{inside}" + (f": {self.text}" if self.text else "")


class ProcessStack(Struct, kw_only=True):
    """Stack report of one process.

    Attributes:
        command: Command line of the process; "" for a rank.
        place: Line of the notebook that the process executes; "" if unknown.
        waits_for: What the process's main thread waits for, as text for the user; "" if unknown.
        system: State of the process in the operating system, as psutil names it.
        threads: Lines with the frames of each thread, by thread name. The main thread comes first;
            in a thread, the outermost frame comes first.
        pending: Collectives that have started and not finished, as text for the user.
        children: Stack reports of the process's child processes.
        memory_bytes: Proportional set size (PSS) of the process: shared memory is divided among the
            processes that share it.
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


class GpuUsage(Struct, kw_only=True):
    """A rank's use of its GPU.

    Attributes:
        busy: Fraction of time, from 0 to 1, in which the GPU executed kernels of any process, as
            `nvidia-smi` shows it. None if `nvidia-ml-py` is not installed.
        memory_bytes: GPU memory that torch has reserved in the rank.
    """

    busy: float | None = None
    memory_bytes: int = 0


class RankStack(ProcessStack, kw_only=True):
    """Stack report of a rank.

    Attributes:
        quiet_s: Seconds since the rank last made progress.
        since: Time at which the rank last made progress, by the clock of the process that displays
            the report. That process sets this field.
        cpus: Mean number of processors that the rank and its descendants used while the agent made
            the report.
        in_collectives: Fraction of the rank's heartbeats, from 0 to 1, at which a collective was
            running.
        gpu: The rank's use of its GPU at its last heartbeat; None if the rank has not used CUDA.
    """

    rank: int
    quiet_s: float = 0.0
    host: str = ""
    since: float = 0.0
    cpus: float = 0.0
    in_collectives: float = 0.0
    gpu: GpuUsage | None = None


class FetcherStack(ProcessStack, kw_only=True):
    """Stack report of a fetcher; `fetcher` is the fetcher's number in the run."""

    fetcher: int
    host: str = ""


class RunStacks(Struct):
    """Stack reports of a run's processes.

    Attributes:
        silent: A line of text for each host that sent no stack reports.
    """

    ranks: list[RankStack] = []
    fetchers: list[FetcherStack] = []
    silent: list[str] = []


class RankUsage(Struct, kw_only=True):
    """Use of processors, memory and GPU by a rank and its descendants, and the rank's current line.

    Attributes:
        cpus: Mean number of processors that the rank and its descendants have used since the last
            `Usage` event.
        memory_bytes: Memory of the rank and its descendants (PSS): the size of a page that several
            processes share is divided among these processes.
        in_collectives: Fraction of the rank's heartbeats, from 0 to 1, at which a collective was
            running.
        place: Line of the notebook that the rank executes; "" if unknown.
        gpu: The rank's use of its GPU; None if the rank has not used CUDA.
    """

    rank: int
    cpus: float = 0.0
    memory_bytes: int = 0
    in_collectives: float = 0.0
    place: str = ""
    gpu: GpuUsage | None = None


class RankCounts(Struct, kw_only=True):
    """A rank's counts for one loader, since the start of the attempt.

    Attributes:
        workers: `num_workers` of the loader.
        batches: Batches that the cell received.
        repeated: Batches that the cell received again at the end of an epoch, because
            `uneven="pad"` repeats the epoch's first batches; a part of `batches`.
        waited_s: Seconds that the cell waited for batches.
        retried: Requests that the rank sent again because a fetcher was lost.
        first_s: Seconds that the cell waited for the first batch; a part of `waited_s`.
        span_s: Seconds that the cell spent in loops over the loader, waiting or working.
        receive_s: Seconds that the rank spent receiving batches, measured for one batch in 16.
        receive_cpu_s: CPU seconds that the rank used to receive the batches that `receive_s`
            measures.
        held_bytes: Memory of the rank for received batches.
        resumed: If the cell has loaded a saved state of the loader: the units that all ranks had
            received before the state was saved; else 0.
        spent: Units that all ranks have received so far, including `resumed`.
    """

    workers: int = 0
    batches: int = 0
    repeated: int = 0
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
    """A fetcher's counts for one loader: sums over the fetcher's workers.

    Attributes:
        prepared: Batches that the workers have prepared.
        sent: Batches that the fetcher has sent to ranks.
        ready: Batches that are prepared and not yet requested.
        budget_bytes: Limit on `ready_bytes`, the memory of the ready batches.
        fetch_s: Seconds that all workers together spent preparing batches.
        fetch_most_s: Seconds that the busiest worker spent preparing batches.
        idle: Workers that have started and have nothing to do.
        up_s: Seconds since the workers started.
        refused: Connections that the fetcher refused because the peer did not know the run's key.
    """

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
        host: Host name or IP address for TCP.
        port: TCP port; 0 if the server listens on a Unix socket only.
        unix: Name of the server's Unix socket in the abstract namespace. The handshake needs this
            name even over TCP.
        machine: Identifier of the fetcher's machine (`service.machine_id`). A client on the same
            machine uses the Unix socket.
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
        fetchers: Number of fetchers that serve the loader.
        workers: Number of workers of all these fetchers together.
        addresses: Addresses of fetchers, by number of the fetcher among the loader's fetchers
            (`FetcherPlan.index`). A message of a fetcher contains only the address of this fetcher.
        failed: In a message about one fetcher: the reason why the fetcher has ended or could not
            start; "" if it has not failed.
        starting: Number of fetchers that have neither an address nor a failure yet.
    """

    fetchers: int
    workers: int = 0
    addresses: dict[int, Address] = {}
    failed: str = ""
    starting: int = 0


AddressesByLoader = dict[str, LoaderAddresses]
"""Addresses at which fetchers serve each loader, by the name of the loader."""


class WrittenFile(Struct):
    """A file that rank 0 wrote to the project store."""

    path: str
    bytes: int


class KeptOutFile(Struct):
    """A file that a rank other than 0 wrote and that was kept out of the project store.

    Attributes:
        in_store: Whether the project store has a file with this path. Also True if rank 0 on the
            same host has written such a file, and then moved or removed the file.
    """

    rank: int
    path: str
    in_store: bool


class UnsentFile(Struct):
    """A file that rank 0 wrote and that could not be copied from its host to the project store.

    Attributes:
        why: Reason why the file could not be copied.
    """

    path: str
    why: str


class MetricPoint(NamedTuple):
    """A value that a program logged by `taas.log`; `value` is None for NaN and infinity."""

    name: str
    step: int
    value: float | None
    time: float


# Bases of all events. The agent sets the rank of an event, and the pool's process sets its host
# and time.


class Event(Struct, tag_field="kind", kw_only=True):
    """Base class of the events of a run. The records of a run's journal are events.

    Attributes:
        time: Time at which the pool's process received the event, in seconds since 1970.
        host: Name of the host that reported the event; "" if no single host did. The pool's process
            sets this field.
    """

    time: float = field(default_factory=time.time)
    host: str = ""


class RankEvent(Event, kw_only=True):
    """Base class of the events of one rank. The agent on the rank's host sets the field `rank`."""

    rank: int = 0


# Events of the run as a whole.


class StateChanged(Event, tag="state", kw_only=True):
    """Event of the pool's process: the run's hosts are ready, and the first attempt starts.

    Attributes:
        state: Always "RUNNING".
    """

    state: str


class Detached(Event, tag="detached", kw_only=True):
    """Event of the pool's process: the run is detached, so it continues when its kernel ends."""


class Restart(Event, tag="restart", kw_only=True):
    """Event of the pool's process: all ranks of the run start again, in a new attempt.

    Attributes:
        failure: The failure that caused the restart; None if no host reported one.
    """

    attempt: int
    failure: Failure | None = None


class InputAnswered(RankEvent, tag="answered", kw_only=True):
    """Event of the pool's process: a rank no longer waits for the answer to its `InputRequested`.

    The rank has received a line of input or a refusal, or has ended.
    """


class RunEnded(Event, tag="ended", kw_only=True):
    """Last event of each run: the run has ended. The pool's process creates this event.

    If the pool's process is lost, the kernel or a reader of the journal creates this event.

    Attributes:
        state: SUCCEEDED, FAILED, INTERRUPTED or LOST.
        failures: Failures on all hosts. A failure comes before the failures that it caused.
        first: The failure that ended the run; None if no failure did.
        why: Reason for the end if something other than the ranks ended the run, such as the loss of
            the pool's process; else "".
        attempt: Number of the last attempt, whose results count.
    """

    state: str
    failures: list[Failure] = []
    first: Failure | None = None
    elapsed_s: float | None = None
    why: str = ""
    attempt: int = 0


class Prefilling(Event, tag="filling", kw_only=True):
    """Event of the kernel: the amount of data that fetchers have prepared so far (`--prefill`).

    Attributes:
        done: Amount that is prepared.
        wanted: Amount to prepare before the ranks start.
        unit: Unit of `done` and `wanted`: "bytes" or "batches".
    """

    done: int
    wanted: int
    unit: str


class Note(Event, tag="note", kw_only=True):
    """Event of any process of the run: a note for the user, which the status header shows."""

    text: str


# Events that the agent of one host sends to the pool's process.


class RanksStarted(Event, tag="started", kw_only=True):
    """Event of an agent: the ranks of its host have started.

    Attributes:
        pids: Process id by rank.
        gpus: Number of GPUs that the ranks use: one for each rank, or all GPUs of the host if there
            are fewer GPUs than ranks.
    """

    attempt: int = 0
    pids: dict[int, int] = {}
    gpus: int = 0


class RankFailure(Event, tag="failure", kw_only=True):
    """Event of an agent or of the pool's process: a rank or a host has failed."""

    failure: Failure


class Hang(Event, tag="hang", kw_only=True):
    """Event of an agent: a hang has started or ended on its host.

    A hang starts when no rank of the host has made progress for the time of `--hang`. It ends when
    a rank makes progress again. After an interrupt by the user, the agent sends no such event.

    Attributes:
        ranks: Stack reports of the host's ranks at the start of a hang; empty at the end.
    """

    attempt: int
    ranks: list[RankStack]


class Usage(Event, tag="usage", kw_only=True):
    """Event of an agent: the use of processors, memory and GPUs by the ranks of its host.

    For a rank that has ended, the event repeats the last values.
    """

    attempt: int
    ranks: list[RankUsage]


class RanksEnded(Event, tag="settled", kw_only=True):
    """Event of an agent: all ranks of its host have ended or failed.

    Attributes:
        state: SUCCEEDED, FAILED or INTERRUPTED.
        cause: Reason for the end; "" on success. "rank": a rank raised an exception or died.
            "left": a rank called `sys.exit(0)`, and other ranks did not. "stopped": SIGSTOP
            suspended a rank for too long. "timeout": the time of `--timeout` is over. "interrupt":
            the user interrupted the run. "host": the host's forkserver has ended.
    """

    attempt: int = 0
    state: str = ""
    cause: str = ""
    failures: list[Failure] = []


class RanksKilled(Event, tag="killed", kw_only=True):
    """Event of an agent: the agent has killed ranks of a session.

    The reason is that these ranks did not end their cell in time after an interrupt or a failure.
    """

    ranks: list[int]


class HostEnded(Event, tag="host_ended", kw_only=True):
    """Event of an agent: all ranks, or all fetchers, of the run on its host have ended.

    Attributes:
        state: SUCCEEDED, FAILED or INTERRUPTED.
    """

    state: str = ""
    failures: list[Failure] = []


class StoreReceipt(Event, tag="receipt", kw_only=True):
    """Event of an agent at the end of a run: the files that ranks of its host wrote to the store.

    Attributes:
        written: Files that rank 0 wrote to the project store.
        kept_out: Files of ranks other than 0, which did not get into the store.
        shared: Folders of the store in which every rank could write.
        means: Mechanism that kept ranks other than 0 from writing to the store.
        complete: Whether the search for files of rank 0 covered the whole store.
        not_sent: Files of rank 0 that could not be copied from the host to the store.
    """

    written: list[WrittenFile] = []
    kept_out: list[KeptOutFile] = []
    shared: list[str] = []
    means: str = ""
    complete: bool = True
    not_sent: list[UnsentFile] = []


class FetcherEnded(Event, tag="fetcher_ended", kw_only=True):
    """Event of an agent: a fetcher has ended.

    Attributes:
        number: Number of the fetcher in the run.
        entry: If the fetcher ended unexpectedly or could not start: a `LoaderAddresses` for each of
            the fetcher's loaders, by name of the loader. Its field `failed` says why the fetcher
            ended. Unset if the pool's process ended the fetcher.
    """

    number: int
    entry: AddressesByLoader | UnsetType = UNSET


# Events of one rank. The agent forwards them to the pool's process.


class Lines(RankEvent, tag="lines", kw_only=True):
    """Event of an agent: complete lines that a rank wrote, without line ends."""

    lines: list[str]


class LinesDropped(RankEvent, tag="dropped", kw_only=True):
    """Event of an agent: the agent has not sent some lines of a rank's output to the notebook.

    The reason is that the rank wrote more than the agent may send (`LogBudget`). The rank's log
    file on disk has all lines.

    Attributes:
        lines: Number of lines that were not sent.
        bytes: Number of bytes in these lines.
    """

    lines: int
    bytes: int


class Progress(RankEvent, tag="progress", kw_only=True):
    """Event of an agent: the current text of rank 0's unfinished line, such as a progress bar."""

    text: str


class Display(RankEvent, tag="display", kw_only=True):
    """Event of a rank: a rich output, such as a picture. `data` maps media types to contents."""

    data: dict[str, Any]
    metadata: dict[str, Any] | None = None
    display_id: str | None = None
    update: bool = False


class ClearOutput(RankEvent, tag="clear", kw_only=True):
    """Event of a rank: the rank's program called `clear_output`, with the argument `wait`."""

    wait: bool = False


class RankReport(RankEvent, tag="data", kw_only=True):
    """Event of a rank: its counts for each loader, and the number of CPU cores of its host."""

    cores: int = 0
    loaders: dict[str, RankCounts]


class Metrics(RankEvent, tag="metrics", kw_only=True):
    """Event of a rank: the values that its program logged since the rank's last `Metrics` event."""

    points: list[MetricPoint]


class InputRequested(RankEvent, tag="input", kw_only=True):
    """Event of a rank: its program waits for a line of input from the user.

    Attributes:
        number: Number of the request, unique in all attempts of the run.
        is_hidden: Whether to hide the line while the user types it, as for a password.
    """

    number: int
    prompt: str = ""
    is_hidden: bool = False


class DebuggerChanged(RankEvent, tag="debugger", kw_only=True):
    """Event of an agent: a client of debugpy has attached to a rank, or has detached from it.

    Attributes:
        is_attached: Whether the client is attached now.
    """

    is_attached: bool


class Rehearsed(RankEvent, tag="rehearsed", kw_only=True):
    """Event of a rehearsal's rank: the memory that it has used and the files that it has written.

    Attributes:
        peak_bytes: Largest resident memory of the rank so far, without the rank's child processes.
        written: Files that the cell would write to the project store in a run outside a rehearsal:
            all files that any rank has written to the rehearsal's folder so far.
        outside: Files that this rank wrote outside the project store.
    """

    peak_bytes: int
    written: list[WrittenFile] = []
    outside: list[WrittenFile] = []


class FederationStarted(RankEvent, tag="federated", kw_only=True):
    """Event of a federation's rank 0: the ranks of all hosts have started and know each other.

    Before this event, a failure of any host ends the run. After this event, only a failure of rank
    0's host ends the run. If another host fails, the run continues without the failed host.
    """


class CellNames(RankEvent, tag="names", kw_only=True):
    """Event of a rank: the variables that a session's cell has assigned or deleted.

    Attributes:
        plain: For each assigned variable with a simple value: the digest of the value
            (`simple_digest`), by the variable's name. By this digest, the kernel can compare the
            value with the notebook's value of the same variable.
        fetched: Numbers of the session's cells whose fetchers this rank still needs. The kernel
            ends fetchers that no rank needs.
    """

    assigned: list[str] = []
    deleted: list[str] = []
    plain: dict[str, str] = {}
    fetched: list[int] = []


# Events of one fetcher. The agent forwards them to the pool's process.


class FetcherStarted(Event, tag="fetcher", kw_only=True):
    """Event of a fetcher: from now on, it accepts connections from ranks.

    Attributes:
        number: Number of the fetcher in the run.
        cores: Number of CPU cores of the fetcher's host.
        workers: Number of the fetcher's workers, by name of the loader.
        entry: Addresses of the fetcher, by name of the loader; not written to the journal.
    """

    number: int
    pid: int = 0
    cores: int = 0
    workers: dict[str, int] = {}
    entry: AddressesByLoader | UnsetType = UNSET


class FetcherReport(Event, tag="fetched", kw_only=True):
    """Event of a fetcher: its counts, such as prepared batches, for each loader."""

    number: int
    loaders: dict[str, FetcherCounts]


def leaf_subclasses(kind: type[Struct]) -> list[Any]:
    """Return the subclasses of a struct, at any depth, that have no subclasses themselves.

    If the struct has no subclass, return the struct itself in a list.
    """
    return [leaf for below in kind.__subclasses__() for leaf in leaf_subclasses(below)] or [kind]


if TYPE_CHECKING:
    AnyEvent = Event
else:
    AnyEvent = reduce(or_, leaf_subclasses(Event))


_decode_event: Callable[[bytes], Event] = msgspec.json.Decoder(AnyEvent).decode


def decode_event(packed: bytes) -> Event:
    """Decode an event from JSON, and remove terminal control sequences from its texts.

    If `packed` has only ASCII characters, no backslash and no DEL, this function skips the slow
    search for control sequences. Such JSON has no control characters, because JSON escapes control
    characters below 32 by a backslash.

    Raises:
        msgspec.DecodeError: `packed` is not the JSON of an event.
    """
    try:
        event = _decode_event(packed)
        is_plain = packed.isascii() and b"\\" not in packed and b"\x7f" not in packed
        return event if is_plain else cleaned(event)
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deeply") from error
