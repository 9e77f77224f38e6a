"""Tests of `taas.register`, and of the remote loaders that replace registered loaders."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import taas
from taas_magic import registry
from taas_magic.capture import pickling
from taas_magic.data.loader import RankFeed, RemoteLoader, use_feed
from taas_magic.data.server import RankServers
from taas_magic.errors import RegistrationError, UsageError
from taas_magic.registry import RegisteredLoader
from tests.data.data_rig import Lines, Rows


def test_register_gives_the_loader_back() -> None:
    loader = DataLoader(Rows(4))
    assert taas.register(loader, name="train", seed=3, uneven="drop") is loader
    assert taas.is_registered(loader)
    entry = taas.registered()["train"]
    assert (entry.loader, entry.seed, entry.uneven) == (loader, 3, "drop")
    assert taas.get_registered_data_loaders_names() == ["train"]
    taas.unregister(loader)
    assert not taas.is_registered(loader)
    assert taas.registered() == {}


def test_unregister_and_unregistered_remove_a_loader_by_name() -> None:
    taas.register(DataLoader(Rows(4)), name="a")
    taas.register(DataLoader(Rows(4)), name="b")
    taas.unregister("a")
    with pytest.raises(ValueError, match="not registered; registered: b"):
        taas.unregistered("a")
    taas.unregistered("b")


def test_loaders_without_a_name_are_numbered() -> None:
    first, second = taas.register(DataLoader(Rows(1))), taas.register(DataLoader(Rows(1)))
    assert [entry.loader for entry in taas.registered().values()] == [first, second]
    assert list(taas.registered()) == ["loader0", "loader1"]


class Locked(Rows):
    def __init__(self) -> None:
        super().__init__(4)
        self.state = {"lock": threading.Lock()}


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (3, TypeError, "an int is not iterable"),
        (DataLoader, TypeError, r"DataLoader is a class; give it an object \(DataLoader\(...\)\)"),
        (iter([1]), TypeError, "only once"),
        (DataLoader(Locked()), TypeError, r"train\.dataset\.state\['lock'\]"),
    ],
)
def test_what_cannot_be_registered(value: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        taas.register(value, name="train")
    with pytest.raises(RegistrationError) as shown:
        taas.register(value, name="train")
    [line] = shown.value._render_traceback_()  # one line, without a traceback
    assert line.startswith("RegistrationError: register: ") and "\n" not in line
    assert taas.registered() == {}


@pytest.mark.parametrize("wrong", [{"name": 3}, {"seed": "a"}, {"seed": 1.5}])
def test_a_name_is_text_and_a_seed_is_an_integer(wrong: dict[str, Any]) -> None:
    with pytest.raises(RegistrationError, match="name needs a string, and seed an integer; got "):
        taas.register(DataLoader(Rows(4)), **wrong)
    loader = taas.register(DataLoader(Rows(4)), seed=np.int64(3))
    [entry] = taas.registered().values()
    assert entry.loader is loader and type(entry.seed) is int


def test_a_name_has_at_most_100_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    taas.register(DataLoader(Rows(4)), name="é" * 50)
    with pytest.raises(UsageError, match=r"has at most 100 bytes; 'éé.*'… has 101"):
        taas.register(DataLoader(Rows(4)), name="é" * 50 + "e")
    assert list(taas.registered()) == ["é" * 50]
    variables = {"e" * 101: taas.register(DataLoader(Rows(4)))}
    monkeypatch.setattr(registry, "_variables", lambda: variables)
    assert list(taas.registered()) == ["é" * 50, "loader0"]


def test_registering_again_replaces() -> None:
    first = taas.register(DataLoader(Rows(4)), name="train")
    second = taas.register(DataLoader(Rows(4)), name="train")
    named = {name: entry.loader for name, entry in taas.registered().items()}
    assert named == {"loader0": first, "train": second}
    taas.unregister(first)
    taas.register(second, name="other", seed=5)
    assert {name: entry.seed for name, entry in taas.registered().items()} == {"other": 5}


def test_a_wrong_rule() -> None:
    with pytest.raises(ValueError, match="uneven needs pad, drop or keep; got"):
        taas.register(DataLoader(Rows(4)), uneven="fill")  # type: ignore[arg-type]
    assert taas.registered() == {}


def test_the_shape_has_the_attributes_of_the_loader() -> None:
    class Label(str):
        """Class inside a function, which pickle cannot find by its name."""

    rows: Any = Rows(10)
    rows.label = Label("a")
    loader = DataLoader(rows, 3, num_workers=2, drop_last=True, timeout=5)
    shape = RegisteredLoader("train", lambda: loader).pack().shape
    assert (shape.batches, shape.samples, shape.settings["batch_size"]) == (3, 10, 3)
    assert (shape.num_workers, shape.settings["timeout"], shape.iterable) == (2, 5, False)
    assert shape.attributes == {"size": 10, "width": 8, "classes": ["a", "b"]}
    assert RegisteredLoader("lines", lambda: DataLoader(Lines(3))).pack().shape.iterable


@pytest.mark.process
def test_a_cell_gets_a_remote_loader_and_other_loaders_are_unchanged() -> None:
    loader, other = taas.register(DataLoader(Rows(10), 2), name="train"), DataLoader(Rows(3))
    pickler = pickling.ValuePickler({})
    pickler.add({"loaders": [loader, loader], "other": other})
    used = pickler.replaced
    assert list(used) == ["train"]
    own = RankServers(b"", lambda served: used[served.name].payload)
    use_feed(RankFeed(1, 2, lambda name: used[name].payload, own=own))
    try:
        data = pickler.pickled()
        arrived = pickling.loads(bytes(data.data), data.buffers)
    finally:
        use_feed(None)
    remote = arrived["loaders"][0]
    assert isinstance(remote, RemoteLoader)
    assert arrived["loaders"][1] is remote
    assert type(arrived["other"]) is DataLoader
    try:
        assert [batch[1].tolist() for batch in remote] == [[2, 3], [6, 7], [0, 1]]
    finally:
        own.close()


def test_a_loader_that_the_notebook_no_longer_has_is_unregistered() -> None:
    """Users run the cell that registers a loader again and again.

    The previous loader must not stay in memory: its data may fill most of the memory.
    """
    for _ in range(2):
        loaders = {"train": taas.register(DataLoader(Rows(4)))}
        gc.collect()
    assert [entry.loader for entry in taas.registered().values()] == [loaders["train"]]


def test_a_variable_gives_its_name_to_its_present_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = dict[str, Any]()
    monkeypatch.setattr(registry, "_variables", lambda: variables)
    folds = []
    for _ in range(3):
        variables["train"] = DataLoader(Rows(4))
        folds.append(taas.register(variables["train"]))
    named = {name: entry.loader for name, entry in taas.registered().items()}
    assert named == {"loader0": folds[0], "loader1": folds[1], "train": folds[2]}
    variables.update(train=folds[0], loader1=folds[2])
    named = {name: entry.loader for name, entry in taas.registered().items()}
    assert named == {"train": folds[0], "loader0": folds[1], "loader1": folds[2]}
    variables.update(train=folds[2], loader1=folds[0])
    named = {name: entry.loader for name, entry in taas.registered().items()}
    assert named == {"train": folds[2], "loader0": folds[1], "loader1": folds[0]}


class Feed:
    """Iterable of batches that depend on the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[1, self.epoch], [3]])

    def __len__(self) -> int:
        return 2


@pytest.mark.process
def test_any_iterable_is_a_loader() -> None:
    packed = RegisteredLoader("plain", Feed).pack()
    own = RankServers(b"", lambda served: packed.payload)
    remote = RemoteLoader(packed.shape, RankFeed(0, 1, lambda name: packed.payload, own=own))
    try:
        assert list(remote) == [[1, 0], [3]] and len(remote) == 2
        assert list(remote) == [[1, 1], [3]]
        remote.set_epoch(7)
        assert list(remote) == [[1, 7], [3]]
    finally:
        own.close()


def test_no_torch_before_it_is_needed() -> None:
    import subprocess
    import sys

    code = "import sys, taas, taas_magic.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
