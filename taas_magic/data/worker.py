"""A worker: the process of a fetcher that runs the user's dataset.

It takes commands from its server, prepares one batch after the other, writes each into its arena
and says where it lies. It has no connection to any rank and no thread but its own, so that the
dataset meets the same conditions as in a worker of a local DataLoader.

The workers of one loader are children of a process that does nothing else (`parent_main`): it can
unpickle a large dataset once and fork, and it can start a worker again without the server's
sockets in it.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from taas_magic.capture.modules import claim_taas
from taas_magic.data import encode
from taas_magic.data.dataset import Ended, Failed, Source, is_counted, units_of
from taas_magic.data.memory import Arena, write_parts
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

_log = logging.getLogger(__name__)


class Key(NamedTuple):
    """A pure question: GET (a batch by the worker's own order), or OPEN, SAMPLE, ORDER, STATE.

    `detail` is what else the question says: given indices, the index of a sample, a state.
    """

    kind: Kind
    epoch: int
    slot: int
    detail: bytes = b""


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


class Reply(NamedTuple):
    """What a worker says of a command.

    Attributes:
        number: Which command.
        kind: BATCH, VOID, ERROR, OPENED, VALUE.
        flags: `SPILLED` where it lies on disk instead, `DISK_FULL` where it was to.
        pad: Nothing.
        units: What a batch counts.
        order: Hash of the epoch's order.
        head_bytes: Size of a batch's table of contents.
        body_bytes: Size of the body.
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
        loader: Its name.
        seed: The seed of its randomness.
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


def command(number: int, key: Key, flags: int = 0) -> tuple[bytes, int | None]:
    """What is sent for a command, and the descriptor that goes along.

    Args:
        number: The reply has it, too.
        key: What to prepare.
        flags: SPILLED, or nothing.
    """
    detail, descriptor = key.detail, None
    if len(detail) > DETAIL_BYTES:
        descriptor = os.memfd_create("taas-detail", os.MFD_CLOEXEC)
        write_parts(descriptor, [detail], 0)
        detail, flags = b"", flags | _IN_FILE
    head = _COMMAND.pack(number, key.kind, flags, 0, key.epoch, key.slot, len(detail))
    return head + detail, descriptor


def free(offsets: Sequence[int]) -> bytes:
    """What says that spans are read no more."""
    return b"".join(_COMMAND.pack(0, _FREE, 0, 0, 0, offset, 0) for offset in offsets)


def forget_before(epoch: int) -> bytes:
    """What says that nobody asks for earlier epochs any more."""
    return _COMMAND.pack(0, _FORGET, 0, 0, epoch, 0, 0)


class Worker:
    """Prepares what it is told to; lives as long as its process.

    Args:
        spec: What it needs to know.
        number: Its number in its fetcher.
        sock: Its end of the socket to the server.
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
                    detail = _read(descriptors[0])
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
        """Write a batch to disk; returns whether there was room."""
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
            return self._answer(key)
        except Ended:
            return Kind.VOID, encode.NOTHING, VOID, 0
        except Failed as failure:
            return Kind.ERROR, _failed(failure), 1, 0
        except Exception as error:
            where = f'while batch {key.slot} of loader "{self._spec.loader}" was being pickled'
            return Kind.ERROR, _failed(Failed(error, where)), 1, 0

    def _answer(self, key: Key) -> tuple[Kind, encode.Encoded, int, int]:
        source = self._source
        assert source is not None
        if key.kind is Kind.GET:
            order = source.digest(key.epoch)
            given = encode.from_bytes(key.detail) if key.detail else None
            batch = source.prepare(key.epoch, key.slot, given)
            return Kind.BATCH, encode.encode(batch), units_of(batch), order
        if key.kind is Kind.OPEN:
            opened = source.open(key.epoch)
            if self._spec.counts:
                opened = opened._replace(counted=self._is_counted(key.epoch))
            return Kind.OPENED, encode.raw(msgspec.json.encode(opened)), 1, 0
        if key.kind is Kind.SAMPLE:
            value, order = source.sample(encode.from_bytes(key.detail)), 0
        elif key.kind is Kind.STATE:
            value, order = self._state(source, key), 0
        else:
            value, order = source.indices(key.epoch, key.slot), source.digest(key.epoch)
        return Kind.VALUE, encode.raw(encode.as_bytes(value)), 1, order

    def _state(self, source: Source, key: Key) -> Any:
        """What a stream's dataset says of itself; or, where a rank has it, what it is to be."""
        if not key.detail:
            return source.state(key.epoch, key.slot)
        source.restore(key.epoch, key.slot, encode.from_bytes(key.detail))
        return None

    def _is_counted(self, epoch: int) -> bool:
        assert self._source is not None
        try:
            return is_counted(self._source.prepare(epoch, 0))
        except (Ended, Failed):
            return False


def spilled_file(folder: Path, pid: int, number: int) -> Path:
    """Where a worker lays a batch on disk."""
    return folder / f"{pid}-{number}"


def _failed(failure: Failed) -> encode.Encoded:
    """A body that raises again what the user's code raised."""
    try:
        return encode.raw(encode.as_bytes(failure.raised))
    except Exception:
        return encode.raw(encode.as_bytes(failure.raised.plain()))


def _read(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def parent_main(spec: WorkerSpec, control: socket.socket) -> None:
    """The process whose children are the workers of one loader.

    The server says a number: it starts that worker, and gives back its end of the worker's socket.
    It says "number exit-code" of each that has ended. Without a server it ends, and they with it.
    """
    claim_taas()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    context: Any = multiprocessing.get_context(spec.context)
    loader = _preload(spec)
    processes: dict[int, Any] = {}
    try:
        while _supervise(spec, context, loader, control, processes):
            pass
    except (BrokenPipeError, ConnectionResetError):
        return  # the server is gone
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def _supervise(
    spec: WorkerSpec,
    context: Any,
    loader: Any,
    control: socket.socket,
    processes: dict[int, Any],
) -> bool:
    """Start the next worker, or say which has ended; returns False when the server is gone."""
    sentinels = {process.sentinel: number for number, process in processes.items()}
    for ready in wait([control, *sentinels]):
        if ready is control:
            said = control.recv(64)
            if not said:
                return False
            processes[int(said)] = _start(int(said), spec, context, loader, control)
        else:
            number = sentinels[ready]
            process = processes.pop(number)
            process.join()
            control.send(f"{number} {process.exitcode}".encode())
    return True


def _preload(spec: WorkerSpec) -> Any:
    """A large dataset is unpickled once, and its pages shared by all workers."""
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
    """A worker's process."""
    claim_taas()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    try:
        Worker(spec, number, sock, loader).run()
    except (BrokenPipeError, ConnectionResetError):
        return  # the server is gone
