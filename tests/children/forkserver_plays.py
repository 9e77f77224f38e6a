"""Functions that run a forkserver in a process without a main module, as an agent does.

Importing torch._dynamo waits until the file `gate` exists. The forkserver's files are in `folder`.
"""

import signal
import tempfile
from pathlib import Path
from typing import Any

import psutil

from taas_magic.errors import PoolError
from taas_magic.host import forkserver
from tests.eventually import eventually


def start_while_importing(gate: str, folder: str) -> None:
    """Start processes while the forkserver imports torch._dynamo, and after that."""
    tempfile.tempdir = folder
    forkserver.start_forkserver([])
    assert forkserver.warm_up(start_timeout_s=5.0) == []
    assert forkserver.importing()[0] == ""
    [server] = forkserver._servers()
    earlier = forkserver.start_process("time.sleep", 600)
    forkserver.start_importing_deferred()
    eventually(lambda: forkserver._stand_in is not None)
    assert exitcode_of("pass") == 0 and forkserver.importing()[0] == ""
    earlier.kill()
    eventually(lambda: forkserver.importing()[0] == "torch._dynamo")
    kept = forkserver.start_process("time.sleep", 600)
    assert psutil.Process(kept.pid).ppid() != server.pid
    eventually(lambda: forkserver.importing()[1] > 6.0)  # longer than a stuck start may take
    assert exitcode_of("pass") == 0 and exitcode_of("raise SystemExit(3)") == 3
    Path(gate).touch()
    eventually(lambda: forkserver._has_deferred)
    assert exitcode_of("import sys; assert 'torch._dynamo' in sys.modules") == 0
    last = forkserver.start_process("time.sleep", 600)
    assert psutil.Process(last.pid).ppid() == server.pid
    assert kept.is_alive() and forkserver.is_alive()
    [_, stand_in] = forkserver._servers()
    kept.kill()
    eventually(lambda: forkserver.exitcode(kept) is not None)
    assert forkserver.exitcode(kept) == -signal.SIGKILL
    eventually(lambda: stand_in not in server.children())
    assert forkserver.is_alive() and exitcode_of("pass") == 0
    server.suspend()  # the agent gives up a stopped forkserver in the same way as a stuck one
    eventually(lambda: not forkserver.is_alive())
    assert "was stopped" in forkserver.why_ended()
    eventually(lambda: forkserver.exitcode(last) is not None)
    assert forkserver.exitcode(last) == 255


def import_with_a_full_disk(gate: str, folder: str) -> None:
    """Let the imports file be unwritable before and during the import of torch._dynamo."""
    tempfile.tempdir = folder
    forkserver.start_forkserver([])
    assert forkserver.warm_up() == []
    new = forkserver._imports_file.with_suffix(".new")
    new.mkdir()  # as on a full disk, no file is written
    forkserver.start_importing_deferred()
    eventually(lambda: forkserver._stand_ins and not forkserver._importing.locked())
    assert not forkserver._has_deferred
    new.rmdir()
    forkserver.start_importing_deferred()
    eventually(lambda: forkserver.importing()[0] == "torch._dynamo")
    new.mkdir()
    Path(gate).touch()
    eventually(lambda: forkserver._has_deferred)
    assert exitcode_of("import sys; assert 'torch._dynamo' in sys.modules") == 0
    assert forkserver.is_alive()


def exitcode_of(code: str) -> Any:
    """Run code in a process of the forkserver; return its exit code."""
    process = forkserver.start_process("builtins.exec", code)
    process.join()
    return forkserver.exitcode(process)


def give_up_an_import(gate: str, folder: str) -> None:
    """Start a forkserver whose first import never ends."""
    tempfile.tempdir = folder
    forkserver.start_forkserver(["torch._dynamo"])
    try:
        forkserver.warm_up(start_timeout_s=1.0)
    except PoolError as error:
        limit = "for start_timeout_s = 1 while it imported torch._dynamo, and was ended"
        assert f"used no processor time and read nothing {limit}" in str(error)
    else:
        raise AssertionError("it waits for ever")


def report_a_broken_torch(gate: str, folder: str) -> None:
    """Start a forkserver that cannot import torch, and print the error of `warm_up`."""
    tempfile.tempdir = folder
    forkserver.start_forkserver([])
    try:
        forkserver.warm_up()
    except PoolError as error:
        print(error)
    else:
        raise AssertionError("warm_up has not reported the error")
