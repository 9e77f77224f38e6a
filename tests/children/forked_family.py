"""A process that waits in C code, and its two children.

The first child is a fork that waits in Python code. The second child is another program.

python tests/children/forked_family.py FILE
"""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

from taas_magic.host import tracebacks


def größe() -> None:
    time.sleep(600)


def lock_twice() -> None:
    mutex = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    print("up", flush=True)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)


if __name__ == "__main__":
    tracebacks.write_stack_on_signal(Path(sys.argv[1]))
    if os.fork() == 0:
        größe()
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(sleep, close_fds=False, preexec_fn=lambda: None)
    lock_twice()
