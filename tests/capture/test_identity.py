"""Tests that references to one object still refer to one object after pickling and loading."""

import functools
import io
import multiprocessing
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taas_magic.capture import pickling
from taas_magic.capture.pickling import ValuePickler
from taas_magic.capture.reducers import LruCache


class Plain:
    """Class with attributes and a method."""

    def method(self) -> object:
        return self


def pickled(values: Iterable[Any]) -> bytes:
    """Pickle values by one pickler, each by its own call, and return the payload."""
    pickler = ValuePickler(to="fetchers")
    for value in values:
        pickler.add(value)
    return pickler.pickled().data


def loaded(data: bytes, count: int) -> list[Any]:
    stream = pickling.load_each(io.BytesIO(data), (), {})
    return [next(stream) for _ in range(count)]


def graph_of(data: bytes, count: int) -> list[Any]:
    """Load `count` values from a payload, and return the graph of their objects.

    The function runs in a process that lacks the test's classes, as a rank does.
    """
    return graph(loaded(data, count))


@pytest.fixture(scope="module")
def other() -> Iterator[Executor]:
    """Yield an executor with one spawned process. Like a rank, it lacks the test's classes."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


def parts(value: Any) -> list[Any]:
    """Return the parts of a value that the graph contains: elements, attributes or contents.

    If the type is none of those that the tests use, return an empty list.
    """
    match value:
        case list() | tuple() | deque():
            return list(value)
        case dict():
            return [*value.keys(), *value.values()]
        case functools.partial():
            return [value.func, value.args, value.keywords]
        case types.MethodType():
            return [value.__func__.__name__, value.__self__]
        case types.CellType():
            try:
                return [value.cell_contents]
            except ValueError:
                return ["empty"]
        case types.FunctionType():
            kept = (value.__closure__, value.__defaults__, value.__kwdefaults__)
            return [value.__name__, *kept, vars(value)]
        case type():
            own = {name: v for name, v in vars(value).items() if not name.startswith("__")}
            return [value.__name__, own]
        case LruCache():
            return [value.__wrapped__]
        case Plain():
            return [vars(value)]
        case _ if type(value).__name__ == "Made":
            return [type(value), vars(value)]
    return []


def graph(root: Any) -> list[Any]:
    """Describe the objects that can be reached from `root`, in breadth-first order.

    Each object is described by its type's name and its parts. A part is a simple value, or the
    number of an object. So two graphs are equal only if the same objects are identical in both.
    """
    numbers: dict[int, int] = {}
    described: list[Any] = []
    kept = [root]  # an id is only unique while its object is alive
    waiting = deque(kept)

    def number(value: Any) -> Any:
        if value is None or isinstance(value, int | str):
            return value
        if value == () and isinstance(value, tuple):
            return value
        if id(value) not in numbers:
            numbers[id(value)] = len(numbers)
            kept.append(value)
            waiting.append(value)
        return f"#{numbers[id(value)]}"

    number(root)
    waiting.popleft()
    while waiting:
        value = waiting.popleft()
        described.append((type(value).__name__, [number(part) for part in parts(value)]))
    return described


def test_the_graph_tells_one_object_from_two_equal_ones() -> None:
    one: list[Any] = []
    assert graph([one, one]) != graph([one, []])
    first, second = _accessors(0)[0], _accessors(0)[1]
    assert graph([first, second]) != graph(list(_accessors(0)[:2]))


def _accessors(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None], types.CellType]:
    def get() -> Any:
        return value

    def put(new: Any) -> None:
        nonlocal value
        value = new

    assert get.__closure__ is not None
    return get, put, get.__closure__[0]


def _defaulting(value: Any) -> Callable[..., Any]:
    def default(x: Any = value, *, y: Any = value) -> Any:
        return x, y

    return default


def _counted(value: Any) -> Callable[..., Any]:
    count = 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return value

    counted.of = value  # type: ignore[attr-defined]
    return counted


def _class(value: Any) -> type:
    class Made:
        held = value

        def __init__(self) -> None:
            super().__init__()

        def again(self) -> Any:
            return __class__, value  # type: ignore[name-defined]

    return Made


def _with(value: Any) -> Plain:
    made = Plain()
    made.part = value  # type: ignore[attr-defined]
    return made


MAKERS: dict[str, Callable[[Any], list[Any]]] = {
    "list": lambda it: [[it]],
    "dict": lambda it: [{"key": it}],
    "tuple": lambda it: [(it, it)],
    "closures over one variable": lambda it: list(_accessors(it)),
    "defaults": lambda it: [_defaulting(it)],
    "counting": lambda it: [_counted(it)],
    "partial": lambda it: [functools.partial(_counted(it), it)],
    "cached": lambda it: [functools.lru_cache(_counted(it))],
    "instance": lambda it: [_with(it)],
    "method": lambda it: [_with(it).method],
    "class": lambda it: [cls := _class(it), cls()],
    "deque": lambda it: [deque([it])],
}


JOINED = "joined"


def _join(into: Any, value: Any) -> None:
    """Add a reference from the object `into` to `value`, which may create a reference cycle."""
    match into:
        case list() | deque():
            into.append(value)
        case dict():
            into["joined"] = value
        case types.CellType():
            into.cell_contents = value
        case types.FunctionType() | Plain() | type():
            setattr(into, JOINED, value)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(MAKERS)), st.integers(0, 30)),
        st.tuples(st.integers(0, 30), st.integers(0, 30)),
    ),
    min_size=1,
    max_size=12,
)


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_random_structures_keep_the_identities_of_their_objects(
    other: Executor, steps: list[tuple[str | int, int]]
) -> None:
    made: list[Any] = [[]]
    for what, at in steps:
        chosen = made[at % len(made)]
        if isinstance(what, str):
            made.extend(MAKERS[what](chosen))
        else:
            _join(made[what % len(made)], chosen)
    assert graph(made) == other.submit(graph_of, pickled(made), len(made)).result()


def test_a_closure_variable_without_a_value_is_shared() -> None:
    get, put, cell = _accessors(1)
    del cell.cell_contents
    get, put = loaded(pickled([get, put]), 2)
    with pytest.raises(NameError):
        get()
    put(3)
    assert get() == 3


def test_a_function_whose_addition_was_undone_can_be_added_again() -> None:
    pickler, (get, put, _) = ValuePickler(), _accessors(1)
    with pickler.rollback() as undo:
        pickler.add(get)
        undo()
    pickler.add(put)
    pickler.add(get)
    put, get = loaded(pickler.pickled().data, 2)
    put(4)
    assert get() == 4
