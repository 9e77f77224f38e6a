"""Tests of which packages a host needs, and which of these packages the host lacks."""

import importlib.metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from taas_magic.errors import PoolError
from taas_magic.messages import HostFacts
from taas_magic.setup.facts import RequiredPackage, find_missing_packages
from taas_magic.setup.install import InstalledPackage, packages_needed

HERE = {
    "taas-magic": InstalledPackage("1.0", ("distributed", "paramiko", "x; extra == 'bench'")),
    "paramiko": InstalledPackage("1.0", ("of-paramiko-alone",)),
    "distributed": InstalledPackage("2.0", ("dask==2.0", "Zict>=3", "torch>=1")),
    "dask": InstalledPackage(
        "2.0", ("zict<5", "only-mac; sys_platform == 'darwin'", "not-here>=1")
    ),
    "zict": InstalledPackage("4.0", ()),
}


def test_requirements_of_packages_are_needed_too_except_torch() -> None:
    needs = packages_needed(HERE.get)
    assert list(needs) == ["dask", "distributed", "not-here", "zict"]
    assert needs["zict"].allowed == SpecifierSet(">=3,<5") and needs["zict"].pin == "zict==4.0"
    assert needs["not-here"].pin == "not-here>=1"


def test_a_checkout_that_was_never_installed_says_what_to_do() -> None:
    with pytest.raises(PoolError, match=f"pip install -e {Path(__file__).parents[2]}$"):
        packages_needed(lambda name: None)


@pytest.mark.parametrize(
    ("there", "names"),
    [
        ({"distributed": "2.0", "dask": "2.0", "zict": "3.1", "not-here": "1"}, []),
        ({"distributed": "2.1", "dask": "2.0", "zict": "3.1", "not-here": "1"}, ["distributed"]),
        ({"distributed": "2.0", "dask": "2.0", "zict": "5.0", "not-here": "1"}, ["zict"]),
        ({"distributed": "2.0", "dask": "2.0", "zict": "??", "not-here": "1"}, ["zict"]),
        ({}, ["dask", "distributed", "not-here", "zict"]),
    ],
)
def test_a_package_is_lacking_if_it_is_missing_or_has_a_wrong_version(
    there: dict[str, str], names: list[str]
) -> None:
    needs = packages_needed(HERE.get)
    assert [
        each.name for each in find_missing_packages(needs, HostFacts("h", "3.11", versions=there))
    ] == names


def test_a_release_candidate_may_meet_a_requirement() -> None:
    assert RequiredPackage("x", "1.0", SpecifierSet(">=1.0")).is_met_by("2.0rc1")
    assert not RequiredPackage("x", "1.0", SpecifierSet(">=1.0")).is_met_by("")


def test_this_environment_meets_its_own_requirements() -> None:
    needs = packages_needed()
    versions = {name: importlib.metadata.version(name) for name in needs}
    assert find_missing_packages(needs, HostFacts("h", "3.11", versions=versions)) == ()
    assert {"distributed", "ipython", "psutil", "cloudpickle"} <= set(needs)
    assert not {"torch", "paramiko", "cryptography", "ipykernel", "jupyter-client"} & set(needs)
