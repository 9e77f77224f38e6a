"""A run's fetchers on one host: what each is told, started, listened to, ended.

Lives in the agent, in a thread of its own (`host_run.HostShare`). It may be on a host that runs no
rank, and it begins before the ranks do; the plan says which fetchers lie here.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from taas_magic import messages
from taas_magic.data import service
from taas_magic.errors import TaasError
from taas_magic.host import forkserver, stacks
from taas_magic.host.host_run import POLL_S, HostShare
from taas_magic.host.spec import FetcherSpec, ProcessSpec
from taas_magic.host.system import RUN_TOKEN, signal_name
from taas_magic.messages import (
    FetcherEnded,
    FetcherFailed,
    FetcherStand,
    FetcherStarted,
    LoaderPlace,
    LoaderPlaces,
    RunStacks,
)
from taas_magic.plan import Prefill
from taas_magic.store import guard

FETCHER = "taas_magic.host.fetcher.fetcher_main"
_EXIT_S = 0.5
_END_S = 5.0
"""How long fetchers may take to end; a stopped one never does by itself."""

_ENDLESS = 1 << 62


def workers_fill(prefill: Prefill | None) -> tuple[int, int]:
    """Return how many batches and bytes all workers prepare before any rank asks, at the least."""
    if prefill is None:
        return 0, 0
    if prefill.unit == "bytes":
        return 0, prefill.amount
    return (prefill.amount if prefill.unit == "batches" else _ENDLESS), 0


@dataclass
class _Running:
    """A fetcher that was started."""

    spec: FetcherSpec
    process: Any
    is_up: bool = False
    why: str = ""
    said_writes: bool = False


class HostFetchers(HostShare):
    """The fetchers of one run on this host."""

    leaves = "fetchers left"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._running: dict[Connection, _Running] = {}

    def stacks(self) -> RunStacks:
        """See `HostShare.stacks`: those of each fetcher and of its workers."""
        found = []
        for one in list(self._running.values()):
            assert one.spec.stacks is not None
            sight = stacks.of_fetcher(one.process.pid, one.spec.stacks)
            found.append(sight.stand(FetcherStand, fetcher=one.spec.plan.number))
        return RunStacks(fetchers=found)

    def _work(self) -> None:
        """Start the fetchers, and turn what they say into events until all have ended."""
        for spec in self._specs():
            control, theirs = forkserver.pipe()
            process = forkserver.start(FETCHER, spec, theirs)
            theirs.close()
            self._running[control] = _Running(spec, process)
        until: float | None = None
        while self._running and (until is None or time.monotonic() < until):
            if self.stopped_at is not None and until is None:
                until = time.monotonic() + _END_S
                for control in self._running:
                    with suppress(OSError):  # it has ended
                        control.send("end")
            for control in self._pass_on():
                self._end(control)
            for one in self._running.values():
                self._look_for_writes(one)

    def _specs(self) -> Iterator[FetcherSpec]:
        """Yield what each fetcher of this host is told."""
        share, folder, served = self.spec, self.folder, service.read(self.spec.folder.path)
        data = share.plan.data
        assert data is not None and served is not None
        groups = len(data.fetchers) // served.fetchers
        fill_batches, fill_bytes = (-(-it // groups) for it in workers_fill(share.plan.prefill))
        environ = {**share.origin.environ, RUN_TOKEN: share.share_id}
        for plan in data.on(share.host_rank):
            yield FetcherSpec(
                plan,
                served,
                share.folder.path,
                data.cores,
                host=self.host,
                # no port that nobody needs: ranks beside their fetchers come by Unix sockets
                listen=self.place.address if data.crosses else "",
                spill=folder / f"spill-{plan.number}" if served.settings.over == "spill" else None,
                fill_batches=fill_batches,
                fill_bytes=fill_bytes,
                setting=ProcessSpec(share, folder, environ, guard.strongest()),
                stacks=folder / f"{plan.number}.stacks",
            )

    def _fail(self, error: Exception) -> None:
        """Say that no fetcher will start here, so that no rank waits for one."""
        said = error if isinstance(error, TaasError) else f"{type(error).__name__}: {error}"
        why = f"host {self.host} has no fetchers: {said}"
        self.note(why)
        data = self.spec.plan.data
        assert data is not None
        for plan in data.on(self.spec.host_rank):
            entry = _failed_entry(plan.loaders, self.spec.plan.cpus, why)
            self.emit(FetcherEnded(number=plan.number, entry=entry))

    def _keep(self, error: Exception) -> None:
        self.note(f"the fetchers' logs stay on host {self.host}: {error}")

    def _held(self) -> Path:
        return self.spec.folder.path / "logs" / "fetcher-"

    def _ending(self) -> tuple[Callable[[], None], ...]:
        return tuple(partial(self._end, control) for control in self._running)

    def _pass_on(self) -> list[Connection]:
        """Pass on what fetchers say now, or soon; returns those that have ended."""
        ended = []
        ready = wait([*self._running, self.wakeup.fileno()], POLL_S)
        self.wakeup.clear()
        for control in ready:
            if not isinstance(control, Connection):
                continue
            try:
                said = messages.of_fetcher(control.recv_bytes())
            except (EOFError, OSError):
                ended.append(control)
                continue
            one = self._running[control]
            one.is_up = one.is_up or isinstance(said, FetcherStarted)
            if isinstance(said, FetcherFailed):
                one.why = said.why
            else:
                self.emit(said)
        return ended

    def _look_for_writes(self, one: _Running) -> None:
        """Say once what a fetcher wrote to the project store, which kept it out."""
        kept_out = self.folder / str(one.spec.plan.number) / "store"
        if one.said_writes or not kept_out.exists():
            return
        if names := sorted(os.listdir(kept_out)):
            one.said_writes = True
            self.note(f"not saved (fetchers do not write the project store): {names[0]}")

    def _end(self, control: Connection) -> None:
        one = self._running.pop(control)
        control.close()
        one.process.join(_EXIT_S)
        one.process.kill()
        one.process.join()
        ended = FetcherEnded(number=one.spec.plan.number)
        if self.stopped_at is None:
            text = self._how_one_ended(one)
            self.note(text)
            if not one.is_up:
                fetchers = one.spec.service.fetchers
                ended.entry = _failed_entry(one.spec.plan.loaders, fetchers, text)
        forkserver.forget(one.process)
        self.emit(ended)

    def _how_one_ended(self, one: _Running) -> str:
        code = one.process.exitcode
        how = one.why or (f"killed by {signal_name(code)}" if code < 0 else f"exit code {code}")
        log = f"logs/fetcher-{one.spec.plan.number}.log"
        return f"{one.spec.who} ended: {how} (see {log} of the run)"


def _failed_entry(loaders: Iterable[str], fetchers: int, why: str) -> LoaderPlaces:
    return {name: LoaderPlace(fetchers=fetchers, failed=why) for name in loaders}
