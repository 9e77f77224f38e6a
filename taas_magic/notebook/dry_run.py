"""`--dry-run`: what a cell would do, said and not done."""

from typing import TYPE_CHECKING

from taas_magic import registry
from taas_magic.capture import payload
from taas_magic.capture.payload import Cell, Payload
from taas_magic.config import Config
from taas_magic.notebook import launch, pools
from taas_magic.plan import DataPlan, Flags, Plan
from taas_magic.store.rule import StoreRule

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def tell(flags: Flags, cell: Cell, shell: "InteractiveShell", config: Config) -> str:
    """What `execute` would do: the plan, what travels and why, and what would fail."""
    plan = launch.plan_of(flags, pools.named(flags.pool, config), config)
    settings = launch.capture_settings(cell, shell, config)
    with registry.noting() as loaders:
        captured, problems = payload.survey(cell, shell.user_ns, **settings)
    if captured is not None and (problem := launch.out_problem(flags, captured, shell)):
        problems.append(problem)
    plan = launch.with_fetchers(plan, flags, tuple(loaders), config)
    return "\n".join([*_plan_lines(plan), *_payload_lines(captured), *_problem_lines(problems)])


def _count(number: int, what: str) -> str:
    """`1 host`, `2 hosts`."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def _plan_lines(plan: Plan) -> list[str]:
    hosts = [
        f"  host {host.host_rank}: ranks {host.first_rank} to {host.first_rank + host.ranks - 1}, "
        f"OMP_NUM_THREADS={host.threads_per_rank}"
        for host in plan.hosts
    ]
    ranks, n_hosts = _count(plan.world_size, "rank"), _count(len(plan.hosts), "host")
    head = f"pool {plan.pool}: {ranks} on {n_hosts}; nothing is started"
    notes = [f"  {note}" for note in plan.notes]
    return [head, *hosts, *notes, *_data_lines(plan.data), *_store_lines(plan.store)]


def _data_lines(data: DataPlan | None) -> list[str]:
    if data is None:
        return []
    fetchers = [
        f"  host {fetcher.host}: fetcher {fetcher.number} for {', '.join(fetcher.loaders)}, "
        f"{_count(data.cores, 'core')}"
        for fetcher in data.fetchers
    ]
    n_fetchers, n_hosts = _count(len(fetchers), "fetcher"), _count(data.hosts, "host")
    return [f"data pool {data.pool}: {n_fetchers} on {n_hosts}", *fetchers]


def _store_lines(rule: StoreRule | None) -> list[str]:
    if rule is None:
        return []
    shared = [f"  open to all ranks: {folder}" for folder in rule.shared]
    return [f"project store: {rule.path} (other ranks' writes: {rule.writes})", *shared]


def _payload_lines(captured: Payload | None) -> list[str]:
    if captured is None:
        return []
    values = [
        f"  {value.name}: {value.type_name}, {payload.size_text(value.size_bytes)} ({value.why})"
        for value in captured.captured
    ]
    modules = [f"  {name}: {module.path}" for name, module in captured.modules.items()]
    return [
        f"travels, {payload.size_text(captured.size_bytes)} in all:",
        *(values or ["  nothing"]),
        *(["the project's modules that travel:", *modules] if modules else []),
    ]


def _problem_lines(problems: list[str]) -> list[str]:
    return ["would fail:", *(f"  {problem}" for problem in problems)] if problems else []
