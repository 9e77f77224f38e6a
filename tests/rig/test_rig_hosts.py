"""Tests of the simulated hosts: they are isolated, can lose their network, and leave nothing."""

import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.eventually import HUNG_S
from tests.rig.hosts import Hosts, hosts_up

pytestmark = pytest.mark.network


def ssh(hosts: Hosts, number: int, command: str) -> str:
    words = ["ssh", "-F", str(hosts.ssh_config), "-o", "BatchMode=yes", hosts.name(number), command]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=HUNG_S)
    return done.stdout.strip()


def test_hosts_are_apart_and_leave_nothing(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (tmp_path / "hidden").write_text("")
    with hosts_up(2, share=[shared]) as hosts:
        assert [ssh(hosts, number, "hostname") for number in (1, 2)] == hosts.names
        ssh(hosts, 1, f"echo one > {shared}/file")
        assert ssh(hosts, 2, f"cat {shared}/file") == "one"
        assert ssh(hosts, 1, f"ls {tmp_path}") == "shared"
        hosts.cut(2)
        with pytest.raises(OSError), socket.create_connection((hosts.address(2), 22), timeout=1):
            pass
        hosts.heal(2)
        assert ssh(hosts, 2, "hostname") == hosts.name(2)
        assert not hosts.left(1)
    assert not hosts.state.exists()
    assert not [name for name in psutil.net_if_addrs() if name.startswith(hosts.prefix)]
