"""What the kernel, the ranks and Flower's processes of a federation agree on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
        signing_key: Its key.
        key: The Control API's.
        per_host: What each SuperNode finds in `context.node_config`, by the host's name.
        config: What the apps find in `context.run_config`.
    """

    certificate: str
    signing_key: str = field(repr=False)
    key: str = field(repr=False)
    per_host: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
