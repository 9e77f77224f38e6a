"""Tests of finding a host's facts by the host's own Python, whatever its version."""

import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest

from taas_magic import probe
from taas_magic.errors import PoolError
from taas_magic.messages import HostFacts, from_json
from taas_magic.setup.facts import (
    ask_host,
    collect_local_facts,
    major_minor,
    python_word,
    this_kernel,
)
from tests.rig.subshell import SubShell

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shell(tmp_path: Path) -> SubShell:
    return SubShell(tmp_path / "home")


def works(command: str) -> bool:
    """Return whether a command runs a Python that is older than 3.8.

    Running the command is necessary: pyenv's command may exist without an interpreter.
    """
    if shutil.which(command) is None:
        return False
    words = [command, "-c", "import json, sys; sys.exit(sys.version_info >= (3, 8))"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@cache
def old_pythons() -> list[str]:
    """Return the commands of this machine's Pythons that are older than 3.8."""
    places = [Path.home() / ".pyenv" / "versions", Path("/opt"), Path("/usr/local")]
    found = [str(path) for place in places for path in sorted(place.glob("*/bin/python"))]
    return [name for name in ["python2", "python3.6", "python3.7", *found] if works(name)]


def test_a_python_of_the_operating_system_is_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert not probe.is_externally_managed()
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    assert probe.is_externally_managed()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert not probe.is_externally_managed()


def test_a_host_reports_what_its_python_finds(shell: SubShell, tmp_path: Path) -> None:
    facts = ask_host(
        shell, sys.executable, ["psutil", "no-such"], ["torch", "no_such"], mark=str(tmp_path)
    )
    assert facts.python == platform.python_version() and facts.host == "there"
    assert set(facts.versions) == {"psutil"} and facts.missing == ("no_such",)
    assert major_minor(facts.torch) == major_minor(this_kernel().torch)
    assert facts.cache == str(tmp_path / "home/.cache/taas") and facts.cache_error == ""
    assert facts.sees_store and not ask_host(shell, sys.executable, mark="/none").sees_store
    assert facts.interface_of("127.0.0.1") == "lo" and facts.interface_of("192.0.2.99") == ""
    assert facts.hostname == socket.gethostname() and abs(facts.ahead_s) < 60
    assert facts.cores >= 1 and facts.free_bytes > 0


def test_facts_of_this_machine_need_no_shell(shell: SubShell) -> None:
    here, there = collect_local_facts("here"), ask_host(shell, sys.executable)
    assert (here.python, here.torch, here.gpus) == (there.python, there.torch, there.gpus)


def test_what_a_login_script_prints_does_no_harm(shell: SubShell) -> None:
    shell.profile = "Welcome!\n{no json\n\033]0;there\007"
    assert ask_host(shell, sys.executable).python == platform.python_version()


def test_modules_in_the_home_folder_are_no_packages(shell: SubShell) -> None:
    shell.home.mkdir()
    (shell.home / "json.py").write_text("raise RuntimeError")
    (shell.home / "leftover").mkdir()
    assert ask_host(shell, sys.executable, modules=["leftover"]).missing == ("leftover",)


def test_the_kernels_own_digest_is_that_of_a_host_with_the_same_files(shell: SubShell) -> None:
    shell.environ["PYTHONPATH"] = str(ROOT)
    facts = ask_host(shell, sys.executable)
    assert facts.taas_digest == this_kernel().taas_digest != "" and facts.python_path == (
        str(ROOT),
    )


def test_a_cache_that_cannot_be_written_is_reported(shell: SubShell, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shell.environ["XDG_CACHE_HOME"] = str(tmp_path / "file")
    assert "directory" in ask_host(shell, sys.executable).cache_error


def test_an_old_python_is_reported_as_old(shell: SubShell) -> None:
    if not (found := old_pythons()):
        pytest.skip("no Python older than 3.8 on this machine")
    for python in found:
        facts = ask_host(shell, python)
        assert facts.python.startswith(("2.", "3.")) and facts.system == ""


@pytest.mark.parametrize(
    ("python", "said"),
    [("/no/such/python3", "there is no Python"), ("false", "exit code 1"), ("cat", "exit code 0")],
)
def test_a_command_that_is_no_python_is_named_with_its_host(
    python: str, said: str, shell: SubShell
) -> None:
    with pytest.raises(PoolError, match=f"^host there: .*{said}"):
        ask_host(shell, python)


def test_the_hosts_own_shell_expands_its_home(shell: SubShell) -> None:
    shell.home.mkdir()
    (shell.home / "my python").symlink_to(sys.executable)
    assert ask_host(shell, "~/my python").python == platform.python_version()
    assert python_word("~me/bin/python") == "~me/bin/python"
    assert python_word("/a; rm x") == "'/a; rm x'" and python_word(None) == "python3"


def test_facts_of_a_newer_probe_are_read() -> None:
    said = b'{"python": "3.11.1", "no_such": 1, "gpu_names": ["a", "b"]}'
    facts = from_json(said, HostFacts).with_host("h", 0.0)
    assert facts.gpu_names == ("a", "b") and major_minor(facts.python) == "3.11"
