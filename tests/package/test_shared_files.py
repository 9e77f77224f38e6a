"""Tests of file locks, which end with the process that holds them, and of atomic file writes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from taas_magic.shared_files import is_unlocked, lock, locked, open_and_lock, replace_atomically

HOLDER = """
import sys
from pathlib import Path
from taas_magic.shared_files import open_and_lock

assert open_and_lock(Path(sys.argv[1])) is not None
print("has it", flush=True)
sys.stdin.read()
"""


def test_a_lock_is_held_until_its_holder_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"has it\n"
        assert open_and_lock(path) is None and not is_unlocked(path)
        with locked(path, wait=False) as is_ours:
            assert not is_ours
        holder.kill()
    with locked(path, wait=True) as is_ours:
        assert is_ours and not is_unlocked(path)
    assert is_unlocked(path)


def test_a_shared_lock_prevents_an_exclusive_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with path.open("rb") as first, path.open("rb") as second, path.open("rb") as third:
        assert lock(first.fileno(), shared=True)
        assert lock(second.fileno(), shared=True)
        assert not lock(third.fileno())


def test_a_file_that_cannot_be_locked_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Bad file descriptor"):
        open_and_lock(path, os.O_PATH)  # the system locks no descriptor of this kind
    assert os.listdir("/proc/self/fd") == before


def test_a_file_keeps_its_old_content_until_the_new_content_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replace_atomically(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(KeyboardInterrupt), replace_atomically(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
