"""Where the project is: paths in it travel as the notebook has them, and mean a host's copy there.

Ranks and fetchers of a host that does not share the project have both places in their environment.
A path that is a text may be anything, and stays as it is; path objects are paths, and so is what a
zarr store of the file system has.
"""

import os
from pathlib import PurePath
from typing import Any

_HOME, _COPY = "TAAS_PROJECT", "TAAS_PROJECT_COPY"


def environ(home: str, copy: str) -> dict[str, str]:
    """What a host's processes have in their environment where `copy` stands for the project."""
    return {_HOME: home, _COPY: copy}


def home() -> str:
    """The project on the notebook's machine; "" where this process does not work in a copy."""
    return os.environ.get(_HOME, "")


def reduce_path(path: PurePath) -> tuple[Any, ...]:
    return _path, (type(path), _moved(str(path), _COPY, _HOME))


def _path(kind: type[PurePath], text: str) -> PurePath:
    return kind(_moved(text, _HOME, _COPY))


def reduce_directory_store(store: Any) -> tuple[Any, ...]:
    """Reduces a `DirectoryStore` of zarr 2, whose path is a text."""
    state = {**vars(store), "path": _moved(store.path, _COPY, _HOME)}
    return _directory_store, (type(store), state)


def _directory_store(kind: Any, state: dict[str, Any]) -> Any:
    store = kind.__new__(kind)
    vars(store).update(state, path=_moved(state["path"], _HOME, _COPY))
    return store


def _moved(path: str, source: str, target: str) -> str:
    """The path below `target` where it is below `source`; both are names of the environment."""
    at, to = os.environ.get(source), os.environ.get(target)
    if not at or not to or not (path == at or path.startswith(at.rstrip("/") + "/")):
        return path
    return to + path[len(at) :]
