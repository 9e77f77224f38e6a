"""Holds a rank to the rule of the project store: by the system first, then by Python."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from taas_magic.remote import divert, guard
from taas_magic.remote.guard import Means
from taas_magic.store import StoreRule, is_below

HELD_BY_PYTHON = (
    "this host has neither mount namespaces nor Landlock: that only rank 0 writes to the project "
    "store is held by Python alone (docs/store.md)"
)


def hold(
    rule: StoreRule,
    rank: int,
    *,
    means: Means,
    scratch: Path,
    run_folder: str,
    note: Callable[[str], None],
) -> Means:
    """Makes `rule` true in this rank; called once, freshly forked, before any of the user's code.

    Args:
        rule: The run's.
        rank: This rank; 0 writes to the store, and is only watched.
        means: What this host offers, as `guard.strongest` gave it.
        scratch: A folder to make for this rank alone, on this host, outside the store; whoever
            ends the rank removes it.
        run_folder: The run's folder, which stays writable.
        note: Called once for each path in the store that the rank wrote, or was kept from writing.

    Returns:
        What holds the rule now.
    """
    scratch.mkdir(mode=0o700)
    caches = guard.writable_folders(os.path.expanduser("~"), os.environ)
    holes = guard.holes(rule.path, [*rule.shared, *caches, run_folder, str(scratch)], means)
    if rank == 0:
        divert.install(divert.Watched(rule.path, holes, note))
        return means
    used = guard.protect(rule.path, holes, means)
    _move_temporary_folder(rule.path, used, scratch)
    if rule.writes == "refuse":
        divert.install(divert.Refused(rank, rule.path, holes, note))
    else:
        divert.install(divert.Discarded(rank, str(scratch), rule.path, holes, note))
    return used


def _move_temporary_folder(store: str, means: Means, scratch: Path) -> None:
    """Gives the rank another TMPDIR where the usual one is the store, or cannot be written now.

    Landlock lets nothing be made directly in a folder that holds the store.
    """
    usual = os.path.realpath(tempfile.gettempdir())
    if usual == store or (means is Means.LANDLOCK and is_below(store, usual)):
        folder = scratch / "tmp"
        folder.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
