"""The agent as a member of a Dask cluster: what it answers to, and how it joins and leaves.

Dask gives membership, TLS and the stream. Runs do not come as Dask tasks but as calls of the
keeper, which alone knows whether all hosts of a run are there (docs/decisions.md).
"""

import asyncio
import contextlib
import functools
import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from distributed import Security, Worker
from distributed.comm import get_address_host

from taas_magic.data.entries import Entry
from taas_magic.provision import probe
from taas_magic.remote import guard, interface
from taas_magic.remote.clock import use_steady_clock
from taas_magic.remote.devices import count_gpus
from taas_magic.remote.fetch_share import FetchShare
from taas_magic.remote.head import Handler, Head
from taas_magic.remote.host_run import HostRun
from taas_magic.remote.lease import Lease, end_agent
from taas_magic.remote.spec import HostSpec, Place
from taas_magic.remote.topics import (
    AGENT,
    ASK_STORE,
    CALL_AGAIN,
    CALL_END,
    CALL_END_FETCH,
    CALL_FACTS,
    CALL_FETCH,
    CALL_HELLO,
    CALL_PLACE,
    CALL_START,
    CALL_STOP,
    share_id,
)
from taas_magic.travel.ask import Ask


class AgentWorker(Worker):
    """The agent; one a host. It takes no Dask tasks.

    Args:
        place: This host.
        lease: Its lease.
    """

    def __init__(self, *args: Any, place: Place, lease: Lease, **kwargs: Any) -> None:
        said = {AGENT: lambda agent: True}
        super().__init__(
            *args,
            nthreads=1,
            memory_limit=0,
            host=place.address,
            startup_information=said,
            **kwargs,
        )
        self._place = place
        self._runs: dict[str, HostRun] = {}
        self._shares: dict[str, tuple[FetchShare, threading.Thread]] = {}
        calls: dict[str, Handler] = {
            CALL_HELLO: self.hello,
            CALL_FACTS: self.facts,
            CALL_START: self.start_run,
            CALL_AGAIN: self.start_again,
            CALL_STOP: self.stop_run,
            CALL_END: self.end_run,
            CALL_FETCH: self.start_fetch,
            CALL_END_FETCH: self.end_fetch,
            CALL_PLACE: self.place_fetcher,
        }
        self.head = Head(self, lease, calls)

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Opens no port for Dask's web pages: they would ask nobody for a key."""

    async def hello(self) -> dict[str, Any]:
        """Who this host is, what holds its ranks off the store, and its GPUs."""
        return {
            "host": self._place.host,
            "address": self._place.address,
            "means": guard.strongest().value,
            "gpus": count_gpus(),
        }

    async def facts(self, **asked: Any) -> dict[str, Any]:
        """What this host is like, as `provision.probe` answers it, for this agent's own Python."""
        return await asyncio.to_thread(probe.main, **asked)

    async def start_run(self, spec: dict[str, Any]) -> dict[str, int]:
        """Starts this host's share of a run, in a thread of its own.

        Args:
            spec: A `HostSpec` as plain values.

        Returns:
            `port`: on the run's first host, where its ranks meet.
        """
        parsed = HostSpec.from_json(spec)
        run_id = parsed.plan.run_id
        emit = functools.partial(self.head.emit, run_id)
        ask = self._asking(run_id)
        run = await asyncio.to_thread(HostRun, parsed, self._place, emit, self._is_alone, ask)
        self._runs[run_id] = run
        thread = threading.Thread(target=self._carry_out, args=(run_id, run), name=f"run-{run_id}")
        thread.start()
        return {"port": run.port}

    async def start_again(self, run_id: str, spec: dict[str, Any]) -> dict[str, int]:
        """Ends this host's ranks of a run and starts those of its next attempt.

        Returns:
            As `start_run`.

        Raises:
            KeyError: The run has ended here.
        """
        return {"port": await asyncio.to_thread(self._runs[run_id].again, HostSpec.from_json(spec))}

    async def stop_run(self, run_id: str, how: str) -> None:
        """Interrupts or kills a run; one that is not here has ended already."""
        if run_id in self._runs:
            self._runs[run_id].stop(how)

    async def end_run(self, run_id: str) -> None:
        """Ends a run that has settled on all hosts."""
        if run_id in self._runs:
            self._runs[run_id].end()

    async def start_fetch(self, spec: dict[str, Any]) -> None:
        """Starts this host's fetchers of a run, in a thread of their own.

        Args:
            spec: A `HostSpec` as plain values; its `host_rank` counts the fetchers' hosts.
        """
        parsed = HostSpec.from_json(spec)
        run_id = share_id(parsed.plan.run_id)
        emit = functools.partial(self.head.emit, run_id)
        ask = self._asking(run_id)
        share = FetchShare(parsed, self._place, emit, self._is_alone, ask)
        thread = threading.Thread(target=self._fetch, args=(run_id, share), name=f"run-{run_id}")
        self._shares[run_id] = share, thread
        thread.start()

    async def end_fetch(self, run_id: str) -> None:
        """Ends fetchers; returns when nothing of them is left here."""
        if run_id in self._shares:
            share, thread = self._shares[run_id]
            share.stop()
            await asyncio.to_thread(thread.join)

    async def place_fetcher(self, run_id: str, number: int, entry: Entry) -> None:
        """Tells a run's ranks on this host where a fetcher listens."""
        if run_id in self._runs:
            self._runs[run_id].place(number, entry)

    def _fetch(self, run_id: str, share: FetchShare) -> None:
        try:
            share.run()
        finally:
            del self._shares[run_id]

    def _carry_out(self, run_id: str, run: HostRun) -> None:
        try:
            run.run()
        finally:
            del self._runs[run_id]

    def _asking(self, run_id: str) -> Ask:
        """How a run, or its fetchers, ask for files that this host does not share."""

        def ask(what: str, **arguments: Any) -> Any:
            words = {"run_id": run_id, "address": self.address, "what": what}
            return self.head.ask(ASK_STORE, **words, arguments=arguments)

        return ask

    def _is_alone(self) -> bool:
        return len(self._runs) + len(self._shares) == 1


async def serve(settings: Mapping[str, Any], warm: Callable[[], None]) -> None:
    """Joins the pool when this host is warm; returns when the pool has closed or lost it.

    Args:
        settings: `scheduler` (address), `security` (keyword arguments of dask's Security), `name`
            (as the engine knows the host), `host_name` (as the user does), `interface` (of the
            ranks; "" finds it), `is_foreign` (another machine than the notebook's: the default),
            `local_directory`, `lease_s`.
        warm: Blocks until ranks can start.
    """
    logging.getLogger("distributed").setLevel(logging.WARNING)
    use_steady_clock()
    place = _find_place(settings)
    guard.strongest()  # found while the forkserver imports
    warm()
    gc.collect()
    gc.freeze()  # what was imported never goes, so collections after runs need not look at it
    lease_s = settings["lease_s"]
    lease = Lease(lease_s, functools.partial(end_agent, lease_s))
    agent = AgentWorker(
        settings["scheduler"],
        place=place,
        lease=lease,
        name=settings["name"],
        security=Security(**settings["security"]),
        local_directory=settings["local_directory"],
        death_timeout=30,
    )
    async with agent:
        lease.start()
        beating = asyncio.ensure_future(agent.head.beat())
        await agent.finished()
        beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beating


def _find_place(settings: Mapping[str, Any]) -> Place:
    scheduler = get_address_host(settings["scheduler"])
    address = interface.choose(settings.get("interface", ""), os.environ, scheduler)
    host = settings.get("host_name") or socket.gethostname()
    is_foreign = settings.get("is_foreign", True)
    return Place(host, address, interface.name_of(address), is_foreign, tuple(sys.path))
