"""The hint that a rank adds to the error of a write to a full disk."""

import errno
import os
import re
import subprocess
from pathlib import Path

import pytest

from taas_magic.host.tracebacks import message_of


def hint(error: OSError) -> str:
    """Return what `message_of` adds to an error's own text."""
    return message_of(error).removeprefix(str(error))


def raised(write: str, path: Path) -> OSError:
    """Run the code `write`, in which a write fails; return the error.

    Args:
        write: Code that raises `full`, the error of a full disk, often in a block that has a file
            open.
        path: Path that the code can use.
    """
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OSError) as caught:
        exec(write, {"path": path, "full": full})
    return caught.value


def test_an_error_with_paths_names_the_disk_of_the_destination(tmp_path: Path) -> None:
    copied = OSError(errno.EDQUOT, "Disk quota exceeded", "/proc/source", None, f"{tmp_path}/x/to")
    assert re.fullmatch(rf" \(the disk of {tmp_path} has \d+ bytes free\)", hint(copied))
    opened = OSError(errno.ENOSPC, "No space left on device", os.fsencode(tmp_path / "file"))
    assert f"the disk of {tmp_path} has" in hint(opened)
    assert hint(OSError(errno.EIO, "Input/output error", str(tmp_path))) == ""


@pytest.mark.parametrize(
    "write",
    [
        "with open(path, 'wb') as file:\n    raise full",
        "with open(path, 'a') as file, open('/dev/null') as other:\n    raise full",
        "def write(file):\n    raise full\n"
        "with open(path, 'w') as one, open('/dev/null', 'w') as two:\n    write(one)",
    ],
)
def test_an_error_of_a_write_names_the_disk_of_the_only_file(tmp_path: Path, write: str) -> None:
    assert f" (the disk of {tmp_path} has" in hint(raised(write, tmp_path / "file"))


def test_an_error_of_an_unknown_file_names_the_usual_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/proc")  # another file system
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    said = r"the disk of /proc has \d+ bytes free, the disk of {} has \d+ bytes free"
    wanted = rf" \(the error does not name the file; {said.format(tmp_path)}\)"
    for write in (
        "raise full",
        "with open(path, 'w') as one, open('/dev/null', 'w') as two:\n    raise full",
    ):
        assert re.fullmatch(wanted, hint(raised(write, tmp_path / "file")))
    monkeypatch.chdir(tmp_path)
    assert hint(raised("raise full", tmp_path)).count("bytes free") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk takes root")
def test_a_disk_without_inodes_is_named(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=2", "none", tmp_path], check=True)
    try:
        (tmp_path / "first").touch()
        with pytest.raises(OSError) as caught:
            (tmp_path / "second").touch()
        assert "bytes free, but no inodes: it has too many files" in hint(caught.value)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
