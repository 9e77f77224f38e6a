"""Folders made read-only for one process and its children, in a mount namespace of their own.

The strongest means there is: the kernel refuses every change, from whatever code, with EROFS, and
has no side effect outside the folder. It needs root, or a kernel that lets ordinary users make user
namespaces. The namespace, and every mount in it, is gone when its last process is.
"""

import ctypes
import os
import re
from collections.abc import Sequence

from taas_magic.store.rule import is_below

_LIBC = ctypes.CDLL(None, use_errno=True)

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
"""statvfs flag -> mount flag. A user namespace may not drop these, so a remount repeats them."""


def enter_namespace(*, as_user: bool) -> None:
    """Gives this process its own view of all mounts; mounts of the host still appear in it.

    Args:
        as_user: Make a user namespace first, in which an ordinary user may mount. Every user but
            this one is then shown as nobody.

    Raises:
        OSError: The system does not let this process do so.
    """
    if as_user:
        user, group = os.geteuid(), os.getegid()
        _check(_LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "unshare(CLONE_NEWUSER)")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    else:
        _check(_LIBC.unshare(_CLONE_NEWNS), "unshare(CLONE_NEWNS)")
    _mount(None, "/", _MS_REC | _MS_SLAVE)


def make_read_only(folder: str, holes: Sequence[str]) -> None:
    """Makes `folder`, and what is mounted below it, read-only in this process's namespace.

    Args:
        folder: Absolute, without symbolic links.
        holes: Folders inside it that stay writable.

    Raises:
        OSError: A mount was refused; the namespace may be half made.
    """
    for path in (folder, *holes):
        _mount(path, path, _MS_BIND | _MS_REC)
    for point in _mount_points(folder):
        if not any(is_below(point, hole) for hole in holes):
            _mount(None, point, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _flags_of(point))


def drop_capabilities() -> None:
    """Gives up what a user namespace granted, so that the mounts cannot be undone from within."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    nothing = (ctypes.c_uint32 * 6)()
    _check(_LIBC.capset(header, nothing), "capset")


def _mount_points(folder: str) -> list[str]:
    with open("/proc/self/mountinfo", "rb") as table:
        points = {_unescape(line.split()[4]) for line in table}
    return sorted(point for point in points if is_below(point, folder))


def _unescape(field: bytes) -> str:
    """Undoes mountinfo's octal escapes (a space is `\\040`)."""
    return os.fsdecode(re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), field))


def _flags_of(point: str) -> int:
    present = os.statvfs(point).f_flag
    return sum(mount for seen, mount in _KEPT_FLAGS.items() if present & seen)


def _mount(source: str | None, target: str, flags: int) -> None:
    encoded = source and os.fsencode(source)
    result = _LIBC.mount(encoded, os.fsencode(target), None, ctypes.c_ulong(flags), None)
    _check(result, f"mount {target}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _check(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
