"""Messages between an agent and the ranks and fetchers of its host, except events.

These messages are lines of JSON in pipes. Unlike events, they do not leave the host.
"""

from collections.abc import Callable
from functools import reduce
from operator import or_

import msgspec
from msgspec import Struct

from taas_magic.messages.events import (
    CellNames,
    ClearOutput,
    Display,
    Event,
    FederationStarted,
    FetcherReport,
    FetcherStarted,
    GpuUsage,
    InputRequested,
    Metrics,
    Note,
    RankReport,
    Rehearsed,
    StackFrame,
    leaf_subclasses,
)

# The agent decides from these messages whether the rank works, hangs or has failed.


class RankMessage(Struct, tag_field="kind", kw_only=True):
    """Base class of a rank's messages to its agent. The agent does not forward these messages."""


class RankTakesInterrupts(RankMessage, tag="up"):
    """Message of a rank: from now on, SIGINT interrupts the rank's cell.

    Before this message, SIGINT would kill the rank.
    """


class RankBeat(RankMessage, tag="beat", kw_only=True):
    """Heartbeat that a rank sends periodically to show that it is alive.

    Attributes:
        stack: The innermost frames of the main thread, with the innermost frame last.
        collectives: For each torch.distributed backend: the number of collectives that have
            started, and the number that have finished.
        spins: Whether the rank may be busy-waiting for a NCCL collective. If so, the rank's use of
            CPU time does not count as progress.
        gpu: The rank's use of its GPU; None if the rank has not used CUDA.
        is_debugged: Whether a client of debugpy, such as VS Code, is attached to the rank.
    """

    stack: list[StackFrame] = []
    collectives: list[tuple[int, int]] = []
    spins: bool = False
    gpu: GpuUsage | None = None
    is_debugged: bool = False


class RankStackSample(RankMessage, tag="stack_sample"):
    """Message of a rank: the stack of each of its threads, and its unfinished collectives."""

    threads: dict[str, list[StackFrame]]
    pending: list[str] = []


class RankRaised(RankMessage, tag="raised"):
    """Message of a rank: its cell failed with an exception.

    The traceback is in Python's format. If IPython has formatted the traceback, the rank sends a
    second message with IPython's text, which replaces the first message.

    Attributes:
        is_logged: Whether the rank has already written the traceback to its log.
        etype_module: The module that defines the exception's type.
    """

    etype: str
    message: str
    traceback: list[str]
    is_logged: bool = False
    etype_module: str = ""


class RankShowedError(RankMessage, tag="showed"):
    """Message of a rank: IPython caught and showed an exception, and the cell continues.

    For example, a cell with `%run` continues after the script has raised an exception. The run
    fails nevertheless: the rank sends `RankRaised` when the cell ends.
    """


class RankErrorSent(RankMessage, tag="reported"):
    """Message of a rank: it has sent all messages about its cell's exception.

    After the exception, the agent waits for this message before it kills the rank.
    """


class RankCalledExit(RankMessage, tag="left"):
    """Message of a rank: it ends by `sys.exit(0)`. `stack` shows the place of this call."""

    stack: list[str]


class RankFinished(RankMessage, tag="finished"):
    """Message of a rank: its cell ran to the end without an exception, or its session has ended."""


class RankIdle(RankMessage, tag="returned", kw_only=True):
    """Message of a session's rank: it waits for its next cell.

    Attributes:
        was_cut: Whether connections between this rank and other ranks were closed in order to end a
            collective that the rank was waiting for.
    """

    was_cut: bool = False


class RankCreatesGroup(RankMessage, tag="creates_group"):
    """Message of a session's rank: it creates a new default process group of torch.distributed."""


# The agent uses these messages for the run's receipt (`store.receipt.ReceiptBuilder`).


class StoreMessage(Struct, tag_field="kind", kw_only=True):
    """Base class of the messages about the project store that a rank sends to its agent."""


class StoreWriteReported(StoreMessage, tag="store_write"):
    """Message of a rank: it writes a file of the project store, or has moved such a file away.

    If rank 0's host shares the project store, the run's receipt lists the files that rank 0
    reports. If the host has a mirror instead, the receipt lists the files that the host has sent to
    the store.

    Attributes:
        path: Path of the file.
        is_moved: Whether the rank has moved the file from `path` to another path. If so, the agent
            drops the earlier report about `path`.
    """

    path: str
    is_moved: bool = False


class StoreProtectionReported(StoreMessage, tag="store_protection"):
    """Message of a rank: the mechanism that keeps the rank's writes out of the project store.

    Attributes:
        protection: A value of `store.guard.StoreProtection`, such as "Landlock".
    """

    protection: str


# A message of a fetcher, and an order to a rank.


class FetcherFailed(Struct, tag_field="kind", tag="fetcher_failed"):
    """Message of a fetcher to its agent: the fetcher ends because of the error `why`."""

    why: str


class CellOrder(Struct, kw_only=True):
    """Order of the agent to a rank of a session: run the next cell, or end.

    Attributes:
        number: Number of the cell in the session, from 1; 0 ends the rank.
        run_dir: Path of the cell's run folder on this host.
        takes_part: Whether the rank runs the cell. If not, the rank only loads the variables that
            the notebook sent for the cell.
        shows: Whether the notebook shows the rank's displays.
        out: Variables of `--out` to send back, such as `losses` (the variable of the first rank
            that runs the cell) or `losses@3` (the variable of rank 3).
        ranks: Ranks of `--ranks`, in ascending order; empty if all ranks run the cell.
        colors: IPython's colour scheme for tracebacks.
    """

    number: int
    run_dir: str = ""
    takes_part: bool = True
    shows: bool = False
    out: list[str] = []
    ranks: list[int] = []
    colors: str = "neutral"


decode_rank_message: Callable[[bytes], Event | RankMessage | StoreMessage] = msgspec.json.Decoder(
    reduce(or_, [*leaf_subclasses(RankMessage), *leaf_subclasses(StoreMessage)])
    | (Display | ClearOutput | Note | RankReport | Metrics | CellNames | InputRequested | Rehearsed)
    | FederationStarted
).decode
"""Decode a message from a rank to its agent; raise msgspec.DecodeError if it is not valid."""


decode_fetcher_message: Callable[[bytes], Event | FetcherFailed] = msgspec.json.Decoder(
    FetcherStarted | FetcherReport | Note | FetcherFailed
).decode
"""Decode a message from a fetcher to its agent; raise msgspec.DecodeError if it is not valid."""
