"""A run's project store on a host that does not share it: a mirror.

It is brought up to date before the ranks start, and what they write goes back while they run.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
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
        return dataclasses.replace(
            spec,
            plan=dataclasses.replace(spec.plan, store=here),
            origin=dataclasses.replace(spec.origin, cwd=cwd, sys_path=sys_path),
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

    def finish(self) -> dict[str, Any]:
        """Sends what is left to be sent; called when nothing of the run writes here any more.

        Returns:
            What a receipt says of files that travelled: fields of a `receipt` event.
        """
        self._send_rest()
        self._mirror.close()
        written, refused = sorted(self._written.items()), sorted(self._refused.items())
        return {
            "written": [{"path": p, "bytes": n} for p, n in written if not self._is_shared(p)],
            "not_sent": [{"path": shown(path), "why": why} for path, why in refused],
        }

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
