"""Tests of faults 17 to 27 of docs/faults.md, with real fetchers, sockets and signals."""

import contextlib
import os
import signal
import socket
from pathlib import Path

import cloudpickle
import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from taas_magic.data import protocol
from taas_magic.data.protocol import (
    Challenge,
    ProtocolState,
    RequestKind,
    Requests,
    Response,
    ResponseKind,
    Role,
)
from taas_magic.errors import ProtocolError, RunLost
from taas_magic.leases import FetchLease
from tests.data.data_proxy import Proxy
from tests.data.data_rig import (
    PROOF,
    Noise,
    Rows,
    everybody_of,
    is_dropped,
    linked,
    over_tcp,
    plain,
    ready,
    service,
    stream,
    workers_of,
)
from tests.data.ledger import audit, missing
from tests.eventually import HUNG_S
from tests.nightly import nightly

pytestmark = pytest.mark.usefixtures("forkserver")

SHORT = FetchLease(fetch_s=8.0, start_s=HUNG_S)


@pytest.mark.fault(17)
def test_a_reset_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    loader = DataLoader(Noise(24, width=20_000), 2)
    with service(tmp_path, loader, fetchers=2) as running:
        sent: dict[int, int] = {}

        def harm(number: int, data: bytes) -> bytes | None:
            sent[number] = sent.get(number, 0) + len(data)
            return None if number <= 3 and sent[number] > 300_000 else data

        proxy = Proxy(running.directory, harm)
        ledger = running.ledger()
        remote = running.loader(directory=proxy, direct=False, ledger=ledger)
        handed = [plain(batch) for batch in remote]
        assert handed == stream(running, local=True)
        assert remote.counts.retried > 0
        assert audit(running.handed()) == []
        assert missing(running.handed(), 12) == []
        proxy.close()
        ledger.close()


@pytest.mark.fault(18)
@pytest.mark.parametrize("victim", ["worker", "fetcher"])
def test_a_fetcher_is_killed(tmp_path: Path, victim: str) -> None:
    with service(tmp_path, DataLoader(Noise(60), 2), fetchers=2) as running:
        want = stream(running, local=True)
        batches = iter(running.loader())
        handed = [plain(next(batches)) for _ in range(5)]
        processes = workers_of(running) if victim == "worker" else [running.processes[0][0]]
        for process in processes:
            process.kill()
        handed += [plain(batch) for batch in batches]
        assert handed == want


@pytest.mark.fault(18)
def test_a_worker_that_died_is_started_again(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Noise(40), 2)) as running:
        want = stream(running, local=True)
        for number in (signal.SIGKILL, signal.SIGKILL, 40):  # signal 40 has no name
            (worker,) = workers_of(running)
            batches = iter(running.loader())
            handed = [plain(next(batches))]
            worker.send_signal(number)
            worker.wait()
            assert handed + [plain(batch) for batch in batches] == want


@pytest.mark.fault(18)
def test_a_worker_that_is_stopped_is_ended_and_started_again(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Noise(40), 2)) as running:
        (worker,) = workers_of(running)
        worker.suspend()
        worker.wait(HUNG_S)
        assert stream(running) == stream(running, local=True)


@pytest.mark.fault(18)
def test_a_fetcher_ends_when_what_starts_its_workers_is_stopped(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Noise(40), 2)) as running:
        server, parent, worker = everybody_of(running)
        parent.suspend()
        _, alive = psutil.wait_procs([server, parent, worker], HUNG_S)
        assert not alive


@pytest.mark.fault(19)
def test_a_fetcher_stops_and_goes_on(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Noise(100), 2), fetchers=2) as running:
        want = stream(running, local=True)
        remote = running.loader(window_bytes=1, lease=SHORT)
        batches = iter(remote)
        handed = [plain(next(batches)) for _ in range(3)]
        stopped = everybody_of(running)
        for process in stopped:
            process.suspend()
        try:
            handed += [plain(batch) for batch in batches]
        finally:
            for process in stopped:
                process.resume()
        assert handed == want
        assert remote.counts.retried > 0, "the other one was asked"
        assert stream(running) == want


@pytest.mark.fault(20)
def test_all_fetchers_die(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Rows(10_000), 2), fetchers=2) as running:
        batches = iter(running.loader(window_bytes=1, lease=FetchLease(6.0)))
        next(batches)
        for process, _ in running.processes:
            process.kill()
            process.join()
        with pytest.raises(RunLost, match='no fetcher of loader "train" has answered for'):
            for _ in batches:
                pass


class Deadly(Rows):
    def __getitem__(self, index: int) -> object:
        if index == 6:
            os._exit(3)
        return super().__getitem__(index)


def test_a_batch_that_kills_its_worker_is_named(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Deadly(10), 2), fetchers=2) as running:
        batches = iter(running.loader())
        assert [plain(next(batches))[1] for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
        with pytest.raises(RunLost, match="batch 3 of epoch 0: in each of 10 attempts"):
            for _ in range(3):
                next(batches)


@pytest.mark.fault(22)
def test_a_rank_dies_after_it_received_a_batch(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Rows(20), 2)) as running:
        first = running.ledger(attempt=0)
        batches = iter(running.loader(ledger=first))
        for _ in range(4):
            next(batches)
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
        second = running.ledger(attempt=1)
        assert len(list(running.loader(ledger=second))) == 10
        lines = running.handed()
        assert audit(lines) == []
        assert [(line.attempt, line.batches) for line in lines] == [(0, 4), (1, 10)]
        first.close()
        second.close()


@pytest.mark.fault(23)
def test_an_answer_is_lost_and_sent_again(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Noise(20), 2)) as running:
        lost: list[bytes] = []

        def harm(number: int, data: bytes) -> bytes | None:
            if len(data) > 250 and len(lost) < 12:
                lost.append(data)
                return None
            return data

        proxy = Proxy(running.directory, harm)
        assert stream(running, directory=proxy, direct=False) == stream(running, local=True)
        assert len(lost) == 12
        proxy.close()


@pytest.mark.fault(24)
def test_a_corrupted_batch_is_fetched_again(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Noise(24, width=5000), 2)) as running:
        sent, spoilt = dict[int, int](), list[int]()

        def harm(number: int, data: bytes) -> bytes | None:
            """Flip a bit of byte 20,000 of the data on each of the first four connections."""
            before, spoiling = sent.get(number, 0), bytearray(data)
            sent[number] = before + len(data)
            if number <= 4 and before <= 20_000 < sent[number]:
                spoilt.append(number)
                spoiling[20_000 - before] ^= 1
            return bytes(spoiling)

        proxy = Proxy(running.directory, harm)
        remote = running.loader(directory=proxy, direct=False)
        assert [plain(batch) for batch in remote] == stream(running, local=True)
        assert spoilt
        assert remote.counts.retried > 0
        proxy.close()


@pytest.mark.fault(25)
def test_headers_that_are_cut_negative_or_huge(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Rows(20), 2)) as running:
        want = stream(running)
        processes = everybody_of(running)
        server = processes[0]
        before = server.memory_info().rss
        for noise in (
            b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(64),
            protocol.encode_header(PROOF)[:-1],
            protocol.encode_header(Requests(RequestKind.GET, 0, (0,))),
            protocol.encode_header(PROOF, 2**62),
            b"\xff" * 4096,
        ):
            with over_tcp(running) as sock:
                sock.sendall(noise)
                with contextlib.suppress(OSError):  # the server may have closed the connection
                    sock.shutdown(socket.SHUT_WR)
                assert is_dropped(sock)
        assert stream(running) == want
        assert everybody_of(running) == processes
        assert server.memory_info().rss - before < 50 << 20


@pytest.mark.fault(25)
def test_a_rank_closes_on_a_header_that_is_huge(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Rows(20), 2), fetchers=2) as running:
        huge = bytearray(protocol.encode_header(Response(ResponseKind.VOID, 0, 0)))
        huge[10] ^= 255
        sent, said = dict[int, int](), list[int]()

        def harm(number: int, data: bytes) -> bytes | None:
            """After the handshake, send `huge` on the first connection instead of the data."""
            sent[number] = sent.get(number, 0) + len(data)
            if number > 1 or sent[number] <= 500:
                return data
            said.append(number)
            return bytes(huge)

        proxy = Proxy(running.directory, harm)
        assert stream(running, directory=proxy, direct=False) == stream(running, local=True)
        assert said
        proxy.close()


class Big(Rows):
    def __getitem__(self, index: int) -> object:
        big = torch.zeros(self.width, dtype=torch.uint8)
        big[::4096] = index + 1
        return big


@pytest.mark.fault(26)
@pytest.mark.parametrize("direct", [nightly(True), False])
def test_a_batch_of_2_gb(tmp_path: Path, direct: bool) -> None:
    size = (2 << 30) + 4096
    with service(tmp_path, DataLoader(Big(1, width=size), None)) as running:
        (batch,) = list(running.loader(direct=direct))
        assert batch.nbytes == size
        assert batch[::4096].eq(1).all()


@pytest.mark.fault(26)
def test_a_batch_beyond_the_limit_is_refused() -> None:
    header = protocol.encode_header(
        Response(ResponseKind.BATCH, 0, 0), protocol.MAX_BATCH_BYTES + 1
    )
    with pytest.raises(ProtocolError, match="the limits are"):
        ready(Role.RANK).decode_message(memoryview(header))


class TooBig(Rows):
    """Dataset that lowers the limit for batches in its process to 1000 bytes.

    All its samples but the first are larger.
    """

    def __getitem__(self, index: int) -> object:
        protocol.MAX_BATCH_BYTES = 1000
        return torch.zeros(2000, dtype=torch.uint8) if index else index


@pytest.mark.fault(26)
def test_a_worker_says_that_a_batch_is_beyond_the_limit(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(TooBig(2), None)) as running:
        batches = iter(running.loader())
        assert next(batches) == 0
        with pytest.raises(ValueError, match="with batch 1 of loader") as caught:
            next(batches)
        assert "it has 0.0 GB, but a batch can have" in str(caught.value)


class Odd(Rows):
    def __getitem__(self, index: int) -> object:
        empty = torch.empty(0, 3)
        return {"none": empty, "nan": torch.tensor([float("nan"), -0.0]), "text": "", "list": []}


@pytest.mark.fault(27)
def test_empty_batches_and_nans(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Odd(2), None)) as running:
        for batch in running.loader():
            assert batch["none"].shape == (0, 3)
            assert batch["nan"].view(torch.int32).tolist() == [0x7FC00000, -0x80000000]
            assert (batch["text"], batch["list"]) == ("", [])


@pytest.mark.fault(47)
def test_a_peer_with_the_wrong_key_is_refused_and_refuses(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Rows(4), 2)) as running:
        with pytest.raises(ProtocolError, match="does not know the run's key"):
            linked(running, key=b"wrong" * 8)
        assert len(stream(running)) == 2


@pytest.mark.fault(48)
def test_a_peer_that_says_nothing_is_dropped(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Rows(4), 2)) as running:
        with over_tcp(running) as sock:
            greeting = sock.recv(2 * protocol.HEADER_BYTES)
            heard = ProtocolState(Role.RANK).decode_message(memoryview(greeting))
            assert heard is not None and isinstance(heard.message, Challenge)
            assert sock.recv(1) == b""
        assert len(stream(running)) == 2


def test_nothing_is_unpickled_before_the_proof(tmp_path: Path) -> None:
    body = cloudpickle.dumps(os.system)
    with service(tmp_path, DataLoader(Rows(4), 2)) as running:
        with over_tcp(running) as sock:
            sock.sendall(
                protocol.encode_header(Requests(RequestKind.SAMPLE, 0, (0,)), len(body)) + body
            )
            assert is_dropped(sock)
        assert len(stream(running)) == 2


def test_a_fetcher_whose_address_file_disappears_is_skipped(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Rows(4), 2)) as running:
        (tmp_path / "data" / "fetchers" / "fetcher-1.json").symlink_to(tmp_path / "gone")
        assert len(stream(running)) == 2


def test_the_workers_end_with_their_fetcher(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Rows(40), 2), workers=2) as running:
        stream(running)
        workers = workers_of(running, count=2)
        running.processes[0][0].kill()
        assert psutil.wait_procs(workers, HUNG_S)[1] == []
