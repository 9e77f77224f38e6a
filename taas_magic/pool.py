"""A pool as a kernel sees it: attach to its process or start it, launch on it, listen to it.

Every method may be called from any thread of the kernel; the Dask client runs a loop of its own.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas_magic.config import PoolConfig
from taas_magic.engines.base import find_engine
from taas_magic.errors import PoolError, StoreError
from taas_magic.journal import Event
from taas_magic.plan import HostCapacity
from taas_magic.pool_process import PoolProcess
from taas_magic.provision.facts import Facts

if TYPE_CHECKING:
    from distributed import Client


class Pool:
    """One pool, for one kernel.

    Args:
        config: The pool's settings.
        project: The notebook's folder; kernels of other projects have pools of their own.
    """

    def __init__(self, config: PoolConfig, project: Path) -> None:
        self.config = config
        self._process = PoolProcess(config, project)
        self._opening = threading.Lock()
        self._client: Client | None = None
        self._given_up = self._is_retired = False
        self._listens_to: set[str] = set()

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def folder(self) -> Path:
        """The pool's private folder: its address and key, its lock, its log."""
        return self._process.folder

    def capacity(self) -> HostCapacity:
        """What one host offers; takes none."""
        return find_engine(self.config).capacity()

    @property
    def is_ready(self) -> bool:
        """Whether the pool's process answers."""
        return self._client is not None and self.is_alive()

    def is_alive(self) -> bool:
        """Whether the pool's process lives, whoever started it."""
        return self._process.is_alive()

    def has_hosts(self, count: int) -> bool:
        """Whether a launch on so many hosts would start at once."""
        return self.is_ready and len(self.status()["hosts"]) >= count

    def open(self, hosts: int = 1, on_wait: Callable[[list[str]], None] | None = None) -> None:
        """Returns when so many hosts are there and can start ranks at once; starts the pool first.

        Args:
            hosts: How many.
            on_wait: Called with what is known of hosts that are awaited, a line each, when that
                changes; in the thread of the Dask client.

        Raises:
            PoolError: It could not be started, or hosts could not be had.
        """
        from taas_magic.remote.topics import POOL_TOPIC

        self._given_up = False
        self.connect()
        if self._given_up:
            raise PoolError(f"pool {self.name!r}: nobody waits for its hosts any more")
        client = self._connected()
        if on_wait is not None:
            client.subscribe_topic(POOL_TOPIC, lambda pair: on_wait(list(pair[1]["awaited"])))
        try:
            answer = self.call("taas_ready", owner=client.id, hosts=hosts)
        finally:
            if on_wait is not None:
                client.unsubscribe_topic(POOL_TOPIC)
        if "error" in answer:
            raise PoolError(f"pool {self.name!r}: {answer['error']}")

    def give_up(self) -> None:
        """Waits for no host any more: `open`, in another thread, raises PoolError."""
        self._given_up = True
        if self._client is not None:
            self.call("taas_give_up", owner=self._client.id)

    def connect(self) -> None:
        """Returns when the pool's process answers; starts it if need be. It takes no host.

        Raises:
            PoolError: It could not be started; the message ends with the last lines of its log.
        """
        with self._opening:
            if self.is_ready:
                return
            self.close()
            self._process.begin()
            from distributed import Client, Security  # takes 0.8 s, while the process starts

            place = self._process.wait_for_place()
            self._client = Client(
                place["address"],
                security=Security(**place["security"]),
                set_as_default=False,
                timeout=self.config.start_timeout_s,
            )

    def launch(
        self, spec: Mapping[str, Any], on_event: Callable[[Event], None], said: list[Event]
    ) -> list[str]:
        """Starts a run; returns the names of its hosts.

        Args:
            spec: A `HostSpec` as plain values.
            on_event: Called with every event of the run, in the thread of the Dask client.
            said: What its fetchers have said before.

        Raises:
            PoolError: The hosts could not be had.
            StoreError: Another run writes to the project store.
        """
        answer = self.start(
            "taas_launch", spec["plan"]["run_id"], on_event, spec=dict(spec), said=said
        )
        if "store_error" in answer:
            raise StoreError(answer["store_error"])
        names: list[str] = answer["hosts"]
        return names

    def start(
        self, call: str, topic_id: str, on_event: Callable[[Event], None], **arguments: Any
    ) -> dict[str, Any]:
        """Has the keeper start something for this kernel, and listens to it.

        Raises:
            PoolError: It could not be started.
        """
        from taas_magic.remote.topics import topic

        client = self._connected()
        self._listens_to.add(topic_id)
        client.subscribe_topic(topic(topic_id), lambda pair: on_event(pair[1]))
        answer: dict[str, Any] = self.call(call, owner=client.id, **arguments)
        if "hosts" not in answer:
            self.forget(topic_id)
        if "error" in answer:
            raise PoolError(f"pool {self.name!r}: {answer['error']}")
        return answer

    def forget(self, run_id: str) -> None:
        """Stops listening to a run."""
        from taas_magic.remote.topics import topic

        self._listens_to.discard(run_id)
        if self._client is not None:
            self._client.unsubscribe_topic(topic(run_id))
        if self._is_retired:
            self.retire()

    def halt(self, run_id: str, how: str) -> None:
        """Interrupts (`interrupt`) or ends (`kill`) a run; does not wait for its end."""
        self.call("taas_halt", run_id=run_id, how=how)

    def status(self) -> dict[str, Any]:
        """The pool's hosts and what each does."""
        status: dict[str, Any] = self.call("taas_status")
        return status

    def facts(self, packages: Iterable[str], mark: str) -> list[tuple[Facts, str]]:
        """What the hosts that are up are like, and what holds their ranks off the store.

        Args:
            packages: Distributions whose versions are asked for.
            mark: A file in the project store.
        """
        said = self.call("taas_facts", packages=list(packages), mark=mark)
        return [(Facts.from_json(one["facts"]["host"], one["facts"]), one["means"]) for one in said]

    def down(self) -> None:
        """Ends the pool: its runs, its hosts, its process."""
        if self.is_alive():
            self.connect()
            self.call("taas_down")
        self.close()
        self._process.wait_for_end()

    def retire(self) -> None:
        """Leaves the pool, as soon as no run of this kernel is on it: its settings have changed."""
        self._is_retired = True
        if not self._listens_to:
            self.close()

    def is_over(self) -> bool:
        """Whether this kernel has left it, and waits for no process of it."""
        return self._client is None and self._process.is_over()

    def close(self) -> None:
        """Leaves the pool; its process decides what follows."""
        if self._client is not None:
            with _without_dasks_complaints():
                self._client.close(timeout=2)
            self._client = None
        self._process.forget_ended()

    def _connected(self) -> "Client":
        if self._client is None:
            raise PoolError(f"pool {self.name!r} is not open")
        return self._client

    def call(self, name: str, **arguments: Any) -> Any:
        """Calls the keeper.

        Raises:
            PoolError: It does not answer.
        """
        client = self._connected()
        try:
            return client.sync(getattr(client.scheduler, name), **arguments)
        except OSError as error:
            raise PoolError(f"pool {self.name!r} does not answer: {error}") from error


@contextmanager
def _without_dasks_complaints() -> Iterator[None]:
    """A client whose scheduler was killed logs its attempts to reconnect when it is closed."""
    logger = logging.getLogger("distributed.client")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
