"""What Flower's own processes load of ours: the SuperLink that asks for a key, the notebook's apps.

`python -m taas_magic.federation.flower` is Flower's `flower-superlink`, whose Control API asks for
a key: whoever may start runs there has code run on all hosts. Of Flower's own ways to ask who
calls, only its enterprise edition has one. So the class that lets everybody in is replaced here, in
a process that does nothing else.

`flower:server_app` and `flower:client_app` are the notebook's apps. The processes that load them
are neither ranks nor their forks. As the children that a rank starts by spawn, they find the
notebook's names in the run's payload (`host.cell_main`).
"""

import functools
import hmac
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SERVER_APP, CLIENT_APP = "taas_server_app", "taas_client_app"
"""What the notebook's two apps are called among the names that travel."""

KEY_FILE = "TAAS_FEDERATION_KEY"
"""The environment variable that names the file with the Control API's key."""

RESULT = "TAAS_FEDERATION_RESULT"
"""The environment variable that names the file for what the ServerApp's main returns."""


@dataclass(frozen=True)
class Terms:
    """What all hosts of a federation know.

    Attributes:
        certificate: What the SuperLink's certificate is signed by, as PEM.
        per_host: What each SuperNode finds in `context.node_config`, by the host's name.
        config: What the apps find in `context.run_config`.
    """

    certificate: str
    signing_key: str = field(repr=False)
    key: str = field(repr=False)
    per_host: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def __getattr__(name: str) -> Any:
    """Return `server_app` or `client_app` (PEP 562)."""
    if name == "client_app":
        return _names()[CLIENT_APP]
    if name == "server_app":
        return _keeping(_names()[SERVER_APP])
    raise AttributeError(name)


@functools.cache
def _names() -> dict[str, Any]:
    from taas_magic.host.cell_main import PAYLOAD, load

    names = sys.modules["__main__"].__dict__
    load(Path(os.environ[PAYLOAD]), names)
    return names


def _keeping(app: Any) -> Any:
    """Return the ServerApp; what its main returns is written for rank 0, as Flower drops it."""
    import cloudpickle

    main = app._main
    if main is not None:

        @app.main()
        def keep(grid: Any, context: Any) -> None:
            value = main(grid, context)
            Path(os.environ[RESULT]).write_bytes(cloudpickle.dumps(value))

    return app


def main() -> None:
    """Run the SuperLink with the command line's arguments until a signal ends it."""
    from flwr.common.constant import ACCESS_TOKEN_KEY
    from flwr.supercore.auth.typing import AccountInfo
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

    class KeyPlugin(NoOpControlAuthnPlugin):
        def validate_tokens_in_metadata(
            self, metadata: Sequence[tuple[str, str | bytes]]
        ) -> tuple[bool, AccountInfo | None]:
            said = str(dict(metadata).get(ACCESS_TOKEN_KEY, ""))
            if not hmac.compare_digest(said.encode(), key):
                return False, None
            proved: tuple[bool, AccountInfo | None] = super().validate_tokens_in_metadata(metadata)
            return proved

    key = Path(os.environ[KEY_FILE]).read_bytes()
    program = vars(importlib.import_module("flwr.superlink.cli.flower_superlink"))
    program["load_control_authn_plugin"] = KeyPlugin
    program["flower_superlink"]()


if __name__ == "__main__":
    main()
