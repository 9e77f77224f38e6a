"""`taas.run` and `python -m taas_magic run`: functions and scripts on ranks."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from taas_magic.__main__ import main
from taas_magic.errors import RankFailed, ResultError, RunTimeout, UsageError
from tests.conftest import TOKEN, carriers
from tests.eventually import HUNG_S, left_after
from tests.frontend import Scene
from tests.harness import ANSI, Notebook

TRAIN = """
import functools, os, torch, taas
import torch.distributed as dist
scale = 10
class Model(torch.nn.Module): pass
def scaled(x): return x * scale
def train(lr, steps=1, *, model=None):
    dist.init_process_group("gloo")
    total = torch.ones(1) * dist.get_rank()
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {steps} steps")
    return scaled(total.item()), lr, type(model).__name__, os.environ.get("EXTRA")
"""


def value(notebook: Notebook, expression: str) -> Any:
    """Return the value of an expression in the notebook."""
    return eval(expression, notebook.shell.user_ns)


def test_a_function_of_the_notebook_runs_on_ranks(notebook: Notebook) -> None:
    notebook.define(TRAIN)
    notebook.define(
        "run = taas.run(train, 0.5, steps=3, model=Model(), gpus=2, env={'EXTRA': 'a b'}, "
        "name='first try')"
    )
    assert value(notebook, "run.result") == (10.0, 0.5, "Model", "a b")
    assert value(notebook, "run.state, run.world_size, run.name") == ("SUCCEEDED", 2, "first try")
    assert value(notebook, "run.out, run.results") == ({}, [])
    assert "rank 1 of 2: 3 steps" in value(notebook, "run.logs(rank=1)")


def test_the_values_of_all_ranks_come_back(notebook: Notebook) -> None:
    notebook.define("import os, taas\ncount = 0")
    notebook.define("""
def number():
    global count
    count = 5
    return int(os.environ["RANK"])
run = taas.run(number, gpus=3, gather=True, out="count")""")
    assert value(notebook, "run.results, run.result, run.out") == ([0, 1, 2], 0, {"count": 5})
    assert value(notebook, "count") == 5


SETTERS = """
import functools, sys, taas
def by_globals(): globals()["x"] = 1
def calls(function): function()
class Setter:
    def __call__(self): sys.modules["__main__"].x = 1
    @staticmethod
    @functools.cache
    def cached():
        import __main__
        __main__.x = 1
"""


@pytest.mark.parametrize(
    "call",
    [
        *("by_globals", "calls, by_globals", "functools.partial(calls, by_globals)"),
        *("Setter()", "Setter.cached", "lambda: exec('x = 1', globals())"),
    ],
)
def test_a_name_that_only_a_callee_sets_is_returned(notebook: Notebook, call: str) -> None:
    notebook.define(SETTERS)
    notebook.define(f"run = taas.run({call}, gpus=1, out='x')")
    assert value(notebook, "run.out, x") == ({"x": 1}, 1)
    function, _, argument = call.removeprefix("functools.").partition(", ")
    if call.startswith(("by_globals", "calls", "Setter")):
        outcome = notebook.run(f"{function}({argument})", "--out x", gpus=1)
        assert outcome.error is None, outcome.shown


def test_a_name_that_nothing_sets_is_refused(notebook: Notebook) -> None:
    notebook.define("import taas\nlr = 0.1\ndef train(): return lr")
    with pytest.raises(
        UsageError,
        match=r"^--out rate: the function does not set this variable; it has:",
    ):
        notebook.define("taas.run(train, gpus=1, out='rate')")


def test_a_failing_functions_traceback_is_the_functions_own(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(notebook.project)
    (notebook.project / "beside.py").write_text("def halve(n):\n    return 1 / n\n")
    notebook.define("import os, taas\nfrom beside import halve")
    notebook.define("def fail():\n    if os.environ['RANK'] == '1':\n        halve(0)")
    own = ("taas_magic/", "taas.run(")
    with pytest.raises(RankFailed, match="division by zero") as caught:
        notebook.define("taas.run(fail, gpus=2)")
    shown = ANSI.sub("", "\n".join(caught.value._render_traceback_()))
    assert re.search(r"Cell In\[2\], line 3, in fail.*beside.py:2, in halve", shown, re.DOTALL)
    assert not any(text in shown.partition("full log")[0] for text in own)
    with pytest.raises(RankFailed, match="invalid literal") as caught:
        notebook.define("taas.run(int, 'x', gpus=1)")  # int has no Python frame
    shown = ANSI.sub("", "\n".join(caught.value._render_traceback_()))
    assert "ValueError: invalid literal" in shown
    assert not any(text in shown.partition("full log")[0] for text in own)
    with pytest.raises(RankFailed, match="SystemExit: 3"):
        notebook.define("taas.run(os.sys.exit, 3, gpus=1)")
    notebook.define("run = taas.run(os.sys.exit, 0, gpus=1)")
    assert value(notebook, "run.state, run.result") == ("SUCCEEDED", None)


def test_a_note_on_a_changed_value_names_the_argument_out(
    notebook: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook.define("import taas\nlosses = []\ndef train(): losses.append(1)")
    notebook.define("taas.run(train, gpus=1)")
    said = 'losses was changed in the ranks, not in the notebook; out="losses" returns it'
    assert said in capsys.readouterr().out


WORLD = """
import multiprocessing, sys, taas
import matplotlib.pyplot as plt
from IPython.display import display
numbers = [1, 2]
class Item:
    def __init__(self, n): self.n = n
def square(item): return item.n ** 2
def world(world, same, *, ends):
    "Return what the function finds around it."
    global seen
    seen = len(world)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        squares = pool.map(square, [Item(3), Item(4)])
    plt.plot([1, 2])
    display("a text that is shown")
    names = vars(sys.modules["__main__"])
    planted = sorted(n for n in names if "_taas" in n)
    return squares, same is numbers, ends.__globals__ is names, planted
"""


def test_a_function_has_the_notebooks_names_like_a_cell(
    notebook: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook.define(WORLD)
    notebook.define("run = taas.run(world, 'ab', numbers, ends=lambda: seen, gpus=1, out='seen')")
    assert value(notebook, "run.result, run.out") == (([9, 16], True, True, []), {"seen": 2})
    assert not [name for name in notebook.shell.user_ns if "_taas" in name]
    assert value(notebook, "(run.path / 'cell.py').read_text()") == "taas.run(world, ...)"
    shown = capsys.readouterr().out
    assert "a text that is shown" in shown and "<Figure size" in shown


def test_a_returned_value_that_cannot_be_pickled_is_an_error(notebook: Notebook) -> None:
    notebook.define("import threading, taas")
    with pytest.raises(
        ResultError, match=r"the value of the function could not be.*\n +run.result: .*lock"
    ) as it:
        notebook.define("taas.run(threading.Lock, gpus=1)")
    assert "<value>" not in str(it.value) and "--out" not in str(it.value)
    with pytest.raises(UsageError, match="out needs names of variables"):
        notebook.define("taas.run(max, 1, gpus=1, out='<value>')")


def test_a_registered_loader_is_an_argument(notebook: Notebook) -> None:
    notebook.define("""
import taas, torch
from torch.utils.data import DataLoader
loader = DataLoader(range(12), 2)
taas.register(loader)
def consume(batches): return [batch.tolist() for batch in batches]
""")
    try:
        notebook.define("run = taas.run(consume, loader, gpus=2, cpus=1, gather=True)")
        found = value(notebook, "run.results")
        assert sorted(n for batches in found for batch in batches for n in batch) == [*range(12)]
        assert len(found[0]) == len(found[1]) == 3
    finally:
        notebook.define("taas.unregister(loader)")


def test_an_option_that_is_a_parameter_too_is_refused_and_a_partial_is_not(
    notebook: Notebook,
) -> None:
    notebook.define("import functools, taas\ndef show(name): return name")
    with pytest.raises(UsageError, match=r"show has a parameter `name`.*functools.partial"):
        notebook.define("taas.run(show, gpus=1, name='x')")
    notebook.define("run = taas.run(functools.partial(show, name='x'), gpus=1, name='y')")
    assert value(notebook, "run.result, run.name") == ("x", "y")
    notebook.define("run = taas.run(show, 'positional', gpus=1)")
    assert value(notebook, "run.result") == "positional"
    with pytest.raises(
        UsageError, match=r'^taas\.run: gpus needs a number above 0, such as 2; got "0"$'
    ):
        notebook.define("taas.run(show, 'x', gpus=0)")
    with pytest.raises(
        UsageError, match=r"^taas\.run: max_restarts needs a number such as 2; got "
    ):
        notebook.define("taas.run(show, 'x', gpus=1, max_restarts=-1)")
    with pytest.raises(UsageError, match=r'^taas\.run: units needs .*; got "--a-b \(--c\)"$'):
        notebook.define("taas.run(show, 'x', gpus=1, units='--a-b (--c)')")
    with pytest.raises(UsageError, match=r"^taas\.run: gpus is missing: .* such as gpus=2$"):
        notebook.define("taas.run(show, 'x', gpus=None)")


def test_arguments_that_the_function_does_not_accept_are_refused(notebook: Notebook) -> None:
    notebook.define("import functools, taas\ndef show(name): return name")
    said = r"^taas\.run: these are not the arguments of show\(name\): .* argument 'hang'$"
    with pytest.raises(UsageError, match=said):
        notebook.define("taas.run(show, 'x', gpus=1, hang=5)")
    notebook.define(
        "@functools.wraps(show)\ndef shows_both(*names): return names\n"
        "run = taas.run(shows_both, 'x', 'y', gpus=1)"
    )
    assert value(notebook, "run.result") == ("x", "y")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("f, out=3", r"out needs names of variables, such as .* or a list .*; got int 3$"),
        ("f, out=[3]", r"out needs names of variables.*; got list \[3\]$"),
        ("f, out={'a': 1}", r"out needs names of variables.*; got dict \{'a': 1\}$"),
        ("f, env='A=1'", r"env needs a dict of strings, such as .*; got str 'A=1'$"),
        ("f, env={'A': 1}", r"env needs a dict of strings.*; got dict \{'A': 1\}$"),
        ("f, env={1: 'A'}", r"env needs a dict of strings.*; got dict \{1: 'A'\}$"),
        ("f, env={'A=B': 'C'}", r"env needs a dict of strings.*without \"=\" in the names; got"),
        ("f()", r"needs a function or another callable.*; got NoneType None\. To call the f"),
        ("Thing()", r"needs a function or another callable.*; got Thing <"),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused_and_the_allowed_types_are_named(
    notebook: Notebook, call: str, message: str
) -> None:
    notebook.define("import taas\ndef f(): pass\nclass Thing: pass")
    with pytest.raises(UsageError, match=f"^taas\\.run:? {message}"):
        notebook.define(f"taas.run({call}, gpus=1)")


def test_a_parameter_that_gets_no_keyword_shares_no_name_with_an_option(notebook: Notebook) -> None:
    notebook.define("import taas\ndef show(name, /, *env): return name, env")
    notebook.define("run = taas.run(show, 1, 2, gpus=1, name='x', env={'A': 'b'})")
    assert value(notebook, "run.result, run.name") == ((1, (2,)), "x")
    notebook.define("def gathers(gather): return gather")
    with pytest.raises(UsageError, match="gathers has a parameter `gather`"):
        notebook.define("taas.run(gathers, gpus=1, gather=False)")
    notebook.define("def given(self, function, kwargs): return self, function, kwargs")
    notebook.define("run = taas.run(given, gpus=1, self=1, function=2, kwargs=3)")
    assert value(notebook, "run.result") == (1, 2, 3)


def test_a_function_that_exceeds_its_timeout_names_the_run_and_the_lines(
    notebook: Notebook,
) -> None:
    notebook.define("import taas, time\ndef wait():\n    time.sleep(600)")
    with pytest.raises(RunTimeout) as caught:
        notebook.define("taas.run(wait, gpus=1, timeout=5, name='a long one')")
    shown = "\n".join(caught.value._render_traceback_())
    named = r'run "a long one" \(\S+\) on pool "local" exceeded the timeout of 5 s$'
    assert re.search(named, shown, re.MULTILINE)
    assert "rank 0: Cell In[1], line 3: time.sleep(600)" in ANSI.sub("", shown)


SCRIPT = """
import sys
import taas
from beside import double

BASE = 20

def work(number):
    print("working on", number, flush=True)
    if number < 0:
        raise ValueError("a negative number")
    return double(number) + BASE

if __name__ == "__main__":
    run = taas.run(work, int(sys.argv[1]), gpus=2)
    print("the result is", run.result)
"""

PLAIN = """
import argparse, os
from beside import double
parser = argparse.ArgumentParser()
parser.add_argument("--number", type=int)
number = parser.parse_args().number
if __name__ == "__main__":
    print("rank", os.environ["RANK"], "has", double(number), flush=True)
    if number == 7:
        raise SystemExit(3)
"""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Yield a project folder with scripts, which share a pool; fail if processes are left."""
    found = Scene(tmp_path_factory.mktemp("scripts"))
    (found.project / "beside.py").write_text("def double(n): return 2 * n\n")
    (found.project / "script.py").write_text(SCRIPT)
    (found.project / "plain.py").write_text(PLAIN)
    yield found
    python(found, "-m", "taas_magic", "down")
    found.close()
    assert not left_after(lambda: carriers(str(found.folder)), HUNG_S)


def python(scene: Scene, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the arguments `words` in the project's folder."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=scene.project,
        env={**os.environ, **scene.environ(), TOKEN: str(scene.folder)},
        capture_output=True,
        text=True,
    )


def test_a_script_calls_a_function_on_ranks(scene: Scene) -> None:
    done = python(scene, "script.py", "4")
    assert done.returncode == 0, done.stderr
    assert "working on 4" in done.stdout and "the result is 28" in done.stdout
    failed = python(scene, "script.py", "-1")
    assert failed.returncode == 1
    assert "ValueError: a negative number" in failed.stderr
    assert re.search(r"script\.py:\d+, in work", failed.stderr)


def test_a_script_runs_on_ranks(scene: Scene) -> None:
    after = ("-m", "taas_magic", "run", "plain.py", "--gpus", "2")
    done = python(scene, *after, "--", "--number", "3")
    assert done.returncode == 0, done.stderr
    assert "rank 0 has 6" in done.stdout and "rank 1 has 6" in done.stdout
    failed = python(scene, "-m", "taas_magic", "run", "--gpus", "1", "plain.py", "--number", "7")
    assert failed.returncode == 1 and "RankFailed" in failed.stderr
    (scene.project / "failing.py").write_text("def fail(): 1 / 0\nfail()\n")
    raised = python(scene, "-m", "taas_magic", "run", "--gpus", "1", "failing.py")
    assert raised.stderr.count("failing.py:1, in fail()") == 1
    assert "in fail()" not in raised.stdout  # the traceback is shown once
    nested = python(scene, "-m", "taas_magic", "run", "--gpus", "1", "script.py", "4")
    assert nested.returncode == 1 and "taas.run cannot be called on a rank" in nested.stderr
    words = ("-m", "taas_magic", "run", "--gpus", "2", "--dry-run", "plain.py", "--number", "3")
    dry = python(scene, *words)
    assert dry.returncode == 0 and "rank 0 has" not in dry.stdout and "SUCCEEDED" not in dry.stdout


def test_words_that_are_no_command_are_refused(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`main` runs in this process, because no command gets as far as a pool."""

    def refused(*words: str) -> str:
        """Run a command that must fail; return what it writes to stderr."""
        assert main(list(words)) == 1
        return capsys.readouterr().err

    monkeypatch.chdir(scene.project)
    assert "there is no file nowhere.py" in refused("run", "--gpus", "1", "nowhere.py")
    missing = refused("run", "plain.py")
    assert "give the number of ranks, such as --gpus 2. Usage: " in missing
    for command in (["--help"], ["nothing"], ["pools", "x"]):
        assert "%taas " not in refused(*command).replace("%%taas", "")
    mixed = refused("run", "plain.py", "--gpus", "2", "--number", "3")
    assert "No flag --number" in mixed
    assert "run plain.py --gpus 2 -- [arguments of the script]" in mixed
