"""What a run needs on a host and leaves there: its folder and the project store, shared or not.

What ranks and fetchers read comes before they start; what they leave (results, logs, ledgers)
goes back when they have ended. Parts are so small that they never fill a slow link for long: the
run's beats go the same way.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import structs

from taas_magic import probe
from taas_magic.capture.reducers import copy_environ
from taas_magic.host.spec import HostSpec, Place
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import (
    Event,
    Note,
    StoreMessage,
    StoreReceipt,
    UnsentFile,
    WrittenFile,
)
from taas_magic.store.manifest import Ask, Manifest, Pace
from taas_magic.store.mirror import News, bring_in, take
from taas_magic.store.outbound import Outbound
from taas_magic.store.receipt import Ledger
from taas_magic.store.rule import StoreRule, is_below
from taas_magic.store.tree import shown

LIST, READ, WRITE = "run_list", "run_read", "run_write"

LOG_BYTES = 64 << 20
"""Of a log, what goes back at most: its end."""


class RunFiles:
    """The files of one run on this host.

    Args:
        spec: The run's share of this host, as the notebook's machine has it.
        ask: Asks the pool's process for what is not on this host.
        cache: Where this host keeps folders of runs; None is the usual place.
    """

    def __init__(self, spec: HostSpec, ask: Ask, cache: Path | None = None) -> None:
        self._ask, self._pace = ask, Pace()
        self._folder = spec.folder
        self.is_shared = _is_same(spec)
        if not self.is_shared:
            self._folder = RunFolder((cache or runs_cache()) / spec.plan.run_id)
            shutil.rmtree(self._folder.path, ignore_errors=True)
            (self._folder.path / "logs").mkdir(mode=0o700, parents=True)
            self._folder.path.chmod(0o700)

    def local(self, spec: HostSpec) -> HostSpec:
        """The share with this host's paths; also that of a later attempt."""
        return structs.replace(spec, run_dir=str(self._folder.path), home_dir=spec.run_dir)

    def bring_in(self, is_wanted: Callable[[], bool]) -> bool:
        """Brings what ranks and fetchers read.

        Args:
            is_wanted: Asked between parts whether the run goes on.

        Returns:
            Whether all is there.

        Raises:
            PoolError: The pool's process does not answer.
        """
        if self.is_shared:
            return True
        sizes: dict[str, int] = self._ask(LIST)
        return all(self._bring(name, size, is_wanted) for name, size in sizes.items())

    def send_back(self) -> None:
        """Sends what the run left here; called when nothing of it runs any more.

        Raises:
            PoolError: The pool's process does not answer.
        """
        if self.is_shared:
            return
        base = self._folder.path
        folders = (base / "logs", base / "data" / "ledger", self._folder.results)
        found = [path for path in folders if path.exists()]
        files = [file for folder in found for file in sorted(folder.iterdir()) if file.is_file()]
        for path in files:
            if not path.name.startswith("."):  # what a rank that was ended had not finished
                self._send(path, path.relative_to(base).as_posix())

    def close(self) -> None:
        """Removes what is only this host's."""
        if not self.is_shared:
            shutil.rmtree(self._folder.path, ignore_errors=True)

    def _bring(self, name: str, size: int, is_wanted: Callable[[], bool]) -> bool:
        path = self._folder.path / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            while (offset := file.tell()) < size and is_wanted():
                part = {"name": name, "offset": offset, "size": self._pace.size}
                file.write(self._pace.ask(self._ask, READ, **part))
            return offset >= size

    def _send(self, path: Path, name: str) -> None:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            left_out = max(0, size - LOG_BYTES) if name.startswith("logs/") else 0
            file.seek(left_out)
            sent = 0
            data = (
                f"… {left_out:,} bytes before this are left out …\n".encode() if left_out else b""
            )
            while True:
                data += file.read(self._pace.size)
                last = file.tell() >= size
                part = {"name": name, "offset": sent, "data": data, "last": last}
                self._pace.ask(self._ask, WRITE, **part)
                if last:
                    return
                sent, data = sent + len(data), b""


def runs_cache() -> Path:
    """Where a host keeps folders of runs that it does not share: `~/.cache/taas/runs`."""
    return Path(probe.cache_folder()) / "runs"


def _is_same(spec: HostSpec) -> bool:
    """Whether the run's folder here is the notebook's: the plan in it has this run's random id."""
    try:
        return spec.folder.plan().run_id == spec.plan.run_id
    except (OSError, ValueError):
        return False


_NAMED_AT_MOST = 5


class Travelling:
    """A store that is not on this host, and its mirror here.

    Args:
        spec: A share of the run on this host, as the notebook's machine has it.
        ask: Asks the desk of the run.
        note: Tells the user something, once.
        sends: Folders, relative to the store, whose changes here go back; None is all of it.

    Raises:
        StoreError: It cannot be copied to this host.
    """

    def __init__(
        self, spec: HostSpec, ask: Ask, note: Callable[[str], None], sends: Sequence[str] | None
    ) -> None:
        assert spec.plan.store is not None and spec.origin.store is not None
        self._rule, self._ask, self._note = spec.plan.store, ask, note
        self._written: dict[str, int] = {}
        self._refused: dict[str, str] = {}
        self._has_others = spec.n_hosts > 1
        self._news: News | None = None
        self._outbound: Outbound | None = None
        self._mirror = take(self._rule.path, spec.origin.store.kernel)
        try:
            _say_what_stays(bring_in(self._mirror, ask, fresh=spec.attempt > 0), note)
            self._follow(sends)
        except BaseException:
            self._mirror.close()
            raise

    def local(self, spec: HostSpec) -> HostSpec:
        """The same share with this host's paths."""
        rule = self._rule
        shared = tuple(map(self._place, rule.shared))
        here = StoreRule(self._mirror.path, rule.writes, shared, rule.limit_bytes)
        cwd, sys_path = self._place(spec.origin.cwd), tuple(map(self._place, spec.origin.sys_path))
        environ = {**spec.origin.environ, **copy_environ(rule.path, self._mirror.path)}
        return structs.replace(
            spec,
            plan=structs.replace(spec.plan, store=here),
            origin=structs.replace(spec.origin, cwd=cwd, sys_path=sys_path, environ=environ),
        )

    def again(self, sends: Sequence[str] | None) -> None:
        """Makes ready for the next attempt, in which rank 0 may be on another host.

        The mirror becomes what the store is now, so that every rank finds the same last checkpoint;
        where rank 0 was and will be, it is so already, and has what the store could not take.

        Raises:
            StoreError: The store cannot be copied to this host any more.
        """
        is_newest = self._sends is None and sends is None
        self._send_rest()
        if not is_newest:
            bring_in(self._mirror, self._ask, fresh=True)
        self._follow(sends)

    def finish(self) -> tuple[list[WrittenFile], list[UnsentFile]]:
        """Sends what is left to be sent; called when nothing of the run writes here any more.

        Returns:
            The files that travelled, and those that did not get into the store.
        """
        self._send_rest()
        self._mirror.close()
        written, refused = sorted(self._written.items()), sorted(self._refused.items())
        return (
            [WrittenFile(path, size) for path, size in written if not self._is_shared(path)],
            [UnsentFile(shown(path), why) for path, why in refused],
        )

    def _follow(self, sends: Sequence[str] | None) -> None:
        self._sends = sends
        if sends is None or sends:
            self._outbound = Outbound(self._mirror, self._ask, self._note, sends)
            self._outbound.start()
        if self._has_others:
            self._news = News(self._mirror, self._ask, self._note)
            self._news.start()

    def _send_rest(self) -> None:
        if self._news is not None:
            self._news.finish()
        if self._outbound is not None:
            self._outbound.finish()
            written, refused = self._outbound.written, self._refused | self._outbound.refused
            self._written |= written
            self._refused = {path: why for path, why in refused.items() if path not in written}
        self._outbound = self._news = None

    def _is_shared(self, path: str) -> bool:
        place = os.path.join(self._rule.path, path)
        return any(is_below(place, folder) for folder in self._rule.shared)

    def _place(self, path: str) -> str:
        """Where a path of the notebook's machine is on this one, if it is in the store."""
        if not is_below(path, self._rule.path):
            return path
        below = os.path.relpath(path, self._rule.path)
        return os.path.normpath(os.path.join(self._mirror.path, below))


def _say_what_stays(manifest: Manifest, note: Callable[[str], None]) -> None:
    if manifest.skipped:
        named = [f"{path} ({why})" for path, why in list(manifest.skipped.items())[:_NAMED_AT_MOST]]
        more = len(manifest.skipped) - len(named)
        more_text = f" and {more:,} more" if more else ""
        note(f"not taken along from the project store: {', '.join(named)}{more_text}")


class Project:
    """The folder itself where this host shares it with the notebook, else a copy that travels.

    Args:
        spec: The run's share of this host.
        ask: Asks for what is not on this host.
        note: Tells the user something, once.

    Raises:
        StoreError: The store cannot be copied to this host.
    """

    def __init__(self, spec: HostSpec, ask: Ask, note: Callable[[str], None]) -> None:
        self._travelling = None
        if not is_shared(spec, ask):
            self._travelling = Travelling(spec, ask, note, _sends(spec))
        rule = self.local(spec).plan.store
        self._ledger = Ledger(rule.path, rule.shared) if rule and not spec.reads_only else None
        self._has_rank_0 = spec.share.first_rank == 0

    def local(self, spec: HostSpec) -> HostSpec:
        """The share with this host's paths; also that of a later attempt."""
        return self._travelling.local(spec) if self._travelling else spec

    def again(self, spec: HostSpec) -> None:
        """Makes ready for the run's next attempt; called when the ranks of the last are gone.

        Raises:
            StoreError: The store cannot be copied to this host any more.
        """
        self._has_rank_0 = self._has_rank_0 or spec.share.first_rank == 0
        if self._travelling is not None:
            self._travelling.again(_sends(spec))

    def take(self, rank: int, message: StoreMessage) -> None:
        """Takes down what a rank says of the store."""
        if self._ledger is not None:
            self._ledger.take(rank, message)

    def close(self) -> StoreReceipt | None:
        """Called when the ranks are gone; returns when all that they wrote is where it belongs.

        Returns:
            What they did to the store; None where the run has none.
        """
        if self._ledger is None:
            if self._travelling is not None:
                self._travelling.finish()
            return None
        if self._travelling is None:
            return self._ledger.close(has_rank_0=self._has_rank_0)
        receipt = self._ledger.close(has_rank_0=False)
        receipt.written, receipt.not_sent = self._travelling.finish()
        return receipt


def is_shared(spec: HostSpec, ask: Ask) -> bool:
    """Whether this host sees the very folder that is the run's store."""
    store = spec.origin.store
    return spec.plan.store is None or store is None or store.is_here(lambda: ask("token"))


def _sends(spec: HostSpec) -> Sequence[str] | None:
    """What ranks may write here: all of the store (None), or its shared folders, relative to it."""
    rule = spec.plan.store
    if spec.reads_only:
        return []
    if rule is None or spec.share.first_rank == 0:
        return None
    return [os.path.relpath(folder, rule.path) for folder in rule.shared]


class HostFiles:
    """The files of a run on this host.

    Args:
        spec: The run's share of this host, as the notebook's machine has it.
        place: This host.
        ask: Asks the pool's process for what is not on this host.
        emit: Sends an event to the pool's process.
    """

    def __init__(
        self, spec: HostSpec, place: Place, ask: Ask, emit: Callable[[Event], None]
    ) -> None:
        self._spec, self._place, self._ask, self._emit = spec, place, ask, emit
        self._folder: RunFiles | None = None
        self._project: Project | None = None

    def bring_in(self, is_wanted: Callable[[], bool]) -> bool:
        """Returns when all is here that ranks need; False if the run was ended meanwhile.

        Raises:
            PoolError: The pool's process does not answer.
            StoreError: The store cannot be copied to this host.
        """
        self._folder = RunFiles(self._spec, self._ask)
        if not self._folder.bring_in(is_wanted):
            return False
        self._project = Project(self._spec, self._ask, self._note)
        return True

    def local(self, spec: HostSpec) -> HostSpec:
        """A share of the run with this host's paths; called when all is here."""
        assert self._folder is not None and self._project is not None
        if self._place.is_foreign:
            origin = spec.origin.on_another_machine(os.environ, self._place.sys_path)
            spec = structs.replace(spec, origin=origin)
        return self._project.local(self._folder.local(spec))

    def again(self, spec: HostSpec) -> None:
        """Makes ready for the next attempt; called when the ranks of the last are gone.

        Raises:
            StoreError: The store cannot be copied to this host any more.
        """
        assert self._project is not None
        self._project.again(spec)

    def take(self, rank: int, message: StoreMessage) -> None:
        """Takes down what a rank says of the store."""
        if self._project is not None:
            self._project.take(rank, message)

    def bring_home(self) -> None:
        """Sends what the run left here, and its receipt; called when nothing of it runs any more.

        Raises:
            PoolError: The pool's process does not answer.
        """
        try:
            receipt = self._project.close() if self._project is not None else None
            if receipt is not None:
                receipt.host = self._place.host
                self._emit(receipt)
            if self._folder is not None:
                self._folder.send_back()
        finally:
            if self._folder is not None:
                self._folder.close()

    def _note(self, text: str) -> None:
        self._emit(Note(host=self._place.host, text=text))


class FetchFiles:
    """The files of a run's fetchers on this host. Nothing is written to the project here.

    Args:
        spec: The run's, as the notebook's machine has it.
        place: This host.
        ask: Asks the pool's process for what is not on this host.
        note: Tells the user something, once.
    """

    def __init__(self, spec: HostSpec, place: Place, ask: Ask, note: Callable[[str], None]) -> None:
        self._spec, self._place, self._ask, self._note = spec, place, ask, note
        self._folder: RunFiles | None = None
        self._project: Travelling | None = None

    def bring_in(self, is_wanted: Callable[[], bool]) -> HostSpec | None:
        """The run's spec with this host's paths, when all is here; None: it has ended meanwhile.

        Raises:
            PoolError: The pool's process does not answer.
            StoreError: The project cannot be copied to this host.
        """
        # ranks of the run may be on this host, too, and have its folder in the usual place
        cache = runs_cache().with_name("fetching")
        self._folder = RunFiles(self._spec, self._ask, cache)
        if not self._folder.bring_in(is_wanted):
            return None
        spec = self._folder.local(self._spec)
        if self._place.is_foreign:
            origin = spec.origin.on_another_machine(os.environ, self._place.sys_path)
            spec = structs.replace(spec, origin=origin)
        if is_shared(self._spec, self._ask):
            return spec
        self._project = Travelling(self._spec, self._ask, self._note, sends=[])
        return self._project.local(spec)

    def close(self) -> None:
        """Sends the fetchers' logs back; called when nothing of them runs any more.

        Raises:
            PoolError: The pool's process does not answer.
        """
        if self._project is not None:
            self._project.finish()
        if self._folder is not None:
            try:
                self._folder.send_back()
            finally:
                self._folder.close()
