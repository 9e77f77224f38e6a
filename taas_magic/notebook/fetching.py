"""A run's fetchers as the kernel holds them: begun before its ranks, ended after them.

They may be in another pool than the ranks. What they say is passed on to the ranks' pool, which has
the run's journal and tells the ranks' hosts where the fetchers listen.
"""

import functools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from taas_magic.errors import PoolError
from taas_magic.host.spec import HostSpec, share_id
from taas_magic.messages import Event, Note, encode, pack
from taas_magic.notebook.interrupts import Background, Interrupts, Tell
from taas_magic.pool.client import Pool, Wait


class Fetching:
    """The fetchers of a run.

    Args:
        pool: The pool whose hosts they are on.
        spec: A `HostSpec` of the run, for that pool.
        listen: Called with all that they say before `pass_on`, in any thread.
        waits: Whether to wait for the pool's hosts here; else it is done for the ranks.
    """

    def __init__(
        self, pool: Pool, spec: HostSpec, listen: Callable[[Event], None], waits: bool
    ) -> None:
        self._pool, self._spec, self._listen, self._waits = pool, spec, listen, waits
        self._run_id = spec.plan.run_id
        self._share_id = share_id(self._run_id)
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._relay: threading.Thread | None = None
        self._closing = False
        self._closed = threading.Event()
        self._wait = Wait()
        self._beginning = Background(self._begin)

    def wait(self, interrupts: Interrupts, say: Callable[[str], None]) -> None:
        """Returns when the fetchers have their hosts.

        Args:
            interrupts: The user's.
            say: Called with what is to be known of hosts that are awaited.

        Raises:
            PoolError: They could not be had.
            KeyboardInterrupt: The user did not want to wait.
        """
        self._beginning.wait(interrupts, say)

    def say(self, event: Event) -> None:
        """Takes what a fetcher said, or what is said of them."""
        self._listen(event)
        self._events.put(event)

    def said(self) -> list[Event]:
        """What was said since this was asked last."""
        said = []
        while not self._events.empty():
            if (event := self._events.get()) is not None:
                said.append(event)
        return said

    def pass_on(self, pool: Pool) -> None:
        """Passes on all that is said from now on to the pool that runs the ranks."""
        self._listen = lambda event: None
        self._relay = threading.Thread(
            target=self._pass_on, args=(pool,), name="taas-relay", daemon=True
        )
        self._relay.start()

    def close(self, interrupts: Interrupts) -> None:
        """Ends the fetchers; where they are still waited for, as soon as they are there.

        At the user's second interrupt they are left to end by themselves.
        """
        self._closing = True
        with suppress(KeyboardInterrupt):
            interrupts.attend(self._close, patience=2)

    def _close(self) -> None:
        self._end()
        self._closed.set()
        self._events.put(None)
        if self._relay is not None:
            self._relay.join()

    def _begin(self, tell: Tell) -> None:
        data = self._spec.plan.data
        if self._waits and data is not None:
            self._pool.open(data.pool_hosts, tell, self._wait)
        else:
            self._pool.connect()
        if not self._closing:
            listen = functools.partial(self._say_and_tell, tell)
            self._pool.start("taas_fetch", self._share_id, listen, spec=pack(self._spec))
        if self._closing:
            self._end()

    def _say_and_tell(self, tell: Tell, event: Event) -> None:
        """Tells also the waiting user what is noted: the run is not shown before it starts."""
        if isinstance(event, Note):
            tell([event.text])
        self.say(event)

    def _end(self) -> None:
        with suppress(PoolError):  # with its pool, they are gone
            if self._pool.is_ready:
                self._pool.give_up(self._wait)
                self._pool.forget(self._share_id)
                self._pool.halt(self._share_id, "kill")

    def _pass_on(self, pool: Pool) -> None:
        while not self._closed.is_set() and (event := self._events.get()) is not None:
            try:
                said = [encode(each) for each in (event, *self.said())]
                pool.call("taas_relay", run_id=self._run_id, events=said)
            except PoolError:
                return  # the run is lost, and says so itself


@contextmanager
def fetchers(
    pool: Pool | None,
    spec: HostSpec,
    listen: Callable[[Event], None],
    waits: bool,
    interrupts: Interrupts,
) -> Iterator[Fetching | None]:
    """A run's fetchers for the time of the block, coming up meanwhile.

    Args:
        pool: The pool whose hosts they are on; None: the run has none.
        spec: A `HostSpec` of the run.
        listen: As for `Fetching`.
        waits: As for `Fetching`.
        interrupts: The user's.
    """
    if pool is None:
        yield None
        return
    fetching = Fetching(pool, spec, listen, waits)
    try:
        yield fetching
    finally:
        fetching.close(interrupts)
