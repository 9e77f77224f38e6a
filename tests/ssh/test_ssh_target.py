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


def test_of_two_ways_the_first_one_counts() -> None:
    """As for ssh, which takes the first value of what one of them would say."""
    lines = "Host gpu1\n ProxyCommand nc %h %p\nHost gpu2\n ProxyCommand none\n"
    config = SSHConfig.from_text(f"{lines}Host *\n ProxyJump gate\n")
    one, two = find_target("gpu1", config), find_target("gpu2", config)
    assert (one.proxy_command, one.jump) == ("nc gpu1 22", None)
    assert (two.proxy_command, two.jump) == (None, None)


def test_a_name_may_have_an_at_sign() -> None:
    assert place(target("ada@lab.org@gpu9:2222")) == "ada@lab.org@gpu9:2222"


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


def test_comments_after_words_are_none_of_them(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "Host gpu1 # the new one\n  HostName 10.0.0.1 # lab\n  Port 2201\t# odd\n"
        '  IdentityFile "/a #b/key" # mine\nHost gpu2\n  ProxyCommand gate # %h\n'
    )
    read = read_config(str(config))
    found = find_target("gpu1", read)
    assert found.address == "10.0.0.1:2201" and found.identity_files == ("/a #b/key",)
    assert find_target("gpu2", read).proxy_command == "gate # gpu2"
    assert find_target("one", read).port == 22


def test_red_hats_own_configuration_is_understood(tmp_path: Path) -> None:
    """Its /etc/ssh/ssh_config.d/50-redhat.conf."""
    config = tmp_path / "config"
    config.write_text("Host gpu1\n  User ada\nMatch final all\n\tUser bob\n\tPort 2201\n")
    assert place(find_target("gpu1", read_config(str(config)))) == "ada@gpu1:2201"


@pytest.mark.parametrize(
    "line", ["Port odd", "CanonicalizeHostname yes", "Match exec 'odd"], ids=lambda it: it[:4]
)
def test_what_cannot_be_understood_of_a_host_is_one_line(tmp_path: Path, line: str) -> None:
    config = tmp_path / "config"
    config.write_text(f"{line}\n")
    with pytest.raises(UsageError):
        find_target("gpu1", read_config(str(config)))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        read_config(str(tmp_path / "nowhere"))
    (tmp_path / "odd").write_text("gibberish\n")
    with pytest.raises(UsageError, match="odd"):
        read_config(str(tmp_path / "odd"))
