"""Attempts of a rank other than 0 to write to the project store, its working directory."""

import ctypes
import io
import os
import pathlib
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile

import numpy
import torch

from tests.rig.protected import INHERITED

OUTSIDE = pathlib.Path("../outside")


def open_w() -> None:
    with open("data.bin", "w") as file:
        file.write("mine")


def open_a() -> None:
    with open("folder/inner.txt", "a") as file:
        assert file.tell() == len("rank 0's")
        file.write("mine")


def open_r_plus() -> None:
    with open(os.path.abspath("numbers.bin"), "r+b") as file:
        assert file.read(2) == b"\0\1"
        file.write(b"mine")


def open_x() -> None:
    with open("new.txt", "x") as file:
        file.write("mine")


def io_open() -> None:
    io.open("new.bin", "wb").close()  # noqa: UP020


def os_open() -> None:
    descriptor = os.open("folder/new", os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, b"mine")
    os.close(descriptor)


def pathlib_write() -> None:
    pathlib.Path("folder/inner.txt").write_text("mine")


def pathlib_touch() -> None:
    pathlib.Path("touched").touch()


def torch_save_zip() -> None:
    torch.save({"weight": torch.ones(8)}, "zip.pt")


def torch_save_legacy() -> None:
    torch.save(torch.ones(8), "legacy.pt", _use_new_zipfile_serialization=False)


def torch_writer() -> None:
    writer = torch._C.PyTorchFileWriter(os.path.abspath("written.pt"))
    writer.write_record("record", b"mine", 4)
    writer.write_end_of_file()


def numpy_save() -> None:
    numpy.save("array.npy", numpy.ones(8))


def numpy_tofile() -> None:
    numpy.ones(8).tofile("array.bin")


def numpy_memmap() -> None:
    numpy.memmap("map.bin", mode="w+", shape=(8,))[:] = 1


def numpy_memmap_of_the_stores() -> None:
    mapped = numpy.memmap("numbers.bin", dtype="uint8")
    mapped[:] = 7
    mapped.flush()
    assert mapped[0] == 7


def rename_in() -> None:
    source = OUTSIDE / "to-move"
    source.write_text("mine")
    os.rename(source, "moved-in")


def rename_out() -> None:
    os.replace("data.bin", OUTSIDE / "moved-out")


def rename_within() -> None:
    os.rename("folder", "renamed")


def mkdir() -> None:
    os.mkdir("made")


def makedirs() -> None:
    os.makedirs("deep/deeper", exist_ok=True)


def unlink() -> None:
    os.unlink("data.bin")


def rmtree() -> None:
    shutil.rmtree("folder")


def truncate() -> None:
    os.truncate("data.bin", 10)


def symlink() -> None:
    os.symlink("data.bin", "symbolic")


def hardlink_in() -> None:
    os.link(OUTSIDE / "other.txt", "hard")


def hardlink_out() -> None:
    os.link("data.bin", OUTSIDE / "hard")
    (OUTSIDE / "hard").write_text("mine")


def chmod() -> None:
    os.chmod("data.bin", 0o600)


def utime() -> None:
    os.utime("data.bin", (1, 1))


def copytree() -> None:
    shutil.copytree("folder", "copied")


def tar() -> None:
    with tarfile.open("archive.tar.gz", "w:gz") as archive:
        archive.add("folder")


def temporary_file() -> None:
    with tempfile.NamedTemporaryFile(dir=".") as file:
        file.write(b"mine")


def through_symlink() -> None:
    (OUTSIDE / "link").write_text("mine")


def by_folder_descriptor() -> None:
    os.close(os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=INHERITED["folder"]))


def torch_from_file() -> None:
    torch.from_file("data.bin", shared=True, size=8, dtype=torch.uint8).fill_(7)


PYTHON = [
    open_w,
    open_a,
    open_x,
    io_open,
    os_open,
    pathlib_write,
    pathlib_touch,
    torch_save_zip,
    torch_save_legacy,
    torch_writer,
    numpy_save,
    numpy_tofile,
    numpy_memmap,
    numpy_memmap_of_the_stores,
    open_r_plus,
    rename_in,
    rename_out,
    rename_within,
    mkdir,
    makedirs,
    unlink,
    rmtree,
    truncate,
    symlink,
    hardlink_in,
    hardlink_out,
    chmod,
    utime,
    copytree,
    tar,
    temporary_file,
    through_symlink,
    by_folder_descriptor,
    torch_from_file,
]
"""Attempts by Python functions. The guard diverts or refuses them in Python. If that fails, the
system refuses them.
"""


def by_file_descriptor() -> None:
    os.write(INHERITED["file"], b"mine")


def by_reopened_descriptor() -> None:
    _libc_open(f"/proc/self/fd/{INHERITED['file']}")


def by_raw_folder_descriptor() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.openat(INHERITED["folder"], b"new", os.O_CREAT | os.O_WRONLY, 0o600) < 0:
        raise OSError(ctypes.get_errno(), "openat")


def by_libc() -> None:
    _libc_open("data.bin")


def _libc_open(path: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.open(path.encode(), os.O_WRONLY | os.O_TRUNC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "open")
    os.close(descriptor)


def sqlite() -> None:
    with sqlite3.connect("data.db") as database:
        database.execute("create table mine (number)")


def subprocess_write() -> None:
    subprocess.run(["sh", "-c", "echo mine > data.bin"], check=True, capture_output=True)


def subprocess_remove() -> None:
    subprocess.run(["rm", "data.bin"], check=True, capture_output=True)


def subprocess_python() -> None:
    code = "open('from-a-child', 'w')"
    subprocess.run([sys.executable, "-S", "-c", code], check=True, capture_output=True)


def forked() -> None:
    child = os.fork()
    if child == 0:
        try:
            by_libc()
        except OSError:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "refused"


SYSTEM = [
    by_file_descriptor,
    by_reopened_descriptor,
    by_raw_folder_descriptor,
    by_libc,
    sqlite,
    subprocess_write,
    subprocess_remove,
    subprocess_python,
    forked,
]
"""Attempts that bypass Python's functions. The system refuses them."""


def subprocess_chmod() -> None:
    subprocess.run(["chmod", "777", "data.bin"], check=True, capture_output=True)


def subprocess_touch() -> None:
    subprocess.run(["touch", "-d", "2001-01-01", "data.bin"], check=True, capture_output=True)


ATTRIBUTES = [subprocess_chmod, subprocess_touch]
"""Attempts that only a mount refuses. Landlock allows them."""


def writes_caches(home: str) -> None:
    """Write to cache folders of the home folder, by programs that the guard does not patch."""
    for folder in (".cache", ".config", ".triton", "hf/cache"):
        subprocess.run(["touch", f"{home}/{folder}/probe"], check=True)
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"mine")


def writes_a_shard() -> None:
    with open("folder/__1_0.distcp", "wb") as file:
        file.write(b"mine")


def parent_death_signal() -> int:
    """Return the parent-death signal, which the guard must preserve.

    The kernel clears the signal when the rights of a process change.
    """
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)  # PR_GET_PDEATHSIG
    return number.value
