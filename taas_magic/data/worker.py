"""A worker: the process of a fetcher that runs the user's dataset; and its server's end of it.

A worker takes commands from its server, prepares one batch after the other, writes each into its
arena and says where it lies. It has no connection to any rank and no thread but its own, so that
the dataset meets the same conditions as in a worker of a local DataLoader.

The workers of one loader are children of a process that does nothing else (`parent_main`): it can
unpickle a large dataset once and fork, and it can start a worker again without the server's
sockets in it. The server has a `WorkerHandle` of each.
"""

import gc
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from taas_magic.capture.modules import claim_taas
from taas_magic.data import encode
from taas_magic.data.dataset import Ended, Failed, Source, is_counted, units_of
from taas_magic.data.memory import Arena, Mapping, write_parts
from taas_magic.data.protocol import KINDS, Kind
from taas_magic.data.sharding import VOID

MESSAGE_BYTES = 128 << 10
"""The longest message between a server and a worker."""

DETAIL_BYTES = 512
"""What of a command travels in its message; more than that comes as a file.

All commands that lie with a worker have room in its socket, so that its server never waits."""

_PRELOAD_FROM_BYTES = 8 << 20
_HOLD_BACK_S = 0.0005
"""For how long a reply may wait for the next one: a message costs more than a small batch."""

_DEPTH_BYTES = 4 << 20
_DEPTH_S = 0.01
_LEAST_DEPTH, _MOST_DEPTH = 2, 64
"""How many commands lie with a worker: quick ones a round trip's worth; large batches take memory,
and of slow ones, which a rank waits for in their order, each worker should have the next."""

_MOST_FREES = 64
"""With one message: this, too, has to have room in a worker's socket."""

SPILLED = 1
"""Flag of a command and its reply: what is prepared goes to disk."""

DISK_FULL = 2
"""Flag of a reply: what was to go to disk found no room there."""

_IN_FILE = 4
"""Flag of a command: its detail comes as a file's descriptor."""

_COMMAND = struct.Struct("<IBBHqqI")
_FREE, _FORGET = 200, 201
"""Beside the kinds of questions: a span is read no more; earlier epochs are not asked for."""

REPLY = struct.Struct("<IBBHqIIQQQdd")

_log = logging.getLogger(__name__)


class Key(NamedTuple):
    """A pure question: GET (a batch by the worker's own order), or OPEN, SAMPLE, ORDER, STATE.

    `detail` is what else the question says: given indices, the index of a sample, a state.
    """

    kind: Kind
    epoch: int
    slot: int
    detail: bytes = b""


class Reply(NamedTuple):
    """What a worker says of a command.

    Attributes:
        kind: BATCH, VOID, ERROR, OPENED, VALUE.
        flags: `SPILLED` where it lies on disk instead, `DISK_FULL` where it was to.
        order: Hash of the epoch's order.
        head_bytes: Size of a batch's table of contents.
        offset: Where it lies in the arena.
        body_sum: Its checksum, where the server wants one.
        wall_s: How long it took to prepare.
        cpu_s: Processor time of it.
    """

    number: int
    kind: int
    flags: int
    pad: int
    units: int
    order: int
    head_bytes: int
    body_bytes: int
    offset: int
    body_sum: int
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class WorkerSpec:
    """What the workers of one loader need to know.

    Attributes:
        payload: The pickled loader.
        where: The fetcher and its host, for messages.
        sums: Whether batches go over a wire that nothing else sees to.
        spill: Folder for batches that memory has no room for.
        counts: Whether batches may say themselves what they count (`--units`).
        context: multiprocessing's start method; `fork` shares a large dataset between workers.
    """

    payload: bytes = field(repr=False)
    loader: str
    seed: int
    where: str
    sums: bool = False
    spill: Path | None = None
    counts: bool = False
    context: str = "fork"


def spilled_file(folder: Path, pid: int, number: int) -> Path:
    """Return where a worker lays a batch on disk."""
    return folder / f"{pid}-{number}"


class WorkerHandle:
    """The server's end of one worker: its socket, and what it was told.

    Args:
        arena: A number that no other arena of the server has.
        is_suspect: Whether one of this number has ended: it is told one command at a time.

    Attributes:
        memory: What it has written.
        frees: Spans of its arena that nobody reads any more; it is told with the next command.
        told: Keys that it has not answered, by the number of the command.
        pid: Its process; 0 as long as that has not begun.
        is_gone: Whether it has closed its end.
    """

    def __init__(self, number: int, arena: int, sock: socket.socket, is_suspect: bool) -> None:
        self.number, self.arena, self.socket = number, arena, sock
        self._most = 1 if is_suspect else _MOST_DEPTH
        self._depth = min(self._most, _LEAST_DEPTH)
        self.memory: Mapping
        self.frees: list[int] = []
        self.told: dict[int, Key] = {}
        self.pid, self.is_gone = 0, False
        self._unsent: list[tuple[bytes, int | None]] = []

    @property
    def is_up(self) -> bool:
        """Whether it can be told anything."""
        return self.pid > 0 and not self.is_gone

    @property
    def has_room(self) -> bool:
        """Whether it may be told more. As long as it has enough to do, it is not disturbed."""
        return self.is_up and len(self.told) <= self._depth // 2

    @property
    def room(self) -> int:
        """How many commands more it may be told."""
        return self._depth - len(self.told)

    def tell(self, number: int, key: Key, flags: int) -> None:
        """Lay a command ready: prepare `key`; the reply has the same `number`."""
        self.told[number] = key
        detail, descriptor = key.detail, None
        if len(detail) > DETAIL_BYTES:
            descriptor = os.memfd_create("taas-detail", os.MFD_CLOEXEC)
            write_parts(descriptor, [detail], 0)
            detail, flags = b"", flags | _IN_FILE
        head = _COMMAND.pack(number, key.kind, flags, 0, key.epoch, key.slot, len(detail))
        self._unsent.append((head + detail, descriptor))

    def forget_before(self, epoch: int) -> None:
        """Lay ready that nobody asks for earlier epochs."""
        self._unsent.append((_COMMAND.pack(0, _FORGET, 0, 0, epoch, 0, 0), None))

    def send(self) -> None:
        """Send what is laid ready. A worker that is gone is noticed elsewhere."""
        if not self._unsent:
            return
        parts, self._unsent = self._unsent, []
        frees, self.frees = self.frees[:_MOST_FREES], self.frees[_MOST_FREES:]
        message = b"".join([_COMMAND.pack(0, _FREE, 0, 0, 0, offset, 0) for offset in frees])
        try:
            for text, descriptor in parts:
                is_full = len(message) + len(text) > MESSAGE_BYTES
                if message and (descriptor is not None or is_full):
                    self.socket.send(message)
                    message = b""
                message += text
                if descriptor is not None:
                    socket.send_fds(self.socket, [message], [descriptor])
                    os.close(descriptor)
                    message = b""
            if message:
                self.socket.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            _log.info("worker %d is gone: %s", self.number, error)

    def hear(self) -> Iterator[Reply]:
        """Yield what it says, which has come; its first word is about itself.

        Raises:
            EOFError: It has ended.
        """
        try:
            message, descriptors, _, _ = socket.recv_fds(
                self.socket, MESSAGE_BYTES, 1, socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return
        except ConnectionResetError:
            raise EOFError from None
        if not message:
            raise EOFError
        if not self.pid:
            (self.pid,) = struct.unpack("<I", message)
            self.memory = Mapping(descriptors[0])
            return
        largest, slowest_s = 0, 1e-6
        for fields in REPLY.iter_unpack(message):
            reply = Reply._make(fields)
            if reply.kind == Kind.BATCH:
                largest = max(largest, reply.body_bytes, 1)
                slowest_s = max(slowest_s, reply.wall_s)
            yield reply
        if largest:
            worth = min(_DEPTH_BYTES // largest, int(_DEPTH_S / slowest_s))
            self._depth = min(self._most, max(_LEAST_DEPTH, worth))

    def close(self) -> None:
        """Close the socket; the arena stays as long as somebody reads it."""
        self.is_gone = True
        self.socket.close()


class Worker:
    """Prepares what it is told to; lives as long as its process.

    Args:
        loader: The loader, where it was unpickled for all workers.
    """

    def __init__(
        self, spec: WorkerSpec, number: int, sock: socket.socket, loader: Any = None
    ) -> None:
        self._spec, self._socket, self._arena = spec, sock, Arena()
        # The server hears of the worker before the dataset is unpickled, which may take minutes.
        socket.send_fds(sock, [struct.pack("<I", os.getpid())], [self._arena.descriptor])
        self._source: Source | None = None
        self._broken: Failed | None = None
        try:
            self._source = Source(spec.payload, spec.loader, spec.seed, spec.where, number, loader)
        except Failed as failure:
            self._broken = failure
        except (Exception, SystemExit) as error:
            where = f'in {spec.where} (loader "{spec.loader}", when it was unpickled)'
            self._broken = Failed(error, where)
        self._replies: list[bytes] = []
        self._replied, self._cpu = 0.0, time.thread_time()

    def run(self) -> None:
        """Do what the server says until it is gone."""
        # What is here stays; looking through it for garbage would touch all of a large dataset.
        gc.freeze()
        torch.set_num_threads(1)
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1)
            if not message:
                return
            self._obey(memoryview(message), descriptors)
            self._say()

    def _obey(self, message: memoryview, descriptors: Sequence[int]) -> None:
        at = 0
        while at < len(message):
            number, kind, flags, _, epoch, slot, size = _COMMAND.unpack_from(message, at)
            at += _COMMAND.size
            detail = bytes(message[at : at + size]) if size else b""
            at += size
            if kind == _FREE:
                self._arena.free(slot)
            elif kind == _FORGET:
                if self._source is not None:
                    self._source.forget_before(epoch)
            else:
                if flags & _IN_FILE:
                    with os.fdopen(descriptors[0], "rb") as file:
                        file.seek(0)
                        detail = file.read()
                self._reply(number, Key(KINDS[kind], epoch, slot, detail), flags)

    def _reply(self, number: int, key: Key, flags: int) -> None:
        """Prepare an answer, lay it in shared memory or on disk, and say so."""
        began = time.perf_counter()
        kind, body, units, order = self._prepare(key)
        offset = body_sum = said = 0
        if flags & SPILLED and kind is Kind.BATCH:
            said = SPILLED if self._spill(number, body) else DISK_FULL
        if said != SPILLED and body.body_bytes:
            try:
                offset, room = self._arena.take(body.body_bytes)
            except OSError as error:
                where = f'with batch {key.slot} of loader "{self._spec.loader}"'
                kind, body, units, order = Kind.ERROR, _failed(Failed(error, where)), 1, 0
                offset, room = self._arena.take(body.body_bytes)
            body_sum = body.copy_to(room, self._spec.sums and kind is Kind.BATCH)
        now, cpu = time.perf_counter(), time.thread_time()
        sizes = len(body.head), body.body_bytes, offset, body_sum
        times = now - began, cpu - self._cpu
        self._cpu = cpu
        self._replies.append(REPLY.pack(number, kind, said, 0, units, order, *sizes, *times))
        if now - self._replied > _HOLD_BACK_S:
            self._say()
            self._replied = now

    def _say(self) -> None:
        if self._replies:
            message, self._replies = b"".join(self._replies), []
            self._socket.send(message)

    def _spill(self, number: int, body: encode.Encoded) -> bool:
        """Write a batch to disk; return whether there was room."""
        assert self._spec.spill is not None
        path = spilled_file(self._spec.spill, os.getpid(), number)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                write_parts(descriptor, body.parts(), 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            _log.warning("a batch could not be written to %s: %s", path, error)
            path.unlink(missing_ok=True)
            return False
        return True

    def _prepare(self, key: Key) -> tuple[Kind, encode.Encoded, int, int]:
        """Return what to answer: its kind, its body, its units and the hash of its order."""
        try:
            if self._broken is not None:
                raise self._broken
            assert self._source is not None
            return self._answer(self._source, key)
        except Ended:
            return Kind.VOID, encode.NOTHING, VOID, 0
        except Failed as failure:
            return Kind.ERROR, _failed(failure), 1, 0
        except Exception as error:
            where = f'while batch {key.slot} of loader "{self._spec.loader}" was being pickled'
            return Kind.ERROR, _failed(Failed(error, where)), 1, 0

    def _answer(self, source: Source, key: Key) -> tuple[Kind, encode.Encoded, int, int]:
        if key.kind is Kind.GET:
            order = source.digest(key.epoch)
            given = encode.from_bytes(key.detail) if key.detail else None
            batch = source.prepare(key.epoch, key.slot, given)
            return Kind.BATCH, encode.encode(batch), units_of(batch), order
        if key.kind is Kind.OPEN:
            opened = source.open(key.epoch)
            if self._spec.counts:
                # What is raised here is raised again when the batch itself is asked for.
                with suppress(Ended, Failed):
                    opened = opened._replace(counted=is_counted(source.prepare(key.epoch, 0)))
            return Kind.OPENED, encode.raw(msgspec.json.encode(opened)), 1, 0
        value, order = None, 0
        if key.kind is Kind.SAMPLE:
            value = source.sample(encode.from_bytes(key.detail))
        elif key.kind is Kind.ORDER:
            value, order = source.indices(key.epoch, key.slot), source.digest(key.epoch)
        elif key.detail:
            source.restore(key.epoch, key.slot, encode.from_bytes(key.detail))
        else:
            value = source.state(key.epoch, key.slot)
        return Kind.VALUE, encode.raw(encode.as_bytes(value)), 1, order


def _failed(failure: Failed) -> encode.Encoded:
    """Return a body that raises again what the user's code raised."""
    try:
        return encode.raw(encode.as_bytes(failure.raised))
    except Exception:
        return encode.raw(encode.as_bytes(failure.raised.plain()))


def parent_main(spec: WorkerSpec, control: socket.socket, servers: socket.socket) -> None:
    """Run the process whose children are the workers of one loader.

    The server says a number: it starts that worker, and gives back its end of the worker's socket.
    It says "number exit-code" of each that has ended. Without a server it ends, and they with it.

    Args:
        control: Its end of the socket to the server.
        servers: The server's end, which the fork has, too.
    """
    servers.close()
    begin_process()
    context: Any = multiprocessing.get_context(spec.context)
    loader = _preload(spec)
    processes: dict[int, Any] = {}
    try:
        while True:
            sentinels = {process.sentinel: number for number, process in processes.items()}
            for ready in wait([control, *sentinels]):
                if ready is control:
                    said = control.recv(64)
                    if not said:
                        return
                    processes[int(said)] = _start(int(said), spec, context, loader, control)
                else:
                    number = sentinels[ready]
                    process = processes.pop(number)
                    process.join()
                    control.send(f"{number} {process.exitcode}".encode())
    except (BrokenPipeError, ConnectionResetError):
        return  # the server is gone
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def _preload(spec: WorkerSpec) -> Any:
    """Unpickle a large dataset once, whose pages all workers then share."""
    if spec.context != "fork" or len(spec.payload) < _PRELOAD_FROM_BYTES:
        return None
    torch.set_num_threads(1)
    try:
        return pickle.loads(spec.payload)
    except Exception:
        return None  # each worker tries it again, and can say of which batch it is the end


def _start(number: int, spec: WorkerSpec, context: Any, loader: Any, control: socket.socket) -> Any:
    """Start a worker, and give the server its end of the socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inherited = (control, ours) if spec.context == "fork" else ()
    arguments = (spec, number, theirs, loader, inherited)
    process = context.Process(target=_worker_main, args=arguments, name="taas-worker")
    with ours, theirs:
        process.start()
        socket.send_fds(control, [f"{number}".encode()], [ours.fileno()])
    return process


def _worker_main(
    spec: WorkerSpec,
    number: int,
    sock: socket.socket,
    loader: Any,
    inherited: Sequence[socket.socket],
) -> None:
    begin_process()
    for other in inherited:
        other.close()
    try:
        Worker(spec, number, sock, loader).run()
    except (BrokenPipeError, ConnectionResetError):
        return  # the server is gone


def begin_process() -> None:
    """Name this process; an interrupt is for others, and SIGTERM ends it."""
    claim_taas()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
