"""Decides what each fetcher of a run on this host is told: from the run's share and its service.

In the agent; `fetch_share` starts them.
"""

from collections.abc import Iterator
from pathlib import Path

from taas_magic.data import service
from taas_magic.data.service import Service
from taas_magic.data_plan import DataPlan, FetcherPlan
from taas_magic.remote import guard
from taas_magic.remote.fetcher_spec import Fetched, FetcherSpec
from taas_magic.remote.filling import lanes_fill
from taas_magic.remote.setting import Setting
from taas_magic.remote.spec import RUN_TOKEN, HostSpec
from taas_magic.remote.topics import share_id


def specs_of(spec: HostSpec, host: str, address: str, scratch: Path) -> Iterator[FetcherSpec]:
    """What the fetchers of this host are told.

    Args:
        spec: The run's share, with this host's paths.
        host: This host's name, for messages.
        address: Where ranks of other hosts reach this one.
        scratch: A folder of the run for what no one else reads.
    """
    data, served = spec.plan.data, service.read(spec.folder.path)
    assert data is not None and served is not None
    for plan in data.on(spec.host_rank):
        yield _fetcher_spec(spec, plan, served, data, host, address, scratch)


def _fetcher_spec(
    spec: HostSpec,
    plan: FetcherPlan,
    served: Service,
    data: DataPlan,
    host: str,
    address: str,
    scratch: Path,
) -> FetcherSpec:
    run_dir, memory = spec.folder.path, served.memory
    groups = len(data.fetchers) // served.fetchers
    fill_batches, fill_bytes = (-(-fill // groups) for fill in lanes_fill(spec.plan.prefill))
    return FetcherSpec(
        number=plan.number,
        index=plan.index,
        fetchers=served.fetchers,
        loaders=_loaders_of(plan, served, run_dir),
        key=served.key,
        folder=service.folder_of(run_dir) / "fetchers",
        cores=data.cores,
        host=host,
        # no port that nobody needs: ranks beside their fetchers come by Unix sockets
        listen=address if data.crosses else "",
        tls=served.tls,
        buffer_bytes=memory.buffer_bytes,
        spill=scratch / f"spill-{plan.number}" if memory.over == "spill" else None,
        spill_bytes=memory.spill_bytes,
        fill_batches=fill_batches,
        fill_bytes=fill_bytes,
        units=served.units,
        setting=_setting(spec, plan.number, scratch),
    )


def _loaders_of(plan: FetcherPlan, served: Service, run_dir: Path) -> tuple[Fetched, ...]:
    return tuple(
        Fetched(
            one.name,
            service.payload_file(run_dir, one.name),
            one.num_workers,
            one.context,
            one.seed,
        )
        for one in served.loaders
        if one.name in plan.loaders
    )


def _setting(spec: HostSpec, number: int, scratch: Path) -> Setting:
    origin = spec.origin
    return Setting(
        cwd=origin.cwd,
        environ={**origin.environ, RUN_TOKEN: share_id(spec.plan.run_id)},
        sys_path=origin.sys_path,
        payload=spec.folder.payload,
        log=spec.folder.path / "logs" / f"fetcher-{number}.log",
        who=f"fetcher {number}",
        store=spec.plan.store,
        means=guard.strongest(),
        scratch=scratch / str(number),
    )
