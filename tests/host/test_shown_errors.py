"""An error that IPython catches and shows (in `%run`, `%%capture`, `run_cell`) fails the run."""

import json
from pathlib import Path

import pytest

from taas_magic.errors import RankFailed
from tests.harness import ANSI, Notebook

SCRIPT = "import sys\n\ndef work():\n    {}\n\nwork()\n"
HERE = "import sys\nsys.path.insert(0, '')\n"
GOES_ON = "\nprint('the cell goes on')\n"


@pytest.mark.fault(1)
@pytest.mark.parametrize(
    ("source", "etype", "shown"),
    [
        ("%run raises.py", "ValueError", "raises.py"),
        ("%run -i raises.py", "ValueError", "raises.py"),
        ("%run -t raises.py", "ValueError", "raises.py"),
        (HERE + "%run -m raises", "ValueError", "raises.py"),
        ("%run leaves.py", "SystemExit", "SystemExit: 3"),
        (HERE + "%run -m leaves", "SystemExit", "SystemExit: 3"),
        ("%run broken.py", "SyntaxError", "broken.py"),
        ("%run raises.ipynb", "ValueError", "bad"),
        ("%time int('bad')", "ValueError", "int('bad')"),
        ("get_ipython().run_cell('int(\"bad\")')", "ValueError", "bad"),
        ("get_ipython().run_cell('1 +')", "SyntaxError", "1 +"),
        ("get_ipython().run_cell('%run raises.py')", "ValueError", "raises.py"),
        ("get_ipython().run_cell_magic('capture', '', '%run raises.py')", "ValueError", "raises"),
        ("await get_ipython().run_cell_async('1 / 0', transformed_cell='1 / 0')", "Zero", "1 / 0"),
        (
            "class Broken:\n    def _repr_html_(self):\n        return 1 / 0\ndisplay(Broken())",
            "ZeroDivisionError",
            "1 / 0",
        ),
        ("%run raises.py\nint('worse')", "ValueError", "bad"),
        ("%run raises.py\nimport sys\nsys.exit(0)", "ValueError", "bad"),
    ],
)
def test_what_ipython_shows_fails_the_run(
    notebook: Notebook, source: str, etype: str, shown: str
) -> None:
    """If IPython shows an error, for example of `%run`, the run fails at the end of the cell."""
    _write_scripts(notebook)
    outcome = notebook.run(source + GOES_ON, gpus=1)
    assert isinstance(outcome.error, RankFailed)
    assert outcome.run is not None and outcome.run.state == "FAILED"
    assert outcome.error.etype.startswith(etype)
    assert shown in outcome.shown
    log = ANSI.sub("", outcome.run.logs(0))
    assert shown in log
    if "%run raises.py" in source or "run_cell" in source:
        lines = outcome.lines[0]
        ends = "worse" in source or "exit(0)" in source
        assert ("the cell goes on" in lines) is not ends


def test_a_cell_that_fails_under_the_capture_magic_fails_the_run(notebook: Notebook) -> None:
    outcome = notebook.run("%%capture kept\nprint('captured')\nint('bad')", gpus=1)
    assert isinstance(outcome.error, RankFailed) and "invalid literal" in outcome.shown


def test_the_log_has_all_shown_errors_and_the_first_one_is_the_cause(
    notebook: Notebook, tmp_path: Path
) -> None:
    """The first shown error restarts the run. A script that ends with `sys.exit(0)` shows none."""
    _write_scripts(notebook)
    source = (
        f"shown = {str(tmp_path / 'shown')!r}"
        + """
import os, time
%run fine.py
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        %run raises.py
        %time {}["worse"]
        open(shown, "w").close()
    while not os.path.exists(shown):
        time.sleep(0.01)
    int("bad too") if os.environ["RANK"] == "0" else None
"""
    )
    outcome = notebook.run(source, "--max-restarts 1")
    assert outcome.error is None and outcome.run is not None
    [restart] = outcome.of_kind("restart")
    assert restart["failure"]["etype"] == "ValueError"
    log = ANSI.sub("", outcome.run.logs(1))
    assert "ValueError: bad\n" in log and "KeyError: 'worse'" in log and "raises.py" in log


def _write_scripts(notebook: Notebook) -> None:
    scripts = {
        "raises.py": SCRIPT.format("raise ValueError('bad')"),
        "leaves.py": SCRIPT.format("sys.exit(3)"),
        "fine.py": SCRIPT.format("sys.exit(0)"),
        "broken.py": "import sys\n1 +\n",
        "raises.ipynb": """{"cells": [{"cell_type": "code", "execution_count": null, "id": "a",
            "metadata": {}, "outputs": [], "source": ["raise ValueError('bad')"]}],
            "metadata": {}, "nbformat": 4, "nbformat_minor": 5}""",
    }
    for name, text in scripts.items():
        (notebook.project / name).write_text(text)


def test_an_exception_of_a_rank_is_the_cause_of_the_notebooks_exception(notebook: Notebook) -> None:
    """`__cause__` is an instance of the notebook's class, made without the class's `__init__`."""
    notebook.define(
        "class TrainError(Exception):\n"
        "    def __init__(self, step, loss):\n        super().__init__(f'{step}: {loss}')\n"
    )
    space = notebook.shell.user_ns
    cause = _cause(notebook, "raise TrainError(3, 'nan')")
    assert type(cause) is space["TrainError"] and str(cause) == "3: nan"
    assert type(_cause(notebook, "open('nowhere')")) is FileNotFoundError
    assert type(_cause(notebook, "import json\njson.loads('{')")) is json.JSONDecodeError
    assert _cause(notebook, "class Own(Exception): pass\nraise Own('bad')") is None
    assert _cause(notebook, "import os\nos._exit(3)") is None


def _cause(notebook: Notebook, source: str) -> BaseException | None:
    error = notebook.run(source, gpus=1).error
    assert isinstance(error, RankFailed)
    return error.__cause__


def test_hydra_looks_for_its_configuration_in_the_notebooks_folder(
    notebook: Notebook, tmp_path: Path
) -> None:
    """Hydra is fake here. If its `is_notebook` returns True, hydra reads the folder from `_dh`."""
    folder = tmp_path / "hydra" / "_internal"
    folder.mkdir(parents=True)
    for path in (folder.parent, folder):
        (path / "__init__.py").touch()
    (folder / "utils.py").write_text("def is_notebook():\n    return False\n")
    source = f"""
import os, sys
sys.path.insert(0, {str(tmp_path)!r})
from hydra._internal import utils
print(utils.is_notebook(), _dh == [os.getcwd()])
"""
    assert notebook.run(source, gpus=1).lines[0] == ["True True"]
