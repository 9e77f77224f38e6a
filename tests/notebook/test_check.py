"""The table of hosts that `%taas pools --check` shows, as text and as HTML."""

import re

from msgspec import structs

from taas_magic.messages import HostFacts
from taas_magic.notebook.pools import check_report
from taas_magic.setup.facts import ERROR, WARNING, HostCheck, HostProblem
from taas_magic.setup.install import needed_package_folders
from tests.setup.test_setup_findings import FIT, KERNEL


def row(facts: HostFacts | None, *findings: HostProblem, host: str = "gpu1") -> HostCheck:
    return HostCheck("g2.8", host, facts, findings)


def cells(shown: HostCheck, means: str = "") -> dict[str, str]:
    """Return the text of each table cell in the row of a host, by column title."""
    head, line, *_ = check_report([shown], KERNEL, {("g2.8", "gpu1"): means}).splitlines()
    found = [re.split("  +", it) for it in (head, line)]
    return dict(zip(*found, strict=True))


def test_a_row_has_the_versions_gpus_network_and_store_of_a_host() -> None:
    facts = structs.replace(
        FIT, gpu_names=("H200", "H200"), reached_at="10.0.0.1", sees_store=True, ahead_s=-0.26
    )
    found = cells(row(facts), means="Landlock")
    assert found["python"] == "3.11.2" and found["torch"] == "2.13.1+cu130"
    assert found["GPUs"] == "8 H200" and found["interface"] == "ib0 10.0.0.1"
    assert found["clock"] == "-0.3 s" and found["store"] == "shared, protected by Landlock"
    assert cells(row(FIT))["store"] == "travels"


def test_a_row_says_where_the_host_has_our_packages() -> None:
    assert cells(row(FIT))["taas"] == "sent on first use"
    names = tuple(package_folder.name for package_folder in needed_package_folders(FIT, KERNEL))
    assert cells(row(structs.replace(FIT, sites=names)))["taas"] == "in its cache"


def test_problems_are_listed_below_their_host_with_what_to_do() -> None:
    found = [HostProblem(ERROR, "no torch", "pip install torch"), HostProblem(WARNING, "slow")]
    lines = check_report([row(FIT, *found), row(FIT, host="gpu2")], KERNEL, {}).splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["pool", "host"],
        ["g2.8", "gpu1"],
        ["✗", "no"],
        ["pip", "install"],
        ["!", "slow"],
        ["g2.8", "gpu2"],
        ["fit", "for"],
    ]
    assert lines[-1] == "fit for runs: 1 of 2 hosts; not gpu1"


def test_hosts_that_reported_little_or_nothing_have_a_row() -> None:
    silent = row(None, HostProblem(ERROR, "no route"))
    assert cells(silent)["python"] == "?" and "no route" in check_report([silent], KERNEL, {})
    assert cells(row(HostFacts("gpu1", "2.7.18")))["python"] == "2.7.18"
    assert cells(row(None, host=""))["host"] == "none is up"


def test_text_of_a_host_is_escaped() -> None:
    evil = "<script>alert(1)</script>"
    facts = structs.replace(FIT, torch=evil)
    found = row(facts, HostProblem(ERROR, evil, evil), host=evil)
    shown = check_report([found], KERNEL, {})._repr_html_()
    assert "<script" not in shown and shown.count("&lt;script&gt;") == 5
