"""`taas.federation`: Flower on hosts that share nothing. Each host's data stays there."""

import math
import secrets
import socket
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from taas_magic.errors import RankFailed, UsageError
from taas_magic.federation.federation import federation
from taas_magic.federation.flower import RESULT, _with_saved_result
from taas_magic.notebook import launch
from taas_magic.notebook.runs import Run
from tests.cellfiles import cells_of
from tests.events import Line
from tests.harness import Notebook, on_event, without_pytests_filter
from tests.rig.hosts import Hosts, hosts_up
from tests.rig.pools import enter, give_back, settings_in, ssh_pool

# Each test imports Flower itself, because the import takes 1 s in each process that collects tests.
pytestmark = pytest.mark.skipif(find_spec("flwr") is None, reason="flwr needs Python 3.11")

[APPS] = cells_of("federation_apps")

PLACES = ("/tmp", "/root", "/home", "/var/tmp", "/run", "/dev/shm", "/srv", "/mnt")
"""Folders in which a process could leave a file on a host."""

SINCE = "/srv/since"
"""A file that is created on each host before the test, to find the files that are newer."""


def test_the_return_value_of_main_is_written_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.serverapp import ServerApp

    monkeypatch.setenv(RESULT, str(tmp_path / "result"))
    app = ServerApp()
    app.main()(lambda grid, context: [grid, context])
    _with_saved_result(app)("the grid", "the context")
    assert b"the context" in (tmp_path / "result").read_bytes()


def test_the_configuration_of_apps_arrives_unchanged() -> None:
    import tomli

    from taas_magic.federation.programs import _pyproject_text

    told = {"text": 'a "b" \n😀', "small": 1e-7, "bound": math.inf, "is": True, "count": -3}
    config = tomli.loads(_pyproject_text({**told, "none": math.nan}))["tool"]["flwr"]["app"][
        "config"
    ]
    assert math.isnan(config.pop("none")) and config == told


def test_an_address_that_this_machine_lacks_is_an_error_and_no_endless_search() -> None:
    from taas_magic.federation.programs import _free_port

    with pytest.raises(RuntimeError, match=r"cannot listen on 192\.0\.2\.1: .*assign requested"):
        _free_port("192.0.2.1")
    assert _free_port("127.0.0.1") > 0


@pytest.mark.parametrize(
    "wrong", [{"pool": 3}, {"hosts": "x"}, {"hosts": -1}, {"per_host": {"north": "/srv"}}]
)
def test_a_wrong_argument_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="per_host a dict for each host's name; got pool="):
        federation(**wrong)


def test_a_value_that_flower_does_not_pass_on_is_refused() -> None:
    with pytest.raises(UsageError, match=r"got a PosixPath for 'data'"):
        federation(per_host={"north": {"data": Path("/srv")}}).run(None, None)
    with pytest.raises(UsageError, match=r"got a list for 'rates'"):
        federation().run(None, None, {"rates": [1, 2]})


def test_a_wrong_name_in_per_host_is_refused_before_a_local_pool_starts(notebook: Notebook) -> None:
    notebook.define("import taas")
    known = f'per_host names elsewhere; the hosts of pool "local" are {socket.gethostname()}$'
    with pytest.raises(UsageError, match=known):
        notebook.define("taas.federation(per_host={'elsewhere': {'data': 1}}).run(None, None)")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_up(2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def settings(
    warm_notebook: Notebook, hosts: Hosts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    folder = settings_in(
        tmp_path_factory.mktemp("config"), ssh_pool("sites", hosts, more="lease_s = 20")
    )
    yield folder
    give_back(warm_notebook, folder, "sites")


@pytest.fixture
def sites(warm_notebook: Notebook, settings: Path, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """Return a notebook with the pool `sites` and with the definitions of both apps."""
    enter(warm_notebook, settings, monkeypatch)
    warm_notebook.define(APPS)
    return warm_notebook


def federate(notebook: Notebook, per_host: dict[str, dict[str, str]], **config: int) -> Run:
    """Run a federation in a cell, and assign its result to the notebook's variable `result`."""
    notebook.shell.user_ns |= {"per_host": per_host, "config": config}
    with without_pytests_filter():
        notebook.define(
            "result = taas.federation(pool='sites', per_host=per_host)"
            ".run(server_app, client_app, config)"
        )
    assert launch.last_run is not None
    return launch.last_run


def holding(hosts: Hosts, number: int, text: str) -> list[str]:
    """Return the files of a host that contain `text` and are newer than the file `SINCE`."""
    written = f"find {' '.join(PLACES)} -type f -cnewer {SINCE}"
    found = hosts.exec(number, "sh", "-c", f"{written} -exec grep -lF {text} {{}} + 2>/dev/null; :")
    return found.split()


@pytest.mark.network
def test_data_stays_on_its_host_and_the_result_comes_back(sites: Notebook, hosts: Hosts) -> None:
    (sites.project / "notes.txt").write_text(mark := secrets.token_hex(16))
    texts = {number: secrets.token_hex(16) * number for number in (1, 2)}
    for number, text in texts.items():
        hosts.exec(number, "touch", "-d", "1 minute ago", SINCE)
        hosts.exec(number, "sh", "-c", f"mkdir -p /srv/data && printf {text} > /srv/data/own")
    per_host = {name: {"data": "/srv/data/own"} for name in hosts.names}
    run = federate(sites, per_host, rounds=2, timeout=300)
    result = sites.shell.user_ns["result"]
    mean = (32 * 32 + 64 * 64) / 96  # weighted by examples
    assert result.arrays.to_numpy_ndarrays()[0].tolist() == pytest.approx([2 * mean] * 2)
    first, second = result.train_metrics_clientapp[1], result.train_metrics_clientapp[2]
    assert first["seen"] == pytest.approx(mean)
    for library in ("torch", "numpy"):  # each round draws other random numbers
        assert first[library] != second[library]
    assert "serves 2 rounds" in run.logs(0)
    for number, text in texts.items():
        others = [holding(hosts, other, text[:32]) for other in (1, 2) if other != number]
        assert holding(hosts, number, text[:32]) == ["/srv/data/own"] and others == [[]]
        here = [str(sites.state_dir), str(sites.project)]
        assert subprocess.run(["grep", "-rqF", text[:32], *here], check=False).returncode == 1
        assert not holding(hosts, number, mark), "the project went to a client"
    assert not [name for name in sites.shell.user_ns if name.startswith("taas_")]
    for number in (1, 2):
        left = hosts.exec(number, "sh", "-c", "ls -A /tmp").split()
        assert not [name for name in left if name.startswith("taas-flower")]


@pytest.mark.network
def test_an_unknown_host_in_per_host_is_refused_and_the_hosts_are_listed(
    sites: Notebook, hosts: Hosts
) -> None:
    listed = f'the hosts of pool "sites" are {", ".join(hosts.names)}'
    with pytest.raises(UsageError, match=f"per_host names elsewhere; {listed}"):
        federate(sites, {"elsewhere": {"data": "/etc/hosts"}}, rounds=1, timeout=60)


FAILS_ON_ONE_HOST = """
import os
class ReadsItsData:
    def __reduce__(self):
        return read_data, (client_app,)
def read_data(app):
    if os.environ.get("RANK") == "1":
        raise OSError("the data of this host is broken")
    return app
federation = taas.federation(pool="sites")
federation.run(server_app, ReadsItsData(), {"rounds": 1, "timeout": 60}, timeout=100)
"""


@pytest.mark.network
def test_a_host_that_fails_before_it_takes_part_ends_the_run(sites: Notebook) -> None:
    """A rank fails when it loads the apps, while the first host waits for this rank's host."""
    with without_pytests_filter(), pytest.raises(RankFailed, match="data of this host is broken"):
        sites.define(FAILS_ON_ONE_HOST)
    assert (run := launch.last_run) is not None and run.state == "FAILED"
    assert [failure.host for failure in run.failures] == [run.hosts[1]]


@pytest.mark.nightly
@pytest.mark.network
def test_the_other_hosts_continue_without_a_lost_client(
    sites: Notebook, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trains_on_another_host(event: Line) -> bool:
        lines = event.get("lines", ()) if event["kind"] == "lines" and event["rank"] else ()
        return any("trains in round" in line for line in lines)

    def power_off(run: Run) -> None:
        hosts.kill(hosts.names.index(run.hosts[1]) + 1)

    per_host = {name: {"data": "/etc/hosts"} for name in hosts.names}
    with on_event(monkeypatch, trains_on_another_host, power_off) as seen:
        run = federate(sites, per_host, rounds=2, timeout=300)
    assert seen and run.state == "SUCCEEDED"
    assert sorted(sites.shell.user_ns["result"].train_metrics_clientapp) == [1, 2]
    assert (run.path / "events.jsonl").read_text().count("no longer takes part") == 1
