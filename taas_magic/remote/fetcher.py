"""A fetcher: the parent of the lanes that run a run's registered loaders on one host.

Started by the host's agent, before the ranks exist. It tells the agent where its lanes listen and
how they stand, starts lanes again that died, and ends with the agent or when it is told to.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from taas_magic.data.lane_spec import LaneSpec
from taas_magic.data.lanes import Lanes, Tls
from taas_magic.remote.process import die_with_parent

REPORT_S = 0.5
"""How often a fetcher says how its lanes stand."""

_MAX_MENDS = 100


@dataclass(frozen=True)
class Fetched:
    """One registered loader, as a fetcher is told about it.

    Attributes:
        name: Its name.
        payload: File with the pickled loader.
        num_workers: Lanes; 0 is one for each of the fetcher's cores.
        context: multiprocessing's start method of the lanes, "" for the default.
        seed: The seed of its randomness.
    """

    name: str
    payload: Path
    num_workers: int = 0
    context: str = ""
    seed: int = 0


@dataclass(frozen=True)
class Setting:
    """What a fetcher takes over from the notebook, so that its loaders unpickle.

    Attributes:
        cwd: The notebook's folder.
        environ: The kernel's environment.
        sys_path: The kernel's import path.
        payload: The run's payload, which has the project's own modules.
        log: File for what the dataset's code prints.
    """

    cwd: str
    environ: dict[str, str]
    sys_path: tuple[str, ...]
    payload: Path
    log: Path

    def take(self) -> None:
        """Make it this process's."""
        from taas_magic.capture import modules, payload

        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.cwd)
        sys.path[:] = self.sys_path
        modules.install(payload.read(self.payload).modules)


@dataclass(frozen=True)
class FetcherSpec:
    """What a fetcher is to do.

    Attributes:
        number: Its number, from 0.
        fetchers: How many there are in the run.
        loaders: What it runs.
        key: The run's key.
        folder: Where it writes its addresses (`route.FolderDirectory`).
        cores: Processors that it may use.
        host: Its host's name, for messages.
        listen: Address to listen at for TCP; "" for this host's ranks only.
        buffer_bytes: How much prepared data may wait in memory, over all loaders and lanes.
        units: The bound of `--units`.
        tls: Certificate files; None for plain TCP.
        setting: What it takes over from the notebook; None: nothing.
    """

    number: int
    fetchers: int
    loaders: tuple[Fetched, ...]
    key: bytes
    folder: Path
    cores: int
    host: str = ""
    listen: str = "127.0.0.1"
    buffer_bytes: int = 1 << 30
    units: int | None = None
    tls: Tls | None = None
    setting: Setting | None = None


class Fetcher:
    """The lanes of all loaders on one host."""

    def __init__(self, spec: FetcherSpec) -> None:
        self._spec = spec
        self._mends = 0
        lanes = sum(loader.num_workers or spec.cores for loader in spec.loaders)
        self._budget_bytes = spec.buffer_bytes // max(1, lanes)
        self.lanes = {loader.name: self._start(loader) for loader in spec.loaders}

    def publish(self) -> Path:
        """Write where the lanes listen; a rank sees the whole file or none."""
        entry = {
            name: {
                "lanes": self._spec.fetchers * len(lanes.addresses),
                "addresses": {number: tuple(at) for number, at in lanes.addresses.items()},
            }
            for name, lanes in self.lanes.items()
        }
        self._spec.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = self._spec.folder / f"fetcher-{self._spec.number}.json"
        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps(entry))
        os.replace(draft, file)
        return file

    def wait(self, control: Connection | None, timeout_s: float) -> bool:
        """Wait until a lane dies or the agent speaks; returns False when this fetcher is to end."""
        sentinels = [sentinel for lanes in self.lanes.values() for sentinel in lanes.sentinels]
        ready = wait([*sentinels, *([control] if control else ())], timeout_s)
        return control is None or control not in ready

    def mend(self) -> list[str]:
        """Start dead lanes again; returns a sentence for each.

        Raises:
            RuntimeError: They die again and again.
        """
        said = [sentence for lanes in self.lanes.values() for sentence in lanes.mend()]
        self._mends += len(said)
        if self._mends > _MAX_MENDS:
            raise RuntimeError(f"{_MAX_MENDS} lanes died, at last: {said[-1]}")
        return said

    def stats(self) -> dict[str, dict[str, float]]:
        """What the lanes counted, for each loader (`server.STATS`)."""
        return {name: lanes.stats() for name, lanes in self.lanes.items()}

    def close(self) -> None:
        """End all lanes."""
        for lanes in self.lanes.values():
            lanes.close()

    def _start(self, loader: Fetched) -> Lanes:
        spec, payload = self._spec, loader.payload.read_bytes()
        count = loader.num_workers or spec.cores
        specs = [
            LaneSpec(
                payload,
                loader.name,
                loader.seed,
                spec.key,
                fetcher=spec.number,
                lane=lane,
                number=spec.number * count + lane,
                lanes=spec.fetchers * count,
                buffer_bytes=self._budget_bytes,
                units=spec.units,
                host=spec.host,
            )
            for lane in range(count)
        ]
        return Lanes(specs, spec.listen, spec.tls, loader.context)


@contextmanager
def running(spec: FetcherSpec) -> Iterator[Fetcher]:
    """A fetcher in this process, its addresses published, ended on leaving."""
    fetcher = Fetcher(spec)
    file = fetcher.publish()
    try:
        yield fetcher
    finally:
        file.unlink(missing_ok=True)
        fetcher.close()


def fetcher_main(spec: FetcherSpec, control: Connection) -> None:
    """A fetcher's process, started by the agent.

    Says `{"kind": "fetcher", …}` once it listens, `{"kind": "fetched", "loaders": stats}` every
    `REPORT_S`, `{"kind": "note", "text": …}` when it had to mend a lane. Ends when `control` is
    closed or anything comes over it.

    Args:
        spec: What to do.
        control: A duplex pipe to the agent.
    """
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    if spec.setting is not None:
        spec.setting.take()
    with running(spec) as fetcher, suppress(BrokenPipeError):
        control.send({"kind": "fetcher", "number": spec.number, "pid": os.getpid()})
        reported = time.monotonic()
        while fetcher.wait(control, REPORT_S):
            for sentence in fetcher.mend():
                control.send({"kind": "note", "text": sentence})
            if time.monotonic() - reported >= REPORT_S:
                reported = time.monotonic()
                control.send({"kind": "fetched", "number": spec.number, "loaders": fetcher.stats()})


def start(spec: FetcherSpec, context: Any = None) -> tuple[Any, Connection]:
    """Start a fetcher's process.

    Args:
        spec: What it is to do.
        context: A multiprocessing context (the agent's warm forkserver).

    Returns:
        The process and this end of its pipe; closing that ends it.
    """
    context = context or multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=fetcher_main, args=(spec, theirs), name="taas-fetcher")
    process.start()
    theirs.close()
    return process, ours
