"""A fetcher: the server that gives a run's ranks the batches of its registered loaders.

Started by the host's agent, before the ranks exist. It tells the agent where it listens and how it
stands, and ends with the agent or when it is told to.
"""

import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection

from taas_magic import messages, probe
from taas_magic.capture import payload
from taas_magic.capture.modules import claim_taas
from taas_magic.data.buffer import FetcherShare
from taas_magic.data.scheduler import ServedLoader
from taas_magic.data.server import Server, ServerSpec
from taas_magic.data.service import machine, write_entry
from taas_magic.data.worker import WorkerSpec
from taas_magic.host import stacks
from taas_magic.host.spec import Fetched, FetcherSpec, Setting
from taas_magic.host.system import die_with_parent
from taas_magic.messages import (
    Address,
    Event,
    FetcherFailed,
    FetcherReport,
    FetcherStarted,
    LoaderPlace,
    LoaderPlaces,
    Note,
)
from taas_magic.store.guard import hold

REPORT_S = 0.5
"""How often a fetcher says how it stands."""


class Fetcher:
    """The server of all loaders on one host, and what the agent wants to know of it."""

    def __init__(self, spec: FetcherSpec) -> None:
        self._spec = spec
        self._has_warned = False
        counts = {one.name: one.num_workers or spec.cores for one in spec.loaders}
        self._workers, self._of_all = counts, max(1, sum(counts.values()))
        loaders = {loader.name: self._served(loader) for loader in spec.loaders}
        self.server = Server(ServerSpec(spec.key, loaders, spec.listen, spec.tls))

    def entry(self) -> LoaderPlaces:
        """Return where it listens, for `FolderDirectory`s here and on the ranks' hosts."""
        spec, (host, port, unix) = self._spec, self.server.addresses
        address = Address(spec.number, host, port, unix, machine())
        return {
            name: LoaderPlace(
                fetchers=spec.fetchers,
                workers=spec.fetchers * count,
                addresses={spec.index: address},
            )
            for name, count in self._workers.items()
        }

    def about(self) -> FetcherStarted:
        """Return what an agent wants to know of it once."""
        return FetcherStarted(
            number=self._spec.number,
            pid=os.getpid(),
            cores=probe.cores(),
            workers=self._workers,
            entry=self.entry(),
        )

    def report(self) -> FetcherReport:
        """Return how it stands."""
        return FetcherReport(number=self._spec.number, loaders=self.server.stats())

    def notes(self) -> list[str]:
        """Return what the user should know; each is said once."""
        spill, said = self._spec.spill, self.server.warnings()
        if spill is None or self._has_warned:
            return said
        if not any(stats.spill_refused for stats in self.server.stats().values()):
            return said
        self._has_warned = True
        free_mb = shutil.disk_usage(spill).free / 1e6
        return [
            *said,
            f"fetcher {self._spec.number} on host {self._spec.host}: the disk at {spill} takes "
            f"no more batches ({free_mb:,.0f} MB free): workers wait for the ranks instead; TMPDIR "
            "names another disk, spill in taas.toml's [data] bounds what is written",
        ]

    def close(self) -> None:
        """End the server and its workers."""
        self.server.close()
        if self._spec.spill is not None:
            shutil.rmtree(self._spec.spill, ignore_errors=True)

    def _served(self, loader: Fetched) -> ServedLoader:
        spec, count = self._spec, self._workers[loader.name]
        host = spec.host or socket.gethostname()
        place = spec.loaders.index(loader)
        return ServedLoader(
            WorkerSpec(
                loader.payload.read_bytes(),
                loader.name,
                loader.seed,
                f"fetcher {spec.number} on host {host}",
                sums=bool(spec.listen) and spec.tls is None,
                spill=spec.spill / f"{place}" if spec.spill is not None else None,
                counts=spec.units is not None,
                context=loader.context or "fork",
            ),
            FetcherShare(spec.index, spec.fetchers, count, units=spec.units),
            spec.buffer_bytes * count // self._of_all,
            spill_bytes=spec.spill_bytes * count // self._of_all,
            fill_batches=-(-spec.fill_batches * count // (spec.fetchers * self._of_all)),
            fill_bytes=-(-spec.fill_bytes * count // (spec.fetchers * self._of_all)),
        )


def fetcher_main(spec: FetcherSpec, control: Connection) -> None:
    """Run a fetcher's process, started by the agent.

    Sends one of `messages.FetcherSays` once it listens, every `REPORT_S`, when a worker had to be
    started again, and when it could not go on. Ends when `control` is closed or anything comes
    over it.

    Args:
        control: A duplex pipe to the agent.
    """
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    claim_taas()
    if spec.stacks is not None:
        stacks.listen(spec.stacks)
    with suppress(BrokenPipeError):  # nobody listens any more: this is the end
        try:
            if spec.setting is not None:
                _take(spec.setting)
            fetcher = Fetcher(spec)
            file = write_entry(spec.folder, spec.number, fetcher.entry())
            try:
                _serve(fetcher, control)
            finally:
                file.unlink(missing_ok=True)
                fetcher.close()
        except BrokenPipeError:
            raise
        except Exception as error:
            traceback.print_exc()
            _say(control, FetcherFailed(f"{type(error).__name__}: {error}"))


def _take(setting: Setting) -> None:
    """Make a setting this process's, which is freshly forked and has one thread."""
    descriptor = os.open(setting.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.environ.clear()
    os.environ.update(setting.environ)
    os.chdir(setting.cwd)
    sys.path[:] = setting.sys_path
    if setting.store is not None:
        hold(
            setting.store,
            setting.who,
            means=setting.means,
            scratch=setting.scratch,
            run_folder=str(setting.payload.parent),
            note=lambda path: None,  # workers write, and children say nothing: the agent looks
        )
    payload.read(setting.payload).set_state()


def _serve(fetcher: Fetcher, control: Connection) -> None:
    """Serve, and say how the fetcher stands, until it is to end."""
    _say(control, fetcher.about())
    over: list[bool] = []
    fetcher.server.watch(control, lambda: over.append(True))
    reported = time.monotonic()
    while not over:
        fetcher.server.step(REPORT_S)
        if time.monotonic() - reported >= REPORT_S and _has_room(control):
            reported = time.monotonic()
            for sentence in fetcher.notes():
                _say(control, Note(text=sentence))
            _say(control, fetcher.report())
    if _has_room(control):
        _say(control, fetcher.report())


def _has_room(control: Connection) -> bool:
    """Return whether the agent hears: no rank is to wait because it does not."""
    return bool(select.select([], [control], [], 0)[1])


def _say(control: Connection, message: Event | FetcherFailed) -> None:
    control.send_bytes(messages.encode(message))
