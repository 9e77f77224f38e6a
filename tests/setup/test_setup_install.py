"""Tests of installing our packages, at the first use, on a host whose Python has only torch."""

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from taas_magic import probe
from taas_magic.config import PoolConfig
from taas_magic.errors import PoolError
from taas_magic.setup.facts import ask_host, this_kernel
from taas_magic.setup.install import (
    PackageFolder,
    install_missing_packages,
    install_package,
    packages_needed,
    zip_files,
)
from tests.rig.bare_python import make_bare_python
from tests.rig.subshell import SubShell
from tests.setup.test_setup_wheels import make_wheel

PARCEL = PackageFolder(
    "demo-1", (), lambda: zip_files({"demo/__init__.py": b"x = 1", "demo/big": b"0" * 9})
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Python that has only torch."""
    return make_bare_python(tmp_path_factory.mktemp("bare") / "environment")


@pytest.fixture(scope="module")
def with_pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Python that has only torch and pip."""
    return make_bare_python(tmp_path_factory.mktemp("pip") / "environment", pip=True)


def pool_of(python: Path) -> PoolConfig:
    return PoolConfig("p", engine="ssh", hosts=("there",), python=str(python))


def site_of(shell: SubShell) -> set[str]:
    return {path.name for path in (shell.home / ".cache/taas/site").iterdir()}


def said_by(python: Path, path_entries: tuple[str, ...], code: str) -> str:
    """Run code by a host's Python, as an engine starts it, and return the output.

    Args:
        python: Interpreter.
        path_entries: Folders for PYTHONPATH, with the installed packages.
        code: Code to run.
    """
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(path_entries)}
    done = subprocess.run(
        [str(python), "-W", "ignore", "-c", code],
        env=environ,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


IMPORT_ALL = """
import importlib, pkgutil, taas_magic.host, taas_magic.data, taas_magic.capture
import taas_magic.store
for package in (taas_magic.host, taas_magic.data, taas_magic.capture, taas_magic.store):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
import importlib.metadata, taas
print(importlib.metadata.version("dask"), taas.__name__, taas_magic.__file__)
"""
FIND_CALLBACKS = """
from importlib.metadata import entry_points
[found] = entry_points(group="lightning.pytorch.callbacks_factory")
print(found.load()(), found.load().__module__)
"""


@pytest.mark.nightly
def test_a_python_with_only_torch_gets_all_packages_that_a_host_imports(
    bare: Path, tmp_path: Path
) -> None:
    shell = SubShell(tmp_path / "home", environ={"PYTHONPATH": "/its/own"})
    entries = install_missing_packages(shell, pool_of(bare))
    deps, ours, own = entries
    assert own == "/its/own" and len(shell.puts) == 2
    dask, taas, place = said_by(bare, entries, IMPORT_ALL).split()
    assert (dask, taas) == (packages_needed()["dask"].version, "taas_magic.api")
    assert place.startswith(ours) and Path(deps).parent == Path(ours).parent
    assert said_by(bare, entries, FIND_CALLBACKS) == "[] taas_magic.host.lightning"
    its_torch = said_by(bare, entries, "import torch; print(torch.__file__)")
    assert its_torch.startswith(str(bare.parents[1]))

    assert install_missing_packages(shell, pool_of(bare)) == entries and len(shell.puts) == 2
    assert ask_host(shell, str(bare)).sites == (Path(deps).name, Path(ours).name)
    assert [*(shell.home / ".cache/taas").iterdir()] == [shell.home / ".cache/taas/site"]


def test_a_complete_environment_is_used_unchanged(tmp_path: Path) -> None:
    shell = SubShell(tmp_path / "home", environ={"PYTHONPATH": str(Path(__file__).parents[2])})
    assert install_missing_packages(shell, pool_of(Path(sys.executable))) == () and shell.puts == []
    assert ask_host(shell, sys.executable).taas_digest == this_kernel().taas_digest


def test_the_hosts_own_pip_comes_first(with_pip: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    index.mkdir()
    make_wheel(index, "demo", "py3-none-any", {"demo/__init__.py": "by = 'pip'"})
    environ = {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    shell = SubShell(tmp_path / "home", environ=environ)
    cache = ask_host(shell, str(with_pip)).cache
    package_folder = PackageFolder(
        "demo-1", ("demo==1.0",), lambda: pytest.fail("pip could have had it")
    )
    install_package(package_folder, shell, str(with_pip), cache)
    assert shell.puts == [] and site_of(shell) == {"demo-1"}
    assert "pip" in (Path(cache) / "site/demo-1/demo/__init__.py").read_text()


def test_without_a_package_index_files_are_sent_from_this_machine(
    with_pip: Path, tmp_path: Path
) -> None:
    environ = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    shell = SubShell(tmp_path / "home", environ=environ)
    cache = ask_host(shell, str(with_pip)).cache
    package_folder = PackageFolder("demo-1", ("demo==1.0",), PARCEL.bundle)
    install_package(package_folder, shell, str(with_pip), cache)
    assert len(shell.puts) == 1 and site_of(shell) == {"demo-1"}


def test_a_broken_transfer_leaves_no_file(bare: Path, tmp_path: Path) -> None:
    shell = SubShell(tmp_path / "home", sent_bytes=20)
    cache = ask_host(shell, str(bare)).cache
    with pytest.raises(PoolError, match=r"host there: .*demo-1.*was damaged in transit"):
        install_package(PARCEL, shell, str(bare), cache)
    assert site_of(shell) == set() and os.listdir(cache) == ["site"]
    shell.sent_bytes = None
    install_package(PARCEL, shell, str(bare), cache)
    assert site_of(shell) == {"demo-1"}


def test_hosts_that_share_a_home_may_install_at_once(bare: Path, tmp_path: Path) -> None:
    shells = [SubShell(tmp_path / "home", host=f"host{i}") for i in range(4)]
    cache = ask_host(shells[0], str(bare)).cache
    failed: list[BaseException] = []

    def work(shell: SubShell) -> None:
        try:
            install_package(PARCEL, shell, str(bare), cache)
        except PoolError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(shell,)) for shell in shells]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and site_of(shells[0]) == {"demo-1"} and os.listdir(cache) == ["site"]


def test_an_old_incomplete_installation_is_removed(tmp_path: Path) -> None:
    site = tmp_path / "site"
    old, young = site / ".new-old", site / ".new-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    answer = probe.install(str(site / "demo"), bundle=str(tmp_path / "no-such"))
    assert "no-such" in answer
    assert os.listdir(site) == [".new-young"]


def test_a_folder_that_disappears_during_the_removal_does_not_stop_an_installation(
    tmp_path: Path,
) -> None:
    site, bundle = tmp_path / "site", tmp_path / "bundle.zip"
    site.mkdir()
    (site / ".new-listed").symlink_to("gone")  # like a folder that was renamed after it was listed
    bundle.write_bytes(PARCEL.bundle())
    mark = hashlib.sha256(bundle.read_bytes()).hexdigest()
    answer = probe.install(str(site / "demo"), bundle=str(bundle), sha256=mark)
    assert answer == "" and (site / "demo").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_reported_and_no_file_is_left(bare: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", disk], check=True)
    try:
        shell = SubShell(tmp_path / "home", environ={"XDG_CACHE_HOME": str(disk)})
        cache = ask_host(shell, str(bare)).cache
        large = PackageFolder("large-1", (), lambda: zip_files({"demo/zeros": bytes(8 << 20)}))
        with pytest.raises(PoolError, match=r"host there: .*large-1.*No space left"):
            install_package(large, shell, str(bare), cache)
        assert os.listdir(cache) == ["site"] and os.listdir(disk / "taas/site") == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_host_without_torch_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    empty = make_bare_python(tmp_path / "empty", packages=())
    shell = SubShell(tmp_path / "home")
    with pytest.raises(PoolError, match=r"host there: no torch for .*pip install 'torch=="):
        install_missing_packages(shell, pool_of(empty))
    assert shell.puts == []
