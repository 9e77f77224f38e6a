"""Tests that ranks can use the captured variables of a real kernel."""

import re
import sys
from collections.abc import Iterator

import pytest

from tests.cellfiles import cells_of
from tests.frontend import Frontend

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture
def frontend(frontend_of_module: Frontend) -> Frontend:
    """Return a kernel with a warm pool. Tests that leave kernel and pool unchanged share it."""
    return frontend_of_module


HELD = "\nprint('all held')"
"""Last line of a cell with asserts. A rank that prints "all held" has passed all asserts."""


def held(text: str) -> set[str]:
    """Return the numbers of the ranks that printed "all held". A prefix `[0-1]` counts as both."""
    return {
        rank for ranks in re.findall(r"\[(\S+).*\] all held", text) for rank in ranks.split("-")
    }


FUNCTOOLS, IN_RANKS = cells_of("functools_objects")


def test_objects_of_functools_work_in_ranks(frontend: Frontend) -> None:
    frontend.run(FUNCTOOLS)
    ranks = frontend.run("%%taas --gpus 2\n" + IN_RANKS + HELD)
    assert held(frontend.text(ranks)) == {"0", "1"}


def test_objects_of_functools_come_back_from_ranks(frontend: Frontend) -> None:
    frontend.run("""%%taas --gpus 1 --out cached,generic
import functools
@functools.cache
def cached(x): return x + 1
@functools.singledispatch
def generic(x): return "other"
@generic.register
def _(x: int): return "int"
""")
    frontend.run("assert cached(1) == 2 and generic(1) + generic('') == 'intother'")


SIBLINGS, SIBLINGS_IN_RANKS = cells_of("library_objects")


@pytest.mark.nightly
def test_objects_of_other_libraries_work_in_ranks(frontend: Frontend) -> None:
    frontend.run(SIBLINGS)
    ranks = frontend.run("%%taas --gpus 2\n" + SIBLINGS_IN_RANKS + HELD)
    assert held(frontend.text(ranks)) == {"0", "1"}


SHARED, SHARED_IN_RANKS = cells_of("shared_objects")


def test_identical_objects_of_the_notebook_are_identical_in_ranks(frontend: Frontend) -> None:
    frontend.run(SHARED)
    ranks = frontend.run("%%taas --gpus 2\n" + SHARED_IN_RANKS + HELD)
    assert held(frontend.text(ranks)) == {"0", "1"}


NOTEBOOKS, COMES_BACK, AT_HOME = cells_of("returned_functions")


def test_functions_that_come_back_belong_to_the_notebook(frontend: Frontend) -> None:
    frontend.run(NOTEBOOKS)
    flags = "--gpus 1 --out uncalled,called,holder,is_unset,add,mean"
    frontend.run(f"%%taas {flags}\n{COMES_BACK}")
    assert frontend.text(frontend.run(AT_HOME + HELD)) == "all held\n"


def test_a_variable_of_the_notebook_is_replaced_only_if_out_names_it(frontend: Frontend) -> None:
    cell = "%%taas --gpus 1 --out scale\nFACTOR = {}\ndef scale(x): return x * FACTOR"
    assert "FACTOR" not in frontend.text(frontend.run(cell.format(2)))
    assert "FACTOR" not in frontend.text(frontend.run(cell.format(3)))  # an earlier run set it
    frontend.run("assert scale(1) == 3\nFACTOR = 4")
    text = frontend.text(frontend.run(cell.format(5)))
    assert (
        "scale uses FACTOR, which the cell changed; the notebook keeps its own value (4): "
        "--out scale,FACTOR returns the cell's\n" in text
    )
    frontend.run("assert scale(1) == 4")
    text = frontend.text(frontend.run(cell.format(5).replace("scale\n", "scale,FACTOR\n")))
    assert "FACTOR" not in text
    frontend.run("assert scale(1) == 5")


def test_reading_the_results_of_a_run_again_replaces_no_variable(frontend: Frontend) -> None:
    cell = """%%taas --gpus 2 --out scaled@all
import torch
gain, calls = torch.full((1,), {}), []
def scaled(x):
    calls.append(x)
    return (x * gain).item()"""
    for gain in ("2.0", "3.0"):
        assert "scaled uses" not in frontend.text(frontend.run(cell.format(gain)))
    frontend.run("assert [f(1) for f in scaled] == [3, 3] and calls == [1, 1]")
    frontend.run("import taas\nnewest, older = taas.runs()[:2]")
    for run in ("newest", "older"):
        frontend.run(f"assert len({run}.out['scaled']) == 2")
        frontend.run("assert calls == [1, 1] and [f(1) for f in scaled] == [3, 3]; calls[2:] = []")
    frontend.run("assert not newest.result_notes")
    frontend.run("assert 'scaled uses gain' in str(older.result_notes)")


DEFINE = """import functools
missing = object()
def act(x, y={y}, z=missing): return x {sign} y
@functools.cache
def cached(x): return x {sign} 1
"""


def test_a_function_that_the_notebook_defined_anew_comes_back_as_the_ranks_had_it(
    frontend: Frontend,
) -> None:
    frontend.run(DEFINE.format(y=1, sign="+"))
    frontend.run("%%taas --gpus 1 --detach --out back\nback = [act, cached]")
    frontend.run("import taas\ntaas.runs()[0].wait()")
    own = "[here is there for here, there in zip([act, cached], back)]"
    for y, sign, expected in [
        (1, "+", [True, True]),
        (2, "+", [False, True]),
        (1, "-", [False] * 2),
    ]:
        frontend.run("\n" + DEFINE.format(y=y, sign=sign))  # one line further down
        frontend.run("back = taas.runs()[0].out['back']")
        frontend.run(f"assert {own} == {expected}, {own}")
        frontend.run("assert [f(5) for f in back] == [6, 6]")
    frontend.run("act = cached = None\nback = taas.runs()[0].out['back']")
    frontend.run("assert [f(5) for f in back] == [6, 6]")


def test_changes_by_ranks_that_do_not_come_back_are_reported(
    frontend: Frontend,
) -> None:
    frontend.run("import torch\nlosses, total, net = [], 0, torch.nn.Linear(2, 1)")
    body = "losses.append(1)\ntotal += 1\nnet.eval()(torch.ones(1, 2))\nunset = net"
    shown = str(frontend.outputs[frontend.run(f"%%taas --gpus 2\n{body}")])
    assert (
        "losses, total were changed in the ranks, not in the notebook; --out losses,total "
        "returns them" in shown
    )
    shown = str(frontend.outputs[frontend.run(f"%%taas --gpus 2 --out losses,total\n{body}")])
    assert "changed in the ranks" not in shown and "note: logger" not in shown
    frontend.run("assert losses == [1] and total == 1")


def test_objects_that_still_use_a_value_which_out_has_replaced_are_named(
    frontend: Frontend,
) -> None:
    frontend.run(
        "import torch\nnet, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)\n"
        "class Trainer:\n"
        "    def __init__(self, model): self.parts, self.us = {'model': model}, [self]\n"
        "both, trainer, _hidden = torch.nn.Sequential(net, other), Trainer(net), net\n"
        "optimizer, params = torch.optim.SGD(net.parameters(), lr=0.1), list(net.parameters())\n"
        "plan = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
        "others = torch.optim.SGD(other.parameters(), lr=0.1)\nnet"
    )
    body = "\ntorch.nn.init.ones_(net.weight)"
    request = frontend.run(f"%%taas --gpus 1 --out net{body}\noptimizer.param_groups[0]['lr']")
    assert (
        "note: --out has replaced net, but both, optimizer, params, plan, trainer still use the "
        "old value. If they should use the new value, create them again, or add them to --out if "
        "the cell uses them\n"
    ) in frontend.text(request)
    frontend.run("del both, trainer, params, plan\nkept, net = net, torch.nn.Linear(2, 1)")
    cell = f"%%taas --gpus 1 --out net,optimizer{body}\noptimizer.step()"
    assert "note: --out" not in frontend.text(frontend.run(cell))
    frontend.run("kept = net\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)")
    assert "note: --out" not in frontend.text(frontend.run(f"%%taas --gpus 1 --out net{body}"))
    cell = "%%taas --gpus 1 --session kept --out other\ntorch.nn.init.ones_(other.weight)\n1 / 0"
    request = frontend.send(cell)
    assert frontend.finish(request)["status"] == "error"
    assert (
        "has replaced other, but others still uses the old value. If it should use the new value, "
        "create it again, or add it"
    ) in frontend.text(request)
    frontend.run("%taas end kept")


def test_a_name_that_only_ranks_have_is_explained(frontend: Frontend) -> None:
    frontend.run("%%taas --gpus 1\nonly_there = 1")
    for cell in ("print(only_there)", "%%taas --gpus 1\nprint(only_there)"):
        request = frontend.send(cell)
        assert frontend.finish(request)["status"] == "error"
        assert frontend.text(request).endswith(
            "`only_there` was set in an earlier %%taas cell, but is not in the notebook: run that "
            "cell again with --out only_there\n"
        )
    request = frontend.send("print(nowhere)")
    assert frontend.finish(request)["status"] == "error" and not frontend.text(request)
    frontend.run("%%taas --gpus 1 --out later --detach\nlater = 1")
    request = frontend.send("print(later)")
    assert frontend.finish(request)["status"] == "error"
    assert "`later` comes from a detached run" in frontend.text(request)
    frontend.run(re.findall(r"`(%taas attach [\w-]+)`", frontend.text(request))[0])
    frontend.run("import taas; assert taas.last_run.out['later'] == 1")


def test_a_cell_that_reads_a_variable_which_only_ranks_got_anew_is_noted_once(
    frontend: Frontend,
) -> None:
    frontend.run("import torch, math\nmodel, acc, size, step = torch.nn.Linear(4, 1), 0.1, 64, 0")
    frontend.run("seen = []\ndef score(): return 1\n_hidden, total, got = 1, 0, 2")
    ranks = """
import math
model = torch.nn.Linear(4, 1)
if True:
    acc, size = 0.9, 32
for step in range(3):
    total += 1
    seen.append(step)
with torch.no_grad() as given:
    def score(): return 2
_hidden = got = 3
size = 32"""
    cell = "%%taas --gpus 1 --out got" + ranks
    request = frontend.run(cell)
    assert "total, seen were changed in the ranks" in str(frontend.outputs[request])
    quiet = "print(f'{step} {total} {score()} {_hidden} {got} {seen} {math}', end='')\nsize = 5"
    assert "note" not in frontend.text(frontend.run(quiet))
    reads = "if acc and size:\n    print(acc, model.in_features)  # not %%taas\nacc = 0.2"
    note = (
        "note: acc, model have the notebook's own values. A %%taas cell assigned new values, but "
        "only in its ranks. To get these values, run that cell with --out got,acc,model\n"
    )
    assert frontend.text(frontend.run(reads)) == note + "0.1 4\n"
    assert frontend.text(frontend.run("print(acc, model.in_features)")) == "0.2 4\n"
    frontend.run(cell)
    frontend.run("model = None")
    assert frontend.text(frontend.run("print(model)")) == "None\n"
    assert frontend.text(frontend.run("!echo {acc}")).startswith("note: acc has the notebook's own")
    frontend.run("%%taas --gpus 1\nseen = [1]")
    assert not frontend.text(frontend.run("del seen"))
    frontend.run("%%taas --gpus 1\nacc = 0.2\nsize = 5")  # the notebook has the same values
    frontend.run("%%taas --gpus 1 --out size\nsize = 6")
    assert frontend.text(frontend.run("print(acc, size)")) == "0.2 6\n"
    request = frontend.send("%%taas --gpus 1\n1 / 0\nacc = 0.9")
    assert frontend.finish(request)["status"] == "error"
    assert frontend.text(frontend.run("print(acc)")) == "0.2\n"


def test_the_note_on_a_variable_that_a_session_assigned_names_the_session(
    frontend: Frontend,
) -> None:
    frontend.run("lr = 0.1")
    frontend.run("%%taas --gpus 1 --session kept\nlr = 0.5")
    assert frontend.text(frontend.run("print(lr)")) == (
        "note: lr has the notebook's own value. A %%taas cell assigned a new value, but only in "
        "its ranks. To get this value, run a cell of session kept with --out lr\n0.1\n"
    )
    frontend.run("%%taas --session kept --out lr\nlr")
    assert frontend.text(frontend.run("print(lr)\nget_ipython().run_line_magic('taas', 'end')"))


SLOTS = """
import abc, dataclasses
@dataclasses.dataclass(slots=True)
class Point:
    x: int
    label: str = "here"
class Base(abc.ABC):
    __slots__ = {"first": "documented", "__weakref__": ""}
class Sub(Base):
    __slots__ = "only"
class Private(Sub):
    __slots__ = ("__hidden",)
    def set(self, value): self.__hidden = value
    def get(self): return self.__hidden
class Empty(Private):
    __slots__ = ()
class Open(Empty): pass
given = Point(1)
"""
SLOTS_IN_RANKS = """
given.x, point, empty, opened = 2, Point(3), Empty(), Open()
empty.first, empty.only, opened.any = 4, 5, 7
empty.set(6)
for each in (point, given, empty):
    try:
        each.nothing = 1
    except AttributeError:
        continue
    assert False, f"{each} has a __dict__"
"""
SLOTS_AT_HOME = """
assert (given, point) == (Point(2), Point(3)) and type(empty) is Empty and type(opened) is Open
assert (empty.first, empty.only, empty.get(), opened.any) == (4, 5, 6, 7)
"""


def test_classes_keep_their_slots_and_their_instances_come_back(frontend: Frontend) -> None:
    frontend.run(SLOTS)
    ranks = frontend.run("%%taas --gpus 1 --out given,point,empty,opened" + SLOTS_IN_RANKS + HELD)
    assert held(frontend.text(ranks)) == {"0"}
    assert frontend.text(frontend.run(SLOTS_AT_HOME + HELD)) == "all held\n"


def test_classes_enter_themselves_into_a_register_of_the_notebook(frontend: Frontend) -> None:
    """Classes and register refer to each other: creating a class changes the register."""
    frontend.run("""
models = {}
class Model:
    def __init_subclass__(cls): models[cls.__name__] = cls
class Small(Model): pass
class Meta(type):
    def __init__(cls, *args): models[cls.__name__] = cls
class Large(metaclass=Meta): pass
""")
    for first in ("models", "Model", "Small", "Meta", "Large"):
        used = "assert models == {'Small': Small, 'Large': Large}, models"
        frontend.run(f"%%taas --gpus 1 --out models\n{first}\n{used}")
        frontend.run(used)


HOOKED_CLASSES, HOOKED_CLASSES_IN_RANKS = cells_of("hooked_classes")


def test_classes_are_sent_without_running_the_code_that_their_creation_ran(
    frontend: Frontend,
) -> None:
    frontend.run(HOOKED_CLASSES)
    ranks = frontend.run("%%taas --gpus 1 --out options\n" + HOOKED_CLASSES_IN_RANKS + HELD)
    assert held(frontend.text(ranks)) == {"0"}
    frontend.run("assert options == Counted.Options()")


def test_classes_enter_themselves_into_a_register_of_an_imported_module(
    frontend: Frontend,
) -> None:
    frontend.run('''open("plugins.py", "w").write("""
known = []
class Plugin:
    def __init_subclass__(cls): known.append(cls.__name__)
""")
import plugins
class Mine(plugins.Plugin):
    def __init_subclass__(cls, *, key): super().__init_subclass__()
class Part(Mine, key="part"): pass
''')
    ranks = frontend.run(
        "%%taas --gpus 1\nPart\nassert plugins.known == ['Mine', 'Part'], plugins.known" + HELD
    )
    assert held(frontend.text(ranks)) == {"0"}


HOOKS = """
import torch
net, calls = torch.nn.Linear(1, 1, bias=False), []
net.register_forward_hook(lambda *args: calls.append("forward"))
net.weight.register_hook(lambda grad: grad * 2)
net.weight.register_post_accumulate_grad_hook(lambda weight: calls.append("grad"))
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
optimizer.register_step_post_hook(lambda *args: calls.append("step"))
start = net.weight.item()
"""
HOOKS_IN_RANKS = """
import torch
net.register_forward_hook(lambda *args: calls.append("second forward"))
optimizer.register_step_post_hook(lambda *args: calls.append("second step"))
handle = net.weight.register_hook(lambda grad: grad * 3)
net(torch.ones(1, 1)).backward()
optimizer.step()
assert calls == ["forward", "second forward", "grad", "step", "second step"], calls
assert abs(net.weight.item() - start + 3) < 1e-5
handle.remove()
"""


def test_hooks_of_the_notebook_run_in_ranks_beside_new_hooks(frontend: Frontend) -> None:
    frontend.run(HOOKS)
    ranks = frontend.run("%%taas --gpus 1 --out net,optimizer" + HOOKS_IN_RANKS + HELD)
    assert held(frontend.text(ranks)) == {"0"}
    frontend.run("assert len(net._forward_hooks) == 2 and optimizer.param_groups[0]['lr'] == 0.5")
    frontend.run("net.register_forward_hook(lambda *args: None)")
    frontend.run("assert len(net._forward_hooks) == 3")


def test_new_hooks_of_a_parametrized_module_do_not_replace_its_old_hooks(
    frontend: Frontend,
) -> None:
    frontend.run("""
import torch
normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(1, 1))
old_hooks = [normed.register_forward_hook(lambda *args: None).id]
""")
    ranks = frontend.run(
        """%%taas --gpus 1
new_hooks = [normed.register_forward_hook(lambda *args: None).id for _ in range(1000)]
assert len(normed._forward_hooks) == 1001 and not {*old_hooks} & {*new_hooks}"""
        + HELD
    )
    assert held(frontend.text(ranks)) == {"0"}


def test_annotations_are_not_evaluated_if_an_earlier_cell_imports_them_from_future(
    frontend: Frontend,
) -> None:
    frontend.run("from __future__ import annotations")
    frontend.run("""%%taas --gpus 1
import multiprocessing
class Node:
    def following(self) -> Node: return self
process = multiprocessing.get_context("spawn").Process(target=Node().following)
process.start()
process.join()
assert process.exitcode == 0
""")
    frontend.run("get_ipython().compile.reset_compiler_flags()")
    assert "NameError" in frontend.fail("%%taas --gpus 1\ndef f() -> Nowhere: pass")["evalue"]


OF_TORCH, OF_LIBRARIES = cells_of("process_bound")
PATHS_OF_TORCH = {
    "loader": ("loader.sampler", "DistributedSampler"),
    "group": ("group", "ProcessGroup"),
    "mesh": ("mesh", "DeviceMesh"),
    "wrapped": ("wrapped", "DistributedDataParallel"),
    "sharded": ("sharded", "FSDPLinear"),
    "spread": ("spread", "DTensor"),
}
PATHS_OF_LIBRARIES = {
    "arguments": ("arguments", "TrainingArguments"),
    "trainer": ("trainer", "MyTrainer"),
    "train()": ("experiment.parts['accelerator']", "Accelerator"),
    "lightning_trainer": ("lightning_trainer", "Trainer"),
    "fabric": ("fabric", "Fabric"),
    "prepared": ("prepared", "DataLoaderShard"),
}


def check_refused(frontend: Frontend, paths: dict[str, tuple[str, str]]) -> None:
    """Run cells that use objects of one process; check that they are refused before the start.

    Args:
        paths: By the cell's text, the path in the message, and the end of the object's class name.
    """
    frontend.run("from taas_magic.notebook import launch; before = launch.last_run")
    for cell, (path, kind) in paths.items():
        message = frontend.fail(f"%%taas --gpus 2\n{cell}")["evalue"]
        assert message.startswith(f"`{path}` is a"), message
        assert f"{kind} and cannot be sent to the ranks" in message
        assert message.endswith(
            "it records the ranks that it found in the notebook, process 0 of 1, and every rank "
            "would use that; create it inside the cell and run again"
        )
    frontend.run("assert launch.last_run is before")


def test_objects_that_record_their_number_of_ranks_are_refused_before_the_start(
    frontend: Frontend,
) -> None:
    frontend.run(OF_TORCH)
    check_refused(frontend, PATHS_OF_TORCH)


@pytest.mark.nightly
def test_objects_of_libraries_that_record_it_are_refused_before_the_start(
    frontend: Frontend,
) -> None:
    frontend.run(OF_TORCH)
    frontend.run(OF_LIBRARIES)
    check_refused(frontend, PATHS_OF_LIBRARIES)
    frontend.run(
        "%%taas --gpus 1\nassert issubclass(MyTrainer, __import__('transformers').Trainer)"
    )


def test_the_refusal_of_a_compiled_function_advises_to_compile_in_the_cell(
    frontend: Frontend,
) -> None:
    frontend.run("""
import torch
class Net(torch.nn.Module):
    @torch.compile
    def forward(self, x): return x
net = Net()
""")
    message = frontend.fail("%%taas --gpus 1\nnet")["evalue"]
    assert message.startswith("`net.<Net>.forward` is a function and cannot be sent to the ranks")
    assert "apply torch.compile inside the cell" in message


def test_the_refusal_of_an_operator_advises_to_define_it_in_the_cell(frontend: Frontend) -> None:
    frontend.run("""
import torch
@torch.library.custom_op("notebook::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor: return x * 2
def twice(x): return double(double(x))
""")
    message = frontend.fail("%%taas --gpus 1\ntwice(torch.ones(1))")["evalue"]
    assert message.startswith("`double` is a torch._library.custom_ops.CustomOpDef and cannot be")
    assert "define the operator inside the cell" in message


UNLOADABLE = """
class Wrapper:
    def __init__(self): self.inner = {"key": 5}
    def __getattr__(self, name): return self.inner[name]
wrapped = Wrapper()
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_a_variable_that_a_rank_cannot_load_is_named(frontend: Frontend) -> None:
    frontend.run(UNLOADABLE)
    reply = frontend.fail("%%taas --gpus 1\nprint(wrapped.key)")
    assert "while loading the notebook's variable `wrapped`" in "".join(reply["traceback"])


STATE, STATE_IN_RANKS, UNDO = cells_of("process_state")


@pytest.fixture
def with_state(frontend: Frontend) -> Iterator[Frontend]:
    frontend.run("import sys; kernels_argv = list(sys.argv)")
    frontend.run(STATE)
    yield frontend
    frontend.run(UNDO)


def test_settings_that_cells_change_in_the_kernel_apply_in_ranks(with_state: Frontend) -> None:
    frontend = with_state
    text = frontend.text(frontend.run(f"%%taas --gpus 2 --out drawn,empty\n{STATE_IN_RANKS}"))
    assert re.search(r"] <root\|1970\|hello>$", text, re.M) and re.search(
        r"] own hello$", text, re.M
    )
    assert "of no interest" not in text and "told" in text
    assert len(set(re.findall(r"drawn (.*)", text))) == 1  # all ranks drew the same numbers
    frontend.run("assert empty.device.type == 'cpu'")
    frontend.run("torch.manual_seed(7); assert drawn == torch.rand(3, device='cpu').tolist()")


def test_expressions_and_figures_are_displayed_as_in_the_notebook(frontend: Frontend) -> None:
    frontend.run("""
import matplotlib.pyplot as plt
from IPython.core.interactiveshell import InteractiveShell
%config InlineBackend.figure_format = "svg"
figure, axes = plt.subplots(figsize=(1, 1))
InteractiveShell.ast_node_interactivity = "all"
%xmode Minimal
""")
    request = frontend.run("%%taas --gpus 1\n'one'\nfigure\n'two'")
    shown = [content["data"] for content in frontend.contents(request, "display_data")]
    one, image, two = (data for data in shown if "html" not in str(data.keys()))
    assert (one["text/plain"], two["text/plain"]) == ("'one'", "'two'")
    assert "image/svg+xml" in image
    assert "---->" not in "".join(frontend.fail("%%taas --gpus 1\n1 / 0")["traceback"])
    frontend.run("""
%xmode Context
%config InlineBackend.figure_format = "png"
InteractiveShell.ast_node_interactivity = "last_expr"
""")


def test_a_warning_of_the_compiler_is_shown_by_the_rank_only(frontend: Frontend) -> None:
    text = frontend.text(frontend.run("%%taas --gpus 1\n2 is 2"))
    warned = [line for line in text.splitlines() if "SyntaxWarning" in line]
    assert warned and all(line.startswith("[0]") for line in warned), text


def test_a_syntax_error_counts_all_its_lines_from_the_top_of_the_cell(frontend: Frontend) -> None:
    message = frontend.fail("%%taas --gpus 1\ndef f():\nreturn 1")["evalue"]
    assert "line 3" in message and message.endswith("after function definition on line 2")
    message = frontend.fail("%%taas --gpus 1\n'abc")["evalue"]
    assert message.endswith("(detected at line 2)")


def test_magics_that_list_names_show_only_those_of_the_notebook(frontend: Frontend) -> None:
    frontend.run("def documented(first, second):\n    return first")
    text = frontend.text(frontend.run("%%taas --gpus 1\nmine = 1\ndocumented?\n%who"))
    assert "documented(first, second)" in text
    assert re.search(r"] documented\s+mine\s*$", text, re.M), text


def test_settings_that_no_cell_changed_are_those_of_a_program(frontend: Frontend) -> None:
    """Settings that no cell has changed are not sent, such as the kernel's arguments and seed."""
    frontend.run("import torch; torch.seed()")
    frontend.run("""%%taas --gpus 1
import sys, torch
assert torch.initial_seed() >= 1 << 32
assert not any("ipykernel" in word or "-f" == word for word in sys.argv), sys.argv
assert torch.is_grad_enabled() and torch.ones(1).dtype == torch.float32
""")


def test_the_refusal_of_a_result_does_not_advise_to_create_it_in_the_cell(
    frontend: Frontend,
) -> None:
    reply = frontend.fail("%%taas --gpus 1 --out batches\nbatches = (i for i in range(3))")
    assert "`batches` is a generator and cannot be sent to the notebook; make a list of it" in str(
        reply["evalue"]
    )
    reply = frontend.fail(
        "%%taas --gpus 1 --out model\n"
        "import threading, types\nmodel = types.SimpleNamespace(lock=threading.Lock())"
    )
    assert "`model.lock` is a _thread.lock and cannot be sent to the notebook" in reply["evalue"]
    assert "return plain data instead" in reply["evalue"]
    assert "inside the cell" not in reply["evalue"]


def test_the_error_for_a_class_that_only_a_pickle_names_says_how_to_send_it(
    frontend: Frontend,
) -> None:
    frontend.run("import pickle\nclass Net: pass\npickle.dump(Net(), open('net.pickle', 'wb'))")
    load = "with open('net.pickle', 'rb') as file: net = pickle.load(file)"
    reply = frontend.fail(f"%%taas --gpus 1\n{load}")
    assert "has only those names of the notebook that the cell uses" in reply["evalue"]
    frontend.run(f"%%taas --gpus 1\nNet\n{load}")


def test_a_constant_that_the_notebook_set_in_a_module_is_reported(frontend: Frontend) -> None:
    frontend.run(
        "%%writefile settings_of_it.py\nLR = 0.1\n"
        "DEPTH: int = 2\nNAME = 'a'\nseen = None\ndef look():\n  global seen\n  seen = 1\n"
    )
    frontend.run("import settings_of_it as its\nits.DEPTH = 3\nits.NAME = 'b'\nits.seen = 1")
    cell = frontend.run("%%taas --gpus 1\nits.NAME = 'c'\nprint(its.DEPTH, its.NAME, its.seen)")
    assert "2 c None" in frontend.text(cell)
    shown = str(frontend.outputs[cell])
    assert "settings_of_it.DEPTH is 3 in the notebook, but 2 in the file that the ranks" in shown
    assert "NAME is" not in shown and "seen is" not in shown
    again = "%%taas --gpus 1\nits.DEPTH"
    shown = str(frontend.outputs[frontend.run(again)])
    assert "NAME is 'b' in the notebook" in shown.replace("\\", "") and "DEPTH is" not in shown
    frontend.run("its.DEPTH = 4")
    assert "DEPTH is 4 in the notebook" in str(frontend.outputs[frontend.run(again)])
    frontend.run("its.DEPTH, its.NAME = 2, 'a'")
    assert "in the file" not in str(frontend.outputs[frontend.run(again)])
