"""A fetcher's worker, which is the process that runs the user's dataset.

A worker receives commands from its server, prepares one batch at a time, and writes the batch into
shared memory (its arena). A worker has only one thread and no connection to a rank, so that the
dataset runs under the same conditions as in a worker of a local DataLoader.

The workers of one loader are children of a process that only manages them (`parent_main`). This
parent process can unpickle a large dataset once and then fork. It has no connections to ranks, so a
restarted worker inherits no connections.
"""

import gc
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

import msgspec
import torch

from taas_magic.capture.modules import claim_taas
from taas_magic.data import encode, protocol
from taas_magic.data.dataset import BatchSource, NoBatch, UserCodeFailed, hinted_units, load
from taas_magic.data.memory import Arena, ArenaMapping
from taas_magic.data.protocol import Command, LoaderRequest, Reply, RequestKind, ResponseKind
from taas_magic.data.sharding import UNHINTED, VOID, FetcherPart, is_compared
from taas_magic.data.watchdog import StoppedProcessWatchdog

MESSAGE_BYTES = 128 << 10
"""Size limit in bytes of a message between a server and a worker."""

_PRELOAD_FROM_BYTES = 8 << 20
"""Minimum bytes of a pickled loader that the workers' parent process unpickles for all workers.

The workers are forks of that process and share the loader's memory.
"""

_HOLD_BACK_S = 0.0005
"""Minimum seconds between two messages of a worker; meanwhile, the worker collects replies.

For small batches, sending a message costs more time than preparing the batch. When the worker has
executed all its commands, the worker sends the replies at once. For an iterable-style loader, the
worker sends each reply at once, because a stream may be a live source.
"""

_DEPTH_BYTES = 8 << 20
"""Maximum total bytes of the batches that a worker's queued commands request."""

_DEPTH_S = 0.01
"""Maximum time, in seconds, that a worker's queued commands should take together."""

_LEAST_DEPTH, _MOST_DEPTH = 2, 64
"""Minimum and maximum number of commands in a worker's queue.

The number depends on the latest batches. If these batches were fast and small, the queue is long,
so that the worker never waits for the server. If the batches were large, the queue is short, to
save memory. If the batches were slow, the queue is also short, so that the batches that a rank
needs next are spread over all workers.
"""

_MOST_FREES = 64
"""Maximum number of freed offsets in one message to a worker.

The message must fit into the socket's buffer.
"""

CONTROL_BYTES = 64
"""Size limit in bytes of a message to or from the parent process of the workers.

The limit also applies to the first message to a worker.
"""

_CLOEXEC = socket.MSG_CMSG_CLOEXEC
_CHECK_S = 1.0
"""Seconds between checks whether a worker has been stopped (SIGSTOP)."""

_encode = msgspec.msgpack.Encoder().encode
_read_commands = msgspec.msgpack.Decoder(protocol.CommandBatch).decode
_read_replies = msgspec.msgpack.Decoder(list[Reply]).decode

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedLoader:
    """A fetcher's settings for one loader, used by its server and its workers.

    Attributes:
        where: The fetcher and its host, for messages.
        part: Rule that decides which of the loader's batches this fetcher prepares.
        budget_bytes: Limit in bytes on the memory of prepared batches.
        context: multiprocessing's start method; `fork` shares a large dataset between workers.
        sums: Whether batches need checksums, because they are sent over TCP without TLS.
        fill_batches: Minimum number of batches to prepare before ranks request any. If necessary,
            workers prepare batches of later epochs, too.
        fill_bytes: Minimum total size of the batches to prepare before ranks request any. If both
            minimums are 0, workers prepare as much of the first epoch as fits into `budget_bytes`.
        folder: Folder with the pickled loader if a rank runs the server; else "".
    """

    payload: bytes = field(repr=False)
    name: str
    seed: int
    where: str
    part: FetcherPart
    budget_bytes: int
    context: str = "fork"
    sums: bool = False
    fill_batches: int = 0
    fill_bytes: int = 0
    folder: str = ""


class WorkerHandle:
    """Server's handle of one worker: its socket, its arena and its pending commands.

    Args:
        number: The worker's number in its fetcher.
        arena: Number of the worker's arena, unique in the server.
        is_suspect: Whether an earlier worker with this number has ended. If so, this worker
            receives only one command at a time. If the worker ends again, this command was probably
            the reason.

    Attributes:
        memory: The worker's arena.
        frees: Offsets of batches in the arena that are no longer in use. The next message sends
            them to the worker, which then reuses the memory.
        unanswered: Requests that the worker has not answered yet, by their command's number.
    """

    def __init__(self, number: int, arena: int, sock: socket.socket, is_suspect: bool) -> None:
        self.number, self.arena, self.socket = number, arena, sock
        self._most = 1 if is_suspect else _MOST_DEPTH
        self._depth = min(self._most, _LEAST_DEPTH)
        self.memory = ArenaMapping(os.memfd_create("taas-batches", os.MFD_CLOEXEC))
        socket.send_fds(sock, [b"arena"], [self.memory.descriptor])
        self.frees: list[int] = []
        self.unanswered: dict[int, LoaderRequest] = {}
        self.is_gone = False
        self._commands: list[Command] = []
        self._files: list[int] = []

    @property
    def room(self) -> int:
        """Number of commands that the server may queue for this worker now.

        0 while more than half of the worker's queue is unanswered, and after the worker has ended.
        """
        n_unanswered = len(self.unanswered)
        return 0 if self.is_gone or n_unanswered > self._depth // 2 else self._depth - n_unanswered

    def queue_command(self, number: int, request: LoaderRequest) -> None:
        """Queue a command for the worker; `send` sends the command later.

        The request counts as unanswered from now on. The reply will have the same `number`.

        The queued commands must fit into the socket's buffer, so that the server never blocks.
        Therefore the request's `detail`, which may be large, is sent as a file.
        """
        self.unanswered[number] = request
        if has_file := bool(request.detail):
            file = os.memfd_create("taas-detail", os.MFD_CLOEXEC)
            with os.fdopen(file, "wb", closefd=False) as writer:
                writer.write(request.detail)
            self._files.append(file)
            request = msgspec.structs.replace(request, detail=b"")
        self._commands.append(Command(number, request, has_file))

    def send(self, oldest_epoch: int) -> None:
        """Send the queued commands, if any, with up to `_MOST_FREES` freed offsets.

        Also send the files with the requests' details, and close the files in this process. If the
        worker has ended, this method raises nothing; `receive_replies` raises `EOFError`.

        Args:
            oldest_epoch: The worker drops saved dataset states of epochs before this epoch.
        """
        if not self._commands:
            return
        commands, self._commands = self._commands, []
        files, self._files = self._files, []
        frees, self.frees = self.frees[:_MOST_FREES], self.frees[_MOST_FREES:]
        message = _encode(protocol.CommandBatch(commands, frees, oldest_epoch))
        try:
            if files:
                socket.send_fds(self.socket, [message], files)
            else:
                self.socket.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            _log.info("worker %d is gone: %s", self.number, error)
        for file in files:
            os.close(file)

    def receive_replies(self) -> Iterator[Reply]:
        """Yield all replies of the worker that have arrived, without waiting for more.

        Also adapt the limit on the number of commands in the worker's queue (`_adapt_depth`).

        Raises:
            EOFError: The worker has ended.
        """
        while True:
            try:
                message = self.socket.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The worker ended without reading all commands. Linux reports this once. After this
                # error, the replies that the worker sent can still be read.
                continue
            if not message:
                raise EOFError
            replies = _read_replies(message)
            yield from replies
            self._adapt_depth([it for it in replies if it.kind is ResponseKind.BATCH])

    def _adapt_depth(self, batches: Sequence[Reply]) -> None:
        """Set the maximum length of the worker's queue from the worker's latest batches.

        The largest and the slowest of these batches decide: commands for `_DEPTH_BYTES` and for
        `_DEPTH_S` seconds of work fit into the queue. Small, fast batches give a long queue, so
        that the worker never waits for the server. If `batches` is empty, the length stays.
        """
        if batches:
            largest = max(1, *(batch.body_bytes for batch in batches))
            slowest_s = max(1e-6, *(batch.wall_s for batch in batches))
            worth = min(_DEPTH_BYTES // largest, int(_DEPTH_S / slowest_s))
            self._depth = min(self._most, max(_LEAST_DEPTH, worth))

    def close(self) -> None:
        """Close the socket; ranks can still read the batches in the arena."""
        self.is_gone = True
        self.socket.close()


class Worker:
    """Command loop of a worker process: executes the server's commands, one after the other.

    Args:
        arena: Descriptor of the arena's file.
        loader: The loader, if the parent process has unpickled it; else None.
    """

    def __init__(
        self, served: ServedLoader, number: int, sock: socket.socket, arena: int, loader: Any = None
    ) -> None:
        self._served, self._socket, self._arena = served, sock, Arena(arena)
        self._source: BatchSource | UserCodeFailed
        self._hold_back_s = 0.0
        try:
            self._source = BatchSource(
                served.payload, served.name, served.seed, served.where, number, loader
            )
            if self._source.streams is None:
                self._hold_back_s = _HOLD_BACK_S
        except UserCodeFailed as failure:
            self._source = failure
        except (Exception, SystemExit) as error:
            where = f'in {served.where} (loader "{served.name}", while it was being unpickled)'
            self._source = UserCodeFailed(error, where)
        self._replies: list[Reply] = []
        self._replied, self._cpu = 0.0, time.thread_time()

    def run(self) -> None:
        """Execute commands and send the replies, until the server closes the socket.

        First, exempt all existing objects from garbage collection, so that a dataset in shared
        memory is not copied. Also limit torch to one thread.
        """
        # Garbage collection would touch, and so copy, every page of a large shared dataset.
        gc.freeze()
        torch.set_num_threads(1)
        while True:
            message, files, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, _MOST_DEPTH)
            if not message:
                return
            self._execute(_read_commands(message), files)
            self._send_replies()

    def _execute(self, message: protocol.CommandBatch, files: list[int]) -> None:
        """Free the batches that `message` lists, then answer the requests in its commands.

        Also drop saved dataset states of epochs that ranks no longer request.

        Args:
            files: Descriptors of the files with the requests' details.
        """
        for offset in message.frees:
            self._arena.free(offset)
        if isinstance(self._source, BatchSource):
            self._source.forget_before(message.oldest_epoch)
        for command in message.commands:
            request = command.request
            if command.has_file:
                with os.fdopen(files.pop(0), "rb") as file:
                    file.seek(0)
                    request = msgspec.structs.replace(request, detail=file.read())
            self._reply(command.number, request)

    def _reply(self, number: int, request: LoaderRequest) -> None:
        """Prepare the response to a request, write it to the arena, and queue the reply.

        If the arena has no room, the response becomes an ERROR. If the latest replies were sent
        more than `_hold_back_s` seconds ago, also send all queued replies. Otherwise, a later call
        of this method sends them, or `run` after the last command of the server's message.
        """
        began = time.perf_counter()
        kind, body, units, order = self._prepare(request)
        offset = body_sum = 0
        if body.body_bytes:
            try:
                offset, room = self._arena.allocate(body.body_bytes)
            except OSError as error:
                where = f"with {self._where(request)}"
                kind, body, units, order = _failed(UserCodeFailed(error, where))
                offset, room = self._arena.allocate(body.body_bytes)
            is_summed = self._served.sums and kind is ResponseKind.BATCH
            body_sum = body.copy_to(room, is_summed)
        now, cpu = time.perf_counter(), time.thread_time()
        sizes = len(body.head), body.body_bytes, offset, body_sum
        times = now - began, cpu - self._cpu
        self._cpu = cpu
        self._replies.append(Reply(number, kind, units, order, *sizes, *times))
        if now - self._replied > self._hold_back_s:
            self._send_replies()
            self._replied = now

    def _where(self, request: LoaderRequest) -> str:
        return f'batch {request.slot} of loader "{self._served.name}"'

    def _send_replies(self) -> None:
        if self._replies:
            replies, self._replies = self._replies, []
            self._socket.send(_encode(replies))

    def _prepare(self, request: LoaderRequest) -> "_ResponseParts":
        """Return the response to a request.

        If the slot has no batch, the response is VOID, with the hash of this worker's order. The
        response is ERROR if the user's code raises, or if the loader could not be unpickled.
        It is also ERROR if the result cannot be sent, for example because it is too large.
        """
        try:
            if isinstance(self._source, UserCodeFailed):
                raise self._source
            prepared = self._answer(self._source, request)
            if (size := prepared[1].body_bytes) > protocol.MAX_BATCH_BYTES:
                # Ranks would reject the response and repeat the request forever.
                most_gb, where = protocol.MAX_BATCH_BYTES / 1e9, self._where(request)
                text = f"it has {size / 1e9:.1f} GB, but a batch can have at most {most_gb:.1f} GB"
                raise UserCodeFailed(ValueError(text), f"with {where}")
            return prepared
        except NoBatch:
            # Send this worker's order hash: if the sampler of the worker that described the epoch
            # gave more batches, the client sees that the orders differ.
            order = (
                self._source.digest(request.epoch) if isinstance(self._source, BatchSource) else 0
            )
            return ResponseKind.VOID, encode.NOTHING, VOID, order
        except UserCodeFailed as failure:
            return _failed(failure)
        except Exception as error:
            where = f"while {self._where(request)} was being pickled"
            return _failed(UserCodeFailed(error, where))

    def _answer(self, source: BatchSource, request: LoaderRequest) -> "_ResponseParts":
        """Return the response to a request (`RequestKind` explains the kinds of requests).

        The response is a batch (GET), an epoch's description (OPEN), or an item of the dataset
        (SAMPLE). For ORDER, it is the indices of the samples in one batch or in all batches. For
        STATE, it is a saved state of the dataset.

        If a STATE request itself contains a state, the stream resumes from this state, and the
        response is None. With `--units`, this method prepares the epoch's first batch to answer the
        first OPEN of the epoch, because the description says whether this batch has hints. If
        preparing this batch fails, the description says that it has none.

        Raises:
            NoBatch: The requested slot has no batch.
            UserCodeFailed: The user's code raised an exception.
        """
        kind, epoch, slot, detail = request.kind, request.epoch, request.slot, request.detail
        if kind is RequestKind.GET:
            batch = source.prepare(epoch, slot, encode.from_bytes(detail) if detail else None)
            body, units = encode.encode(batch), hinted_units(batch)
            units = UNHINTED if units is None else units
            order = source.digest(epoch)
            if source.streams is not None:
                item, stream = divmod(slot, source.streams)
                if is_compared(item):
                    order = encode.fingerprint(body)
                    if not item:
                        source.record_first_hash(epoch, stream, order)
                else:
                    order = source.first_hash(epoch, slot)
            return ResponseKind.BATCH, body, units, order
        if kind is RequestKind.OPEN:
            description = source.describe_epoch(epoch)
            if self._served.part.units is not None:
                counted = source.has_hints(epoch)
                description = msgspec.structs.replace(description, counted=counted)
            return ResponseKind.OPENED, encode.raw(_encode(description)), 1, 0
        value, order = None, 0
        if kind is RequestKind.SAMPLE:
            value = source.sample(encode.from_bytes(detail))
        elif kind is RequestKind.ORDER:
            value = source.all_indices(epoch) if detail else source.indices(epoch, slot)
            order = source.digest(epoch)
        elif detail:
            source.restore(epoch, slot, encode.from_bytes(detail))
        else:
            value = source.find_state(epoch, slot)
        return ResponseKind.VALUE, encode.raw(encode.as_bytes(value)), 1, order


_ResponseParts = tuple[ResponseKind, encode.Encoded, int, int]
"""Prepared response: kind, body, units, and order hash (`Response.order`)."""


def _failed(failure: UserCodeFailed) -> _ResponseParts:
    """Return an ERROR response with the user's exception; the rank raises this exception again."""
    try:
        body = encode.as_bytes(failure.raised)
    except Exception:  # pickling a user's exception may raise anything
        body = encode.as_bytes(failure.raised.as_runtime_error())
    return ResponseKind.ERROR, encode.raw(body), 1, 0


def parent_main(served: ServedLoader, control: socket.socket, servers: socket.socket) -> None:
    """Run the process that is the parent of one loader's workers.

    First, unpickle a large loader for all workers (`_preload`). The parent process starts a worker
    when the server requests it, reports ended workers to the server, and kills workers that have
    been stopped (SIGSTOP). When the server has ended, the parent process kills all workers and
    ends.

    Args:
        control: This process's end of the socket to the server.
        servers: The server's end of that socket. This process is a fork of the server, and closes
            its copy of the server's end.
    """
    servers.close()
    begin_process()
    context: Any = multiprocessing.get_context(served.context)
    loader = _preload(served)
    inherited = control if served.context == "fork" else None
    processes: dict[int, Any] = {}
    watchdog = StoppedProcessWatchdog()
    try:
        while True:
            sentinels = {process.sentinel: number for number, process in processes.items()}
            for ready in wait([control, *sentinels], _CHECK_S):
                if ready is control:
                    data, sockets, _, _ = socket.recv_fds(control, CONTROL_BYTES, 1, _CLOEXEC)
                    if not data:
                        return
                    number = msgspec.msgpack.decode(data, type=protocol.WorkerChange).number
                    with socket.socket(fileno=sockets[0]) as theirs:
                        arguments = served, number, theirs, loader, inherited
                        process = context.Process(target=_worker_main, args=arguments)
                        process.start()
                    processes[number] = process
                else:
                    number = sentinels[ready]
                    process = processes.pop(number)
                    process.join()
                    was_stopped = process.pid in watchdog.killed
                    ended = protocol.WorkerChange(
                        number, process.pid, process.exitcode, was_stopped
                    )
                    control.send(_encode(ended))
            watchdog.kill_stopped(process.pid for process in processes.values())
    except (BrokenPipeError, ConnectionResetError):
        return  # the server has ended
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def _preload(served: ServedLoader) -> Any:
    """Unpickle a large loader once, so that all workers share its memory.

    Before unpickling, limit torch to one thread.

    Returns:
        The loader; None if the loader is small, the workers are not forks, or unpickling fails.
    """
    if served.context != "fork" or len(served.payload) < _PRELOAD_FROM_BYTES:
        return None
    torch.set_num_threads(1)
    try:
        return load(served.payload).loader
    except Exception:
        return None  # each worker tries again and reports the error with the requested batch


def _worker_main(
    served: ServedLoader,
    number: int,
    sock: socket.socket,
    loader: Any,
    inherited: socket.socket | None,
) -> None:
    """Run a worker in this new process, until the server ends or closes its end of `sock`.

    Args:
        sock: Socket to the server, which first sends the arena's descriptor.
        loader: The loader, if the parent process has unpickled it; else None.
        inherited: The parent process's socket, which a fork must close; None if not forked.
    """
    begin_process()
    if inherited is not None:
        inherited.close()
    with suppress(BrokenPipeError, ConnectionResetError):  # the server has ended
        _, arena, _, _ = socket.recv_fds(sock, CONTROL_BYTES, 1, _CLOEXEC)
        if arena:
            Worker(served, number, sock, arena[0], loader).run()


def begin_process() -> None:
    """Set up a new process of the data service, such as a worker: imports and signals.

    Make `import taas` work for the user's code. Ignore SIGINT, so that an interrupt of
    the cell does not end the process. Let SIGTERM end the process.
    """
    claim_taas()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
