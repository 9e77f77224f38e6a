"""Whether a file is as it will stay: nobody has it open to write, and it did not change."""

import fcntl
import os
import signal
import sys
from contextlib import suppress


def is_being_written(descriptor: int) -> bool:
    """Whether any process has the file open to write it, as far as this system can say.

    The system grants a read lease on a file (fcntl(2), F_SETLEASE) only where nobody writes; it is
    given back at once. Who opens the file in that moment would have a signal sent to this process,
    which is made one that is ignored.
    """
    if sys.platform != "linux":
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    except OSError:
        return False  # this file system has no leases
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def has_changed(descriptor: int, before: os.stat_result) -> bool:
    """Whether a file is another than it was."""
    now = os.fstat(descriptor)
    return (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns)
