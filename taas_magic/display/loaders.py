"""A run's loaders in the head: what came, how fast, what is ready, and who waited. Pure."""

from taas_magic.display.log import size_text
from taas_magic.journal.analysis import Flow, LoaderFlow, Point

MAX_LOADERS = 8
MAX_RANKS = 8

Fact = tuple[str, str]


def lines(flow: Flow, units: int | None, has_ended: bool) -> list[tuple[str, list[Fact]]]:
    """The facts (label, value) of each loader, by its name; none for a run without loaders.

    Args:
        flow: What ranks and fetchers said.
        units: The bound of `--units`, for each loader.
        has_ended: Whether the run has: then means are shown, and no buffer.
    """
    shown = list(flow.loaders.values())[:MAX_LOADERS]
    found = [(loader.name, _facts(loader, units, has_ended)) for loader in shown]
    more = len(flow.loaders) - len(shown)
    return [*found, *([(f"… and {more} more loaders", [])] if more else [])]


def filling(flow: Flow) -> str:
    """How far `--prefill` has come; "" when ranks do not wait for it."""
    if flow.filling is None:
        return ""
    done, wanted = flow.filling.done, flow.filling.wanted
    if flow.filling.unit == "bytes":
        return f"{size_text(done)} of {size_text(wanted)}"
    return f"{done:,} of {wanted:,} batches"


def _facts(loader: LoaderFlow, units: int | None, has_ended: bool) -> list[Fact]:
    rate = loader.mean if has_ended else loader.recent
    facts = [("batches", _batches(loader, units))]
    if rate.time > 0:
        facts += [("per second", f"{_number(rate.rate(rate.batches))} · {_speed(rate)}")]
    facts += [] if has_ended else _buffers(loader)
    if loader.shares:
        facts.append(("waited", _waited(loader)))
    return facts


def _batches(loader: LoaderFlow, units: int | None) -> str:
    batches, bound = int(loader.total("batches")), f" of {units:,}" if units else ""
    if loader.units == batches:
        return f"{batches:,}{bound}"
    return f"{batches:,} · {loader.units:,}{bound} units"


def _buffers(loader: LoaderFlow) -> list[Fact]:
    """Only what is there: a run without fetchers has no buffer."""
    facts = []
    if budget := int(loader.stock("budget_bytes")):
        ready = f"{int(loader.stock('ready')):,} ({size_text(int(loader.stock('ready_bytes')))}"
        facts.append(("ready", f"{ready} of {size_text(budget)})"))
    if spilled := int(loader.stock("spilled_bytes")):
        facts.append(("on disk", size_text(spilled)))
    if held := int(loader.total("held_bytes")):
        facts.append(("in ranks", size_text(held)))
    return facts


def _waited(loader: LoaderFlow) -> str:
    shares = loader.shares
    mean = f"{loader.sums(0.0).share:.0%}"
    if len(shares) == 1:
        return mean
    if len(shares) <= MAX_RANKS:
        return f"{mean} ({', '.join(f'rank {rank} {part:.0%}' for rank, part in shares.items())})"
    most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
    return f"{mean} (rank {least} {shares[least]:.0%} to rank {most} {shares[most]:.0%})"


def _speed(rate: Point) -> str:
    return f"{_number(rate.rate(rate.bytes) / 1e6)} MB/s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
