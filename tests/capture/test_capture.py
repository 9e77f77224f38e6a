"""Tests of capture: cells that this process captures run correctly in a new Python process."""

import io
import json
import logging
import math
import os
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
from fractions import Fraction
from json import JSONDecoder
from pathlib import Path
from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from taas_magic.capture import culprit, payload
from taas_magic.capture.payload import CellSource, Payload
from taas_magic.capture.work import CellWork
from taas_magic.errors import CaptureError
from tests.cellfiles import cells_of
from tests.harness import without_pytests_filter

REPOSITORY = Path(__file__).parents[2]
RANK = """
import json, sys, types
from pathlib import Path
from taas_magic.capture import payload

main = types.ModuleType("__main__")
sys.modules["__main__"] = main
loaded = payload.read(Path(sys.argv[1]))
loaded.load_into(main.__dict__)
exec(compile(loaded.work.source, loaded.work.filename, "exec"), main.__dict__)
print(json.dumps(main.__dict__["out"]))
"""


class Notebook:
    """Namespace and cells of a notebook, whose captured cells run in a new process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.cells: dict[str, CellSource] = {}

    def run(self, source: str) -> "Notebook":
        source = textwrap.dedent(source)
        count = len(self.cells) + 1
        filename = f"/tmp/ipykernel_1/{count}.py"
        self.cells[filename] = CellSource(source, f"Cell In[{count}]")
        exec(compile(source, filename, "exec"), self.namespace)
        return self

    def _arguments(self, limit_bytes: int) -> dict[str, Any]:
        return {
            "project": self.folder,
            "limit_bytes": limit_bytes,
            "source_of": self.cells.get,
        }

    def capture(self, source: str, limit_bytes: int = 1 << 30) -> Payload:
        cell = self.cell(source)
        return payload.capture(cell, self.namespace, **self._arguments(limit_bytes))

    def survey(self, source: str, limit_bytes: int = 1 << 30) -> tuple[Payload, list[str]]:
        """Capture a cell as `--dry-run` does. Return the payload, and all problems as messages."""
        cell, problems = self.cell(source), list[str]()
        settings = {**self._arguments(limit_bytes), "problems": problems}
        return payload.capture(cell, self.namespace, **settings), problems

    def cell(self, source: str) -> CellWork:
        source = textwrap.dedent(source)
        python = TransformerManager().transform_cell(source)
        return CellWork(f"%%taas --gpus 2\n{source}", python, "/tmp/ipykernel_1/cell.py", 1, 7)

    def in_rank(self, source: str, **environment: str) -> Any:
        """Capture a cell and run it in a new process; return the value of its variable `out`.

        The process sends the value as JSON, so it has only JSON's types. `environment` has
        additional environment variables of the process.
        """
        path = self.folder / "payload"
        with without_pytests_filter():
            payload.write(self.capture(source), path)
        ran = subprocess.run(
            [sys.executable, "-c", RANK, str(path)],
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture
def notebook(tmp_path: Path) -> Notebook:
    if (
        "torch" in sys.modules
    ):  # a seed of an earlier test would be sent, and the rank would import torch
        sys.modules["torch"].seed()
    return Notebook(tmp_path)


@pytest.fixture(autouse=True)
def enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the search for an unpicklable object enough time, also on a busy machine."""
    monkeypatch.setattr(culprit, "_BUDGET_S", 1000.0)


def why(made: Payload) -> dict[str, str]:
    return {captured.name: captured.why for captured in made.captured}


def test_class_used_only_by_a_called_function(notebook: Notebook) -> None:
    notebook.run("""
        class Point:
            def __init__(self, x): self.x = x
        def make(): return Point(3).x
    """)
    assert notebook.in_rank("out = make()") == 3
    assert why(notebook.capture("make()"))["Point"] == "`make` uses it"


def test_function_redefined_since(notebook: Notebook) -> None:
    notebook.run("def f(): return 1\ndef g(): return f()").run("def f(): return 2")
    assert notebook.in_rank("out = g()") == 2


def test_function_redefined_by_the_cell(notebook: Notebook) -> None:
    notebook.run("def f(): return 1\ndef g(): return f()")
    assert notebook.in_rank("def f(): return 5\nout = g()") == 5


def test_closure(notebook: Notebook) -> None:
    notebook.run("""
        def counter(n):
            def step():
                nonlocal n
                n += 1
                return n
            return step
        step = counter(4)
    """)
    assert notebook.in_rank("out = [step(), step()]") == [5, 6]


def test_decorator(notebook: Notebook) -> None:
    notebook.run("""
        import functools
        def twice(f):
            @functools.wraps(f)
            def inner(*a): return f(*a) * FACTOR
            return inner
        FACTOR = 2
        @twice
        def f(x): return x + 1
    """)
    source = "@twice\ndef g(): return 10\nout = [f(1), g(), f.__name__]"
    assert notebook.in_rank(source) == [4, 20, "f"]


def test_lambda_in_a_dict(notebook: Notebook) -> None:
    notebook.run("offset = 5\nsteps = {'add': [lambda x: x + offset]}")
    assert notebook.in_rank("out = steps['add'][0](1)") == 6
    assert why(notebook.capture("steps"))["offset"] == "`steps` uses it"


def test_module_alias_and_submodule_reached_through_its_package(notebook: Notebook) -> None:
    notebook.run("import math as m\nimport xml.dom.minidom")
    assert notebook.in_rank("out = [m.floor(2.5), xml.dom.minidom.__name__]") == [
        2,
        "xml.dom.minidom",
    ]


def test_star_import(notebook: Notebook) -> None:
    notebook.run("from math import *")
    assert notebook.in_rank("from string import *\nout = [floor(2.5), digits]") == [2, "0123456789"]


@pytest.mark.parametrize(
    "source",
    [
        "out = sum([n for _ in range(2)])",
        "out = f'{n:>{n}}'",
        "out = f'{1:>{n}}'",
        "def f():\n    def g(): return n\n    return g()\nout = f()",
        "match 3:\n    case x if x == n: out = 'equal'\n    case _: out = 'other'",
        "class A:\n    k = n\nout = A.k",
        "out = (lambda: n)()",
        "def f(x=n): return x\nout = f()",
        "n += 1\nout = n",
        "n = n * 2\nout = n",
        "try:\n    del n\n    out = 'gone'\nexcept NameError:\n    out = 'missing'",
        "for _ in ():\n    n = 0\nout = n",
        "with open('/dev/null') as file:\n    out = n",
    ],
)
def test_a_name_that_any_statement_reads_is_captured(notebook: Notebook, source: str) -> None:
    notebook.run("n = 3")
    here = {"n": 3}
    exec(source, here)
    assert notebook.in_rank(source) == here["out"]


def test_global_is_seen_by_cell_and_captured_functions(notebook: Notebook) -> None:
    notebook.run("""
        count = 1
        def bump():
            global count
            count += 1
        def read(): return count
    """)
    assert notebook.in_rank("bump()\nout = [count, read()]\ncount = 9\nout.append(read())") == [
        2,
        2,
        9,
    ]


def test_recursion_and_mutual_recursion(notebook: Notebook) -> None:
    notebook.run("""
        def factorial(n): return 1 if n < 2 else n * factorial(n - 1)
        def even(n): return n == 0 or odd(n - 1)
        def odd(n): return n != 0 and even(n - 1)
    """)
    assert notebook.in_rank("out = [factorial(5), even(10)]") == [120, True]


def test_code_that_runs_while_loading_finds_its_globals(notebook: Notebook) -> None:
    notebook.run("""
        SEED = 7
        def mix(x): return x * SEED
        class Key:
            def __init__(self, x): self.x = x
            def __hash__(self): return mix(1)
            def __eq__(self, other): return self.x == other.x
            def __setstate__(self, state): self.__dict__.update(state); self.mixed = mix(self.x)
        a_table = {Key(1): 'one'}
    """)
    assert notebook.in_rank("out = [a_table[Key(1)], list(a_table)[0].mixed]") == ["one", 7]


[DEFINITIONS] = cells_of("pickled_definitions")


def test_dataclass_enum_namedtuple_and_module(notebook: Notebook) -> None:
    notebook.run(DEFINITIONS)
    expected = notebook.run("y = net(torch.ones(2)).item()").namespace["y"]
    source = """
        import dataclasses
        out = [config.double(), colour is Colour.BLUE, Config(4) == config, pair._replace(left=5)]
        out += [isinstance(net, Net), net(torch.ones(2)).item()]
        out += [dataclasses.fields(Config)[0].default_factory is dataclasses.MISSING]
    """
    assert notebook.in_rank(source) == [8, True, True, [5, 2], True, expected, True]


def test_enums_with_attributes_record_arrays_and_a_class_without_module(notebook: Notebook) -> None:
    notebook.run(
        """
        import enum
        import numpy as np
        class Size(enum.Enum):
            SMALL = (1, "s")
            LARGE = (9, "l")
            def __init__(self, width, label): self.width, self._label = width, label
            @property
            def label(self): return self._label
        records = np.rec.array([(1, 2.0)], names="a,b")
        Message = type("Message", (), {"__module__": None, "text": "hi"})
        message = Message()
        """
    )
    source = """
        out = [Size.LARGE.width, Size.SMALL.label, Size((9, "l")) is Size.LARGE]
        out += [isinstance(records, np.recarray), int(records.a[0]), repr(records)[:9]]
        out += [message.text]
    """
    assert notebook.in_rank(source) == [9, "s", True, True, 1, "rec.array", "hi"]


ENUMS, ENUMS_IN_RANK = cells_of("kinds_of_enums")


def test_enums_with_aliases_flags_functions_and_values_of_their_own(notebook: Notebook) -> None:
    notebook.run(ENUMS + ENUMS_IN_RANK)
    assert notebook.in_rank(ENUMS_IN_RANK) == "as in the notebook"


def test_notebook_classes_inside_a_dataloaders_processes(notebook: Notebook) -> None:
    notebook.run(DEFINITIONS)
    source = """
        loader = DataLoader(data, batch_size=2, num_workers=2, collate_fn=lambda batch: batch)
        pairs = [pair for batch in loader for pair in batch]
        out = [[type(p).__name__, p.left, p.right[0].double()] for p in pairs]
        out += [all(p.right[1] is type(p.right[1]).RED for p in pairs)]
    """
    assert notebook.in_rank(source) == [*(["Pair", i, 2 * i] for i in range(4)), True]


def test_local_module_edited_between_two_runs(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(notebook.folder))
    module = notebook.folder / "project_helpers.py"
    module.write_text("def answer(): return 1\n")
    notebook.run("import project_helpers\nfrom project_helpers import answer")
    assert notebook.in_rank("out = [project_helpers.answer(), answer()]") == [1, 1]
    module.write_text("def answer(): return 2\n")
    try:
        assert notebook.in_rank("out = [project_helpers.answer(), answer()]") == [2, 2]
    finally:
        del sys.modules["project_helpers"]


def test_local_module_that_only_the_cell_imports(notebook: Notebook) -> None:
    (notebook.folder / "only_the_cell.py").write_text("value = 11\n")
    assert notebook.in_rank("import only_the_cell\nout = only_the_cell.value") == 11


def test_shared_references_stay_shared(notebook: Notebook) -> None:
    notebook.run("""
        import torch
        inner = [1]
        a, b = {'x': inner}, {'y': inner}
        base = torch.zeros(4)
        view = base[2:]
        net = torch.nn.Linear(2, 2, bias=False)
        tied = torch.nn.Linear(2, 2, bias=False)
        tied.weight = net.weight
        state = net.state_dict()
    """)
    source = """
        view[0] = 5
        state['weight'].fill_(3)
        out = [a['x'] is b['y'], base.tolist(), tied.weight is net.weight, net.weight.sum().item()]
    """
    assert notebook.in_rank(source) == [True, [0, 0, 5, 0], True, 12]


def test_streams_loggers_and_the_shell_are_replaced_by_those_of_the_rank(
    notebook: Notebook,
) -> None:
    notebook.run("""
        import logging, sys
        class Log:
            def __init__(self):
                self.to, self.logger = sys.stderr, logging.getLogger('mine')
        log = Log()
    """)
    source = (
        "import logging, sys\nout = [log.to is sys.stderr, log.logger is logging.getLogger('mine')]"
    )
    assert notebook.in_rank(source) == [True, True]


def test_traceback_sources_of_captured_functions(notebook: Notebook) -> None:
    notebook.run("def fail(): raise ValueError('no')")
    made = notebook.capture("fail()")
    assert made.sources["/tmp/ipykernel_1/1.py"].label == "Cell In[1]"
    assert isinstance(made.work, CellWork)
    assert made.sources[made.work.filename] == CellSource(made.work.raw, "Cell In[7]")


def test_variables_that_the_cell_does_not_use_are_never_accessed(notebook: Notebook) -> None:
    class Untouchable:
        def __getattribute__(self, name: str) -> Any:
            pytest.fail(f"looked up {name}")

    notebook.namespace.update(secret=Untouchable(), n=1, _=Untouchable())
    assert list(why(notebook.capture("secret = 2\nout = n + secret\nx.secret"))) == ["n"]


def test_names_of_ipython_are_sent_only_if_the_user_has_rebound_them(notebook: Notebook) -> None:
    history, outputs = ["", "1+1"], {1: object()}
    notebook.namespace.update(
        {"In": history, "_ih": history, "Out": outputs, "_oh": outputs, "_1": outputs[1]}
    )
    notebook.namespace.update({"_": outputs[1], "_i": "1+1", "__": ""})
    source = "print(In, Out, _, __, _1, _i, _ih, __name__, __builtins__, missing)"
    assert why(notebook.capture(source)) == {}
    notebook.run("In, _, _i = [1], 5, 6")
    assert set(why(notebook.capture(source))) == {"In", "_", "_i"}


def test_the_objects_of_a_real_shell_can_be_captured(notebook: Notebook) -> None:
    is_own = not InteractiveShell.initialized()  # keep the shell of an earlier test
    shell = InteractiveShell.instance(config=Config(HistoryManager={"hist_file": ":memory:"}))
    try:
        shell.run_cell("import sys; n = 3; held = [get_ipython, get_ipython()]", silent=True)
        shell.run_cell("def f():\n    !echo {n}\n    display(n, open, exit, quit)", silent=True)
        notebook.namespace = shell.user_ns
        made = notebook.capture("f()\n%time held\n!echo $sys\nIn, Out, _, open")
    finally:
        if is_own:
            InteractiveShell.clear_instance()
            shell.history_manager.end_session()
    assert why(made) == {
        "n": "`f` uses it",
        "f": "the cell uses it",
        "held": "the cell uses it",
        "sys": "the cell uses it",
    }


def refused(notebook: Notebook, value: Any, source: str = "thing") -> str:
    notebook.namespace["thing"] = value
    with pytest.raises(CaptureError) as caught:
        notebook.capture(source)
    return str(caught.value)


class Box:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def test_refuses_a_lock(notebook: Notebook) -> None:
    message = refused(notebook, Box(logger=Box(_lock=threading.Lock())))
    assert message.startswith("`thing.logger._lock` is a _thread.lock and cannot be sent")
    assert "create it inside the cell (or delete the attribute)" in message


@pytest.mark.parametrize("mode", ["r", "w", "rb", "r+b"])
def test_refuses_an_open_file(notebook: Notebook, tmp_path: Path, mode: str) -> None:
    (tmp_path / "file").touch()
    with open(tmp_path / "file", mode) as file:
        message = refused(notebook, {"out": [file]})
    assert message.startswith("`thing['out'][0]` is a")
    assert "open it inside the cell" in message


def test_refuses_a_generator(notebook: Notebook) -> None:
    message = refused(notebook, (n for n in range(3)))
    assert message.startswith("`thing` is a generator")
    assert "make a list of it" in message


def test_refuses_a_socket(notebook: Notebook) -> None:
    with socket.socket() as connection:
        message = refused(notebook, [Box(peer=connection)])
    assert message.startswith("`thing[0].peer` is a socket.socket")
    assert "connect inside the cell" in message


def test_refuses_a_database_handle_deep_in_an_attribute(notebook: Notebook) -> None:
    database = sqlite3.connect(":memory:")
    value = {"a": [0, 1, 2, Box(db=database)]}
    message = refused(notebook, value)
    database.close()
    assert message.startswith("`thing['a'][3].db` is a sqlite3.Connection")


def test_refuses_a_live_dataloader_iterator(notebook: Notebook) -> None:
    from torch import zeros
    from torch.utils.data import DataLoader, TensorDataset

    message = refused(notebook, Box(batches=iter(DataLoader(TensorDataset(zeros(3))))))
    assert message.startswith("`thing.batches` is a torch.utils.data")
    assert "pass the loader and call iter() inside the cell" in message


def test_refuses_a_thread(notebook: Notebook) -> None:
    message = refused(notebook, [threading.Thread()])
    assert message.startswith("`thing[0]")


def test_the_refusal_says_why_the_variable_is_sent(notebook: Notebook) -> None:
    notebook.run("def train(): return thing")
    message = refused(notebook, threading.Lock(), "train()")
    assert message.startswith("`thing` is a _thread.lock")
    assert "(`train` uses it)" in message


def test_refuses_more_than_the_limit(notebook: Notebook) -> None:
    notebook.run("a, b, c, d = (bytes(n << 10) for n in (40, 30, 20, 10))")
    with pytest.raises(CaptureError) as caught:
        notebook.capture("a, b, c, d", limit_bytes=90 << 10)
    message = str(caught.value)
    assert "`a` 40.0 KiB, `b` 30.0 KiB, `c` 20.0 KiB;" in message
    with pytest.raises(CaptureError, match="more than 5 bytes: the notebook's settings "):
        notebook.capture("1", limit_bytes=5)
    assert "`[capture] limit` in taas.toml" in message


def test_survey_lists_all_objects_that_cannot_be_sent(notebook: Notebook) -> None:
    notebook.namespace.update(
        {"lock": threading.Lock(), "numbers": iter(()), "n": 5, "gen": (x for x in "")}
    )
    made, problems = notebook.survey("lock, gen, n", limit_bytes=1)
    assert list(why(made)) == ["n"]
    assert [problem.split()[0] for problem in problems] == ["`gen`", "`lock`", "the"]


def test_syntax_error_comes_before_anything_is_pickled(notebook: Notebook) -> None:
    notebook.namespace["lock"] = threading.Lock()
    with pytest.raises(SyntaxError):
        notebook.capture("lock\nif:")


def test_reading_the_header_unpickles_nothing(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("class Loud:\n    def __setstate__(self, state): raise AssertionError")
    notebook.run("loud = Loud(); loud.x = 1")
    payload.write(notebook.capture("loud"), tmp_path / "payload")
    loaded = payload.read(tmp_path / "payload")
    assert [captured.name for captured in loaded.captured] == ["Loud", "loud"]
    assert isinstance(loaded.work, CellWork) and loaded.work.line_offset == 1


def test_all_ranks_share_the_memory_of_a_big_tensor(notebook: Notebook, tmp_path: Path) -> None:
    size_kib = 128 << 10
    notebook.run(f"import torch\nbig = torch.ones({size_kib << 10} // 4)")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak memory
    before = _peak_kib()
    payload.write(notebook.capture("big"), tmp_path / "payload")
    grown = _peak_kib() - before
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.children.memory_rank", str(tmp_path / "payload")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            text=True,
        )
        for _ in range(2)
    ]
    try:
        sums = [_line(rank) for rank in ranks]
        private = [float(_ask(rank)) for rank in ranks]
    finally:
        for rank in ranks:
            rank.communicate("\n")
    assert sums == [f"{float(size_kib << 8)}"] * 2
    assert grown < size_kib / 4
    assert all(kib < size_kib / 4 for kib in private)


def _peak_kib() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def _line(rank: "subprocess.Popen[str]") -> str:
    assert rank.stdout is not None
    return rank.stdout.readline().strip()


def _ask(rank: "subprocess.Popen[str]") -> str:
    assert rank.stdin is not None
    rank.stdin.write("\n")
    rank.stdin.flush()
    return _line(rank)


def take_handlers_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all handlers of torch's loggers `c10d-NullHandler-…` until the test ends.

    So capture does not report these loggers.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("c10d-NullHandler-"):
            monkeypatch.setattr(logging.getLogger(name), "handlers", [])


def test_functions_that_the_notebook_replaced_in_modules_are_reported(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_handlers_of_torch(monkeypatch)
    notebook.run("import math, fractions, json")
    notebook.run("def patched(*args): return 0")
    monkeypatch.setattr(math, "sqrt", notebook.namespace["patched"])
    monkeypatch.setattr(math, "sin", notebook.namespace["patched"])
    monkeypatch.setattr(Fraction, "limit_denominator", notebook.namespace["patched"])
    monkeypatch.setattr(JSONDecoder, "decode", notebook.namespace["patched"])
    notebook.run("half = fractions.Fraction(1, 2)\ndef f(): return json.decoder.JSONDecoder")
    told = notebook.capture("math.sqrt(2), half, f").notes
    assert [note.partition(" is a function of the notebook here")[0] for note in told] == [
        "fractions.Fraction.limit_denominator",
        "json.decoder.JSONDecoder.decode",
        "math.sqrt",
    ]
    assert notebook.capture("math.sqrt = abs").notes == ()


def test_loggers_whose_handlers_are_not_sent_are_reported(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_handlers_of_torch(monkeypatch)
    logger = logging.getLogger("experiment of a test")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(io.StringIO())])
    assert notebook.capture("1").notes == ()
    monkeypatch.setattr(logger, "level", logging.INFO)
    assert notebook.capture("1").notes == (
        "logger experiment of a test: its StreamHandler stays in the notebook, so ranks show only "
        "its warnings; add a handler in the %%taas cell",
    )
    for heard in (logging.StreamHandler(sys.stdout), logging.NullHandler()):
        monkeypatch.setattr(logger, "handlers", [heard])
        assert notebook.capture("1").notes == ()
