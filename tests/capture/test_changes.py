"""Tests of which changes by ranks to the notebook's values are reported after a cell."""

import argparse
import collections
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.optim.lr_scheduler as lr
from sklearn.cluster import KMeans
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeRegressor

from taas_magic.capture.changes import ChangeDetector


class Meter:
    """Class as a notebook might define it."""

    __module__ = "__main__"
    __slots__ = ("__dict__", "slot")
    total = 0

    def __init__(self) -> None:
        self.values: list[float] = []
        self.slot = 1

    @functools.cached_property
    def lazy(self) -> int:
        return 3

    def add(self, value: float) -> None:
        self.values.append(value)


class Linked:
    """Object that refers to itself, as a trainer does whose logger refers to the trainer."""

    __module__ = "__main__"

    def __init__(self) -> None:
        self.this, self.step = self, 0


class Lazy:
    """Dataset that opens its file when it is first read, and knows the length of its name."""

    __module__ = "__main__"

    def __init__(self) -> None:
        self.file: Any = None
        self.length: int | None = None

    def read(self) -> None:
        self.file = self.file or io.StringIO()

    def measure(self) -> None:
        self.length = 9


def counting(function: Callable[[], None]) -> Callable[[], None]:
    """Return a function that counts its calls in an attribute, as a decorator may do."""

    def counted() -> None:
        counted.calls += 1  # type: ignore[attr-defined]
        function()

    counted.__module__ = "__main__"
    counted.calls = 0  # type: ignore[attr-defined]
    return counted


def counter() -> Callable[[], None]:
    count = 0

    def add() -> None:
        nonlocal count
        count += 1

    add.__module__ = "__main__"
    return add


def train(model: torch.nn.Module) -> None:
    loss = model(torch.ones(1, 100)).sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss.backward()
    optimizer.step()


def schedule(
    make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a scheduler whose optimizer has made a step, so that `step` does not warn."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    optimizer.step()
    return scheduler


def fit(estimator: Any) -> None:
    estimator.fit(np.arange(8.0).reshape(4, 2), np.arange(4.0))


def said(value: Any, change: Callable[[Any], object], **names: Any) -> str:
    """Apply `change` to the variable `value`, and return the notes that report the change.

    Args:
        value: Value of the variable before the change.
        change: Function that changes the value in place.
        names: Arguments of `ChangeDetector`: variables that come back or are set by the cell.
    """
    namespace = {"value": value}
    changes = ChangeDetector(namespace, **{"out": {}, "stores": (), "updates": (), **names})
    change(namespace["value"])
    return "".join(changes.notes(namespace))


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "list": (list, lambda it: it.append(1)),
    "nested": (lambda: {"a": [{}]}, lambda it: it["a"][0].update(b=1)),
    "defaultdict": (lambda: collections.defaultdict(list), lambda it: it["a"].append(1)),
    "namespace": (argparse.Namespace, lambda it: setattr(it, "x", 1)),
    "instance": (Meter, lambda it: it.add(1)),
    "cycle": (Linked, lambda it: setattr(it, "step", 1)),
    "counting decorator": (lambda: counting(lambda: None), lambda it: it()),
    "filled": (Lazy, lambda it: it.measure()),
    "slot": (Meter, lambda it: setattr(it, "slot", 2)),
    "method": (lambda: Meter().add, lambda it: it(1)),
    "closure": (counter, lambda it: it()),
    "tensor": (lambda: torch.zeros(2), lambda it: it.add_(1)),
    "large tensor": (lambda: torch.zeros(10**6), lambda it: it.add_(1)),
    "array": (lambda: np.zeros((3, 3)).T, lambda it: it.__setitem__((1, 1), 1)),
    "model": (lambda: torch.nn.Linear(100, 100), train),
    "frozen model": (lambda: torch.nn.Linear(2, 2), lambda it: it.requires_grad_(False)),
    "lazy model": (lambda: torch.nn.Sequential(torch.nn.LazyLinear(2)), train),
    "initialized": (lambda: torch.nn.LazyLinear(2), lambda it: it(torch.ones(1, 100))),
    "scheduler": (lambda: schedule(lambda it: lr.StepLR(it, 1)), lambda it: it.step()),
    "plateau": (lambda: schedule(lr.ReduceLROnPlateau), lambda it: it.step(1.0)),
    "scaler": (lambda: torch.amp.GradScaler("cpu"), lambda it: it.set_growth_factor(3.0)),
    "estimator": (LinearRegression, fit),
    "estimator fitted again": (lambda: LinearRegression().fit([[0]], [0]), fit),
    "tree": (DecisionTreeRegressor, fit),
    "tree fitted again": (lambda: DecisionTreeRegressor().fit([[0, 1]], [0]), fit),
    "pipeline": (lambda: make_pipeline(StandardScaler(), KMeans(2)), fit),
    "statistics": (lambda: torch.nn.BatchNorm1d(2), lambda it: it(torch.rand(4, 2))),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_value_that_has_changed_is_reported(what: str) -> None:
    make, change = CHANGES[what]
    assert (
        said(make(), change)
        == "value was changed in the ranks, not in the notebook; --out value returns it"
    )
    assert said(make(), change, out={"value": "value"}) == ""


def test_a_value_that_was_only_used_is_not_reported() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 2), torch.nn.Dropout())
    unchanged: dict[str, tuple[Any, Callable[[Any], object]]] = {
        "lazy": (torch.nn.LazyLinear(2), lambda it: it.weight),
        "evaluated": (model, lambda it: it.eval()(torch.ones(1, 100))),
        "hooked": (model, lambda it: it.register_forward_hook(lambda *args: None)),
        "cached": (Meter(), lambda it: it.lazy),
        "memoized": (functools.lru_cache(counter()), lambda it: None),
        "iterated": ([1, 2], lambda it: list(it)),
        "numpy's": (np.random.default_rng(1), lambda it: it.random()),
        "generator": (torch.Generator(), lambda it: torch.rand(1, generator=it)),
        "estimator": (LinearRegression().fit([[0]], [0]), lambda it: it.predict([[1]])),
        "vectorizer": (
            pickle.loads(pickle.dumps(CountVectorizer(stop_words="english").fit(["red car"]))),
            lambda it: it.transform(["blue car"]),
        ),
        "file": (Lazy(), lambda it: it.read()),
        "input": (torch.zeros(2), lambda it: it.requires_grad_()),
        "optimizer's step": (
            schedule(lambda it: lr.LambdaLR(it, lambda epoch: 1 / (1 + epoch))),
            lambda it: it.optimizer.step(),
        ),
        "lock": ({"a": object()}, lambda it: it["a"].__hash__()),
    }
    assert {name: said(*case) for name, case in unchanged.items()} == dict.fromkeys(unchanged, "")


def test_a_variable_is_reported_if_its_new_value_depends_on_the_old_one() -> None:
    cases: list[tuple[list[str], list[str]]] = [(["value"], ["value was changed"]), ([], [])]
    for updates, expected in cases:
        namespace: dict[str, Any] = {"value": 1}
        changes = ChangeDetector(namespace, {}, {"value"}, updates)
        namespace["value"] += 1
        assert [note[:17] for note in changes.notes(namespace)] == expected


@pytest.mark.parametrize("value", [torch.zeros(2), np.zeros(2)])
def test_a_tensor_computed_from_itself_is_reported_if_its_content_changed(value: Any) -> None:
    said = []
    for update in (0, 1):
        namespace = {"value": value}
        changes = ChangeDetector(namespace, {}, {"value"}, {"value"})
        namespace["value"] = value + update
        said.append(len(changes.notes(namespace)))
    assert said == [0, 1]


def test_changes_of_a_model_that_the_cell_wraps_are_reported() -> None:
    namespace: dict[str, Any] = {"model": torch.nn.Linear(100, 2)}
    for steps in (0, 1):
        changes = ChangeDetector(namespace, {}, {"model"}, {"model"})
        wrapped = namespace["model"] = torch.nn.Sequential(namespace["model"])
        for _ in range(steps):
            train(wrapped)
        assert len(changes.notes(namespace)) == steps


def test_the_optimizer_of_a_model_that_comes_back_is_reported() -> None:
    """The model comes back from the ranks, but the optimizer still has the old parameters."""
    model = torch.nn.Linear(100, 2)
    namespace = {"model": model, "kept": [model], "optimizer": torch.optim.SGD(model.parameters())}
    changes = ChangeDetector(namespace, {"model": "model@0"}, (), ())
    train(model)
    [note] = changes.notes(namespace)
    assert note.startswith("optimizer was changed")
    # only a model and an optimizer that come back together belong together
    assert note.endswith("; --out model@0,optimizer returns it")


@pytest.mark.parametrize("out", [(), ["value"]])
def test_changes_of_class_attributes_are_reported_as_staying_in_the_ranks(out: list[str]) -> None:
    Meter.total = 0
    assert "class attributes of value were changed in the ranks and stay there" in said(
        Meter, lambda it: setattr(it, "total", 1), out=out
    )
    Meter.total = 0


def test_a_note_says_that_a_change_to_a_registered_loader_does_not_change_its_batches() -> None:
    note = said(Meter(), lambda it: it.add(1), parts={"value": "train"})
    assert note.startswith(
        "value was changed in the ranks, but not in the fetchers of loader train"
    )
    assert "--out" not in note


def test_large_values_and_values_that_raise_are_not_reported() -> None:
    class Refusing(dict[str, int]):
        __module__ = "__main__"

        def __getattribute__(self, name: str) -> Any:
            raise ValueError(name)

    assert said(list(range(10**6)), lambda it: it.append(1)) == ""
    assert said(Refusing(), lambda it: None) == ""
