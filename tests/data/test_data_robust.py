"""Tests of the data service with slow, stopped, killed and foreign processes.

Pauses, long calls, foreign connections and killed workers must not change the batches.
"""

import contextlib
import ctypes
import os
import pickle
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from taas_magic.data import encode, protocol, service
from taas_magic.data.connection import FetcherLink
from taas_magic.data.loader import RemoteLoader
from taas_magic.data.protocol import (
    Alive,
    LoaderRequest,
    Reply,
    RequestKind,
    Requests,
    Response,
    ResponseKind,
    Role,
)
from taas_magic.data.worker import WorkerHandle
from taas_magic.errors import ProtocolError, RunLost
from taas_magic.leases import FetchLease
from taas_magic.messages import FetcherCounts, FetcherReport, decode_fetcher_message
from tests.data.data_rig import (
    PROOF,
    Noise,
    Rows,
    Service,
    address_of,
    everybody_of,
    heard,
    linked,
    over_tcp,
    plain,
    ready,
    received,
    stream,
    workers_of,
)
from tests.data.data_rig import service as data_service
from tests.eventually import HUNG_S
from tests.nightly import nightly

pytestmark = pytest.mark.usefixtures("forkserver")

SHORT = FetchLease(fetch_s=4.0, start_s=HUNG_S)
PATIENT = FetchLease(fetch_s=10.0, start_s=HUNG_S)
LONG_S = 12.0
LARGE = 64 << 10
NOBODY = 65534
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


T = TypeVar("T")


def stats(running: Service, until: Callable[[FetcherCounts], object]) -> FetcherCounts:
    """Read reports of the first fetcher until `until` is true for its counts; return them."""
    while True:
        said = decode_fetcher_message(running.processes[0][1].recv_bytes())
        if isinstance(said, FetcherReport) and until(said.loaders["train"]):
            return said.loaders["train"]


def value_of(batch: torch.Tensor) -> float:
    """Check that all elements of a batch are equal, and return their value."""
    value = batch.view(-1)[0]
    assert (batch == value).all()
    return value.item()


class Large(Rows):
    """Dataset whose row n is a tensor of `width` bytes, each with the value n."""

    def __getitem__(self, index: int) -> object:
        return torch.full((self.width,), index, dtype=torch.uint8)


@pytest.mark.fault(66)
@pytest.mark.parametrize("way", ["tcp", "tls"])
def test_a_rank_that_pauses_in_the_middle_of_a_pass_loses_nothing(tmp_path: Path, way: str) -> None:
    """A fetcher that sends a batch waits for the rank, even if the rank pauses for 3 s."""
    certificate = service.new_certificate() if way == "tls" else None
    tls = certificate.client_context if certificate else None
    with data_service(tmp_path, DataLoader(Large(20, 4 << 20), 1), tls=certificate) as running:
        remote = running.loader(direct=False, tls=tls, window_bytes=64 << 20)
        batches = iter(remote)
        handed = [value_of(next(batches)) for _ in range(2)]
        time.sleep(3.0)
        handed += [value_of(batch) for batch in batches]
        assert handed == list(range(20))
        assert remote.counts.retried == 0


class TakesItsTime(Rows):
    """Base class of datasets with a long operation, which waits until the file `gate` exists."""

    def __init__(self, size: int, gate: Path) -> None:
        super().__init__(size)
        self.gate = gate

    def await_rank(self) -> None:
        while not self.gate.exists():
            time.sleep(0.01)


class SlowToUnpickle(TakesItsTime):
    """Dataset that takes LONG_S seconds to unpickle."""

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.await_rank()
        time.sleep(LONG_S)


class HoldsTheLock(TakesItsTime):
    """Dataset whose item 0 holds the GIL for LONG_S seconds."""

    def __getitem__(self, index: int) -> object:
        if not index:
            self.await_rank()
            ctypes.PyDLL(None).usleep(int(LONG_S * 1e6))
        return super().__getitem__(index)


@pytest.mark.fault(67)
def test_a_dataset_that_takes_its_time_is_no_fetcher_that_is_gone(tmp_path: Path) -> None:
    """The ranks wait for their fetcher, although it takes longer than their limit `fetch_s`.

    One dataset unpickles slowly. At the same time, another dataset holds the GIL.
    """
    gates = {kind: tmp_path / kind.__name__ for kind in (SlowToUnpickle, HoldsTheLock)}
    loaders = {gate.name: DataLoader(kind(10, gate), 2) for kind, gate in gates.items()}
    with data_service(tmp_path, loaders) as running, ThreadPoolExecutor() as threads:
        remotes = [running.loader(name, lease=PATIENT) for name in loaders]
        for indices, took_s in threads.map(taken, remotes, gates.values()):
            assert indices == [[n, n + 1] for n in range(0, 10, 2)]
            assert took_s > PATIENT.fetch_s, "it took its time"
        assert [remote.counts.retried for remote in remotes] == [0, 0]


def taken(remote: RemoteLoader, gate: Path) -> tuple[list[object], float]:
    """Create the file `gate`, receive one epoch, and measure its duration.

    Returns:
        The indices of each batch's rows, and the duration in seconds.
    """
    began = time.monotonic()
    gate.touch()
    return [plain(batch)[1] for batch in remote], time.monotonic() - began


@pytest.mark.fault(68)
@pytest.mark.parametrize("fetchers, workers", [(1, 8), (3, 1)])
def test_the_run_is_lost_when_all_fetchers_are_stopped(
    tmp_path: Path, fetchers: int, workers: int
) -> None:
    with data_service(tmp_path, DataLoader(Rows(10_000), 2), fetchers, workers) as running:
        batches = iter(running.loader(window_bytes=1, lease=SHORT))
        for _ in range(4 * fetchers * workers):
            next(batches)
        numbers = range(fetchers)
        everybody = [one for n in numbers for one in everybody_of(running, n, workers)]
        for process in everybody:
            process.suspend()
        began = time.monotonic()
        try:
            with pytest.raises(RunLost) as raised:
                for _ in batches:
                    pass
        finally:
            for process in everybody:
                process.resume()
        said = str(raised.value)
        assert 'no fetcher of loader "train" has answered for ' in said
        assert all(f"fetcher {number} at 127.0.0.1:" in said for number in numbers), said
        assert SHORT.fetch_s <= time.monotonic() - began


def strangers(running: Service, count: int) -> list[socket.socket]:
    """Open `count` non-blocking TCP connections to the first fetcher, without a handshake."""
    crowd = [over_tcp(running) for _ in range(count)]
    for sock in crowd:
        sock.setblocking(False)
    return crowd


def drip(crowd: Sequence[socket.socket], over: threading.Event) -> None:
    """Send the header of a wrong `Proof` again and again: one byte at a time on each connection.

    The function returns when `over` is set, or after 1000 headers. Closed connections are skipped.
    """
    said = protocol.encode_header(PROOF)
    for byte in said * 1000:
        for sock in crowd:
            if over.wait(0.0001):
                return
            with contextlib.suppress(OSError):
                sock.send(bytes([byte]))


@pytest.mark.fault(74)
@pytest.mark.parametrize("way", ["tcp", "tls"])
def test_thousands_of_strangers_keep_no_rank_out(
    tmp_path: Path, way: str, many_files: None
) -> None:
    certificate = service.new_certificate() if way == "tls" else None
    tls = certificate.client_context if certificate else None
    with data_service(tmp_path, DataLoader(Noise(40), 2), tls=certificate) as running:
        want, over = stream(running, local=True), threading.Event()
        silent, dripping = strangers(running, 1500), strangers(running, 1500)
        thread = threading.Thread(target=drip, args=(dripping, over))
        thread.start()
        try:
            for _ in range(3):
                remote = running.loader(direct=False, tls=tls)
                assert [plain(batch) for batch in remote] == want
                assert remote.counts.retried == 0
        finally:
            over.set()
            thread.join()
            for sock in silent + dripping:
                sock.close()


def as_nobody(work: Callable[[], T]) -> T:
    """Call `work` in a forked child process as the user `nobody`; return its result."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setuid(NOBODY)
            os.write(writing, pickle.dumps(work()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said: T = pickle.load(file)
    os.waitpid(pid, 0)
    return said


@is_root
def test_a_server_refuses_a_unix_peer_of_another_user(tmp_path: Path) -> None:
    with data_service(tmp_path, DataLoader(Rows(4), 2)) as running:
        address = address_of(running)

        def read() -> bytes:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(HUNG_S)
                sock.connect("\0" + address.unix)
                return sock.recv(1000)

        assert as_nobody(read) == b"", "not even a challenge"
        assert stats(running, lambda said: said.refused).refused == 1
        assert len(stream(running)) == 2


@is_root
def test_a_rank_refuses_a_unix_server_of_another_user(tmp_path: Path) -> None:
    with data_service(tmp_path, DataLoader(Rows(4), 2)) as running:
        address = address_of(running)

        def connect() -> str:
            try:
                linked(running, address=address)
            except ProtocolError as error:
                return str(error)
            return ""

        assert "belongs to another user (uid 0)" in as_nobody(connect)


def test_a_worker_that_is_killed_three_times_in_a_row_gives_the_same_stream(tmp_path: Path) -> None:
    with data_service(tmp_path, DataLoader(Noise(400), 2)) as running:
        want = stream(running, local=True)
        remote = running.loader(window_bytes=1)
        batches = iter(remote)
        handed = [plain(next(batches)) for _ in range(2)]
        for _ in range(3):
            (worker,) = workers_of(running)
            worker.kill()
            psutil.wait_procs([worker])
            handed.append(plain(next(batches)))
        handed += [plain(batch) for batch in batches]
        assert handed == want
        assert remote.counts.retried == 0, "a worker's death is no matter of the ranks"


class Whose(Rows):
    """Dataset whose items are large tensors filled with the process id of the worker."""

    def __getitem__(self, index: int) -> object:
        return torch.full((LARGE,), os.getpid())


@pytest.mark.parametrize("direct", [True, False])
def test_ready_batches_survive_the_death_of_their_worker(tmp_path: Path, direct: bool) -> None:
    with data_service(tmp_path, DataLoader(Whose(6), 1)) as running:
        (worker,) = workers_of(running)
        # The worker prepares the 6 batches of an epoch and 2 batches of the next epoch.
        stats(running, lambda said: said.ready == 8)
        worker.kill()
        psutil.wait_procs([worker])
        (other,) = workers_of(running)
        assert other.pid != worker.pid
        batches = [value_of(batch) for batch in running.loader(direct=direct)]
        assert batches == [worker.pid] * 6


def test_a_rank_that_changes_a_padded_batch_changes_no_other_ranks(tmp_path: Path) -> None:
    with data_service(tmp_path, DataLoader(Large(4, LARGE), 1)) as running:
        ranks = [iter(running.loader(rank=rank, world_size=3)) for rank in range(3)]
        handed = []
        for _ in range(2):
            for batches in ranks:
                batch = next(batches)
                handed.append(value_of(batch))
                batch.fill_(99)
        assert handed == [0, 1, 2, 3, 0, 1]


class Gated(Rows):
    """Dataset that waits until the file `gate` exists. Row n is a tensor filled with n + 1."""

    def __init__(self, size: int, width: int, gate: Path) -> None:
        super().__init__(size, width)
        self.gate = gate

    def __getitem__(self, index: int) -> object:
        while not self.gate.exists():
            time.sleep(0.01)
        return torch.full((self.width,), index + 1, dtype=torch.uint8)


def is_lent(link: FetcherLink) -> bool:
    """Return whether the next response is a batch that the rank reads in shared memory.

    The response stays in the socket. Messages before the response are dropped.
    """
    while True:
        select.select([link._socket], [], [])
        header = link._socket.recv(protocol.HEADER_BYTES, socket.MSG_PEEK)
        found = ready(Role.RANK).decode_message(memoryview(header))
        assert found is not None
        if isinstance(found.message, Response):
            return found.message.shared is not None
        link._socket.recv(protocol.HEADER_BYTES)


def test_a_batch_that_is_still_being_sent_to_a_rank_is_not_lent_to_another(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with data_service(tmp_path / "run", DataLoader(Gated(1, 8 << 20, gate), 1)) as running:
        links = [linked(running) for _ in range(2)]
        for link in links:
            link.send([(Requests(RequestKind.GET, 0, (0,)), b"")])
        for link in links:  # no batch is ready, so the server sends heartbeats
            assert isinstance(heard(link)[0], Alive)
        gate.touch()
        # The rank that reads the batch in shared memory comes first, and overwrites the batch. The
        # other rank reads its response from the socket only later.
        for link in sorted(links, key=is_lent, reverse=True):
            response, body = received(link)
            batch = encode.decode(body, response.head_bytes)
            assert value_of(batch) == 1
            batch.zero_()
        for link in links:
            link.close()


def test_a_peer_that_resets_its_connection_does_not_affect_others(tmp_path: Path) -> None:
    with data_service(tmp_path, DataLoader(Noise(200, width=20_000), 1)) as running:
        link = linked(running, direct=False)
        link.send([(Requests(RequestKind.GET, 0, tuple(range(200))), b"")])
        response, _ = received(link)
        assert response.slot == 0
        link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        link.close()
        assert stream(running) == stream(running, local=True)
        assert stats(running, lambda said: said.sent > 200).refused == 0


@pytest.mark.parametrize("workers", [nightly(1), 2])
def test_large_batches_do_not_exceed_the_memory_limit(tmp_path: Path, workers: int) -> None:
    """The limit also holds for the first batches, whose size is unknown until they are prepared."""
    size, loader = 4 << 20, DataLoader(Large(50, 4 << 20), 1)
    with data_service(tmp_path, loader, workers=workers, buffer_bytes=3 * size) as running:
        ready = stats(running, lambda said: said.ready_bytes >= 3 * size and said.idle)
        assert ready.ready_bytes <= max(4, 2 * workers) * (size + 4096)
        taken = [value_of(batch) for batch in running.loader()]
        assert taken == list(range(50))


class Streams(IterableDataset[torch.Tensor]):
    """Iterable-style dataset with two streams, which alternate in the epoch's order.

    The batch at position n is filled with n. Stream 1 waits until the file `gate` exists.
    """

    def __init__(self, gate: Path, size: int) -> None:
        self.gate, self.size = gate, size

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        number = info.id
        while number and not self.gate.exists():
            time.sleep(0.01)
        for item in range(self.size):
            yield torch.full((LARGE,), 2 * item + number, dtype=torch.uint8)


def test_batches_of_one_stream_do_not_block_another_stream(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    loader = DataLoader(Streams(gate, 40), None, num_workers=2, timeout=HUNG_S)
    with data_service(tmp_path / "run", loader, buffer_bytes=8 * LARGE) as running:
        stats(running, lambda said: said.idle and said.ready_bytes >= 5 * LARGE)
        gate.touch()
        assert [int(batch[0]) for batch in running.loader()] == list(range(80))


def test_a_server_does_not_wait_for_a_slow_worker() -> None:
    """Even the longest queue of commands, with many freed offsets, fits into the worker's socket.

    So the server can send the commands without waiting.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)  # a send to a full socket then fails instead of waiting
    one = WorkerHandle(0, 1, ours, is_suspect=False)
    with ours, theirs:
        small = Reply(0, ResponseKind.BATCH, 1, body_bytes=1)
        theirs.send(msgspec.msgpack.encode([small]))
        assert len(list(one.receive_replies())) == 1
        while room := one.room:
            for _ in range(1 if len(one.unanswered) < room else room):
                number = len(one.unanswered)
                one.queue_command(number, LoaderRequest(RequestKind.GET, 0, number, bytes(1 << 16)))
            one.frees += range(10_000)
            one.send(0)
        assert len(one.unanswered) == 64


class Which(Dataset[int]):
    """Dataset whose samples are the process id of the worker that prepares them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_a_fetcher_that_starts_after_the_first_batch_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Service, "start", lambda *_: None)
    with data_service(tmp_path, DataLoader(Which(), 1), fetchers=2) as running:
        monkeypatch.undo()
        running.start(0)
        remote = running.loader()
        assert len({int(batch) for batch in remote}) == 1
        running.start(1)
        while len({int(batch) for batch in remote}) == 1:
            pass  # the remote loader searches for new fetchers only every 0.25 s
