"""Options of a call that share their names with parameters of the user's function."""

import inspect
from collections.abc import Callable, Collection
from typing import Any

from taas_magic.errors import UsageError


def refuse_shared_names(what: str, function: Callable[..., Any], given: Collection[str]) -> None:
    """Check that no option that the user gave is a parameter of the function, too.

    Such a keyword argument could mean the option or the parameter, and only one gets it.

    Args:
        what: The call that has the options, such as "taas.run".
        function: The user's function.
        given: Names of the options that the user gave.

    Raises:
        UsageError: An option is a parameter, too, and no `functools.partial` has set it.
    """
    try:
        names = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function written in C may have no signature
        return
    names -= set(getattr(function, "keywords", ()))
    if shared := sorted(names & set(given)):
        raise UsageError(
            f"{name_of(function)} has a parameter `{shared[0]}`, which is an option of {what}, "
            f"too. Give the function its value first: functools.partial(function, {shared[0]}=...)"
        )


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name for messages."""
    return getattr(function, "__name__", type(function).__name__)
