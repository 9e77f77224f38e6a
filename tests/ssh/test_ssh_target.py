"""Hosts as the user writes them, with ssh's own configuration."""

from pathlib import Path

import pytest
from paramiko import SSHConfig

from taas_magic.errors import UsageError
from taas_magic.ssh.config import Target, find_target, read_config

CONFIG = """
Host gpu1
  HostName 10.0.0.1
  Port 2201
  User ada
  IdentityFile ~/.ssh/for_%h
Host inner
  ProxyJump ada@gate1,gate2:2222
Host gate1
  HostName gate1.example.org
  ProxyCommand nc %h %p
Host gate2
  ProxyJump nowhere
Host direct
  ProxyCommand none
  ProxyJump none
Host one
  ProxyJump two
Host two
  ProxyJump one
Host *
  User bob
  IdentitiesOnly yes
  UserKnownHostsFile /a/known /b/known
  GlobalKnownHostsFile none
"""


def target(host: str) -> Target:
    return find_target(host, SSHConfig.from_text(CONFIG))


def place(found: Target) -> str:
    return f"{found.user}@{found.address}"


@pytest.mark.parametrize(
    ("host", "where"),
    [
        ("gpu1", "ada@10.0.0.1:2201"),
        ("me@gpu1:22", "me@10.0.0.1:22"),
        ("gpu9", "bob@gpu9:22"),
        ("ssh://me@gpu9:2222", "me@gpu9:2222"),
        ("[fe80::1]:2222", "bob@fe80::1:2222"),
    ],
)
def test_what_the_user_writes_goes_before_the_configuration(host: str, where: str) -> None:
    assert place(target(host)) == where


def test_keys_and_known_hosts_are_those_of_the_configuration() -> None:
    found = target("gpu1")
    assert found.identity_files == (str(Path("~/.ssh/for_10.0.0.1").expanduser()),)
    assert found.identities_only
    assert found.known_hosts == ("/a/known", "/b/known")
    assert found.known_as == "[10.0.0.1]:2201"


def test_jumps_lead_through_each_other() -> None:
    found = target("inner")
    assert found.jump is not None and found.jump.jump is not None
    assert place(found.jump) == "bob@gate2:2222"
    assert place(found.jump.jump) == "ada@gate1.example.org:22"
    assert found.jump.jump.proxy_command == "nc gate1.example.org 22"
    assert found.jump.jump.jump is None


def test_none_means_none() -> None:
    found = target("direct")
    assert found.jump is None and found.proxy_command is None


@pytest.mark.parametrize("host", ["one", "a b", "", "host:port"])
def test_what_makes_no_sense_is_refused(host: str) -> None:
    with pytest.raises(UsageError):
        target(host)


def test_included_files_stand_in_their_place(tmp_path: Path) -> None:
    (tmp_path / "part.conf").write_text("Host gpu2\n  Port 22022\n")
    config = tmp_path / "config"
    config.write_text(f"Host gpu1\n  User ada\n  Include {tmp_path}/*.conf\n  Port 2201\n")
    read = read_config(str(config))
    assert place(find_target("gpu1", read)) == "ada@gpu1:2201"
    assert find_target("gpu2", read).port == 22022


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        read_config(str(tmp_path / "nowhere"))
    (tmp_path / "odd").write_text("gibberish\n")
    with pytest.raises(UsageError, match="odd"):
        read_config(str(tmp_path / "odd"))
