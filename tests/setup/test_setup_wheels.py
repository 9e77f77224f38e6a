"""Packages for a host: those of this environment that fit there, others by pip."""

import io
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from taas_magic.errors import PoolError
from taas_magic.messages import Facts
from taas_magic.setup.facts import Wanted, of_this_machine
from taas_magic.setup.install import (
    bundle_for,
    downloaded,
    installed_files,
    our_bundle,
    platforms_of,
    tags_of,
)

ARM = Facts("arm", "3.11.9", "cpython", system="Linux", machine="aarch64", glibc="2.28")


def make_wheel(folder: Path, name: str, tag: str, files: dict[str, str]) -> Path:
    info = f"{name}-1.0.dist-info"
    meta = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n",
        f"{info}/RECORD": "".join(f"{path},,\n" for path in files),
    }
    path = folder / f"{name}-1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in {**files, **meta}.items():
            archive.writestr(member, text)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder that is all that pip knows of."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def names_in(bundle: bytes) -> set[str]:
    return set(zipfile.ZipFile(io.BytesIO(bundle)).namelist())


def test_platforms_are_those_that_a_c_library_can_load() -> None:
    names = list(platforms_of(ARM))
    assert names[0] == "manylinux_2_28_aarch64" and "manylinux2014_aarch64" in names
    assert "manylinux_2_29_aarch64" not in names
    assert list(platforms_of(Facts("musl", "3.11.9", machine="x86_64"))) == []


def test_files_of_this_environment_go_where_they_fit() -> None:
    here = tags_of(of_this_machine("here"))
    files = installed_files("psutil", here)
    assert files and any(path.startswith("psutil/_psutil_linux") for path in files)
    assert any(path.endswith(".dist-info/METADATA") for path in files)
    assert not any(path.endswith(".pyc") or ".." in path for path in files)
    assert installed_files("psutil", tags_of(ARM)) is None
    assert installed_files("sortedcontainers", tags_of(ARM))
    assert installed_files("no-such", here) is None


def test_wheels_for_another_machine_are_fetched_once(index: Path) -> None:
    tag = "cp311-cp311-manylinux_2_17_aarch64"
    wheel = make_wheel(index, "psutil", tag, {"psutil/__init__.py": "arm = True"})
    packages = [
        Wanted("psutil", "1.0", SpecifierSet()),
        Wanted("sortedcontainers", "2.4.0", SpecifierSet()),
    ]
    assert {"psutil/__init__.py", "sortedcontainers/__init__.py"} <= names_in(
        bundle_for(packages, ARM)
    )
    wheel.unlink()
    assert "psutil/__init__.py" in names_in(bundle_for(packages, ARM))


def test_a_wheel_that_is_nowhere_says_host_package_and_what_to_do(index: Path) -> None:
    make_wheel(index, "psutil", "cp311-cp311-win_amd64", {"psutil/__init__.py": ""})
    with pytest.raises(PoolError, match=r"^host arm: .*aarch64.*pip install psutil==1\.0") as error:
        bundle_for([Wanted("psutil", "1.0", SpecifierSet())], ARM)
    assert "No matching distribution" in str(error.value)


def test_a_wheel_is_laid_out_as_when_it_is_installed(index: Path) -> None:
    files = {
        "demo/__init__.py": "1",
        "demo-1.0.data/platlib/demo/fast.so": "2",
        "demo-1.0.data/scripts/demo": "3",
    }
    make_wheel(index, "demo", "py3-none-any", files)
    found = downloaded(["demo==1.0"], ARM)
    assert found["demo/__init__.py"] == b"1" and found["demo/fast.so"] == b"2"
    assert b"3" not in found.values()


def test_our_own_bundle_is_this_code() -> None:
    names = names_in(our_bundle())
    assert {"taas_magic/host/supervisor.py", "taas.py"} <= names
    assert not any("__pycache__" in name for name in names)
