"""A process with a rank's write protection of the project store, which runs functions for tests.

Like a rank, it is a fork of a process that has imported torch.
"""

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
    """Start a process from the forkserver, as a rank is started, without pytest's main module."""
    process = CONTEXT.Process(target=target, args=args)
    with plain_main():
        process.start()
    return process


@dataclass(frozen=True)
class Setting:
    """Settings of a protected process.

    Attributes:
        protection: Protection of the store by the operating system.
        writes: `discard` or `refuse`, as for a rank; with `none`, Python's functions stay
            unchanged, and only the operating system protects the store.
        home: Home folder; it does not exist by default.
        user: (uid, gid) to switch to; None for the user who runs the tests.
    """

    store: str
    scratch: str
    protection: StoreProtection
    writes: str = "discard"
    rank: int = 1
    shared: tuple[str, ...] = ()
    home: str = "/nonexistent"
    user: tuple[int, int] | None = None


class ProtectedProcess:
    """Proxy of a protected process. `call` runs a function there, and raises errors as `Raised`."""

    def __init__(self, setting: Setting) -> None:
        self._connection, theirs = CONTEXT.Pipe()
        self.process = start(_serve, theirs, setting)
        theirs.close()
        self.protection = self._receive()

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
    """Error of a function in the protected process, with its type's name, text and traceback."""

    def __init__(self, etype: str, text: str, trace: str) -> None:
        super().__init__(f"{etype}: {text}\n{trace}")
        self.etype, self.text = etype, text


KEPT_OUT: list[str] = []
"""In the protected process: paths that `apply_rule` reported to `on_write`."""

INHERITED: dict[str, int] = {}
"""In the protected process: file descriptors that were opened before the protection."""


def kept_out() -> list[str]:
    return KEPT_OUT


def _serve(connection: Connection, setting: Setting) -> None:
    """Protect this process. Then receive functions from `connection`, and run them until it closes.

    Send the result or error of each function. If the protection fails, send its error and return.
    """
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
    """Prepare this process as a rank in the store, and apply the protection.

    Switch to the user, change to the store's folder, and let the process end with its parent. Open
    the descriptors in `INHERITED` before the protection begins.
    """
    if setting.user is not None:
        become(*setting.user)
    os.environ["HOME"] = setting.home
    os.chdir(setting.store)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    INHERITED["file"] = os.open("data.bin", os.O_RDWR)
    INHERITED["folder"] = os.open(".", os.O_RDONLY)
    if setting.writes == "none":
        writable = guard.writable_folders(setting.store, setting.shared, setting.protection)
        return guard.protect(setting.store, writable, setting.protection)
    return apply_rule(
        StoreRule(setting.store, setting.writes, setting.shared),
        f"rank {setting.rank}",
        writes=setting.rank == 0,
        protection=setting.protection,
        scratch=Path(setting.scratch),
        run_folders=[],
        on_write=lambda path, is_moved: (KEPT_OUT.remove if is_moved else KEPT_OUT.append)(path),
    )


def become(user: int, group: int) -> None:
    """Switch from root to another user.

    Stay dumpable, so that the process can read its own /proc files like any process of this user.
    """
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE


@contextmanager
def protected_process(setting: Setting) -> Iterator[ProtectedProcess]:
    rank = ProtectedProcess(setting)
    try:
        yield rank
    finally:
        rank.close()


@contextmanager
def new_store(user: tuple[int, int] | None) -> Iterator[Path]:
    """Create a folder with the folders `store` and `outside`, owned by `user`.

    Both folders have a few files, and `outside` has a link into `store`. Remove the folder after
    the block.
    """
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
    """Return a hash of all paths, modes, modification times, link counts and contents."""
    digest = hashlib.sha256()
    for path in sorted([store, *store.rglob("*")]):
        status = path.lstat()
        digest.update(repr((str(path), status.st_mode, status.st_mtime_ns)).encode())
        if path.is_symlink():
            digest.update(os.fsencode(os.readlink(path)))
        elif path.is_file():
            digest.update(bytes([status.st_nlink]) + path.read_bytes())
    return digest.hexdigest()
