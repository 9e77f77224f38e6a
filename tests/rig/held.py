"""A process that is held as a rank is: forked with torch in memory, then told what to do."""

import ctypes
import hashlib
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from taas_magic.store import guard
from taas_magic.store.guard import StoreProtection, apply_rule
from taas_magic.store.rule import StoreRule
from tests.rig.main_module import CONTEXT, plain_main


def start(target: Any, *args: Any) -> Any:
    """Start a process that begins as a rank does; it does not import what runs the tests."""
    process = CONTEXT.Process(target=target, args=args)
    with plain_main():
        process.start()
    return process


@dataclass(frozen=True)
class Setting:
    """How a rank is held.

    Attributes:
        writes: `none` leaves Python's calls as they are.
        home: The rank's home folder; by default there is none.
        user: The (uid, gid) that it becomes; None is who runs the tests.
    """

    store: str
    scratch: str
    means: StoreProtection
    writes: str = "discard"
    rank: int = 1
    shared: tuple[str, ...] = ()
    home: str = "/nonexistent"
    user: tuple[int, int] | None = None


class Held:
    """Runs functions in a held process; what they raise is raised here, as `Raised`."""

    def __init__(self, setting: Setting) -> None:
        self._connection, theirs = CONTEXT.Pipe()
        self.process = start(_serve, theirs, setting)
        theirs.close()
        self.means = self._receive()

    def call(self, function: Any, *args: Any) -> Any:
        self._connection.send((function, args))
        return self._receive()

    def close(self) -> None:
        self._connection.close()
        self.process.join()

    def _receive(self) -> Any:
        raised, value = self._connection.recv()
        if raised:
            raise Raised(*value)
        return value


class Raised(Exception):
    """What a function raised in the held process: its type, its text, its traceback."""

    def __init__(self, etype: str, text: str, trace: str) -> None:
        super().__init__(f"{etype}: {text}\n{trace}")
        self.etype, self.text = etype, text


KEPT_OUT: list[str] = []
"""In the held process: what its view noted."""

INHERITED: dict[str, int] = {}
"""In the held process: descriptors that were open before the guard."""


def kept_out() -> list[str]:
    return KEPT_OUT


def _serve(connection: Connection, setting: Setting) -> None:
    try:
        connection.send((False, _enter(setting)))
    except BaseException as error:
        connection.send((True, (type(error).__name__, str(error), traceback.format_exc())))
        return
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((False, function(*args)))
        except BaseException as error:
            connection.send((True, (type(error).__name__, str(error), traceback.format_exc())))


def _enter(setting: Setting) -> StoreProtection:
    if setting.user is not None:
        become(*setting.user)
    os.environ["HOME"] = setting.home
    os.chdir(setting.store)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    INHERITED["file"] = os.open("data.bin", os.O_RDWR)
    INHERITED["folder"] = os.open(".", os.O_RDONLY)
    if setting.writes == "none":
        holes = guard.holes(setting.store, setting.shared, setting.means)
        return guard.protect(setting.store, holes, setting.means)
    return apply_rule(
        StoreRule(setting.store, setting.writes, setting.shared),
        f"rank {setting.rank}",
        writes=setting.rank == 0,
        means=setting.means,
        scratch=Path(setting.scratch),
        run_folder=setting.scratch,
        note=KEPT_OUT.append,
    )


def become(user: int, group: int) -> None:
    """Give up root; the process stays its own to look at, as one that was started so would be."""
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE


@contextmanager
def held(setting: Setting) -> Iterator[Held]:
    rank = Held(setting)
    try:
        yield rank
    finally:
        rank.close()


@contextmanager
def new_store(user: tuple[int, int] | None) -> Iterator[Path]:
    """Make a folder with `store`, `outside`, which belong to `user`."""
    base = Path(tempfile.mkdtemp(prefix="taas-test-"))
    base.chmod(0o755)
    store = base / "store"
    for folder in (store, store / "folder", base / "outside"):
        folder.mkdir()
    for name in ("data.bin", "numbers.bin"):
        (store / name).write_bytes(bytes(range(100)))
    (store / "folder" / "inner.txt").write_text("rank 0's")
    (base / "outside" / "other.txt").write_text("other")
    (base / "outside" / "link").symlink_to(store / "data.bin")
    for path in (base, *base.rglob("*")):
        if user is not None:
            os.chown(path, *user, follow_symlinks=False)
    try:
        yield base
    finally:
        shutil.rmtree(base)


def hash_of(store: Path) -> str:
    """Over every name, kind, mode, time of change, number of links, and content."""
    digest = hashlib.sha256()
    for path in sorted([store, *store.rglob("*")]):
        status = path.lstat()
        digest.update(repr((str(path), status.st_mode, status.st_mtime_ns)).encode())
        if path.is_symlink():
            digest.update(os.fsencode(os.readlink(path)))
        elif path.is_file():
            digest.update(bytes([status.st_nlink]) + path.read_bytes())
    return digest.hexdigest()
