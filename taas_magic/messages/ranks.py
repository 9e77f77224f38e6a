"""Messages between an agent and the ranks and fetchers of its host, in addition to events.

These messages are lines of JSON in pipes, and do not leave the host.
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
    """Base class of messages from a rank to its agent. The agent does not forward them."""


class RankTakesInterrupts(RankMessage, tag="up"):
    """The rank reports that from now on it reacts to SIGINT."""


class RankBeat(RankMessage, tag="beat", kw_only=True):
    """The rank reports periodically that it is alive.

    Attributes:
        stack: The innermost frames of the main thread; the innermost one is last.
        collectives: Numbers of started and of finished collectives, for each torch.distributed
            backend.
        spins: Whether the rank may be busy-waiting for a NCCL collective. If so, its use of CPU
            time does not count as progress.
        gpu: The rank's use of its GPU; None if the rank has not used CUDA.
        is_debugged: Whether a client of debugpy, such as VS Code, is attached to the rank.
    """

    stack: list[StackFrame] = []
    collectives: list[tuple[int, int]] = []
    spins: bool = False
    gpu: GpuUsage | None = None
    is_debugged: bool = False


class RankStackSample(RankMessage, tag="stack_sample"):
    """The rank sends the stacks of its threads, by thread name, and its unfinished collectives."""

    threads: dict[str, list[StackFrame]]
    pending: list[str] = []


class RankRaised(RankMessage, tag="raised"):
    """The rank reports the exception with which its cell failed.

    If IPython formats the traceback too, a second message replaces Python's text by IPython's.

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
    """The rank reports that IPython caught and showed an exception, and that the cell continues.

    `%run` of a script that raises is an example. The run fails nevertheless: `RankRaised` follows
    when the cell ends.
    """


class RankErrorSent(RankMessage, tag="reported"):
    """The rank reports that it will send no further message about its cell's exception."""


class RankCalledExit(RankMessage, tag="left"):
    """The rank reports that it ends by `sys.exit(0)`; `stack` shows the place of the call."""

    stack: list[str]


class RankFinished(RankMessage, tag="finished"):
    """The rank reports that the cell ran to its end."""


class RankIdle(RankMessage, tag="returned", kw_only=True):
    """A session's rank reports that it waits for its next cell.

    Attributes:
        was_cut: Whether the rank's connections to other ranks were closed, to end a collective.
    """

    was_cut: bool = False


# The agent uses these messages for the run's receipt (`store.receipt.ReceiptBuilder`).


class StoreMessage(Struct, tag_field="kind", kw_only=True):
    """Base class of messages about the project store that a rank sends to its agent."""


class StoreWriteReported(StoreMessage, tag="store_write"):
    """The rank reports that it writes a path of the project store.

    The receipt uses rank 0's reports only if rank 0's host shares the store. If the host has a
    mirror instead, the receipt lists the files that the host has sent to the store.

    Attributes:
        is_moved: Whether the rank has moved its own version of the path away, so that the earlier
            report no longer counts.
    """

    path: str
    is_moved: bool = False


class StoreProtectionReported(StoreMessage, tag="store_protection"):
    """The rank reports the mechanism that keeps its writes out of the project store.

    Attributes:
        protection: A value of `store.guard.StoreProtection`, such as "Landlock".
    """

    protection: str


# A message of a fetcher, and an order to a rank.


class FetcherFailed(Struct, tag_field="kind", tag="fetcher_failed"):
    """A fetcher's message to its agent: the reason why it cannot continue."""

    why: str


class CellOrder(Struct, kw_only=True):
    """The agent's order to a rank of a session: run the next cell, or end.

    Attributes:
        number: Number of the cell in the session, from 1; 0 ends the rank.
        takes_part: Whether the rank runs the cell. If not, the rank only loads the cell's
            variables.
        colors: IPython's colour scheme for tracebacks.
    """

    number: int
    run_dir: str = ""
    takes_part: bool = True
    shows: bool = False
    out: list[str] = []
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
