"""Two cells: the first makes objects with functools, the second checks their copies in ranks."""

# %%
import functools


@functools.lru_cache(maxsize=7)
def increment(x):
    return x + STEP


STEP = 1
increment(1)


@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


def make():
    @functools.cache
    def inner(n):
        return n and inner(n - 1) + 1

    return inner


closed = make()


def doubled(f):
    @functools.wraps(f)
    def inner(*args):
        return 2 * f(*args)

    return inner


@doubled
@functools.lru_cache
def six():
    return 3


class Lazy:
    def __init__(self):
        self.factor = 5

    @functools.cached_property
    def value(self):
        """What it is worth."""
        return 2 * self.factor

    @functools.lru_cache  # noqa: B019
    def times(self, n):
        return n * self.factor

    @functools.singledispatchmethod
    def kind(self, x):
        return "other"

    @kind.register
    def _(self, x: int):
        return "int"


lazy = Lazy()
lazy.value


@functools.singledispatch
def kind(x):
    """Return the kind of a value."""
    return "other"


@kind.register
def _(x: int):
    return "int"


@kind.register(Lazy)
def _of_lazy(x):
    return "lazy" + str(STEP)


kind.color = "red"  # type: ignore[attr-defined]
kind(1)


def dispatching():
    @functools.singledispatch
    def depth(x):
        return 0

    @depth.register(list)
    def _of_list(x):
        return 1 + depth(x[0])

    return depth


depth = dispatching()

# %%
assert increment(1) == 2 and increment.cache_info()[:3] == (0, 1, 7), increment.cache_info()
assert increment.__wrapped__(2) == 3 and increment.__name__ == "increment"
assert increment.cache_parameters() == {"maxsize": 7, "typed": False}
assert fibonacci(80) == 23416728348467685
assert closed(3) == 3 and closed.cache_info().currsize == 4
assert six() == 6
other = Lazy()
assert (lazy.value, other.value, Lazy.value.__doc__) == (10, 10, "What it is worth.")
assert vars(other)["value"] == 10
assert lazy.times(3) == 15 and lazy.kind(1) + lazy.kind("") == "intother"
assert [kind(x) for x in (1, True, "", lazy)] == ["int", "int", "other", "lazy1"]
names = kind.__name__, kind.__doc__, kind.color  # type: ignore[attr-defined]
assert names == ("kind", "Return the kind of a value.", "red")


@kind.register(str)
def _of_str(x):
    return "str"


assert kind("") == "str"
assert depth([[1]]) == 2
