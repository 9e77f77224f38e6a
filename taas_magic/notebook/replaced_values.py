"""Tell the user which objects of the notebook still use a value that `--out` has replaced.

`--out model` gives the notebook a new model. An optimizer that the notebook has made for the old
model would go on to change the old model, without any error.
"""

import sys
from collections.abc import Collection, Mapping
from typing import Any

from taas_magic.errors import listed

_MAX_LISTED = 10


def note_on_users(
    namespace: Mapping[str, Any], old: Mapping[str, Any], noted: Collection[str]
) -> str:
    """Return a note that names the notebook's objects which use old values; "" if there are none.

    The objects are modules, optimizers and learning-rate schedulers of torch.

    Args:
        namespace: The notebook's variables, by name, after `--out` has replaced some of them.
        old: The variables of `--out`, with their values before the run.
        noted: Further names to leave out. After a successful run, these are the names that the cell
            uses: if it has changed such a value, another note says so.
    """
    replaced = {
        name: _ids_of_parts(value)
        for name, value in old.items()
        if name in namespace and namespace[name] is not value
    }
    users: list[str] = []
    used: set[str] = set()
    for name, value in namespace.items():
        if name in old or name in noted or name.startswith("_"):
            continue
        parts = _ids_of_parts(value)
        found = [it for it, was in replaced.items() if not parts.isdisjoint(was)]
        if found:
            users.append(name)
            used.update(found)
    if not users:
        return ""
    them, plural = ("it", "s") if len(users) == 1 else ("them", "")
    values = "value" if len(used) == 1 else "values"
    return (
        f"note: --out has replaced {listed(sorted(used), _MAX_LISTED)}, but "
        f"{listed(users, _MAX_LISTED)} still use{plural} the old {values}. Create {them} again\n"
    )


def _ids_of_parts(value: Any) -> set[int]:
    """Return the ids of the parameters that a torch object uses, and of its optimizer.

    The result is empty for any object that is no module, optimizer or learning-rate scheduler.
    """
    if "torch" not in sys.modules:
        return set()
    import torch

    try:
        match value:
            case torch.nn.Module():
                return {id(parameter) for parameter in value.parameters()}
            case torch.optim.Optimizer():
                groups = value.param_groups
                return {id(value), *(id(it) for group in groups for it in group["params"])}
            case torch.optim.lr_scheduler.LRScheduler():
                return _ids_of_parts(value.optimizer)
    except Exception:  # a class of the user may raise anything
        return set()
    return set()
