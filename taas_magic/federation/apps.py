"""The notebook's ServerApp and ClientApp, as Flower's processes load them: `apps:server_app`.

These processes are neither ranks nor their forks. As the children that a rank starts by spawn, they
find the notebook's names in the run's payload (`host.cell_main`).
"""

import functools
import os
import sys
from pathlib import Path
from typing import Any

import cloudpickle

from taas_magic.federation.terms import CLIENT_APP, RESULT, SERVER_APP
from taas_magic.host.cell_main import PAYLOAD, load


def __getattr__(name: str) -> Any:
    """`server_app` and `client_app` (PEP 562)."""
    if name == "client_app":
        return _names()[CLIENT_APP]
    if name == "server_app":
        return _keeping(_names()[SERVER_APP])
    raise AttributeError(name)


@functools.cache
def _names() -> dict[str, Any]:
    names = sys.modules["__main__"].__dict__
    load(Path(os.environ[PAYLOAD]), names)
    return names


def _keeping(app: Any) -> Any:
    """The ServerApp; what its main returns is written down for rank 0, as Flower drops it."""
    main = app._main
    if main is not None:

        @app.main()
        def keep(grid: Any, context: Any) -> None:
            value = main(grid, context)
            Path(os.environ[RESULT]).write_bytes(cloudpickle.dumps(value))

    return app
