"""Holds a rank to the rule of the project store: by the operating system first, then by Python.

`protect` is called in a rank, freshly forked, before any of the user's code; what the rank starts
inherits it. Of the means that a host offers the strongest is used: a read-only mount, else
Landlock. `strongest` finds it once, by trying, in a process that is thrown away: half a user
namespace cannot be left again.

    means                  as          a refused change gives   lets through
    read-only mount        root, user  EROFS                    nothing
    Landlock               anyone      EACCES                   chmod, utime, extended attributes
    Python alone           anyone      PermissionError          subprocesses, C++ writers, ctypes
"""

import functools
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path

from taas_magic.store import landlock, mounts, redirect
from taas_magic.store.rule import StoreRule, is_below

_PROBE_TIMEOUT_S = 20


class Means(str, Enum):
    """What holds the rule on a host; the value is what a user reads."""

    MOUNT = "read-only mount"
    USER_MOUNT = "read-only mount in a user namespace"
    LANDLOCK = "Landlock"
    PYTHON = "Python alone"


@functools.cache
def strongest() -> Means:
    """What this host offers, found once a process by trying it (some 0.1 s); the agent asks.

    A host on which even the trial fails offers nothing but Python.
    """
    if sys.platform != "linux":
        return Means.PYTHON
    command = [sys.executable, "-c", "from taas_magic.store.guard import main; main()"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        found = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return Means.PYTHON
    return Means[found.stdout.strip()]


def main() -> None:
    """Prints the name of the strongest means that works."""
    print(next(means for means in candidates(os.geteuid()) if _works(means)).name)  # noqa: T201


def candidates(user: int) -> tuple[Means, ...]:
    """The means for a user id, strongest first.

    Root is given no user namespace: inside one it would lose its rights on other users' files.
    """
    mount = Means.MOUNT if user == 0 else Means.USER_MOUNT
    return (mount, Means.LANDLOCK, Means.PYTHON)


def writable_folders(home: str, environ: Mapping[str, str]) -> list[str]:
    """Caches and temporary folders: a rank may write there, also when the store holds them."""
    named = (environ.get(name) for name in _CACHE_VARIABLES)
    usual = (os.path.join(home, name) for name in _CACHES)
    return [*filter(None, named), *usual, tempfile.gettempdir()]


_CACHE_VARIABLES = (
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "CUDA_CACHE_PATH",
    "HF_HOME",
    "IPYTHONDIR",
    "MPLCONFIGDIR",
    "NUMBA_CACHE_DIR",
    "PYTHONPYCACHEPREFIX",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_HOME",
    "TRITON_CACHE_DIR",
)
_CACHES = (".cache", ".config", ".ipython", ".nv", ".triton")


def holes(store: str, writable: Iterable[str], means: Means) -> list[str]:
    """Those of the folders that the store needs an exception for: they lie inside it.

    They are made if they are missing; under Landlock so are those right beside the way to the
    store, which it could not allow later. One that holds the store, or is it, is left out.
    """
    store = os.path.realpath(store)
    resolved = sorted({os.path.realpath(path) for path in writable})
    for path in resolved:
        beside = means is Means.LANDLOCK and is_below(store, os.path.dirname(path))
        if beside or is_below(path, store):
            _make_folder(path)
    return [path for path in resolved if path != store and is_below(path, store)]


def _make_folder(path: str) -> None:
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError:
        return  # it is a file, or not ours to make: then nobody writes there anyway


def protect(store: str, holes: Sequence[str], means: Means) -> Means:
    """Makes the store read-only for this process and all that it will start.

    Descriptors that are open already are opened anew where they would get around it.

    Args:
        store: A folder.
        holes: Folders inside it that stay writable, from `holes`.
        means: The strongest to try, as `strongest` gave it.

    Returns:
        What holds now: `means`, or a weaker one where this store does not let itself be mounted.

    Raises:
        RuntimeError: The process has more than one thread, and the others would not be held.
    """
    if means is Means.PYTHON:
        return means
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("protect() must be called before a rank has a second thread")
    store = os.path.realpath(store)
    possible = candidates(os.geteuid())
    for chosen in possible[possible.index(means) :]:
        try:
            _apply(chosen, store, holes)
        except OSError:
            continue  # weaker means follow, and the receipt says which one it was
        _renew_descriptors(store, holes)
        break
    return chosen


def _apply(means: Means, store: str, holes: Sequence[str]) -> None:
    if means is Means.LANDLOCK:
        landlock.make_read_only(store, holes)
    elif means is not Means.PYTHON:
        mounts.enter_namespace(as_user=means is Means.USER_MOUNT)
        mounts.make_read_only(store, holes)
        if means is Means.USER_MOUNT:
            mounts.drop_capabilities()


def _renew_descriptors(store: str, holes: Sequence[str]) -> None:
    """Opens what this process inherited again, under the guard.

    A descriptor keeps the rights and the mount that it was opened with: one on a file of the store
    could still write it, and one on any folder leads around the new mount.
    """
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            path, mode = os.readlink(f"/proc/self/fd/{name}"), os.fstat(descriptor).st_mode
        except OSError:
            continue  # the descriptor that listed the folder
        held = is_below(path, store) and not any(is_below(path, hole) for hole in holes)
        if stat.S_ISDIR(mode) or (held and stat.S_ISREG(mode)):
            _renew(descriptor, path)
    os.chdir(os.getcwd())


def _renew(descriptor: int, path: str) -> None:
    try:
        renewed = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        renewed = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # removed, or not ours to read
    if stat.S_ISREG(os.fstat(renewed).st_mode):
        os.lseek(renewed, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
    os.dup2(renewed, descriptor, inheritable=os.get_inheritable(descriptor))
    os.close(renewed)


def _works(means: Means) -> bool:
    """Tries a means on a folder of its own, in a child that ends with it."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if _holds(means, folder) else 1)
            finally:
                os._exit(1)
        return os.waitpid(child, 0)[1] == 0


def _holds(means: Means, folder: str) -> bool:
    try:
        _apply(means, folder, [])
    except OSError:
        return False
    try:
        os.mkdir(os.path.join(folder, "probe"))
    except OSError:
        return True
    return means is Means.PYTHON


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
        means: What this host offers, as `strongest` gave it.
        scratch: A folder to make for this rank alone, on this host, outside the store; whoever
            ends the rank removes it.
        run_folder: The run's folder, which stays writable.
        note: Called once for each path in the store that the rank wrote, or was kept from writing.

    Returns:
        What holds the rule now.
    """
    if rank == 0:
        scratch.mkdir(mode=0o700)
        redirect.install(
            redirect.Watched(rule.path, _holes(rule, means, run_folder, scratch), note)
        )
        return means
    return hold_off(
        rule, f"rank {rank}", means=means, scratch=scratch, run_folder=run_folder, note=note
    )


def hold_off(
    rule: StoreRule,
    who: str,
    *,
    means: Means,
    scratch: Path,
    run_folder: str,
    note: Callable[[str], None],
) -> Means:
    """Makes the store read-only for this process, as `hold` does for a rank that is not 0.

    Args:
        rule: The run's.
        who: What the process is called in messages.
        means: As for `hold`, like the others.
        scratch: As for `hold`.
        run_folder: As for `hold`.
        note: As for `hold`.

    Returns:
        What holds the rule now.
    """
    scratch.mkdir(mode=0o700)
    holes = _holes(rule, means, run_folder, scratch)
    used = protect(rule.path, holes, means)
    _move_temporary_folder(rule.path, used, scratch)
    if rule.writes == "refuse":
        redirect.install(redirect.Refused(who, rule.path, holes, note))
    else:
        redirect.install(redirect.Discarded(who, str(scratch), rule.path, holes, note))
    return used


def _holes(rule: StoreRule, means: Means, run_folder: str, scratch: Path) -> list[str]:
    """What stays writable in the store."""
    caches = writable_folders(os.path.expanduser("~"), os.environ)
    return holes(rule.path, [*rule.shared, *caches, run_folder, str(scratch)], means)


def _move_temporary_folder(store: str, means: Means, scratch: Path) -> None:
    """Gives the rank another TMPDIR where the usual one is the store, or cannot be written now.

    Landlock lets nothing be made directly in a folder that holds the store.
    """
    usual = os.path.realpath(tempfile.gettempdir())
    if usual == store or (means is Means.LANDLOCK and is_below(store, usual)):
        folder = scratch / "tmp"
        folder.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
