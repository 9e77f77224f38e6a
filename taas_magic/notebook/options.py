"""Check for options of a call that have the name of a parameter of the user's function."""

import inspect
from collections.abc import Callable, Collection
from typing import Any

from taas_magic.capture.work import function_name
from taas_magic.errors import UsageError


def refuse_shared_names(what: str, function: Callable[..., Any], given: Collection[str]) -> None:
    """Check that no option that the user gave has the name of a parameter of the function.

    A keyword argument with such a name could be meant for either, but only the option receives it.

    Args:
        what: The call that has the options, such as "taas.run".
        function: The user's function.
        given: Names of the options that the user gave.

    Raises:
        UsageError: An option has the name of a parameter that no `functools.partial` has set.
    """
    try:
        names = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function written in C may have no signature
        return
    names -= set(getattr(function, "keywords", ()))
    if shared := sorted(names & set(given)):
        raise UsageError(
            f"{function_name(function)} has a parameter `{shared[0]}`, but {what} has an option of "
            "the same name. To set the parameter, pass functools.partial(function, "
            f"{shared[0]}=...) instead of the function"
        )
