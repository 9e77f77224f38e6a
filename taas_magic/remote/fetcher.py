"""A fetcher: the parent of the lanes that run a run's registered loaders on one host.

Started by the host's agent, before the ranks exist. It tells the agent where its lanes listen and
how they stand, starts lanes again that died, and ends with the agent or when it is told to.
"""

import multiprocessing
import os
import shutil
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from taas_magic.data.entries import Entry, write_entry
from taas_magic.data.lane_spec import LaneSpec
from taas_magic.data.lanes import Lanes
from taas_magic.remote.fetcher_spec import Fetched, FetcherSpec
from taas_magic.remote.process import die_with_parent

REPORT_S = 0.5
"""How often a fetcher says how its lanes stand."""

_MAX_MENDS = 100


class Fetcher:
    """The lanes of all loaders on one host."""

    def __init__(self, spec: FetcherSpec) -> None:
        self._spec = spec
        self._mends, self._began = 0, time.monotonic()
        self._has_warned = False
        self._lanes = max(1, sum(loader.num_workers or spec.cores for loader in spec.loaders))
        self._budget_bytes = spec.buffer_bytes // self._lanes
        self.lanes = {loader.name: self._start(loader) for loader in spec.loaders}

    def entry(self) -> Entry:
        """Where the lanes listen, for `FolderDirectory`s here and on the ranks' hosts."""
        return {
            name: {
                "lanes": self._spec.fetchers * len(lanes.addresses),
                "addresses": {str(number): list(at) for number, at in lanes.addresses.items()},
            }
            for name, lanes in self.lanes.items()
        }

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
        """What the lanes counted, for each loader (`Lanes.stats`), and what they may hold."""
        up_s = time.monotonic() - self._began
        return {
            name: {
                **lanes.stats(),
                "budget_bytes": len(lanes.addresses) * self._budget_bytes,
                "up_s": up_s,
            }
            for name, lanes in self.lanes.items()
        }

    def about(self) -> dict[str, Any]:
        """What an agent wants to know of it once."""
        lanes = {name: len(lanes.addresses) for name, lanes in self.lanes.items()}
        cores = len(os.sched_getaffinity(0))
        return {
            "number": self._spec.number,
            "pid": os.getpid(),
            "cores": cores,
            "lanes": lanes,
            "entry": self.entry(),
        }

    def warnings(self) -> list[str]:
        """What the user should know; each is said once."""
        spill = self._spec.spill
        if spill is None or self._has_warned:
            return []
        if not any(stats["spill_refused"] for stats in self.stats().values()):
            return []
        self._has_warned = True
        free_mb = shutil.disk_usage(spill).free / 1e6
        return [
            f"fetcher {self._spec.number} on host {self._spec.host}: the disk at {spill} takes "
            f"no more batches ({free_mb:,.0f} MB free): lanes wait for the ranks instead; TMPDIR "
            "names another disk, spill in taas.toml's [data] bounds what is written"
        ]

    def close(self) -> None:
        """End all lanes."""
        for lanes in self.lanes.values():
            lanes.close()
        if self._spec.spill is not None:
            shutil.rmtree(self._spec.spill, ignore_errors=True)

    def _start(self, loader: Fetched) -> Lanes:
        spec, payload = self._spec, loader.payload.read_bytes()
        count = loader.num_workers or spec.cores
        all_lanes = spec.fetchers * self._lanes
        place = spec.loaders.index(loader)
        specs = [
            LaneSpec(
                payload,
                loader.name,
                loader.seed,
                spec.key,
                fetcher=spec.number,
                lane=lane,
                number=spec.index * count + lane,
                lanes=spec.fetchers * count,
                buffer_bytes=self._budget_bytes,
                spill=spec.spill / f"{place}-{lane}" if spec.spill is not None else None,
                spill_bytes=spec.spill_bytes // self._lanes,
                fill_batches=-(-spec.fill_batches // all_lanes),
                fill_bytes=-(-spec.fill_bytes // all_lanes),
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
    file = write_entry(spec.folder, spec.number, fetcher.entry())
    try:
        yield fetcher
    finally:
        file.unlink(missing_ok=True)
        fetcher.close()


def fetcher_main(spec: FetcherSpec, control: Connection) -> None:
    """A fetcher's process, started by the agent.

    Says `{"kind": "fetcher", …}` once it listens, `{"kind": "fetched", "loaders": stats}` every
    `REPORT_S`, `{"kind": "note", "text": …}` when it had to mend a lane, and `{"kind":
    "fetcher_failed", "why": …}` when it could not go on. Ends when `control` is
    closed or anything comes over it.

    Args:
        spec: What to do.
        control: A duplex pipe to the agent.
    """
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    with suppress(BrokenPipeError):  # nobody listens any more: this is the end
        try:
            if spec.setting is not None:
                spec.setting.take()
            with running(spec) as fetcher:
                _report(spec.number, fetcher, control)
        except BrokenPipeError:
            raise
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"
            control.send({"kind": "fetcher_failed", "number": spec.number, "why": why})


def _report(number: int, fetcher: Fetcher, control: Connection) -> None:
    """Says how a fetcher stands, and mends it, until it is to end."""
    control.send({"kind": "fetcher", **fetcher.about()})
    reported = time.monotonic()
    while fetcher.wait(control, REPORT_S):
        for sentence in (*fetcher.mend(), *fetcher.warnings()):
            control.send({"kind": "note", "text": sentence})
        if time.monotonic() - reported >= REPORT_S:
            reported = time.monotonic()
            control.send(fetched(number, fetcher))
    control.send(fetched(number, fetcher))


def fetched(number: int, fetcher: Fetcher) -> dict[str, Any]:
    """How a fetcher's lanes stand."""
    return {"kind": "fetched", "number": number, "loaders": fetcher.stats()}


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
