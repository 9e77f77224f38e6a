"""A fetcher: the process that serves batches of registered loaders to a run's ranks.

The host's agent starts the fetcher before the ranks start. The fetcher ends when the agent sends
any message, or when the agent has ended.
"""

import os
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection

from taas_magic import messages, probe
from taas_magic.capture import payload
from taas_magic.capture.modules import claim_taas
from taas_magic.data import service
from taas_magic.data.server import Server
from taas_magic.data.service import LoaderSettings
from taas_magic.data.sharding import FetcherPart
from taas_magic.data.worker import ServedLoader
from taas_magic.host import tracebacks
from taas_magic.host.spec import FetcherSpec, ProcessSpec
from taas_magic.messages import (
    Address,
    AddressesByLoader,
    Event,
    FetcherFailed,
    FetcherReport,
    FetcherStarted,
    LoaderAddresses,
    Note,
)
from taas_magic.store.guard import apply_rule

REPORT_GAP_S = 0.5
"""Seconds between two reports of a fetcher's statistics to the agent."""


class Fetcher:
    """The main object of a fetcher's process: serves batches to ranks, and reports to the agent."""

    def __init__(self, spec: FetcherSpec) -> None:
        self._spec, served = spec, spec.service
        mine = [loader for loader in served.loaders if loader.name in spec.plan.loaders]
        self._workers = {loader.name: loader.num_workers or spec.cores for loader in mine}
        self._of_all = max(1, sum(self._workers.values()))
        loaders = [self._served(loader) for loader in mine]
        self.server = Server(served.key, loaders, spec.listen, served.tls)

    def entry(self) -> AddressesByLoader:
        """Return the addresses at which this fetcher serves its loaders, by the loader's name.

        The value for each loader also says how many fetchers serve the loader, and how many workers
        these fetchers have in total.
        """
        plan, fetchers = self._spec.plan, self._spec.service.fetchers
        address = Address(plan.number, *self.server.addresses, service.machine_id())
        return {
            name: LoaderAddresses(
                fetchers=fetchers, workers=fetchers * count, addresses={plan.index: address}
            )
            for name, count in self._workers.items()
        }

    def serve(self, control: Connection) -> None:
        """Serve batches to ranks, until the agent sends a message or ends.

        First sends `FetcherStarted` to the agent, with this fetcher's addresses. Every
        `REPORT_GAP_S` seconds, sends the agent the server's warnings, as notes, and the statistics.
        At the end, sends the statistics once more. While the pipe to the agent is full, sends
        neither warnings nor statistics.

        Args:
            control: Pipe to and from the agent.

        Raises:
            BrokenPipeError: The agent had ended when this method sent a message.
        """
        number = self._spec.plan.number
        started = FetcherStarted(number=number, pid=os.getpid(), cores=probe.cores())
        started.workers, started.entry = self._workers, self.entry()
        _send_to_agent(control, started)
        over: list[bool] = []
        self.server.watch(control, lambda: over.append(True))
        reported = time.monotonic()
        while not over:
            self.server.step(REPORT_GAP_S)
            if time.monotonic() - reported >= REPORT_GAP_S and _has_room(control):
                reported = time.monotonic()
                for sentence in self.server.warnings():
                    _send_to_agent(control, Note(text=sentence))
                _send_to_agent(control, FetcherReport(number=number, loaders=self.server.stats()))
        if _has_room(control):
            _send_to_agent(control, FetcherReport(number=number, loaders=self.server.stats()))

    def _served(self, loader: LoaderSettings) -> ServedLoader:
        """Return the settings with which this fetcher's `Server` serves a loader.

        Read the pickled loader from the run folder. If batches travel over TCP without TLS, they
        get checksums.

        Each fetcher divides its memory among its loaders, in proportion to their numbers of
        workers. The amount of data for `--prefill` is first divided equally among the fetchers.
        Then each fetcher divides its part among its loaders, in the same proportion.
        """
        spec, served, count = self._spec, self._spec.service, self._workers[loader.name]
        parts = served.fetchers * self._of_all
        return ServedLoader(
            service.payload_file(spec.run_dir, loader.name).read_bytes(),
            loader.name,
            loader.seed,
            spec.who,
            FetcherPart(
                spec.plan.index,
                served.fetchers,
                count,
                units=served.units,
                keep_first=loader.keep_first,
                ranks=loader.ranks,
            ),
            served.settings.buffer_bytes * count // self._of_all,
            context=loader.context or "fork",
            sums=bool(spec.listen) and served.tls is None,
            fill_batches=-(-spec.fill_batches * count // parts),
            fill_bytes=-(-spec.fill_bytes * count // parts),
        )


def fetcher_main(spec: FetcherSpec, control: Connection) -> None:
    """Run a fetcher in this new process, until the agent sends a message or ends.

    The steps are:

    1. Ignore SIGINT, and start a new POSIX session (setsid).
    2. If `spec.stacks` is a path: install a handler of `link.STACK_SIGNAL`, the signal by which the
       agent requests a stack. The handler appends this process's stack to the file `spec.stacks`.
    3. Apply the run's settings.
    4. Create the server, and serve batches to ranks. While the fetcher serves, a file in the run
       folder contains the fetcher's addresses.

    If an exception occurs, this function prints the traceback to the fetcher's log, sends
    `FetcherFailed` to the agent, and returns. If the agent has ended, this function returns without
    a message.

    Args:
        control: Pipe by which this process sends events and `FetcherFailed` to the agent. A message
            from the agent, with any content, ends the fetcher.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    claim_taas()
    if spec.stacks is not None:
        tracebacks.write_stack_on_signal(spec.stacks)
    with suppress(BrokenPipeError):  # the agent has ended, so the fetcher ends too
        try:
            if spec.setting is not None:
                _apply_settings(spec.setting, spec.plan.number)
            fetcher = Fetcher(spec)
            folder = service.addresses_folder(spec.run_dir)
            file = service.write_entry(folder, spec.plan.number, fetcher.entry())
            try:
                fetcher.serve(control)
            finally:
                file.unlink(missing_ok=True)
                fetcher.server.close()
        except BrokenPipeError:
            raise
        except Exception as error:
            traceback.print_exc()
            _send_to_agent(control, FetcherFailed(f"{type(error).__name__}: {error}"))


def _apply_settings(setting: ProcessSpec, number: int) -> None:
    """Redirect the output to the fetcher's log file, and apply the run's settings to this process.

    The settings are applied in this order:

    1. the environment, the current folder and `sys.path`, all of which are replaced
    2. the run's rule for the project store, if any: in the store, this process can write only to
       the folders of `--shared-writes`
    3. the project's modules, which become importable, and the notebook's process state

    Call this function before any thread starts.

    Args:
        setting: The settings, which are the same for all fetchers of this host.
        number: Number of this fetcher, for the name of its log file and its scratch folder.
    """
    share = setting.share
    log = share.folder.path / "logs" / f"fetcher-{number}.log"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.environ.clear()
    os.environ.update(setting.environ)
    os.chdir(share.cwd)
    sys.path[:] = share.sys_path
    if share.store is not None:
        apply_rule(
            share.store,
            f"fetcher {number}",
            protection=setting.protection,
            scratch=setting.folder / str(number),
            run_folders=[share.run_dir, str(setting.folder)],
            # Only the workers run code that may write, and `on_write` is not called in child
            # processes. So the agent checks the scratch folder instead, and sends the note.
            on_write=lambda path, is_moved: None,
            rehearsal=setting.folder / "rehearsal" if share.plan.rehearse else None,
        )
    payload.read(service.settings_file(share.folder.path)).load_settings().apply()


def _has_room(control: Connection) -> bool:
    """Return whether the fetcher can send a message to the agent without blocking."""
    return bool(select.select([], [control], [], 0)[1])


def _send_to_agent(control: Connection, message: Event | FetcherFailed) -> None:
    control.send_bytes(messages.encode(message))
