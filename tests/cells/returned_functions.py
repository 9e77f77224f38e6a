"""Functions that ranks return, and asserts that they use the notebook's globals."""

# %%
import functools

STEP = 1


def notebooks(x):
    return x + STEP


UNSET = object()


def is_unset(x=UNSET):
    return x is UNSET


@functools.cache
def remembered(x):
    return x


class Settings(dict):
    def __init__(self, *args, **values):
        super().__init__(*args, **values)
        self.__dict__ = self


class Stepper:
    def step(self):
        return STEP


# %%
import math as m

SCALE = 3


def helper(x):
    return x * SCALE


def uncalled(x):
    return m.floor(helper(x)) + STEP


def called(x):
    return notebooks(x) + helper(x)


class Trained(Stepper):
    def run(self):
        return called(self.step())


holder = Trained()
functions = [notebooks, called, remembered, UNSET]
holder.functions = functions  # type: ignore[attr-defined]
holder.settings = Settings(lr=0.1)  # type: ignore[attr-defined]
assert called(1) == 5 and holder.run() == 5 and is_unset()


def make_meter():
    total = 0

    def add(x):
        nonlocal total
        total += x

    def mean():
        return total

    return add, mean


add, mean = make_meter()
add(2)

# %%
import pickle

assert (uncalled(1), called(1), holder.run()) == (4, 5, 5)
STEP, SCALE = 10, 30
assert (uncalled(1), called(1), holder.run()) == (40, 41, 320)
assert uncalled.__globals__ is globals() and helper.__globals__ is globals()
assert isinstance(holder, Stepper) and type(holder) is Trained and is_unset()
found = holder.functions  # type: ignore[attr-defined]
expected = [notebooks, called, remembered, UNSET]
assert all(a is b for a, b in zip(found, expected, strict=True))
assert type(pickle.loads(pickle.dumps(holder))) is Trained
add(3)
assert mean() == 5
settings = holder.settings  # type: ignore[attr-defined]
settings.lr = 0.2
assert type(settings) is Settings and settings["lr"] == 0.2
