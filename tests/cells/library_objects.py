"""Objects of the standard library and of torch, and asserts about their copies in ranks."""

# %%
import abc
import argparse
import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import logging
import operator
import pathlib
import re
import types
import typing
import warnings
import weakref

import numpy
import torch

multiply = functools.partial(lambda a, b: a * b, b=3)


@functools.total_ordering
class Ordered:
    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        return self.n == other.n

    def __lt__(self, other):
        return self.n < other.n

    def add(self, n):
        return self.n + n

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
    def run(self):
        return super().run()  # type: ignore[safe-super]


Base.register(int)


class Pair(typing.NamedTuple):
    a: int
    b: str = "b"


pair = Pair(1)
T = typing.TypeVar("T")
P = typing.ParamSpec("P")
Ts = getattr(typing, "TypeVarTuple", typing.ParamSpec)("Ts")  # new in Python 3.11
UserId = typing.NewType("UserId", int)


class Holder(typing.Generic[T]):
    def __init__(self, x: T, owner: UserId = UserId(1)):
        self.x = x


holder = Holder[int](3)


def typed(f: typing.Callable[P, int]) -> typing.Callable[P, int]:
    return f


class Registry(type):
    known = {}  # noqa: RUF012

    def __new__(meta, name, bases, scope):
        made = super().__new__(meta, name, bases, scope)
        meta.known[name] = made
        return made


class Known(metaclass=Registry):
    pass


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
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
tokens = torch.channels_last, torch.strided, torch.float16, torch.per_tensor_affine


@torch.no_grad()
def without_grad(x):
    return x * 2


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    @torch.jit.script
    def scripted(x: torch.Tensor):
        return x + 1

    scripted_net = torch.jit.script(torch.nn.Linear(2, 2).eval())
compiled_net = torch.compile(torch.nn.Linear(2, 2), backend="eager")
expected = scripted_net(torch.ones(1, 2)).tolist()

# %%
assert multiply(2) == 6 and Ordered(1).next() == 2
assert Ordered(1) <= Ordered(2)  # type: ignore[operator]
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
optimizer.step()
schedule.step()
assert optimizer.param_groups[0]["lr"] == 5e-4
assert tokens == (torch.channels_last, torch.strided, torch.float16, torch.per_tensor_affine)
x = torch.ones(1, requires_grad=True)
assert not without_grad(x).requires_grad
Doubling.apply(x).backward()
assert x.grad.item() == 2
assert scripted(x).item() == 2
assert scripted_net(torch.ones(1, 2)).tolist() == expected and not scripted_net.training
assert compiled_net(torch.ones(1, 2)).shape == (1, 2)
