"""Objects that several variables share, and asserts that their copies share them too."""

# %%
import argparse
import functools
import warnings
from argparse import SUPPRESS

import torch


def make_meter():
    total, count = 0, 0

    def add(x):
        nonlocal total, count
        total, count = total + x, count + 1

    def mean():
        return total / count

    return add, mean


add, mean = make_meter()


def counted(f):
    calls = 0

    @functools.wraps(f)
    def inner(*args):
        nonlocal calls
        calls += 1
        return f(*args)

    inner.calls = lambda: calls  # type: ignore[attr-defined]
    return inner


@counted
def step():
    return 1


def mutual():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    return even, odd


even, odd = mutual()


class Meter:
    made = []  # noqa: RUF012

    def __init__(self):
        self.values = []
        type(self).made.append(self)

    def add(self, x):
        self.values.append(x)


meter = Meter()
observe = meter.add


@functools.lru_cache
def known(n, box=[]):  # noqa: B006
    box.append(n)
    return box


also_known, (box,) = known, known.__wrapped__.__defaults__  # type: ignore[misc]
first = functools.partial(dict.setdefault, state := {}, "first")

options = argparse.ArgumentParser(argument_default=SUPPRESS)
options.add_argument_group().add_argument("--lr", type=float)


class Settings(dict):
    def __init__(self, *args, **values):
        super().__init__(*args, **values)
        self.__dict__ = self


settings = Settings(lr=0.1, parent=None)
settings["parent"] = settings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    jit_net = torch.jit.script(torch.nn.Linear(2, 1))
jit_optimizer = torch.optim.SGD(jit_net.parameters(), lr=1.0)

# %%
add(1)
add(2)
assert mean() == 1.5
step()
step()
assert step.calls() == 2
assert even(10) and not odd(10) and even.__closure__[0].cell_contents is odd
observe(3)
assert meter.values == [3] and Meter.made == [meter] and type(meter) is Meter
assert also_known is known and known(1) is box and box == [1]
first(7)
assert state == {"first": 7}
options.add_argument("--seed", type=int, default=SUPPRESS)
assert vars(options.parse_args(["--lr", "3"])) == {"lr": 3.0}
settings["lr"] = 0.2
assert settings["parent"] is settings and settings.lr == 0.2
jit_weight = jit_net.weight.tolist()
jit_net(torch.ones(1, 2)).sum().backward()
jit_optimizer.step()
assert jit_net.weight.tolist() != jit_weight
