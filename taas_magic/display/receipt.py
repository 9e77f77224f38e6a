"""A run's receipt in words: what was written to the project store, and what was kept out. Pure."""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import TypeVar

from taas_magic.display.log import rank_ranges, size_text
from taas_magic.store.receipt import Receipt

MAX_FILES = 8

T = TypeVar("T")


def lines(receipt: Receipt | None) -> list[tuple[str, str]]:
    """(label, text) of each line; none for a run that touched nothing."""
    if receipt is None:
        return []
    written = [
        f"{name} ({_files(sizes)}{size_text(sum(sizes))})"
        for name, sizes in by_cube(receipt.written).items()
    ]
    kept = _kept(receipt.kept_out)
    lost = _kept({path: receipt.kept_out[path] for path in sorted(receipt.missing)})
    named = [
        ("rank 0 wrote", written if written or not kept else ["nothing"]),
        ("not saved (only rank 0 writes)", [item for item in kept if item not in lost]),
        ("not saved, and not by rank 0 either", lost),
        ("not brought to the store", [f"{p} ({why})" for p, why in receipt.not_sent.items()]),
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


def by_cube(files: Mapping[str, T]) -> dict[str, list[T]]:
    """What is known of each file, those of a zarr store together under the store's name."""
    found: dict[str, list[T]] = {}
    for path, known in files.items():
        above = [str(folder) for folder in PurePosixPath(path).parents if folder.suffix == ".zarr"]
        found.setdefault(above[-1] if above else path, []).append(known)
    return found


def _files(known: Sequence[object]) -> str:
    return f"{len(known):,} files, " if len(known) > 1 else ""


def _kept(files: Mapping[str, Sequence[int]]) -> list[str]:
    shown = []
    for name, each in by_cube(files).items():
        ranks = sorted({rank for ranks in each for rank in ranks})
        many = f" ({len(each):,} files)" if len(each) > 1 else ""
        shown.append(
            f"{name}{many} from {'rank' if len(ranks) == 1 else 'ranks'} {rank_ranges(ranks)}"
        )
    return shown
