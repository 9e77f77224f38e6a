"""Test that the store and other hosts receive random changes by rank 0 to files and folders."""

import os
import random
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from taas_magic.store.mirror import StoreUpdater
from tests.eventually import eventually
from tests.store.travel_rig import Travel, tree_of, wired

SIZES_BYTES = (0, 5, 1000, 300_000, 600_000)
PAUSES_S = (0.0, 0.0, 0.001, 0.01, 0.06, 0.12, 0.3)
"""Pauses between two changes, around `SETTLE_S` and `QUIET_S` of store/outbound.py."""


def any_path(choose: random.Random) -> str:
    return "/".join(choose.choice("abc") for _ in range(choose.randint(1, 3)))


def change(choose: random.Random, root: Path) -> None:
    """Apply a random change to files or folders in `root`. Ignore a change that is impossible."""
    path, other = root / any_path(choose), root / any_path(choose)
    what = choose.choice(("write", "write", "make", "remove", "move", "replace"))
    with suppress(OSError):
        if what in ("remove", "replace") and path.is_dir():
            shutil.rmtree(path)
        elif what in ("remove", "make") and path.is_file():
            path.unlink()
        if what == "make":
            path.mkdir(parents=True)
        elif what in ("write", "replace"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(choose.choice(SIZES_BYTES)))
        elif what == "move":
            path.rename(other)


@pytest.mark.parametrize("seed", range(6))
def test_the_store_and_another_host_follow(tmp_path: Path, seed: int) -> None:
    choose, travel = random.Random(seed), Travel(tmp_path)
    for _ in range(6):
        change(choose, travel.store)
    other, _ = travel.mirrored(1)
    news = StoreUpdater(other, wired(travel.store_server, 1), travel.notes.append)
    news.start()
    with travel.running() as mirror:
        for _ in range(25):
            change(choose, mirror)
            threading.Event().wait(choose.choice(PAUSES_S))
        wanted = tree_of(mirror)
        eventually(lambda: tree_of(travel.store) == wanted)
        eventually(lambda: tree_of(Path(other.path)) == wanted)
    news.finish()
    other.close()
    assert travel.notes == [] and tree_of(travel.store) == wanted
