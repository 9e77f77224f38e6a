"""Flower's `flower-superlink`, whose Control API asks for a key.

Whoever may start runs there has code run on all hosts. Of Flower's own ways to ask who calls, only
its enterprise edition has one: so the class that lets everybody in is replaced here, in a process
that does nothing else.
"""

import hmac
import importlib
import os
from collections.abc import Sequence
from pathlib import Path

from taas_magic.federation.terms import KEY_FILE


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
