"""Flags and what a pool offers in, a plan out. Pure: no process, no socket, no torch."""

import dataclasses
import secrets
import time

from taas_magic.errors import UsageError
from taas_magic.plan import Flags, HostCapacity, HostPlan, Plan, Room
from taas_magic.store import StoreRule

MAX_RANKS_PER_CPU_HOST = 64
"""Ranks that one host without a GPU runs at most; beyond it, memory ends before patience does."""


def new_run_id(now: float | None = None) -> str:
    """A name that sorts by time and that two kernels cannot both choose.

    For example `20260131-142501-0423f9a1`: the day, the time to the millisecond, and four digits
    of chance.
    """
    now = time.time() if now is None else now
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return f"{stamp}-{int(now % 1 * 1000):03}{secrets.token_hex(2)}"


def make_plan(
    flags: Flags,
    host: HostCapacity,
    run_id: str,
    max_hosts: int = 1,
    store: StoreRule | None = None,
) -> Plan:
    """Decides how the ranks lie on hosts like `host`.

    Args:
        flags: What the cell asks for.
        host: What each host of the pool offers.
        run_id: From `new_run_id`.
        max_hosts: Hosts that the pool may have.
        store: The project store, and who may write to it; None holds no rank to anything.

    Raises:
        UsageError: The pool cannot hold so many ranks, or not evenly.
    """
    room, hosts = _lay_out(flags, host, max_hosts)
    return Plan(
        run_id=run_id,
        name=flags.name,
        pool=flags.pool,
        world_size=sum(share.ranks for share in hosts),
        hosts=hosts,
        out=flags.out,
        max_restarts=flags.max_restarts,
        timeout_s=flags.timeout_s,
        env=dict(flags.env),
        cpus=flags.cpus,
        units=flags.units,
        prefill=flags.prefill,
        notes=_notes(flags, host),
        store=store,
        room=room if flags.max_gpus else None,
    )


def next_size(plan: Plan) -> Plan | None:
    """The same run on as few more hosts as give it more ranks; None where it may not grow."""
    room = plan.room
    if room is None or plan.world_size >= room.most:
        return None
    for n_hosts in range(len(plan.hosts) + 1, -(-room.most // room.per_host) + 1):
        ranks = _most_on(room, n_hosts)
        if ranks > plan.world_size:
            hosts = _host_plans(ranks, n_hosts, room.cores)
            return dataclasses.replace(plan, world_size=ranks, hosts=hosts)
    return None


def _lay_out(flags: Flags, host: HostCapacity, max_hosts: int) -> tuple[Room, tuple[HostPlan, ...]]:
    """How far the run may grow, and the shares of the hosts that it begins with."""
    per_host = host.gpus or MAX_RANKS_PER_CPU_HOST
    n_hosts = -(-flags.gpus // per_host)
    _check_fits(flags, host, per_host, n_hosts, max_hosts)
    room = Room(flags.max_gpus, per_host, host.cores, flags.uneven_hosts)
    world_size = max(flags.gpus, _most_on(room, n_hosts))
    return room, _host_plans(world_size, n_hosts, host.cores)


def _check_fits(
    flags: Flags, host: HostCapacity, per_host: int, n_hosts: int, max_hosts: int
) -> None:
    if n_hosts > max_hosts:
        kind = "GPUs" if host.gpus else "CPU ranks"
        raise UsageError(
            f"--gpus {flags.gpus}: pool {flags.pool!r} has {per_host * max_hosts} {kind} "
            f"({max_hosts} host{'s' * (max_hosts > 1)} with {per_host} each); "
            f"possible is 1 to {per_host * max_hosts}"
        )
    if flags.max_gpus > per_host * max_hosts:
        raise UsageError(
            f"--gpus {flags.gpus}:{flags.max_gpus}: pool {flags.pool!r} cannot grow beyond "
            f"{per_host * max_hosts}"
        )
    if flags.gpus % n_hosts and not flags.uneven_hosts:
        raise UsageError(
            f"--gpus {flags.gpus} does not divide evenly over {n_hosts} hosts of {per_host}; "
            f"possible is a multiple of {n_hosts}, or --uneven-hosts"
        )


def _most_on(room: Room, n_hosts: int) -> int:
    ranks = min(room.most, room.per_host * n_hosts)
    return ranks if room.uneven else ranks - ranks % n_hosts


def _host_plans(world_size: int, n_hosts: int, cores: int) -> tuple[HostPlan, ...]:
    """Shares that differ by one rank at most, the larger ones first."""
    base, larger = divmod(world_size, n_hosts)
    plans: list[HostPlan] = []
    for number in range(n_hosts):
        ranks = base + (number < larger)
        first = plans[-1].first_rank + plans[-1].ranks if plans else 0
        plans.append(HostPlan(number, first, ranks, max(1, cores // ranks)))
    return tuple(plans)


def _notes(flags: Flags, host: HostCapacity) -> tuple[str, ...]:
    if host.gpus:
        return ()
    ranks = f"{flags.gpus} CPU rank{'s' * (flags.gpus > 1)}"
    return (f"no GPU in pool {flags.pool!r}: --gpus {flags.gpus} runs {ranks}",)
