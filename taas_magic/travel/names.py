"""Which paths may travel between a store and its mirrors. Pure.

A path is relative, its parts are joined by `/`, and it is checked on both sides: a host may be
hostile to the notebook, and the notebook's tree may hold names that a host cannot have.
"""

import unicodedata
from collections.abc import Iterator

MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 3500
"""Below PATH_MAX (4096), so that a mirror's own folder fits before it."""


def why_unsafe(path: str) -> str:
    """Why a path may not travel; "" when it may."""
    if why := why_astray(path):
        return why
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    too_long = len(encoded) > MAX_PATH_BYTES
    if too_long or any(len(part) > MAX_NAME_BYTES for part in encoded.split(b"/")):
        return "its name is too long"
    return ""


def why_astray(path: str) -> str:
    """Why a path cannot be walked inside a tree; "" when it can."""
    if not path:
        return "it has no name"
    if "\0" in path:
        return "a NUL in its name"
    if path.startswith("/"):
        return "an absolute path"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "its path leads elsewhere"
    return ""


def shown(path: str) -> str:
    """A path as it can be printed and sent, whatever bytes its name is made of."""
    return path.encode(errors="backslashreplace").decode()


class Cases:
    """Finds paths that a file system which does not tell upper from lower case would take for one.

    Of two such paths the first one known is kept.
    """

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def clash(self, path: str) -> str:
        """The known path that this one differs from by case alone; "", and it is known, if none."""
        prefixes = list(_prefixes(path))
        for prefix in prefixes:
            other = self._known.get(_folded(prefix), prefix)
            if other != prefix:
                return other
        self._known.update((_folded(prefix), prefix) for prefix in prefixes)
        return ""

    def forget(self, path: str) -> None:
        """Forgets a path that is gone; what lies below it must be forgotten on its own."""
        self._known.pop(_folded(path), None)


def _prefixes(path: str) -> Iterator[str]:
    """`a`, `a/b` and `a/b/c` for `a/b/c`."""
    at = path.find("/")
    while at >= 0:
        yield path[:at]
        at = path.find("/", at + 1)
    yield path


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", path).casefold()
