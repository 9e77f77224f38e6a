"""Which loaders of this process are registered: run by fetchers when a cell uses them.

A registered loader stays what it is in the notebook. When a cell that uses it travels, what the
ranks get under its name is a `RemoteLoader`, and the loader itself goes to the fetchers.
"""

import contextlib
import os
import pickle
import secrets
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from taas_magic.capture import pickling
from taas_magic.capture.culprit import is_shard, refusal
from taas_magic.capture.pickling import ValuePickler
from taas_magic.config import DataConfig
from taas_magic.data import service
from taas_magic.data.sharding import UNEVEN, Uneven
from taas_magic.errors import CaptureError, RegistrationError, UsageError
from taas_magic.host.cell_main import PAYLOAD
from taas_magic.plan import Plan

if TYPE_CHECKING:
    from taas_magic.data.dataset import LoaderParts
    from taas_magic.data.loader import LoaderShape

_BUILT_IN = (list, tuple, dict, set, frozenset, str, bytes, bytearray)
"""What pickle does not ask anybody about: every rank would get all of it."""

_SMALL_ATTRIBUTE_BYTES = 64 << 10
_NAME_BYTES = 100
"""A name's most: it is in a file's name, in hexadecimal, and in a line of the ledger."""

_Loader = TypeVar("_Loader")


@dataclass(frozen=True)
class Registered:
    """A registered loader.

    Attributes:
        name: Its name in runs; "" as long as it has none.
        held: Returns it; None once nothing of the notebook has it any more.
        seed: The seed of its randomness; None: the run's.
        uneven: What happens when its batches do not divide by the ranks: `pad`, `drop`, `keep`.
        is_named: Whether the user named it; else it goes by its variable, once it has one.
        start: Where its sampler and generator stood when it was registered; None: where they stand
            now.
    """

    name: str
    held: Callable[[], Any]
    seed: int | None = None
    uneven: Uneven = "pad"
    is_named: bool = True
    start: bytes | None = field(default=None, repr=False)

    @property
    def loader(self) -> Any:
        """The loader itself, which the notebook has."""
        return self.held()

    def packed(self) -> "PackedLoader":
        """Pickle what a run needs of it.

        Raises:
            CaptureError: Something in it cannot travel, or it would begin in the wrong place.
        """
        from taas_magic.data.dataset import as_data_loader, parts_of

        _refuse_a_loaded_state(self.name, self.loader)
        parts = parts_of(self.loader, self.start)
        payload = _pickled(self.name, parts)
        return PackedLoader(_shape_of(self, as_data_loader(self.loader), parts), payload)


class PackedLoader(NamedTuple):
    """A registered loader on its way to a run.

    Attributes:
        shape: What goes to the ranks in its place; none of its data.
        payload: Its parts, pickled for the fetchers.
    """

    shape: "LoaderShape"
    payload: bytes


_registered: dict[int, Registered] = {}
"""By the loader's identity; one without a name as long as the notebook has it."""


def register(
    loader: _Loader, *, name: str | None = None, seed: int | None = None, uneven: Uneven = "pad"
) -> _Loader:
    """Have fetchers run this loader whenever a `%%taas` cell uses it.

    Registering again replaces: the same loader, one of the same name, or the one that was in the
    same variable before. One without a `name` is registered as long as the notebook has it.
    Runs begin with the sampler and the generator as they are now.

    Args:
        loader: A DataLoader, or anything that can be iterated again and again.
        name: What it is called in views and messages, at most 100 bytes in UTF-8; left out, its
            variable's name.
        seed: Seed of its order and of the random numbers in its dataset; None: torch's seed in the
            notebook when the cell starts.
        uneven: When its batches do not divide by the ranks: `pad` begins again with the first ones,
            `drop` leaves the last ones out, `keep` gives some ranks one batch less.

    Returns:
        The loader, so that `loader = taas.register(DataLoader(...))` works.

    Raises:
        RegistrationError: It is not iterable, something in it cannot be pickled, it deals its data
            to ranks itself, or `uneven` is none of these. A TypeError and a ValueError, too.
        UsageError: The name is too long.
        RuntimeError: This is a rank.
    """
    # A fetcher that a rank starts has no RANK: a module that it imports may register what it likes.
    if PAYLOAD in os.environ and "RANK" in os.environ:
        raise RuntimeError(
            f"register: this is rank {os.environ['RANK']} of a cell's run, where it has no effect. "
            "Register the loader in the notebook, in a cell without %%taas, and use it here by its "
            "variable"
        )
    _check_kind(loader, uneven)
    if name is not None and not _is_short(name):
        raise UsageError(
            f"register: a loader's name has at most {_NAME_BYTES} bytes; {name[:20]!r}… has "
            f"{len(name.encode())}"
        )
    start = _check_travels(name or _variable_of(loader) or "loader", loader)
    _name_by_variables()
    _registered.pop(id(loader), None)
    is_named = name is not None
    for key in [key for key, entry in _registered.items() if is_named and entry.name == name]:
        del _registered[key]
    held = _held(loader, is_named)
    _registered[id(loader)] = Registered(name or "", held, seed, uneven, is_named, start)
    _name_by_variables()
    pickling.STAND_INS[type(loader)] = reduce_loader
    _warn_of_own_generators(loader)
    return loader


def _is_short(name: str) -> bool:
    return len(name.encode()) <= _NAME_BYTES


def _held(loader: Any, is_named: bool) -> Callable[[], Any]:
    """Return what returns a loader; without a name as long as the notebook has it.

    Its data may be most of the memory, and the cell that registers it is run again and again.
    """
    if not is_named:
        with contextlib.suppress(TypeError):  # a list, say
            return weakref.ref(loader)
    return lambda: loader


def unregister(loader: Any) -> None:
    """Take a loader, given itself or by its name, out again.

    Raises:
        RegistrationError: It is not registered; a ValueError, too.
    """
    by_name = {name: entry.loader for name, entry in registered().items()}
    found = by_name.get(loader) if isinstance(loader, str) else loader
    if not is_registered(found):
        have = ", ".join(sorted(by_name)) or "none"
        raise RegistrationError(f"unregister: this loader is not registered; registered: {have}")
    del _registered[id(found)]


def is_registered(loader: Any) -> bool:
    """Return whether fetchers run this loader."""
    entry = _registered.get(id(loader))  # another's, which has ended, has no loader any more
    return entry is not None and entry.loader is loader


def registered() -> dict[str, Registered]:
    """Return the registered loaders by name."""
    _name_by_variables()
    for key, entry in list(_registered.items()):
        if not entry.name:
            taken = {other.name for other in _registered.values()}
            free = (f"loader{n}" for n in range(len(_registered)) if f"loader{n}" not in taken)
            _registered[key] = replace(entry, name=next(free))
    return {entry.name: entry for entry in _registered.values()}


def reduce_loader(loader: Any, used: dict[str, PackedLoader]) -> Any:
    """Reduce a registered loader to its shape, any other to what it is; a pickler's rule.

    Args:
        loader: Any loader.
        used: Takes it packed, by its name.
    """
    if not is_registered(loader):
        return NotImplemented
    entry = next(entry for entry in registered().values() if entry.loader is loader)
    from taas_magic.data.loader import arrive

    if entry.name not in used:
        used[entry.name] = entry.packed()
    return arrive, (used[entry.name].shape,)


def serve(
    loaders: Mapping[str, PackedLoader], run_dir: Path, plan: Plan, settings: DataConfig, tls: bool
) -> None:
    """Write what a run's ranks and fetchers need of the loaders that its cell uses.

    Args:
        loaders: Those loaders, by name.
        tls: Whether batches go from host to host over a network that is not the user's alone.
    """
    if not loaders:
        return
    import torch

    seed = torch.initial_seed() & (1 << 63) - 1
    served = tuple(
        service.Served(
            shape.name, shape.num_workers, shape.context, seed if shape.seed is None else shape.seed
        )
        for shape, _ in loaders.values()
    )
    certificate = service.new_certificate() if tls else None
    key = secrets.token_bytes(32)
    described = service.Service(key, seed, plan.cpus, plan.units, served, settings, certificate)
    payloads = {name: packed.payload for name, packed in loaders.items()}
    service.write(run_dir, described, payloads)


def _check_kind(loader: Any, uneven: str) -> None:
    name = type(loader).__name__
    kind = f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
    if not hasattr(loader, "__iter__"):
        raise RegistrationError(f"register: {kind} is not iterable; give it a DataLoader")
    if isinstance(loader, Iterator):
        raise RegistrationError(
            f"register: {kind} can be iterated only once; give it what it came from"
        )
    if type(loader) in _BUILT_IN:
        raise RegistrationError(
            f"register: {kind} would reach every rank whole; register a DataLoader of it "
            "(DataLoader(data, batch_size=None) where its elements are the batches)"
        )
    if (module := _iterated_by(type(loader))) is not None:
        raise RegistrationError(
            f"register: {name} is a DataLoader with an `__iter__` of its own ({module}), which "
            "fetchers do not run. Register the DataLoader without it and do its work in the cell, "
            "or in the dataset or collate_fn"
        )
    if uneven not in UNEVEN:
        raise RegistrationError(
            f"register: uneven needs {', '.join(UNEVEN[:-1])} or {UNEVEN[-1]}; got {uneven!r}"
        )


def _iterated_by(kind: type) -> str | None:
    """Return the module of a DataLoader's `__iter__` if it is neither torch's nor torchdata's."""
    from torch.utils.data import DataLoader

    module: str = getattr(kind, "__iter__", DataLoader.__iter__).__module__
    is_known = module.startswith(("torch.", "torchdata."))
    return module if issubclass(kind, DataLoader) and not is_known else None


def _check_travels(name: str, loader: Any) -> bytes:
    """Check that a loader can go to fetchers; return where its sampler and generator stand.

    Raises:
        RegistrationError: It cannot travel; the message has the path to what cannot.
    """
    from taas_magic.data import dataset

    try:
        if is_shard(type(loader)):
            raise refusal(name, loader, lambda value: None, TypeError(), to="fetchers")
        _refuse_a_loaded_state(name, loader)
        _pickled(name, dataset.parts_of(loader))
        return dataset.order_start(loader)
    except CaptureError as error:
        raise RegistrationError(f"register: {error}") from None  # it says all, in one line


def _pickled(name: str, parts: "LoaderParts") -> bytes:
    pickler = ValuePickler(to="fetchers")
    pickler.take(name, parts)
    return pickler.pickled().data


def _refuse_a_loaded_state(name: str, loader: Any) -> None:
    """Refuse a StatefulDataLoader that is to go on with a state: ranks would begin at 0."""
    if getattr(loader, "next_iter_state", None) is not None:
        raise CaptureError(
            f"`{name}` has loaded a state in the notebook (load_state_dict), and fetchers cannot "
            "go on from a local loader's state: call state_dict() and load_state_dict() of the "
            "registered loader inside the cell"
        )


def _name_by_variables() -> None:
    """Name the loaders that the user did not name by their variables; forget those that ended.

    One whose variable holds another registered loader now, and that no other variable holds, was
    replaced by it: the cell that registered it was run again.
    """
    variables = _variables()
    for key, entry in list(_registered.items()):
        loader, holder = entry.loader, variables.get(entry.name)
        is_lost = not entry.is_named and _variable_of(loader, entry.name) is None
        if loader is None or (is_lost and holder is not loader and is_registered(holder)):
            del _registered[key]
    for key, entry in list(_registered.items()):
        variable = None if entry.is_named else _variable_of(entry.loader, entry.name)
        if variable and all(variable != other.name for other in _registered.values()):
            _registered[key] = replace(entry, name=variable)


def _variables() -> dict[str, Any]:
    """Return the notebook's variables."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive else None
    return shell.user_ns if shell else {}


def _variable_of(loader: Any, preferred: str = "") -> str | None:
    """Return the notebook's variable that holds this loader, as far as there is one yet.

    One whose name is too long is none: the loader is numbered.
    """
    variables = _variables()
    if preferred and variables.get(preferred) is loader:
        return preferred
    names = (name for name, value in list(variables.items()) if value is loader)
    return next((name for name in names if not name.startswith("_") and _is_short(name)), None)


def _shape_of(entry: Registered, loader: Any, parts: "LoaderParts") -> "LoaderShape":
    from torch.utils.data import IterableDataset

    from taas_magic.data.loader import SETTINGS, LoaderShape

    dataset = loader.dataset
    iterable = isinstance(dataset, IterableDataset)
    start_method = loader.multiprocessing_context
    return LoaderShape(
        name=entry.name,
        settings={name: getattr(loader, name) for name in SETTINGS if hasattr(loader, name)},
        context=start_method.get_start_method() if start_method is not None else "",
        batches=_batches(parts),
        samples=_length(dataset),
        iterable=iterable,
        has_batch_sampler=parts.batch_sampler is not None,
        drawn=None if parts.sampler is None else _length(parts.sampler),
        varies=_may_vary(parts),
        has_own_sampler=_has_own_sampler(parts),
        uneven=entry.uneven,
        seed=entry.seed,
        dataset=type(dataset).__qualname__,
        attributes=_small_attributes(dataset),
        has_set_epoch=_has(dataset, "set_epoch"),
        has_state=iterable
        and all(hasattr(dataset, it) for it in ("state_dict", "load_state_dict")),
        # apart from the ranks' pickle: a sampler may hold millions of indices
        shown=pickle.PickleBuffer(parts.shown()),
    )


def _batches(parts: "LoaderParts") -> int | None:
    """Return what `len(loader)` is; None where it has none."""
    if parts.batch_sampler is not None:
        return _length(parts.batch_sampler)
    if parts.sampler is not None:
        return _length(parts.sampler)
    samples = _length(parts.dataset)
    if samples is None or parts.batch_size is None:
        return samples
    return samples // parts.batch_size if parts.drop_last else -(-samples // parts.batch_size)


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def _may_vary(parts: "LoaderParts") -> bool:
    """Return whether the number of batches may change from epoch to epoch."""
    has_sampler = parts.sampler is not None or parts.batch_sampler is not None
    return has_sampler and (_has_own_sampler(parts) or _has(parts.dataset, "set_epoch"))


def _has_own_sampler(parts: "LoaderParts") -> bool:
    """Return whether a sampler, or one that it wraps, is not torch's."""
    left = [parts.sampler, parts.batch_sampler]
    for sampler in left:
        if sampler is not None and not type(sampler).__module__.startswith(("torch.", "builtins")):
            return True
        inner = getattr(sampler, "sampler", None)
        if inner is not None and all(inner is not one for one in left):
            left.append(inner)
    return False


def _has(dataset: Any, method: str) -> bool:
    return callable(getattr(dataset, method, None))


def _small_attributes(dataset: Any) -> dict[str, Any]:
    """Return the dataset's attributes that cost nothing to send, like its classes."""
    plain = (str, int, float, bool, type(None))
    small: dict[str, Any] = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        elements = value if isinstance(value, (list, tuple)) else [value]
        if len(elements) > 1000 or not all(isinstance(one, plain) for one in elements):
            continue
        if len(pickle.dumps(value)) <= _SMALL_ATTRIBUTE_BYTES:
            small[name] = value
    return small


def _warn_of_own_generators(loader: Any) -> None:
    """Warn of a dataset that has random generators of its own."""
    from torch.utils.data import IterableDataset

    from taas_magic.data.dataset import as_data_loader, goes_on
    from taas_magic.data.generators import own_generators

    name = _registered[id(loader)].name or "loader"
    loader = as_data_loader(loader)
    path = next(own_generators(loader.dataset), None)
    if path is None:
        return
    kept = f'the dataset of loader "{name}" has a random generator of its own ({path})'
    if not isinstance(loader.dataset, IterableDataset):
        warnings.warn(
            f"{kept}. It is not seeded for each batch: what it draws depends on --cpus. Draw from "
            "torch, numpy.random or random, which are, or seed it in __getitem__",
            stacklevel=3,
        )
    elif goes_on(loader) and not _has(loader.dataset, "set_epoch"):
        warnings.warn(
            f"{kept}. Every epoch begins with the dataset as it was registered, so that all are "
            "alike: give it a method set_epoch(epoch) that seeds it",
            stacklevel=3,
        )
