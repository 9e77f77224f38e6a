"""Tests of hosts that have SSH and a Python with torch, but no package of taas-magic."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from taas_magic.config import load_config
from taas_magic.errors import PoolError
from taas_magic.notebook import pools
from taas_magic.setup.facts import major_minor, this_kernel
from tests.harness import Notebook
from tests.rig.bare_python import make_bare_python
from tests.rig.hosts import Hosts, hosts_up
from tests.setup.test_setup_facts import old_pythons

pytestmark = [pytest.mark.network]


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return two Pythons for hosts: `bare` has only torch; `other` has another version of torch."""
    folder = tmp_path_factory.mktemp("pythons")
    other = make_bare_python(folder / "other", packages=())
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "other")}))
    (site / "torch-1.13.1.dist-info").mkdir()
    text = "Metadata-Version: 2.1\nName: torch\nVersion: 1.13.1\n"
    (site / "torch-1.13.1.dist-info/METADATA").write_text(text)
    return {"bare": make_bare_python(folder / "bare"), "other": other}


@pytest.fixture(scope="module")
def hosts(pythons: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    keep = [python.parents[1] for python in pythons.values()]
    share = [tmp_path_factory.getbasetemp()]
    old = [Path(name).parents[1] for name in old_pythons() if name.startswith("/")]
    with hosts_up(2, keep=[*keep, *old], share=share, debian=True) as made:
        yield made


@pytest.fixture
def remote(notebook: Notebook, hosts: Hosts, pythons: dict[str, Path]) -> Iterator[Notebook]:
    """Yield a notebook with one pool of the hosts for each Python."""
    settings = notebook.project / "taas.toml"
    paths = {name: str(path) for name, path in pythons.items()}
    paths["old"] = next((name for name in old_pythons() if name.startswith("/")), "/none")
    settings.write_text("".join(pool_table(name, hosts, path) for name, path in paths.items()))
    config = load_config(notebook.project)
    yield notebook
    settings.unlink()
    for name in paths:
        pools.down(name, config)


def pool_table(name: str, hosts: Hosts, python: str) -> str:
    return f"""
[pools.{name}]
engine = "ssh"
hosts = {hosts.names}
python = "{python}"
gpus = 0
cores = 2
options = {{ ssh_config = "{hosts.ssh_config}" }}
"""


@pytest.mark.fault(29)
def test_a_cell_runs_on_a_host_that_had_nothing_of_ours(
    remote: Notebook, hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    """taas-magic installs its packages on the host. It does not install a package of the user.

    If the cell imports a module that the host lacks, the error names it before the cell runs.
    """
    assert ".cache" not in hosts.exec(1, "ls", "-a", "/root").split()
    remote.define("import psutil")
    cell = "import sys, taas_magic\nprint(taas_magic.__file__, sys.executable, psutil.__name__)"
    outcome = remote.run(cell, "--pool bare")
    assert outcome.error is None
    place, python, _ = outcome.lines[0][0].split()
    assert place.startswith("/root/.cache/taas/site/taas-") and python.endswith("bare/bin/python")
    sites = hosts.exec(1, "ls", "/root/.cache/taas/site").split()
    assert [name.partition("-")[0] for name in sites] == ["deps", "taas"]

    outcome = remote.run("import sklearn.svm\nprint('ran')", "--pool bare")
    assert isinstance(outcome.error, PoolError)
    assert f"host {hosts.name(1)}: module sklearn that the cell needs" in outcome.shown
    assert "bare/bin/python -m pip install sklearn" in outcome.shown
    assert outcome.lines == {} and not outcome.of_kind("state")
    outcome = remote.run("import sklearn.svm", "--pool bare --rehearse")
    assert isinstance(outcome.error, PoolError) and 'would fail on pool "bare"' in outcome.shown
    names = ", ".join(hosts.names)
    report = capsys.readouterr().out
    assert f"hosts {names}: module sklearn that the cell needs: not installed" in report
    assert outcome.run is not None and outcome.run.state == "SUCCEEDED"  # on the local pool
    optional = "try:\n    import sklearn\nexcept ImportError:\n    print('without')"
    assert remote.run(optional, "--pool bare").lines[0] == ["without"]


@pytest.mark.fault(30)
def test_another_torch_is_refused_with_both_versions(remote: Notebook, hosts: Hosts) -> None:
    outcome = remote.run("print('ran')", "--pool other")
    assert isinstance(outcome.error, PoolError)
    kernel = this_kernel()
    expected = f"host {hosts.name(1)}: torch 1.13.1 there, {kernel.torch} in this kernel"
    assert expected in outcome.shown and "ran" not in outcome.shown


@pytest.mark.fault(30)
def test_the_check_shows_all_hosts_with_advice(remote: Notebook, hosts: Hosts) -> None:
    report = pools.check(load_config(remote.project), ["bare", "other"])
    text = str(report)
    lines = text.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("bare")] == [
        ["bare", name] for name in hosts.names
    ]
    assert f"eth0 {hosts.address(2)}" in text
    assert f"its own name {hosts.name(1)} resolves to 127.0.1.1" in text
    assert "torch 1.13.1 there" in text and "pip install 'torch==" in text
    unfit = ", ".join(f"other: {name}" for name in hosts.names)
    assert f"fit for runs: 2 of 4 hosts; not {unfit}" == lines[-1]
    assert "torch 1.13.1 there" in report._repr_html_()


@pytest.mark.fault(30)
def test_another_python_is_refused_with_both_versions(remote: Notebook, hosts: Hosts) -> None:
    if not old_pythons():
        pytest.skip("no Python older than 3.8 on this machine")
    text = str(pools.check(load_config(remote.project), ["old"]))
    assert f"there, {this_kernel().python} in this kernel" in text
    assert f"Name a Python {major_minor(this_kernel().python)} of that host" in text


def test_a_host_that_is_down_does_not_delay_the_facts_of_other_hosts(
    notebook: Notebook, pythons: dict[str, Path]
) -> None:
    with hosts_up(2, keep=[pythons["bare"].parents[1]]) as hosts:
        settings = notebook.project / "taas.toml"
        settings.write_text(pool_table("p", hosts, str(pythons["bare"])))
        hosts.kill(2)
        text = str(pools.check(load_config(notebook.project), ["p"]))
        settings.unlink()
    assert f"fit for runs: 1 of 2 hosts; not {hosts.name(2)}" in text
