"""Tests of which settings of the kernel's process are sent to the ranks."""

import json
import multiprocessing
import subprocess
import sys
from typing import Any

import pytest

from taas_magic.capture.process_state import changes, is_default_argv

COLLECT = """
import json, sys
{}
from taas_magic.capture import process_state
state = process_state.collect()
state.pop("warnings")
state["imported"] = sorted({{"numpy", "torch", "matplotlib"}} & sys.modules.keys())
print(json.dumps(state, default=str))
"""
LAUNCHER = ["python", "-m", "ipykernel_launcher", "-f", "kernel.json"]


def collected(setup: str, *words: str) -> Any:
    """Run the code `setup` in a new process, and return the process state that capture collects.

    Warning filters are left out. `words` are the arguments of the process.
    """
    command = [sys.executable, "-c", COLLECT.format(setup), *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


def test_a_fresh_process_has_no_state_to_send_and_imports_nothing() -> None:
    assert collected("", "--own", "word") == {"imported": []}
    assert collected("import numpy, torch, matplotlib").keys() <= {"logging", "imported"}


def test_only_changed_settings_are_sent() -> None:
    setup = "import numpy, torch; torch.manual_seed(2**32 - 1); numpy.set_printoptions(precision=3)"
    found = collected(setup)
    assert (found["torch"], found["numpy"]) == ({"seed": 2**32 - 1}, {"print": {"precision": 3}})


def test_torchs_newer_precision_is_no_obstacle() -> None:
    setup = "import torch; torch.backends.fp32_precision = 'tf32'"
    assert "torch" not in collected(setup)


@pytest.mark.parametrize(
    ("argv", "orig_argv", "own"),
    [
        (["/lib/ipykernel_launcher.py", "-f", "kernel.json"], LAUNCHER, True),
        (["/lib/ipykernel/__main__.py", "-f", "k"], ["python", "-m", "ipykernel", "-f", "k"], True),
        (["/lib/taas_magic/kernel.py"], ["python", "-m", "taas_magic.kernel"], True),
        (["/bin/ipython"], ["/bin/python", "/bin/ipython"], True),
        (["-c", "--x"], ["python", "-c", "pass", "--x"], True),
        (["/lib/ipykernel_launcher.py"], LAUNCHER, False),
        (["train.py"], LAUNCHER, False),
        (["train.py", "-f", "kernel.json"], LAUNCHER, False),
        (["train.py", "--lr", "1"], LAUNCHER, False),
        ([""], LAUNCHER, False),
        ([], LAUNCHER, False),
    ],
)
def test_arguments_of_the_program_differ_from_those_of_the_kernel(
    argv: list[str], orig_argv: list[str], own: bool
) -> None:
    assert is_default_argv(argv, orig_argv) is own


def test_a_changed_setting_is_sent_without_the_settings_that_stay() -> None:
    before = {"torch": {"seed": 0, "dtype": "float64"}, "argv": ["train.py"]}
    now = {"torch": {"seed": 0, "dtype": "float16"}, "argv": ["train.py"], "recursion_limit": 2000}
    assert changes({}, now) == now
    assert changes(before, now) == {"torch": {"dtype": "float16"}, "recursion_limit": 2000}


def test_a_setting_that_is_set_back_is_sent_with_its_default_except_a_seed() -> None:
    kwargs = {"bbox_inches": "tight", "dpi": 99}  # a dict that is one setting
    before = {
        "torch": {"seed": 0, "dtype": "float64"},
        "numpy": {"print": {"precision": 3, "suppress": True}},
        "ipython": {"figures": {"print_figure_kwargs": {"dpi": 99}}},
        "start_method": "spawn",
    }
    now = {
        "numpy": {"print": {"suppress": True}},
        "ipython": {"figures": {"print_figure_kwargs": kwargs}},
    }
    assert changes(before, now) == {
        "torch": {"dtype": "float32"},
        "numpy": {"print": {"precision": 8}},
        "ipython": {"figures": {"print_figure_kwargs": kwargs}},
        "start_method": multiprocessing.get_all_start_methods()[0],
    }
