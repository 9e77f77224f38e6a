"""What hosts cost: how long each is had and used, and giving back those that nobody uses.

Lives in the pool's process, on its event loop.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from taas_magic.engines.member import Member
from taas_magic.engines.members import Members

LOOK_S = 1.0
"""How often hosts are looked at; times of use are known to so many seconds."""


@dataclass
class _Use:
    """What is known of one host.

    Attributes:
        gpus: Its CUDA devices.
        had_s: How long it is had.
        used_s: How long it had runs.
        idle_since: Since when it has none, by the clock; None while it has.
    """

    gpus: int = 0
    had_s: float = 0.0
    used_s: float = 0.0
    idle_since: float | None = None


class Upkeep:
    """Counts the hosts of a pool, and gives idle ones back.

    Args:
        members: The pool's hosts.
        idle_timeout_s: After how long an idle host is given back; None keeps it.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        members: Members,
        idle_timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members, self._idle_timeout_s = members, idle_timeout_s
        self._clock = clock
        self._looked = clock()
        self._uses: dict[str, _Use] = {}
        self._gone: list[_Use] = []

    async def watch(self) -> None:
        """Looks at the hosts until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self.look():
                await self._members.release(self._is_in_use)

    def look(self) -> bool:
        """Counts the time since the last look; says whether a host is to be given back."""
        now = self._clock()
        passed_s, self._looked = now - self._looked, now
        members = self._members.all()
        for address in self._uses.keys() - {member.address for member in members}:
            self._gone.append(self._uses.pop(address))
        for member in members:
            use = self._uses.setdefault(member.address, _Use(member.gpus))
            _count(member, use, passed_s, now)
        return not all(self._is_in_use(member) for member in members)

    def host(self, member: Member) -> dict[str, Any]:
        """What `%taas pools` says of a host: `had_s`, `idle_s` (None in use), `gpu_hours`."""
        use = self._uses.get(member.address, _Use(member.gpus))
        idle_s = None if use.idle_since is None else self._clock() - use.idle_since
        return {"had_s": use.had_s, "idle_s": idle_s, "gpu_hours": use.gpus * use.had_s / 3600}

    def pool(self) -> dict[str, float]:
        """`gpu_hours` of all hosts since the pool began, and those of runs: `used_gpu_hours`."""
        uses = [*self._gone, *self._uses.values()]
        return {
            "gpu_hours": sum(use.gpus * use.had_s for use in uses) / 3600,
            "used_gpu_hours": sum(use.gpus * use.used_s for use in uses) / 3600,
        }

    def _is_in_use(self, member: Member) -> bool:
        """Whether a host stays: it runs something, or has not been idle for long enough."""
        use = self._uses.get(member.address)
        if member.runs or use is None or use.idle_since is None or self._idle_timeout_s is None:
            return True
        return self._clock() - max(use.idle_since, member.taken_at) < self._idle_timeout_s


def _count(member: Member, use: _Use, passed_s: float, now: float) -> None:
    use.had_s += passed_s
    if member.runs:
        use.used_s += passed_s
        use.idle_since = None
    elif use.idle_since is None:
        use.idle_since = now
