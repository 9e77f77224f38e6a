"""Environment variables and import paths of the notebook that ranks on other machines get."""

import os
import subprocess
import sys

from taas_magic.host.spec import Origin, environ_changes, users_path


def test_only_what_changed_travels() -> None:
    before = {"HOME": "/root", "PATH": "/bin", "EMPTY": "", "OLD": "1", "LIST": "a=b"}
    now = {"HOME": "/root", "PATH": "/bin:/opt", "EMPTY": "", "LIST": "a=b", "NEW": "x"}
    assert environ_changes(before, now) == {"PATH": "/bin:/opt", "NEW": "x", "OLD": None}


def test_the_hosts_own_environment_holds_but_for_the_changes() -> None:
    own = {"HOME": "/home/me", "CUDA_VISIBLE_DEVICES": "3", "OLD": "2"}
    origin = Origin("/x", {"HOME": "/root"}, (), changed={"NEW": "x", "OLD": None})
    assert origin.environ_on(own) == {
        "HOME": "/home/me",
        "CUDA_VISIBLE_DEVICES": "3",
        "NEW": "x",
    }


def test_a_process_knows_what_it_changed() -> None:
    code = """
import os
import psutil
from taas_magic.host.spec import environ_changes
os.environ["ADDED"] = "1"
del os.environ["GONE"]
print(environ_changes(psutil.Process().environ(), os.environ))
"""
    environ = {**os.environ, "GONE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "{'ADDED': '1', 'GONE': None}"


def test_the_path_of_interpreter_and_packages_stays() -> None:
    path = ["/venv/lib/python3.11", "/usr/lib/python311.zip", "/x/site-packages", "/home/me/lib"]
    assert users_path(path, ["/venv", "/usr"]) == ["/home/me/lib"]


def test_folders_of_the_user_beside_the_interpreters_own_are_the_users() -> None:
    """Users have folders below /usr, the prefix of a system's Python, and below conda's prefix."""
    own = ["/usr/lib/python3.11", "/usr/lib/python3.11/lib-dynload", "/usr/bin", "/opt/conda/bin"]
    users = ["/usr/local/work", "/usr/src/app", "/opt/conda/work"]
    assert users_path([*own, *users], ["/opt/conda", "/usr"]) == users
