"""Capture the variables of a real kernel, and use them in real ranks."""

import re
from collections.abc import Iterator

import pytest

from tests.frontend import Frontend

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture
def frontend(frontend_of_module: Frontend) -> Frontend:
    """Return a kernel with a warm pool, shared by the tests that leave both unchanged."""
    return frontend_of_module


HELD = "\nprint('all held')"
"""Appended to a cell after its asserts. A rank that prints the line has passed all of them."""


def held(text: str) -> set[str]:
    """Return the ranks that printed the line of `HELD`. One line may stand for a range of ranks."""
    return {
        rank for ranks in re.findall(r"\[(\S+).*\] all held", text) for rank in ranks.split("-")
    }


FUNCTOOLS = """
import functools, typing

@functools.lru_cache(maxsize=7)
def increment(x): return x + STEP
STEP = 1
increment(1)

@functools.cache
def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

def make():
    @functools.cache
    def inner(n): return n and inner(n - 1) + 1
    return inner
closed = make()

def doubled(f):
    @functools.wraps(f)
    def inner(*args): return 2 * f(*args)
    return inner

@doubled
@functools.lru_cache
def six(): return 3

class Lazy:
    def __init__(self): self.factor = 5
    @functools.cached_property
    def value(self):
        "what it is worth"
        return 2 * self.factor
    @functools.lru_cache
    def times(self, n): return n * self.factor
    @functools.singledispatchmethod
    def kind(self, x): return "other"
    @kind.register
    def _(self, x: int): return "int"
lazy = Lazy()
lazy.value

@functools.singledispatch
def kind(x):
    "what it is"
    return "other"
@kind.register
def _(x: int): return "int"
@kind.register(Lazy)
def _of_lazy(x): return "lazy" + str(STEP)
kind.color = "red"
kind(1)

def dispatching():
    @functools.singledispatch
    def depth(x): return 0
    @depth.register(list)
    def _of_list(x): return 1 + depth(x[0])
    return depth
depth = dispatching()
"""
IN_RANKS = """
assert increment(1) == 2 and increment.cache_info()[:3] == (0, 1, 7), increment.cache_info()
assert increment.__wrapped__(2) == 3 and increment.__name__ == "increment"
assert increment.cache_parameters() == {"maxsize": 7, "typed": False}
assert fibonacci(80) == 23416728348467685
assert closed(3) == 3 and closed.cache_info().currsize == 4
assert six() == 6
other = Lazy()
assert (lazy.value, other.value, Lazy.value.__doc__) == (10, 10, "what it is worth")
assert vars(other)["value"] == 10
assert lazy.times(3) == 15 and lazy.kind(1) + lazy.kind("") == "intother"
assert [kind(x) for x in (1, True, "", lazy)] == ["int", "int", "other", "lazy1"]
assert (kind.__name__, kind.__doc__, kind.color) == ("kind", "what it is", "red")
@kind.register(str)
def _of_str(x): return "str"
assert kind("") == "str"
assert depth([[1]]) == 2
"""


def test_what_functools_made(frontend: Frontend) -> None:
    frontend.run(FUNCTOOLS)
    ranks = frontend.run("%%taas --gpus 2" + IN_RANKS + HELD)
    assert held(frontend.text(ranks)) == {"0", "1"}


def test_functools_results_come_home(frontend: Frontend) -> None:
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


SIBLINGS = """
import abc, argparse, collections, contextlib, dataclasses, enum, itertools, logging
import operator, pathlib, re, types, typing, weakref
import numpy, torch

multiply = functools.partial(lambda a, b: a * b, b=3)

@functools.total_ordering
class Ordered:
    def __init__(self, n): self.n = n
    def __eq__(self, other): return self.n == other.n
    def __lt__(self, other): return self.n < other.n
    def add(self, n): return self.n + n
    next = functools.partialmethod(add, 1)

@contextlib.contextmanager
def managed():
    yield 4

class Color(enum.Enum):
    RED = 1
class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()
both, red = Access.READ | Access.WRITE, Color.RED

@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int = 1
    tags: list = dataclasses.field(default_factory=list)
point = Point(3)

class Base(abc.ABC):
    @abc.abstractmethod
    def run(self): ...
class Derived(Base):
    def run(self): return super().run()
Base.register(int)

class Pair(typing.NamedTuple):
    a: int
    b: str = "b"
pair = Pair(1)
T, P = typing.TypeVar("T"), typing.ParamSpec("P")
Ts = getattr(typing, "TypeVarTuple", typing.ParamSpec)("Ts")  # new in Python 3.11
UserId = typing.NewType("UserId", int)
class Holder(typing.Generic[T]):
    def __init__(self, x: T, owner: UserId = UserId(1)): self.x = x
holder = Holder[int](3)
def typed(f: typing.Callable[P, int]) -> typing.Callable[P, int]:
    return f

class Registry(type):
    known = {}
    def __new__(meta, name, bases, scope):
        made = super().__new__(meta, name, bases, scope)
        meta.known[name] = made
        return made
class Known(metaclass=Registry): pass

counter = itertools.count(3)
next(counter)
weak = weakref.WeakSet([holder])
pattern, path = re.compile("a(b)"), pathlib.Path("a") / "b"
getter, caller = operator.itemgetter(1), operator.methodcaller("upper")
view, scope = types.MappingProxyType({"a": 1}), types.SimpleNamespace(a=1)
chain, default = collections.ChainMap({"a": 1}), collections.defaultdict(lambda: 3)
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
log = logging.getLogger("some.logger")
vectorized = numpy.vectorize(lambda x: x + 1)

net, seen = torch.nn.Linear(2, 2), []
handle = net.register_forward_hook(lambda module, args, output: seen.append(1))
optimizer = torch.optim.AdamW(net.parameters())
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5 ** epoch)
tokens = torch.channels_last, torch.strided, torch.float16, torch.per_tensor_affine
@torch.no_grad()
def without_grad(x): return x * 2
class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, grad): return grad * 2
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    @torch.jit.script
    def scripted(x: torch.Tensor): return x + 1
    scripted_net = torch.jit.script(torch.nn.Linear(2, 2).eval())
compiled_net = torch.compile(torch.nn.Linear(2, 2), backend="eager")
expected = scripted_net(torch.ones(1, 2)).tolist()
"""
SIBLINGS_IN_RANKS = """
assert multiply(2) == 6 and Ordered(1) <= Ordered(2) and Ordered(1).next() == 2
with managed() as four:
    assert four == 4
assert red is Color.RED and both == Access.READ | Access.WRITE
assert point == Point(3) and isinstance(3, Base) and isinstance(Derived(), Base)
assert pair == Pair(1) and holder.x == 3 and typed(len)([1]) == 1 and Ts.__name__ == "Ts"
assert typing.get_type_hints(Holder.__init__) == {"x": T, "owner": UserId}
assert Registry.known == {"Known": Known}
assert next(counter) == 4 and holder in weak
assert pattern.match("ab") and str(path) == "a/b" and getter("ab") + caller("a") == "bA"
assert view["a"] == scope.a == chain["a"] == 1 and default["x"] == 3
assert parser.parse_args(["--lr", "2"]).lr == 2 and log is logging.getLogger("some.logger")
assert vectorized(numpy.ones(2)).sum() == 4
net(torch.ones(1, 2))
handle.remove()
net(torch.ones(1, 2))
assert len(seen) == 1
assert optimizer.param_groups[0]["params"][0] is net.weight
optimizer.step(), schedule.step()
assert optimizer.param_groups[0]["lr"] == 5e-4
assert tokens == (torch.channels_last, torch.strided, torch.float16, torch.per_tensor_affine)
x = torch.ones(1, requires_grad=True)
assert not without_grad(x).requires_grad
Doubling.apply(x).backward()
assert x.grad.item() == 2
assert scripted(x).item() == 2
assert scripted_net(torch.ones(1, 2)).tolist() == expected and not scripted_net.training
assert compiled_net(torch.ones(1, 2)).shape == (1, 2)
"""


def test_their_siblings(frontend: Frontend) -> None:
    frontend.run("import functools\n" + SIBLINGS)
    ranks = frontend.run("%%taas --gpus 2" + SIBLINGS_IN_RANKS + HELD)
    assert held(frontend.text(ranks)) == {"0", "1"}


SHARED = """
import functools

def make_meter():
    total, count = 0, 0
    def add(x):
        nonlocal total, count
        total, count = total + x, count + 1
    def mean(): return total / count
    return add, mean
add, mean = make_meter()

def counted(f):
    calls = 0
    @functools.wraps(f)
    def inner(*args):
        nonlocal calls
        calls += 1
        return f(*args)
    inner.calls = lambda: calls
    return inner
@counted
def step(): return 1

def mutual():
    def even(n): return n == 0 or odd(n - 1)
    def odd(n): return n != 0 and even(n - 1)
    return even, odd
even, odd = mutual()

class Meter:
    made = []
    def __init__(self):
        self.values = []
        type(self).made.append(self)
    def add(self, x): self.values.append(x)
meter = Meter()
observe = meter.add

@functools.lru_cache
def known(n, box=[]):
    box.append(n)
    return box
also_known, (box,) = known, known.__wrapped__.__defaults__
first = functools.partial(dict.setdefault, state := {}, "first")
"""
SHARED_IN_RANKS = """
add(1); add(2)
assert mean() == 1.5
step(); step()
assert step.calls() == 2
assert even(10) and not odd(10) and even.__closure__[0].cell_contents is odd
observe(3)
assert meter.values == [3] and Meter.made == [meter] and type(meter) is Meter
assert also_known is known and known(1) is box and box == [1]
first(7)
assert state == {"first": 7}
"""


def test_what_is_one_object_in_the_notebook_is_one_in_the_ranks(frontend: Frontend) -> None:
    frontend.run(SHARED)
    ranks = frontend.run("%%taas --gpus 2" + SHARED_IN_RANKS + HELD)
    assert held(frontend.text(ranks)) == {"0", "1"}


NOTEBOOKS = """
import functools
STEP = 1
def notebooks(x): return x + STEP
UNSET = object()
def is_unset(x=UNSET): return x is UNSET
@functools.cache
def remembered(x): return x
class Stepper:
    def step(self): return STEP
"""
COMES_BACK = """%%taas --gpus 1 --out uncalled,called,holder,is_unset,add,mean
import math as m
SCALE = 3
def helper(x): return x * SCALE
def uncalled(x): return m.floor(helper(x)) + STEP
def called(x): return notebooks(x) + helper(x)
class Trained(Stepper):
    def run(self): return called(self.step())
holder = Trained()
holder.functions = [notebooks, called, remembered, UNSET]
assert called(1) == 5 and holder.run() == 5 and is_unset()
def make_meter():
    total = 0
    def add(x):
        nonlocal total
        total += x
    def mean(): return total
    return add, mean
add, mean = make_meter()
add(2)
"""
AT_HOME = """
import pickle
assert (uncalled(1), called(1), holder.run()) == (4, 5, 5)
STEP, SCALE = 10, 30
assert (uncalled(1), called(1), holder.run()) == (40, 41, 320)
assert uncalled.__globals__ is globals() and helper.__globals__ is globals()
assert isinstance(holder, Stepper) and type(holder) is Trained and is_unset()
assert all(a is b for a, b in zip(holder.functions, [notebooks, called, remembered, UNSET]))
assert type(pickle.loads(pickle.dumps(holder))) is Trained
add(3)
assert mean() == 5
"""


def test_functions_that_come_back_belong_to_the_notebook(frontend: Frontend) -> None:
    frontend.run(NOTEBOOKS)
    frontend.run(COMES_BACK)
    assert frontend.text(frontend.run(AT_HOME + HELD)) == "all held\n"


def test_a_name_of_the_notebook_is_replaced_only_where_out_names_it(frontend: Frontend) -> None:
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


def test_changes_of_the_notebooks_values_are_told_where_they_do_not_come_back(
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


def test_a_name_that_only_ranks_have_is_explained(frontend: Frontend) -> None:
    frontend.run("%%taas --gpus 1\nonly_there = 1")
    for cell in ("print(only_there)", "%%taas --gpus 1\nprint(only_there)"):
        request = frontend.send(cell)
        assert frontend.finish(request)["status"] == "error"
        assert frontend.text(request).endswith(
            "`only_there` was set in an earlier %%taas cell; return it with --out only_there\n"
        )
    request = frontend.send("print(nowhere)")
    assert frontend.finish(request)["status"] == "error" and not frontend.text(request)


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


def test_classes_with_slots_keep_them_and_their_instances_come_home(frontend: Frontend) -> None:
    frontend.run(SLOTS)
    ranks = frontend.run("%%taas --gpus 1 --out given,point,empty,opened" + SLOTS_IN_RANKS + HELD)
    assert held(frontend.text(ranks)) == {"0"}
    assert frontend.text(frontend.run(SLOTS_AT_HOME + HELD)) == "all held\n"


def test_classes_enter_themselves_into_a_register_of_the_notebook(frontend: Frontend) -> None:
    """To rebuild the classes, a rank needs the register, and the register contains the classes."""
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


def test_annotations_are_not_evaluated_where_an_earlier_cell_says_so(frontend: Frontend) -> None:
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


PROCESS_BOUND = """
import torch, torch.distributed as dist
from accelerate import Accelerator
from lightning import Trainer as LightningTrainer, Fabric
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, Shard
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
arguments = TrainingArguments(output_dir="out", report_to=[], use_cpu=True)
class MyTrainer(Trainer): pass
trainer = MyTrainer(model=BertModel(BertConfig(vocab_size=9, **small)), args=arguments)
accelerator = Accelerator(cpu=True)
class Experiment:
    def __init__(self): self.parts = {"accelerator": accelerator}
experiment = Experiment()
def train(): return experiment
lightning_trainer = LightningTrainer(accelerator="cpu", logger=False, enable_checkpointing=False)
fabric = Fabric(accelerator="cpu")
prepared = accelerator.prepare(torch.utils.data.DataLoader([1, 2]))
sampler = torch.utils.data.DistributedSampler([1, 2], num_replicas=1, rank=0)
loader = torch.utils.data.DataLoader([1, 2], sampler=sampler)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
mesh = init_device_mesh("cpu", (1,))
wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
sharded = fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
spread = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
dist.destroy_process_group()
"""
PATHS = {
    "arguments": ("arguments", "TrainingArguments"),
    "trainer": ("trainer", "MyTrainer"),
    "train()": ("experiment.parts['accelerator']", "Accelerator"),
    "lightning_trainer": ("lightning_trainer", "Trainer"),
    "fabric": ("fabric", "Fabric"),
    "prepared": ("prepared", "DataLoaderShard"),
    "loader": ("loader.sampler", "DistributedSampler"),
    "group": ("group", "ProcessGroup"),
    "mesh": ("mesh", "DeviceMesh"),
    "wrapped": ("wrapped", "DistributedDataParallel"),
    "sharded": ("sharded", "FSDPLinear"),
    "spread": ("spread", "DTensor"),
}


def test_what_was_made_for_one_process_is_refused_before_the_start(frontend: Frontend) -> None:
    frontend.run(PROCESS_BOUND)
    frontend.run("from taas_magic.notebook import launch; before = launch.last_run")
    for cell, (path, kind) in PATHS.items():
        message = frontend.fail(f"%%taas --gpus 2\n{cell}")["evalue"]
        assert message.startswith(f"`{path}` is a"), message
        assert f"{kind} and cannot travel to the ranks" in message
        assert message.endswith(
            "it records the ranks that it found in the notebook, process 0 of 1, and every rank "
            "would use that; create it inside the cell and run again"
        )
    frontend.run("assert launch.last_run is before")
    frontend.run(
        "%%taas --gpus 1\nassert issubclass(MyTrainer, __import__('transformers').Trainer)"
    )


def test_a_compiled_function_is_refused_as_what_it_is(frontend: Frontend) -> None:
    frontend.run("""
import torch
class Net(torch.nn.Module):
    @torch.compile
    def forward(self, x): return x
net = Net()
""")
    message = frontend.fail("%%taas --gpus 1\nnet")["evalue"]
    assert message.startswith("`net.<Net>.forward` is a function and cannot travel to the ranks")
    assert "apply torch.compile inside the cell" in message


STATE = """
import logging, multiprocessing, sys, threading, time, warnings
import numpy, torch
import matplotlib

warnings.filterwarnings("ignore", message="of no interest", category=UserWarning)
class Ours(UserWarning): pass
warnings.simplefilter("ignore", Ours)
form = "<%(name)s|%(asctime)s|%(message)s>"
logging.basicConfig(level=logging.INFO, format=form, datefmt="%Y", stream=sys.stdout)
logging.getLogger("matplotlib").setLevel(logging.ERROR)
def of_1970(seconds): return time.gmtime(0)
logging.root.handlers[0].formatter.converter = lambda seconds: of_1970(seconds)
untold = logging.StreamHandler(sys.stdout)
untold.setFormatter(logging.Formatter("never %(message)s"))
untold.formatter.converter = threading.Lock().__enter__
logging.root.addHandler(untold)
own = logging.getLogger("experiment")
own.setLevel(logging.DEBUG)
own.propagate = False
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(logging.Formatter("own %(message)s"))
own.addHandler(handler)
sys.argv = ["train.py", "--lr", "0.1"]
sys.setrecursionlimit(4321)
multiprocessing.set_start_method("spawn", force=True)
numpy.set_printoptions(precision=3, suppress=True)
numpy.seterr(divide="raise")
matplotlib.rcParams["lines.linewidth"] = 7
matplotlib.rcParams["axes.prop_cycle"] = matplotlib.cycler(color=["red", "blue"])
torch.set_default_dtype(torch.float64)
torch.set_float32_matmul_precision("medium")
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cudnn.benchmark = True
torch.set_grad_enabled(False)
torch.multiprocessing.set_sharing_strategy("file_system")
torch.set_default_device("meta")
torch.manual_seed(7)
"""
STATE_IN_RANKS = """
import logging, multiprocessing, sys, warnings
import numpy, torch

logging.info("hello")
logging.getLogger("experiment").debug("hello")
warnings.warn("of no interest")
warnings.warn("told")
assert logging.root.level == logging.INFO and len(logging.root.handlers) == 1
assert not logging.getLogger("matplotlib").isEnabledFor(logging.WARNING)
assert sys.argv == ["train.py", "--lr", "0.1"] and sys.getrecursionlimit() == 4321
assert multiprocessing.get_start_method() == "spawn"
assert str(numpy.array([1.23456e-9, 2.0])) == "[0. 2.]" and numpy.geterr()["divide"] == "raise"
rc = sys.modules["matplotlib"].rcParams
assert rc["lines.linewidth"] == 7 and rc["axes.prop_cycle"].by_key() == {"color": ["red", "blue"]}
assert "inline" in rc["backend"], rc["backend"]
assert torch.ones(1).dtype == torch.float64 and torch.ones(1).device.type == "meta"
assert torch.get_float32_matmul_precision() == "medium"
assert torch.get_deterministic_debug_mode() == 1 and torch.backends.cudnn.benchmark
assert not torch.is_grad_enabled()
assert torch.multiprocessing.get_sharing_strategy() == "file_system"
assert torch.initial_seed() == 7
drawn = torch.rand(3, device="cpu").tolist()
print("drawn", drawn)
empty = torch.ones(0, device="cpu")
"""
UNDO = """
torch.set_default_device("cpu"); torch.set_default_dtype(torch.float32); torch.seed()
torch.set_grad_enabled(True); torch.use_deterministic_algorithms(False)
torch.multiprocessing.set_sharing_strategy("file_descriptor")
multiprocessing.set_start_method(None, force=True)
numpy.seterr(divide="warn")
sys.argv = kernels_argv
"""


@pytest.fixture
def with_state(frontend: Frontend) -> Iterator[Frontend]:
    frontend.run("import sys; kernels_argv = list(sys.argv)")
    frontend.run(STATE)
    yield frontend
    frontend.run(UNDO)


def test_what_cells_set_in_their_process(with_state: Frontend) -> None:
    frontend = with_state
    text = frontend.text(frontend.run(f"%%taas --gpus 2 --out drawn,empty\n{STATE_IN_RANKS}"))
    assert re.search(r"] <root\|1970\|hello>$", text, re.M) and re.search(
        r"] own hello$", text, re.M
    )
    assert "of no interest" not in text and "told" in text
    assert len(set(re.findall(r"drawn (.*)", text))) == 1  # all ranks drew the same numbers
    frontend.run("assert empty.device.type == 'cpu'")
    frontend.run("torch.manual_seed(7); assert drawn == torch.rand(3, device='cpu').tolist()")


def test_what_nobody_set_stays_as_it_is_in_a_program(frontend: Frontend) -> None:
    """The kernel's own arguments, loggers and seed do not travel to the ranks."""
    frontend.run("import torch; torch.seed()")
    frontend.run("""%%taas --gpus 1
import sys, torch
assert torch.initial_seed() >= 1 << 32
assert not any("ipykernel" in word or "-f" == word for word in sys.argv), sys.argv
assert torch.is_grad_enabled() and torch.ones(1).dtype == torch.float32
""")


def test_refused_results_are_not_told_to_be_made_in_the_cell(frontend: Frontend) -> None:
    reply = frontend.fail("%%taas --gpus 1 --out batches\nbatches = (i for i in range(3))")
    assert "`batches` is a generator and cannot travel to the notebook; make a list of it" in str(
        reply["evalue"]
    )
    reply = frontend.fail(
        "%%taas --gpus 1 --out model\n"
        "import threading, types\nmodel = types.SimpleNamespace(lock=threading.Lock())"
    )
    assert "`model.lock` is a _thread.lock and cannot travel to the notebook" in reply["evalue"]
    assert "return plain data instead" in reply["evalue"]
    assert "inside the cell" not in reply["evalue"]


def test_a_class_that_only_a_file_names_is_told_from_a_missing_one(frontend: Frontend) -> None:
    frontend.run("import pickle\nclass Net: pass\npickle.dump(Net(), open('net.pickle', 'wb'))")
    load = "with open('net.pickle', 'rb') as file: net = pickle.load(file)"
    reply = frontend.fail(f"%%taas --gpus 1\n{load}")
    assert "of the notebook it has the names that the cell uses" in reply["evalue"]
    frontend.run(f"%%taas --gpus 1\nNet\n{load}")


def test_a_constant_that_the_notebook_has_set_in_a_module_is_told(frontend: Frontend) -> None:
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
