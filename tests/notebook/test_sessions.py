"""Sessions in a real kernel: variables that stay or are sent again, loaders, and failing ranks."""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from taas_magic.errors import UsageError
from taas_magic.notebook import sessions
from tests.cellfiles import cells_of
from tests.eventually import HUNG_S, eventually
from tests.frontend import Frontend
from tests.harness import AGENT, below, left_of, listening_ports, words
from tests.notebook.test_kernel import completions

pytestmark = [pytest.mark.usefixtures("no_leftovers")]

START = """%%taas --gpus 2 --session exp
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
pid = os.getpid()
"""


SIZES = """
from taas_magic.messages import to_bytes
from taas_magic.pool.client import PoolConnection

sizes, launch = [], PoolConnection.launch
def measured(connection, run, *about):
    sizes.append(len(to_bytes(run)))
    return launch(connection, run, *about)
PoolConnection.launch = measured
"""


@pytest.fixture
def session(frontend_of_module: Frontend) -> Iterator[Frontend]:
    """Yield a kernel with a session `exp` of two ranks; end the session after the test."""
    frontend_of_module.be_patient()
    frontend_of_module.run(START)
    yield frontend_of_module
    request = frontend_of_module.send("%taas end exp")
    frontend_of_module.finish(request)


def printed(frontend: Frontend, cell: str) -> list[str]:
    """Run a cell. Return the different lines that its ranks printed, sorted, without labels."""
    text = frontend.text(frontend.run(cell))
    return sorted({re.sub(r"^\[[^\]]*\] ", "", line) for line in text.splitlines()})


def value(frontend: Frontend, expression: str) -> Any:
    """Return the value of an expression in the notebook."""
    return eval(frontend.text(frontend.run(f"print(repr(({expression})))")))


def error(frontend: Frontend, cell: str) -> str:
    """Run a cell that fails; return its output, followed by its traceback."""
    request = frontend.send(cell)
    reply = frontend.finish(request)
    assert reply["status"] == "error"
    [shown] = frontend.contents(request, "error")
    return frontend.text(request) + re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(shown["traceback"]))


def notes(frontend: Frontend, request: str) -> str:
    """Return the last text of a cell's status header."""
    return str(frontend.contents(request, "update_display_data")[-1]["data"]["text/plain"])


def ranks_of(frontend: Frontend) -> list[psutil.Process]:
    """Return the processes of the ranks of session `exp`, by rank."""
    frontend.run("%%taas --session exp --out pid@all\npass")
    return [psutil.Process(pid) for pid in value(frontend, "pid")]


def test_variables_modules_and_the_process_group_stay(session: Frontend) -> None:
    session.run("%%taas --session exp\nx = torch.ones(1) * (rank + 1)\nstays = [rank]")
    cell = "dist.all_reduce(x)\nstays.append(os.getpid() == pid)\nprint(x.item(), stays[1])"
    assert printed(session, f"%%taas --session exp\n{cell}") == ["3.0 True"]  # on both ranks
    session.run("%%taas --session exp --out x,stays@all\npass")
    assert value(session, "x.item(), stays") == (3.0, [[0, True], [1, True]])
    # an unchanged environment variable of the notebook is sent to the ranks only once
    session.run(f"import os\nos.environ['BIG'] = 'x' * 100_000\n{SIZES}")
    session.run("%%taas --session exp\npass")
    session.run("del os.environ['BIG']\nPoolConnection.launch = launch")
    [size] = value(session, "sizes")
    assert size < 20_000


def test_the_list_of_runs_has_the_cells_of_a_session_and_not_the_session(
    session: Frontend,
) -> None:
    for name in ("one", "two"):
        session.run(f"%%taas --session exp --name {name}\nimport taas\ntaas.log(loss=1.0, step=0)")
    session.run("import taas")
    assert value(session, "[run.name for run in taas.runs()[:3]]") == ["two", "one", ""]
    assert "session exp" not in value(session, "[run.name for run in taas.runs()]")
    # the session's own run can still be found and read by its name
    find = "__import__('taas_magic.notebook.runs', fromlist=['find']).find('session exp')"
    assert value(session, f"{find}.state.value, {find}.world_size") == ("RUNNING", 2)


def test_the_newest_run_after_the_first_cell_is_this_cell(session: Frontend) -> None:
    session.run("%%taas --gpus 1 --session first\nprint('the first cell')")
    assert printed(session, "%taas logs") == ["the first cell"]
    find = "__import__('taas_magic.notebook.runs', fromlist=['find']).find"
    assert value(session, f"{find}(None).state.value") == "SUCCEEDED"
    session.run("%taas end first")


def test_an_interrupt_while_old_runs_are_removed_does_not_fail_the_cell(session: Frontend) -> None:
    session.run(
        "import signal\nfrom taas_magic.notebook import launch as launching\n"
        "old_runs = launching.journal.prune, launching.PRUNE_S\n"
        "launching.journal.prune = lambda *limits: signal.raise_signal(signal.SIGINT)\n"
        "launching.PRUNE_S = -1.0"
    )
    try:
        session.run("%%taas --session exp\npass")
    finally:
        session.run("launching.journal.prune, launching.PRUNE_S = old_runs")


def test_stop_without_a_name_keeps_an_idle_session(session: Frontend) -> None:
    session.run("%%taas --session exp\nkept = rank")
    assert "No run is running" in session.fail("%taas stop")["evalue"]
    assert "rank 1" in session.text(session.run("%taas stacks"))  # this command ends nothing
    assert printed(session, "%%taas --session exp\nprint(kept)") == ["0", "1"]


def test_detach_with_the_id_of_a_sessions_run_detaches_the_session(session: Frontend) -> None:
    assert "No run is running" in session.fail("%taas detach")["evalue"]
    session.run("from taas_magic.notebook import runs, sessions\n[mine] = sessions.live()")
    run_id = value(session, "mine.run_id")
    session.run(
        "import subprocess, sys\n"
        "words = [sys.executable, '-m', 'taas_magic', 'detach']\n"
        "tries = [subprocess.run([*words, name], capture_output=True, text=True)\n"
        "         for name in (mine.run_id, 'exp')]"
    )
    for said in value(session, "[done.stderr for done in tries]"):
        assert "session exp belongs to another kernel" in said and "%taas detach exp" in said
    is_detached = "mine.is_detached, sessions.flags_of(runs.find(mine.run_id)).detach"
    assert value(session, is_detached) == (False, False)
    shown = session.text(session.run(f"%taas detach {run_id}"))
    assert shown.startswith("Session exp stays when its kernel ends: `%taas attach exp`")
    assert value(session, is_detached) == (True, True)


def test_a_cell_without_a_session_lacks_the_sessions_variables(session: Frontend) -> None:
    cell = "import os\nprint('rank' in globals(), 'TAAS_SESSION' in os.environ)"
    assert printed(session, f"%%taas --gpus 2\n{cell}") == ["False False"]


def test_a_cell_that_lacks_a_variable_of_a_session_gets_a_hint(session: Frontend) -> None:
    session.run("%%taas --session exp\nonly_in_exp = rank")
    hint = "`only_in_exp` is a variable of session exp: run the cell with --session exp, or return"
    for cell in ("only_in_exp", "%%taas --gpus 1\nprint(only_in_exp)"):
        said = error(session, cell)
        assert "NameError" in said and said.count(hint) == 1, said
    deletes = "if rank == 1:\n    del only_in_exp\nonly_in_exp"
    assert hint not in error(session, f"%%taas --session exp\n{deletes}")


def test_a_name_has_the_notebooks_value_unless_a_cell_of_the_session_assigned_it(
    session: Frontend,
) -> None:
    session.run("lr, scale, seen = 0.1, 1, []\ndef scaled(): return lr * scale")
    session.run("%%taas --session exp\nseen.append(lr)\nowned = scaled()")
    # unchanged variables are not sent again: the ranks keep their own list
    assert printed(session, "%%taas --session exp\nseen.append(1)\nprint(seen)") == ["[0.1, 1]"]
    session.run("lr = 0.2")
    request = session.send("%%taas --session exp\nprint(scaled())")  # the function has not changed
    session.finish(request)
    assert "0.2" in session.text(request)
    assert "changed in the notebook and sent again: `lr`" in notes(session, request)
    session.run("%%taas --session exp\nlr = 5")
    session.run("lr = 7")
    request = session.run("%%taas --session exp\nprint(lr)")
    assert "5" in session.text(request)
    assert "cells of this session assigned `lr`" in notes(session, request)
    assert "`lr`" not in notes(session, session.run("%%taas --session exp\nprint(lr)"))  # only once
    assert printed(session, "%%taas --session exp --send lr\nprint(lr)") == ["7"]
    assert printed(session, "%%taas --session exp\nprint(lr)") == ["7"]


def test_a_failed_cell_assigns_only_the_names_that_got_a_new_value(session: Frontend) -> None:
    values = "lr, w, steps, net = {0}, torch.ones(2) * {0}, [{0}], torch.nn.Linear({0}, 1)\n"
    values += "p, seen = net.bias, {{{0}}}"
    session.run("import torch\n" + values.format(1))
    fails = "lr, w, steps, net, p = lr * 2, w + 1, steps + [2], net.cpu(), p + 1, 1 / 0"
    assert "ZeroDivisionError" in error(session, f"%%taas --session exp\n{fails}")
    session.run(values.format(3))
    look = "%%taas --session exp\n"
    look += "print(lr, w.tolist(), steps, net.in_features, p is net.bias, seen)"
    assert printed(session, look) == ["3 [3.0, 3.0] [3] 3 True {3}"]
    # assignments in the loop of the error count, even if the new value has the old address
    fails = "for i in range(5):\n    1 / (4 - i)\n    w = w * 2\n    lr *= 2\n    steps += [i]\n"
    fails += "    del seen\n    seen = {1, 2}"
    assert "ZeroDivisionError" in error(session, f"%%taas --session exp\n{fails}")
    session.run(values.format(4))
    assert printed(session, look) == ["48 [48.0, 48.0] [3, 0, 1, 2, 3] 4 True {1, 2}"]
    # a statement that ended without an error counts, even if the new value is the old object
    session.run("%%taas --session exp\nnet = net.to('cpu')")
    fails = "\n\np = p.to(\n    'cpu')\n# then\ndef fail(): 1 / 0\nwhile True:\n    fail()"
    assert "ZeroDivisionError" in error(session, f"%%taas --session exp\n{fails}")
    session.run(values.format(5))
    look = "%%taas --session exp\nprint(net.in_features, p.tolist() == net.bias.tolist())"
    assert printed(session, look) == ["4 True"]


def test_a_cell_may_swap_a_parameter_that_it_assigns(session: Frontend) -> None:
    """torch does not swap tensors that have weak references."""
    loop = "for p in net.parameters(): pass\n"
    session.run(f"import torch\nnet = torch.nn.Linear(1, 1)\n{loop}")
    session.run("%%taas --session exp\nnet, p")
    swaps = "torch.__future__.set_swap_module_params_on_conversion"
    session.run(f"%%taas --session exp\n{swaps}(True)\nnet.double()\n{loop}{swaps}(False)")


def test_a_loader_that_a_failed_cell_could_not_register_is_registered_in_the_notebook(
    session: Frontend,
) -> None:
    session.run("import taas, torch\nfrom torch.utils.data import DataLoader")
    session.run("loader = DataLoader(torch.arange(32), batch_size=2)")
    registers = "%%taas --session exp\nimport taas\nloader = taas.register(loader)"
    assert "Register the loader in the notebook" in error(session, registers)
    session.run("loader = taas.register(loader)")
    assert printed(session, "%%taas --session exp\nprint(len(list(loader)))") == ["8"]


def test_another_changed_setting_does_not_restart_the_random_numbers(session: Frontend) -> None:
    session.run("import numpy, torch\ntorch.manual_seed(0)")
    cell = "%%taas --session exp\nprint(torch.rand(1).item())"
    numbers = printed(session, cell)
    session.run("numpy.set_printoptions(precision=3)")
    numbers += printed(session, cell)
    session.run("torch.manual_seed(1)\n%taas vars exp")  # also sends the settings
    session.run("numpy.set_printoptions(precision=8)")
    numbers += printed(session, cell)
    code = "[torch.manual_seed(0), torch.rand(1).item(), torch.rand(1).item()][1:]"
    more = "[torch.manual_seed(1), torch.rand(1).item()][1:]"
    assert [float(number) for number in numbers] == value(session, f"{code} + {more}")
    session.run("torch.seed()")


CHANGE_SETTINGS = """import logging, matplotlib, numpy, torch
torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(False)
numpy.set_printoptions(precision=3)
numpy.seterr(divide="ignore")
matplotlib.rcParams["lines.linewidth"] = 9.0
logging.disable(logging.ERROR)
logging.getLogger("app").setLevel(logging.ERROR)
get_ipython().ast_node_interactivity = "all"
"""
RESTORE_SETTINGS = """torch.set_default_dtype(torch.float32)
torch.set_grad_enabled(True)
numpy.set_printoptions(precision=8)
numpy.seterr(divide="warn")
matplotlib.rcdefaults()
logging.disable(logging.NOTSET)
logging.getLogger("app").setLevel(logging.NOTSET)
get_ipython().ast_node_interactivity = "last_expr"
"""
SETTINGS = """import logging, matplotlib, numpy
print(torch.get_default_dtype(), torch.is_grad_enabled(), numpy.get_printoptions()["precision"],
      numpy.geterr()["divide"], matplotlib.rcParams["lines.linewidth"],
      logging.root.manager.disable, logging.getLogger("app").level,
      get_ipython().ast_node_interactivity)
"""


def test_a_setting_that_the_notebook_sets_back_is_set_back_in_the_ranks(session: Frontend) -> None:
    session.run(CHANGE_SETTINGS)
    changed = "torch.float64 False 3 ignore 9.0 40 40 all"
    assert printed(session, f"%%taas --session exp\n{SETTINGS}") == [changed]
    session.run(RESTORE_SETTINGS)
    restored = "torch.float32 True 8 warn 1.5 0 0 last_expr"
    assert printed(session, f"%%taas --session exp\n{SETTINGS}") == [restored]


WARN = """import warnings
def outcome(text, category=UserWarning):
    try:
        warnings.warn(text, category)
    except Warning:
        return "raised"
    return "ignored"
print(outcome("of interest"), outcome("of interest", PendingDeprecationWarning), outcome("own"))
"""


def test_ranks_have_the_notebooks_warning_filters_in_the_notebooks_order(session: Frontend) -> None:
    session.run("""import warnings
warnings.filterwarnings("error", "own")
warnings.filterwarnings("error", "of interest")
warnings.simplefilter("ignore", PendingDeprecationWarning)""")  # Python's default has it, too
    assert printed(session, f"%%taas --gpus 2\n{WARN}") == ["raised ignored raised"]
    assert printed(session, f"%%taas --session exp\n{WARN}") == ["raised ignored raised"]
    session.run("%%taas --session exp\nwarnings.filterwarnings('ignore', 'own')")
    for action, outcome in [("ignore", "ignored"), ("error", "raised"), ("ignore", "ignored")]:
        session.run(f"warnings.filterwarnings({action!r}, 'of interest')")
        # the filter that a cell of the session has added stays before older ones of the notebook
        expected = f"{outcome} {outcome} ignored"
        assert printed(session, f"%%taas --session exp\n{WARN}") == [expected]


def test_a_name_that_the_notebook_deleted_is_announced_once(session: Frontend) -> None:
    use = "%%taas --session exp\nprint(sum([1, 2]))"
    session.run("def sum(values): return 'mine'")
    assert printed(session, use) == ["mine"]
    session.run("del sum")
    request = session.run(use)
    assert "mine" in session.text(request)
    assert "deleted in the notebook, but not in the ranks: `sum`; `del sum`" in notes(
        session, request
    )
    assert "deleted" not in notes(session, session.run(use))
    session.run("%%taas --session exp\ndel sum")
    assert printed(session, use) == ["3"]


def test_cells_that_do_not_start_leave_the_notes_to_the_next_cell(session: Frontend) -> None:
    session.run("%%taas --session exp\nlr = 5")
    session.run("lr = 7")
    use, note = "%%taas --session exp{}\nprint(lr)", "assigned `lr`, so the ranks keep its value"
    assert note in session.text(session.run(use.format(" --dry-run")))
    assert "no_such" in session.fail(use.format(" --out no_such"))["evalue"]
    assert note in notes(session, session.run(use.format("")))
    assert "assigned" not in notes(session, session.run(use.format("")))


@pytest.mark.parametrize("importer", ["%%taas --session exp\n", ""])
def test_an_edited_module_is_announced_until_the_ranks_reload_it(
    session: Frontend, importer: str
) -> None:
    session.run("%%writefile edited_helpers.py\ndef answer(): return 1")
    session.run(f"{importer}import edited_helpers")
    use = "%%taas --session exp\nprint(edited_helpers.answer())"
    assert printed(session, use) == ["1"]
    session.run("%%writefile edited_helpers.py\ndef answer(): return 2  # edited")
    request = session.run(use)
    assert "1" in session.text(request)
    assert "the ranks use the old code of `edited_helpers`" in notes(session, request)
    session.run("%%taas --session exp\nimport importlib\nimportlib.reload(edited_helpers)")
    request = session.run(use)
    assert "2" in session.text(request) and "old code" not in notes(session, request)


def test_ranks_with_autoreload_renew_an_edited_module_and_do_not_warn(session: Frontend) -> None:
    session.run("%%writefile reloaded_helpers.py\ndef answer(): return 1")
    session.run("%%taas --session exp\n%load_ext autoreload\n%autoreload 2")
    use = "%%taas --session exp\nimport reloaded_helpers\nprint(reloaded_helpers.answer())"
    assert printed(session, use) == ["1"]
    session.run("%%writefile reloaded_helpers.py\ndef answer(): return 2  # edited")
    for _ in range(2):
        request = session.run(use)
        assert "2" in session.text(request) and "old code" not in notes(session, request)


def test_reset_deletes_the_variables_and_keeps_main(session: Frontend) -> None:
    session.run("k = 5")
    assert printed(session, "%%taas --session exp\nmine = k\nprint(mine)") == ["5"]
    session.run("%%taas --session exp\n%reset -f")
    assert printed(session, "%%taas --session exp\nprint('mine' in globals(), k)") == ["False 5"]
    spawn = "from multiprocessing import get_context\ndef square(n): return n * n\n"
    spawn += "with get_context('spawn').Pool(1) as pool: print(pool.map(square, [3]), exit is quit)"
    assert printed(session, f"%%taas --session exp\n{spawn}") == ["[9] False"]
    session.run("%%taas --session exp\nexit()")


def test_a_recursion_error_is_shown_at_once(session: Frontend) -> None:
    text = error(session, "%%taas --session exp\ndef deep(): return deep()\ndeep()")
    # Otherwise, IPython would still format frames when the other rank's failure ends this rank.
    assert "RecursionError" in text and "KeyboardInterrupt" not in text


def test_a_cell_updates_a_display_of_an_earlier_cell(session: Frontend) -> None:
    of_cell = "%%taas --session exp\n"
    first = session.run(f"{of_cell}handle = display('old', display_id=True)")
    second = session.run(f"{of_cell}handle.update('new')")
    [shown] = [it for it in session.contents(first, "display_data") if is_of_rank(it)]
    [update] = [it for it in session.contents(second, "update_display_data") if is_of_rank(it)]
    assert update["data"]["text/plain"] == "'new'"
    assert update["transient"] == shown["transient"]


def test_what_a_thread_prints_between_cells_is_shown_by_the_next_cell(
    session: Frontend, tmp_path: Path
) -> None:
    go, done = tmp_path / "go", tmp_path / "done"
    session.run(f"""%%taas --session exp
import pathlib, threading, time
def print_later():
    while not os.path.exists({str(go)!r}):
        time.sleep(0.01)
    print("late", flush=True)
    pathlib.Path({str(done)!r}).touch()
if rank == 1:
    threading.Thread(target=print_later).start()""")
    go.touch()
    eventually(done.exists)
    shown: list[str] = []

    def has_shown() -> bool:
        shown.append(session.text(session.run("%%taas --session exp\npass")))
        return "[1] late" in shown[-1]

    eventually(has_shown)
    assert "".join(shown).count("late") == 1


def test_a_session_runs_one_cell_at_a_time(session: Frontend, tmp_path: Path) -> None:
    go, subshell = tmp_path / "go", session.new_subshell()
    cell = f"print('runs')\nwhile not os.path.exists({str(go)!r}): pass\nkept = rank"
    running = session.send(f"%%taas --session exp\nimport os\n{cell}")
    session.wait(lambda: "runs" in session.text(running))
    others = ("%%taas --session exp\nprint(rank)", "%taas vars exp", "%taas debug exp --rank 0")
    replies = [session.finish(session.send(code, subshell)) for code in others]
    go.touch()
    assert [reply["ename"] for reply in replies] == ["PoolError"] * 3
    assert all("is running a cell" in reply["evalue"] for reply in replies)
    assert session.finish(running)["status"] == "ok"
    assert printed(session, "%%taas --session exp\nprint(kept == rank)") == ["True"]


HELD_WAIT = """
import os, time
from taas_magic.notebook import pools

def held(*about, wait=pools.wait_for_pool):
    pools.wait_for_pool = wait
    print("waits")
    while not os.path.exists(go):
        time.sleep(0.01)
    return wait(*about)

pools.wait_for_pool = held
"""
HELD_VALUE = """
import os, time

class Held:
    def __reduce__(self):
        print("waits")
        while not os.path.exists(go):
            time.sleep(0.01)
        return int, ()

held = Held()
"""


def test_a_second_cell_leaves_a_session_that_waits_for_its_pool_its_name(
    frontend_of_module: Frontend, tmp_path: Path
) -> None:
    frontend, subshell = frontend_of_module, frontend_of_module.new_subshell()
    go = tmp_path / "go"
    frontend.run(f"go = {str(go)!r}{HELD_WAIT}")
    first = frontend.send("%%taas --gpus 1 --session twice\nmine = 1")
    frontend.wait(lambda: "waits" in frontend.text(first))
    second = frontend.send("%%taas --gpus 1 --session twice\nmine = 2", subshell)
    reply = frontend.finish(second)
    go.touch()
    assert frontend.finish(first)["status"] == "ok"
    assert reply["ename"] == "PoolError" and "is running a cell" in reply["evalue"]
    assert printed(frontend, "%%taas --session twice\nprint(mine)") == ["1"]
    frontend.run("%taas end twice")


def test_only_one_of_two_cells_starts_the_session_of_both(
    frontend_of_module: Frontend, tmp_path: Path
) -> None:
    frontend, subshell = frontend_of_module, frontend_of_module.new_subshell()
    go = tmp_path / "go"
    frontend.run(f"go = {str(go)!r}{HELD_VALUE}")
    first = frontend.send("%%taas --gpus 1 --session twice\nmine = held")
    frontend.wait(lambda: "waits" in frontend.text(first))
    second = frontend.send("%%taas --gpus 1 --session twice\nmine = 2", subshell)
    assert frontend.finish(second)["status"] == "ok"
    go.touch()
    reply = frontend.finish(first)
    assert reply["ename"] == "PoolError" and "another cell has started" in reply["evalue"]
    assert printed(frontend, "%%taas --session twice\nprint(mine)") == ["2"]
    frontend.run("%taas end twice")


def test_a_value_that_cannot_be_shown_shows_its_error_only(session: Frontend) -> None:
    of_cell = "%%taas --session exp\n"
    session.run(
        f"{of_cell}class Odd:\n    def __repr__(self): raise ValueError('odd')\nodd = Odd()"
    )
    request = session.send(f"{of_cell}odd")
    assert session.finish(request)["ename"] == "RankFailed"
    assert "ValueError" in session.text(request)
    assert all(it["data"] for it in session.contents(request, "display_data"))  # no empty display


def is_of_rank(content: dict[str, Any]) -> bool:
    return not content["transient"].get("display_id", ":head").endswith((":head", ":rest"))


UNRELATED = """
import dataclasses
import typing

class Net(torch.nn.Module):
    scale: typing.Optional[int] = 1
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, bias=False)

net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)

def show(*values): print(*values)
"""

ANOTHER = (
    "def show(*values): print(*values, 'again')",
    "other = Net()",
    "other = torch.nn.Linear(2, 2)",
    "other = torch.utils.data.TensorDataset(torch.ones(2))",
    "@dataclasses.dataclass\nclass Other:\n    size: typing.Optional[int] = None\nother = Other()",
)


def test_trained_objects_are_kept_when_other_values_change(session: Frontend) -> None:
    session.run(f"import torch\n{UNRELATED}\nother = 0")
    session.run("%%taas --session exp\nnet.layer.weight.data.fill_(7.)\noptimizer.seen = True")
    for change in (*ANOTHER, *ANOTHER):
        session.run(change)
        look = "show(net.layer.weight.sum().item(), optimizer.seen)\nseen = type(other)"
        [line] = printed(session, f"%%taas --session exp\n{look}")
        assert line.startswith("14.0 True"), change


[HOLDERS] = cells_of("session_values")


def test_the_notebooks_objects_keep_their_identity_and_changes_in_a_session(
    session: Frontend,
) -> None:
    session.run(HOLDERS)
    begin = "replay.append(1)\nnet.seen += 1\ncaching.n += 1\n"
    begin += "print(Cfg.lr, Cfg().double(), agent.eps)"
    assert printed(session, f"%%taas --session exp\n{begin}") == ["0.1 0.2 1.0"]
    # a value that only pickling has changed is not sent again
    for seen in (2, 3):
        cell = "net.seen += 1\ncaching.n += 1\nprint(net.seen, caching.n)"
        assert printed(session, f"%%taas --session exp\n{cell}") == [f"{seen} {seen}"]
    # values that share an object are sent together
    session.run("agent.eps = 0.5")
    same = "all(vars(agent)[n] is globals()[n] for n in ('replay', 'numbers', 'count', 'slotted'))"
    use = "used = replay, numbers, count, slotted"
    assert printed(session, f"%%taas --session exp\n{use}\nprint({same}, agent.eps)") == [
        "True 0.5"
    ]
    # a function in a value sent again is the ranks' function, and uses the ranks' trained objects
    step = "conf['loss']().backward()\noptimizer.step()"
    assert printed(session, f"%%taas --session exp\n{step}\nprint(weight.item())") == ["-1.0"]
    session.run("conf['n'] = 1")
    again = f"optimizer.zero_grad()\n{step}\nprint(weight.item(), conf['loss'] is loss, conf['n'])"
    assert printed(session, f"%%taas --session exp\n{again}") == ["-2.0 True 1"]
    # changed attributes of a class are sent
    session.run("Cfg.lr = 0.5\nCfg.double = lambda self: 3 * self.lr")
    assert printed(session, "%%taas --session exp\nprint(Cfg.lr, Cfg().double())") == ["0.5 1.5"]
    # the ranks' instances of a changed class keep their state
    session.run("Agent.bonus = 7")
    assert printed(session, "%%taas --session exp\nprint(net.seen + Agent.bonus)") == ["10"]


def test_values_that_share_something_are_sent_together(session: Frontend) -> None:
    session.run("import torch\nw = torch.zeros(2)\nhalf = w[:1]\nbox = {'w': w}")
    share = "half.add_(1)\nprint(w[0].item() == box['w'][0].item() == half[0].item())"
    assert printed(session, f"%%taas --session exp\n{share}") == ["True"]
    session.run("w += 5")
    assert printed(session, f"%%taas --session exp\n{share}\nprint(w)") == [
        "True",
        "tensor([6., 5.])",
    ]
    # a note tells a value that has changed from values that only share an object with it
    session.run("also = [w]")
    said = notes(session, session.run("%%taas --session exp\nalso, w.add_(1)"))
    assert "sent again because it shares objects with `also`: `w`;" in " ".join(said.split())
    session.run("half += 1")
    assert printed(session, "%%taas --session exp\nprint(half)") == ["tensor([6.])"]
    assert printed(session, f"%%taas --session exp\n{share}") == ["True"]
    session.run("%%taas --session exp --send half\nhalf.add_(1)")  # sent without the others
    assert printed(session, f"%%taas --session exp\n{share}") == ["True"]


def test_a_value_that_out_returned_is_not_sent_back(session: Frontend) -> None:
    session.run("import torch\nmodel = torch.nn.Linear(1, 1, bias=False)\nseen = []")
    session.run("optimizer = torch.optim.SGD(model.parameters(), lr=1.0)")
    step = "model(torch.ones(1, 1)).sum().backward()\noptimizer.step()\noptimizer.zero_grad()\n"
    step += "seen.append(rank)\n"
    session.run(f"%%taas --session exp --out model,seen@all\nmodel.weight.data.zero_()\n{step}")
    assert value(session, "model.weight.item(), seen") == (-1.0, [[0], [1]])
    request = session.run(f"%%taas --session exp\n{step}\nprint(model.weight.item(), len(seen))")
    assert "-2.0 2" in session.text(request) and "note:" not in notes(session, request)


def test_changed_definitions_of_the_notebook_are_sent_again(session: Frontend) -> None:
    session.run("def f(): return 1\nclass A: n = 1")
    assert printed(session, "%%taas --session exp\na = A()\nprint(f(), A.n)") == ["1 1"]
    session.run("def f(): return 2\nclass A: n = 2")
    assert printed(session, "%%taas --session exp\nprint(f(), A.n, a.n)") == ["2 2 1"]


def test_a_class_that_came_with_a_shown_object_is_not_proposed_for_sending(
    session: Frontend,
) -> None:
    define = "%%taas --session exp\nclass Shown:\n    lr = {}\nshown = Shown(); shown"
    session.run(define.format(0.1))
    session.run("assert Shown.lr == 0.1")  # the shown object needs the class
    session.run(define.replace("; shown", "").format(0.5))
    request = session.run("%%taas --session exp\nprint(Shown.lr)")
    assert "0.5" in session.text(request) and "--send" not in notes(session, request)
    session.run("class Shown: lr = 1")  # the notebook's own
    request = session.run("%%taas --session exp\nprint(Shown.lr)")
    assert "0.5" in session.text(request) and "`--send Shown` sends" in notes(session, request)


def test_names_that_a_cells_function_reads_are_kept_up_to_date(session: Frontend) -> None:
    session.run("k = 1")
    session.run("%%taas --session exp\ndef g(): return k")
    called = printed(session, "%%taas --session exp\ndef called(): return k\nprint(called())")
    assert called == ["1"]
    session.run("k = 2")
    assert printed(session, "%%taas --session exp\nprint(called())") == ["2"]
    assert printed(session, "%%taas --session exp\nprint(g())") == ["2"]


def test_names_that_lambdas_read_are_kept_up_to_date(session: Frontend) -> None:
    session.run("k, m = 1, 1\ndef made(): return lambda: m")
    session.run("%%taas --session exp\nown, hooks, by_notebook = lambda: k, [], made()")
    session.run("%%taas --session exp\nhooks.append(lambda: -k)")
    session.run("k, m = 2, 3")
    cell = "%%taas --session exp\nprint(own(), hooks[0](), by_notebook())"
    assert printed(session, cell) == ["2 -2 3"]


def test_names_that_methods_of_the_notebook_read_are_kept_up_to_date(session: Frontend) -> None:
    session.run("k = 1\nclass Trainer:\n    def fit(self): return k")
    session.run("%%taas --session exp\ntrainer = Trainer()\nfit = trainer.fit")
    session.run("k = 2")
    request = session.run("%%taas --session exp\nprint(trainer.fit(), fit())")
    assert "2 2" in session.text(request)
    assert "changed in the notebook and sent again: `k`" in notes(session, request)


def test_out_returns_the_function_that_the_ranks_have(session: Frontend) -> None:
    session.run("def act(x): return x + 1")
    session.run("%%taas --session exp\ntable = {'act': act}")
    session.run("%%taas --session exp --out table\npass")
    session.run("assert table['act'] is act\ndef act(x): return x * 100")
    session.run("%%taas --session exp --out table\npass")
    assert value(session, "table['act'](5), act(5)") == (6, 500)


def test_a_cell_can_run_on_some_ranks_only(session: Frontend) -> None:
    session.run("extra = 4")
    request = session.run(
        "%%taas --session exp --ranks 1\nfrom IPython.display import Markdown\n"
        "display(Markdown('from one'))\nmine = rank + extra\nprint(mine)"
    )
    assert "[1] 5" in session.text(request) and "[0]" not in session.text(request)
    shown = session.contents(request, "display_data")
    assert any("from one" in str(each["data"]) for each in shown)
    assert printed(session, "%%taas --session exp\nprint(extra, 'mine' in globals())") == [
        "4 False",
        "4 True",
    ]
    said = error(session, "%%taas --session exp\nprint(mine)")
    assert "`mine` exists only on rank 1" in said and "--ranks 1\n" in said
    # only ranks that run the cell return values
    session.run("%%taas --session exp\np = q = rank")
    session.run("%%taas --session exp --ranks 1 --out p@all,q,new\np = q = new = 555")
    assert value(session, "p, q, new") == ([555], 555, 555)
    session.run("%%taas --session exp --ranks 0,1 --out p@last,q\npass")
    assert value(session, "p, q") == (555, 0)
    session.run("%%taas --session exp --ranks 1\nprint(mine)\ndel mine")
    assert "`mine` exists only" not in error(session, "%%taas --session exp\nmine")


def test_a_variable_that_only_one_rank_deletes_still_belongs_to_the_ranks(
    session: Frontend,
) -> None:
    session.run("%%taas --session exp --out x\nx = [1]")
    session.run("%%taas --session exp\nx.append(rank)")
    session.run("%%taas --session exp\nif rank == 1: del x")
    use = "%%taas --session exp --ranks 0\nprint(x)"
    assert printed(session, use) == ["[1, 0]"]
    assert "`x` exists only on rank 0" in error(session, "%%taas --session exp\nprint(x)")
    session.run("%%taas --session exp\nif rank == 0: del x")  # now no rank has it
    assert printed(session, use) == ["[1]"]  # the notebook's value, sent to all ranks
    session.run("%%taas --session exp\nx.append(rank)\nif rank == 0: del x")
    assert printed(session, use.replace("0", "1")) == ["[1, 1]"]


def test_flags_that_do_not_fit_the_session_are_refused_before_anything_runs(
    session: Frontend,
) -> None:
    said = {
        "%%taas --session exp --gpus 3\npass": 'session "exp" was started with 2 ranks',
        "%%taas --session exp --env A=1\npass": 'session "exp" was started without --env. Leave',
        "%%taas --session exp --detach\npass": "or detach the session: %taas detach exp",
        "%%taas --session other\npass": 'no session "other"',
        "%%taas --session ex\npass": 'did you mean "exp"',
        "%%taas --session EXP\npass": 'did you mean "exp"',
        "%%taas --gpus 2 --ranks 1\npass": "--ranks works only with --session",
        "%%taas --session exp --ranks 2\npass": '--ranks 2: session "exp" has ranks 0 to 1',
        "%%taas --session exp --ranks 1 --out rank@0\npass": "--out rank@0: rank 0 does not run",
        "%%taas --session exp --send nowhere\npass": "the notebook has no such variable",
        "%%taas --gpus 2 --session new --max-restarts 1\npass": "cannot be combined with --session",
    }
    for cell, text in said.items():
        assert text in error(session, cell)
    assert printed(session, "%%taas --session exp\nprint(rank)") == ["0", "1"]


def test_tab_completes_the_names_that_the_ranks_have(session: Frontend) -> None:
    session.run("shown_here = 1")
    session.run("%%taas --session exp --name 'show it'\nshown_there = shown_here")
    both, client = ["shown_here", "shown_there"], session.client
    assert sorted(completions(client, "%%taas --session exp\nprint(shown_")) == both
    assert sorted(completions(client, "#pragma taas --session exp\nif 1:\n    shown_")) == both
    assert sorted(completions(client, "%%taas --session exp --out shown_")) == both
    assert "dist" in completions(client, "%%taas --session=exp\ndis")
    for cell in ("", "%%taas --gpus 2\n", "%%taas --session other\n", "%%taas --gpus 2 --out "):
        assert completions(client, cell + "shown_") == both[:1]
    assert completions(client, "%taas attach 'sh") == ["'show it'"]


def test_a_name_that_only_a_function_of_an_earlier_cell_sets_is_returned(session: Frontend) -> None:
    session.run("def of_notebook():\n    globals()['total'] = 4")
    session.run("%%taas --session exp\nsent = of_notebook")
    session.run("%%taas --session exp --out total\nof_notebook()")
    session.run("%%taas --session exp\ndef of_ranks():\n    global other\n    other = 5")
    session.run("%%taas --session exp --out other\nof_ranks()")
    assert session.text(session.run("print(total, other)")) == "4 5\n"


LOADER = """import taas, torch
from torch.utils.data import DataLoader
loader = DataLoader(torch.arange(32), batch_size=2, shuffle=True, num_workers=1)
taas.register(loader);
"""


def test_the_header_says_how_many_batches_were_repeated(session: Frontend) -> None:
    session.run(LOADER + "odd = taas.register(DataLoader(torch.arange(6), batch_size=2))")
    said = 'odd: batches 4 (1 repeated: uneven="pad") '
    for flags in ("--session exp", "--session exp", "--gpus 2 --cpus 1"):
        assert said in notes(session, session.run(f"%%taas {flags}\nfor _ in odd: pass"))
    request = session.run("%%taas --session exp\nfor _ in loader: pass")
    assert "loader: batches 16 · " in notes(session, request)


def test_an_epoch_of_a_registered_loader_continues_in_the_next_cell(session: Frontend) -> None:
    session.run(LOADER)
    take = "%%taas --session exp --out got@all\n"
    session.run(take + "batches = iter(loader)\ngot = [next(batches).tolist() for _ in range(3)]")
    begun = value(session, "got")
    request = session.run(take + "got = [batch.tolist() for batch in batches]")
    rest = value(session, "got")
    assert "loader: batches 10 " in notes(session, request)
    per_rank = [[*first, *later] for first, later in zip(begun, rest, strict=True)]
    assert [len(batches) for batches in per_rank] == [8, 8]
    seen = [number for batches in per_rank for batch in batches for number in batch]
    assert sorted(seen) == list(range(32))
    session.run(take + "got = [batch.tolist() for batch in loader]")
    second = value(session, "got")
    assert sorted(n for batches in second for batch in batches for n in batch) == list(range(32))
    assert second != per_rank


def test_a_loader_that_is_registered_again_is_sent_again(session: Frontend) -> None:
    session.run(LOADER)
    total = "%%taas --session exp --out total\ntotal = sum(int(batch.sum()) for batch in loader)"
    session.run(total)
    first = value(session, "total")
    session.run(LOADER.replace("torch.arange(32)", "torch.full([32], 7)"))
    processes = [len(below(rank.pid)) for rank in ranks_of(session)]
    request = session.run(total)
    assert "changed in the notebook and sent again: `loader`" in notes(session, request)
    assert value(session, "total") == 16 * 7 != first
    ranks = ranks_of(session)
    eventually(lambda: [len(below(rank.pid)) for rank in ranks] == processes)


def test_a_registered_loader_serves_after_an_error_in_its_epoch(session: Frontend) -> None:
    session.run(LOADER)
    fails = "for number, batch in enumerate(loader):\n    assert number < 2"
    assert "AssertionError" in error(session, f"%%taas --session exp\n{fails}")
    session.run("%%taas --session exp --out many@all\nmany = len(list(loader))")
    assert value(session, "many") == [8, 8]
    request = session.run("%%taas --session exp --cpus 1\nlist(loader)")
    assert "--cpus: no effect, because this cell sends no registered loader" in notes(
        session, request
    )


OWN_SAMPLER = """import taas, torch
from torch.utils.data import DataLoader, Sampler
class Odd(Sampler):
    def __iter__(self): return iter(range(1, 32, 2))
    def __len__(self): return 16
odd = taas.register(DataLoader(torch.arange(32), batch_size=2, sampler=Odd()))
"""


def test_a_loader_with_a_sampler_of_its_own_serves_after_a_cut_collective(
    session: Frontend,
) -> None:
    session.run(OWN_SAMPLER)
    epoch = "print(len(list(odd)))"
    assert printed(session, f"%%taas --session exp\n{epoch}") == ["4"]
    cut = "%%taas --session exp\ndist.barrier()\nif rank == 1:\n    1 / 0\n"
    cut += "dist.all_reduce(torch.ones(1))"
    request = session.send(cut)
    assert session.finish(request)["status"] == "error"
    assert "was interrupted in a collective (rank 0)" in notes(session, request)
    assert printed(session, f"%%taas --session exp\n{epoch}") == ["4"]


SHUFFLED = """
import taas
from torch.utils.data import DataLoader
shuffled = taas.register(DataLoader(list(range(16)), 2, shuffle=True), seed=3)
"""

FIRST_OF_RANK_1 = """if rank == 1:
    next(iter(shuffled))
dist.barrier()
1 / rank
"""
"""Rank 1 begins an epoch. Then rank 0 fails, and so the cell ends."""


def test_ranks_continue_with_the_same_epoch_after_only_some_have_begun_one(
    session: Frontend,
) -> None:
    session.run(SHUFFLED)
    epoch = "mine, both = sum((batch.tolist() for batch in shuffled), []), [[], []]\n"
    epoch += "dist.all_gather_object(both, mine)\nprint(sum(both, []))"
    (first,) = printed(session, f"%%taas --session exp\n{epoch}")
    session.run("%%taas --session exp --ranks 0\n_ = next(iter(shuffled))")
    (second,) = printed(session, f"%%taas --session exp\n{epoch}")
    assert "ZeroDivisionError" in error(session, f"%%taas --session exp\n{FIRST_OF_RANK_1}")
    (third,) = printed(session, f"%%taas --session exp\n{epoch}")
    assert sorted(json.loads(second)) == sorted(json.loads(third)) == list(range(16))
    assert len({first, second, third}) == 3
    session.run("%%taas --session exp\nshuffled.sampler.set_epoch(0)")
    assert printed(session, f"%%taas --session exp\n{epoch}") == [first]


def fetchers_of(frontend: Frontend, count: int) -> list[psutil.Process]:
    """Run cells until `count` fetchers of the newest cell are running; return their processes."""
    found: list[psutil.Process] = []

    def are_all_there() -> bool:
        frontend.run("%%taas --session exp\npass")
        pids = value(frontend, "[it.pid for it in taas.last_run.head.run_counts.fetchers.values()]")
        found[:] = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        return len(found) == count

    eventually(are_all_there)
    return found


def test_fetchers_run_the_loaders_of_a_session_from_cell_to_cell(session: Frontend) -> None:
    session.run(LOADER)
    take = "%%taas --session exp --out got@all\n"
    session.run(
        "%%taas --session exp --cpus 2 --out got@all\n"
        "batches = iter(loader)\ngot = [next(batches).tolist() for _ in range(3)]"
    )
    begun, (one, other) = value(session, "got"), fetchers_of(session, 2)
    one.kill()
    assert not left_of([one])
    session.run(take + "got = [batch.tolist() for batch in batches]")
    per_rank = [[*a, *b] for a, b in zip(begun, value(session, "got"), strict=True)]
    assert [len(batches) for batches in per_rank] == [8, 8]
    assert sorted(n for batches in per_rank for each in batches for n in each) == list(range(32))
    assert fetchers_of(session, 1) == [other]

    # when the last fetcher is gone, all fetchers start again, and the epoch continues
    session.run(take + "batches = iter(loader)\ngot = [next(batches).tolist()]")
    begun = value(session, "got")
    other.send_signal(signal.SIGSTOP)  # its host kills it
    assert not left_of([other])
    request = session.run(take + "got = [batch.tolist() for batch in batches]")
    per_rank = [[*a, *b] for a, b in zip(begun, value(session, "got"), strict=True)]
    assert sorted(n for batches in per_rank for each in batches for n in each) == list(range(32))
    assert "loader: batches 14 " in notes(session, request)
    first = fetchers_of(session, 2)
    assert other not in first

    # a new loader gets its own fetchers; an iterator of the old loader continues
    session.run(take + "old = iter(loader)\ngot = len(next(old))")
    session.run(LOADER.replace("torch.arange(32)", "torch.full([32], 7)"))
    cell = "got = [len(list(old)), sum(int(batch.sum()) for batch in loader)]"
    session.run(f"%%taas --session exp --cpus 1 --out got@all\n{cell}")
    assert value(session, "got") == [[7, 16 * 7]] * 2
    [new] = set(fetchers_of(session, 3)) - set(first)
    session.run("%%taas --session exp\ndel old, batches\nimport gc\ngc.collect();")
    assert not left_of(first)
    session.run(take + "got = sum(int(batch.sum()) for batch in loader)")
    assert value(session, "got") == [16 * 7] * 2 and fetchers_of(session, 1) == [new]
    session.run("%taas end exp")
    assert not left_of([new])


def test_only_rank_0_writes_in_every_cell(session: Frontend) -> None:
    for number in (1, 2):
        request = session.run(
            f"%%taas --session exp\nopen('kept.txt', 'w').write(f'{{rank}} {number}')"
        )
        assert "rank 0 wrote: kept.txt" in notes(session, request)
        assert "kept.txt from rank 1" in notes(session, request)
        assert value(session, "open('kept.txt').read()") == f"0 {number}"


def test_an_error_on_a_rank_ends_the_cell_and_not_the_session(session: Frontend) -> None:
    # rank 1 fails only after rank 0 has run the line above the barrier
    cell = "%%taas --session exp\nkept = rank\ndist.barrier()\nif rank == 1:\n    1 / 0\n"
    said = error(session, cell)
    assert "ZeroDivisionError" in said and "Cell In" in said
    assert printed(session, "%%taas --session exp\nprint(kept)") == ["0", "1"]
    request = session.send(f"{cell}dist.all_reduce(torch.ones(1))")
    assert session.finish(request)["status"] == "error"
    assert "the process group was interrupted in a collective (rank 0)" in notes(session, request)
    anew = "dist.destroy_process_group()\ndist.init_process_group('gloo')\n"
    total = "x = torch.ones(1)\ndist.all_reduce(x)\nprint(x.item())"
    said = error(session, f"%%taas --session exp\n{total}")
    assert "advice: the process group was interrupted in a collective of an earlier cell" in said
    assert printed(session, f"%%taas --session exp\n{anew}{total}") == ["2.0"]
    # the new process group is a different one, so its failures have a different cause
    leaves = "if rank == 1:\n    dist.destroy_process_group()\nelse:\n    dist.all_reduce(x)"
    said = error(session, f"%%taas --session exp\n{leaves}")
    assert "advice: no rank failed before this one" in said


def test_a_ddp_model_may_be_freed_after_its_process_group_was_destroyed(session: Frontend) -> None:
    """torch waits for a process group's threads when it frees the group (pytorch/pytorch#56297)."""
    definitions, train, look = cells_of("ddp_freed")
    session.run(f"%%taas --session exp\n{definitions}")
    for _ in range(2):
        assert printed(session, f"%%taas --session exp --timeout {HUNG_S}s\n{train}") == ["freed"]
    assert printed(session, f"%%taas --session exp\n{look}") == ["deleted"]


def test_commands_work_while_taas_toml_has_a_mistake(session: Frontend) -> None:
    session.run("open('taas.toml', 'w').write('[runs]\\nkepp = 1')")
    try:
        said = session.text(session.run("%taas vars exp"))
        assert 'did you mean "keep"' in said and "settings from before this mistake" in said
        assert "pid" in said
        assert 'did you mean "keep"' in error(session, "%%taas --session exp\nprint(pid)")
    finally:
        session.run("import os\nos.remove('taas.toml')")


def test_a_device_mesh_creates_the_process_group_again(session: Frontend) -> None:
    """Rank 0 is faster than rank 1, but must not use rank 1's old address."""
    imports = "import time\nfrom torch.distributed.device_mesh import init_device_mesh"
    session.run(f"%%taas --session exp\n{imports}")
    anew = "dist.destroy_process_group()\ntime.sleep(rank)\nmesh = init_device_mesh('cpu', (2,))\n"
    total = "x = torch.ones(1)\ndist.all_reduce(x)\nprint(x.item())"
    for _ in range(2):
        assert printed(session, f"%%taas --session exp\n{anew}{total}") == ["2.0"]


def test_an_interrupt_ends_collectives_that_do_not_match_and_the_ranks_stay(
    session: Frontend,
) -> None:
    session.run("%%taas --session exp\nkept = rank")
    cell = "print('ready', flush=True)\nx = torch.ones(1)\n"
    cell += "dist.all_reduce(x) if rank == 0 else dist.recv(x, 0)"
    request = session.send(f"%%taas --session exp\n{cell}")
    session.wait(lambda: "ready" in session.text(request))
    session.manager.interrupt_kernel()
    [said] = session.finish(request)["traceback"]
    assert said.endswith("; nothing was returned. The session keeps its variables."), said
    assert printed(session, "%%taas --session exp\nprint(kept)") == ["0", "1"]


def test_a_hang_report_says_which_ranks_have_finished_the_cell(session: Frontend) -> None:
    hung = session.send("%%taas --session exp --hang 1\nif rank == 0:\n    dist.barrier()")
    title = "no rank has made progress"
    session.wait(
        lambda: (
            bool(session.contents(hung, "update_display_data")) and title in notes(session, hung)
        )
    )
    row = next(line for line in notes(session, hung).splitlines() if line.split()[:1] == ["1"])
    session.manager.interrupt_kernel()
    assert session.finish(hung)["status"] == "error"
    assert re.search(r" the end of the cell +nothing: it has finished the cell$", row), row


def test_an_interrupted_await_ends_with_its_cleanup(session: Frontend) -> None:
    cell = "import asyncio, signal\nended = []\ndist.barrier()\n"
    cell += "asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)\n"
    cell += "try:\n    await asyncio.Event().wait()\nfinally:\n    ended.append('cleaned')"
    said = error(session, f"%%taas --session exp\n{cell}")
    assert "KeyboardInterrupt" in said and "CancelledError" not in said
    after = "%%taas --session exp\nawait asyncio.sleep(0)\nprint(ended)"
    assert printed(session, after) == ["['cleaned']"]
    # errors of later cells have the notebook's line numbers, and are shown, whatever their type
    cell = "task = asyncio.ensure_future(asyncio.sleep(9))\ntask.cancel()\nawait task"
    said = error(session, f"%%taas --session exp\n{cell}")
    assert "CancelledError" in said and "line 4" in said


def test_a_rank_that_does_not_return_from_a_cell_ends_the_session(session: Frontend) -> None:
    cell = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
    cell += "dist.barrier()\nif rank == 1:\n    raise ValueError\n"
    said = error(session, f"%%taas --session exp\n{cell}import threading\nthreading.Event().wait()")
    assert "ValueError" in said
    assert 'session "exp" has ended' in said and "Lost with its ranks" in said


@pytest.mark.parametrize("next_cell", ["%taas sessions", "%%taas --session exp\npass"])
def test_a_cell_after_a_session_that_two_interrupts_ended_says_so(
    session: Frontend, next_cell: str
) -> None:
    cell = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
    cell += "print('ready', rank, flush=True)\nimport threading\nthreading.Event().wait()"
    request = session.send(f"%%taas --session exp\n{cell}")
    session.wait(lambda: len(re.findall("ready", session.text(request))) == 2)
    session.manager.interrupt_kernel()
    with suppress(AssertionError):  # the kernel would count two interrupts at once as one
        session.finish(request, 1.0)
    session.manager.interrupt_kernel()
    assert "keeps its variables" not in session.finish(request)["evalue"]
    request = session.send(next_cell)
    if session.finish(request)["status"] == "error":
        said = session.text(request) + "".join(session.replies[request]["traceback"])
        assert "something on the host killed it" not in said
        assert 'session "exp" has ended' in said and next_cell != "%taas sessions"
    else:
        assert re.search("^(session |no sessions)", session.text(request), re.MULTILINE)


def test_what_a_cell_did_is_recorded_though_the_kernel_left_the_cell(session: Frontend) -> None:
    session.run("import torch\nu, w, lr = torch.zeros(1), torch.zeros(1), 1")
    session.run("%%taas --session exp\nlr")
    session.run("__import__('taas_magic.notebook.run', fromlist=['Run']).KILL_WAIT_S = 0.0")
    cell = "u.add_(lr)\nw = w + 1\nprint('ready', rank)\nwhile True: time.sleep(0.01)"
    request = session.send(f"%%taas --session exp\nimport time\n{cell}")
    session.wait(lambda: session.text(request).count("ready") == 2)
    session.manager.interrupt_kernel()
    assert session.finish(request)["ename"] == "KeyboardInterrupt"
    session.be_patient()
    session.run("lr = 2")
    request = session.run("%%taas --session exp\nprint(u.item(), w.item(), lr)")
    assert "1.0 1.0 2" in session.text(request)
    assert "sent again: `lr`" in notes(session, request)


def test_a_cell_of_a_session_is_detached_only_with_its_session(
    session: Frontend, tmp_path: Path
) -> None:
    session.run("import torch\nw = torch.zeros(1)")
    go, subshell = tmp_path / "go", session.new_subshell()
    cell = f"w = w + 1\nprint('ready', rank)\nwhile not os.path.exists({str(go)!r}): pass"
    running = session.send(f"%%taas --session exp\n{cell}")
    session.wait(lambda: session.text(running).count("ready") == 2)
    commands = ("%taas detach", "%taas detach exp", "%taas detach")
    replies = [session.finish(session.send(code, subshell)) for code in commands]
    go.touch()
    assert session.finish(running)["status"] == "ok"
    assert [reply["status"] for reply in replies] == ["error", "ok", "ok"]
    assert "it is a cell of session exp" in replies[0]["evalue"]
    assert printed(session, "%%taas --session exp\nprint(w.item())") == ["1.0"]


def test_a_session_whose_pool_was_ended_says_so(session: Frontend) -> None:
    session.run("%taas down")
    said = error(session, "%%taas --session exp\npass")
    assert 'session "exp" has ended: the command `down` ended the pool' in said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_ends_the_session(session: Frontend, number: int) -> None:
    _, second = ranks = ranks_of(session)
    # taas-magic also kills rank 0, which does not react to the interrupt that follows
    request = session.send(
        "%%taas --session exp\nprint('ready', flush=True)\ndist.barrier()\n"
        "import signal, threading\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
        "threading.Event().wait()"
    )
    session.wait(lambda: "ready" in session.text(request))
    second.send_signal(number)
    assert session.finish(request)["status"] == "error"
    said = session.text(request)
    assert 'session "exp" has ended' in said and "rank 1" in said
    assert "pid" in said  # one of the lost variables
    assert "has ended" in error(session, "%%taas --session exp\npass")
    assert not left_of(ranks)


def test_a_rank_that_dies_between_cells_ends_the_session(session: Frontend) -> None:
    first, second = ranks_of(session)
    first.kill()
    assert not left_of([first, second])
    said = error(session, "%%taas --session exp\npass")
    assert "rank 0" in said and "SIGKILL" in said
    session.run(START)
    assert printed(session, "%%taas --session exp\nprint(rank)") == ["0", "1"]


def key_value_store(frontend: Frontend) -> psutil.Process:
    """Destroy the process group of session `exp`, whose key-value store continues.

    Returns:
        The process of the key-value store.
    """
    frontend.run(
        "%%taas --session exp --out port\nport = int(os.environ['MASTER_PORT'])\n"
        "dist.destroy_process_group()"
    )
    port = value(frontend, "port")
    return next(it for it in below(os.getpid()) if port in listening_ports([it]))


def test_a_session_whose_key_value_store_is_stopped_ends(session: Frontend) -> None:
    ranks, store = ranks_of(session), key_value_store(session)
    store.send_signal(signal.SIGSTOP)
    error(session, "%%taas --session exp\ndist.init_process_group('gloo')")
    assert not left_of(ranks)
    said = error(session, "%%taas --session exp\npass")
    assert f"process {store.pid}, which serves the ranks' key-value store" in said
    assert "was stopped (SIGSTOP) for 5 s" in said


def test_a_session_whose_key_value_store_dies_ends(session: Frontend) -> None:
    ranks, store = ranks_of(session), key_value_store(session)
    store.send_signal(signal.SIGINT)  # the key-value store ignores SIGINT
    session.run("%%taas --session exp\ndist.init_process_group('gloo')")
    store.kill()
    assert not left_of(ranks)
    said = error(session, "%%taas --session exp\npass")
    assert f"process {store.pid}, which serves the ranks' key-value store" in said
    assert "was killed by SIGKILL" in said


def test_the_variables_of_a_session_are_listed_and_a_restart_deletes_them(
    session: Frontend,
) -> None:
    session.run(
        "%%taas --session exp\nsame = torch.zeros(3)\nother = torch.ones(2) * rank\n"
        "sizes = torch.zeros(rank + 1)\nif rank == 1: alone = 1\n"
        "lazy = torch.nn.LazyLinear(3).weight"
    )
    listed = session.text(session.run("%taas vars exp"))
    rows = {line.split()[0]: line for line in listed.splitlines()}
    assert re.search(r"Tensor +\(3,\) +float32 +cpu +12 bytes +equal$", rows["same"])
    assert rows["other"].endswith("equal shapes, values differ")
    assert rows["sizes"].endswith("shapes differ: (1,), (2,)")
    assert rows["alone"].endswith("only on rank 1")
    assert "UninitializedParameter" in rows["lazy"]
    assert re.search(
        r"exp +local +2 +\S+ +[\d.]+ MB +none", session.text(session.run("%taas sessions"))
    )
    before = ranks_of(session)
    session.run("%taas restart exp")
    assert not left_of(before)
    assert printed(session, "%%taas --session exp\nprint('same' in globals())") == ["False"]


def test_an_ended_session_names_the_line_that_starts_it_again(session: Frontend) -> None:
    session.run("%taas end exp")
    said = error(session, "%%taas --session exp\npass")
    assert said.endswith("Start it again: %%taas --gpus 2 --session exp")
    session.run("open('taas.toml', 'w').write('[pools.lab]\\nengine = \"local\"')")
    start = "%%taas --gpus 1 --session other --cpus 1 --pool lab --env 'WORDS=two words'"
    start += " --store-writes refuse --shared-writes parts --shared-writes more --uneven-hosts"
    look = "import os\nprint(os.environ['WORDS'])"
    try:
        session.run(f"{start} --name first --timeout 1h\npass")
        session.run("%taas end other")
        said = error(session, "%%taas --session other\npass").splitlines()[-1]
        assert said.partition("Start it again: ")[2] == start
        assert printed(session, f"{start}\n{look}")[-1] == "two words"
        said = error(session, "%%taas --session other --shared-writes less\npass")
        assert "was started with --shared-writes parts --shared-writes more. Leave" in said
    finally:
        session.run("%taas down lab\nimport os\nos.remove('taas.toml')")


SAYS_HALTED = """
from taas_magic.pool.client import PoolConnection

def halt_and_say(*about, halt=PoolConnection.halt):
    PoolConnection.halt = halt
    print("halting", flush=True)
    halt(*about)

PoolConnection.halt = halt_and_say
"""


def test_an_interrupt_of_the_command_end_says_that_the_session_still_ends(
    session: Frontend,
) -> None:
    ranks = ranks_of(session)
    [agent] = [it for it in session.process.children(recursive=True) if AGENT in words(it)]
    session.run(SAYS_HALTED)
    agent.suspend()  # so that the ranks do not end yet
    request = session.send("%taas end exp")
    session.wait(lambda: "halting" in session.text(request))
    session.manager.interrupt_kernel()
    reply = session.finish(request)
    agent.resume()
    assert reply["evalue"] == "Stopped by you; session exp is still ending."
    assert not left_of(ranks)


WAIT_FOR_END = """
from contextlib import suppress
from taas_magic.errors import UsageError
from taas_magic.notebook import sessions
with suppress(UsageError):  # the session may have ended before this cell
    sessions.named("short").wait_for_end(60)
"""


def test_an_idle_session_is_ended(session: Frontend) -> None:
    session.run("%taas end exp")
    session.run("open('taas.toml', 'w').write('[runs]\\nsession_idle_s = 2')")
    try:
        session.run("%%taas --gpus 1 --session short\nimport os\npid = os.getpid()")
        session.run(WAIT_FOR_END)
        said = error(session, "%%taas --session short\npass")
        assert "had no cell for" in said and "session_idle_s" in said
    finally:
        session.run("import os\nos.remove('taas.toml')")


def test_a_command_without_a_name_lists_the_running_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = [SimpleNamespace(name=name) for name in ("exp", "other")]
    monkeypatch.setattr(sessions, "live", lambda: running)
    with pytest.raises(UsageError, match="running; name one: exp, other"):
        sessions.named(None)
    running.clear()
    with pytest.raises(UsageError, match="There is no session"):
        sessions.named(None)


def test_sessions_end_with_their_kernel(frontend_of_module: Frontend) -> None:
    """This test ends the module's kernel, so it is the last one."""
    frontend_of_module.run(START)
    ranks = ranks_of(frontend_of_module)
    frontend_of_module.process.send_signal(signal.SIGKILL)
    assert not left_of(ranks)
    eventually(lambda: not frontend_of_module.manager.is_alive())
