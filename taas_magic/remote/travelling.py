"""A run's project store on a host that does not share it: a mirror.

It is brought up to date before the ranks start, and what they write goes back while they run.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from taas_magic.remote.spec import HostSpec
from taas_magic.store import StoreRule, is_below
from taas_magic.travel.ask import Ask
from taas_magic.travel.inbound import bring_in
from taas_magic.travel.manifest import Manifest
from taas_magic.travel.mirror import take
from taas_magic.travel.names import shown
from taas_magic.travel.news import News
from taas_magic.travel.outbound import Outbound

_NAMED_AT_MOST = 5


def is_shared(spec: HostSpec, ask: Ask) -> bool:
    """Whether this host sees the very folder that is the run's store."""
    store = spec.origin.store
    return spec.plan.store is None or store is None or store.is_here(lambda: ask("token"))


class Travelling:
    """A store that is not on this host, and its mirror here.

    Args:
        spec: The run's share of this host, as the notebook's machine has it.
        ask: Asks the desk of the run.
        note: Tells the user something, once.

    Raises:
        StoreError: It cannot be copied to this host.
    """

    def __init__(self, spec: HostSpec, ask: Ask, note: Callable[[str], None]) -> None:
        assert spec.plan.store is not None and spec.origin.store is not None
        self._rule = spec.plan.store
        self._mirror = take(self._rule.path, spec.origin.store.kernel)
        self._ask, self._note = ask, note
        self._outbound: Outbound | None = None
        self._news: News | None = None
        self._written: dict[str, int] = {}
        self._refused: dict[str, str] = {}
        try:
            _say_what_stays(bring_in(self._mirror, ask, fresh=spec.attempt > 0), note)
            self._follow(spec)
        except BaseException:
            self._mirror.close()
            raise

    def local(self, spec: HostSpec) -> HostSpec:
        """The same share with this host's paths."""
        rule = self._rule
        here = StoreRule(
            self._mirror.path, rule.writes, tuple(map(self._place, rule.shared)), rule.limit_bytes
        )
        origin = dataclasses.replace(
            spec.origin,
            cwd=self._place(spec.origin.cwd),
            sys_path=tuple(map(self._place, spec.origin.sys_path)),
        )
        return dataclasses.replace(
            spec, plan=dataclasses.replace(spec.plan, store=here), origin=origin
        )

    def send_rest(self) -> None:
        """Sends what is left to be sent; called when the ranks of an attempt are gone."""
        if self._news is not None:
            self._news.finish()
        if self._outbound is not None:
            self._outbound.finish()
            written, refused = self._outbound.written, self._refused | self._outbound.refused
            self._written |= written
            self._refused = {path: why for path, why in refused.items() if path not in written}
        self._news = self._outbound = None

    def again(self, spec: HostSpec) -> None:
        """Makes ready for the next attempt, in which rank 0 may be on another host.

        The mirror becomes what the store is now, so that every rank finds the same last checkpoint;
        where rank 0 was and will be, it is so already, and has what the store could not take.

        Raises:
            StoreError: The store cannot be copied to this host any more.
        """
        had_rank_0 = self._has_rank_0
        self.send_rest()
        if not (had_rank_0 and spec.share.first_rank == 0):
            bring_in(self._mirror, self._ask, fresh=True)
        self._follow(spec)

    def finish(self) -> dict[str, Any]:
        """Gives the mirror free, when all has been sent.

        Returns:
            What a receipt says of files that travelled: fields of a `receipt` event.
        """
        self.send_rest()
        self._mirror.close()
        shared = self._shared()
        refused = sorted(self._refused.items())
        return {
            "written": [
                {"path": path, "bytes": size}
                for path, size in sorted(self._written.items())
                if not any(is_below(path, folder) for folder in shared)
            ],
            "not_sent": [{"path": shown(path), "why": why} for path, why in refused],
        }

    def _follow(self, spec: HostSpec) -> None:
        self._has_rank_0 = spec.share.first_rank == 0
        if self._has_rank_0 or self._rule.shared:
            shared = None if self._has_rank_0 else self._shared()
            self._outbound = Outbound(self._mirror, self._ask, self._note, shared)
            self._outbound.start()
        if len(spec.plan.hosts) > 1:
            self._news = News(self._mirror, self._ask, self._note)
            self._news.start()

    def _shared(self) -> list[str]:
        """The folders that every rank may write, relative to the store."""
        return [os.path.relpath(folder, self._rule.path) for folder in self._rule.shared]

    def _place(self, path: str) -> str:
        """Where a path of the notebook's machine is on this one, if it is in the store."""
        if not is_below(path, self._rule.path):
            return path
        return os.path.normpath(
            os.path.join(self._mirror.path, os.path.relpath(path, self._rule.path))
        )


def _say_what_stays(manifest: Manifest, note: Callable[[str], None]) -> None:
    if manifest.skipped:
        named = [f"{path} ({why})" for path, why in list(manifest.skipped.items())[:_NAMED_AT_MOST]]
        more = len(manifest.skipped) - len(named)
        more_text = f" and {more:,} more" if more else ""
        note(f"not taken along from the project store: {', '.join(named)}{more_text}")
