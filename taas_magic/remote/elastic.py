"""torch's elastic agent and rendezvous, as a run uses them.

Starting, ending, and environment variables are torch's own (torchrun's). Ours are the verdict,
which sees more than exit codes; the store's socket, which is bound to one address; and that the
keeper, which sees all hosts, says when all ranks start again.
"""

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from taas_magic.errors import PoolError
from taas_magic.remote.rank import rank_main
from taas_magic.remote.spec import HostSpec

STORE_TIMEOUT_S = 300.0
REACH_TIMEOUT_S = 30.0
"""How long a host may take to reach the first one."""


class HostRendezvous(RendezvousHandler):
    """Hosts meet at a TCPStore on the first one; the keeper tells the others where it is.

    torch's static rendezvous does the same, but its store listens on all addresses and needs a port
    that is known to be free; here the first host binds one address and the system chooses the port.
    Every attempt has a store of its own: its ranks use it too, and would find in an old one where
    the ranks of the last attempt listened.

    Args:
        spec: This host's share of the run.
        store: From `serve_store`; None on the other hosts.
    """

    def __init__(self, spec: HostSpec, store: TCPStore | None) -> None:
        self._spec, self._store = spec, store
        self._waiting = 0

    def get_backend(self) -> str:
        return "taas"

    @property
    def use_agent_store(self) -> bool:
        """Ranks connect to this store too, so no second port is needed."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Enters the attempt.

        Raises:
            PoolError: The first host cannot be reached.
        """
        self._waiting = 0
        spec = self._spec
        store = self._store or _reach_store(spec.master_addr, spec.master_port)
        place = RendezvousStoreInfo(spec.master_addr, store.port)
        return RendezvousInfo(store, spec.host_rank, spec.n_hosts, place)

    def call_again(self, spec: HostSpec, store: TCPStore | None) -> None:
        """Makes torch's agent end its ranks and enter the next attempt."""
        self._spec, self._store = spec, store
        self._waiting = 1

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing waits at this rendezvous: the hosts of a run are fixed."""

    def num_nodes_waiting(self) -> int:
        """Hosts that wait for the others to come: what torch's agent asks between its polls."""
        return self._waiting

    def get_run_id(self) -> str:
        return self._spec.plan.run_id

    def shutdown(self) -> bool:
        return True


def serve_store(spec: HostSpec) -> TCPStore | None:
    """On the first host of a run, the store of an attempt; the system chooses its port."""
    if spec.host_rank:
        return None
    address = spec.master_addr
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=1024)
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _reach_store(address: str, port: int) -> TCPStore:
    try:
        store = TCPStore(
            address,
            port,
            is_master=False,
            timeout=timedelta(seconds=REACH_TIMEOUT_S),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise PoolError(
            f"the run's first host cannot be reached from here at {address}, port {port}: ranks of "
            f"several hosts must reach each other; name the network that they share with "
            f"`interface` in taas.toml ({error})"
        ) from error
    store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
    return store


class RunAgent(LocalElasticAgent):
    """torch's agent with our verdict in its poll loop, and ranks where the plan has them.

    Args:
        spec: This host's share of the run.
        rank_spec: What `rank_main` is called with.
        rendezvous: Where the hosts meet.
        before_start: Called with the attempt's number before its ranks start.
        after_start: Called with the attempt's number and {rank: pid}.
        judge: Blocks for a short while; returns HEALTHY while the run goes on here, else how it
            ended.
    """

    def __init__(
        self,
        spec: HostSpec,
        rank_spec: dict[str, Any],
        rendezvous: HostRendezvous,
        before_start: Callable[[int], None],
        after_start: Callable[[int, dict[int, int]], None],
        judge: Callable[[], WorkerState],
    ) -> None:
        worker_spec = WorkerSpec(
            role="default",
            local_world_size=spec.share.ranks,
            entrypoint=rank_main,
            rdzv_handler=rendezvous,
            max_restarts=spec.plan.max_restarts,
            monitor_interval=1e-6,  # `judge` waits
        )
        logs = DefaultLogsSpecs(rank_spec["pipes"])  # it makes folders, and leaves them
        super().__init__(worker_spec, logs, "forkserver", shutdown_timeout=1)
        self._rendezvous_handler = rendezvous
        self._before_start, self._after_start, self._judge = before_start, after_start, judge
        self._take(spec, rank_spec)

    def start_again(
        self, spec: HostSpec, rank_spec: dict[str, Any], store: TCPStore | None
    ) -> None:
        """Has torch's loop, after this poll, end the ranks and start those of another attempt."""
        self._take(spec, rank_spec)
        self._rendezvous_handler.call_again(spec, store)

    def _take(self, spec: HostSpec, rank_spec: dict[str, Any]) -> None:
        self._spec = spec
        worker_spec = self._worker_group.spec
        worker_spec.local_world_size, worker_spec.args = spec.share.ranks, (rank_spec,)
        # torch counts attempts by what remains; it gives the ranks the difference
        self._remaining_restarts = worker_spec.max_restarts - spec.attempt

    def exitcode(self, local_rank: int) -> int | None:
        """A rank's exit code, negative for a signal; None while it runs.

        The forkserver is the ranks' parent and reports it; no other process of ours could wait.
        """
        context = self._pcontext
        assert isinstance(context, MultiprocessContext)
        assert context._pc is not None
        code: int | None = context._pc.processes[local_rank].exitcode
        return code

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Ranks as the plan has them; torch would have the hosts ask each other, and wait."""
        share, world_size = self._spec.share, self._spec.plan.world_size
        return [
            Worker(
                local_rank=local_rank,
                global_rank=share.first_rank + local_rank,
                role_rank=share.first_rank + local_rank,
                world_size=world_size,
                role_world_size=world_size,
            )
            for local_rank in range(share.ranks)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._before_start(self._spec.attempt)
        pids: dict[int, int] = super()._start_workers(worker_group)
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        self._after_start(self._spec.attempt, {ranks[local]: pid for local, pid in pids.items()})
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        state = self._judge()
        if state == WorkerState.FAILED:
            self._remaining_restarts = 0  # whether all start again was the keeper's to say
        done = worker_group.workers if state == WorkerState.SUCCEEDED else []
        return RunResult(state, return_values={worker.global_rank: None for worker in done})

    def _exit_barrier(self) -> None:
        """The keeper was the barrier: it says when all hosts have ended."""
