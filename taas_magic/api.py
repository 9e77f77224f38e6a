"""The public names: what `import taas` gives, in any process, without torch or Dask."""

import sys
from typing import TYPE_CHECKING, Any

from taas_magic.journal import RunRecord, runs

if TYPE_CHECKING:
    from taas_magic.run import Run

    last_run: Run | None

__all__ = ["RunRecord", "last_run", "runs"]


def __getattr__(name: str) -> Any:
    """`last_run`: the newest run that this kernel started; None before the first."""
    if name == "last_run":
        return getattr(sys.modules.get("taas_magic.launch"), "last_run", None)
    raise AttributeError(f"module 'taas' has no attribute {name!r}; it has: {', '.join(__all__)}")
