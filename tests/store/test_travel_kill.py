"""Tests that each file is complete, old or new, after a kill of the pool or the host."""

import fcntl
import random
import subprocess
import sys
import threading
from multiprocessing.connection import Client, Listener
from pathlib import Path

import pytest

from taas_magic.store.mirror import update_mirror
from taas_magic.store.outbound import MirrorSender
from tests.children import travel_side
from tests.eventually import eventually
from tests.store.travel_rig import Travel, tree_of


def start(role: str, socket: Path, store: Path, folder: Path) -> "subprocess.Popen[str]":
    words = [role, str(socket), str(store), str(folder)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.children.travel_side", *words],
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_until_ready(child: "subprocess.Popen[str]") -> None:
    assert child.stdout is not None and child.stdout.readline() == "ready\n"


def kill(child: "subprocess.Popen[str]") -> None:
    child.kill()
    child.communicate()


def check(store: Path) -> None:
    """Check that each file in a store is a complete version that `travel_side.write_all` wrote."""
    for name, content in tree_of(store).items():
        if content is not None:  # a .new file may arrive before it is renamed
            assert content == content[:1] * travel_side.SIZES[name.removesuffix(".new")], name


def unfinished(store: Path) -> list[Path]:
    return list(store.rglob(".taas-arriving-*"))


@pytest.mark.parametrize("seed", range(4))
def test_the_pool_is_killed(tmp_path: Path, seed: int) -> None:
    travel = Travel(tmp_path)
    travel.store_server.close()
    state, socket = tmp_path / "state", tmp_path / "socket"
    child = start("desk", socket, travel.store, state)
    wait_until_ready(child)
    mirror = travel.host()
    store_server = Client(str(socket))
    ask = travel_side.asking(store_server)
    update_mirror(mirror, ask)
    outbound = MirrorSender(mirror, ask, travel.notes.append, travel.receipt_builder)
    outbound.start()
    over = threading.Event()
    threading.Timer(random.Random(seed).uniform(0.1, 0.6), over.set).start()
    number = 0
    while not over.is_set():
        travel_side.write_all(Path(mirror.path), number)
        number += 1
    kill(child)
    travel_side.write_all(Path(mirror.path), number)  # earlier files may all be sent
    outbound.finish()
    store_server.close()
    assert "the store server is gone" in travel.notes[-1]
    left = unfinished(travel.store)
    for path in left:
        path.unlink()
    check(travel.store)
    for path in left:
        path.touch()
    with (travel.store / ".taas-arriving-now").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as another store server locks a file while it writes
        Travel(tmp_path).look_again()
        assert unfinished(travel.store) == [Path(file.name)]


@pytest.mark.parametrize("seed", range(4))
def test_the_host_is_killed(tmp_path: Path, seed: int) -> None:
    travel = Travel(tmp_path)
    with Listener(str(tmp_path / "socket")) as listener:
        serving = threading.Thread(target=travel_side.serve, args=(travel.store_server, listener))
        serving.start()
        child = start("host", tmp_path / "socket", travel.store, tmp_path / "cache")
        wait_until_ready(child)
        eventually(lambda: (travel.store / "out" / "large").exists())
        threading.Event().wait(random.Random(seed).uniform(0, 0.3))
        kill(child)
        serving.join()
    travel.store_server.close()
    assert not unfinished(travel.store)
    check(travel.store)
