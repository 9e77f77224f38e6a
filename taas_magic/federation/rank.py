"""The function that a federation calls on each rank.

The kernel pickles the function by its name, so this module imports little. `programs.py` imports
most of Flower, which the kernel does not need.
"""

from typing import Any

from taas_magic.federation.flower import FederationSettings


def run_on_rank(settings: FederationSettings, server_app: Any, client_app: Any) -> Any:
    """Run Flower's programs on this host until the ServerApp has ended.

    The arguments, the result and the errors are those of `programs.run_programs`.
    """
    from taas_magic.federation.programs import run_programs

    return run_programs(settings, server_app, client_app)
