"""The function that a federation calls on each rank.

The kernel pickles the function by its name, so this module must not import `programs`, which
imports most of Flower.
"""

from typing import Any

from taas_magic.federation.flower import FederationSettings


def run_on_rank(settings: FederationSettings, server_app: Any, client_app: Any) -> Any:
    """Call `programs.run_programs`, which runs Flower's programs until the ServerApp has ended."""
    from taas_magic.federation.programs import run_programs

    return run_programs(settings, server_app, client_app)
