"""Environment variables and import paths of the notebook that ranks on other machines get."""

import os
import subprocess
import sys

from taas_magic.host.spec import Origin, environ_changes, users_path


def test_only_changed_environment_variables_are_sent() -> None:
    before = {"HOME": "/root", "PATH": "/bin", "EMPTY": "", "OLD": "1", "LIST": "a=b"}
    now = {"HOME": "/root", "PATH": "/bin:/opt", "EMPTY": "", "LIST": "a=b", "NEW": "x"}
    assert environ_changes(before, now) == {"PATH": "/bin:/opt", "NEW": "x", "OLD": None}


def test_a_rank_gets_its_hosts_environment_with_the_notebooks_changes() -> None:
    own = {"HOME": "/home/me", "CUDA_VISIBLE_DEVICES": "3", "OLD": "2"}
    origin = Origin("/x", {"HOME": "/root"}, (), changed={"NEW": "x", "OLD": None})
    assert origin.environ_on(own) == {
        "HOME": "/home/me",
        "CUDA_VISIBLE_DEVICES": "3",
        "NEW": "x",
    }


def test_programs_beside_python_come_first_if_path_lacks_their_folder() -> None:
    origin, folder = Origin("/x", {}, ()), os.path.dirname(sys.executable)
    assert origin.environ_on({"PATH": "/bin:/opt"}) == {"PATH": f"{folder}:/bin:/opt"}
    assert origin.environ_on({"PATH": f"/bin:{folder}"}) == {"PATH": f"/bin:{folder}"}
    assert origin.environ_on({}) == {}


def test_a_process_can_list_the_environment_variables_that_it_changed() -> None:
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


def test_import_paths_of_the_interpreter_and_of_packages_are_not_sent() -> None:
    path = ["/venv/lib/python3.11", "/usr/lib/python311.zip", "/x/site-packages", "/home/me/lib"]
    assert users_path(path, ["/venv", "/usr"]) == ["/home/me/lib"]


def test_import_paths_of_the_user_below_an_interpreters_prefix_are_sent() -> None:
    """Users have folders below /usr, the prefix of a system's Python, and below conda's prefix."""
    own = ["/usr/lib/python3.11", "/usr/lib/python3.11/lib-dynload", "/usr/bin", "/opt/conda/bin"]
    users = ["/usr/local/work", "/usr/src/app", "/opt/conda/work"]
    assert users_path([*own, *users], ["/opt/conda", "/usr"]) == users
