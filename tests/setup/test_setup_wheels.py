"""Tests of how a host gets packages: files of this environment, downloads by pip, or advice."""

import io
import re
import zipfile
from pathlib import Path

import pytest
from msgspec import structs
from packaging.specifiers import SpecifierSet

from taas_magic.errors import PoolError
from taas_magic.setup import install
from taas_magic.setup.facts import RequiredPackage, collect_local_facts
from taas_magic.setup.install import bundle_for, download_wheels, installed_files, our_bundle

HERE = collect_local_facts("near")


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
    """Set up pip to find packages only in a new folder, and return the folder."""
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


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ({"machine": "riscv64"}, "its processor is riscv64, but this machine's is "),
        ({"glibc": "2.9"}, "its C library is glibc 2.9, but this machine's is glibc 2."),
        ({"glibc": ""}, "its C library is not glibc, but this machine's is glibc 2."),
    ],
)
def test_the_message_for_another_kind_of_host_names_the_packages(
    kind: dict[str, str], why: str
) -> None:
    packages = [
        RequiredPackage("psutil", "1.0", SpecifierSet()),
        RequiredPackage("zict", "", SpecifierSet(">=3")),
    ]
    host = structs.replace(HERE, host="far", executable="/opt/bin/python", **kind)
    with pytest.raises(PoolError) as caught:
        bundle_for(packages, host)
    assert str(caught.value).startswith("host far: it lacks packages") and why in str(caught.value)
    assert "Install them there: /opt/bin/python -m pip install psutil==1.0 'zict>=3'" in str(
        caught.value
    )


def test_a_newer_c_library_loads_the_packages_of_this_machine() -> None:
    newer = structs.replace(HERE, glibc="2.999")
    names = names_in(
        bundle_for([RequiredPackage("sortedcontainers", "2.4.0", SpecifierSet())], newer)
    )
    assert "sortedcontainers/__init__.py" in names


def test_the_installed_files_of_a_package_are_found() -> None:
    files = installed_files("psutil")
    assert files and any(path.startswith("psutil/_psutil_linux") for path in files)
    assert any(path.endswith(".dist-info/METADATA") for path in files)
    assert not any(path.endswith(".pyc") or ".." in path for path in files)
    assert installed_files("taas-magic") is None  # an editable installation has no files
    assert installed_files("no-such") is None


@pytest.mark.process
def test_a_package_that_was_built_here_is_fetched_once(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"sortedcontainers": installed_files("sortedcontainers")}
    monkeypatch.setattr(install, "installed_files", own.get)
    wheel = make_wheel(index, "psutil", "py3-none-any", {"psutil/__init__.py": "fetched = True"})
    packages = [
        RequiredPackage("psutil", "1.0", SpecifierSet()),
        RequiredPackage("sortedcontainers", "2.4.0", SpecifierSet()),
    ]
    assert {"psutil/__init__.py", "sortedcontainers/__init__.py"} <= names_in(
        bundle_for(packages, HERE)
    )
    wheel.unlink()
    assert "psutil/__init__.py" in names_in(bundle_for(packages, HERE))


@pytest.mark.process
def test_the_error_for_a_missing_wheel_names_host_and_package_and_advises(index: Path) -> None:
    make_wheel(index, "no_such", "cp311-cp311-win_amd64", {"no_such/__init__.py": ""})
    with pytest.raises(PoolError, match=r"^host near: ") as error:
        bundle_for([RequiredPackage("no-such", "1.0", SpecifierSet())], HERE)
    assert "No matching distribution" in str(error.value)
    assert f"{HERE.executable} -m pip install no-such==1.0" in str(error.value)


@pytest.mark.process
def test_a_wheel_is_laid_out_as_when_it_is_installed(index: Path) -> None:
    files = {
        "demo/__init__.py": "1",
        "demo-1.0.data/platlib/demo/fast.so": "2",
        "demo-1.0.data/scripts/demo": "3",
    }
    make_wheel(index, "demo", "py3-none-any", files)
    found = download_wheels(["demo==1.0"], HERE)
    assert found["demo/__init__.py"] == b"1" and found["demo/fast.so"] == b"2"
    assert b"3" not in found.values()


def test_the_bundle_contains_this_package() -> None:
    names = names_in(our_bundle())
    assert {"taas_magic/host/supervisor.py", "taas.py"} <= names
    assert not any("__pycache__" in name for name in names)
    assert any(re.fullmatch(r"taas_magic-.*\.dist-info/entry_points\.txt", name) for name in names)
