"""Asks the hosts of a pool what they are like; refuses those that cannot carry a run."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

from taas_magic.engines.member import Member
from taas_magic.engines.members import Members
from taas_magic.preflight.judge import Needs, refuse
from taas_magic.provision.facts import Facts, this_kernel
from taas_magic.remote.topics import CALL_FACTS


async def require(members: Members, hosts: Iterable[Member], modules: Sequence[str]) -> None:
    """Returns when all hosts have Python and torch as here, and the modules; asks each once.

    Args:
        members: The pool's hosts.
        hosts: Those of a run.
        modules: Top-level modules that the run's cell imports.

    Raises:
        PoolError: Names each host that is not fit, what is wrong there and what to do.
    """
    new = [host for host in hosts if host.has is None or not host.has.issuperset(modules)]
    if not new:
        return
    facts = await ask_all(members, new, modules=list(modules), names=False)
    refuse(facts, this_kernel(), Needs())
    for host in new:
        host.has = (host.has or set()).union(modules)


async def ask_all(members: Members, hosts: Iterable[Member], **asked: Any) -> list[Facts]:
    """What hosts are like, all asked at the same time.

    Args:
        members: The pool's hosts.
        hosts: Those to ask.
        asked: Keyword arguments of `provision.probe.main`.

    Raises:
        PoolError: One is gone.
    """
    return list(await asyncio.gather(*(_ask(members, host, asked) for host in hosts)))


async def _ask(members: Members, host: Member, asked: dict[str, Any]) -> Facts:
    begin = time.time()
    values = await members.call(host.address, CALL_FACTS, **asked)
    return Facts.from_json(host.name, values, values["clock"] - (begin + time.time()) / 2)
