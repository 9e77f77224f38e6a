"""Tests of the findings about a host's facts. Each finding says what to do."""

from typing import Any

import pytest
from msgspec.structs import replace
from packaging.specifiers import SpecifierSet

from taas_magic.errors import PoolError
from taas_magic.messages import HostFacts
from taas_magic.setup.facts import (
    ERROR,
    REMARK,
    WARNING,
    KernelVersions,
    RequiredPackage,
    find_problems,
    raise_if_unusable,
)

KERNEL = KernelVersions("3.11.7", "2.13.0+cpu", "ours")
FIT = HostFacts(
    "gpu1",
    "3.11.2",
    "cpython",
    "/venv/bin/python",
    system="Linux",
    machine="x86_64",
    torch="2.13.1+cu130",
    cuda="13.0",
    cache="/home/me/.cache/taas",
    free_bytes=100 << 30,
    gpus=8,
    hostname="gpu1",
    own_addresses=("10.0.0.1",),
    interfaces={"lo": ("127.0.0.1",), "ib0": ("10.0.0.1",)},
)


def test_a_host_that_fits_gives_no_finding() -> None:
    assert find_problems(FIT, KERNEL, gpus=8, interface="ib0") == []


@pytest.mark.fault(29, 30)
@pytest.mark.parametrize(
    ("change", "level", "what", "todo"),
    [
        ({"python": "3.10.4"}, ERROR, "Python 3.10.4 there, 3.11.7 in this kernel", "Python 3.11"),
        ({"torch": ""}, ERROR, "no torch for /venv/bin/python", "pip install 'torch==2.13.*'"),
        ({"torch": "", "is_managed": True}, ERROR, "no torch", "-m venv ~/venv"),
        ({"torch": "2.4.1"}, ERROR, "torch 2.4.1 there, 2.13.0+cpu in this", "torch 2.4 here"),
        ({"missing": ("cv2",)}, ERROR, "module cv2 that the cell needs", "pip install cv2"),
        ({"missing": ("a", "b")}, ERROR, "modules a, b that", "pip install a b"),
        ({"cache_error": "Read-only"}, ERROR, "cannot be written: Read-only", "Make it writable"),
        ({"cache_error": "No space left on device"}, ERROR, "No space left", "Free some"),
        ({"free_bytes": 1 << 20}, ERROR, "0.0 GiB free", "XDG_CACHE_HOME"),
        ({"free_bytes": 1 << 30}, WARNING, "only 1.0 GiB free", "Free some"),
        ({"interfaces": {"eth0": ()}}, ERROR, "no interface 'ib0'", "interface ="),
        ({"system": "Darwin"}, ERROR, "cpython on Darwin", "CPython on Linux"),
        ({"implementation": "pypy"}, ERROR, "it runs pypy", "CPython on Linux"),
        ({"gpus": 4}, WARNING, "4 GPUs there, gpus = 8", "correct the number"),
        ({"cuda": ""}, WARNING, "built without CUDA", "CUDA build"),
        ({"ahead_s": 86400.0}, WARNING, "clock is 86,400 s ahead of", "NTP"),
        ({"ahead_s": -61.0}, WARNING, "clock is 61 s behind", "NTP"),
        ({"versions": {"dask": "1.0"}}, WARNING, "dask 1.0 (here 2.0)", "use this machine's"),
        ({"own_addresses": ("127.0.1.1",)}, REMARK, "gpu1 resolves to 127.0.1.1", ""),
        ({"own_addresses": ()}, REMARK, "gpu1 resolves to nothing", ""),
    ],
)
def test_each_finding_says_what_and_what_to_do(
    change: dict[str, Any], level: str, what: str, todo: str
) -> None:
    """Some of the findings are faults 29, 30 and 54 of docs/faults.md."""
    packages = {"dask": RequiredPackage("dask", "2.0", SpecifierSet("==2.0"))}
    (found,) = find_problems(replace(FIT, **change), KERNEL, 8, "ib0", packages)
    assert (found.level, what in found.what, todo in found.todo) == (level, True, True)


def test_an_old_python_without_further_facts_gives_one_finding() -> None:
    (found,) = find_problems(HostFacts("gpu1", "2.7.18"), KERNEL, gpus=8)
    assert found.level == ERROR and "Python 2.7.18 there" in found.what


def test_errors_come_first() -> None:
    facts = replace(FIT, ahead_s=1e6, own_addresses=(), torch="1.0")
    assert [found.level for found in find_problems(facts, KERNEL)] == [ERROR, WARNING, REMARK]


def test_a_refusal_names_every_host_and_only_errors() -> None:
    hosts = [FIT, replace(FIT, host="gpu2", missing=("cv2",)), replace(FIT, host="gpu3", torch="")]
    with pytest.raises(PoolError) as error:
        raise_if_unusable([*hosts, replace(FIT, host="gpu4", ahead_s=1e6)], KERNEL)
    lines = str(error.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["host gpu2", "host gpu3"]
    raise_if_unusable(hosts[:1], KERNEL)
