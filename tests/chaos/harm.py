"""Random faults in a data service. A seed determines their kinds and their order."""

import contextlib
import hashlib
import itertools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch.utils.data import DataLoader

from taas_magic.data.service import Directory, Tls
from tests.data.data_proxy import Proxy
from tests.data.data_rig import Noise, Service, service
from tests.data.ledger import audit, missing

WORLD_SIZE = 2
REST_EVERY = 40
ROWS = 200
PAUSE_S = 0.05
"""Mean seconds between two faults."""


class Chaos:
    """A thread that injects a number of faults into a service.

    Args:
        seed: Seed of the kinds, the order and the victims of the faults. The exact moments also
            depend on the machine.
    """

    def __init__(self, running: Service, seed: int, faults: int) -> None:
        self._running, self._random = running, random.Random(seed)
        self._faults = faults
        self.done: list[str] = []
        self.proxy = Proxy(running.directory, self._harm)
        self._cuts = threading.Event()
        self._steps, self._news = 0, threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Chaos":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._news:
            self._faults = 0
            self._news.notify()
        self._thread.join()
        self.proxy.close()

    def stepped(self) -> None:
        """Record that each rank has received a further batch. Called by `train` after each step."""
        with self._news:
            self._steps += 1
            self._news.notify()

    def _run(self) -> None:
        while len(self.done) < self._faults:
            time.sleep(self._random.expovariate(1 / PAUSE_S))
            kind = self._random.choice(["kill worker", "stop worker", "cut", "kill fetcher"])
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                getattr(self, "_" + kind.replace(" ", "_"))()
                self.done.append(kind)
            self._wait_for_a_step()

    def _wait_for_a_step(self) -> None:
        """Wait until the ranks have received a batch.

        Without this wait, one batch might lose ten workers on a slow machine, and the service would
        give the batch up.
        """
        with self._news:
            before = self._steps
            self._news.wait_for(lambda: self._steps > before or not self._faults)

    def _parent(self) -> psutil.Process:
        """Return the process whose children are the workers of a random fetcher."""
        number = self._random.randrange(len(self._running.processes))
        return psutil.Process(self._running.processes[number][0].pid).children()[0]

    def _worker(self) -> psutil.Process:
        return self._random.choice(self._parent().children())

    def _kill_worker(self) -> None:
        self._worker().kill()

    def _stop_worker(self) -> None:
        worker = self._worker()
        worker.suspend()
        time.sleep(self._random.uniform(0.05, 0.3))
        worker.resume()

    def _kill_fetcher(self) -> None:
        number = self._random.randrange(len(self._running.processes))
        process, control = self._running.processes[number]
        process.kill()
        process.join()
        control.close()
        self._running.restart(number)

    def _cut(self) -> None:
        self._cuts.set()

    def _harm(self, number: int, data: bytes) -> bytes | None:
        if self._cuts.is_set():
            self._cuts.clear()
            return None
        return data


def train(
    running: Service,
    epochs: int,
    directory: Directory | Proxy,
    attempt: int = 0,
    rest_s: float = 0.0,
    stepped: Callable[[], None] = lambda: None,
) -> tuple[str, torch.Tensor]:
    """Iterate the loaders of all ranks in this process, and train on the batches.

    Args:
        running: The data service.
        epochs: Number of epochs.
        directory: Where the ranks find the fetchers' addresses.
        attempt: Number of the attempt, for the ledgers.
        rest_s: Mean seconds of a rest after every `REST_EVERY` steps; 0: no rests.
        stepped: Called after each step.

    Returns:
        A hash of all batches, and the weights.
    """
    torch.manual_seed(0)
    weights = torch.zeros(8)
    digest = hashlib.sha256()
    ledgers = [running.ledger(rank, attempt) for rank in range(WORLD_SIZE)]
    certificate = running.changes.get("tls")
    steps, rests = itertools.count(1), random.Random(attempt)
    remotes = [
        running.loader(
            rank=rank,
            world_size=WORLD_SIZE,
            directory=directory,
            tls=certificate.client_context if certificate else None,
            ledger=ledgers[rank],
            direct=rank == 0,
        )
        for rank in range(WORLD_SIZE)
    ]
    for _ in range(epochs):
        for rows in zip(*remotes, strict=True):
            stepped()
            if rest_s and not next(steps) % REST_EVERY:
                time.sleep(rests.expovariate(1 / rest_s))
            for features, indices in rows:
                digest.update(features.numpy().tobytes() + bytes(indices.tolist()))
                weights += 0.1 * (features.mean(0) - weights)
    for ledger in ledgers:
        ledger.close()
    return digest.hexdigest(), weights


def play(
    folder: Path,
    seed: int,
    faults: int,
    tls: Tls | None = None,
    rest_s: float = 0.0,
) -> list[str]:
    """Train without faults, then with faults, and compare. Return the faults.

    Args:
        folder: Folder for the service's files.
        seed: Seed of the faults.
        faults: Number of faults.
        tls: Certificate for the rank that is not on the fetchers' host; None: no TLS.
        rest_s: Mean seconds for which the ranks rest after every 40 steps; 0: no rests.

    Raises:
        AssertionError: A stream or the weights differ from those without faults, or the ledger is
            wrong.
    """
    loader = DataLoader(Noise(ROWS), 4, shuffle=True)
    done: list[str] = []
    attempt = 0
    with service(folder, loader, fetchers=2, workers=2, tls=tls) as running:
        digest, weights = train(running, 2, running.directory)
        while len(done) < faults:
            attempt += 1
            with Chaos(running, seed + attempt, faults - len(done)) as chaos:
                got = train(running, 2, chaos.proxy, attempt, rest_s, chaos.stepped)
            done += chaos.done
            assert got[0] == digest
            assert torch.equal(got[1], weights)
        lines = running.handed()
        assert audit(lines) == []
        for attempt in {line.attempt for line in lines}:
            for pass_number in range(2):
                one = [n for n in lines if (n.attempt, n.pass_number) == (attempt, pass_number)]
                assert missing(one, ROWS // 4) == []
    return done
