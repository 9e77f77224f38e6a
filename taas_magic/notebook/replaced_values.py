"""Tell the user which objects of the notebook still use a value that `--out` has replaced.

`--out model` gives the notebook a new model. An optimizer that the notebook has made for the old
model would go on to change the old model, without any error.
"""

import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from taas_magic.capture.changes import is_user_class
from taas_magic.errors import listed

_MAX_LISTED = 10

_MAX_OBJECTS, _MAX_ELEMENTS = 1_000, 100
"""Maximum number of objects to look at in one value, and in one list, tuple or dict."""


def note_on_users(namespace: Mapping[str, Any], old: Mapping[str, Any]) -> str:
    """Return a note that names the notebook's variables which use old values; "" if there are none.

    A variable uses an old value if both have a parameter or an optimizer of torch in common
    (`_ids_of_parts`). If a further variable still refers to the old value itself, nothing is wrong,
    because the user has kept the value, together with the objects that use it.

    Args:
        namespace: The notebook's variables, by name, after `--out` has replaced some of them.
        old: The variables of `--out`, with their values before the run.
    """
    names = [name for name in namespace if name[:1] != "_" and name not in ("In", "Out")]
    kept = {id(namespace[name]) for name in names}
    replaced = {
        name: _ids_of_parts(value)
        for name, value in old.items()
        if name in namespace and id(value) not in kept
    }
    if not any(replaced.values()):
        return ""
    users: list[str] = []
    used: set[str] = set()
    for name in names:
        if name in old:
            continue
        parts = _ids_of_parts(namespace[name])
        found = [it for it, was in replaced.items() if not parts.isdisjoint(was)]
        if found:
            users.append(name)
            used.update(found)
    if not users:
        return ""
    it, them, plural = ("it", "it", "s") if len(users) == 1 else ("they", "them", "")
    values = "value" if len(used) == 1 else "values"
    return (
        f"note: --out has replaced {listed(sorted(used), _MAX_LISTED)}, but "
        f"{listed(sorted(users), _MAX_LISTED)} still use{plural} the old {values}. "
        f"If {it} should use the new {values}, create {them} again, or add {them} to --out if the "
        f"cell uses {them}\n"
    )


def _ids_of_parts(value: Any) -> set[int]:
    """Return the ids of the parameters and optimizers of torch that a value uses."""
    if "torch" not in sys.modules:
        return set()
    import torch

    found: set[int] = set()
    seen: set[int] = set()
    left = [value]
    while left and len(seen) < _MAX_OBJECTS:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        is_tensor = isinstance(each, torch.Tensor)
        is_parameter = is_tensor and each.requires_grad and each.is_leaf
        if is_parameter or isinstance(each, torch.optim.Optimizer):
            found.add(id(each))
        if not is_tensor:
            try:
                left += _parts_of(each)
            except Exception:  # a class of the user may raise anything
                continue
    return found


def _parts_of(value: Any) -> Iterator[Any]:
    """Yield the objects that a value directly uses.

    These are the parameters of a module or an optimizer, the optimizer of a learning-rate
    scheduler, the first elements of a list, tuple or dict, and the attributes of a user's object.
    """
    import torch

    match value:
        case torch.nn.Module():
            yield from value.parameters()
        case torch.optim.Optimizer():
            for group in value.param_groups:
                yield from group["params"]
        case torch.optim.lr_scheduler.LRScheduler():
            yield value.optimizer
        case list() | tuple():
            yield from value[:_MAX_ELEMENTS]
        case dict():
            yield from itertools.islice(value.values(), _MAX_ELEMENTS)
        case _ if is_user_class(type(value)):
            yield from vars(value).values()
