"""Register loaders, so that fetchers run them if a cell uses them.

A registered loader stays in the notebook as it is. If a cell uses the loader, each rank gets a
`RemoteLoader` instead, and fetchers get copies of the loader's dataset and samplers.
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
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from taas_magic.capture import pickling
from taas_magic.capture.culprit import is_shard, make_capture_error
from taas_magic.config import DataConfig
from taas_magic.data import service
from taas_magic.data.sharding import UNEVEN, Uneven, first_slots_to_keep
from taas_magic.errors import CaptureError, RegistrationError, UsageError
from taas_magic.host.cell_main import PAYLOAD
from taas_magic.late_imports import import_in_thread
from taas_magic.plan import Plan

if TYPE_CHECKING:
    from taas_magic.data.dataset import LoaderParts
    from taas_magic.data.loader import LoaderShape
    from taas_magic.data.order import GeneratorStates

_BUILT_IN = (list, tuple, dict, set, frozenset, str, bytes, bytearray)
"""Types whose objects cannot be registered.

pickle cannot replace objects of these types by descriptions, so every rank would get all the data.
"""

_SMALL_ATTRIBUTE_BYTES = 64 << 10
_NAME_BYTES = 100
"""Maximum length of a loader's name in bytes of UTF-8.

Reason: the names of some files contain the loader's name in hexadecimal, and file systems limit the
length of a file's name.
"""

_Loader = TypeVar("_Loader")


@dataclass(frozen=True)
class RegisteredLoader:
    """Registration of a loader.

    Attributes:
        name: Name of the loader in runs; "" if the loader has no name yet.
        get_loader: Function that returns the loader, or None if the loader no longer exists.
        seed: Seed of the loader's random numbers; None for the run's seed.
        uneven: Rule for a number of batches that is no multiple of the number of ranks: `pad`,
            `drop` or `keep`, as in `register`.
        is_named: Whether the user gave the name. Otherwise, the loader is named after its variable.
        generators: Random generators of the loader and its samplers, with their states at the
            registration. In each run, they start in these states. None for their current states.
    """

    name: str
    get_loader: Callable[[], Any]
    seed: int | None = None
    uneven: Uneven = "pad"
    is_named: bool = True
    generators: "GeneratorStates | None" = field(default=None, repr=False)

    @property
    def loader(self) -> Any:
        """The loader in the notebook; None if the loader no longer exists."""
        return self.get_loader()

    def pack(self) -> "PackedLoader":
        """Pickle the parts of the loader that fetchers need, and describe the loader for ranks.

        Raises:
            CaptureError: An object in the loader cannot be sent, or `load_state_dict` has set the
                loader's position.
        """
        from taas_magic.data.dataset import as_data_loader, parts_of

        _refuse_a_loaded_state(self.name, self.loader)
        parts = parts_of(self.loader)
        payload = _pickled(self.name, parts, self.generators)
        loader = as_data_loader(self.loader)
        return PackedLoader(_shape_of(self, loader, parts), payload, _mutable_parts(loader))


class PackedLoader(NamedTuple):
    """A registered loader, pickled for a run.

    Attributes:
        shape: Description of the loader, without its data. Ranks get this description instead of
            the loader.
        payload: The pickled dataset, samplers and functions of the loader, for fetchers.
        parts: The notebook's objects of which fetchers have copies: dataset, samplers, generator.
    """

    shape: "LoaderShape"
    payload: bytes
    parts: tuple[Any, ...] = ()


_registered: dict[int, RegisteredLoader] = {}
"""Registration of each loader, by `id(loader)`."""


def register(
    loader: _Loader, *, name: str | None = None, seed: int | None = None, uneven: Uneven = "pad"
) -> _Loader:
    """Register a loader, so that fetchers run it whenever a `%%taas` cell uses it.

    From now on, ranks get a description of the loader instead of its data. In every run, the random
    generators of the loader and its samplers start in the state that they have now. This function
    pickles the loader once, to check that the loader can be sent to fetchers. If the dataset has a
    random generator that nothing seeds, this function warns.

    An earlier registration of the same loader is replaced. If an earlier loader has the same `name`
    or was in the same variable, the new loader takes the name. The earlier loader stays registered
    as long as the notebook refers to it, for example in a list, and gets a name such as `loader0`.
    A loader that has a `name` stays registered until `unregister`.

    Args:
        loader: A DataLoader, or any object that can be iterated several times.
        name: Name in displays and messages, at most 100 bytes in UTF-8; None for the name of the
            loader's variable.
        seed: Seed of the order of samples and of the dataset's random numbers; None for torch's
            seed in the notebook when the cell starts.
        uneven: Rule for a number of batches that is no multiple of the number of ranks: `pad`
            repeats the first batches, `drop` drops the last batches, `keep` gives some ranks one
            batch less.

    Returns:
        The loader, so that `loader = taas.register(DataLoader(...))` works.

    Raises:
        RegistrationError: The loader is not iterable, or divides its data between ranks itself. Or
            an object in the loader cannot be pickled. Or `name`, `seed` or `uneven` has an invalid
            value. RegistrationError is a subclass of TypeError and of ValueError.
        UsageError: The name is too long.
        RuntimeError: The caller is a rank.
    """
    # Fetchers have no RANK, even if a rank started them. Modules that a fetcher imports may call
    # `register`.
    if PAYLOAD in os.environ and "RANK" in os.environ:
        raise RuntimeError(
            f"register: this is rank {os.environ['RANK']} of a cell's run, where it has no effect. "
            "Register the loader in the notebook, in a cell without %%taas, and use it here by its "
            "variable"
        )
    import_in_thread("taas_magic.data.loader")
    _check_kind(loader, uneven)
    if not isinstance(name, str | None) or not isinstance(seed, Integral | None):
        raise RegistrationError(
            f"register: name needs a string, and seed an integer; got name={name!r}, seed={seed!r}"
        )
    if name is not None and not _is_short(name):
        raise UsageError(
            f"register: a loader's name has at most {_NAME_BYTES} bytes; {name[:20]!r}… has "
            f"{len(name.encode())}"
        )
    generators = _check_travels(name or _variable_of(loader) or "loader", loader)
    _name_by_variables()
    _registered.pop(id(loader), None)
    is_named = name is not None
    for key, entry in list(_registered.items()):
        if is_named and entry.name == name:
            getter = _reference(entry.loader, is_named=False)
            _registered[key] = replace(entry, name="", is_named=False, get_loader=getter)
    get_loader = _reference(loader, is_named)
    number = None if seed is None else int(seed)
    _registered[id(loader)] = RegisteredLoader(
        name or "", get_loader, number, uneven, is_named, generators
    )
    _name_by_variables()
    pickling.LOADER_REDUCERS = dict.fromkeys(_registered, reduce_registered_loader)
    _warn_of_own_generators(loader)
    return loader


def _is_short(name: str) -> bool:
    return len(name.encode()) <= _NAME_BYTES


def _reference(loader: Any, is_named: bool) -> Callable[[], Any]:
    """Return a function that returns the loader, or None once the loader has been deleted.

    If the user gave the loader no name, the function has only a weak reference to the loader. So if
    a cell replaces the loader by a new one, the registration does not keep the old loader's data in
    memory. If the loader has a name, or its type allows no weak references, the function has a
    normal reference, and never returns None: the loader stays registered until `unregister`.
    """
    if not is_named:
        with contextlib.suppress(TypeError):  # some types allow no weak references
            return weakref.ref(loader)
    return lambda: loader


def unregister(loader: Any) -> None:
    """Remove the registration of a loader.

    Args:
        loader: The loader, or its name.

    Raises:
        RegistrationError: The loader is not registered. RegistrationError is a subclass of
            ValueError.
    """
    by_name = {name: entry.loader for name, entry in registered().items()}
    found = by_name.get(loader) if isinstance(loader, str) else loader
    if not is_registered(found):
        have = ", ".join(sorted(by_name)) or "none"
        raise RegistrationError(f"unregister: this loader is not registered; registered: {have}")
    del _registered[id(found)]


def is_registered(loader: Any) -> bool:
    """Return whether this loader is registered."""
    entry = _registered.get(id(loader))  # perhaps of a deleted loader that had the same id
    return entry is not None and entry.loader is loader


def registered() -> dict[str, RegisteredLoader]:
    """Return the registered loaders by name.

    First update the names and the list of loaders from the notebook's variables. A loader that has
    neither a name nor a variable gets a name such as `loader0`.
    """
    _name_by_variables()
    for key, entry in list(_registered.items()):
        if not entry.name:
            taken = {other.name for other in _registered.values()}
            free = (f"loader{n}" for n in range(len(_registered)) if f"loader{n}" not in taken)
            _registered[key] = replace(entry, name=next(free))
    return {entry.name: entry for entry in _registered.values()}


def reduce_registered_loader(loader: Any, used: dict[str, PackedLoader]) -> Any:
    """Make pickle replace a registered loader by a description of the loader.

    From the description, a rank makes a remote loader. If a result of the run contains a remote
    loader, the kernel replaces the remote loader by the notebook's loader. For this purpose, this
    function sets `find_registered` in `data.loader`.

    Args:
        used: Mapping to which this function adds the loader's `PackedLoader` under its name,
            unless the name is there already.

    Returns:
        The function and the arguments that pickle stores in place of the loader. If the loader is
        not registered, NotImplemented, so that the pickler pickles the loader as usual.
    """
    if not is_registered(loader):
        return NotImplemented
    registered()  # gives the loader a name
    entry = _registered[id(loader)]
    from taas_magic.data import loader as remote

    remote.find_registered = _find_registered
    if entry.name not in used:
        used[entry.name] = entry.pack()
    return remote.make_remote_loader, (used[entry.name].shape,)


def _find_registered(name: str) -> Any:
    """Return the registered loader with this name; None if there is none."""
    entry = registered().get(name)
    return None if entry is None else entry.loader


def write_files(
    loaders: Mapping[str, PackedLoader], run_dir: Path, plan: Plan, settings: DataConfig, tls: bool
) -> None:
    """Write the files that a run's ranks and fetchers need to run registered loaders.

    The files have the loaders' payloads and settings, a new secret key and, for TLS, a new
    certificate. A loader without a seed gets torch's seed in the notebook. Without loaders, do
    nothing.

    Args:
        loaders: The loaders that the cell uses, by name.
        run_dir: The run folder.
        settings: The table [data] of taas.toml.
        tls: Whether to encrypt batches on the network. Must be True if other people use the
            network.
    """
    if not loaders:
        return
    import torch

    seed = torch.initial_seed() & (1 << 63) - 1
    served = tuple(
        service.LoaderSettings(
            shape.name,
            shape.num_workers,
            shape.context,
            seed if shape.seed is None else shape.seed,
            keep_first=first_slots_to_keep(plan.world_size, shape.uneven),
            ranks=plan.world_size,
        )
        for shape, *_ in loaders.values()
    )
    certificate = service.new_certificate() if tls else None
    key = secrets.token_bytes(32)
    numbers = tuple(it.number for it in plan.data.fetchers) if plan.data is not None else ()
    described = service.DataServiceSettings(
        key, seed, plan.cpus, plan.units, served, settings, certificate, numbers
    )
    payloads = {name: packed.payload for name, packed in loaders.items()}
    service.write(run_dir, described, payloads)


def _check_kind(loader: Any, uneven: str) -> None:
    """Raise a RegistrationError if fetchers cannot run a loader, or if `uneven` is not allowed.

    Fetchers cannot run these objects, in the order of the checks:

    - a class
    - an object that is not iterable
    - an object that can be iterated only once
    - a collection such as a list
    - an object of a subclass of DataLoader with an `__iter__` of its own
    """
    if isinstance(loader, type):
        raise RegistrationError(
            f"register: {loader.__name__} is a class; give it an object ({loader.__name__}(...))"
        )
    name = type(loader).__name__
    kind = f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
    if not hasattr(loader, "__iter__"):
        raise RegistrationError(f"register: {kind} is not iterable; give it a DataLoader")
    if isinstance(loader, Iterator):
        raise RegistrationError(
            f"register: {kind} can be iterated only once; give it the object that it was made from"
        )
    if type(loader) in _BUILT_IN:
        raise RegistrationError(
            f"register: every rank would get all of {kind}; register a DataLoader of it "
            "(DataLoader(data, batch_size=None) if its elements are the batches)"
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
    """Return the name of the module that defines the `__iter__` of a subclass of DataLoader.

    Return None if the class is no DataLoader, or uses the `__iter__` of torch or torchdata.
    """
    from torch.utils.data import DataLoader

    module: str = getattr(kind, "__iter__", DataLoader.__iter__).__module__
    is_known = module.startswith(("torch.", "torchdata."))
    return module if issubclass(kind, DataLoader) and not is_known else None


def _check_travels(name: str, loader: Any) -> "GeneratorStates":
    """Check that a loader can be sent to fetchers; pickle the states of its random generators.

    Returns:
        The random generators of the loader and its samplers, in their current state.

    Raises:
        RegistrationError: An object in the loader cannot be sent; the message has the path to it.
            Or the loader divides its data itself, or has loaded a state by `load_state_dict`.
    """
    from taas_magic.data import dataset

    try:
        if is_shard(type(loader)):
            raise make_capture_error(name, loader, lambda value: None, TypeError(), to="fetchers")
        _refuse_a_loaded_state(name, loader)
        _pickled(name, dataset.parts_of(loader))
        return dataset.generators_of(loader)
    except CaptureError as error:
        # The message is complete; a chained traceback would only hide it.
        raise RegistrationError(f"register: {error}") from None


def _pickled(name: str, parts: "LoaderParts", generators: "GeneratorStates | None" = None) -> bytes:
    from taas_magic.data.order import PartsPickler

    pickler = PartsPickler(generators)
    pickler.pickle_variable(name, parts)
    pickler.add_definitions()
    return pickler.pickled().data


def _refuse_a_loaded_state(name: str, loader: Any) -> None:
    """Raise CaptureError if `load_state_dict` has set the position of a StatefulDataLoader.

    A run cannot start at this position: the ranks would start at the beginning of the data.
    """
    if getattr(loader, "next_iter_state", None) is not None:
        raise CaptureError(
            f"`{name}` has loaded a state in the notebook (load_state_dict), but fetchers cannot "
            "resume from a local loader's state: call state_dict() and load_state_dict() of the "
            "registered loader inside the cell"
        )


def _name_by_variables() -> None:
    """Remove the loaders that no longer exist, and name the others after the notebook's variables.

    A loader that the user has named keeps its name. Any other loader gets the name of its variable,
    unless the user has given this name to another loader. If a loader has no variable, it keeps its
    name until another loader gets the name. After that, the loader's name is "".
    """
    loaders = {key: entry.loader for key, entry in _registered.items()}
    for key, loader in loaders.items():
        if loader is None:
            del _registered[key]
    given = {entry.name for entry in _registered.values() if entry.is_named}
    variables = {
        key: _variable_of(loaders[key], entry.name)
        for key, entry in _registered.items()
        if not entry.is_named
    }
    taken = given.union(filter(None, variables.values()))
    for key, variable in variables.items():
        entry = _registered[key]
        kept = "" if entry.name in taken else entry.name
        name = variable if variable and variable not in given else kept
        _registered[key] = replace(entry, name=name)


def _variables() -> dict[str, Any]:
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive else None
    return shell.user_ns if shell else {}


def _variable_of(loader: Any, preferred: str = "") -> str | None:
    """Return the name of a notebook variable that holds this loader; None if there is none.

    Ignore variables whose names are too long or begin with `_`.

    Args:
        preferred: Name of the variable to return if several variables hold the loader; "" for any.
    """
    variables = _variables()
    if preferred and variables.get(preferred) is loader:
        return preferred
    names = (name for name, value in list(variables.items()) if value is loader)
    return next((name for name in names if not name.startswith("_") and _is_short(name)), None)


def _shape_of(entry: RegisteredLoader, loader: Any, parts: "LoaderParts") -> "LoaderShape":
    """Return the description of a loader, from which ranks make a remote loader.

    The description has the loader's settings, the numbers of batches and samples, and the dataset's
    small attributes, but no data. The description also has the pickled samplers, generator and
    functions, because the cell's code may read these attributes of the remote loader.

    Args:
        entry: Registration of the loader.
        loader: The loader, as a DataLoader.
        parts: The loader's parts that fetchers get.
    """
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
        has_set_epoch=_has_set_epoch(dataset),
        has_state=iterable
        and all(hasattr(dataset, it) for it in ("state_dict", "load_state_dict")),
        # Not in the pickle stream of the ranks, because a sampler may hold millions of indices.
        shown=pickle.PickleBuffer(parts.pickle_visible(entry.generators)),
    )


def _mutable_parts(loader: Any) -> tuple[Any, ...]:
    """Return the objects of a DataLoader that the notebook may change after fetchers copied them.

    These are the dataset, the samplers and the generator.
    """
    parts = loader.dataset, loader.sampler, loader.batch_sampler, loader.generator
    return tuple(part for part in parts if part is not None)


def _batches(parts: "LoaderParts") -> int | None:
    """Return the loader's number of batches; None if the number is not known.

    The number is the length of the batch sampler or, without a batch sampler, of the sampler.
    Without both, compute the number from the length of the dataset, `batch_size` and `drop_last`.
    """
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
    """Return whether the loader's number of batches may change from epoch to epoch.

    If the loader has neither a sampler nor a batch sampler, return False. Otherwise, the number may
    change in two cases: the class of a sampler is not torch's (`_has_own_sampler`), or the dataset
    has a method `set_epoch`.
    """
    has_sampler = parts.sampler is not None or parts.batch_sampler is not None
    return has_sampler and (_has_own_sampler(parts) or _has_set_epoch(parts.dataset))


def _has_own_sampler(parts: "LoaderParts") -> bool:
    """Return whether the loader has a sampler whose class is neither torch's nor built in.

    Check the loader's sampler, its batch sampler, and any sampler inside these two.
    """
    left = [parts.sampler, parts.batch_sampler]
    for sampler in left:
        if sampler is not None and not type(sampler).__module__.startswith(("torch.", "builtins")):
            return True
        inner = getattr(sampler, "sampler", None)
        if inner is not None and all(inner is not one for one in left):
            left.append(inner)
    return False


def _has_set_epoch(dataset: Any) -> bool:
    return callable(getattr(dataset, "set_epoch", None))


def _small_attributes(dataset: Any) -> dict[str, Any]:
    """Return the dataset's small attributes, such as `dataset.classes`.

    Ranks get these attributes in the description of the loader.

    A small attribute is a number, a string or None, or a list or tuple of up to 1,000 such values.
    It can be pickled to at most `_SMALL_ATTRIBUTE_BYTES` bytes.
    """
    plain = (str, int, float, bool, type(None))
    small: dict[str, Any] = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        elements = value if isinstance(value, (list, tuple)) else [value]
        if len(elements) > 1000 or not all(isinstance(one, plain) for one in elements):
            continue
        # pickle may not find the class of the value, such as a subclass of str inside a function.
        with contextlib.suppress(AttributeError, TypeError, pickle.PicklingError):
            if len(pickle.dumps(value)) <= _SMALL_ATTRIBUTE_BYTES:
                small[name] = value
    return small


def _warn_of_own_generators(loader: Any) -> None:
    """Warn if the loader's dataset has a random generator of its own, which nothing seeds.

    If the dataset is map-style, the numbers of such a generator depend on `--cpus`. If the dataset
    is iterable-style, each epoch of a run begins with the same copy of the dataset, and so with the
    same random numbers. Do not warn about an iterable-style dataset in two cases: the dataset has
    `set_epoch`, or the epochs of a local loader would also have the same random numbers.
    """
    from torch.utils.data import IterableDataset

    from taas_magic.data.dataset import as_data_loader, keeps_dataset
    from taas_magic.data.generators import find_generators

    name = _registered[id(loader)].name or "loader"
    loader = as_data_loader(loader)
    path = next(find_generators(loader.dataset), None)
    if path is None:
        return
    kept = f'the dataset of loader "{name}" has a random generator of its own ({path})'
    if not isinstance(loader.dataset, IterableDataset):
        warnings.warn(
            f"{kept}. It is not seeded for each batch, so its numbers depend on --cpus. Draw from "
            "torch, numpy.random or random, which are seeded, or seed it in __getitem__",
            stacklevel=3,
        )
    elif keeps_dataset(loader) and not _has_set_epoch(loader.dataset):
        warnings.warn(
            f"{kept}. Every epoch begins with a copy of the registered dataset, so all epochs are "
            "equal: give the dataset a method set_epoch(epoch) that seeds the generator",
            stacklevel=3,
        )
