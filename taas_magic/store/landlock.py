"""Folders made read-only for one process and its children by Landlock (Linux 5.13 and later).

It needs neither root nor mounts. Its rules are an allow-list: what a rule set handles is refused
everywhere but below the folders that it names. So every neighbour on the way from `/` to a
protected folder is allowed, and the folders on that way themselves are not: no new entry can be
made directly in them. Reading is not handled and stays as it was. chmod, utime and extended
attributes are not Landlock's business; truncation is from ABI 3 (Linux 6.2) on.

https://docs.kernel.org/userspace-api/landlock.html
"""

import ctypes
import os
import stat
from collections.abc import Iterator, Sequence

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_NO_NEW_PRIVS = 38

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_CREATE_VERSION = 1
_RULE_PATH_BENEATH = 1

_WRITE_FILE = 1 << 1
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))  # REMOVE_DIR to MAKE_SYM
_REFER = 1 << 13
_TRUNCATE = 1 << 14


class _RulesetAttr(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneathAttr(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def make_read_only(folder: str, holes: Sequence[str]) -> None:
    """Refuses this process, and what it starts, every change below `folder`, for good.

    Args:
        folder: Absolute, without symbolic links.
        holes: Folders inside it that stay writable.

    Raises:
        OSError: The kernel has no Landlock, or it is switched off.
    """
    rights = _rights(_abi())
    attributes = _RulesetAttr(rights)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    rules = _syscall(_CREATE_RULESET, ctypes.byref(attributes), size, ctypes.c_uint32(0))
    try:
        for path in (*_neighbours(folder), *holes):
            _allow(rules, path, rights)
        if _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
        _syscall(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0))
    finally:
        os.close(rules)


def _abi() -> int:
    return _syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_CREATE_VERSION))


def _rights(abi: int) -> int:
    """The rights that this kernel can refuse: all that change a file system."""
    rights = _WRITE_FILE | _REMOVE_AND_MAKE
    if abi >= 2:
        rights |= _REFER
    if abi >= 3:
        rights |= _TRUNCATE
    return rights


def _neighbours(folder: str) -> Iterator[str]:
    """What lies beside each folder on the way from `/` to `folder`, itself left out."""
    while folder != "/":
        parent, name = os.path.split(folder)
        try:
            entries = os.listdir(parent)
        except PermissionError:
            entries = []  # it may be crossed, not listed (a /home of mode 711)
        yield from (os.path.join(parent, entry) for entry in entries if entry != name)
        folder = parent


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # gone since it was listed, or not ours to reach
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISLNK(mode):
            return
        if not stat.S_ISDIR(mode):
            rights &= _WRITE_FILE | _TRUNCATE
        rule = _PathBeneathAttr(rights, descriptor)
        kind = ctypes.c_int(_RULE_PATH_BENEATH)
        _syscall(_ADD_RULE, ctypes.c_int(rules), kind, ctypes.byref(rule), ctypes.c_uint32(0))
    finally:
        os.close(descriptor)


def _syscall(number: int, *arguments: object) -> int:
    result: int = _LIBC.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock: {os.strerror(code)}")
    return result
