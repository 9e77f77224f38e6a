"""taas-magic's public names under the short name: `import taas; taas.runs()`."""

from typing import Any

from taas_magic import api
from taas_magic.api import (
    RunRecord,
    get_registered_data_loaders_names,
    get_worker_info,
    is_registered,
    register,
    registered,
    runs,
    unregister,
    unregistered,
)

__all__ = [
    "RunRecord",
    "get_registered_data_loaders_names",
    "get_worker_info",
    "is_registered",
    "last_run",
    "register",
    "registered",
    "runs",
    "save",
    "unregister",
    "unregistered",
]


def __getattr__(name: str) -> Any:
    return getattr(api, name)
