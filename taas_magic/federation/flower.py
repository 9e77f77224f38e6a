"""Our code in Flower's own processes: a SuperLink that requires a key, and the notebook's apps.

`python -m taas_magic.federation.flower` is Flower's `flower-superlink` with a Control API that
requires a key. A client of this API can run code on all hosts, and Flower's free edition accepts
every client.

`flower:server_app` and `flower:client_app` are the notebook's apps. An app process is not a fork of
a rank. So it loads the apps from the run's payload.
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

KEY_FILE = "TAAS_FEDERATION_KEY"
"""Name of the environment variable with the path of the file that holds the Control API's key."""

RESULT = "TAAS_FEDERATION_RESULT"
"""Name of the environment variable with the path to which the ServerApp's result is written."""


@dataclass(frozen=True)
class FederationSettings:
    """The settings of a federation. taas-magic sends them to all hosts of the federation.

    Attributes:
        certificate: The federation's own CA certificate, as PEM. It signs the SuperLink's
            certificate.
        signing_key: The private key of `certificate`, as PEM.
        key: The secret that a client must send to the SuperLink's Control API.
        per_host: Settings of each host's SuperNode (`context.node_config`), by the host's name.
        config: Settings of the apps (`context.run_config`).
    """

    certificate: str
    signing_key: str = field(repr=False)
    key: str = field(repr=False)
    per_host: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def __getattr__(name: str) -> Any:
    """Return the module attribute `server_app` or `client_app`.

    Python calls this function (PEP 562) when Flower looks for one of the apps. The first call loads
    both apps. The returned ServerApp saves its result (`_with_saved_result`).

    Raises:
        AttributeError: `name` is a different name.
    """
    if name == "client_app":
        return _load_apps()[1]
    if name == "server_app":
        return _with_saved_result(_load_apps()[0])
    raise AttributeError(name)


@functools.cache
def _load_apps() -> tuple[Any, Any]:
    """Return the notebook's ServerApp and ClientApp, loaded from the payload of the run.

    Further calls return the same objects.
    """
    from taas_magic.capture.work import FunctionWork
    from taas_magic.host.cell_main import PAYLOAD, load

    work = load(Path(os.environ[PAYLOAD]), sys.modules["__main__"].__dict__)
    assert isinstance(work, FunctionWork)
    _, server_app, client_app = work.args
    return server_app, client_app


def _with_saved_result(app: Any) -> Any:
    """Make a ServerApp write the return value of its main function to a file; return the app.

    This is necessary because Flower itself discards the value. The environment variable `RESULT`
    names the file. If the app has no main function, do not change the app.
    """
    import cloudpickle

    main = app._main
    if main is not None:

        @app.main()
        def keep(grid: Any, context: Any) -> None:
            value = main(grid, context)
            Path(os.environ[RESULT]).write_bytes(cloudpickle.dumps(value))

    return app


def main() -> None:
    """Run Flower's SuperLink until a signal ends it. Flower's own code reads the command line.

    First replace Flower's authentication, so that the Control API accepts only clients that send
    the federation's key.
    """
    from flwr.common.constant import ACCESS_TOKEN_KEY
    from flwr.supercore.auth.typing import AccountInfo
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

    class KeyPlugin(NoOpControlAuthnPlugin):
        def validate_tokens_in_metadata(
            self, metadata: Sequence[tuple[str, str | bytes]]
        ) -> tuple[bool, AccountInfo | None]:
            token = str(dict(metadata).get(ACCESS_TOKEN_KEY, ""))
            if not hmac.compare_digest(token.encode(), key):
                return False, None
            proved: tuple[bool, AccountInfo | None] = super().validate_tokens_in_metadata(metadata)
            return proved

    key = Path(os.environ[KEY_FILE]).read_bytes()
    program = vars(importlib.import_module("flwr.superlink.cli.flower_superlink"))
    program["load_control_authn_plugin"] = KeyPlugin
    program["flower_superlink"]()


if __name__ == "__main__":
    main()
