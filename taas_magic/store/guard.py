"""Keep ranks other than 0 from writing to the project store; in a rehearsal, also rank 0.

If possible, the operating system refuses the writes. In any case, Python's own file calls are
replaced by calls that redirect or refuse the write (`redirect.py`).

`apply_rule` is called in a freshly forked rank before any of the user's code runs. Processes that
the rank starts inherit the mounts and the Landlock rules.

    mechanism        available to  error of a refused change  changes that stay possible
    read-only mount  root, user    EROFS                      none
    Landlock         anyone        EACCES                     chmod, utime, extended attributes
    Python alone     anyone        PermissionError            all by subprocesses, C++ and ctypes

Mounts need root, or a Linux kernel that lets ordinary users make user namespaces.

A Landlock rule set (Linux 5.13 and later) allows changes only below the folders that its rules
name. To protect the store, the rules name all siblings of the store, and all siblings of each
folder that contains the store. As a consequence, the rank can make no new entry directly in a
folder that contains the store. Before Linux 6.2 (Landlock ABI 3), Landlock cannot refuse
truncation, so the rank can shorten a file of the store.
https://docs.kernel.org/userspace-api/landlock.html
"""

import ctypes
import errno
import functools
import os
import re
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path

from taas_magic.store import libraries, redirect
from taas_magic.store.rule import StoreRule, is_below

_PROBE_TIMEOUT_S = 20

PROTECTED_BY_PYTHON = (
    "this host has neither mount namespaces nor Landlock: only Python prevents ranks other than 0 "
    "from writing to the project store (docs/store.md)"
)


class StoreProtection(str, Enum):
    """Mechanism by which a host enforces that only rank 0 writes to the project store.

    The receipt of a run shows the value to the user.
    """

    MOUNT = "read-only mount"
    USER_MOUNT = "read-only mount in a user namespace"
    LANDLOCK = "Landlock"
    PYTHON = "Python alone"


@functools.cache
def strongest_protection() -> StoreProtection:
    """Return the strongest protection mechanism that works on this host.

    Try one mechanism after the other on a temporary folder, strongest first. The first one that
    works is the result; if none works, the result is `PYTHON`. A trial that takes longer than
    `_PROBE_TIMEOUT_S` seconds counts as failed. Each trial takes about 0.1 s, so the result is
    cached.

    Each trial runs in a process of its own, because a process that has entered a user namespace
    cannot leave the namespace.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with suppress(OSError), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for protection in possible_protections(os.geteuid())[:-1]:
            call = f"guard.try_protection({protection.name!r}, {folder!r})"
            with suppress(subprocess.SubprocessError):
                subprocess.run(
                    [sys.executable, "-c", f"from taas_magic.store import guard; {call}"],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=_PROBE_TIMEOUT_S,
                    check=True,
                )
                return protection
    return StoreProtection.PYTHON


def try_protection(protection: str, folder: str) -> None:
    """Make `folder` read-only for this process by one mechanism; exit if it can still be changed.

    After the mechanism is in effect, try to make a folder in `folder`. If this succeeds, the
    process exits with an error. `strongest_protection` runs this function in a process of its own.

    Args:
        protection: Name of the `StoreProtection` member to try.

    Raises:
        OSError: The mechanism is not available.
    """
    _apply(StoreProtection[protection], folder, [])
    with suppress(OSError):
        os.mkdir(os.path.join(folder, "trial"))
        sys.exit("the folder can be changed")


def possible_protections(user: int) -> tuple[StoreProtection, ...]:
    """Return the mechanisms that may protect the store for this user id, strongest first.

    An ordinary user can mount only in a user namespace. Root can mount without a user namespace. In
    a user namespace, root would lose its rights on other users' files.
    """
    mount = StoreProtection.MOUNT if user == 0 else StoreProtection.USER_MOUNT
    return (mount, StoreProtection.LANDLOCK, StoreProtection.PYTHON)


def apply_rule(
    rule: StoreRule,
    who: str,
    *,
    protection: StoreProtection,
    scratch: Path,
    run_folders: Sequence[str],
    on_write: Callable[[str, bool], None],
    writes: bool = False,
    rehearsal: Path | None = None,
) -> StoreProtection:
    """Protect the store from writes of this process, and redirect the process's file calls.

    Call once in a freshly forked process, before any of the user's code runs. For rank 0 of a real
    run, which may write to the store, only steps 1 and 5 apply:

    1. Make the scratch folder. In a rehearsal, also make the rehearsal folder.
    2. Make the store read-only, except for the writable folders (see below).
    3. If this process can no longer use the usual temporary folder, set TMPDIR to a folder in the
       scratch folder.
    4. Store the path of the store, so that `why_refused` can explain refused writes.
    5. Replace the functions by which Python and libraries open and change files. For a write to a
       path in the store, a replaced function writes to another path, raises an error, or only
       reports the write (see `redirect.py`).

    The writable folders are cache folders, the temporary folder, `run_folders` and the scratch
    folder; in a real run also the shared folders; in a rehearsal also the rehearsal folder.

    Args:
        rule: Settings of the run's store.
        who: Name of the process in messages, such as a rank.
        protection: Strongest mechanism of this host, from `strongest_protection`.
        scratch: Path of the scratch folder to make, outside the store. The agent or supervisor
            removes the folder after this process has ended.
        run_folders: Folders of the run with taas-magic's own files and pipes. They may be inside
            the store, for example if the store is the temporary folder.
        on_write: Function to call with a path in the store and a flag. The flag is False if this
            process wrote or tried to write the path. The flag is True if this process wrote a file
            to its scratch folder instead, and has moved that file away.
        writes: Whether this process is rank 0.
        rehearsal: The rehearsal folder, which is made if it is missing; None in a real run.

    Returns:
        The mechanism that now protects the store. For rank 0 of a real run, the result is
        `protection`.
    """
    scratch.mkdir(mode=0o700)
    usual = [*_cache_folders(), tempfile.gettempdir()]
    open_to_all = [*usual, *run_folders, str(scratch)]
    if rehearsal is None:
        open_to_all += rule.shared
    else:
        rehearsal.mkdir(mode=0o700, exist_ok=True)
        open_to_all.append(str(rehearsal))
    writable = writable_folders(rule.path, open_to_all, protection)
    view = who, rule.path, writable, on_write
    if writes and rehearsal is None:
        _redirect_calls(redirect.StoreView(*view))
        return protection
    used = protect(rule.path, writable, protection)
    _move_temporary_folder(rule.path, used, scratch)
    _protected_store.append(rule.path)
    if rehearsal is not None:
        _refusal_reasons.append(_REHEARSES)
        _redirect_calls(
            redirect.RehearsalView(
                *view,
                scratch=str(scratch),
                folder=str(rehearsal),
                shared=rule.shared,
                is_writer=writes,
                refuses=rule.writes == "refuse",
                ignored=[*_cache_folders(), *run_folders, str(scratch), *_NO_FILES],
            )
        )
    elif rule.writes == "refuse":
        _redirect_calls(redirect.RefusingView(*view))
    else:
        _redirect_calls(redirect.DiscardingView(*view, scratch=str(scratch)))
    return used


def _redirect_calls(view: redirect.StoreView) -> None:
    redirect.install(view)
    libraries.install(view)


_protected_store: list[str] = []
"""List with the path of the store if this process may not write to the store; else empty."""

_ONLY_RANK_0 = (
    "only rank 0 writes to the project store {}: write under `if rank == 0:`, open a folder to all "
    "ranks with --shared-writes FOLDER, or write elsewhere; docs/store.md"
)
_REHEARSES = (
    "a rehearsal writes nothing to the project store {}, and this library's write could not be "
    "redirected; docs/rehearse.md"
)
_refusal_reasons: list[str] = [_ONLY_RANK_0]
"""Texts that explain a refused write to the user; `{}` stands for the path of the store.

Only the last item is shown. In a rehearsal, `apply_rule` appends the explanation for rehearsals.
"""

_NO_FILES = ("/dev", "/proc", "/sys", "/run")
"""System folders in which a rehearsal does not report writes."""

_REFUSED = re.compile(
    r"read-only file system|os error 30\b|errno(?: =)? 30\b|unable to open database file"
    r"|readonly database|os error 13\b",
    re.IGNORECASE,
)
"""Pattern of the error messages of libraries after the operating system refused a write."""


def why_refused(error: BaseException) -> str:
    """Return an explanation for the user if `error` shows a refused write to the store; else "".

    For an OSError with a path, the error number and the path decide. For any other error, its text
    and the captured stderr of a failed subprocess decide. The result is also "" if this process may
    write to the store, or if the text of `error` already names the project store.
    """
    if not _protected_store:
        return ""
    [store], errors = _protected_store, (errno.EROFS, errno.EACCES)
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        path = os.path.realpath(os.fsdecode(error.filename)) if error.filename else ""
        is_refused = error.errno in errors and is_below(path, store)
    else:
        is_refused = _REFUSED.search(f"{error} {_captured_stderr(error)}") is not None
    if not is_refused or "project store" in str(error):
        return ""
    return f" ({_refusal_reasons[-1].format(store)})"


def _captured_stderr(error: BaseException) -> str:
    """Return the captured stderr if `error` is a CalledProcessError that has one; else ""."""
    stderr = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    return stderr.decode(errors="replace") if isinstance(stderr, bytes) else str(stderr or "")


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


def _cache_folders() -> list[str]:
    """Return the libraries' folders for caches and settings, such as `~/.cache`.

    Every rank may write to these folders, even if they are inside the store.
    """
    named = [os.environ[name] for name in _CACHE_VARIABLES if os.environ.get(name)]
    return named + [os.path.expanduser(f"~/{name}") for name in _CACHES]


def writable_folders(store: str, writable: Iterable[str], protection: StoreProtection) -> list[str]:
    """Return the folders of `writable` that are inside the store; make them if they are missing.

    The result has sorted paths without symbolic links, and not the store itself. It leaves out a
    path at which no folder exists or can be made. A mount of such a path would fail, and the rank
    would get a weaker protection.

    A process under Landlock cannot make entries directly in a folder that contains the store. So
    for Landlock, this function also makes a missing folder of `writable` if its parent folder
    contains the store. Such a folder is outside the store, so it is not in the result.

    Args:
        writable: Paths of the folders that the process may write, inside or outside the store.
        protection: Mechanism that will protect the store.
    """
    store = os.path.realpath(store)
    resolved = sorted({os.path.realpath(path) for path in writable})
    for path in resolved:
        beside = protection is StoreProtection.LANDLOCK and is_below(store, os.path.dirname(path))
        if beside or is_below(path, store):
            try:
                os.makedirs(path, mode=0o700, exist_ok=True)
            except OSError:
                continue  # a file is there, or this user may not make the folder
    below = [path for path in resolved if path != store and is_below(path, store)]
    return [path for path in below if os.path.isdir(path)]


def _move_temporary_folder(store: str, protection: StoreProtection, scratch: Path) -> None:
    """Set TMPDIR to a folder in `scratch` if this process cannot write the usual temporary folder.

    The process cannot write the usual temporary folder if this folder is the store. Under Landlock,
    the process also cannot make files directly in this folder if the store is inside it.
    """
    usual = os.path.realpath(tempfile.gettempdir())
    if usual == store or (protection is StoreProtection.LANDLOCK and is_below(store, usual)):
        folder = scratch / "tmp"
        folder.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def protect(store: str, writable: Sequence[str], protection: StoreProtection) -> StoreProtection:
    """Make the store read-only for this process and the processes that it will start.

    If a mechanism fails, try the next weaker one. After a mechanism has succeeded, reopen inherited
    descriptors of files in the store as read-only. If `protection` is `PYTHON`, do nothing:
    `redirect.py` protects the store in this case.

    Args:
        writable: Folders inside the store that stay writable.

    Returns:
        The mechanism in effect: `protection`, or a weaker one if `protection` fails for this store.

    Raises:
        RuntimeError: The process has more than one thread. A mechanism applies only to the calling
            thread, so other threads could still write to the store.
    """
    if protection is StoreProtection.PYTHON:
        return protection
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("protect() must be called before a rank has a second thread")
    store = os.path.realpath(store)
    possible = possible_protections(os.geteuid())
    for chosen in possible[possible.index(protection) :]:
        try:
            _apply(chosen, store, writable)
        except OSError:
            continue  # try the next weaker mechanism; the receipt names the one in effect
        _renew_descriptors(store, writable)
        break
    return chosen


def _apply(protection: StoreProtection, store: str, writable: Sequence[str]) -> None:
    if protection is StoreProtection.LANDLOCK:
        _restrict_by_landlock(store, writable)
    elif protection is not StoreProtection.PYTHON:
        _enter_namespace(as_user=protection is StoreProtection.USER_MOUNT)
        _mount_read_only(store, writable)
        if protection is StoreProtection.USER_MOUNT:
            _drop_capabilities()


def _renew_descriptors(store: str, writable: Sequence[str]) -> None:
    """Reopen inherited descriptors read-only, so that the store cannot be changed through them.

    A descriptor keeps the rights and the mount with which it was opened. So this function opens
    protected files and all folders again, and gives the new descriptors the old numbers and
    offsets. A descriptor whose path cannot be read becomes a descriptor of /dev/null. At the end,
    this process changes to its working directory again, because the directory now lies in the new
    read-only mount.
    """
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            path, mode = os.readlink(f"/proc/self/fd/{name}"), os.fstat(descriptor).st_mode
        except OSError:
            continue  # `listdir` opened this descriptor, and has closed it
        is_open_to_all = any(is_below(path, folder) for folder in writable)
        is_protected = is_below(path, store) and not is_open_to_all
        if stat.S_ISDIR(mode) or (is_protected and stat.S_ISREG(mode)):
            _reopen_read_only(descriptor, path)
    os.chdir(os.getcwd())


def _reopen_read_only(descriptor: int, path: str) -> None:
    """Replace a descriptor by a read-only one of the same path, number and offset.

    If the path cannot be opened, the descriptor becomes one of /dev/null.
    """
    try:
        renewed = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        renewed = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # removed or not readable
    if stat.S_ISREG(os.fstat(renewed).st_mode):
        os.lseek(renewed, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
    os.dup2(renewed, descriptor, inheritable=os.get_inheritable(descriptor))
    os.close(renewed)


_LIBC = ctypes.CDLL(None, use_errno=True)


def _raise_if_negative(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000

_MS_RDONLY = 0x1
_MS_REMOUNT = 0x20
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_SLAVE = 0x80000

_KEPT_FLAGS = {
    0x2: 0x2,  # nosuid
    0x4: 0x4,  # nodev
    0x8: 0x8,  # noexec
    0x400: 0x400,  # noatime
    0x800: 0x800,  # nodiratime
    0x1000: 0x200000,  # relatime
}
"""Mount options that a remount in a user namespace must keep.

The keys are the flags of statvfs(3); the values are the flags of mount(2) for the same options.
"""


def _enter_namespace(*, as_user: bool) -> None:
    """Enter a private mount namespace, so that mounts of this process do not change the host.

    Mounts that the host makes later still appear in this namespace. In a user namespace, this user
    and group keep their ids.

    Args:
        as_user: Whether to also enter a user namespace, because only there an ordinary user may
            mount.
    """
    user, group = os.geteuid(), os.getegid()
    flags = _CLONE_NEWNS | (_CLONE_NEWUSER if as_user else 0)
    _raise_if_negative(_LIBC.unshare(flags), "unshare")
    if as_user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount(None, "/", _MS_REC | _MS_SLAVE)


def _mount_read_only(folder: str, writable: Sequence[str]) -> None:
    """Make `folder` and all mounts below it read-only in this mount namespace.

    First mount `folder` and each folder in `writable` onto itself. Then remount `folder` and each
    mount below it as read-only, except `writable` and mounts below `writable`. The other options of
    each mount stay.

    Args:
        folder: Absolute path without symbolic links.
        writable: Folders inside `folder` that stay writable.
    """
    for path in (folder, *writable):
        _mount(path, path, _MS_BIND | _MS_REC)
    with open("/proc/self/mountinfo", "rb") as table:
        points = {_unescape(line.split()[4]) for line in table}
    for point in sorted(points):
        if is_below(point, folder) and not any(is_below(point, inner) for inner in writable):
            present = os.statvfs(point).f_flag
            kept = sum(mount for seen, mount in _KEPT_FLAGS.items() if present & seen)
            _mount(None, point, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | kept)


def _unescape(field: bytes) -> str:
    r"""Return a path of /proc/self/mountinfo without its octal escapes (a space is `\040`)."""
    return os.fsdecode(re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), field))


def _mount(source: str | None, target: str, flags: int) -> None:
    encoded = source and os.fsencode(source)
    result = _LIBC.mount(encoded, os.fsencode(target), None, ctypes.c_ulong(flags), None)
    _raise_if_negative(result, f"mount {target}")


def _drop_capabilities() -> None:
    """Drop all capabilities of this process, so that the process cannot undo its mounts.

    A process that has entered a user namespace has all capabilities in this namespace.
    """
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    nothing = (ctypes.c_uint32 * 6)()
    _raise_if_negative(_LIBC.capset(header, nothing), "capset")


_PR_SET_NO_NEW_PRIVS = 38

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_CREATE_VERSION = 1
_RULE_PATH_BENEATH = 1

_WRITE_FILE = 1 << 1
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))  # REMOVE_DIR to MAKE_SYM
_REFER = 1 << 13
_TRUNCATE = 1 << 14


def _restrict_by_landlock(folder: str, writable: Sequence[str]) -> None:
    """Make Landlock refuse changes below `folder`, for this process and its later children.

    The kernel's Landlock version decides which kinds of changes are refused. The effect is
    permanent, and the process can no longer gain privileges. Changes stay possible in `writable`,
    in the entries beside `folder`, and in the entries beside each folder that contains `folder`.

    Args:
        folder: Absolute path without symbolic links.
        writable: Folders inside `folder` that stay writable.
    """
    abi = _landlock(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_CREATE_VERSION))
    rights = _WRITE_FILE | _REMOVE_AND_MAKE  # every ABI handles these
    rights |= _REFER if abi >= 2 else 0
    rights |= _TRUNCATE if abi >= 3 else 0
    handled = struct.pack("=Q", rights)  # struct landlock_ruleset_attr
    size = ctypes.c_size_t(len(handled))
    rules = _landlock(_CREATE_RULESET, handled, size, ctypes.c_uint32(0))
    try:
        for path in (*_paths_beside(folder), *writable):
            _allow_changes_below(rules, path, rights)
        _raise_if_negative(
            _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)"
        )
        _landlock(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0))
    finally:
        os.close(rules)


def _paths_beside(folder: str) -> list[str]:
    """Return the paths of all entries beside `folder`, and beside each folder that contains it.

    Landlock allows changes in these entries. If this user may not list a folder, the result has no
    entries of that folder.
    """
    found = []
    while folder != "/":
        parent, name = os.path.split(folder)
        try:
            entries = os.listdir(parent)
        except PermissionError:
            entries = []  # this user cannot list the folder (for example /home, mode 711)
        found += [os.path.join(parent, entry) for entry in entries if entry != name]
        folder = parent
    return found


def _allow_changes_below(rules: int, path: str, rights: int) -> None:
    """Add a rule to a Landlock rule set: allow changes of `path` and of everything below `path`.

    Symbolic links, and paths that cannot be opened, get no rule. A path that is no folder gets only
    the rights to write and truncate.

    Args:
        rules: Descriptor of the rule set.
        rights: Landlock's access rights to allow, as a bit mask.
    """
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # the entry was removed since it was listed, or is not accessible
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISLNK(mode):
            return
        if not stat.S_ISDIR(mode):
            rights &= _WRITE_FILE | _TRUNCATE
        rule = struct.pack("=Qi", rights, descriptor)  # struct landlock_path_beneath_attr
        kind = ctypes.c_int(_RULE_PATH_BENEATH)
        _landlock(_ADD_RULE, ctypes.c_int(rules), kind, rule, ctypes.c_uint32(0))
    finally:
        os.close(descriptor)


def _landlock(number: int, *arguments: object) -> int:
    return _raise_if_negative(_LIBC.syscall(ctypes.c_long(number), *arguments), "Landlock")
