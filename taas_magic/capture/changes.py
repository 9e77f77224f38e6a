"""Find the notebook's values that a cell has changed in rank 0.

Such a change does not reach the notebook. So if a run has changed values, the user gets one note
with their names. A value is not compared if the comparison would cost too much or would run the
user's code.
"""

import functools
import hashlib
import pickle
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

from taas_magic.capture.modules import is_shipped
from taas_magic.capture.reducers import LruCache
from taas_magic.errors import listed

_BUDGET = 10_000
"""Limit on the cost of digesting all captured values once.

The values are digested twice: before the cell and after the cell. Each time, the full limit is
available. The cost counts objects and bytes, not time. Digesting up to the limit takes about 10 ms.
"""

_TENSOR_COST = 10
_OBJECT_COST = 3
_BYTES_PER_COST = 200
_WHOLE_BYTES = 4096
"""Size in bytes up to which all elements of a tensor or an array count for the digest."""

_SAMPLES = 64
"""Approximate number of elements that are digested if a tensor or array exceeds `_WHOLE_BYTES`."""

_PLAIN = (int, float, complex, bool, str, bytes, tuple, list, dict, set, frozenset, type(None))
_BY_PICKLE = {"collections", "datetime", "pathlib", "decimal", "fractions", "pandas"}
_BY_PICKLE |= {"types", "argparse", "numpy"}
"""Packages whose objects are compared by their ordinary pickles."""

_BY_ATTRIBUTES = ("torch.amp.", "torch.optim.", "torchvision.transforms.")
"""Beginnings of the names of library modules whose objects are compared by their attributes."""

_MAX_LISTED = 10
"""Maximum number of names in the note about changed values.

The note may have this many classes, this many parts of loaders, and this many other values.
"""


State = tuple[Any, ...]


class ChangeDetector:
    """Detector of captured values that a cell changes.

    The constructor digests the values, so it must be called before the cell runs. After the cell,
    `notes` digests the values again and compares the digests. If digesting all values would cost
    more than `_BUDGET`, the last values in `values` are not compared. Modules, and names that begin
    with an underscore, are never compared.

    Args:
        values: The notebook's values by name, small values first.
        out: Values of `--out`, such as "loss@all", by the variable's name. The new values of these
            variables return to the notebook, so they are not compared. But classes are compared,
            because the notebook keeps its own class.
        stores: Names that the cell, or a captured function, sets or deletes. After the cell, such a
            name may refer to a new object. The detector ignores the new object, and checks whether
            the cell changed the old object in place. If the old object allows no weak reference
            (for example, a list), the detector does not check the name.
        updates: Those names in `stores` that a captured function sets, or whose new value the cell
            computes from the old value (`total += 1`). If the old value of such a name is an array
            or tensor, a number, a string, bytes, None or a built-in container, the rule of `stores`
            does not apply: the detector compares the old value with the new value of the name.
        parts: Name of the registered loader for each variable whose value is a part of the loader,
            such as the loader's dataset. For these variables, the note has another text.
        is_call: Whether `taas.run` calls a function. The note then names the argument `out` instead
            of the flag `--out`.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        out: Mapping[str, str],
        stores: Collection[str],
        updates: Collection[str],
        parts: Mapping[str, str] | None = None,
        is_call: bool = False,
    ) -> None:
        self._parts, self._out, self._is_call = parts or {}, out, is_call
        returned = [name for name in out if not isinstance(values.get(name), type)]
        self._known = {id(part) for name in returned for part in _value_and_parts(values.get(name))}
        self._before: dict[str, bytes] = {}
        self._held: dict[str, Callable[[], Any]] = {}
        budget = _Budget()
        for name, value in values.items():
            if (
                name in returned
                or name.startswith("_")
                or issubclass(type(value), types.ModuleType)
            ):
                continue
            is_data = type(value) in _PLAIN or _is_array(value)
            is_set_anew = name in stores and not (name in updates and is_data)
            if is_set_anew:  # the cell will assign another object to the name
                with suppress(TypeError):  # a list, for example, allows no weak reference
                    self._held[name] = weakref.ref(value)
            if not is_set_anew or name in self._held:
                described = _digest_of_content(value, self._known, budget)
                if described is not None:
                    self._before[name] = described

    def notes(self, namespace: Mapping[str, Any]) -> list[str]:
        """Return a list with one note that names the changed values; empty if none changed.

        For ordinary values, the note suggests a value for `--out`: the present value, followed by
        the changed names. For classes, the note tells the user to set the changed attributes in the
        notebook. For a part of a registered loader, the note says that the loader's batches do not
        change.
        """
        names = self._changed(namespace)
        classes = [name for name in names if isinstance(namespace[name], type)]
        fed = [name for name in names if name in self._parts]
        values = [name for name in names if name not in classes and name not in fed]
        parts = [self._sentence(values)] if values else []
        parts += [_sentence_of_part(name, self._parts[name]) for name in fed[:_MAX_LISTED]]
        if classes:
            named = ", ".join(classes[:_MAX_LISTED])
            parts.append(
                f"class attributes of {named} were changed in the ranks and stay there: set them "
                "in the notebook"
            )
        return ["; ".join(parts)] if parts else []

    def _sentence(self, names: list[str]) -> str:
        was, them = ("was", "it") if len(names) == 1 else ("were", "them")
        flag = ",".join([*self._out.values(), *names[:_MAX_LISTED]])
        how = f'out="{flag}"' if self._is_call else f"--out {flag}"
        return (
            f"{listed(names, _MAX_LISTED)} {was} changed in the ranks, not in the notebook; "
            f"{how} returns {them}"
        )

    def _changed(self, namespace: Mapping[str, Any]) -> list[str]:
        """Return the names whose values have changed since the constructor was called.

        The constructor holds a weak reference to the old object of some names (`_held`), because
        the cell assigns another object to these names. For such a name, digest the old object. For
        any other name, digest the value in `namespace`. A name has changed if the new digest
        differs from the constructor's digest.

        Leave out a name in these cases:

        - The old object no longer exists.
        - `namespace` does not have the name.
        - Digesting fails, or would exceed the cost limit.
        """
        found = []
        budget = _Budget()
        for name, before in self._before.items():
            held = self._held.get(name)
            if held is None and name not in namespace:
                continue
            value = namespace[name] if held is None else held()
            after = _digest_of_content(value, self._known, budget)
            if after is not None and after != before and not (held and value is None):
                found.append(name)
        return found


def _is_array(value: Any) -> bool:
    """Return whether a value is exactly a `torch.Tensor` or a `numpy.ndarray`, no subclass."""
    return f"{type(value).__module__}.{type(value).__name__}" in ("torch.Tensor", "numpy.ndarray")


def _sentence_of_part(name: str, loader: str) -> str:
    return (
        f"{name} was changed in the ranks, but not in the fetchers of loader {loader}: its batches "
        f"stay the same. Change {name} in the notebook, before the cell. To set the epoch, call "
        f"{loader}.sampler.set_epoch or {loader}.dataset.set_epoch"
    )


class _TooCostlyError(Exception):
    """Raised if digesting the values would exceed the cost limit `_BUDGET`."""


class _Budget:
    """Counter of the cost that digesting may still spend; starts at `_BUDGET`."""

    def __init__(self) -> None:
        self._left = _BUDGET

    def spend(self, cost: int) -> None:
        self._left -= cost
        if self._left < 0:
            raise _TooCostlyError


class _Digest:
    """File-like object that keeps only a digest of the bytes written to it."""

    def __init__(self, budget: _Budget) -> None:
        self._hash, self._budget = hashlib.blake2b(), budget

    def write(self, data: Any) -> None:
        self._budget.spend(memoryview(data).nbytes // _BYTES_PER_COST)
        self._hash.update(data)

    def value(self) -> bytes:
        return self._hash.digest()


def _digest_of_content(value: Any, known: Collection[int], budget: _Budget) -> bytes | None:
    """Return a digest of a value's content; None if digesting raises or exceeds `budget`.

    Args:
        known: Ids of objects that `--out` returns to the notebook. The digest does not depend on
            the content of these objects.
        budget: Cost that may still be spent. This function subtracts the cost of this value.
    """
    digest = _Digest(budget)
    try:
        _DescriptionPickler(digest, known, budget).dump(value)
    except Exception:  # pickling parts of a value may raise anything
        return None
    return digest.value()


class _DescriptionPickler(pickle.Pickler):
    """Pickler that writes only those parts of a value that are compared (`_description`).

    The pickler runs none of the user's code. Its output goes to a `_Digest` and is never loaded.
    """

    def __init__(self, digest: _Digest, known: Collection[int], budget: _Budget) -> None:
        super().__init__(digest, protocol=5)
        self._known, self._budget = known, budget
        self._described: dict[int, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object to the parts that `_description` returns. Called by pickle.

        First subtract the cost of the object from the budget. If `--out` returns the object to the
        notebook, a constant replaces the parts. Another constant replaces them if the object is a
        part of its own parts: pickle calls this method again for an object only in this case.

        Returns:
            The function `_placeholder` and its arguments, which are the object's parts or the
            constant. NotImplemented if pickle's own rules apply.

        Raises:
            _TooCostlyError: The cost of all objects so far exceeds the limit `_BUDGET`.
        """
        is_array = type(obj).__module__.partition(".")[0] in ("torch", "numpy")
        self._budget.spend(_TENSOR_COST if is_array else _OBJECT_COST)
        if obj is _placeholder:
            return NotImplemented
        if id(obj) in self._known:
            return _placeholder, ("comes back",)
        if id(obj) in self._described:
            return _placeholder, ("described above",)
        described = _description(obj)
        if described is NotImplemented:
            return NotImplemented
        self._described[id(obj)] = obj  # as long as the object exists, no other one has its id
        return _placeholder, described


def _placeholder(*described: Any) -> None:
    """Do nothing: a placeholder for all constructors in the output of `_DescriptionPickler`.

    Nothing unpickles the output, so nothing calls this function.
    """


def _description(obj: Any) -> Any:
    """Return the parts of an object that are compared before and after the cell.

    The parts depend on the class. For a tensor, they are its dtype, its shape and a sample of its
    elements. For an instance of a user's class or of a class in `_BY_ATTRIBUTES`, they are its
    attributes. Of an estimator of scikit-learn, private numbers are left out. Of a learning-rate
    scheduler, the optimizer is left out. Modules and optimizers of torch, functions, classes, enum
    members and numpy arrays have rules of their own. Of a random generator of numpy, only the name
    of the class counts.

    Returns:
        The name of the object's class, and the compared parts. For a class that this function does
        not know, only the name, so that no change of the object is noticed. NotImplemented means
        that the object's ordinary pickle is compared.
    """
    import torch

    kind = type(obj)
    name = f"{kind.__module__}.{kind.__qualname__}"
    match obj:
        case torch.Tensor():
            return name, *_parts_of_tensor(obj)
        case torch.nn.Module():
            return name, *_parts_of_module(obj)
        case torch.optim.Optimizer():
            groups = [{**group, "params": None} for group in obj.param_groups]
            params = [it for group in obj.param_groups for it in group["params"]]
            tensors = [_parts_of_tensor(param) for param in params]
            return name, groups, tensors, [obj.state.get(param) for param in params]
        case torch.optim.lr_scheduler.LRScheduler():
            return name, {at: value for at, value in vars(obj).items() if at != "optimizer"}
        case types.FunctionType():
            return name, *_parts_of_function(obj)
        case types.MethodType():
            return name, obj.__func__, obj.__self__
        case functools.partial():
            return name, obj.func, obj.args, obj.keywords
        case type():
            return (name, obj.__qualname__, _attributes_of_class(obj))
        case Enum():
            return name, obj.name
        case _ if kind is LruCache:
            return name, obj.__wrapped__
        case _ if name == "numpy.ndarray":
            return name, obj.dtype.str, obj.shape, _sample_of_array(obj)
        # Drawing random numbers changes the generator. Such a change is not worth a note.
        case _ if kind.__module__.startswith("numpy.random"):
            return (name,)
        case _ if kind.__module__.partition(".")[0] in _BY_PICKLE:
            return NotImplemented
        case _ if kind.__module__.startswith("sklearn."):
            if not hasattr(obj, "__dict__"):  # an object in C, such as a decision tree
                return NotImplemented
            # Private numbers may be ids of objects, which differ in each process.
            own = vars(obj).items()
            return name, {at: it for at, it in own if at[0] != "_" or not isinstance(it, int)}
        case _ if is_user_class(kind) or kind.__module__.startswith(_BY_ATTRIBUTES):
            return name, _attributes(obj), *_elements(obj)
    return (name,)


def is_user_class(kind: type) -> bool:
    """Return whether a class is defined in the notebook or in the project's modules."""
    return kind.__module__ == "__main__" or is_shipped(kind.__module__)


def _parts_of_tensor(tensor: Any) -> State:
    """Return the parts of a tensor that are compared.

    These are the tensor's dtype and shape, whether it is a parameter that requires a gradient, and
    the bytes of its elements, or of some elements of a large tensor. A sparse, quantized or meta
    tensor has no bytes. The result is empty for a parameter that a lazy module has not initialized
    yet.
    """
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        return ()
    is_trained = isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
    kind = str(tensor.dtype), tuple(tensor.shape), is_trained
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return kind
    flat = tensor.detach().reshape(-1)
    if flat.numel() * flat.element_size() > _WHOLE_BYTES:
        flat = flat[:: flat.numel() // _SAMPLES]
    return *kind, flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _sample_of_array(array: Any) -> Any:
    flat = array.reshape(-1) if array.flags.c_contiguous else array.ravel(order="K")
    if flat.nbytes > _WHOLE_BYTES:
        flat = flat[:: max(1, flat.size // _SAMPLES)]
    return flat.tolist() if flat.dtype.hasobject else flat.tobytes()


def _parts_of_module(module: Any) -> State:
    """Return the parts of a torch module that are compared.

    These are the module's own parameters and buffers, its children, and its other public
    attributes. The attribute `training`, and values that can be called, are left out.
    """
    own = {
        name: value
        for name, value in vars(module).items()
        if name[0] != "_" and name != "training" and not callable(value)
    }
    parameters = dict(module.named_parameters(recurse=False))
    buffers = dict(module.named_buffers(recurse=False))
    return parameters, buffers, dict(module.named_children()), own


def _parts_of_function(function: types.FunctionType) -> State:
    """Return the parts of a function that are compared.

    For a function of the notebook or the project's modules, the parts are its name, the contents of
    its closure, its attributes and its defaults. For any other function, the only part is its name.
    """
    if function.__module__ != "__main__" and not is_shipped(function.__module__ or ""):
        return (function.__qualname__,)
    contents = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the variable of the closure is not set yet
            contents.append(cell.cell_contents)
    defaults = (function.__defaults__, function.__kwdefaults__)
    return function.__qualname__, contents, vars(function), defaults


def _attributes_of_class(cls: type) -> dict[str, Any]:
    if not is_user_class(cls) or issubclass(cls, Enum):
        return {}
    plain = {name: v for name, v in vars(cls).items() if not name.startswith("__")}
    return {name: v for name, v in plain.items() if type(v) in _PLAIN}


def _attributes(obj: Any) -> dict[str, Any]:
    """Return an instance's attributes, including those in slots.

    Values that a `cached_property` has stored are left out: such a value appears when the cell
    first reads it, and reading is no change. For the same reason, attributes that are None, and
    open files and similar objects of libraries, are left out: a dataset, for example, may open its
    file when the cell first reads from it.
    """
    kind = type(obj)
    found = dict(getattr(obj, "__dict__", {}))
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, functools.cached_property):
                found.pop(name, None)
            elif isinstance(member, types.MemberDescriptorType):
                with suppress(AttributeError):  # the slot is not set
                    found[name] = member.__get__(obj, kind)
    return {name: it for name, it in found.items() if it is not None and not _can_be_closed(it)}


def _can_be_closed(value: Any) -> bool:
    return hasattr(type(value), "close") and not is_user_class(type(value))


def _elements(obj: Any) -> Iterator[Any]:
    """Yield one list with all elements of a list, tuple, dict, set or frozenset.

    For a dict, the elements are pairs of key and value. An instance of a subclass of these types is
    handled in the same way. For any other object, yield nothing.
    """
    kinds: tuple[Any, ...] = (list, tuple, dict, set, frozenset)
    for kind in kinds:
        if isinstance(obj, kind):
            yield list(kind.items(obj) if kind is dict else kind.__iter__(obj))


def _value_and_parts(value: Any) -> Iterator[Any]:
    """Yield a value; for a torch module, also yield its submodules, parameters and buffers."""
    import torch

    yield value
    if isinstance(value, torch.nn.Module):
        yield from (*value.modules(), *value.parameters(), *value.buffers())
