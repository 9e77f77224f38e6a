"""Heartbeats of a rank to its agent: the stack, the progress of collectives, counts and metrics."""

import json
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from taas_magic.data.loader import RankFeed
from taas_magic.host import tracebacks
from taas_magic.host.debugger import is_debugpy_connected
from taas_magic.host.feeding import SessionLoaders
from taas_magic.host.link import CUT_CONNECTIONS, AgentLink
from taas_magic.host.metrics import MetricBuffer, is_recording, record_tensorboard, use_buffer
from taas_magic.late_imports import when_imported
from taas_magic.leases import RANK_BEAT_S
from taas_magic.messages import GpuUsage, Metrics, Note, RankBeat, RankReport, RankStackSample

_POINTS = 2000
"""Maximum number of points in one `Metrics` event; more points are sent in several events.

The number is limited because the pool's process handles one event at a time: during a long event,
all other messages would wait.
"""

_SHOWN_COLLECTIVES = 3


@contextmanager
def send_heartbeats(
    link: AgentLink,
    fed: RankFeed | SessionLoaders | None,
    cut_connections: Callable[[int], None] | None = None,
) -> Iterator[Callable[[bool], None]]:
    """Send a rank's heartbeats to the agent, in a new thread, until the `with` block ends.

    The thread sends a heartbeat every `RANK_BEAT_S` seconds. A heartbeat has the main thread's
    stack, the progress of collectives, the use of the GPU, and whether a client of debugpy is
    attached.

    If the agent requests a stack report, the thread sends this report instead of the next
    heartbeat. The report has the stacks of all threads and the pending collectives. If
    `init_process_group` waits because of wrong arguments or a wrong address, a note after the
    report says so (`_why_ranks_wait`).

    After each heartbeat or report, the thread sends the counts of received batches, and the metrics
    logged since the last time. The end of the block sends counts and metrics once more. Metrics
    that the GPU has not computed yet are not sent, because neither the thread nor the end of the
    block waits for the GPU.

    Metrics are the scalars of `taas.log`, and the scalars that the program gives to TensorBoard. If
    the environment variable TAAS_METRICS is "0", TensorBoard's scalars are left out. After the
    block, `taas.log` does nothing.

    Args:
        link: Connection to the agent.
        fed: Source of the counts; None if the cell uses no registered loader.
        cut_connections: Function for the agent's request `CUT_CONNECTIONS`. The thread calls the
            function with the number of the cell whose collective must end. None outside a session.

    Yields:
        Function that sends the counts and metrics immediately. Its argument says whether the
        function first waits until the GPU has computed the values of all metrics.
    """
    main, ended, reporting = threading.get_ident(), threading.Event(), threading.Lock()
    run_address = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    run_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    metrics = MetricBuffer(run_ranks[0])
    use_buffer(metrics)
    if is_recording():
        when_imported("torch.utils.tensorboard.writer", record_tensorboard)

    def send(waits_for_gpu: bool) -> None:
        if fed is not None and (counts := fed.counts()):
            link.send(RankReport(loaders=counts, cores=len(os.sched_getaffinity(0))))
        points = metrics.pop_scalars(waits_for_gpu)
        for at in range(0, len(points), _POINTS):
            link.send(Metrics(points=points[at : at + _POINTS]))

    def report(waits_for_gpu: bool) -> None:
        with reporting:  # one thread at a time, so that the newest counts are sent last
            send(waits_for_gpu)

    def beat() -> None:
        """Send heartbeats, or stack reports on request, until the `with` block ends.

        With each heartbeat or stack report, also send counts and metrics. If the agent requests to
        cut connections, call `cut_connections` instead of sending anything.
        """
        while not ended.is_set():
            asked = link.wait_for_request(RANK_BEAT_S)
            if CUT_CONNECTIONS in asked and cut_connections is not None:
                cut_connections(int(asked.rpartition(CUT_CONNECTIONS)[2].split()[0]))
                continue
            if asked:
                link.send(RankStackSample(tracebacks.sample_threads(main), _pending_collectives()))
                if why := _why_ranks_wait(run_address, run_ranks, main):
                    link.send(Note(text=why))
            else:
                begun, spins = collective_progress()
                stack = tracebacks.innermost_frames(main)
                gpu = _gpu_usage()
                message = RankBeat(stack=stack, collectives=begun, spins=spins, gpu=gpu)
                message.is_debugged = is_debugpy_connected()
                link.send(message)
            with reporting:
                if not ended.is_set():
                    send(waits_for_gpu=False)

    thread = threading.Thread(target=beat, name="taas-heartbeat", daemon=True)
    # At a breakpoint, debugpy suspends all threads except those with this attribute.
    thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
    thread.start()
    try:
        yield report
    finally:
        ended.set()
        report(waits_for_gpu=False)
        use_buffer(None)


def _why_ranks_wait(run_address: Mapping[str, str], run_ranks: tuple[int, int], thread: int) -> str:
    """Return a message for the user if `init_process_group` waits because of wrong arguments.

    There are two such cases: The cell has passed a wrong rank or number of ranks. Or the cell has
    set a rendezvous address where no rank listens.

    While torchrun's variable TORCHELASTIC_USE_AGENT_STORE is True, every rank connects to the
    rendezvous address as a client, and no rank listens. The run itself listens at its own address.
    If the cell has set another address, all ranks wait there in vain. The cell can set the address
    by the variables MASTER_ADDR and MASTER_PORT, or by the argument `init_method`. This function
    reads `init_method` from the stack of `thread`. The message says what to undo.

    Args:
        run_address: Values that the run gave to the variables `MASTER_ADDR` and `MASTER_PORT`.
        run_ranks: Number of this rank, and the number of ranks of the run.
        thread: Identifier of the thread that runs the cell.

    Returns:
        The message; "" if the arguments are right and the address is unchanged, or if
        TORCHELASTIC_USE_AGENT_STORE is not True.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return ""
    changed = [name for name, value in run_address.items() if os.environ.get(name) != value]
    passed = _init_arguments(thread)
    method = str(passed.get("init_method") or "")
    if method.startswith("tcp://") and not method.endswith(f":{run_address['MASTER_PORT']}"):
        set_by, remedy = f"passed init_method={method!r}", "Leave out init_method"
    elif changed:
        names = " and ".join(changed)
        set_by, remedy = f"changed {names}", f"Leave {names} unchanged"
    else:
        return _wrong_rank(passed, *run_ranks)
    return (
        f"the program {set_by} while TORCHELASTIC_USE_AGENT_STORE is set, so that no rank listens "
        f"at this address and all ranks wait. {remedy}, or delete TORCHELASTIC_USE_AGENT_STORE "
        "from os.environ first"
    )


def _wrong_rank(passed: Mapping[str, Any], own_rank: int, n_ranks: int) -> str:
    """Return a message if a program passed a wrong rank, or number of ranks; "" otherwise.

    Args:
        passed: Arguments of `init_process_group`. A rank or number of -1 means that the program
            passed none.
        own_rank: Number of this rank.
        n_ranks: Number of ranks of the run.
    """
    size = passed.get("world_size", -1)
    if not passed.get("init_method"):  # the program passed a store
        return ""
    if size not in (-1, n_ranks):
        wrong = f"passed world_size={size} to init_process_group, but there are {n_ranks} ranks"
    elif (rank := passed.get("rank", -1)) not in (-1, own_rank):
        wrong = f"passed rank={rank} to init_process_group on a rank with another number"
    else:
        return ""
    return f"the program {wrong}, so that all ranks wait. Leave out rank and world_size"


def _init_arguments(thread: int) -> dict[str, Any]:
    """Return the arguments of the `init_process_group` call in which a thread is now, by name.

    Return {} if the thread is in no such call.

    Args:
        thread: Identifier of the thread.
    """
    for frame, _ in traceback.walk_stack(tracebacks.current_frames().get(thread)):
        if frame.f_code.co_name == "init_process_group" and "init_method" in frame.f_locals:
            return dict(frame.f_locals)
    return {}


def collective_progress() -> tuple[list[tuple[int, int]], bool]:
    """Return how many collectives of this rank have begun and ended, by torch's flight recorders.

    Returns:
        Two values. First, for each backend, a pair: the number of collectives that have begun, and
        the number of collectives that have ended. Second, whether an NCCL collective has begun and
        not ended. While this is True, the rank may use a CPU core although it only waits.
    """
    counts = {}
    for backend, trace in _flight_records(details=False).items():
        groups = list(trace.get("pg_status", {}).values())
        begun = sum(int(group["last_enqueued_collective"]) for group in groups)
        counts[backend] = begun, sum(int(group["last_completed_collective"]) for group in groups)
    begun, ended = counts.get("nccl", (0, 0))
    return list(counts.values()), begun > ended


def _gpu_usage() -> GpuUsage | None:
    """Return the load of one GPU, and the memory that this process has reserved on this GPU.

    If the process uses several GPUs, the result is about the GPU with the most reserved memory. If
    the load cannot be read, for example because nvidia-ml-py is not installed, the load is None.
    If this process has not initialized CUDA, the whole result is None.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    reserved = [torch.cuda.memory_reserved(it) for it in range(torch.cuda.device_count())]
    busy = None
    with suppress(Exception):  # NVML has exceptions of its own, which only `nvidia-ml-py` defines
        busy = torch.cuda.utilization(reserved.index(max(reserved))) / 100
    return GpuUsage(busy=busy, memory_bytes=max(reserved))


def _pending_collectives() -> list[str]:
    """Return the names of up to `_SHOWN_COLLECTIVES` pending collectives, such as "all_reduce #12".

    A collective is pending if it has begun and not ended. The number in a name is the collective's
    sequence number in its process group. If more collectives are pending, gloo's come before NCCL's
    and older ones before newer ones; the others are left out.
    """
    entries = [
        it for trace in _flight_records(details=True).values() for it in trace.get("entries", [])
    ]
    return [
        f"{entry['profiling_name'].rpartition(':')[2]} "
        f"#{entry['collective_seq_id'] or entry['p2p_seq_id']}"
        for entry in entries
        if not entry["retired"]
    ][:_SHOWN_COLLECTIVES]


def _flight_records(details: bool) -> dict[str, dict[str, Any]]:
    """Return the dumps of torch's flight recorders, by backend; empty without a process group.

    A flight recorder is torch's log of the latest collectives of a process. If this version of
    torch has no flight recorder for a backend, the result lacks the backend.

    Args:
        details: Whether the dumps list each collective. Such dumps take about 0.1 s.
    """
    c10d = torch._C._distributed_c10d
    recorders = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    dumps = {backend: getattr(c10d, name, None) for backend, name in recorders.items()}
    if not dist.is_initialized():
        return {}
    return {backend: json.loads(dump(details)) for backend, dump in dumps.items() if dump}
