"""What a rank is connected to: its agent, by two pipes, and the run's fetchers, by its feed.

The log pipe carries what the rank and its children write to descriptors 1 and 2, bytes as they
are. The message pipe carries JSON objects: failures, displays, notes, heartbeats, each in pieces
(`pieces`), since threads and forks of a rank write to it at the same time, and may be ended. Files
in a private folder of the host name them, so that nothing of a rank's start depends on descriptors
that a forkserver can pass on (it passes 256 at most). The feed gives registered loaders their
batches, and says what it handed out. Imported by the agent, too: it imports no torch.
"""

import errno
import fcntl
import itertools
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from taas_magic import messages
from taas_magic.data import service
from taas_magic.data.accelerated import teach_accelerate, when_imported
from taas_magic.data.service import Service
from taas_magic.host.spec import TORCHRUN_NAMES
from taas_magic.journal.folder import RunFolder
from taas_magic.leases import FetchLease
from taas_magic.messages import Event, RankMessage, RankReport, StoreMessage

if TYPE_CHECKING:
    from taas_magic.data.loader import Feed

REPORT_S = 1.0
"""How often a rank says what it was handed and how long it waited."""

OTHERS_END_S = 0.4
"""How long a rank that ends waits for the others: what Python takes to end one under torchrun."""

_F_SETPIPE_SZ = 1031
_PIPE_BYTES = 1 << 20


RankFile = Literal["log", "messages", "ask", "stack", "stacks", "error.json"]
"""What a rank and its agent both have.

The pipes of its output and of its messages, and that by which it is asked where it stands. Where
it leaves its Python stack when it dies of a signal (faulthandler); where it, and what it forks,
write their stacks on a signal; where torch's `record` writes what it raised.
"""


def rank_file(folder: Path, attempt: int, rank: int, what: RankFile) -> Path:
    """Return a file of a rank in the run's private folder; a restarted rank has new ones."""
    return folder / f"{attempt}-{rank}.{what}"


def running_file(folder: Path, attempt: int) -> Path:
    """Return the pipe that every rank of an attempt on this host has open while it runs."""
    return folder / f"{attempt}.running"


def ask(folder: Path, attempt: int, rank: int) -> None:
    """Ask a rank where it stands; one that does not listen (any more) is not asked."""
    try:
        pipe = os.open(rank_file(folder, attempt, rank, "ask"), os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.ENOENT):
            raise
        return
    try:
        os.write(pipe, b"?")
    except BlockingIOError:
        pass  # it has been asked often enough
    finally:
        os.close(pipe)


def make_pipe(path: Path) -> int:
    """Make a pipe in the agent and open its reading end, which never blocks."""
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


MORE, LAST = b"+", b"."
"""What a piece of a message begins with: another one follows, or none."""

_PIECE_BYTES = 4000
"""With its head less than PIPE_BUF (4096): the system never mixes such a write with another."""


def pieces(message: bytes, sender: bytes) -> Iterator[bytes]:
    """Yield what is written of a message: lines, each of which a pipe keeps whole.

    Args:
        sender: What no other message of the pipe has, without a space.
    """
    for at in range(0, len(message), _PIECE_BYTES):
        end = at + _PIECE_BYTES
        yield b"%b%b %b\n" % (MORE if end < len(message) else LAST, sender, message[at:end])


class Link:
    """A rank's end of its pipes. Any thread may send, and any fork of the rank."""

    def __init__(self, folder: Path, attempt: int, rank: int) -> None:
        self._pid = os.getpid()
        self._numbers = itertools.count()
        self._messages = os.open(rank_file(folder, attempt, rank, "messages"), os.O_WRONLY)
        self._log = os.open(rank_file(folder, attempt, rank, "log"), os.O_WRONLY)
        with suppress(OSError):  # the user's share of pipe memory is used up: 64 KiB work too
            fcntl.fcntl(self._log, _F_SETPIPE_SZ, _PIPE_BYTES)
        # for writing, too: so it never has an end, and may be opened before the agent does
        asked = rank_file(folder, attempt, rank, "ask")
        self._asked = os.open(asked, os.O_RDWR | os.O_NONBLOCK)
        running = running_file(folder, attempt)
        self._others = os.open(running, os.O_RDONLY | os.O_NONBLOCK)
        self._running = os.open(running, os.O_WRONLY)

    @property
    def is_own(self) -> bool:
        """Whether this process is the rank, and not a child that it forked."""
        return os.getpid() == self._pid

    def redirect_output(self) -> None:
        """Make the log pipe this process's descriptors 1 and 2, and Python's stdout and stderr.

        Both go into one pipe: only so does their order survive. Lines leave whole, one write each.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(self._log, 1)
        os.dup2(self._log, 2)
        os.close(self._log)
        options = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1}
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False, **options)  # type: ignore[call-overload,misc] # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, **options)  # type: ignore[call-overload,misc] # noqa: SIM115

    def is_asked(self, timeout_s: float) -> bool:
        """Wait until the agent asks where this rank stands; says whether it did."""
        if not select.select([self._asked], [], [], timeout_s)[0]:
            return False
        os.read(self._asked, 4096)
        return True

    def await_others(self, hosts: int) -> None:
        """Wait until all ranks of the run end, or `OTHERS_END_S` have passed.

        Under torchrun nothing that a rank listens on closes sooner; another rank's
        `init_process_group` may still be connecting to it. When ranks of other hosts end is not
        seen: with several hosts it always waits that long.
        """
        if hosts == 1:
            os.close(self._running)
        poll = select.poll()
        poll.register(self._others, 0)  # hung up when nobody has it open for writing any more
        poll.poll(OTHERS_END_S * 1000)

    def send(self, message: Event | RankMessage | StoreMessage) -> None:
        """Write one message; blocks while the agent does not read."""
        sender = b"%d.%d" % (os.getpid(), next(self._numbers))
        for piece in pieces(messages.encode(message), sender):
            os.write(self._messages, piece)


@contextmanager
def feed(run_dir: Path, rank: int, attempt: int) -> Iterator["Feed | None"]:
    """Have registered loaders that this rank unpickles inside the block fed by the run's fetchers.

    Without fetchers the rank has servers of its own, whose first process is forked here: to be
    entered before the rank has another thread, or runs any of the user's code.

    Yields:
        What the rank knows of the run's data service; None where the cell uses no loader.
    """
    served = service.read(run_dir)
    if served is None:
        yield None
        return
    from taas_magic.data.loader import use_feed

    here = _feed_of(served, run_dir, rank, attempt)
    use_feed(here)
    when_imported("accelerate.accelerator", teach_accelerate)
    try:
        yield here
    finally:
        if here.own is not None:
            here.own.close()


def _feed_of(served: Service, run_dir: Path, rank: int, attempt: int) -> "Feed":
    from taas_magic.data.loader import Feed
    from taas_magic.data.metrics import BatchLedger
    from taas_magic.data.own_servers import OwnServers

    folder = service.folder_of(run_dir)

    def payload_of(name: str) -> bytes:
        return service.payload_file(run_dir, name).read_bytes()

    own = None
    if not served.fetchers:
        own = OwnServers(served.key, payload_of, lambda: _become_a_fetcher(run_dir))
    return Feed(
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        payload=payload_of,
        directory=service.FolderDirectory(folder / "fetchers") if served.fetchers else None,
        key=served.key,
        tls=served.tls.client if served.tls else None,
        units=served.units,
        seed=served.seed,
        ledger=BatchLedger(folder / "ledger", attempt, rank),
        window_bytes=served.settings.rank_buffer_bytes // 2,
        lease=FetchLease(served.settings.fetch_s),
        own=own,
    )


def _become_a_fetcher(run_dir: Path) -> None:
    """Make this fork of a rank what a fetcher is: a dataset that deals by rank would deal twice."""
    from taas_magic.capture import payload

    for name in TORCHRUN_NAMES:
        os.environ.pop(name, None)
    payload.read(RunFolder(run_dir).payload).set_state()


@contextmanager
def reporting(fed: "Feed | None", link: Link) -> Iterator[None]:
    """Say now and then what was handed out, and once more at the end of the block."""
    if fed is None:
        yield
        return
    ended = threading.Event()

    def report() -> None:
        if counts := fed.counts():
            link.send(RankReport(loaders=counts, cores=len(os.sched_getaffinity(0))))

    def report_again() -> None:
        while not ended.wait(REPORT_S):
            report()

    reports = threading.Thread(target=report_again, name="taas-feed", daemon=True)
    reports.start()
    try:
        yield
    finally:
        ended.set()
        reports.join()  # what it has counted before must not be this rank's last word
        report()
