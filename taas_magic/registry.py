"""Which loaders of this process are registered: run by fetchers when a cell uses them.

A registered loader stays what it is in the notebook. When a cell that uses it travels, what the
ranks get under its name is a `RemoteLoader`, and the loader itself goes to the fetchers.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import cloudpickle

from taas_magic.capture.culprit import refusal
from taas_magic.data.registered import Registered
from taas_magic.data.shard import UNEVEN, Uneven

_Loader = TypeVar("_Loader")

_registered: dict[int, Registered] = {}
_listeners: list[Callable[[Registered], None]] = []


def register(
    loader: _Loader, *, name: str | None = None, seed: int | None = None, uneven: Uneven = "pad"
) -> _Loader:
    """Has fetchers run this loader whenever a `%%taas` cell uses it.

    Args:
        loader: A DataLoader, or anything that can be iterated again and again.
        name: What it is called in views and messages; left out, its variable's name.
        seed: Seed of its order and of the random numbers in its dataset; None: torch's seed in the
            notebook when the cell starts.
        uneven: When its batches do not divide by the ranks: `pad` begins again with the first ones,
            `drop` leaves the last ones out, `keep` gives some ranks one batch less.

    Returns:
        The loader, so that `loader = taas.register(DataLoader(...))` works.

    Raises:
        TypeError: It cannot be iterated, or something in it cannot be pickled.
        ValueError: It is registered already, its name is taken, or it is being iterated.
    """
    _check_new(loader, uneven)
    is_named = name is not None
    name = name or _variable_of(loader) or f"loader{len(_registered)}"
    if name in registered():
        raise ValueError(f"register: the name {name!r} is taken; unregister that loader first")
    if _is_iterated(loader):
        raise ValueError(
            f"register: {name!r} has an iterator that is still alive; delete it and register again"
        )
    _check_travels(name, loader)
    _registered[id(loader)] = Registered(name, loader, seed, uneven, is_named)
    _teach_capture()
    return loader


def unregister(loader: Any) -> None:
    """Takes a loader, given itself or by its name, out again.

    Raises:
        ValueError: It is not registered.
    """
    found = registered().get(loader) if isinstance(loader, str) else _registered.get(id(loader))
    if found is None:
        have = ", ".join(sorted(registered())) or "none"
        raise ValueError(f"unregister: this loader is not registered; registered: {have}")
    del _registered[id(found.loader)]


def is_registered(loader: Any) -> bool:
    """Whether fetchers run this loader."""
    return id(loader) in _registered


def registered() -> dict[str, Registered]:
    """The registered loaders by name."""
    for entry in [entry for entry in _registered.values() if not entry.is_named]:
        variable = _variable_of(entry.loader)
        if variable and all(variable != other.name for other in _registered.values()):
            _registered[id(entry.loader)] = replace(entry, name=variable)
    return {entry.name: entry for entry in _registered.values()}


@contextmanager
def noting() -> Iterator[dict[str, Registered]]:
    """Gives a dict of the registered loaders that are pickled for ranks inside the block."""
    used: dict[str, Registered] = {}

    def note(entry: Registered) -> None:
        used[entry.name] = entry

    _listeners.append(note)
    try:
        yield used
    finally:
        _listeners.remove(note)


def reduce_loader(loader: Any) -> Any:
    """A pickler's rule: a registered loader travels as its shape, every other as what it is."""
    if id(loader) not in _registered:
        return NotImplemented
    entry = next(entry for entry in registered().values() if entry.loader is loader)
    from taas_magic.data.loader import arrive

    for note in _listeners:
        note(entry)
    return arrive, (entry.shape(),)


def _teach_capture() -> None:
    """Put the rule where the pickler of cells finds it, once there is something to find."""
    from taas_magic.capture import pickling

    for kind in {type(entry.loader) for entry in _registered.values()}:
        pickling.STAND_INS[kind] = reduce_loader


def _check_new(loader: Any, uneven: str) -> None:
    kind = type(loader).__name__
    if not hasattr(loader, "__iter__"):
        raise TypeError(f"register: a {kind} cannot be iterated; give it a DataLoader")
    if isinstance(loader, Iterator):
        raise TypeError(f"register: a {kind} can be iterated only once; give it what it came from")
    if uneven not in UNEVEN:
        raise ValueError(f"register: uneven={uneven!r}; possible is {', '.join(UNEVEN)}")
    if is_registered(loader):
        raise ValueError(f"register: this loader is registered already, as {_of(loader).name!r}")


def _of(loader: Any) -> Registered:
    return _registered[id(loader)]


def _check_travels(name: str, loader: Any) -> None:
    def probe(value: Any) -> None:
        cloudpickle.dumps(value, protocol=5)

    try:
        probe(loader)
    except Exception as error:
        raise TypeError(f"register: {refusal(name, loader, probe, error)}") from error


def _variable_of(loader: Any) -> str | None:
    """The notebook's variable that holds this loader, as far as there is one yet."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive else None
    variables = shell.user_ns if shell else {}
    names = (name for name, value in variables.items() if value is loader)
    return next((name for name in names if not name.startswith("_")), None)


def _is_iterated(loader: Any) -> bool:
    from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

    if not isinstance(loader, DataLoader):
        return False
    return any(
        issubclass(type(candidate), _BaseDataLoaderIter)
        and candidate._index_sampler is loader._index_sampler
        for candidate in gc.get_objects()
    )
