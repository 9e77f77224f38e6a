"""A run's receipt in words: what was written to the project store, and what was kept out. Pure."""

from collections.abc import Sequence

from taas_magic.display.fold import rank_ranges
from taas_magic.display.log import size_text
from taas_magic.receipt import Receipt

MAX_FILES = 8


def lines(receipt: Receipt | None) -> list[tuple[str, str]]:
    """(label, text) of each line; none for a run that touched nothing."""
    if receipt is None:
        return []
    written = [f"{path} ({size_text(size)})" for path, size in receipt.written.items()]
    kept = [_kept(path, ranks) for path, ranks in receipt.kept_out.items()]
    lost = [_kept(path, receipt.kept_out[path]) for path in sorted(receipt.missing)]
    named = [
        ("rank 0 wrote", written if written or not kept else ["nothing"]),
        ("kept out", [item for item in kept if item not in lost]),
        ("kept out, and not in the store", lost),
        ("did not get into the store", [f"{p} ({why})" for p, why in receipt.not_sent.items()]),
        ("open to all ranks", list(receipt.shared)),
    ]
    shown = [(label, listed(items)) for label, items in named if items]
    if kept and receipt.means:
        shown.append(("held by", receipt.means))
    if not receipt.complete:
        shown.append(("store", "too large to look through: files of subprocesses may be missing"))
    return shown


def listed(items: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = len(items) - MAX_FILES
    return ", ".join(items[:MAX_FILES]) + (f" and {more:,} more" if more > 0 else "")


def _kept(path: str, ranks: Sequence[int]) -> str:
    return f"{path} of {'rank' if len(ranks) == 1 else 'ranks'} {rank_ranges(ranks)}"
