"""A run's fetchers on one host: started, listened to, ended.

Lives in the agent, in a thread of its own. It may be on a host that runs no rank, and it begins
before the ranks do; `data_plan` says which fetchers lie here.
"""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from taas_magic.data.entries import write_entry
from taas_magic.errors import PoolError, StoreError
from taas_magic.journal import Event, event
from taas_magic.remote import fetcher
from taas_magic.remote.fetch_files import FetchFiles
from taas_magic.remote.fetcher_spec import FetcherSpec
from taas_magic.remote.fetchers_here import specs_of
from taas_magic.remote.process import end_all, signal_name
from taas_magic.remote.spec import HostSpec, Place
from taas_magic.remote.sweep import leftovers
from taas_magic.remote.topics import share_id
from taas_magic.travel.ask import Ask

_POLL_S = 0.25
_EXIT_S = 0.5
_END_S = 5.0
"""How long fetchers may take to end; a stopped one never does by itself."""


@dataclass
class _Running:
    """A fetcher that was started."""

    spec: FetcherSpec
    process: Any
    is_up: bool = False
    why: str = ""
    said_writes: bool = False


class FetchShare:
    """The fetchers of one run on this host.

    Args:
        spec: The run's; its `host_rank` is the place among the hosts of the plan's data part.
        place: This host.
        emit: Sends an event to the pool's process; any thread may call it.
        alone: Says whether nothing else is on this host.
        ask: Asks the pool's process for files that this host does not share.
    """

    def __init__(
        self,
        spec: HostSpec,
        place: Place,
        emit: Callable[[Event], None],
        alone: Callable[[], bool],
        ask: Ask,
    ) -> None:
        self._spec, self._host, self._address = spec, place.host, place.address
        self._emit, self._alone = emit, alone
        self._files = FetchFiles(spec, place, ask, self._note)
        self._running: dict[Connection, _Running] = {}
        self._stopped = threading.Event()

    def run(self) -> None:
        """Runs until `stop`, or until no fetcher is left, and emits `fetch_ended` then."""
        self._scratch = Path(tempfile.mkdtemp(prefix="taas-"))
        try:
            spec = self._files.bring_in(lambda: not self._stopped.is_set())
            if spec is not None:
                self._spec = spec
                self._run_fetchers()
        except (PoolError, StoreError) as error:
            self._fail(f"host {self._host} has no fetchers: {error}")
        finally:
            self._clean_up()
            self._emit(event("fetch_ended", self._host))

    def _run_fetchers(self) -> None:
        for spec in specs_of(self._spec, self._host, self._address, self._scratch):
            process, control = fetcher.start(spec)
            self._running[control] = _Running(spec, process)
        self._listen()

    def _fail(self, why: str) -> None:
        """Says that no fetcher will start here, so that no rank waits for one."""
        self._note(why)
        data = self._spec.plan.data
        assert data is not None
        for plan in data.on(self._spec.host_rank):
            entry = _failed_entry(plan.loaders, self._spec.plan.cpus, why)
            self._emit(event("fetcher_ended", self._host, number=plan.number, entry=entry))

    def _clean_up(self) -> None:
        for control in list(self._running):
            self._end(control)
        logs = self._spec.folder.path / "logs" / "fetcher-"
        end_all(leftovers(self._token, logs, self._alone()), grace_s=0)
        shutil.rmtree(self._scratch, ignore_errors=True)
        try:
            self._files.close()
        except PoolError as error:
            self._note(f"the fetchers' logs stay on host {self._host}: {error}")

    def stop(self) -> None:
        """Ends the fetchers; called by another thread."""
        self._stopped.set()

    @property
    def _token(self) -> str:
        return share_id(self._spec.plan.run_id)

    def _listen(self) -> None:
        """Turns what fetchers say into events, until all have ended or are to end."""
        while self._running and not self._stopped.is_set():
            for control in self._pass_on(self._running):
                self._end(control)
            for one in self._running.values():
                self._look_for_writes(one)
        left = dict(self._running)
        for control in left:
            _tell_to_end(control)
        until = time.monotonic() + _END_S
        while left and time.monotonic() < until:
            for control in self._pass_on(left):
                del left[control]

    def _pass_on(self, running: Iterable[Connection]) -> list[Connection]:
        """Passes on what fetchers say now, or soon; returns those that have ended."""
        ended = []
        for control in wait(list(running), _POLL_S):
            assert isinstance(control, Connection)
            try:
                said: dict[str, Any] = control.recv()
            except (EOFError, OSError):
                ended.append(control)
                continue
            one, kind = self._running[control], said.pop("kind")
            one.is_up = one.is_up or kind == "fetcher"
            if kind == "fetcher_failed":
                one.why = said["why"]
            else:
                self._emit(event(kind, self._host, **said))
        return ended

    def _look_for_writes(self, one: "_Running") -> None:
        """Says once what a fetcher wrote to the project store, which kept it out."""
        kept_out = self._scratch / str(one.spec.number) / "store"
        if one.said_writes or not kept_out.exists():
            return
        if names := sorted(os.listdir(kept_out)):
            one.said_writes = True
            text = f"fetchers do not write the project store: {names[0]!r} was kept out of it"
            self._note(text)

    def _end(self, control: Connection) -> None:
        one = self._running.pop(control)
        control.close()
        one.process.join(_EXIT_S)
        one.process.kill()
        one.process.join()
        number, entry = one.spec.number, dict[str, Any]()
        if not self._stopped.is_set():
            text = self._how_it_ended(one)
            self._note(text)
            if not one.is_up:
                loaders = [loader.name for loader in one.spec.loaders]
                entry = _failed_entry(loaders, one.spec.fetchers, text)
                write_entry(one.spec.folder, number, entry)
        self._emit(event("fetcher_ended", self._host, number=number, entry=entry))

    def _note(self, text: str) -> None:
        self._emit(event("note", self._host, text=text))

    def _how_it_ended(self, one: "_Running") -> str:
        code = one.process.exitcode
        how = one.why or (f"killed by {signal_name(code)}" if code < 0 else f"exit code {code}")
        log = f"logs/fetcher-{one.spec.number}.log"
        return f"fetcher {one.spec.number} on host {self._host} ended: {how} (see {log} of the run)"


def _tell_to_end(control: Connection) -> None:
    try:
        control.send("end")
    except OSError:
        return  # it has ended


def _failed_entry(loaders: Iterable[str], fetchers: int, why: str) -> dict[str, Any]:
    return {name: {"failed": why, "fetchers": fetchers} for name in loaders}
