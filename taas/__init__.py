"""taas-magic's public names under the short name: `import taas; taas.runs()`."""

from typing import Any

from taas_magic import api
from taas_magic.api import RunRecord, runs

__all__ = ["RunRecord", "last_run", "runs"]


def __getattr__(name: str) -> Any:
    return getattr(api, name)
