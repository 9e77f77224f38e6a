"""Tests of the path by which an error message names the object that cannot be pickled."""

import collections
import concurrent.futures
import functools
import pickle
import queue
import subprocess
import threading
from typing import Any, NamedTuple

import cloudpickle
import pytest

from taas_magic.capture import culprit as culprit_module
from taas_magic.capture.culprit import find_culprit, make_capture_error
from taas_magic.capture.pickling import ValuePickler, dump
from taas_magic.errors import CaptureError

LOCK = threading.Lock()
probe = ValuePickler().probe


@pytest.fixture(autouse=True)
def enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the search for the path enough time, also on a busy machine."""
    monkeypatch.setattr(culprit_module, "_BUDGET_S", 1000.0)


class Box:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def method(self) -> None: ...


class Slots:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class Pair(NamedTuple):
    left: Any
    right: Any


class Stateful:
    """Class with a lock that `__getstate__` leaves out, so that its objects can be pickled."""

    def __init__(self, kept: Any) -> None:
        self.dropped, self.kept = LOCK, kept

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": self.kept}


def closing_over(held: Any) -> Any:
    def inner() -> Any:
        return held

    return inner


def with_default(a: Any, held: Any = LOCK) -> Any:
    return held


def local_class() -> type:
    class Local:
        held = LOCK

    return Local


def generic(held: Any) -> Any:
    @functools.singledispatch
    def inner(x: Any) -> Any:
        return held

    inner(1)
    return locally(inner)


def using_a_global() -> Any:
    scope: dict[str, Any] = {"held": LOCK, "__name__": "__main__"}
    exec("def f(): return held", scope)
    return scope["f"]


def locally(function: Any) -> Any:
    """Mark `function` as defined in the notebook, so that it is pickled by value."""
    function.__module__ = "__main__"
    return function


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    ("value", "path"),
    [
        (LOCK, "v"),
        ([1, {"a": (2, LOCK)}], "v[1]['a'][1]"),
        ({3: LOCK}, "v[3]"),
        ({LOCK: 3}, "v.<key>"),
        ({LOCK}, "v.<element>"),
        (Box(logger=Box(_lock=LOCK)), "v.logger._lock"),
        (Slots(LOCK), "v.held"),
        (Pair(1, [LOCK]), "v.right[0]"),
        (Stateful(Box(deep=LOCK)), "v.kept.deep"),
        (collections.deque([1, LOCK]), "v[1]"),
        (collections.OrderedDict(a=LOCK), "v['a']"),
        (collections.defaultdict(list, a=[LOCK]), "v['a'][0]"),
        (functools.partial(print, LOCK, end=LOCK), "v.args[0]"),
        (Box(x=LOCK).method, "v.__self__.x"),
        (closing_over(LOCK), "v.<closure held>"),
        (closing_over(Box(db=LOCK)), "v.<closure held>.db"),
        (locally(with_default), "v.<default held>"),
        (using_a_global(), "v.<global held>"),
        (local_class(), "v.held"),
        (local_class()(), "v.<Local>.held"),
        (functools.cache(closing_over(LOCK)), "v.<closure held>"),
        (generic(LOCK), "v.<closure held>"),
    ],
)
def test_path(value: Any, path: str) -> None:
    assert find_culprit("v", value, probe)[0] == path


def test_paths_into_torch_modules_are_written_as_in_code() -> None:
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(1, 1))
    vars(net[0])["lock"] = LOCK
    assert find_culprit("net", net, probe)[0] == "net.0.lock"


def test_cycles_end() -> None:
    value = Box()
    value.__dict__.update(me=value, lock=LOCK)
    assert find_culprit("v", value, probe) == ("v.lock", LOCK)


def test_depth_is_bounded() -> None:
    value: Any = LOCK
    for _ in range(100):
        value = [value]
    path, _ = find_culprit("v", value, probe)
    assert path == "v" + "[0]" * culprit_module._MAX_DEPTH


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(culprit_module, "_BUDGET_S", -1.0)
    value = [LOCK]
    assert find_culprit("v", value, probe) == ("v", value)


def test_the_message_contains_the_users_own_pickling_error() -> None:
    class Refuses:
        def __reduce__(self) -> Any:
            raise pickle.PicklingError("use .state()")

    value = {"model": Refuses()}
    with pytest.raises(pickle.PicklingError) as caught:
        cloudpickle.dumps(value)
    message = str(make_capture_error("v", value, probe, caught.value))
    assert message.startswith("`v['model']` is a ")
    assert "PicklingError: use .state()" in message


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (
            (i for i in range(3)),
            "`v['x']` is a generator and cannot be sent to the {}; make a list of it",
        ),
        (LOCK, "`v['x']` is a _thread.lock and cannot be sent to the {}; "),
    ],
)
def test_the_advice_for_a_result_is_not_to_create_it_in_the_cell(value: Any, advice: str) -> None:
    with pytest.raises(CaptureError) as result:
        dump({"x": value}, name="v")
    with pytest.raises(CaptureError) as captured:
        dump({"x": value}, name="v", namespace={})
    assert str(result.value).startswith(advice.format("notebook"))
    assert str(captured.value).startswith(advice.format("ranks"))
    assert "inside the cell" not in str(result.value)
    assert "inside the cell" in str(captured.value)


@pytest.mark.parametrize(
    "value",
    [
        queue.Queue(),
        threading.Event(),
        threading.Semaphore(),
        concurrent.futures.ThreadPoolExecutor(),
    ],
)
def test_a_synchronization_object_is_named_without_its_parts(value: Any) -> None:
    with pytest.raises(CaptureError, match=r"^`v\['x'\]` is an? "):
        dump({"x": value}, name="v", namespace={})


def test_a_thread_a_process_and_a_widget_are_named_without_their_parts() -> None:
    widgets = pytest.importorskip("ipywidgets")
    thread, process = threading.Thread(target=print), subprocess.Popen(["true"])
    process.wait()
    slider = widgets.IntSlider()
    slider.held = LOCK  # a kernel's widget holds a lock through its comm
    said = {
        "v['x']": (thread, "is a threading.Thread and cannot be sent to the ranks; start it"),
        "v['y']": (process, "is a subprocess.Popen and cannot be sent to the ranks; start it"),
        "v['z']": (slider, "is a widget; use `v['z'].value`"),
    }
    for path, (value, expected) in said.items():
        with pytest.raises(CaptureError) as caught:
            dump({path[3]: value}, name="v", namespace={})
        assert str(caught.value).startswith(f"`{path}` {expected}")
