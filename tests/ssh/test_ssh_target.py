"""Tests of the settings of SSH hosts: those of the user's pool, and those of `ssh -G`."""

import os
import pwd
import shutil
import threading
from pathlib import Path

import psutil
import pytest

from taas_magic.config import PoolConfig
from taas_magic.engines.ssh import SshEngine
from taas_magic.errors import PoolError, UsageError
from taas_magic.ssh import config as settings
from taas_magic.ssh.config import ConnectStopped, SshTarget, find_target
from tests.eventually import eventually

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh is installed")

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


def target(tmp_path: Path, host: str, text: str = CONFIG) -> SshTarget:
    (tmp_path / "config").write_text(text)
    return find_target(host, str(tmp_path / "config"), threading.Event())


def place(found: SshTarget) -> str:
    return f"{found.user}@{found.address}"


@pytest.mark.process
@pytest.mark.parametrize(
    ("host", "where"),
    [
        ("gpu1", "ada@10.0.0.1:2201"),
        ("me@gpu1:22", "me@10.0.0.1:22"),
        ("gpu9", "bob@gpu9:22"),
        ("ssh://me@gpu9:2222", "me@gpu9:2222"),
        ("[fe80::1]:2222", "bob@fe80::1:2222"),
        ("ada@lab.org@gpu9:2222", "ada@lab.org@gpu9:2222"),
    ],
)
def test_settings_of_the_pool_override_the_ssh_configuration(
    tmp_path: Path, host: str, where: str
) -> None:
    assert place(target(tmp_path, host)) == where


@pytest.mark.process
def test_keys_and_known_hosts_are_those_of_the_configuration(tmp_path: Path) -> None:
    found = target(tmp_path, "gpu1")
    assert found.identity_files == (f"{pwd.getpwuid(os.getuid()).pw_dir}/.ssh/for_10.0.0.1",)
    assert found.identities_only
    assert found.known_hosts == ("/a/known", "/b/known")
    assert found.known_as == "[10.0.0.1]:2201"


@pytest.mark.process
def test_several_jump_hosts_form_a_chain(tmp_path: Path) -> None:
    found = target(tmp_path, "inner")
    assert found.jump is not None and found.jump.jump is not None
    assert place(found.jump) == "bob@gate2:2222"
    assert place(found.jump.jump) == "ada@gate1.example.org:22"
    assert found.jump.jump.proxy_command == "nc gate1.example.org 22"
    assert found.jump.jump.jump is None


@pytest.mark.process
def test_the_value_none_disables_jump_and_proxy_command(tmp_path: Path) -> None:
    found = target(tmp_path, "direct")
    assert found.jump is None and found.proxy_command is None


@pytest.mark.process
@pytest.mark.parametrize("host", ["one", "a b", "", "host:port"])
def test_invalid_settings_are_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(UsageError):
        target(tmp_path, host)


@pytest.mark.process
def test_an_invalid_configuration_is_reported_with_what_ssh_prints(tmp_path: Path) -> None:
    file = tmp_path / "config"
    with pytest.raises(PoolError) as caught:
        target(tmp_path, "gpu1", "Port odd\n")
    what, *printed, todo = str(caught.value).splitlines()
    assert what == f"host gpu1: `ssh -T -G -F {file} -- gpu1` failed with exit code 255:"
    assert f"    {file} line 1: Bad port 'odd'." in printed
    assert todo.startswith("Correct the SSH configuration")
    with pytest.raises(PoolError, match=r"nowhere: No such file"):
        find_target("gpu1", str(tmp_path / "nowhere"), threading.Event())


@pytest.mark.process
@pytest.mark.parametrize("ends_by", ["time", "stop"])
def test_a_slow_command_of_the_configuration_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    file, stop = tmp_path / "config", threading.Event()
    file.write_text(f'Match exec "echo $$ > {tmp_path}/pid; sleep 600; true"\n  User ada\n')
    if ends_by == "time":
        monkeypatch.setattr(settings, "_SSH_S", 1.0)
    else:
        threading.Timer(1.0, stop.set).start()
    with pytest.raises(PoolError if ends_by == "time" else ConnectStopped) as caught:
        find_target("gpu1", str(file), stop)
    if ends_by == "time":
        assert "did not finish within 1 s" in str(caught.value)
        assert "`Match exec`" in str(caught.value)
    pid = int((tmp_path / "pid").read_text())
    eventually(lambda: not psutil.pid_exists(pid))


def test_without_the_ssh_command_only_settings_of_the_pool_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config"
    pool = PoolConfig("lab", engine="ssh", hosts=("gpu1",), options={"ssh_config": str(file)})
    file.write_text(CONFIG)
    assert SshEngine(pool).notes() == ()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert place(target(tmp_path, "ada@gpu1:2202")) == "ada@gpu1:2202"
    found = target(tmp_path, "gpu1")
    assert found.address == "gpu1:22" and not found.identities_only
    assert f"{pwd.getpwuid(os.getuid()).pw_dir}/.ssh/known_hosts" in found.known_hosts
    [note] = SshEngine(pool).notes()
    assert note.startswith(f"{file} was not read, because no `ssh` program is installed here")
    with (
        pytest.raises(PoolError) as caught,
        SshEngine(pool).shells(threading.Event())["gpu1"],
    ):
        pass
    assert str(caught.value).splitlines()[-1] == note
    file.unlink()
    assert SshEngine(pool).notes() == ()
