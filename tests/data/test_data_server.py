"""Tests of a fetcher's server: its commands to workers, their ends, and memory that it lends."""

import dataclasses
import random
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from msgspec import structs
from torch.utils.data import DataLoader, Dataset, IterableDataset

from taas_magic.data import encode
from taas_magic.data.connection import FetcherLink
from taas_magic.data.protocol import LoaderRequest, Reply, RequestKind, Requests, ResponseKind
from taas_magic.data.scheduler import PreparedResponse
from taas_magic.data.server import RankConnection
from taas_magic.data.worker import WorkerHandle
from taas_magic.errors import ProtocolError
from taas_magic.host.spec import FetcherSpec
from taas_magic.messages import FetcherCounts, FetcherReport, Note, decode_fetcher_message
from tests.data.data_rig import (
    Rows,
    Service,
    linked,
    over_tcp,
    plain,
    received,
    service,
    stream,
)

pytestmark = pytest.mark.usefixtures("forkserver")


@pytest.mark.parametrize(
    ("body_bytes", "wall_s", "commands"),
    [(64, 0.0, 64), (64, 0.001, 10), (64, 0.1, 2), (512 << 10, 0.0, 16), (64 << 20, 0.0, 2)],
)
def test_the_number_of_commands_to_a_worker_depends_on_its_last_batches(
    body_bytes: int, wall_s: float, commands: int
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        worker = WorkerHandle(0, 1, ours, is_suspect=False)
        assert worker.room == 2
        worker.queue_command(7, LoaderRequest(RequestKind.GET, 0, 0))
        reply = Reply(7, ResponseKind.BATCH, 1, body_bytes=body_bytes, wall_s=wall_s)
        theirs.send(msgspec.msgpack.encode([reply]))
        worker.unanswered.clear()
        assert len(list(worker.receive_replies())) == 1
        assert worker.room == commands


class Spawning(Service):
    """Fetchers whose workers start slowly: they are spawned, and first import torch."""

    def spec(self, number: int) -> FetcherSpec:
        spec = super().spec(number)
        loaders = [structs.replace(one, context="spawn") for one in spec.service.loaders]
        served = structs.replace(spec.service, loaders=tuple(loaders))
        return dataclasses.replace(spec, service=served)


def worker_of(running: Service) -> psutil.Process:
    (parent,) = psutil.Process(running.processes[0][0].pid).children()
    while True:
        for child in parent.children():
            if "spawn_main" in " ".join(child.cmdline()):
                return child
        time.sleep(0.001)


def test_a_worker_that_ends_during_its_start_is_started_again(tmp_path: Path) -> None:
    running = Spawning(tmp_path, {"train": DataLoader(Rows(8), 2)})
    try:
        worker_of(running).kill()
        assert [plain(rows)[1] for rows in running.loader()] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    finally:
        running.close()


def counted(running: Service) -> FetcherCounts:
    """Wait for the next report of the first fetcher, and return its counts of the loader."""
    control = running.processes[0][1]
    while not isinstance(said := decode_fetcher_message(control.recv_bytes()), FetcherReport):
        pass
    return said.loaders["train"]


def test_a_worker_that_is_still_starting_is_not_idle(tmp_path: Path) -> None:
    """With `--prefill`, ranks start when all workers are idle, because no more can be prepared."""
    running = Spawning(tmp_path, {"train": DataLoader(Rows(8), 2)})
    try:
        while not (said := counted(running)).prepared:
            assert not said.idle
    finally:
        running.close()


def test_a_server_at_its_limit_of_open_files_refuses_peers_and_continues(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Rows(8), 2)) as running, ExitStack() as until_end:
        server, links = psutil.Process(running.processes[0][0].pid), list[FetcherLink]()
        most = server.num_fds() + 80
        server.rlimit(psutil.RLIMIT_NOFILE, (most, most))
        strangers = [until_end.enter_context(over_tcp(running)) for _ in range(100)]
        for stranger in strangers:  # so later peers are not the ones that have waited longest
            with suppress(ConnectionError):
                stranger.recv(1)
        full = f"fetcher 0 .* limit of open files .{most}, ulimit -n"
        with pytest.raises(ProtocolError, match=f"refused: {full}"):
            while len(links) < most:
                links.append(linked(running))
        while not isinstance(
            said := decode_fetcher_message(running.processes[0][1].recv_bytes()), Note
        ):
            pass
        assert re.match(full, said.text)
        assert links
        for link in links:
            link.close()
        for stranger in strangers:
            stranger.close()
        assert len(stream(running)) == 4


def test_a_server_at_its_limit_of_open_files_tells_a_single_rank_why(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Rows(8), 2)) as running:
        server = psutil.Process(running.processes[0][0].pid)
        most = server.num_fds() + 10
        server.rlimit(psutil.RLIMIT_NOFILE, (most, most))
        with pytest.raises(ProtocolError, match=f"limit of open files .{most}, ulimit -n"):
            linked(running)


class Gated(Dataset[torch.Tensor]):
    """Dataset of one large sample. Reading the sample waits until the file `gate` exists."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        while not self.gate.exists():
            time.sleep(0.01)
        return torch.ones(16 << 20, dtype=torch.uint8)


def test_memory_that_is_being_sent_is_not_lent(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Gated(tmp_path / "gate"), batch_size=None)) as running:
        links = [linked(running) for _ in range(2)]
        for link in links:
            link.send([(Requests(RequestKind.GET, 0, (0,)), b"")])
        (tmp_path / "gate").touch()
        while counted(running).sent < 2:
            pass  # neither rank has read, and the data sent to one are more than a pipe holds
        for link in links:
            message, _ = received(link)
            assert message.kind is ResponseKind.BATCH
            assert message.shared is None
            link.close()


class SlowToLoad(IterableDataset[torch.Tensor]):
    """Iterable-style dataset of rows of two numbers. Unpickling it waits for the file `gate`.

    The first number is random, and is the same in all rows of one iteration. The second counts.
    """

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.gate = state["gate"]
        while not self.gate.exists():
            time.sleep(0.01)

    def __iter__(self) -> Iterator[torch.Tensor]:
        token = random.SystemRandom().getrandbits(62)
        for number in range(20):
            yield torch.tensor([token, number])


def test_a_stream_is_read_once_if_ranks_request_batches_before_the_dataset_is_loaded(
    tmp_path: Path,
) -> None:
    """A rank can request batches early, because another fetcher has already loaded the dataset."""
    loader = DataLoader(SlowToLoad(tmp_path / "gate"), 2)
    with service(tmp_path, loader, workers=2) as running:
        ranks = [linked(running) for _ in range(2)]
        for first, rank in zip((1, 0), ranks, strict=True):
            slots = tuple(range(first, 10, 2))
            rank.send([(Requests(RequestKind.GET, 0, slots), b"")])
        linked(running).close()  # the server handles the requests before this connection
        (tmp_path / "gate").touch()
        rows = list[torch.Tensor]()
        for links, rank in enumerate(ranks, 1):
            while len(rows) < 5 * links:
                message, body = received(rank)
                size = len(body) // (1 + message.more)
                batches = [body[at : at + size] for at in range(0, len(body), size)]
                rows += [encode.decode(batch, message.head_bytes) for batch in batches]
            rank.close()
    assert sorted(torch.cat(rows)[:, 1].tolist()) == list(range(20))
    assert len({*torch.cat(rows)[:, 0].tolist()}) == 1


def test_a_connection_that_ends_releases_the_responses_it_has_not_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = WorkerHandle(0, 1, ours, is_suspect=False)
        connection = RankConnection(ours)
        reply = Reply(7, ResponseKind.BATCH, 1, body_bytes=64, offset=4096)
        connection.respond(LoaderRequest(RequestKind.GET, 0, 0), PreparedResponse(reply, worker))
        assert worker.frees == []
        connection.release_responses()
        assert worker.frees == [4096]
