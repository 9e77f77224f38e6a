"""torch's elastic agent and rendezvous, as a run uses them.

Starting, ranks, restarts and environment variables are torch's own (torchrun's). Ours are the
verdict, which sees more than exit codes, and the store's socket, which is bound to one address.
"""

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
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

from taas_magic.remote.rank import rank_main
from taas_magic.remote.spec import HostSpec

STORE_TIMEOUT_S = 300.0


class HostRendezvous(RendezvousHandler):
    """Hosts meet at the TCPStore of the first one, whose place each of them was told.

    torch's static rendezvous does the same, but its store listens on all addresses and needs a port
    that is known to be free; here the first host binds one address and lets the system choose.

    Args:
        run_id: The run's id.
        host_rank: This host's place among the run's hosts; 0 holds the store.
        n_hosts: Hosts of the run.
        address: The first host's address.
        port: The store's port; ignored on the first host.
    """

    def __init__(
        self, run_id: str, host_rank: int, n_hosts: int, address: str, port: int = 0
    ) -> None:
        self._run_id, self._host_rank, self._n_hosts = run_id, host_rank, n_hosts
        self._address, self._round = address, 0
        self._store = _open_store(address, port, serves=host_rank == 0)
        self.port: int = self._store.port

    def get_backend(self) -> str:
        return "taas"

    @property
    def use_agent_store(self) -> bool:
        """Ranks connect to this store too, so no second port is needed."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Enters the next round, with a store of its own.

        The ranks of an attempt use the agents' store as it is, so that those of the next one would
        read the last one's keys: where ranks listened that are gone.
        """
        self._round += 1
        key, serves = f"{self._run_id}/{self._round}", self._host_rank == 0
        if serves:
            self._ranks_store = _open_store(self._address, 0, serves=True)
            self._store.set(key, str(self._ranks_store.port))
        else:
            port = int(self._store.get(key))
            self._ranks_store = _open_store(self._address, port, serves=False)
        store = PrefixStore(key, self._ranks_store)
        place = RendezvousStoreInfo(self._address, self._ranks_store.port)
        return RendezvousInfo(store, self._host_rank, self._n_hosts, place)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing waits at this rendezvous: the hosts of a run are fixed."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _open_store(address: str, port: int, *, serves: bool) -> TCPStore:
    """A store on one address: its server, on a port that the system chooses, or a client of it."""
    listener = socket.create_server((address, 0), backlog=1024) if serves else None
    return TCPStore(
        address,
        listener.getsockname()[1] if listener else port,
        is_master=serves,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )


class RunAgent(LocalElasticAgent):
    """torch's agent with our verdict in its poll loop.

    Args:
        spec: This host's share of the run.
        rank_spec: What `rank_main` is called with.
        rendezvous: Where the hosts meet.
        before_start: Called with the attempt's number before its ranks start.
        after_start: Called with the attempt's number and {rank: pid}.
        judge: Blocks for a short while; returns the state of the ranks, HEALTHY while they run. On
            FAILED it has ended them all.
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
            args=(rank_spec,),
            rdzv_handler=rendezvous,
            max_restarts=spec.plan.max_restarts,
            monitor_interval=1e-6,  # `judge` waits
        )
        super().__init__(
            worker_spec,
            DefaultLogsSpecs(),
            "forkserver",
            exit_barrier_timeout=60,
            shutdown_timeout=1,
        )
        self._before_start, self._after_start, self._judge = before_start, after_start, judge

    def forbid_restarts(self) -> None:
        """Makes the next failure final: the user, or the time limit, ended the run."""
        self._remaining_restarts = 0

    def exitcode(self, local_rank: int) -> int | None:
        """A rank's exit code, negative for a signal; None while it runs.

        The forkserver is the ranks' parent and reports it; no other process of ours could wait.
        """
        context = self._pcontext
        assert isinstance(context, MultiprocessContext)
        assert context._pc is not None
        code: int | None = context._pc.processes[local_rank].exitcode
        return code

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        attempt = worker_group.spec.max_restarts - self._remaining_restarts
        self._before_start(attempt)
        pids: dict[int, int] = super()._start_workers(worker_group)
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        self._after_start(attempt, {ranks[local]: pid for local, pid in pids.items()})
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        state = self._judge()
        done = worker_group.workers if state == WorkerState.SUCCEEDED else []
        return RunResult(state, return_values={worker.global_rank: None for worker in done})
