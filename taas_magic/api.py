"""The public names: what `import taas` gives, in any process, without torch or Dask."""

import sys
from typing import TYPE_CHECKING, Any

from taas_magic.journal import RunRecord, runs

if TYPE_CHECKING:
    from taas_magic.publish import save
    from taas_magic.run import Run

    last_run: Run | None

__all__ = ["RunRecord", "last_run", "runs", "save"]


def __getattr__(name: str) -> Any:
    """`last_run`, the newest run that this kernel started (None before the first), and `save`.

    What `save` needs is imported when it is asked for: the kernel imports this module while the
    notebook's folder, which may hold a `random.py`, still comes before the standard library.
    """
    if name == "last_run":
        return getattr(sys.modules.get("taas_magic.launch"), "last_run", None)
    if name == "save":
        from taas_magic.publish import save

        return save
    raise AttributeError(f"module 'taas' has no attribute {name!r}; it has: {', '.join(__all__)}")
